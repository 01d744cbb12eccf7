"""Who is in a batch: admission, leaving, preemption, and each request's fields and counts.

Rules
- Errors come before any write; look-ups never insert.
- A row that its request left is cleared at once, and a hole until the next step or newcomer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from vlbatch.batch.access import FieldAccess
from vlbatch.batch.followers import Followers
from vlbatch.batch.progress import Progress
from vlbatch.batch.rows import RowTable
from vlbatch.errors import DuplicateRequest, InvalidSchedule, PromptTooLong, UnknownRequest
from vlbatch.fields import FieldStorage
from vlbatch.order import BatchOrder, IntArray, vacate_rows

E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class _Preempted:
    num_tokens: int
    values: dict[str, object]


class BatchRequests(FieldAccess[E], Generic[E]):
    """The requests of a batch, live and preempted; ``InputBatch`` puts them in order.

    Args:
        storage: fields, of as many requests as fit.
        max_model_len: longest request, in tokens.
    """

    # Any: the stored array type is the backend's own business
    def __init__(self, storage: FieldStorage[Any, E], *, max_model_len: int) -> None:
        super().__init__(RowTable(storage.capacity), storage)
        self.capacity = storage.capacity
        self.num_drafts = storage.num_drafts
        self.max_model_len = max_model_len
        self.progress = Progress(storage.capacity)
        self._preempted: dict[str, _Preempted] = {}
        self._followers = Followers()
        self._version = 0  # counts what makes plans stale

    # -- queries -----------------------------------------------------------------------------
    @property
    def req_ids(self) -> tuple[str, ...]:
        """Live requests, in order of admission; preempted ones are not among them."""
        return tuple(self._table.slots)

    @property
    def preempted(self) -> tuple[str, ...]:
        """Requests that can be resumed."""
        return tuple(self._preempted)

    @property
    def num_reqs(self) -> int:
        """Live requests."""
        return len(self._table.slots)

    @property
    def num_rows(self) -> int:
        """Rows in use, holes among them included."""
        return self._table.num_rows

    @property
    def row_admissions(self) -> IntArray:
        """Row -> rank of admission of who is in it, -1 for a hole; int64 ``[num_rows]``, a copy.

        A rank is never given twice: the same at two moments, it is the same request.
        """
        slots = self._table.slot_of_row[: self._table.num_rows]
        return np.where(slots < 0, -1, self._table.admission[slots])

    @property
    def rows(self) -> tuple[str | None, ...]:
        """Row -> request, ``None`` for a hole that the next ``apply`` closes."""
        return self._table.rows

    def slot_of(self, req_id: str) -> int:
        """Slot of a live request; raises ``UnknownRequest``."""
        return self._table.slot_of(req_id)

    def row_of(self, req_id: str) -> int:
        """Row of a live request, provisional until ``apply``; raises ``UnknownRequest``."""
        return self._table.row_of(req_id)

    def computed_of(self, req_id: str) -> int:
        """Computed tokens of a live request; raises ``UnknownRequest``."""
        return int(self.progress.computed[self._table.slot_of(req_id)])

    def admission_of(self, order: BatchOrder) -> IntArray:
        """Row of an order -> rank of admission of who has its slot now, -1 for nobody; a copy.

        A rank is never given twice: if it is the same at two moments, so is the request, and it
        was here all the time in between.
        """
        return self._table.admission[order.slots]

    def is_live(self, req_id: str) -> bool:
        """Whether the request has a slot."""
        return req_id in self._table.slots

    def are_live(self, req_ids: Iterable[str]) -> bool:
        """Whether each of the requests has a slot."""
        return self._table.slots.keys() >= set(req_ids)

    def prompts_at(self, req_ids: Collection[str]) -> dict[str, int]:
        """Which of these live requests are in their prompt: req_id -> computed tokens.

        Raises:
            UnknownRequest: one is not in the batch.
        """
        try:
            slots = self._table.slots_of(req_ids)
        except KeyError as error:
            raise UnknownRequest("is not in the batch", req_id=error.args[0]) from None
        computed = self.progress.computed[slots]
        in_prompt = computed < self.progress.prompt_len[slots]
        if not in_prompt.any():
            return {}
        return {r: int(computed[i]) for i, r in enumerate(req_ids) if in_prompt[i]}

    def remaining_of(self, req_id: str) -> int:
        """Most tokens that a live request can be scheduled for; raises ``UnknownRequest``."""
        slot = self._table.slot_of(req_id)
        most = self.progress.most(slice(slot, slot + 1), self.num_drafts, self.max_model_len)
        return int(most[0] - self.progress.computed[slot])

    def known_tokens_of(self, req_id: str) -> int:
        """Tokens with a known id: the prompt, or all computed ones and the sampled one.

        Raises:
            UnknownRequest: neither live nor preempted.
        """
        if req_id in self._preempted:
            return self._preempted[req_id].num_tokens
        return self.progress.known_tokens(self._table.slot_of(req_id))

    # -- coming and going --------------------------------------------------------------------
    def check_add(
        self,
        req_id: str,
        *,
        prompt_len: int,
        computed: int = 0,
        fields: Mapping[str, object] | None = None,
    ) -> dict[str, object]:
        """Refuse what ``add`` would refuse; changes nothing. Returns the checked values.

        Raises:
            DuplicateRequest: alive or preempted.
            BatchFull: no slot.
            PromptTooLong: longer than ``max_model_len``, or empty.
            InvalidSchedule: ``computed`` leaves no prompt token to compute.
            UnknownField, InvalidField: for ``fields``.
        """
        if req_id in self._table.slots or req_id in self._preempted:
            raise DuplicateRequest("is already alive", req_id=req_id)
        self._check_start(req_id, prompt_len, computed)
        return self._storage.convert_values(fields or {}, req_id)

    def _check_start(self, req_id: str, prompt_len: int, computed: int) -> None:
        self._table.check_free(req_id)
        if not _is_integer(prompt_len) or not 0 < prompt_len <= self.max_model_len:
            raise PromptTooLong(
                f"has {prompt_len!r} prompt tokens; expected 1..{self.max_model_len}",
                req_id=req_id,
                setting="max_model_len",
            )
        if not _is_integer(computed) or not 0 <= computed < prompt_len:
            raise InvalidSchedule(
                f"starts with {computed!r} computed tokens of {prompt_len}; expected at least one"
                " to be left",
                req_id=req_id,
            )

    def add(
        self,
        req_id: str,
        *,
        prompt_len: int,
        computed: int = 0,
        fields: Mapping[str, object] | None = None,
    ) -> int:
        """Admit a request: take the lowest free slot and a row, write its fields.

        Args:
            req_id: unique among live and preempted requests.
            prompt_len: tokens of the prompt.
            computed: tokens whose KV a prefix cache already holds.
            fields: values of declared per-request fields; the others get their default.

        Returns:
            The slot.

        Raises:
            VlbatchError: see ``check_add``.
        """
        values = self.check_add(req_id, prompt_len=prompt_len, computed=computed, fields=fields)
        return self._occupy(req_id, prompt_len, computed, values)

    def _occupy(
        self, req_id: str, prompt_len: int, computed: int, values: Mapping[str, object]
    ) -> int:
        objects = self._storage.fresh_objects(values)
        slot, row = self._table.occupy(req_id)
        given = {**objects, **values}
        self._storage.initialise(row, slot, given)
        self.progress.start(slot, prompt_len, computed)
        self._version += 1
        self._followers.on_add(req_id, given)
        return slot

    def remove(self, req_id: str) -> None:
        """Take a request out, live or preempted; its row is a hole until the next ``apply``.

        Raises:
            UnknownRequest: neither live nor preempted.
        """
        is_live = req_id not in self._preempted
        if is_live:
            self._table.slot_of(req_id)
        self._followers.on_remove(req_id)
        if is_live:
            self._vacate(req_id)
        else:
            del self._preempted[req_id]

    def _vacate(self, req_id: str) -> None:
        slot, row = self._table.vacate(req_id)
        self._storage.release(slot)
        self._clear_rows(row, row + 1)
        self._version += 1

    def _clear_rows(self, start: int, stop: int) -> None:
        """Leave nothing of departed requests in any row: a newcomer may take it at once."""
        moves = vacate_rows(start, stop, self._table.is_hole)
        self._storage.move(moves)
        self._followers.follow(moves)

    def preempt(self, req_id: str) -> None:
        """Take a live request out but remember its ``on_preempt="keep"`` fields.

        Raises:
            UnknownRequest: not in the batch.
        """
        slot = self._table.slot_of(req_id)
        kept = {
            name: self.read(req_id, name)
            for name, field in self.registry.items()
            if field.is_per_request and field.on_preempt == "keep"
        }
        num_tokens = self.progress.known_tokens(slot)
        self._followers.on_preempt(req_id)
        self._vacate(req_id)
        self._preempted[req_id] = _Preempted(num_tokens, kept)

    def check_resume(self, req_id: str, *, computed: int = 0) -> None:
        """Refuse what ``resume`` would refuse; changes nothing.

        Raises:
            UnknownRequest: not preempted.
            VlbatchError: see ``check_add``.
        """
        if req_id not in self._preempted:
            raise UnknownRequest("is not preempted", req_id=req_id)
        self._check_start(req_id, self._preempted[req_id].num_tokens, computed)

    def resume(
        self, req_id: str, *, computed: int = 0, fields: Mapping[str, object] | None = None
    ) -> int:
        """Admit a preempted request again, with prompt and outputs so far as its prompt.

        Args:
            req_id: preempted.
            computed: tokens whose KV a prefix cache already holds.
            fields: values instead of those that were kept.

        Returns:
            The slot.

        Raises:
            VlbatchError: see ``check_resume``.
            UnknownField, InvalidField: for ``fields``.
        """
        self.check_resume(req_id, computed=computed)
        record = self._preempted[req_id]
        values = {**record.values, **self._storage.convert_values(fields or {}, req_id)}
        slot = self._occupy(req_id, record.num_tokens, computed, values)
        del self._preempted[req_id]
        return slot


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
