"""How the row-resident arrays of a batch get from one order of rows to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from vlbatch.backends.base import Backend, Indices
from vlbatch.backends.dtypes import HostArray

if TYPE_CHECKING:
    from vlbatch.fields.layout import Group
    from vlbatch.order.moves import RowMoves

S = TypeVar("S")  # stored


@dataclass(frozen=True, slots=True)
class RaggedRows(Generic[S]):
    """Rows of which a prefix is valid; the rest of each holds the default.

    Attributes:
        array: ``[rows, width]``.
        flat: the same elements as one axis.
        width: elements of a row.
        lengths: int64 ``[rows]`` elements of the valid prefix; the mover keeps them in step.
        default: 0-d.
    """

    array: S
    flat: S
    width: int
    lengths: Indices
    default: HostArray


@dataclass(frozen=True, slots=True)
class RowArrays(Generic[S]):
    """Everything of a batch that is indexed by row.

    Attributes:
        capacity: most rows.
        groups: arrays whose rows move whole.
        ragged: arrays whose rows move as far as they are valid.
        row_valued: arrays that hold row numbers, with their dtype: remapped, after they moved as
            part of a group where each request has its own.
    """

    capacity: int
    groups: Sequence[Group[S]]
    ragged: Sequence[RaggedRows[S]]
    # Any: which signed integer is known from the declaration only
    row_valued: Sequence[tuple[S, np.dtype[Any]]]


class Mover(Protocol):
    """Moves all ``RowArrays`` of one batch, in place."""

    def move(self, moves: RowMoves) -> None:
        """Move rows, remap row numbers, set vacated rows to the default; lengths follow."""
        ...


class GroupMover(Generic[S]):
    """One gather a group, by the backend's own operations."""

    def __init__(self, backend: Backend[S, object], rows: RowArrays[S]) -> None:
        self._backend = backend
        self._rows = rows

    def move(self, moves: RowMoves) -> None:
        """Move, then remap, then clear."""
        if len(moves.sources):
            for group in self._rows.groups:
                self._backend.move(group.array, group.axis, moves.destinations, moves.sources)
            for ragged in self._rows.ragged:
                self._move_prefixes(ragged, moves)
        for array, _ in self._rows.row_valued:
            self._backend.remap(array, moves.new_row_of)
        if len(moves.vacated):
            self._clear(int(moves.vacated[0]), int(moves.vacated[-1]) + 1)

    def _move_prefixes(self, ragged: RaggedRows[S], moves: RowMoves) -> None:
        """Move valid prefixes, wide enough to cover what the destination held."""
        lengths = ragged.lengths
        moved = lengths[moves.sources]
        widths = np.maximum(moved, lengths[moves.destinations])
        self._backend.move_prefixes(ragged.array, widths, moves.destinations, moves.sources)
        lengths[moves.destinations] = moved

    def _clear(self, start: int, stop: int) -> None:
        for group in self._rows.groups:
            self._backend.clear(group.array, group.axis, start, stop, group.default)
        for ragged in self._rows.ragged:
            for row in range(start, stop):
                stale = np.full(ragged.lengths[row], ragged.default)
                if len(stale):
                    self._backend.write(ragged.flat, row * ragged.width, stale)
            ragged.lengths[start:stop] = 0
