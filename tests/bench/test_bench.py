"""The bench measures methods that are right. Nothing here is timed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

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
    ratios = run_reorder(16, rounds=2).facts["ratios"]

    assert isinstance(ratios, dict)
    assert {"v1", "v2"} <= ratios.keys() <= {"fastdeploy", "v1", "v2", "index_select"}
    assert all(ratio > 0 for ratio in ratios.values())
