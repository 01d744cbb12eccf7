"""The bench measures methods that are right, and writes what it says. Nothing here is timed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from vlbatch.bench.cli import bench_command
from vlbatch.bench.peers import CycleSwaps, IndexSelect, PairwiseSwaps, RowMethod, SortGather
from vlbatch.bench.reorder import Ours, run_reorder
from vlbatch.bench.workload import Workload

METHODS: dict[str, Callable[[Workload], RowMethod]] = {
    "ours": Ours,
    "pairwise": lambda work: PairwiseSwaps(work, pytest.importorskip("torch").tensor),
    "cycles": CycleSwaps,
    "sort": SortGather,
    "select": lambda work: IndexSelect(work, np.array, lambda a, i: a[i]),
}


@pytest.mark.parametrize("name", METHODS)
def test_decodes_first_and_nobody_lost(name: str) -> None:
    """Every method orders any classes: decodes in front, each request in one row."""
    method = METHODS[name](Workload.make(24))
    rng = np.random.default_rng(3)
    for _ in range(6):
        decode = rng.integers(0, 2, 24).astype(np.bool_)
        method.step(decode)

        flags = decode[method.rows].tolist()
        assert flags == sorted(flags, reverse=True)
        assert sorted(method.rows) == list(range(24))


def test_cycle_swaps_move_the_fields_along() -> None:
    """A field's values follow their request through cycles of swaps."""
    method = CycleSwaps(Workload.make(16))
    for array in (*method._small, *method._wide):
        array.reshape(16, -1)[:, 0] = np.arange(16) % 2
    method.step(np.arange(16) % 3 == 0)

    for array in (*method._small, *method._wide):
        assert array.reshape(16, -1)[:, 0].tolist() == [r % 2 for r in method.rows]


def test_reorder_reports_every_peer() -> None:
    """The outcome has the peers' medians over ours."""
    result = run_reorder(16, rounds=2)

    ratios = result["ratios"]
    assert isinstance(ratios, dict)
    assert {"v1", "v2"} <= ratios.keys() <= {"fastdeploy", "v1", "v2", "index_select"}
    assert all(ratio > 0 for ratio in ratios.values())


def test_command_writes_json(tmp_path: Path) -> None:
    """``bench step --json`` writes machine and timings, and prints a table."""
    out = tmp_path / "out.json"
    result = CliRunner().invoke(bench_command, ["step", "--num-reqs", "8", "--json", str(out)])

    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text(encoding="utf-8"))
    assert {"num_reqs", "timings", "machine"} <= written.keys()
    assert "whole step" in result.output
