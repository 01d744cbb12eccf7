"""Slots and rows: who is where. No fields, no progress."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from vlbatch.errors import BatchFull, InvariantBroken, UnknownRequest
from vlbatch.order import IntArray, RowMoves


class RowTable:
    """Requests, their stable slots and their rows, in step with each other.

    Attributes:
        capacity: slots, and rows.
        num_rows: rows in use, holes among them included.
        slots: req_id -> slot, in order of admission.
        slot_of_row: int64 ``[capacity]`` row -> slot, -1 for a hole or an unused row.
        row_of_slot: int64 ``[capacity]`` slot -> row, -1 for a free slot.
        admission: int64 ``[capacity]`` slot -> rank of admission, -1 for a free slot; a rank is
            never given twice, so it tells an occupant from the next one of the same slot.
        is_new: bool ``[capacity]`` slot -> occupied since the last ``settle``.
        has_new: whether any is.
        num_changes: counts what may change the next order: who is here, who is in which row.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_rows = 0
        self.slots: dict[str, int] = {}
        self.slot_of_row: IntArray = np.full(capacity, -1, dtype=np.int64)
        self.row_of_slot: IntArray = np.full(capacity, -1, dtype=np.int64)
        self.admission: IntArray = np.full(capacity, -1, dtype=np.int64)
        self.is_new = np.zeros(capacity, dtype=np.bool_)
        self.has_new = False
        self.num_changes = 0
        self._num_admitted = 0
        self._req_ids = np.full(capacity + 1, None, dtype=np.object_)  # by slot; slot -1: None
        self._asked: tuple[str, ...] | None = None  # of the last ``slots_of``; None: stale
        self._answer: IntArray = np.zeros(0, dtype=np.int64)

    def req_ids_of(self, slots: IntArray) -> tuple[str, ...]:
        """Requests in taken slots."""
        return tuple(self._req_ids[slots].tolist())

    @property
    def rows(self) -> tuple[str | None, ...]:
        """Row -> request, ``None`` for a hole."""
        return tuple(self._req_ids[self.slot_of_row[: self.num_rows]].tolist())

    @property
    def is_hole(self) -> npt.NDArray[np.bool_]:
        """Row in use -> whether it has no request; new."""
        return self.slot_of_row[: self.num_rows] < 0

    @property
    def has_holes(self) -> bool:
        """Whether a row in use has no request."""
        return len(self.slots) < self.num_rows

    def slot_of(self, req_id: str) -> int:
        """Slot of a live request.

        Raises:
            UnknownRequest: not in the batch.
        """
        try:
            return self.slots[req_id]
        except KeyError:
            raise UnknownRequest("is not in the batch", req_id=req_id) from None

    def slots_of(self, req_ids: Iterable[str]) -> IntArray:
        """Slots of live requests, int64; do not write to it.

        Raises:
            KeyError: with the first request that is not in the batch.
        """
        asked = tuple(req_ids)
        if asked != self._asked:  # the same requests come step after step
            self._answer = np.fromiter(map(self.slots.__getitem__, asked), np.int64, len(asked))
            self._asked = asked
        return self._answer

    def row_of(self, req_id: str) -> int:
        """Current row of a live request; provisional until the next order is applied."""
        return int(self.row_of_slot[self.slot_of(req_id)])

    def check_free(self, req_id: str) -> None:
        """Refuse what ``occupy`` would refuse.

        Raises:
            BatchFull: no slot is free.
        """
        if len(self.slots) == self.capacity:
            raise BatchFull(
                f"all {self.capacity} slots are taken", req_id=req_id, setting="capacity"
            )

    def occupy(self, req_id: str) -> tuple[int, int]:
        """Take the lowest free slot and the lowest hole, or the row behind the last.

        Returns:
            ``(slot, row)``.

        Raises:
            BatchFull: no slot is free.
        """
        self.check_free(req_id)
        slot = int(np.argmax(self.admission < 0))
        row = int(np.argmax(self.slot_of_row < 0))
        self.num_rows = max(self.num_rows, row + 1)
        self.slots[req_id] = slot
        self._req_ids[slot] = req_id
        self.slot_of_row[row] = slot
        self.row_of_slot[slot] = row
        self.admission[slot] = self._num_admitted
        self.is_new[slot] = True
        self.has_new = True
        self._num_admitted += 1
        self.num_changes += 1
        return slot, row

    def vacate(self, req_id: str) -> tuple[int, int]:
        """Free a request's slot and leave a hole in its row.

        Returns:
            ``(slot, row)`` that it had.

        Raises:
            UnknownRequest: not in the batch.
        """
        slot = self.slot_of(req_id)
        row = int(self.row_of_slot[slot])
        del self.slots[req_id]
        self._req_ids[slot] = None
        self.slot_of_row[row] = -1
        self.row_of_slot[slot] = -1
        self.admission[slot] = -1
        self._asked = None
        self.num_changes += 1
        return slot, row

    def newcomer_rank(self, slots: IntArray) -> IntArray | None:
        """Rank of admission of slots occupied since the last ``move``, -1 for the others.

        ``None`` where none was.
        """
        if not self.has_new:
            return None
        return np.where(self.is_new[slots], self.admission[slots], -1)

    def slots_after(self, moves: RowMoves) -> IntArray:
        """New row -> slot, after ``move`` of a plan: no holes, read-only. Changes nothing."""
        slots = self.slot_of_row[: self.num_rows].copy()
        slots[moves.destinations] = slots[moves.sources]
        slots.flags.writeable = False
        return slots[: len(self.slots)]

    def settle(self) -> None:
        """Call nobody a newcomer any more: an order was made of all."""
        if self.has_new:
            self.is_new[:] = False
            self.has_new = False

    def move(self, moves: RowMoves) -> None:
        """Bring every request to its new row."""
        if moves.is_identity:
            return
        slots = self.slot_of_row[moves.sources]
        self.slot_of_row[moves.vacated] = -1
        self.slot_of_row[moves.destinations] = slots
        self.row_of_slot[slots] = moves.destinations
        self.num_rows = int(self.row_of_slot.max()) + 1
        self.num_changes += 1

    def clear(self) -> None:
        """Forget every request."""
        self.num_rows = 0
        self._asked = None
        self.slots.clear()
        self._req_ids[:] = None
        for array in (self.slot_of_row, self.row_of_slot, self.admission):
            array[:] = -1
        self.settle()
        self.num_changes += 1

    def check(self) -> None:
        """Verify that slots and rows agree both ways.

        Raises:
            InvariantBroken: naming the request, slot and row.
        """
        if len(self.slots) != len(set(self.slots.values())):
            raise InvariantBroken(f"a slot is shared: {self.slots}")
        for req_id, slot in self.slots.items():
            row = int(self.row_of_slot[slot])
            if not 0 <= row < self.num_rows or self._req_ids[slot] != req_id:
                raise InvariantBroken(
                    f"slot {slot} says row {row} and request {self._req_ids[slot]!r}; rows in use"
                    f" are {self.num_rows}",
                    req_id=req_id,
                )
            if int(self.slot_of_row[row]) != slot or self.admission[slot] < 0:
                raise InvariantBroken(
                    f"row {row} says slot {self.slot_of_row[row]}, expected {slot}; admission"
                    f" rank {self.admission[slot]}, expected >= 0",
                    req_id=req_id,
                )
        rows = np.flatnonzero(self.slot_of_row >= 0).tolist()
        slots = np.flatnonzero(self.row_of_slot >= 0).tolist()
        if len(rows) != len(self.slots) or len(slots) != len(self.slots):
            raise InvariantBroken(
                f"{len(self.slots)} requests, but rows {rows} have a slot and slots {slots} a row"
            )
        occupied = sum(req_id is not None for req_id in self._req_ids)
        taken = int(np.count_nonzero(self.admission >= 0))
        if not occupied == taken == len(self.slots):
            raise InvariantBroken(
                f"{len(self.slots)} requests, {occupied} slots with a name, {taken} taken slots"
            )
