"""PositionRuns: the packed form, ranges, and memory."""

from __future__ import annotations

import pytest

from vlbatch.errors import InvalidSchedule
from vlbatch.items import Item
from vlbatch.positions import PositionRuns, build_runs
from vlbatch.positions.runs import RUN_DTYPE

RECORDS = [
    (4, 28, 4, 0, -18, 4, 6, 1.0),
    (30, 32, -3, 7, -20, 65535, 3, 1.37),
]


def test_record_layout() -> None:
    """A media run takes 32 bytes, and each number comes back from the field it was packed for."""
    runs = PositionRuns.from_records(3, RECORDS)

    assert RUN_DTYPE.itemsize == 32
    assert runs.nbytes == 64
    assert runs.runs.tolist() == RECORDS
    assert (runs.delta, runs.media_stop) == (-20, 32)


def test_text_only() -> None:
    """Without media a position is the index on every axis, and nothing is stored."""
    runs = PositionRuns.from_records(3, [])

    assert runs.positions(7, 10).tolist() == [[7, 8, 9]] * 3
    assert (runs.delta, runs.media_stop, runs.nbytes) == (0, 0, 0)


def test_records_are_read_only() -> None:
    """The runs of a request cannot be changed after it was admitted."""
    runs = PositionRuns.from_records(3, RECORDS)

    with pytest.raises(ValueError, match="read-only"):
        runs.runs["base"] = 0


def test_positions_belong_to_the_caller() -> None:
    """Writing into returned positions changes no later answer."""
    runs = PositionRuns.from_records(3, RECORDS[:1])
    for start, stop in ((0, 40), (30, 40)):
        expected = runs.positions(start, stop).tolist()
        runs.positions(start, stop)[:] = -1

        assert runs.positions(start, stop).tolist() == expected


@pytest.mark.parametrize("start", [0, 4, 10, 28, 50])
def test_empty_range(start: int) -> None:
    """An empty range has no positions, in text and inside a grid."""
    assert PositionRuns.from_records(3, RECORDS[:1]).positions(start, start).shape == (3, 0)


@pytest.mark.parametrize(("start", "stop"), [(-1, 4), (5, 4)])
def test_impossible_range(start: int, stop: int) -> None:
    """A range that starts before the prompt or ends before it starts is refused."""
    with pytest.raises(InvalidSchedule, match=rf"\[{start}, {stop}\)"):
        PositionRuns.from_records(3, RECORDS).positions(start, stop)


def test_one_run_an_unbroken_item() -> None:
    """An item costs one record, whatever its frames, unless frames are separate or it has holes."""
    video = Item(key="v", modality="video", offset=3, length=24, grid=(6, 2, 2))

    assert len(build_runs("qwen2_vl", [video]).runs) == 1
    assert len(build_runs("qwen3_vl", [video]).runs) == 6
