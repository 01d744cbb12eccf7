"""Do a batch's fields follow their requests through a move? Told by comparing before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from vlbatch.batch import InputBatch
from vlbatch.fields import Field, Kind
from vlbatch.replay.fingerprints import HostRows, to_host

E = TypeVar("E")

NOBODY = "(nobody)"
"""Owner of a value that no request had before the move."""

Cells = npt.NDArray[np.uint8]
"""A field's rows in use as bytes, ``[rows, cells, bytes]``; a ragged field has a cell an entry."""


@dataclass(frozen=True, slots=True)
class _Before:
    """The batch before a move.

    Attributes:
        rows: row -> request.
        cells: field -> its values.
        objects: keeps the objects of host fields alive, which are compared by identity.

    """

    rows: tuple[str | None, ...]
    cells: dict[str, Cells]
    objects: list[list[object]]


class FieldWatch(Generic[E]):
    """Compares the fields that move with the rows, before and after a step's move.

    Fields that hold row numbers are left out: a move changes their values.

    Args:
        batch: to watch; only read.

    """

    def __init__(self, batch: InputBatch[E]) -> None:
        self._batch = batch
        self._fields = [
            field for field in batch.registry.values()
            if field.is_per_request
            and field.residency == "rows"
            and field.kind is not Kind.ROW_VALUED
        ]  # fmt: skip
        self._before = _Before((), {}, [])

    def before_move(self) -> None:
        """Copy what is there now."""
        hosts = [field for field in self._fields if field.kind is Kind.HOST]
        self._before = _Before(
            self._batch.rows,
            {field.name: self._read(field).copy() for field in self._fields},
            [list(self._batch.objects(field.name)) for field in hosts],
        )

    def after_move(self, order: Sequence[str]) -> dict[str, dict[str, str]]:
        """Find values that are not the request's own.

        Args:
            order: requests by row, as the batch has them now; all were there before the move.

        Returns:
            request -> field -> whose value it has instead; empty if all is well.

        """
        old_row_of = {r: row for row, r in enumerate(self._before.rows)}
        old_rows = [old_row_of[r] for r in order]
        found: dict[str, dict[str, str]] = {}
        for field in self._fields:
            before, after = self._before.cells[field.name], self._read(field)[: len(order)]
            differs = before[old_rows] != after
            if not differs.any():
                continue
            differs = differs.any(axis=2)
            if field.kind is Kind.RAGGED:
                lengths = np.array([self._batch.length(r, field.name) for r in order])
                differs &= np.arange(differs.shape[1]) < lengths[:, np.newaxis]
            for row in np.flatnonzero(differs.any(axis=1)).tolist():
                owner = self._owner(before, after[row], row)
                found.setdefault(order[row], {})[field.name] = owner
        return found

    def _owner(self, before: Cells, value: Cells, row: int) -> str:
        """Who had this value: first asked is the row itself, which a move may have left out."""
        holders = np.flatnonzero((before == value).all(axis=(1, 2))).tolist()
        if not holders:
            return NOBODY
        return self._before.rows[row if row in holders else holders[0]] or NOBODY

    def _read(self, field: Field) -> Cells:
        num_rows = len(self._batch.rows)
        if field.kind is Kind.HOST:
            values: HostRows = np.array(
                [id(each) for each in self._batch.objects(field.name)[:num_rows]], np.int64
            )
        else:
            array: Any = self._batch[field.name]  # Any: the array type is the backend's
            values = to_host(array[:num_rows])
        num_cells = values.shape[1] if field.kind is Kind.RAGGED else 1
        contiguous = np.ascontiguousarray(values).reshape(num_rows, -1)
        return contiguous.view(np.uint8).reshape(num_rows, num_cells, -1)
