"""Recording the reference runner: its traces replay, and with a fault they name it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import MadePrompts, Workload, make_item, make_prompt, make_workload, random_workload

from vlbatch.replay import replay_file
from vlbatch.runner import Runner, make_faults


def record(work: Workload, path: Path, fault: str | None = None) -> tuple[Runner, int | None]:
    """Run a workload, recorded; returns the step in which the fault was made, too."""
    prompts: Any = MadePrompts(work.prompts)
    faults = make_faults(fault, work.settings)
    runner = Runner(work.engine(), prompts, work.settings, faults=faults, trace=path)
    steps: list[int] = []

    def on_step(runner: Runner) -> None:
        if faults.happened:
            steps.append(runner.counters.steps)

    runner.run(work.requests, on_step=on_step)
    return runner, steps[0] if steps else None


def busy_workload() -> Workload:
    """Images of one size in several requests that come at different times and end early."""
    prompts = {
        f"r{n}": make_prompt(2 + n % 3, make_item(f"image {n}", (1, 2, 3)), 3, seed=n)
        for n in range(8)
    }
    arrivals = {req_id: n // 3 for n, req_id in enumerate(prompts)}
    return make_workload(prompts, max_tokens=9, arrivals=arrivals, chunk=7, max_num_seqs=3)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_honest_run_replays(tmp_path: Path, name: str) -> None:
    """The trace of an honest run replays, with every step in it."""
    runner, _ = record(busy_workload(), tmp_path / name)

    result = replay_file(tmp_path / name)

    assert str(result.divergence) == "None"
    assert result.num_events > runner.counters.steps > 10


def test_random_runs_replay(tmp_path: Path, seed: int) -> None:
    """Traces of random workloads, with preemptions and evictions, replay."""
    for walk in range(15):
        record(random_workload(np.random.default_rng([seed, walk])), tmp_path / "trace.jsonl")

        divergence = replay_file(tmp_path / "trace.jsonl").divergence
        assert divergence is None, f"seed {seed}, walk {walk}: {divergence}"


def test_steps_in_flight_replay(tmp_path: Path, seed: int) -> None:
    """Traces of runs that read outputs one or two steps later replay."""
    for overlap in (1, 2):
        for walk in range(8):
            work = random_workload(np.random.default_rng([seed, overlap, walk]))
            work.settings = replace(work.settings, overlap=overlap)
            record(work, tmp_path / "trace.jsonl")

            divergence = replay_file(tmp_path / "trace.jsonl").divergence
            assert divergence is None, f"seed {seed}, {overlap}, walk {walk}: {divergence}"


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("swap-features", "features"),
        ("shift-features", "features"),
        ("shift-positions", "positions"),
        ("stale-row", "order"),
        ("drop-field:next_token", "order"),
        ("drop-field:block_table", "order"),
    ],
)
def test_fault_is_named(tmp_path: Path, fault: str, what: str) -> None:
    """With a fault the replay ends in the step in which it was made, and says what is wrong."""
    path = tmp_path / "trace.jsonl"
    for walk in range(200):
        _, step = record(random_workload(np.random.default_rng(walk)), path, fault)
        if step is not None:
            break

    divergence = replay_file(path).divergence
    assert divergence is not None, f"walk {walk}"
    assert divergence.what.startswith(what)
    assert divergence.step == step
