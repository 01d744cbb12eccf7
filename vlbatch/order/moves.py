"""The moves from one batch order to the next, and the pure function that finds the fewest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int64]

OrderPolicy: TypeAlias = Literal["split", "two", "arrival"]
"""``split`` = decode, extend, prefill; ``two`` = decode, then the rest; ``arrival`` = no regions.
Requests without tokens in this step come last in each."""

DECODE, EXTEND, PREFILL, IDLE, HOLE = range(5)
"""Classes of a row, from progress and never from the number of scheduled tokens."""

_REGION_OF_CLASS: dict[OrderPolicy, IntArray] = {
    "split": np.array([0, 1, 2, 3, HOLE]),
    "two": np.array([0, 1, 1, 3, HOLE]),
    "arrival": np.array([0, 0, 0, 3, HOLE]),
}


_NO_ROWS: IntArray = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class RowMoves:
    """How every row-resident table gets from the previous order to this one.

    All arrays are int64 and read-only. "Old" rows number the previous order, with its holes and
    newcomers; "new" rows number this order.

    Attributes:
        sources: ``[num_moves]`` old rows, read before any is written.
        destinations: ``[num_moves]`` new rows.
        vacated: ``[num_vacated]`` rows that held something and now hold no request.
        new_row_of: ``[num_old_rows]`` old row -> new row, -1 for a hole.
        num_moved: moves of requests that were already in the previous order; the others place
            newcomers.
    """

    sources: IntArray
    destinations: IntArray
    vacated: IntArray
    new_row_of: IntArray
    num_moved: int

    @property
    def is_identity(self) -> bool:
        """Whether no row changes."""
        return not len(self.sources) and not len(self.vacated)


class Follower(Protocol):
    """A table in row order that is kept outside the batch and moves with it."""

    def follow(self, moves: RowMoves) -> None:
        """Apply the moves once, in place: those of a step, or one that only vacates rows."""
        ...


class SideTable(list[object]):
    """A Python list by row that follows the batch: one entry a row, ``default`` where empty."""

    def __init__(self, num_rows: int, default: object = None) -> None:
        super().__init__([default] * num_rows)
        self._default = default

    def follow(self, moves: RowMoves) -> None:
        """Move entries by reference; vacated rows drop theirs."""
        move_list(self, moves, self._default)


def move_list(rows: list[object], moves: RowMoves, default: object) -> None:
    """Permute a list of objects by row, in place; vacated rows get ``default``."""
    taken = [rows[source] for source in moves.sources.tolist()]
    for row in moves.vacated.tolist():
        rows[row] = default
    for row, value in zip(moves.destinations.tolist(), taken, strict=True):
        rows[row] = value


def vacate_rows(start: int, stop: int, num_old_rows: int) -> RowMoves:
    """Moves that clear rows ``start:stop``, whose requests left, and move nothing."""
    new_row_of = np.arange(num_old_rows)
    new_row_of[start:stop] = -1
    return _moves(np.arange(0), np.arange(0), np.arange(start, stop), new_row_of, 0)


def _moves(
    sources: IntArray,
    destinations: IntArray,
    vacated: IntArray,
    new_row_of: IntArray,
    num_moved: int,
) -> RowMoves:
    for array in (sources, destinations, vacated, new_row_of):
        array.flags.writeable = False
    return RowMoves(sources, destinations, vacated, new_row_of, num_moved)


def _is_sorted(region: IntArray) -> bool:
    """Whether every row lies in its region and none is a hole."""
    return not len(region) or bool(region[-1] < HOLE and (region[1:] >= region[:-1]).all())


def _identity(num_rows: int) -> RowMoves:
    return _moves(_NO_ROWS, _NO_ROWS, _NO_ROWS, np.arange(num_rows), 0)


def place_rows(
    classes: IntArray,
    newcomer_rank: IntArray,
    *,
    policy: OrderPolicy = "split",
    stable: bool = False,
) -> RowMoves:
    """Find the moves that close all holes and bring every row into its region.

    A row that lies in its region already stays; every other row must move in any correct order,
    and one move each suffices, so the number of moved rows is the minimum. With ``stable`` the
    requests of a region also keep their relative order, newcomers last by rank; that order is
    unique, and only rows whose number changes move.

    Args:
        classes: int64 ``[num_old_rows]`` old row -> ``DECODE`` .. ``IDLE``, or ``HOLE``.
        newcomer_rank: int64 ``[num_old_rows]`` old row -> rank of admission for a request that
            was not in the previous order, -1 for one that was.
        policy: which classes share a region.
        stable: keep relative order.
    """
    region = _REGION_OF_CLASS[policy][classes]
    if _is_sorted(region) and (not stable or newcomer_rank.max(initial=-1) < 0):
        return _identity(len(region))
    counts = np.bincount(region, minlength=HOLE + 1)[:HOLE]
    num_new_rows = int(counts.sum())
    wanted = np.repeat(np.arange(HOLE), counts)
    if stable:
        rank = np.where(newcomer_rank < 0, np.arange(len(region)), len(region) + newcomer_rank)
        sources = np.lexsort((rank, region))[:num_new_rows]
        destinations = np.arange(num_new_rows)
        changed = sources != destinations
        sources, destinations = sources[changed], destinations[changed]
    else:
        in_place = region[:num_new_rows] == wanted
        destinations = np.flatnonzero(~in_place)
        misplaced = region != HOLE
        misplaced[:num_new_rows] &= ~in_place
        sources = np.flatnonzero(misplaced)
        sources = sources[np.argsort(region[sources], kind="stable")]
    new_row_of = np.where(region == HOLE, -1, np.arange(len(region)))
    new_row_of[sources] = destinations
    vacated = np.arange(num_new_rows, len(region))
    num_moved = int(np.count_nonzero(newcomer_rank[sources] < 0))
    return _moves(sources, destinations, vacated, new_row_of, num_moved)
