"""Rotary positions of all live requests, assembled for a step in row order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from vlbatch.errors import (
    DuplicateRequest,
    InvalidField,
    InvalidSchedule,
    InvariantBroken,
    UnknownRequest,
)
from vlbatch.positions.runs import PositionArray, PositionRuns

IndexArray: TypeAlias = npt.NDArray[np.int64] | npt.NDArray[np.int32]
"""Integers by row, ``[num_reqs]``."""

_UNBOUND: Final = int(np.iinfo(np.int64).max)
"""``media_stop`` of a slot without a request, which no token reaches."""


class PositionStore:
    """Keeps each request's position runs from admission to finish, through preemption.

    The runs belong to the request; a slot only mirrors two numbers of them, so that rows past
    their media (all decode rows) are assembled by one gather.

    Attributes:
        capacity: number of slots.
        num_axes: 1 or 3, of all requests.
        delta_of_slot: read-only int64 ``[capacity]``, slot -> position minus index of the tokens
            past the request's media; 0 in a slot without a request. Its address is stable.
    """

    def __init__(self, capacity: int, num_axes: int) -> None:
        """Allocate the slot arrays; nothing else grows with ``capacity``."""
        self.capacity = capacity
        self.num_axes = num_axes
        self._runs: dict[str, PositionRuns] = {}  # req_id -> runs
        self._slots: dict[str, int] = {}  # req_id -> slot, of the requests in the batch
        self._delta_of_slot = np.zeros(capacity, dtype=np.int64)
        self._media_stop_of_slot = np.full(capacity, _UNBOUND, dtype=np.int64)
        self.delta_of_slot = self._delta_of_slot.view()
        self.delta_of_slot.flags.writeable = False

    @property
    def req_ids(self) -> tuple[str, ...]:
        """Requests with runs here, live or preempted."""
        return tuple(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, req_id: object) -> bool:
        return req_id in self._runs

    @property
    def nbytes(self) -> int:
        """Bytes of all runs and of the slot arrays."""
        slots = self._delta_of_slot.nbytes + self._media_stop_of_slot.nbytes
        return slots + sum(runs.nbytes for runs in self._runs.values())

    # -- life of a request -------------------------------------------------------------------------
    def add(self, req_id: str, runs: PositionRuns) -> None:
        """Keep the runs of a new request; it has no slot yet.

        Raises:
            DuplicateRequest: the request is here already.
            InvalidField: the runs have another number of axes than the store.
        """
        if req_id in self._runs:
            raise DuplicateRequest("its positions are kept already", req_id=req_id)
        if runs.num_axes != self.num_axes:
            raise InvalidField(
                f"positions have {runs.num_axes} axes; expected {self.num_axes}",
                req_id=req_id,
                setting="positions",
            )
        self._runs[req_id] = runs

    def bind(self, req_id: str, slot: int) -> None:
        """Say that the request now lives in ``slot`` (it was admitted, or resumed).

        Raises:
            UnknownRequest: the request was never added.
            InvariantBroken: it has a slot, or the slot is taken or out of range.
        """
        runs = self.runs_of(req_id)
        if req_id in self._slots:
            raise InvariantBroken(f"it is bound to slot {self._slots[req_id]}", req_id=req_id)
        if not 0 <= slot < self.capacity:
            raise InvariantBroken(f"slot {slot} is not in [0, {self.capacity})", req_id=req_id)
        if self._media_stop_of_slot[slot] != _UNBOUND:
            owner = next(other for other, taken in self._slots.items() if taken == slot)
            raise InvariantBroken(f"slot {slot} belongs to request {owner!r}", req_id=req_id)
        self._slots[req_id] = slot
        self._delta_of_slot[slot] = runs.delta
        self._media_stop_of_slot[slot] = runs.media_stop

    def unbind(self, req_id: str) -> None:
        """Free the slot of a preempted request; its runs stay.

        Raises:
            UnknownRequest: the request was never added.
            InvariantBroken: it has no slot.
        """
        self.runs_of(req_id)
        if req_id not in self._slots:
            raise InvariantBroken("it has no slot to leave", req_id=req_id)
        slot = self._slots.pop(req_id)
        self._delta_of_slot[slot] = 0
        self._media_stop_of_slot[slot] = _UNBOUND

    def remove(self, req_id: str) -> None:
        """Forget a finished request, in the batch or preempted.

        Raises:
            UnknownRequest: the request is not here, or no longer.
        """
        self.runs_of(req_id)
        if req_id in self._slots:
            self.unbind(req_id)
        del self._runs[req_id]

    # -- queries -----------------------------------------------------------------------------------
    def runs_of(self, req_id: str) -> PositionRuns:
        """Return the runs of a request.

        Raises:
            UnknownRequest: the request is not here.
        """
        try:
            return self._runs[req_id]
        except KeyError:
            raise UnknownRequest("no positions are kept for it", req_id=req_id) from None

    def delta(self, req_id: str) -> int:
        """Return position minus index of the tokens past the request's media.

        Raises:
            UnknownRequest: the request is not here.
        """
        return self.runs_of(req_id).delta

    def next_position(self, req_id: str, index: int) -> int:
        """Return the position, on every axis, of token ``index`` past the request's media.

        Raises:
            UnknownRequest: the request is not here.
            InvalidSchedule: media follows at or after ``index``, so the axes may differ.
        """
        runs = self.runs_of(req_id)
        if index < runs.media_stop:
            raise InvalidSchedule(
                f"token {index} has media after it; expected a token from {runs.media_stop} on",
                req_id=req_id,
            )
        return index + runs.delta

    def assemble(
        self,
        req_ids: Sequence[str],
        slots: IndexArray,
        computed: IndexArray,
        scheduled: IndexArray,
        *,
        out: PositionArray | None = None,
    ) -> PositionArray:
        """Return the positions of a step's tokens, chunk after chunk in row order.

        Row ``r`` contributes its tokens ``[computed[r], computed[r] + scheduled[r])``. All rows
        are filled by one gather of deltas; then those whose media is not behind them are written
        again, from their runs. Decode rows are never among these.

        Args:
            req_ids: by row.
            slots: by row, slot of each request.
            computed: by row, tokens computed before the step.
            scheduled: by row, tokens of the step.
            out: int64 ``[num_axes, >= num_tokens]``, written in place; ``None`` for a new array.

        Returns:
            int64 ``[num_axes, num_tokens]``; a view of ``out`` where that was given.

        Raises:
            InvalidField: ``out`` is too small or of another dtype.
            UnknownRequest: a row's request is not here.
            InvariantBroken: a row names a slot that its request is not in (seen only in rows with
                media before them, and for slots without a request).
        """
        ends = scheduled.cumsum(dtype=np.int64)
        num_tokens = int(ends[-1]) if len(ends) else 0
        if out is None:
            out = np.empty((self.num_axes, num_tokens), dtype=np.int64)
        elif out.dtype != np.int64 or out.shape[0] != self.num_axes or out.shape[1] < num_tokens:
            raise InvalidField(
                f"the positions buffer is {out.dtype} {out.shape};"
                f" expected int64 ({self.num_axes}, {num_tokens}) or wider"
            )
        media_rows = (computed < self._media_stop_of_slot[slots]).nonzero()[0].tolist()
        for row in media_rows:
            self._check_slot(req_ids[row], int(slots[row]), row)

        positions = out[:, :num_tokens]
        starts = ends - scheduled
        offsets = computed - starts + self._delta_of_slot[slots]
        np.add(offsets.repeat(scheduled), np.arange(num_tokens), out=positions)
        for row in media_rows:
            first = int(computed[row])
            chunk = self._runs[req_ids[row]].positions(first, first + int(scheduled[row]))
            positions[:, starts[row] : ends[row]] = chunk
        return positions

    def _check_slot(self, req_id: str, slot: int, row: int) -> None:
        self.runs_of(req_id)
        if self._slots.get(req_id) != slot:
            raise InvariantBroken(
                f"row {row} names slot {slot}; expected slot {self._slots.get(req_id)}",
                req_id=req_id,
            )

    # -- invariants --------------------------------------------------------------------------------
    def check(self) -> None:
        """Verify every invariant of the store and of the runs in it.

        Raises:
            InvariantBroken: names the request or slot and the terms that disagree.
        """
        for req_id, runs in self._runs.items():
            self._check_runs(req_id, runs)
        owners: dict[int, str] = {}
        for req_id, slot in self._slots.items():
            if req_id not in self._runs:
                raise InvariantBroken(f"slot {slot} is bound, no runs are kept", req_id=req_id)
            if slot in owners:
                raise InvariantBroken(f"slot {slot} is also {owners[slot]!r}'s", req_id=req_id)
            owners[slot] = req_id
        for slot in range(self.capacity):
            held = (int(self._delta_of_slot[slot]), int(self._media_stop_of_slot[slot]))
            expected = (0, _UNBOUND)
            if slot in owners:
                runs = self._runs[owners[slot]]
                expected = (runs.delta, runs.media_stop)
            if held != expected:
                raise InvariantBroken(
                    f"slot {slot} holds (delta, media stop) {held}; expected {expected}",
                    req_id=owners.get(slot),
                )

    def _check_runs(self, req_id: str, runs: PositionRuns) -> None:
        records = runs.runs.tolist()
        edges = [edge for start, stop, *_ in records for edge in (start, stop)]
        if edges != sorted(edges) or any(start >= stop for start, stop, *_ in records):
            raise InvariantBroken(f"runs are empty, overlap or unsorted: {edges}", req_id=req_id)
        last = (records[-1][1], records[-1][4]) if records else (0, 0)
        if (runs.media_stop, runs.delta) != last or runs.num_axes != self.num_axes:
            raise InvariantBroken(
                f"(media stop, delta, axes) are {(runs.media_stop, runs.delta, runs.num_axes)};"
                f" expected {(*last, self.num_axes)}",
                req_id=req_id,
            )
