"""The cells of one step: who is in which row, what it computes, and what is wrong about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from vlbatch import BatchOrder, VLBatch
from vlbatch.replay.scenario import Expectation, ItemSpec
from vlbatch.replay.timeline.faults import wrong_features, wrong_positions, wrong_rows
from vlbatch.replay.timeline.model import REGIONS, Cell, Column, Piece, Region


class CellMaker:
    """Makes the cells of one step after the other.

    Args:
        vl: the batch that is played; only read.

    Attributes:
        numbers: request -> number.
        items: request -> its items by offset.
        last_rows: row in the last step, of requests that are in the batch since.

    """

    def __init__(self, vl: VLBatch[npt.NDArray[np.int64]]) -> None:
        self._vl = vl
        self.numbers: dict[str, int] = {}
        self.items: dict[str, list[ItemSpec]] = {}
        self.last_rows: dict[str, int] = {}

    def fill(
        self,
        column: Column,
        order: BatchOrder,
        expectations: Sequence[Expectation],
        own_order: Sequence[str] | None,
    ) -> None:
        """Append a cell for each row, before the step is counted.

        Args:
            column: of the step.
            order: of the library.
            expectations: of the file.
            own_order: requests by row, of a runner with an order of its own.

        """
        rows = [req_id for req_id in self._vl.batch.rows if req_id is not None]
        busy = {req_id: at for at, req_id in enumerate(order.req_ids)}
        faults = self._faults(order, rows, expectations)
        if own_order is not None:
            own = [req_id for req_id in own_order if req_id in rows]
            rows = [*own, *(req_id for req_id in rows if req_id not in own)]
        for row, req_id in enumerate(rows):
            cell = self._cell(req_id, row, order, busy.get(req_id), tuple(faults.get(req_id, ())))
            column.moved += cell.came_from is not None
            column.cells.append(cell)
        self.last_rows = {req_id: row for row, req_id in enumerate(rows)}

    def _cell(
        self, req_id: str, row: int, order: BatchOrder, at: int | None, faults: tuple[str, ...]
    ) -> Cell:
        """One cell; ``at`` is the row in the library's order, if the request has tokens."""
        batch = self._vl.batch
        prompt_len, computed, _ = batch.progress.counts(batch.slot_of(req_id))
        region: Region = "idle"
        chunk = (computed, computed)
        if at is not None:
            region = REGIONS[int(order.classes[at])]
            chunk = (computed, computed + int(order.scheduled[at]))
        old_row = self.last_rows.get(req_id, row)
        return Cell(
            request=self.numbers[req_id],
            row=row,
            region=region,
            chunk=chunk,
            prompt_len=prompt_len,
            came_from=None if old_row == row else old_row,
            pieces=tuple(pieces_in(self.items[req_id], chunk)),
            faults=faults,
        )

    def _faults(
        self, order: BatchOrder, rows: Sequence[str], expectations: Sequence[Expectation]
    ) -> dict[str, list[str]]:
        """Request -> what the file has otherwise than is right."""
        faults: dict[str, list[str]] = {}
        positions = self._vl.positions_of(order)
        for expectation in expectations:
            if expectation.order is not None:
                wrong = wrong_rows(expectation.order, order.req_ids, rows)
                for row, fault in wrong.items():
                    faults.setdefault(rows[row], []).append(fault)
            for at, req_id in enumerate(order.req_ids):
                first = int(order.computed[at])
                start, stop = order.query_start[at : at + 2].tolist()
                found: list[str | None] = []
                if req_id in (expectation.features or {}):
                    runs = (expectation.features or {})[req_id]
                    chunk = (first, first + stop - start)
                    found.append(wrong_features(runs, self.items[req_id], chunk))
                if req_id in (expectation.positions or {}):
                    axes = (expectation.positions or {})[req_id]
                    right = positions[:, start:stop].tolist()
                    found.append(wrong_positions(axes, right, first))
                faults.setdefault(req_id, []).extend(fault for fault in found if fault)
        return faults


def pieces_in(items: Sequence[ItemSpec], chunk: tuple[int, int]) -> Iterator[Piece]:
    """Parts of the items that lie in a chunk."""
    for item in items:
        first, stop = max(chunk[0], item.offset), min(chunk[1], item.offset + item.length)
        if first >= stop:
            continue
        mask = item.embeds or (True,) * item.length
        before = sum(mask[: first - item.offset])
        rows = sum(mask[first - item.offset : stop - item.offset])
        yield Piece(
            key=item.key,
            modality=item.modality,
            span=(first, stop),
            rows=(before, before + rows),
            num_rows=sum(mask),
            is_cut_before=first > item.offset,
            is_cut_after=stop < item.offset + item.length,
        )
