"""Random workloads under random settings: every request gets in the batch what it gets alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hash_engine import HashEngine
from made_runs import (
    Workload,
    assert_consistent,
    assert_nothing_left,
    make_item,
    make_prompt,
    make_workload,
    random_workload,
    run,
)

from vlbatch.errors import EncodeFailed, MediaError, PromptTooLong
from vlbatch.runner import Prompt, Runner, StepInputs

NUM_GROUPS, RUNS_PER_GROUP = 10, 25


class Watch:
    """Checks a run after each step, and that it comes to an end."""

    def __init__(self, work: Workload) -> None:
        prompts = work.prompts.values()
        tokens = sum(len(p.token_ids) for p in prompts if isinstance(p, Prompt))
        tokens += sum(request.max_tokens for request in work.requests)
        # In every step the earliest arrival, which is never preempted, computes a token or more.
        self.most_steps = tokens

    def __call__(self, runner: Runner) -> None:
        assert_consistent(runner)
        assert runner.counters.steps <= self.most_steps, "no end in sight"


def events_of(runner: Runner) -> dict[str, int]:
    cache = runner.vl.features.cache.counters
    return {
        "reorders": runner.counters.reorders,
        "condenses": runner.counters.condenses,
        "rows moved": runner.counters.rows_moved,
        "cut items": len(runner.counters.cut_items),
        "preemptions": runner.scheduler.num_preemptions,
        "hits": cache.hits,
        "evicted": cache.evicted,
    }


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_batched_equals_alone(seed, group):
    """All requests finish, with the tokens and logits that they get alone; nothing is left."""
    for number in range(RUNS_PER_GROUP):
        case = f"VLBATCH_SEED={seed}, {group=}, {number=}"
        work = random_workload(np.random.default_rng([seed, group, number]))

        outcome = run(work, on_step=Watch(work))

        assert outcome.mismatches == [], case
        assert [r.error for r in outcome.results.values() if r.error] == [], case
        assert outcome.verified == [request.req_id for request in work.requests], case
        calls = outcome.engine.encode_calls
        assert all(sum(rows) <= work.settings.encode_rows for rows in calls), case
        assert_nothing_left(outcome.runner)


def test_random_workloads_cause_every_event():
    """The workloads above are no idle ones: a fixed forty of them cause each event often."""
    events: Counter[str] = Counter()
    for number in range(40):
        work = random_workload(np.random.default_rng([0, number]))
        events.update(events_of(run(work).runner))

    assert min(events.values()) >= 10, events


@pytest.mark.parametrize("group", range(4))
def test_troubled_requests_fail_alone(seed, group):
    """A refused prompt or an item that cannot be encoded ends its request and no other."""
    for number in range(RUNS_PER_GROUP):
        case = f"VLBATCH_SEED={seed}, {group=}, {number=}"
        rng = np.random.default_rng([seed, 99, group, number])
        work = random_workload(rng, one_size=True)
        engine = work.engine()
        expected = {}
        broken = f"content {rng.integers(6)}"
        for req_id, prompt in work.prompts.items():
            trouble = rng.integers(6)
            if trouble == 0:
                work.prompts[req_id] = MediaError("unreadable", req_id=req_id)
                expected[req_id] = ("refused", MediaError)
            elif trouble == 1:
                work.prompts[req_id] = make_prompt(work.settings.max_model_len + 1)
                expected[req_id] = ("refused", PromptTooLong)
            elif any(item.key == broken for item in prompt.items):
                expected[req_id] = ("failed", EncodeFailed)
            for item in prompt.items:
                if item.key == broken:
                    engine.broken[item.payload.patches.tobytes()] = RuntimeError("no such kernel")

        outcome = run(work, engine=engine, on_step=Watch(work))

        ended = {r: (x.status, type(x.error)) for r, x in outcome.results.items() if x.error}
        assert ended == expected, case
        assert outcome.mismatches == [], case
        assert len(outcome.verified) == len(work.requests) - len(expected), case
        assert_nothing_left(outcome.runner)


class Tampering(HashEngine):
    """Changes the inputs of one forward."""

    def __init__(self, at: int, change, *sizes: int) -> None:
        super().__init__(*sizes)
        self._at = at
        self._change = change

    def forward(self, inputs: StepInputs):
        return super().forward(self._change(inputs) if self.num_forwards == self._at else inputs)


def swap_rows_of_features(inputs: StepInputs) -> StepInputs:
    rows = np.concatenate(inputs.features)
    rows[[0, 1]] = rows[[1, 0]]
    return replace(inputs, features=[rows])


def move_one_position(axis: int):
    def change(inputs: StepInputs) -> StepInputs:
        positions = inputs.positions.copy()
        positions[axis, -1] += 1
        return replace(inputs, positions=positions)

    return change


def swap_blocks(inputs: StepInputs) -> StepInputs:
    tables = inputs.block_tables.copy()
    tables[:, [0, 1]] = tables[:, [1, 0]]
    return replace(inputs, block_tables=tables)


def change_token(inputs: StepInputs) -> StepInputs:
    token_ids = inputs.token_ids.copy()
    token_ids[0] = 7 if token_ids[0] != 7 else 8
    return replace(inputs, token_ids=token_ids)


@pytest.mark.parametrize(
    ("at", "change"),
    [
        (0, swap_rows_of_features),
        (0, move_one_position(0)),
        (1, move_one_position(1)),
        (1, move_one_position(2)),
        (1, swap_blocks),
        (0, change_token),
        (1, change_token),
    ],
)
def test_any_wrong_input_is_noticed(at, change):
    """One wrong feature row, position, block or token in one step is a mismatch."""
    work = make_workload(
        {"a": make_prompt(3, make_item("x", (1, 2, 2)), 9)},
        max_tokens=3, chunk=12, block_size=4, kv_blocks=8, cache_bytes=1024,
    )  # fmt: skip
    sizes = (work.settings.kv_blocks, work.settings.block_size)

    assert run(work).mismatches == []
    outcome = run(work, engine=Tampering(at, change, *sizes))

    assert [m.req_id for m in outcome.mismatches] == ["a"]
