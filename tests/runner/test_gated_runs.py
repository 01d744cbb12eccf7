"""The prefill gate in a run: prompts that arrive together prefill together; decodes never wait."""

from __future__ import annotations

from typing import Any

import numpy as np
from hash_engine import HashEngine
from made_runs import (
    MadePrompts,
    Workload,
    assert_consistent,
    assert_nothing_left,
    make_prompt,
    make_workload,
)

from vlbatch.runner import Runner, StepInputs
from vlbatch.runner.gate import PrefillGate


class Recording(HashEngine):
    """Keeps the order of each step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps: list[dict[str, int]] = []

    def forward(self, inputs: StepInputs) -> Any:
        order = inputs.order
        assert order is not None
        self.steps.append(dict(zip(order.req_ids, order.scheduled.tolist(), strict=True)))
        return super().forward(inputs)


class StepClock:
    """Seconds that pass with the steps, and while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def tick(self, runner: Runner) -> None:
        self.now += 1
        assert_consistent(runner)


def gated(work: Workload, num: int, wait: float) -> tuple[Runner, Recording, StepClock]:
    clock = StepClock()
    settings = work.settings
    engine = Recording(settings.kv_blocks, settings.block_size, 10**9)
    prompts: Any = MadePrompts(work.prompts)
    gate = PrefillGate(num, wait, clock, clock.sleep)
    runner = Runner(engine, prompts, settings, gate=gate)
    runner.run(work.requests, on_step=clock.tick)
    assert_nothing_left(runner)
    assert all(r.status == "finished" for r in runner.results)
    return runner, engine, clock


def eighties(count: int, arrivals: dict[str, int] | None = None, **more: Any) -> Workload:
    prompts = {f"p{n}": make_prompt(80, seed=n) for n in range(count)}
    return make_workload(
        {**more, **prompts}, max_tokens=4, arrivals=arrivals, max_num_seqs=8, chunk=80,
        token_budget=340, kv_blocks=100, block_size=8, max_model_len=100,
    )  # fmt: skip


def test_four_prompts_are_one_prefill_step():
    """Four prompts of 80 tokens that arrive together run as one step of 320 prefill tokens."""
    runner, engine, clock = gated(eighties(4), 4, 0.05)

    assert engine.steps[0] == {"p0": 80, "p1": 80, "p2": 80, "p3": 80}
    assert all(step == dict.fromkeys(step, 1) for step in engine.steps[1:])
    assert runner.scheduler.gate is not None
    counters = runner.scheduler.gate.counters
    assert (counters.released, counters.by_count, counters.by_deadline) == (4, 1, 0)
    assert (counters.longest_wait_seconds, clock.slept) == (0, [])


def test_decodes_are_never_held():
    """While prompts wait for company a decode goes on in every step, and then beside them."""
    arrivals = {"p0": 1, "p1": 2, "p2": 2, "p3": 3}
    work = eighties(4, arrivals, first=make_prompt(5))
    _, engine, _ = gated(work, 4, 2.0)

    # "first" waits alone until its deadline, as nothing else is there; the others come meanwhile.
    assert engine.steps[0]["first"] == 5
    decoding = [step for step in engine.steps if "first" in step]
    assert decoding == engine.steps[: len(decoding)]
    assert len(decoding) == 4


def test_held_beside_a_decode():
    """A lone prompt waits for its deadline in steps of others, and is released then."""
    prompts = {"first": make_prompt(5), "second": make_prompt(6), "late": make_prompt(80)}
    work = make_workload(
        prompts, max_tokens=8, arrivals={"late": 2}, chunk=80, token_budget=340, kv_blocks=100,
        block_size=8, max_model_len=100,
    )  # fmt: skip
    runner, engine, clock = gated(work, 2, 3.0)

    first = next(number for number, step in enumerate(engine.steps) if "late" in step)
    assert first == 5  # arrives before step 2, a second a step
    assert engine.steps[:6] == [
        {"first": 5, "second": 6}, *[{"first": 1, "second": 1}] * 4,
        {"first": 1, "second": 1, "late": 80},
    ]  # fmt: skip
    assert runner.scheduler.gate is not None
    assert runner.scheduler.gate.counters.by_deadline == 1
    assert runner.scheduler.gate.counters.longest_wait_seconds == 3.0
    assert clock.slept == []


def test_waits_no_longer_than_its_deadline():
    """With nothing else to do the run sleeps until the deadline, and does not spin."""
    _, engine, clock = gated(eighties(3), 4, 0.05)

    assert engine.steps[0] == {"p0": 80, "p1": 80, "p2": 80}
    assert clock.slept == [0.05]


def test_preempted_requests_pass(seed):
    """Requests that come back after a preemption do not wait at the gate again."""
    prompts = {f"p{n}": make_prompt(10, seed=n) for n in range(4)}
    work = make_workload(
        prompts, max_tokens=9, max_num_seqs=4, kv_blocks=12, block_size=4, max_model_len=20,
        chunk=10, token_budget=40,
    )  # fmt: skip
    runner, engine, _ = gated(work, 4, 100.0)

    assert runner.scheduler.num_preemptions > 0
    assert runner.scheduler.gate is not None
    assert runner.scheduler.gate.counters.released == 4
    assert np.mean([len(step) for step in engine.steps]) > 1
