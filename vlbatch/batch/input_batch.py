"""The running batch: slots, rows, declared fields and progress of every live request.

Rules
- One plan a step: ``plan`` is pure, ``apply`` moves every field and every follower once.
- Errors come before any write; look-ups never insert.
- Between ``remove`` and ``apply`` a row may be a hole; after ``apply`` rows are dense.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar, get_args

import numpy as np

from vlbatch.backends.base import Backend
from vlbatch.backends.dtypes import convert
from vlbatch.batch.plan import BatchPlan, BatchSnapshot, BatchState
from vlbatch.batch.planner import OrderPlanner, OrderRule
from vlbatch.batch.requests import BatchRequests
from vlbatch.errors import (
    InvalidField,
    InvalidSchedule,
    InvalidSetting,
    InvariantBroken,
    StaleOrder,
    UnknownRequest,
)
from vlbatch.fields import Field, FieldRegistry, FieldStorage, packed
from vlbatch.order import (
    BatchOrder,
    Follower,
    IntArray,
    OrderPolicy,
    Scheduled,
    swap_rows,
)

E = TypeVar("E")


class InputBatch(BatchRequests[E], Generic[E]):
    """State of the running requests.

    Besides the declared fields there is ``slot_of_row``, int32 ``[capacity]``: row of the
    current step -> slot, -1 past the last.

    Args:
        fields: declarations; see ``vlbatch.fields``.
        backend: where arrays live.
        capacity: most requests at once.
        max_model_len: longest request, prompt and outputs, in tokens.
        num_drafts: k; a decode may compute up to ``k + 1`` tokens.
        policy: which regions rows are grouped in.
        stable: keep relative order within a region (moves more rows).

    Raises:
        InvalidField: contradicting declarations.
        InvalidSetting: a setting out of range.
    """

    # Any: the stored array type is the backend's own business
    def __init__(
        self,
        fields: Sequence[Field],
        *,
        backend: Backend[Any, E],
        capacity: int,
        max_model_len: int,
        num_drafts: int = 0,
        policy: OrderPolicy = "split",
        stable: bool = False,
    ) -> None:
        _check_settings(capacity, max_model_len, num_drafts, policy)
        slot_of_row = packed(
            "slot_of_row",
            (capacity,),
            "int32",
            default=-1,
            rebuild=lambda order: order.slots.astype(np.int32),
        )
        registry = FieldRegistry([*fields, slot_of_row])
        storage: FieldStorage[Any, E] = FieldStorage(registry, capacity, num_drafts, backend)
        super().__init__(storage, max_model_len=max_model_len)
        self.policy = policy
        self.stable = stable
        self.batch_id = secrets.token_hex(8)
        self._num_steps = 0
        self._order: BatchOrder | None = None  # the latest, until it is counted
        self._order_admission: IntArray = np.zeros(0, dtype=np.int64)  # its row -> rank
        self._planner = OrderPlanner(
            self._table, self.progress, max_model_len=max_model_len, num_drafts=num_drafts
        )

    # -- a step ------------------------------------------------------------------------------
    def check_schedule(self, scheduled: Scheduled) -> None:
        """Refuse a schedule that ``plan`` would refuse; changes nothing.

        Raises:
            InvalidSchedule: an unknown request, or tokens outside 1 .. what remains.
        """
        self._planner.check(scheduled)

    def plan(
        self,
        scheduled: Scheduled,
        *,
        policy: OrderPolicy | None = None,
        stable: bool | None = None,
    ) -> BatchPlan:
        """Decide the next order: close holes and split regions in one go. Changes nothing.

        Args:
            scheduled: req_id -> tokens; live requests that are not in it keep their slot and get
                a row behind the others.
            policy: for this step, instead of the batch's.
            stable: for this step, instead of the batch's.

        Raises:
            InvalidSchedule: see ``check_schedule``.
            InvalidSetting: no such policy.
        """
        policy = self.policy if policy is None else policy
        _check_policy(policy)
        stable = self.stable if stable is None else stable
        state = BatchState(self.batch_id, self._num_steps, self._version)
        return self._planner.plan(scheduled, OrderRule(policy, stable), state)

    def apply(self, plan: BatchPlan) -> BatchOrder:
        """Move every row-resident field and every follower, once; write the derived fields.

        Raises:
            StaleOrder: the batch changed since the plan was made, or it is another batch's.
            InvalidField: a derived field, here or of a follower, does not hold the step; nothing
                was moved.
        """
        order, moves = plan.order, plan.moves
        if plan.state != BatchState(self.batch_id, self._num_steps, self._version):
            raise StaleOrder("the plan was made for another batch or for an earlier state of it")
        derived = self._storage.derived.derive(order)
        followers_derived = self._followers.derive(order)
        self._storage.move(moves)
        self._storage.derived.write(derived)
        self._table.move(moves)
        self._table.settle()
        self._planner.remember(plan)
        self._order = order
        self._order_admission = self._table.admission[order.slots]
        self._num_steps += 1
        self._version += 1
        self._followers.follow(moves, followers_derived)
        return order

    def swap_rows(self, first: int, second: int) -> None:
        """Exchange two rows by hand, holes too; the next plan may decide otherwise.

        Every per-request field and every follower moves, ``slot_of_row`` then tells of all rows in
        use; fields that follow from an order wait for the next one.

        Raises:
            UnknownRequest: a row past the last that is in use; nothing was changed.
        """
        num_rows = self._table.num_rows
        for row in (first, second):
            if not 0 <= row < num_rows:
                raise UnknownRequest(f"row {row} is not in use; expected 0..{num_rows - 1}")
        if first == second:
            return
        moves = swap_rows(first, second, self._table.is_hole)
        self._storage.move(moves)
        self._table.move(moves)
        rows = self._table.slot_of_row[: self._table.num_rows]
        self._storage.derived.overwrite("slot_of_row", rows)
        self._followers.follow(moves)
        self._version += 1

    def register_follower(self, follower: Follower) -> None:
        """Let a table in row order follow from these rows on.

        It gets the moves of every later ``apply``, and vacated rows when a request leaves. A
        ``RequestFollower`` is also told of requests and orders.
        """
        self._followers.register(follower)

    def advance(self, order: BatchOrder, accepted: Mapping[str, int] | None = None) -> None:
        """Count the latest step's tokens as computed (not yet as confirmed).

        Args:
            order: what ``apply`` returned last; requests that left since are skipped.
            accepted: req_id -> accepted drafts of a decode; all of them where not given.

        Raises:
            StaleOrder: not the latest order of this batch, or it was counted already.
            InvalidSchedule: accepted drafts out of range.
            UnknownRequest: drafts accepted of a request that is not in the order.
        """
        if order is not self._order:
            raise StaleOrder(
                f"step {order.step} is not the latest order of this batch, or was counted already"
            )
        alive = self._table.admission[order.slots] == self._order_admission
        self.progress.advance(order, alive, accepted or {})
        self._order = None
        self._version += 1

    def set_progress(
        self, prompt_lens: IntArray, computed: IntArray, *, scheduled: Scheduled | None = None
    ) -> None:
        """Take the counts of an engine that keeps them itself, as final, for every row.

        Args:
            prompt_lens: ``[num_rows]`` row -> tokens of its prompt; holes are skipped.
            computed: ``[num_rows]`` row -> computed tokens; fewer than before is a roll back.
            scheduled: what is to be planned with these counts: it is checked with them.

        Raises:
            InvalidSchedule: out of range, or the schedule does not fit; names the first such
                request, nothing was changed.
            InvalidField: no integers, or not one a row.
        """
        taken = ~self._table.is_hole
        prompt_lens = self._by_row(prompt_lens, "prompt_lens")
        computed = self._by_row(computed, "computed")
        slots = self._table.slot_of_row[: self._table.num_rows][taken]
        progress = self.progress.with_counts(slots, prompt_lens[taken], computed[taken])
        wrong = progress.out_of_range(slots, self.max_model_len)
        if len(wrong):
            slot = int(wrong[0])
            prompt_len, done, _ = progress.counts(slot)
            raise InvalidSchedule(
                f"has {done} computed tokens and a prompt of {prompt_len}; expected"
                f" 0..{self.max_model_len} and 1..{self.max_model_len}",
                req_id=self._table.req_ids_of(wrong)[0],
            )
        if scheduled is not None:
            self._planner.check(scheduled, progress)
        self.progress.take(progress)
        self._planner.forget()
        self._version += 1

    def _by_row(self, values: IntArray, what: str) -> IntArray:
        checked: IntArray = convert(values, "int64", what=what)
        if checked.shape != (self.num_rows,):
            raise InvalidField(f"{what} got shape {checked.shape}; expected ({self.num_rows},)")
        return checked

    def confirm(self, req_id: str, computed: int, *, in_flight: int = 0) -> bool:
        """Take computed tokens as final, or roll back to them; see ``Progress.confirm``."""
        slot = self._table.slot_of(req_id)
        rolled_back = self.progress.confirm(slot, computed, req_id, in_flight)
        self._version += 1
        return rolled_back

    def confirm_all(self) -> None:
        """Take every live request's computed tokens as final."""
        self.progress.confirmed[:] = self.progress.computed

    # -- whole batch -------------------------------------------------------------------------
    def reset(self) -> None:
        """Drop every request and set every field to its default, in place.

        Addresses stay valid; orders and plans made before are stale.
        """
        self._clear_rows(0, self._table.num_rows)
        self._storage.reset()
        self._table.clear()
        self._preempted.clear()
        self._followers.on_reset()
        self._order = None
        self.batch_id = secrets.token_hex(8)
        self._version += 1

    def snapshot(self) -> BatchSnapshot:
        """Copy everything to the host."""
        per_request = [n for n, f in self.registry.items() if f.is_per_request]
        whole = [n for n, f in self.registry.items() if not f.is_per_request]
        return BatchSnapshot(
            rows=self.rows,
            slots=dict(self._table.slots),
            progress={r: self.progress.counts(s) for r, s in self._table.slots.items()},
            values={r: {n: self.read(r, n) for n in per_request} for r in self._table.slots},
            whole={n: self._storage.read_whole(n) for n in whole},
        )

    def check(self) -> None:
        """Verify that slots, rows, progress and ragged lengths agree.

        Raises:
            InvariantBroken: naming the request, slot and row.
        """
        self._table.check()
        for req_id, slot in self._table.slots.items():
            self.progress.check(slot, req_id, self.max_model_len)
        both = self._table.slots.keys() & self._preempted.keys()
        if both:
            raise InvariantBroken(f"live and preempted at once: {sorted(both)}")
        self._storage.check()
        self._check_slot_of_row()
        self._followers.check()

    def _check_slot_of_row(self) -> None:
        """Kernels find slots by it: in rows that an order or a swap knew, it says what is so."""
        told = self.to_host("slot_of_row")
        true = self._table.slot_of_row
        known = (told >= 0) & (true >= 0)
        known[known] &= ~self._table.is_new[true[known]]
        wrong = np.flatnonzero(known & (told != true))
        if len(wrong):
            row = int(wrong[0])
            raise InvariantBroken(
                f"slot_of_row says slot {told[row]} of row {row}; expected {true[row]}",
                req_id=self._table.req_ids_of(true[wrong])[0],
            )


def _check_settings(capacity: int, max_model_len: int, num_drafts: int, policy: str) -> None:
    least = {
        "capacity": (capacity, 1),
        "max_model_len": (max_model_len, 1),
        "num_drafts": (num_drafts, 0),
    }
    for setting, (got, expected) in least.items():
        if got < expected:
            raise InvalidSetting(f"got {got}; expected >= {expected}", setting=setting)
    _check_policy(policy)


def _check_policy(policy: str) -> None:
    if policy not in get_args(OrderPolicy):
        raise InvalidSetting(
            f"got {policy!r}; expected one of {get_args(OrderPolicy)}", setting="policy"
        )
