"""Draft tokens of a step: counted by progress, accepted as a prefix, restored by request."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from draft_orders import order_of

from vlbatch import InputBatch, NumpyBackend
from vlbatch.errors import InvalidField, InvalidSchedule
from vlbatch.fields import cumulative, per_draft
from vlbatch.speculative import accept_greedy, logit_tokens, num_drafts, num_logits

MIXED = {
    "plain": (4, 6, 1),  # a decode without drafts
    "spec": (4, 9, 4),  # a decode with three
    "tail": (10, 6, 4),  # the last four tokens of a prompt: k + 1, but no decode
    "chunk": (20, 4, 4),
    "first": (4, 0, 4),  # a whole prompt
    "part": (20, 0, 4),
}


def test_regions_come_from_progress() -> None:
    """``k + 1`` tokens of a decode are decode work; ``k + 1`` tokens of a prompt are not."""
    order = order_of(MIXED, num_drafts=3)

    assert order.req_ids == ("plain", "spec", "tail", "chunk", "first", "part")
    assert order.regions == (2, 2, 2)


@pytest.mark.parametrize("policy", ["split", "two", "arrival"])
def test_counts(policy: Any) -> None:
    """Decodes have drafts and logits for each; a prompt's end has one logit, other chunks none."""
    order = order_of(MIXED, num_drafts=3, policy=policy)
    drafts = dict(zip(order.req_ids, num_drafts(order).tolist(), strict=True))
    logits = dict(zip(order.req_ids, num_logits(order).tolist(), strict=True))

    assert drafts == {"plain": 0, "spec": 3, "tail": 0, "chunk": 0, "first": 0, "part": 0}
    assert logits == {"plain": 1, "spec": 4, "tail": 1, "chunk": 0, "first": 1, "part": 0}


def test_logit_tokens() -> None:
    """Logits are wanted at all tokens of a decode and at the last of a prompt."""
    order = order_of(MIXED, num_drafts=3)

    assert order.query_start.tolist() == [0, 1, 5, 9, 13, 17, 21]
    assert logit_tokens(order).tolist() == [0, 1, 2, 3, 4, 8, 16]


def test_offsets_are_rebuilt() -> None:
    """Offsets over the counts of a step are a cumulative field: built from the order, never moved.

    FastDeploy I4 and I17: ``cu_seqlens_q_output`` and ``cu_batch_token_offset`` swapped as rows.
    """
    batch: InputBatch[Any] = InputBatch(
        [cumulative("logit_start", num_logits), per_draft("draft_tokens")],
        backend=NumpyBackend(), capacity=4, max_model_len=99, num_drafts=2,
    )  # fmt: skip
    for req_id, prompt_len in (("a", 9), ("b", 1), ("c", 1)):
        batch.add(req_id, prompt_len=prompt_len)
    for scheduled, starts in (
        ({"a": 3, "b": 1, "c": 1}, [0, 0, 1, 2, 2]),
        ({"a": 3, "b": 3, "c": 1}, [0, 1, 4, 4, 4]),
        ({"c": 2, "a": 3}, [0, 2, 3, 3, 3]),
    ):
        order = batch.apply(batch.plan(scheduled))
        batch.advance(order)
        assert batch["logit_start"].tolist() == starts


def test_accepts_the_longest_right_prefix() -> None:
    """Accepted are the drafts before the first wrong one, row by row, none included."""
    order = order_of({"a": (2, 5, 4), "b": (2, 5, 1), "c": (2, 5, 3), "d": (2, 5, 2)})
    #              a: 3 drafts    b   c: 2       d: 1
    token_ids = np.array([9, 1, 2, 3, 9, 9, 4, 5, 9, 6])
    sampled = np.array([1, 7, 3, 8, 0, 4, 5, 8, 0, 6])

    assert accept_greedy(order, token_ids, sampled).tolist() == [1, 0, 2, 0]


def test_prompt_chunks_accept_nothing() -> None:
    """Tokens of a prompt are no drafts, and the rows after them are not shifted by them."""
    order = order_of({"d": (2, 5, 3), "p": (9, 0, 9), "q": (9, 0, 4)}, policy="arrival")
    token_ids = np.array([9, 1, 2, *[0] * 9, *[0] * 4])

    assert accept_greedy(order, token_ids, np.array([1, 2, 3, 0])).tolist() == [2, 0, 0]


