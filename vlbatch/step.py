"""The parts of a VL batch driven together: one admission, one step, one way out.

``VLBatch`` owns no state of its own. It calls ``InputBatch``, ``FeatureStore`` and
``PositionStore`` in the one order in which nothing is half done: all refusals first, the encoder
before any row moves, rows before anything is gathered.

A step::

    step = vl.begin({"a": 1, "b": 40})          # refusals; hits pinned, misses reserved
    vl.encode(step, encoder)                    # or step.tasks -> vl.commit(step, outputs)
    order = vl.arrange(step)                    # one plan: every field and follower, once
    features, positions = vl.gather(order), vl.positions_of(order)
    ...                                         # forward; order.restore(outputs) -> by req_id
    vl.complete(order)                          # progress, confirmed; items behind it released

Gather before the next ``begin``, which may evict what no chunk of its own step needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from vlbatch.batch import InputBatch
from vlbatch.cache import EntryKey, Features
from vlbatch.errors import InvariantBroken, StaleOrder, VlbatchError
from vlbatch.features import EncodeTask, EncodeWork, FeatureInputs, FeatureStore
from vlbatch.items import IntArray, Item
from vlbatch.order import BatchOrder, OrderPolicy, Scheduled
from vlbatch.positions import PositionStore, build_runs, family_of

E = TypeVar("E")

Encoder: TypeAlias = Callable[[Sequence[EncodeTask]], Sequence[Features]]
"""Encodes items, any number at once; returns one tuple of arrays (one a level) a task."""


@dataclass(slots=True)
class Step:
    """One step on its way.

    Attributes:
        scheduled: req_id -> tokens; requests that fail in the step are taken out.
        work: what has to be encoded, what was found.
        failed: requests that left the batch in this step, with the reason.
        open: keys still to be committed.
    """

    scheduled: dict[str, int]
    work: EncodeWork
    failed: dict[str, VlbatchError] = field(default_factory=dict)
    open: set[EntryKey] = field(init=False)

    def __post_init__(self) -> None:
        """Everything is still to be encoded."""
        self.open = {task.key for task in self.work.tasks}

    @property
    def tasks(self) -> tuple[EncodeTask, ...]:
        """Items to encode, once a key."""
        return self.work.tasks


class VLBatch(Generic[E]):
    """Rows, features and positions of the running requests.

    Args:
        batch: rows and fields.
        features: items and encoder cache.
        family: position family; see ``vlbatch.positions.FAMILIES``.
        tokens_per_second: of families with timed videos.
        auto_confirm: a completed step is confirmed at once; else call ``confirm``.
        before_leave: called with a live request's id just before it leaves by ``remove``,
            ``preempt``, ``reset`` or failure, while its fields can still be read: free its KV
            blocks here.
    """

    def __init__(
        self,
        batch: InputBatch[E],
        features: FeatureStore,
        *,
        family: str = "qwen2_vl",
        tokens_per_second: float = 2.0,
        auto_confirm: bool = True,
        before_leave: Callable[[str], None] | None = None,
    ) -> None:
        self.batch = batch
        self.features = features
        self.positions = PositionStore(batch.capacity, family_of(family).num_axes)
        self.family = family
        self.tokens_per_second = tokens_per_second
        self.auto_confirm = auto_confirm
        self.before_leave = before_leave

    # -- requests ----------------------------------------------------------------------------
    def add(
        self,
        req_id: str,
        *,
        prompt_len: int,
        items: Sequence[Item] = (),
        computed: int = 0,
        fields: Mapping[str, object] | None = None,
        adapter: str = "",
    ) -> int:
        """Admit a request everywhere, or nowhere.

        Args:
            req_id: unique among live and preempted requests.
            prompt_len: tokens of the prompt, placeholders included.
            items: media of the prompt.
            computed: tokens whose KV a prefix cache already holds.
            fields: values of declared fields.
            adapter: encoder adapter; part of the cache key.

        Returns:
            Its slot.

        Raises:
            VlbatchError: the refusals of ``InputBatch.check_add`` and ``FeatureStore.check_add``;
                nothing was written.
        """
        self.batch.check_add(req_id, prompt_len=prompt_len, computed=computed, fields=fields)
        placed = self.features.check_add(req_id, items, prompt_len)
        runs = build_runs(
            self.family, items, tokens_per_second=self.tokens_per_second, req_id=req_id
        )
        slot = self.batch.add(req_id, prompt_len=prompt_len, computed=computed, fields=fields)
        self.features.add(req_id, items, prompt_len, adapter=adapter, checked=placed)
        self.positions.add(req_id, runs)
        self.positions.bind(req_id, slot)
        return slot

    def remove(self, req_id: str) -> None:
        """Let a request go on any path (finish, abort, failure), live or preempted.

        Raises:
            UnknownRequest: neither live nor preempted.
        """
        self._leave(req_id)
        self.batch.remove(req_id)
        self.features.remove(req_id)
        self.positions.remove(req_id)

    def preempt(self, req_id: str) -> None:
        """Free a live request's slot, row and references; keep its items, positions and fields.

        Raises:
            UnknownRequest: not live.
        """
        self._leave(req_id)
        self.batch.preempt(req_id)
        self.features.release_all(req_id)
        self.positions.unbind(req_id)

    def _leave(self, req_id: str) -> None:
        if self.before_leave is not None and self.batch.is_live(req_id):
            self.before_leave(req_id)

    def resume(
        self, req_id: str, *, computed: int = 0, fields: Mapping[str, object] | None = None
    ) -> int:
        """Admit a preempted request again; its prompt is now prompt and outputs so far.

        Args:
            req_id: preempted.
            computed: tokens whose KV a prefix cache already holds.
            fields: values instead of those that were kept.

        Returns:
            Its slot.

        Raises:
            VlbatchError: see ``InputBatch.resume``.
        """
        slot = self.batch.resume(req_id, computed=computed, fields=fields)
        self.positions.bind(req_id, slot)
        return slot

    # -- a step ------------------------------------------------------------------------------
    def ask(self, wanted: Scheduled) -> dict[str, int]:
        """How many of these tokens could be scheduled now, if taken in this order; no change.

        Raises:
            UnknownRequest: not live.
        """
        limits = {r: min(n, self.batch.remaining_of(r)) for r, n in wanted.items()}
        return {**limits, **self.features.ask(self._chunks(limits))}

    def _chunks(self, scheduled: Scheduled) -> dict[str, tuple[int, int]]:
        """Chunks that may touch an item: those of prompts. Decodes are behind every item."""
        return {
            req_id: (start, scheduled[req_id])
            for req_id, start in self.batch.prompts_at(scheduled).items()
        }

    def begin(
        self, scheduled: Scheduled, *, counts: tuple[IntArray, IntArray] | None = None
    ) -> Step:
        """Start a step: refuse it, or pin what is cached and reserve what is not.

        A request whose cache entry has another number of rows than its placeholders fails here:
        it leaves the batch and is listed in ``Step.failed``; the others go on.

        Args:
            scheduled: req_id -> tokens.
            counts: prompt lengths and computed tokens by row, of an engine that keeps them
                itself; see ``set_progress``. They are taken where they and the schedule fit each
                other, also if the features do not fit then.

        Raises:
            InvalidSchedule: unknown request, impossible number of tokens, or more than fits
                (``EncodeBudgetExceeded``, ``CacheFull``); nothing was changed but what ``counts``
                say.
        """
        if counts is None:
            self.batch.check_schedule(scheduled)
        else:
            self.batch.set_progress(*counts, scheduled=scheduled)
            self._release_confirmed()
        rest = dict(scheduled)
        plan = self.features.plan(self._chunks(rest))
        failed = plan.failed
        if failed:  # they have no part in the plan, and are still here: nothing fits less well
            rest = {r: n for r, n in scheduled.items() if r not in failed}
            plan = self.features.plan(self._chunks(rest))
        step = Step(rest, self.features.reserve(plan), {**failed})
        for req_id in failed:
            self.remove(req_id)
        return step

    def encode(self, step: Step, encoder: Encoder, *, max_rows: int | None = None) -> None:
        """Encode what the step needs, in calls of at most ``max_rows`` feature rows.

        An item larger than ``max_rows`` is encoded alone. If a call for several items raises, or
        returns another number of outputs than it got tasks, each is tried alone, so that one bad
        item fails nobody else; if it fails alone, what the encoder raised is the ``__cause__`` of
        the error, and the rest goes on.
        """
        waiting = [task for task in step.tasks if task.key in step.open]
        for tasks in _bounded(waiting, max_rows):
            if not self._encode(step, encoder, tasks) and len(tasks) > 1:
                for task in tasks:
                    self._encode(step, encoder, [task])

    def _encode(self, step: Step, encoder: Encoder, tasks: Sequence[EncodeTask]) -> bool:
        """Encode and commit; of a single item also its failure. False if the encoder failed."""
        keys = [task.key for task in tasks]
        outputs = _try_encode(encoder, tasks)
        if not isinstance(outputs, Exception):
            self.commit(step, dict(zip(keys, outputs, strict=True)))
        elif len(tasks) == 1:
            self.commit(step, {}, {keys[0]: outputs})
        return not isinstance(outputs, Exception)

    def commit(
        self,
        step: Step,
        outputs: Mapping[EntryKey, Features],
        errors: Mapping[EntryKey, Exception] | None = None,
    ) -> None:
        """Store encoder outputs; requests whose item failed leave the batch (``step.failed``).

        Raises:
            StaleOrder: a key that this step does not wait for (any more); nothing was changed.
        """
        keys = {*outputs, *(errors or {})}
        if not keys <= step.open:
            raise StaleOrder(f"the step does not wait for {sorted(keys - step.open)}")
        failed = self.features.commit(outputs, errors)
        step.open -= keys
        for req_id, error in failed.items():
            self.remove(req_id)
            step.failed[req_id] = error
            step.scheduled.pop(req_id, None)

    def abandon(self, step: Step) -> None:
        """Give up a step before ``arrange``: reservations and their references go back."""
        self.features.rollback(step.work)
        step.open.clear()

    def arrange(
        self, step: Step, *, policy: OrderPolicy | None = None, stable: bool | None = None
    ) -> BatchOrder:
        """Move rows, once, into the order of the step. Requests that left since are not in it.

        Args:
            step: encoded.
            policy: for this step, instead of the batch's.
            stable: for this step, instead of the batch's.

        Raises:
            StaleOrder: something is still to be encoded.
        """
        if step.open:
            raise StaleOrder(f"not encoded yet: {sorted(step.open)}; commit or abandon the step")
        live = step.scheduled
        if not self.batch.are_live(live):
            live = {r: n for r, n in live.items() if self.batch.is_live(r)}
        return self.batch.apply(self.batch.plan(live, policy=policy, stable=stable))

    def gather(self, order: BatchOrder, *, shift: int = 0) -> FeatureInputs:
        """Features of the step and their tokens; see ``FeatureStore.gather``."""
        return self.features.gather(order, shift=shift)

    def positions_of(self, order: BatchOrder, *, out: IntArray | None = None) -> IntArray:
        """Rotary positions ``[num_axes, num_tokens]`` in row order; see ``PositionStore``."""
        return self.positions.assemble(
            order.req_ids,
            order.slots,
            order.computed,
            order.scheduled,
            out=out,
        )

    def complete(self, order: BatchOrder, accepted: Mapping[str, int] | None = None) -> None:
        """Count the step's tokens as computed and, with ``auto_confirm``, as confirmed.

        Raises:
            StaleOrder, InvalidSchedule: see ``InputBatch.advance``.
        """
        self.batch.advance(order, accepted)
        if self.auto_confirm:
            self.batch.confirm_all()
            self._release_confirmed()

    def confirm(self, req_id: str, computed: int, *, in_flight: int = 0) -> bool:
        """Take ``computed`` tokens as final, or roll back to them; releases items behind them.

        Args:
            req_id: live.
            computed: tokens computed for certain.
            in_flight: tokens of later steps whose outputs are still to come; they stay counted,
                unless this is a roll back.

        Returns:
            Whether progress was rolled back.

        Raises:
            UnknownRequest, InvalidSchedule: see ``InputBatch.confirm``.
        """
        rolled_back = self.batch.confirm(req_id, computed, in_flight=in_flight)
        self.features.confirm(req_id, computed)
        return rolled_back

    def set_progress(self, prompt_lens: IntArray, computed: IntArray) -> None:
        """Take the counts of an engine that keeps them itself; releases items behind them.

        Args:
            prompt_lens: ``[num_rows]`` row -> tokens of its prompt.
            computed: ``[num_rows]`` row -> computed tokens.

        Raises:
            InvalidSchedule: see ``InputBatch.set_progress``.
        """
        self.batch.set_progress(prompt_lens, computed)
        self._release_confirmed()

    def _release_confirmed(self) -> None:
        """Release the items behind what is computed and confirmed."""
        for req_id in self.features.holding():
            self.features.confirm(req_id, self.batch.computed_of(req_id))

    # -- whole -------------------------------------------------------------------------------
    def reset(self) -> None:
        """Drop every request and open step; field addresses and ready cache entries stay."""
        for req_id in self.batch.req_ids:
            self._leave(req_id)
        for req_id in self.positions.req_ids:
            self.positions.remove(req_id)
        self.features.reset()
        self.batch.reset()

    def check(self) -> None:
        """Verify every part, and that they know the same requests.

        Raises:
            InvariantBroken: naming what differs.
        """
        self.batch.check()
        self.features.check()
        self.positions.check()
        known = {*self.batch.req_ids, *self.batch.preempted}
        for part, ids in (
            ("features", set(self.features.req_ids)),
            ("positions", set(self.positions.req_ids)),
        ):
            if ids != known:
                raise InvariantBroken(f"batch and {part} differ in requests {sorted(ids ^ known)}")


def _try_encode(encoder: Encoder, tasks: Sequence[EncodeTask]) -> Sequence[Features] | Exception:
    """Encoder outputs, or what went wrong, without its traceback.

    The frames of a traceback would keep the encoder's inputs and the step alive with the error.
    """
    try:
        outputs = encoder(tasks)
        num_outputs = len(outputs)
    except Exception as error:  # noqa: BLE001 (any fault of the encoder fails its items)
        return error.with_traceback(None)
    if num_outputs != len(tasks):
        return ValueError(f"the encoder returned {num_outputs} outputs for {len(tasks)} items")
    return outputs


def _bounded(tasks: Iterable[EncodeTask], max_rows: int | None) -> Iterable[Sequence[EncodeTask]]:
    """Consecutive tasks, as many at a time as ``max_rows`` allows."""
    bundle: list[EncodeTask] = []
    rows = 0
    for task in tasks:
        rows += task.placed.num_rows
        if bundle and max_rows is not None and rows > max_rows:
            yield bundle
            bundle, rows = [], task.placed.num_rows
        bundle.append(task)
    if bundle:
        yield bundle
