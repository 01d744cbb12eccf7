"""The next order of a batch, from its rows, its progress and a schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vlbatch.batch.plan import BatchPlan, BatchState
from vlbatch.batch.progress import Progress
from vlbatch.batch.rows import RowTable
from vlbatch.errors import InvalidSchedule
from vlbatch.order import (
    HOLE,
    IDLE,
    BatchOrder,
    IntArray,
    OrderPolicy,
    Scheduled,
    place_rows,
    stay_rows,
)


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A schedule as arrays.

    Attributes:
        slots: by request, in the order of the schedule.
        counts: tokens, by request.
        tokens: int64 ``[capacity]``, tokens by slot, 0 where nothing is scheduled.
        fewest: smallest of ``counts``.
    """

    slots: IntArray
    counts: tuple[int, ...]
    tokens: IntArray
    fewest: int


class OrderRule(NamedTuple):
    """How rows are grouped in a step; see ``place_rows``."""

    policy: OrderPolicy
    stable: bool


class OrderPlanner:
    """Plans steps; keeps what the last schedule and order said, since steady decode repeats them.

    Args:
        table: who is in which row.
        progress: how far each request is.
        max_model_len: longest request, in tokens.
        num_drafts: drafts of a decode at most.
    """

    def __init__(
        self,
        table: RowTable,
        progress: Progress,
        *,
        max_model_len: int,
        num_drafts: int,
    ) -> None:
        self._table = table
        self._progress = progress
        self._max_model_len = max_model_len
        self._num_drafts = num_drafts
        self._asked: _Asked | None = None
        self._latest: BatchPlan | None = None  # that was applied
        self._latest_changes = 0  # ``num_changes`` of the table then

    def check(self, scheduled: Scheduled, progress: Progress | None = None) -> None:
        """Refuse what ``plan`` would refuse, with the batch's progress or with another.

        Raises:
            InvalidSchedule: see ``InputBatch.check_schedule``.
        """
        self._check(scheduled, self._read(scheduled), progress or self._progress)

    def plan(self, scheduled: Scheduled, rule: OrderRule, state: BatchState) -> BatchPlan:
        """Plan a step; see ``InputBatch.plan``."""
        asked = self._read(scheduled)
        plan = self._repeat(asked, rule, state)
        if plan is None:
            self._check(scheduled, asked, self._progress)
            plan = self._arrange(asked, rule, state)
        return plan

    def remember(self, plan: BatchPlan) -> None:
        """Say that a plan was applied."""
        self._latest, self._latest_changes = plan, self._table.num_changes

    def forget(self) -> None:
        """Say that progress was set by hand."""
        self._latest = None

    def _check(self, scheduled: Scheduled, asked: _Asked, progress: Progress) -> None:
        most = progress.most(slice(None), self._num_drafts, self._max_model_len)
        if asked.fewest < 1 or np.count_nonzero(asked.tokens > most - progress.computed):
            self._refuse(scheduled, progress, most - progress.computed)

    def _read(self, scheduled: Scheduled) -> _Asked:
        """Tokens by slot; kept while the same is asked for, as in steps that only decode."""
        try:
            slots = self._table.slots_of(scheduled)
        except KeyError as error:
            raise InvalidSchedule("is not in the batch", req_id=error.args[0]) from None
        counts = tuple(scheduled.values())
        if self._asked is None or self._asked.slots is not slots or self._asked.counts != counts:
            tokens = np.zeros(self._table.capacity, dtype=np.int64)
            tokens[slots] = _integers(scheduled)
            tokens.flags.writeable = False
            self._asked = _Asked(slots, counts, tokens, min(counts, default=1))
        return self._asked

    def _refuse(self, scheduled: Scheduled, progress: Progress, most: IntArray) -> None:
        for req_id, tokens in scheduled.items():
            slot = self._table.slots[req_id]
            if not 1 <= tokens <= most[slot]:
                raise InvalidSchedule(
                    f"got {tokens} tokens; expected 1..{most[slot]}"
                    f" ({progress.computed[slot]} of a prompt of"
                    f" {progress.prompt_len[slot]} are computed, {self._num_drafts} drafts a"
                    f" decode, max_model_len {self._max_model_len})",
                    req_id=req_id,
                )

    def _arrange(self, asked: _Asked, rule: OrderRule, state: BatchState) -> BatchPlan:
        """Place every row, and say what is in it then."""
        table, progress, num_reqs = self._table, self._progress, len(asked.counts)
        classes = progress.classes()
        if num_reqs < len(table.slots):
            classes[asked.tokens == 0] = IDLE
        old_slots = table.slot_of_row[: table.num_rows]
        old_classes = classes.take(old_slots)
        if table.has_holes:
            old_classes[old_slots < 0] = HOLE
        moves = place_rows(
            old_classes, table.newcomer_rank(old_slots), policy=rule.policy, stable=rule.stable
        )
        all_slots = table.slots_after(moves)
        slots = all_slots[:num_reqs]
        order = BatchOrder(
            batch_id=state.batch_id,
            step=state.num_steps,
            policy=rule.policy,
            req_ids=table.req_ids_of(slots),
            idle=table.req_ids_of(all_slots[num_reqs:]),
            slots=slots,
            prompt_lens=progress.prompt_len.take(slots),
            computed=progress.computed.take(slots),
            scheduled=asked.tokens.take(slots),
            classes=classes.take(slots),
        )
        return BatchPlan(order, moves, asked.tokens, state)

    def _repeat(self, asked: _Asked, rule: OrderRule, state: BatchState) -> BatchPlan | None:
        """Plan the latest order again, further on, where that is right: steady decode.

        The same requests, in the same rows as then, decode as many tokens as then, and those fit.
        """
        latest = self._latest
        if latest is None or latest.tokens_of_slot is not asked.tokens:
            return None
        order = latest.order
        if order.policy != rule.policy or order.regions.decode < order.num_reqs:
            return None
        if self._latest_changes != self._table.num_changes:
            return None
        computed = self._progress.computed.take(order.slots)
        too_long = computed + order.scheduled > self._max_model_len
        if np.count_nonzero(too_long | (computed < order.prompt_lens)):
            return None
        moves = latest.moves if latest.moves.is_identity else stay_rows(self._table.num_rows)
        order = order.further(state.num_steps, computed)
        return BatchPlan(order, moves, asked.tokens, state)


def _integers(scheduled: Scheduled) -> IntArray:
    """Tokens of a schedule, int64 ``[num_reqs]``.

    Raises:
        InvalidSchedule: one is no integer, or larger than any.
    """
    counts = np.array(list(scheduled.values()) or [0])
    if counts.dtype.kind in "iu":
        return counts[: len(scheduled)].astype(np.int64)
    for req_id, tokens in scheduled.items():
        if not isinstance(tokens, int | np.integer) or abs(int(tokens)) > np.iinfo(np.int64).max:
            raise InvalidSchedule(f"got {tokens!r} tokens; expected an integer", req_id=req_id)
    return counts.astype(np.int64)
