"""Recording a ``VLBatch``: the same object, whose verbs also tell a ``Recorder``.

A runner that uses ``VLBatch`` adds one call, ``gathered``, for what its engine is about to read;
everything else is seen by itself. Fields are watched too: a row whose field holds another
request's value after a move is recorded as that request's in ``order``, and so the replay finds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from vlbatch.cache import EntryKey, Features
from vlbatch.errors import EncodeFailed, InvalidField, InvalidSchedule
from vlbatch.features import FeatureInputs
from vlbatch.items import IntArray, Item
from vlbatch.order import BatchOrder, OrderPolicy, Scheduled
from vlbatch.replay.field_watch import FieldWatch
from vlbatch.replay.recorder import Recorder
from vlbatch.replay.scenario import Header
from vlbatch.step import Step, VLBatch

E = TypeVar("E")


class RecordedBatch(VLBatch[E]):
    """A batch that is written to a trace; use it in place of ``vl``, as a context manager.

    Requests must come and go before ``begin`` or after ``complete``. Precomputed embeddings are
    recorded as items that are encoded, since the format does not know them; the trace then says
    nothing about the encoder cache, which has to hold them when it is replayed.

    Args:
        vl: without requests and with an empty encoder cache; not to be used any more.
        path: trace to write; through gzip if the name ends in ``.gz``.
        watch_fields: compare the fields that move with the rows before and after each move; what
            lies on a device is copied to the host for it.
        max_rows: see ``Recorder``.

    Raises:
        InvalidField: ``vl`` has requests or features already.

    """

    def __init__(
        self,
        vl: VLBatch[E],
        path: str | Path,
        *,
        watch_fields: bool = True,
        max_rows: int = 1 << 20,
    ) -> None:
        if vl.features.req_ids or vl.features.cache.present():
            raise InvalidField(
                "recording starts with an empty batch and an empty encoder cache; got requests"
                f" {list(vl.features.req_ids)} and {len(vl.features.cache.present())} entries"
            )
        super().__init__(
            vl.batch,
            vl.features,
            family=vl.family,
            tokens_per_second=vl.tokens_per_second,
            auto_confirm=vl.auto_confirm,
            before_leave=vl.before_leave,
        )
        self.recorder = Recorder(path, header=header_of(vl), same_rules=True, max_rows=max_rows)
        self._fields = FieldWatch(vl.batch) if watch_fields else None
        self._misplaced: dict[str, dict[str, str]] | None = None  # found by arrange
        self._rows: tuple[str | None, ...] = ()  # after the last step
        self._newcomers: set[str] = set()  # since then
        self._failed: list[str] | None = None  # collects while a step may fail requests
        self._is_begun = False  # and not gathered yet
        self._entries: set[EntryKey] = set()  # of the cache, when the last step was gathered
        self._epoch = 0

    def __enter__(self) -> RecordedBatch[E]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.recorder.close()

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
        """Admit a request; see ``VLBatch.add``."""
        slot = super().add(
            req_id,
            prompt_len=prompt_len,
            items=items,
            computed=computed,
            fields=fields,
            adapter=adapter,
        )
        named = [replace(item, key=_name(item.key, adapter)) for item in items]
        self.recorder.admit(req_id, prompt_len=prompt_len, items=named, computed=computed)
        for item in named:
            if item.embeds is not None:
                self.recorder.ignore_cache()
                self.recorder.encoded(item.key, item.embeds)
        self._newcomers.add(req_id)
        return slot

    def resume(
        self, req_id: str, *, computed: int = 0, fields: Mapping[str, object] | None = None
    ) -> int:
        """Admit a preempted request again; see ``VLBatch.resume``."""
        prompt_len = self.batch.known_tokens_of(req_id)
        slot = super().resume(req_id, computed=computed, fields=fields)
        self.recorder.admit(req_id, prompt_len=prompt_len, computed=computed)
        self._newcomers.add(req_id)
        return slot

    def remove(self, req_id: str) -> None:
        """Let a request go; see ``VLBatch.remove``."""
        super().remove(req_id)
        self._newcomers.discard(req_id)
        if self._failed is None:
            self.recorder.left(req_id, "abort" if self._is_begun else "finish")
        else:
            self._failed.append(req_id)

    def preempt(self, req_id: str) -> None:
        """Free what a live request holds; see ``VLBatch.preempt``."""
        super().preempt(req_id)
        self._newcomers.discard(req_id)
        self.recorder.left(req_id, "preempt")

    def reset(self) -> None:
        """Drop every request; see ``VLBatch.reset``."""
        super().reset()
        self._newcomers.clear()
        self._rows = ()
        for req_id in self.recorder.req_ids:
            self.recorder.left(req_id, "abort")

    # -- a step ------------------------------------------------------------------------------
    def begin(
        self, scheduled: Scheduled, *, counts: tuple[IntArray, IntArray] | None = None
    ) -> Step:
        """Start a step; see ``VLBatch.begin``. Counts are refused: see ``set_progress``."""
        if counts is not None:
            self.set_progress(*counts)
        self._record_cache_changes()
        self._failed = []
        try:
            step = super().begin(scheduled)
            self.recorder.step(scheduled)
        finally:
            self._tell_failed()
        self.recorder.observed({"hits": [_name(k.content, k.adapter) for k in step.work.hits]})
        self._is_begun = True
        self._misplaced = None
        if self._fields is not None:
            self._fields.before_move()
        return step

    def commit(
        self,
        step: Step,
        outputs: Mapping[EntryKey, Features],
        errors: Mapping[EntryKey, Exception] | None = None,
    ) -> None:
        """Store encoder outputs; see ``VLBatch.commit``."""
        self._failed = []
        try:
            super().commit(step, outputs, errors)
            for key in (*outputs, *(errors or {})):
                refused = EncodeFailed("was not accepted")
                is_ready = self.features.cache.is_ready(key)
                features = outputs[key] if is_ready else refused
                self.recorder.encoded(_name(key.content, key.adapter), features)
        finally:
            self._tell_failed()

    def abandon(self, step: Step) -> None:
        """Give up a step; see ``VLBatch.abandon``."""
        super().abandon(step)
        self._is_begun = False
        self._entries = set(self.features.cache.present())
        self.recorder.given_up()

    def arrange(
        self, step: Step, *, policy: OrderPolicy | None = None, stable: bool | None = None
    ) -> BatchOrder:
        """Move rows; see ``VLBatch.arrange``.

        The format knows one rule: from the first other one on, row orders are only noted.
        """
        batch = self.batch
        if policy not in (None, batch.policy) or stable not in (None, batch.stable):
            self.recorder.ignore_order()
        if self._fields is None:
            return super().arrange(step, policy=policy, stable=stable)
        self._fields.before_move()
        order = super().arrange(step, policy=policy, stable=stable)
        self._misplaced = self._fields.after_move(order.req_ids)
        return order

    def gathered(self, order: BatchOrder, features: FeatureInputs, positions: IntArray) -> None:
        """Record what the engine is about to read; call it in every step, before the forward.

        Args:
            order: the step.
            features: as the engine gets them.
            positions: as the engine gets them, ``[num_axes, num_tokens]``.

        """
        misplaced = self._misplaced
        if misplaced is None:
            misplaced = {} if self._fields is None else self._fields.after_move(order.req_ids)
        rows = self.batch.rows
        old_row_of = {r: row for row, r in enumerate(self._rows) if r not in self._newcomers}
        moved = [r for row, r in enumerate(rows) if old_row_of.get(r, row) != row]
        found_in_row = [next(iter(misplaced.get(r, {"": r}).values())) for r in order.req_ids]
        self.recorder.observed(
            {"order": found_in_row, "regions": order.regions._asdict(), "moved": len(moved)}
        )
        if misplaced:
            self.recorder.note({"fields with the value of another request": misplaced})
        blocks = [
            tuple(_rows(level, segment.rows) for level in segment.features)
            for segment in features.segments
        ]
        self.recorder.gathered(
            order.req_ids, tokens=features.tokens, features=blocks, positions=positions
        )
        self._rows = rows
        self._newcomers.clear()
        self._is_begun = False
        self._entries = set(self.features.cache.present())

    def complete(self, order: BatchOrder, accepted: Mapping[str, int] | None = None) -> None:
        """Count the step's tokens; see ``VLBatch.complete``."""
        super().complete(order, accepted)
        self.recorder.accepted({r: n for r, n in (accepted or {}).items() if self.batch.is_live(r)})

    def confirm(self, req_id: str, computed: int, *, in_flight: int = 0) -> bool:
        """Take tokens as final; see ``VLBatch.confirm``."""
        rolled_back = super().confirm(req_id, computed, in_flight=in_flight)
        self.recorder.confirmed(req_id, computed, in_flight=0 if rolled_back else in_flight)
        return rolled_back

    def set_progress(self, prompt_lens: IntArray, computed: IntArray) -> None:
        """Refuse: a trace has no line for it; see ``docs/alignment.md`` for runners that count.

        Raises:
            InvalidSchedule: always.
        """
        raise InvalidSchedule(
            f"got prompts {prompt_lens.tolist()}, computed {computed.tolist()}; a recorded batch"
            " counts by complete() and confirm(): watch a runner that counts by itself with a"
            " Recorder"
        )

    # -- in between --------------------------------------------------------------------------
    def _tell_failed(self) -> None:
        failed, self._failed = self._failed, None
        for req_id in failed or ():
            self.recorder.left(req_id, "fail")

    def _record_cache_changes(self) -> None:
        """Write what was done to the cache directly since the last step: new weights, drops."""
        cache = self.features.cache
        gone = self._entries.difference(cache.present())
        for key in sorted(key for key in gone if key.epoch == cache.epoch):
            self.recorder.event({"drop": _name(key.content, key.adapter)})
        if cache.epoch != self._epoch:
            self._epoch = cache.epoch
            self.recorder.event({"weights": cache.epoch})
        self._entries = set()


def header_of(vl: VLBatch[E]) -> Header:
    """Settings of a batch as a header of the scenario format."""
    limits = vl.features.limits
    return Header(
        capacity=vl.batch.capacity,
        max_model_len=vl.batch.max_model_len,
        cache_rows=vl.features.cache.capacity_rows,
        encode_rows=limits.encode_rows,
        lookahead=limits.lookahead,
        draft_tokens=vl.batch.num_drafts,
        positions=vl.family,
        tokens_per_second=vl.tokens_per_second,
        order=vl.batch.policy,
        stable=vl.batch.stable,
        chunking="whole" if limits.whole_items else "through",
        confirm="auto" if vl.auto_confirm else "manual",
    )


def _name(content: str, adapter: str) -> str:
    """Key in the trace: the format has no adapters."""
    return f"{content}@{adapter}" if adapter else content


def _rows(level: object, rows: tuple[int, int]) -> object:
    array: Any = level  # Any: the array type is the engine's
    return array[rows[0] : rows[1]]
