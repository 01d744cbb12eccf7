"""Paged index arithmetic against hand-computed slots and a per-token loop."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vlbatch.errors import InvalidField
from vlbatch.runner.inputs import StepInputs
from vlbatch.runner.paged import plan_attention, plan_tokens


def make_inputs(
    lengths: list[int],
    computed: list[int],
    tables: list[list[int]],
    *,
    num_tokens: int | None = None,
) -> StepInputs:
    size = sum(lengths) if num_tokens is None else num_tokens
    return StepInputs(
        token_ids=np.zeros(size, dtype=np.int64),
        positions=np.zeros((3, size), dtype=np.int64),
        query_start=np.cumsum([0, *lengths]).astype(np.int32),
        computed=np.array(computed, dtype=np.int32),
        block_tables=np.array(tables, dtype=np.int32).reshape(len(lengths), -1),
        feature_tokens=np.array([], dtype=np.int64),
        features=[],
        logit_tokens=np.array([], dtype=np.int64),
    )


def test_hand_computed_plan():
    """A decode row, a chunk and another decode row: slots, groups and masks worked out by hand."""
    inputs = make_inputs([1, 3, 1], [2, 3, 4], [[7, -1, -1], [5, 0, -1], [1, 6, 2]])

    plan = plan_attention(inputs, num_blocks=8, block_size=4)

    # row 0 writes token 2; row 1 tokens 3, 4, 5; row 2 token 4
    assert plan.kv_slots.tolist() == [30, 23, 0, 1, 24]
    decode, chunk = plan.groups
    assert decode.tokens.tolist() == [[0], [4]]
    assert decode.context.tolist() == [[28, 29, 30, 30, 30], [4, 5, 6, 7, 24]]
    assert decode.visible.astype(int).tolist() == [[[1, 1, 1, 0, 0]], [[1, 1, 1, 1, 1]]]
    assert chunk.tokens.tolist() == [[1, 2, 3]]
    assert chunk.context.tolist() == [[20, 21, 22, 23, 0, 1]]
    assert chunk.visible[0].astype(int).tolist() == [
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 1],
    ]


@pytest.mark.parametrize("seed", range(20))
def test_plan_equals_a_loop_over_tokens(seed):
    """Each token sees the slots of its request's tokens up to itself, once, in token order."""
    rng = np.random.default_rng(seed)
    num_reqs, block_size = int(rng.integers(1, 9)), int(rng.integers(1, 7))
    lengths = rng.choice([0, 1, 1, 1, 2, 5, 9], num_reqs)
    lengths[0] = max(lengths[0], 1)
    computed = rng.integers(0, 30, num_reqs)
    width = 40 // block_size + 1
    tables = rng.permutation(num_reqs * width).reshape(num_reqs, width)

    inputs = make_inputs(lengths.tolist(), computed.tolist(), tables.tolist())
    plan = plan_attention(inputs, num_blocks=num_reqs * width, block_size=block_size)
    by_token = plan_tokens(inputs, num_blocks=num_reqs * width, block_size=block_size, width=40)

    seen = {}
    for group in plan.groups:
        for row in range(len(group.tokens)):
            for query, token in enumerate(group.tokens[row]):
                seen[int(token)] = group.context[row][group.visible[row, query]].tolist()
    token = 0
    for row in range(num_reqs):
        for index in range(computed[row], computed[row] + lengths[row]):
            slots = [int(tables[row, i // block_size]) * block_size + i % block_size
                     for i in range(index + 1)]  # fmt: skip
            assert seen.pop(token) == slots, f"{seed=} {row=} {index=}"
            assert plan.kv_slots[token] == slots[-1], f"{seed=} {row=} {index=}"
            padded = slots + [slots[-1]] * (40 - len(slots))
            assert by_token.context[token].tolist() == padded, f"{seed=} {row=} {index=}"
            assert by_token.visible[token].tolist() == [i <= index for i in range(40)]
            assert by_token.kv_slots[token] == slots[-1]
            token += 1
    assert seen == {}


def test_a_request_longer_than_the_width():
    """A plan by token holds requests up to its width; a longer one is refused."""
    inputs = make_inputs([1, 2], [0, 4], [[3, -1], [0, 1]])

    plan_tokens(inputs, num_blocks=4, block_size=4, width=6)
    with pytest.raises(InvalidField, match="computed: got a row of 6 tokens, expected at most 5"):
        plan_tokens(inputs, num_blocks=4, block_size=4, width=5)


def test_padding_stays_in_the_rows_own_context():
    """Entries past a row's end repeat a slot of that row, never a slot of another one."""
    inputs = make_inputs([1, 1], [0, 9], [[3, -1, -1], [0, 1, 2]])

    (group,) = plan_attention(inputs, num_blocks=4, block_size=4).groups

    assert set(group.context[0].tolist()) == {12}


@pytest.mark.parametrize(
    ("lengths", "computed", "tables", "message"),
    [
        ([2], [3], [[0]], "block_tables: got row 0 needs 2 blocks for 5 tokens"),
        ([1, 1], [0, 4], [[0, 1], [2, -1]], "block_tables: got row 1, column 1 is block -1"),
        ([1], [0], [[8]], r"block_tables: got row 0, column 0 is block 8, .* \[0, 8\)"),
        ([1, 1], [0, 0], [[3], [3]], "block_tables: got two tokens of the step share a KV slot"),
        ([1], [-1], [[0]], "computed"),
        ([1], [0, 0], [[0]], "computed"),
        ([1], [0], [[0], [1]], "block_tables"),
        ([2, -1, 1], [0, 0, 0], [[0], [1], [2]], r"query_start: .* never fall"),
    ],
)
def test_contradictions_are_refused(lengths, computed, tables, message):
    """Lengths and tables that contradict each other are refused, naming row and column."""
    inputs = make_inputs(lengths, computed, [[0]] * len(lengths))
    inputs = replace(inputs, block_tables=np.array(tables, dtype=np.int32))

    with pytest.raises(InvalidField, match=message):
        plan_attention(inputs, num_blocks=8, block_size=4)


def test_token_count_must_match_the_rows():
    """The rows must cover exactly the step's tokens."""
    inputs = make_inputs([2], [0], [[0]], num_tokens=3)

    with pytest.raises(InvalidField, match=r"query_start: .* 0 to 3 tokens"):
        plan_attention(inputs, num_blocks=8, block_size=4)
