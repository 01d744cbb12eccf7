"""What a drafter reads: each request's own tokens, one or more places ahead."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from draft_orders import order_of

from vlbatch.errors import InvalidField
from vlbatch.speculative import (
    DrafterRows,
    clamp_placeholders,
    following_tokens,
    num_drafts,
    shift_tokens,
)
from vlbatch.speculative.shift import UNKNOWN


def ints(*values: Any) -> Any:
    return np.array(values, dtype=np.int64)


STEP = {
    "d": (4, 6, 1),  # a decode
    "s": (4, 9, 4),  # a decode with three drafts
    "m": (20, 4, 3),  # the middle of a prompt
    "e": (3, 0, 3),  # a whole prompt
}
TOKENS = ints(10, 20, 21, 22, 23, 30, 31, 32, 40, 41, 42)
KNOWN = np.arange(4)[:, np.newaxis] * 1000 + np.arange(30)  # slot -> ids of its request


def test_own_last_token_never_the_neighbours() -> None:
    """The last place takes the newly sampled token or the prompt's next one, of its own request."""
    order = order_of(STEP)
    rows = DrafterRows.of(order)
    following = following_tokens(order, KNOWN, ints(11, 24, -9, 43))

    assert order.req_ids == ("d", "s", "m", "e")
    assert following.tolist() == [[11], [24], [2007], [43]]
    assert shift_tokens(rows, TOKENS, following).tolist() == [
        *[11],
        *[21, 22, 23, 24],
        *[31, 32, 2007],
        *[41, 42, 43],
    ]


def test_what_was_handed_out_is_not_changed() -> None:
    """The target's arrays stay as they are, and the drafter's are new."""
    order = order_of(STEP)
    tokens = TOKENS.copy()
    rows = DrafterRows.of(order)
    shifted = shift_tokens(rows, tokens, following_tokens(order, KNOWN, ints(11, 24, -9, 43)))
    clamped = clamp_placeholders(shifted, ints(0), vocab_size=5000)
    before = shifted.copy()
    clamped[:] = 0
    shifted[:] = 0

    assert np.array_equal(tokens, TOKENS)
    assert before[0] == 11
    assert not np.shares_memory(shifted, tokens)


def test_rejected_drafts_are_left_out() -> None:
    """After one accepted draft of three a row has two tokens; the new one follows them."""
    order = order_of(STEP)
    rows = DrafterRows.of(order, ints(0, 1, 0, 0))
    following = following_tokens(order, KNOWN, ints(11, 99, -9, 43))

    assert rows.lengths.tolist() == [1, 2, 3, 3]
    assert rows.places.tolist() == [0, 1, 2, 5, 6, 7, 8, 9, 10]
    assert rows.query_start.tolist() == [0, 1, 3, 6, 9]
    assert shift_tokens(rows, TOKENS, following).tolist() == [
        *[11], *[21, 99], *[31, 32, 2007], *[41, 42, 43],
    ]  # fmt: skip


def test_rows_are_skipped() -> None:
    """A finished or departed row has no token; the others are as without it."""
    order = order_of(STEP)
    rows = DrafterRows.of(order, ints(0, 1, 0, 0), skip=[1, 3])
    following = following_tokens(order, KNOWN, ints(11, 99, -9, 43))

    assert rows.lengths.tolist() == [1, 0, 3, 0]
    assert rows.query_start.tolist() == [0, 1, 1, 4, 4]
    assert shift_tokens(rows, TOKENS, following).tolist() == [11, 31, 32, 2007]


def test_several_modules() -> None:
    """With a shift of k the last k places take what follows, also where a chunk is shorter."""
    order = order_of(STEP)
    rows = DrafterRows.of(order, ints(0, 1, 0, 0))
    following = ints([11, 12, 13], [99, 98, 97], [33, 34, 35], [43, 44, UNKNOWN])

    assert shift_tokens(rows, TOKENS, following[:, :2]).tolist() == [
        *[12], *[99, 98], *[32, 33, 34], *[42, 43, 44],
    ]  # fmt: skip
    assert shift_tokens(rows, TOKENS, following).tolist() == [
        *[13], *[98, 97], *[33, 34, 35], *[43, 44, UNKNOWN],
    ]  # fmt: skip


def test_bad_arguments() -> None:
    """Accept counts out of range and a missing row of following tokens are refused."""
    order = order_of(STEP)
    for count in (-1, 4):
        with pytest.raises(InvalidField, match=r"accepted.*0\.\.3") as caught:
            DrafterRows.of(order, ints(0, count, 0, 0))
        assert caught.value.req_id == "s"
    rows = DrafterRows.of(order)
    for following in (ints([1]), ints(1, 2, 3, 4), np.zeros((4, 0), dtype=np.int64)):
        with pytest.raises(InvalidField, match=r"expected \(4, shift\)"):
            shift_tokens(rows, TOKENS, following)


def test_placeholder_ids_are_clamped() -> None:
    """B23: an id outside the vocabulary is clamped where a feature goes, and nowhere else.

    sgl-project/sglang#27512: the draft model looked sentinels up and read past its table.
    """
    token_ids = ints(1_000_003, 7, 1_000_003, -5, 99)

    assert clamp_placeholders(token_ids, ints(0, 2, 3), vocab_size=100).tolist() == [
        99, 7, 99, 0, 99,
    ]  # fmt: skip
    with pytest.raises(InvalidField, match=r"token 3 of the step has id -5.*\[0, 100\)"):
        clamp_placeholders(token_ids, ints(0, 2), vocab_size=100)
    with pytest.raises(InvalidField, match="token 4") as caught:
        clamp_placeholders(token_ids, ints(0, 2, 3), vocab_size=99, req_ids="abcde")
    assert caught.value.req_id == "e"


def test_random_steps(seed: int) -> None:
    """Any rows, accepts, left-out rows and shifts give each token's successor in its request."""
    choose = random.Random(seed)
    for _ in range(300):
        plan = {}
        for number in range(choose.randint(1, 6)):
            prompt_len, computed = choose.randint(1, 9), choose.randint(0, 12)
            most = prompt_len - computed if computed < prompt_len else 5
            plan[f"r{number}"] = (prompt_len, computed, choose.randint(1, most))
        order = order_of(plan, policy=choose.choice(["split", "two", "arrival"]))
        shift = choose.randint(1, 3)
        skip = [row for row in range(order.num_reqs) if choose.random() < 0.2]
        accepted = np.array([choose.randint(0, d) for d in num_drafts(order).tolist()])
        tokens: list[int] = []
        following: list[list[int]] = []
        expected: list[int] = []
        for row, req_id in enumerate(order.req_ids):
            prompt_len, computed, scheduled = plan[req_id]
            is_decode = computed >= prompt_len
            kept = 1 + int(accepted[row]) if is_decode else scheduled
            whole = [row * 1000 + i for i in range(computed, computed + kept + shift)]
            tokens += whole[:kept] + [-77] * (scheduled - kept)
            following.append(whole[kept:])
            if row not in skip:
                expected += whole[shift:]
        rows = DrafterRows.of(order, accepted, skip=skip)
        got = shift_tokens(rows, np.array(tokens), np.array(following))

        assert got.tolist() == expected, f"VLBATCH_SEED={seed}"
