"""The witness: one request by itself, token by token, without the batch state."""

from __future__ import annotations

import numpy as np
import pytest
from hash_engine import HashEngine, encode_item
from made_runs import make_item, make_prompt

from vlbatch import build_runs
from vlbatch.runner.alone import answer_alone, rotary_positions


class Recording(HashEngine):
    """Keeps the inputs of every forward."""

    def __init__(self, *args):
        super().__init__(*args)
        self.inputs = []

    def forward(self, inputs):
        self.inputs.append(inputs)
        return super().forward(inputs)


def answer(engine, prompt, *, max_tokens=4, max_model_len=50):
    return answer_alone(
        engine,
        prompt,
        max_tokens=max_tokens,
        eos_token_id=HashEngine.eos_token_id,
        max_model_len=max_model_len,
        tokens_per_second=2.0,
        kv_blocks=10,
    )


def test_inputs_by_hand():
    """The prompt is one step with all features; then one token a step, one position further."""
    engine = Recording(10, 5, 10**9)
    item = make_item("x", (1, 1, 2))
    prompt = make_prompt(2, item, 1)

    result = answer(engine, prompt, max_tokens=3)

    prefill, first, second = engine.inputs
    assert prefill.token_ids.tolist() == prompt.token_ids.tolist()
    # text 0, 1; the item at base 2 is 1 high and 2 wide; text goes on behind its largest
    assert prefill.positions.T.tolist() == [[0] * 3, [1] * 3, [2, 2, 2], [2, 2, 3], [4] * 3]
    assert prefill.feature_tokens.tolist() == [2, 3]
    np.testing.assert_array_equal(prefill.features[0], encode_item(item.payload, 4))
    assert [(i.token_ids.tolist(), i.positions.tolist(), i.computed.tolist())
            for i in (first, second)] == [
        ([result.tokens[0]], [[5]] * 3, [5]),
        ([result.tokens[1]], [[6]] * 3, [6]),
    ]  # fmt: skip
    assert [i.logit_tokens.tolist() for i in engine.inputs] == [[4], [0], [0]]
    assert len(first.feature_tokens) == len(first.features) == 0
    assert [int(scores.argmax()) for scores in result.logits] == result.tokens


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "eos_one_in", "count"),
    [(1, 50, 10**9, 1), (3, 50, 10**9, 3), (9, 6, 10**9, 2), (9, 5, 10**9, 1), (9, 50, 1, 1)],
)
def test_where_it_ends(max_tokens, max_model_len, eos_one_in, count):
    """It ends by ``max_tokens``, ``max_model_len`` (a prompt of 5 here) or the end token."""
    result = answer(
        HashEngine(10, 5, eos_one_in),
        make_prompt(5),
        max_tokens=max_tokens,
        max_model_len=max_model_len,
    )

    assert len(result.tokens) == len(result.logits) == count


@pytest.mark.parametrize("case", range(30))
def test_positions_equal_the_runs_of_the_batch(seed, case):
    """Token by token and as runs, two ways to the same positions of a Qwen2.5-VL."""
    rng = np.random.default_rng([seed, case])
    parts: list[object] = []
    for n in range(rng.integers(1, 5)):
        grid = (int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(1, 4)))
        video = bool(rng.integers(2))
        seconds = [None, 0.5, 1.3][rng.integers(3)]
        item = make_item(f"x{n}", grid if video else (1, *grid[1:]), video=video, seconds=seconds)
        parts += [int(rng.integers(0, 4)), item]
    prompt = make_prompt(1, *parts, int(rng.integers(0, 4)))

    runs = build_runs("qwen2_5_vl", prompt.items, tokens_per_second=2.0)

    expected = rotary_positions(prompt, 2.0)
    positions = runs.positions(0, len(prompt.token_ids)).T.tolist()
    assert positions == [list(p) for p in expected], f"VLBATCH_SEED={seed}"
