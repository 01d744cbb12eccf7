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

_REGION_OF_CLASS: dict[OrderPolicy, npt.NDArray[np.int8]] = {
    "split": np.array([0, 1, 2, 3, HOLE], dtype=np.int8),
    "two": np.array([0, 1, 1, 3, HOLE], dtype=np.int8),
    "arrival": np.array([0, 0, 0, 3, HOLE], dtype=np.int8),
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


def vacate_rows(start: int, stop: int, is_hole: npt.NDArray[np.bool_]) -> RowMoves:
    """Moves that clear rows ``start:stop``, whose requests left, and move nothing.

    Args:
        start: first row.
        stop: row behind the last.
        is_hole: bool ``[num_old_rows]``, the others that have no request.
    """
    new_row_of = np.where(is_hole, -1, np.arange(len(is_hole)))
    new_row_of[start:stop] = -1
    return _moves(_NO_ROWS, _NO_ROWS, np.arange(start, stop), new_row_of, 0)


def stay_rows(num_rows: int) -> RowMoves:
    """No moves."""
    return _moves(_NO_ROWS, _NO_ROWS, _NO_ROWS, np.arange(num_rows), 0)


def swap_rows(first: int, second: int, is_hole: npt.NDArray[np.bool_]) -> RowMoves:
    """Moves that exchange two rows; a hole among them changes place too.

    Args:
        first: row.
        second: another row.
        is_hole: bool ``[num_old_rows]``.
    """
    rows = np.array([first, second])
    sources = rows[~is_hole[rows]]
    destinations = first + second - sources
    new_row_of = np.where(is_hole, -1, np.arange(len(is_hole)))
    new_row_of[sources] = destinations
    vacated = np.setdiff1d(sources, destinations)
    return _moves(sources, destinations, vacated, new_row_of, len(sources))


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


def place_rows(
    classes: IntArray | npt.NDArray[np.int8],
    newcomer_rank: IntArray | None = None,
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
        classes: int ``[num_old_rows]`` old row -> ``DECODE`` .. ``IDLE``, or ``HOLE``.
        newcomer_rank: int64 ``[num_old_rows]`` old row -> rank of admission for a request that
            was not in the previous order, -1 for one that was; ``None``: there is no newcomer.
        policy: which classes share a region.
        stable: keep relative order.
    """
    region = _REGION_OF_CLASS[policy].take(classes)
    wanted = region.copy()
    wanted.sort(kind="stable")  # what region each row is to be in, holes behind the last
    num_old_rows, num_new_rows = len(region), int(wanted.searchsorted(HOLE))
    if stable:
        sources = _stable_order(region, newcomer_rank)
        destinations = (sources != np.arange(num_old_rows)).nonzero()[0]
        sources = sources[destinations]
    else:
        destinations = (region != wanted).nonzero()[0]
        sources = destinations[region[destinations].argsort(kind="stable")]
    vacated, new_row_of = _NO_ROWS, np.arange(num_old_rows)
    if num_new_rows < num_old_rows:
        num_moves = destinations.searchsorted(num_new_rows)  # behind them, holes find their place
        sources, destinations = sources[:num_moves], destinations[:num_moves]
        vacated = np.arange(num_new_rows, num_old_rows)
        new_row_of[region == HOLE] = -1
    new_row_of[sources] = destinations
    num_newcomers = 0 if newcomer_rank is None else np.count_nonzero(newcomer_rank[sources] >= 0)
    return _moves(sources, destinations, vacated, new_row_of, len(sources) - int(num_newcomers))


def _stable_order(region: npt.NDArray[np.int8], newcomer_rank: IntArray | None) -> IntArray:
    """New row -> old row, holes last."""
    if newcomer_rank is None:
        order: IntArray = region.argsort(kind="stable")
        return order
    num = len(region)
    rank = np.where(newcomer_rank < 0, np.arange(num), num + newcomer_rank)
    order = np.lexsort((rank, region))
    return order  # noqa: RET504 (numpy types lexsort as Any)