def test_arrays_of_another_step_are_refused() -> None:
    """A wrong number of tokens or of sampled tokens is an error, not another row's drafts."""
    order = order_of({"a": (2, 5, 3)})
    with pytest.raises(InvalidField, match=r"token_ids has 2 entries.*3"):
        accept_greedy(order, np.zeros(2, dtype=np.int64), np.zeros(3, dtype=np.int64))
    with pytest.raises(InvalidField, match=r"sampled has 1 entries.*3"):
        accept_greedy(order, np.zeros(3, dtype=np.int64), np.zeros(1, dtype=np.int64))


def test_random_drafts(seed: int) -> None:
    """Any mix of rows and draft counts accepts what a loop over each row accepts."""
    choose = random.Random(seed)
    for _ in range(200):
        rows = {}
        for number in range(choose.randint(1, 6)):
            prompt_len = choose.randint(1, 9)
            computed = choose.randint(0, 12)
            most = prompt_len - computed if computed < prompt_len else 5
            rows[f"r{number}"] = (prompt_len, computed, choose.randint(1, most))
        order = order_of(rows, policy=choose.choice(["split", "two", "arrival"]))
        token_ids: list[int] = []
        sampled: list[int] = []
        expected = []
        for req_id in order.req_ids:
            prompt_len, computed, scheduled = rows[req_id]
            tokens = [choose.randint(0, 1) for _ in range(scheduled)]
            token_ids += tokens
            if computed < prompt_len:
                sampled += [choose.randint(0, 1)] * (computed + scheduled == prompt_len)
                expected.append(0)
                continue
            choices = [choose.randint(0, 1) for _ in tokens]
            sampled += choices
            right = 0
            while right < scheduled - 1 and tokens[right + 1] == choices[right]:
                right += 1
            expected.append(right)
        got = accept_greedy(order, np.array(token_ids), np.array(sampled, dtype=np.int64))

        assert got.tolist() == expected, f"VLBATCH_SEED={seed}"


def test_progress_takes_accepted_drafts() -> None:
    """Progress grows by one and the accepted drafts; the next step starts behind them."""
    batch: InputBatch[Any] = InputBatch(
        [], backend=NumpyBackend(), capacity=2, max_model_len=99, num_drafts=3
    )
    for req_id in "ab":
        batch.add(req_id, prompt_len=2)
    batch.advance(batch.apply(batch.plan({"a": 2, "b": 2})))
    batch.advance(batch.apply(batch.plan({"a": 4, "b": 2})), {"a": 1, "b": 0})

    assert (batch.computed_of("a"), batch.computed_of("b")) == (4, 3)
    order = batch.apply(batch.plan({"a": 4, "b": 4}))
    assert order.token_indices.tolist() == [4, 5, 6, 7, 3, 4, 5, 6]
    with pytest.raises(InvalidSchedule, match="accepted 4"):
        batch.advance(order, {"a": 4})
    with pytest.raises(InvalidSchedule, match="got 5 tokens"):
        batch.plan({"a": 5})


def test_confirming_one_step_keeps_the_next_in_flight() -> None:
    """Confirmation of a step does not take back what later steps have counted."""
    batch: InputBatch[Any] = InputBatch(
        [], backend=NumpyBackend(), capacity=2, max_model_len=99, num_drafts=3
    )
    batch.add("a", prompt_len=8)
    for _ in range(2):
        batch.advance(batch.apply(batch.plan({"a": 3})))
    assert not batch.confirm("a", 3, in_flight=3)
    assert batch.progress.counts(batch.slot_of("a")) == (8, 6, 3)
    with pytest.raises(InvalidSchedule, match="3 in flight"):
        batch.confirm("a", 4, in_flight=3)
    assert not batch.confirm("a", 6)
    batch.advance(batch.apply(batch.plan({"a": 2})))
    batch.advance(batch.apply(batch.plan({"a": 4})))

    assert batch.confirm("a", 7, in_flight=4), "what was computed from a rejected token goes too"
    assert batch.progress.counts(batch.slot_of("a")) == (8, 7, 7)
