"""How far each request is: the host arrays from which regions and schedules are decided."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from vlbatch.errors import InvalidSchedule, InvariantBroken, StaleOrder
from vlbatch.order.batch_order import BatchOrder
from vlbatch.order.moves import DECODE, IntArray


class Progress:
    """Token counts by slot, int64 ``[capacity]``; entries of free slots mean nothing.

    A request has ``prompt_len`` tokens and, once they are computed, one sampled token more than
    was computed: known tokens = ``prompt_len`` while ``computed < prompt_len``, else
    ``computed + 1``. Nothing else needs to be stored about outputs.

    Attributes:
        prompt_len: tokens to prefill (after a resume: the prompt and the outputs so far).
        computed: tokens computed, optimistically counting steps in flight.
        confirmed: tokens computed for certain; never above ``computed``.
    """

    def __init__(self, capacity: int) -> None:
        self.prompt_len: IntArray = np.zeros(capacity, dtype=np.int64)
        self.computed: IntArray = np.zeros(capacity, dtype=np.int64)
        self.confirmed: IntArray = np.zeros(capacity, dtype=np.int64)

    def start(
        self, slots: int | IntArray, prompt_len: int | IntArray, computed: int | IntArray
    ) -> None:
        """Set the counts of new or resumed requests, or of all by an engine's own count."""
        self.prompt_len[slots] = prompt_len
        self.computed[slots] = computed
        self.confirmed[slots] = computed

    def with_counts(self, slots: IntArray, prompt_lens: IntArray, computed: IntArray) -> Progress:
        """A copy in which some slots have other counts, all of them confirmed."""
        other = Progress(len(self.computed))
        other.take(self)
        other.start(slots, prompt_lens, computed)
        return other

    def take(self, other: Progress) -> None:
        """Take over all counts of another, in place."""
        self.prompt_len[:] = other.prompt_len
        self.computed[:] = other.computed
        self.confirmed[:] = other.confirmed

    def out_of_range(self, slots: IntArray, max_model_len: int) -> IntArray:
        """Those of the slots whose counts no request can have."""
        prompt_len, computed = self.prompt_len[slots], self.computed[slots]
        longest = np.maximum(prompt_len, computed)
        return slots[(prompt_len < 1) | (computed < 0) | (longest > max_model_len)]

    def counts(self, slot: int) -> tuple[int, int, int]:
        """Prompt length, computed and confirmed tokens of one slot."""
        return int(self.prompt_len[slot]), int(self.computed[slot]), int(self.confirmed[slot])

    def known_tokens(self, slot: int) -> int:
        """Tokens whose ids are known: prompt, or everything computed and the sampled one."""
        prompt_len, computed, _ = self.counts(slot)
        return prompt_len if computed < prompt_len else computed + 1

    def classes(self) -> npt.NDArray[np.int8]:
        """Class of each slot, from progress alone; int8 ``[capacity]``."""
        in_prompt = self.computed < self.prompt_len
        # DECODE, EXTEND, PREFILL are 0, 1, 2: in its prompt, and at the start of it
        classes: npt.NDArray[np.int8] = in_prompt.astype(np.int8) + (
            in_prompt & (self.computed == 0)
        )
        return classes

    def most(self, slots: IntArray | slice, num_drafts: int, max_model_len: int) -> IntArray:
        """Most tokens that each slot can have computed after one more step, by slot asked for.

        They are those of its prompt, or 1 + drafts more than now, within ``max_model_len``.
        """
        computed, prompt_len = self.computed[slots], self.prompt_len[slots]
        decoded = np.minimum(computed + (1 + num_drafts), max_model_len)
        return np.where(computed < prompt_len, prompt_len, decoded)

    def advance(
        self, order: BatchOrder, alive: npt.NDArray[np.bool_], accepted: Mapping[str, int]
    ) -> None:
        """Count a step's tokens as computed; of a decode's drafts only the accepted ones.

        Args:
            order: the step.
            alive: bool by row: requests that left since are skipped.
            accepted: req_id -> accepted drafts, ``0 <= n < scheduled``; all where not given.

        Raises:
            InvalidSchedule: accepted drafts out of range, or of a row that is no decode.
        """
        grown = order.scheduled
        if accepted:
            grown = grown.copy()
            for req_id, count in accepted.items():
                row = order.row_of(req_id)
                drafts = int(order.scheduled[row]) - 1
                if order.classes[row] != DECODE or not 0 <= count <= drafts:
                    raise InvalidSchedule(
                        f"accepted {count} drafts; expected 0..{drafts} for a decode of"
                        f" {drafts + 1} tokens",
                        req_id=req_id,
                    )
                grown[row] = 1 + count
        slots = order.slots[alive]
        if not np.array_equal(self.computed[slots], order.computed[alive]):
            raise StaleOrder("progress was rolled back since this step was planned")
        self.computed[slots] += grown[alive]

    def confirm(self, slot: int, computed: int, req_id: str, in_flight: int = 0) -> bool:
        """Take ``computed`` as final; fewer than counted so far is a roll back.

        Args:
            slot: of the request.
            computed: tokens computed for certain.
            req_id: named in the refusal.
            in_flight: tokens counted by later steps whose outputs are still to come. They stay
                counted, unless this is a roll back: then they were computed from what is rejected.

        Returns:
            Whether progress was rolled back.

        Raises:
            InvalidSchedule: below what was confirmed before, or more than was computed.
        """
        low, high = int(self.confirmed[slot]), int(self.computed[slot]) - in_flight
        if in_flight < 0 or not low <= computed <= high:
            raise InvalidSchedule(
                f"confirmed {computed} computed tokens; expected {low} (confirmed before) to"
                f" {high} (computed, {in_flight} in flight not counted)",
                req_id=req_id,
            )
        rolled_back = computed < high
        self.computed[slot] = computed if rolled_back else computed + in_flight
        self.confirmed[slot] = computed
        return rolled_back

    def check(self, slot: int, req_id: str, max_model_len: int) -> None:
        """Verify one live request's counts.

        Raises:
            InvariantBroken: naming the request and the counts.
        """
        prompt_len, computed, confirmed = self.counts(slot)
        if not 0 < prompt_len <= max_model_len or not 0 <= confirmed <= computed <= max_model_len:
            raise InvariantBroken(
                f"slot {slot} has prompt_len {prompt_len}, computed {computed}, confirmed"
                f" {confirmed}, max_model_len {max_model_len}; expected 0 < prompt_len <= max and"
                " confirmed <= computed <= max",
                req_id=req_id,
            )
