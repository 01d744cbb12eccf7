"""Features by request: items, references to encoder outputs, and which rows go to which token.

Rules
- Everything is keyed by req_id and item number; batch rows appear only in ``gather``, which reads
  them from the step's ``BatchOrder``.
- ``ask`` and ``plan`` change nothing; ``reserve`` and then ``commit`` or ``rollback`` do.
- Before a forward, feature rows delivered == placeholder places of the chunk, for each request.
- References go when *confirmed* progress (less the look-ahead) passes an item, and on every way
  out; releasing is idempotent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vlbatch.backends.arrays import copy_array
from vlbatch.cache import EncoderCache, EntryKey, Features, Reference
from vlbatch.errors import (
    DuplicateRequest,
    EncodeFailed,
    FeatureRowsMismatch,
    InvalidField,
    InvalidSetting,
    InvariantBroken,
    ItemTooLarge,
    StaleOrder,
    UnknownRequest,
    VlbatchError,
)
from vlbatch.features.chunks import PlacedItem, items_in, overlapping
from vlbatch.features.embeds import FeatureSpec, check_embeds
from vlbatch.features.gather import FeatureInputs, gather_features
from vlbatch.features.plan import EncodeTask, FeaturePlan, Limits, RequestItems, StepWalk
from vlbatch.items import Item, validate_items
from vlbatch.order import BatchOrder

Chunk = tuple[int, int]
"""First token and number of tokens."""


@dataclass(frozen=True, slots=True)
class EncodeWork:
    """What is to be encoded before this step can gather.

    Attributes:
        tasks: once a key, in the order of the schedule; group them as the encoder likes.
        hits: keys found ready in this step by a request that did not refer to them before.
        held: keys found ready to which the request referred already.
        evicted: keys that went for space.
    """

    tasks: tuple[EncodeTask, ...]
    hits: tuple[EntryKey, ...]
    held: tuple[EntryKey, ...]
    evicted: tuple[EntryKey, ...]


class FeatureStore:
    """Items and feature references of live and preempted requests.

    Args:
        cache: where features live.
        encode_rows: feature rows that may be encoded in one step; ``None`` for no limit.
        lookahead: tokens past a chunk that a drafter reads.
        whole_items: a chunk may not cut an item.
        spec: what features look like; checks precomputed embeddings and encoder outputs.
        copy_features: keep copies of encoder outputs, for encoders that use their buffers again.
    """

    def __init__(
        self,
        cache: EncoderCache,
        *,
        encode_rows: int | None = None,
        lookahead: int = 0,
        whole_items: bool = False,
        spec: FeatureSpec | None = None,
        copy_features: bool = False,
    ) -> None:
        if lookahead < 0 or (encode_rows is not None and encode_rows < 1):
            raise InvalidSetting(
                f"got lookahead {lookahead}, encode_rows {encode_rows}; expected >= 0 and >= 1",
                setting="lookahead, encode_rows",
            )
        self.cache = cache
        self.spec = spec or FeatureSpec()
        self._copies = copy_features
        self._limits = Limits(encode_rows, lookahead, whole_items)
        self._requests: dict[str, RequestItems] = {}
        self._waiting: dict[EntryKey, EncodeTask] = {}  # reserved, not committed
        self._holders: dict[str, None] = {}  # requests with references, an ordered set
        self._num_changes = 0  # of the requests; plans made before a change are stale

    @property
    def req_ids(self) -> tuple[str, ...]:
        """Requests with items here (perhaps none), live or preempted."""
        return tuple(self._requests)

    @property
    def lookahead(self) -> int:
        """Tokens past a chunk that a drafter reads."""
        return self._limits.lookahead

    @property
    def limits(self) -> Limits:
        """Encode budget, look-ahead and chunking rule, as given."""
        return self._limits

    # -- requests ----------------------------------------------------------------------------
    def check_add(
        self, req_id: str, items: Sequence[Item], prompt_len: int
    ) -> tuple[PlacedItem, ...]:
        """Refuse what ``add`` would refuse; changes nothing. Returns the items by offset.

        Raises:
            DuplicateRequest: the request is known.
            InvalidItem, PlaceholderMismatch: see ``validate_items`` and ``check_embeds``.
            ItemTooLarge: an item can never fit the cache or the encode budget; with
                ``whole_items``, items whose spans overlap count as one.
        """
        if req_id in self._requests:
            raise DuplicateRequest("has items already", req_id=req_id)
        placed = tuple(PlacedItem.of(i) for i in validate_items(items, prompt_len, req_id))
        for each in placed:
            if each.item.embeds is not None:
                check_embeds(each.item, each.num_rows, self.spec, req_id)
        for group in overlapping(placed) if self._limits.whole_items else ([p] for p in placed):
            self._refuse_oversize(group, req_id)
        return placed

    def _refuse_oversize(self, group: Sequence[PlacedItem], req_id: str) -> None:
        """Refuse items that are needed at once if they can never be there at once."""
        rows_of: dict[str, int] = {}
        for placed in group:
            key = placed.item.key
            if placed.item.embeds is None:
                rows_of[key] = max(placed.num_rows, rows_of.get(key, 0))
        num_rows = sum(rows_of.values())
        budgets = [(self.cache.capacity_rows, self.cache.setting, "encoder cache")]
        if self._limits.encode_rows is not None:
            budgets.append((self._limits.encode_rows, "encode_rows", "encode budget of a step"))
        for rows, setting, what in budgets:
            if num_rows > rows:
                names = " and ".join(map(repr, rows_of))
                raise ItemTooLarge(
                    f"item {names} has {num_rows} feature rows; the {what} holds {rows}, so it can"
                    " never be encoded",
                    req_id=req_id,
                    setting=setting,
                )

    def add(
        self,
        req_id: str,
        items: Sequence[Item],
        prompt_len: int,
        *,
        adapter: str = "",
        checked: tuple[PlacedItem, ...] | None = None,
    ) -> None:
        """Take in the items of a request; nothing is encoded or referenced yet.

        Args:
            req_id: not known yet.
            items: in any order.
            prompt_len: tokens of the prompt.
            adapter: part of the cache key.
            checked: what ``check_add`` said of them just before; ``None``: they are checked here.

        Raises:
            VlbatchError: see ``check_add``.
        """
        placed = self.check_add(req_id, items, prompt_len) if checked is None else checked
        self._requests[req_id] = RequestItems(req_id, placed, adapter)
        self._num_changes += 1

    def remove(self, req_id: str) -> None:
        """Forget a request and drop every reference that it holds.

        Raises:
            UnknownRequest: not known.
        """
        self.release_all(req_id)
        del self._requests[req_id]
        self._num_changes += 1

    def reset(self) -> None:
        """Forget every request and every reservation; unreferenced cache entries stay."""
        for req_id in self.req_ids:
            self.remove(req_id)
        for key in self._waiting:
            self.cache.rollback(key)
        self._waiting.clear()

    def release_all(self, req_id: str) -> None:
        """Drop every reference of a request but keep its items (preemption); idempotent.

        Raises:
            UnknownRequest: not known.
        """
        request = self._request(req_id)
        self._release(request, list(request.held))

    def confirm(self, req_id: str, computed: int) -> None:
        """Release the items that confirmed progress has passed, for the drafter too; idempotent.

        Args:
            req_id: the request.
            computed: tokens computed for certain.

        Raises:
            UnknownRequest: not known.
        """
        request = self._request(req_id)
        if request.held:
            reach = computed - self._limits.lookahead
            self._release(request, [n for n in request.held if request.items[n].stop <= reach])

    def holding(self) -> tuple[str, ...]:
        """Requests that hold references: only these need ``confirm``."""
        return tuple(self._holders)

    def _release(self, request: RequestItems, numbers: Iterable[int]) -> None:
        for number in numbers:
            key = request.held.pop(number)
            self.cache.release(key, Reference(request.req_id, number))
        if not request.held:
            self._holders.pop(request.req_id, None)

    def items_of(self, req_id: str) -> tuple[Item, ...]:
        """Items of a request by offset.

        Raises:
            UnknownRequest: not known.
        """
        return tuple(placed.item for placed in self._request(req_id).items)

    def _request(self, req_id: str) -> RequestItems:
        try:
            return self._requests[req_id]
        except KeyError:
            raise UnknownRequest("has no items here", req_id=req_id) from None

    # -- a step ------------------------------------------------------------------------------
    def ask(self, chunks: Mapping[str, Chunk]) -> dict[str, int]:
        """How many of these tokens fit now, if taken in this order. Changes nothing.

        Args:
            chunks: req_id -> first token and tokens wanted.

        Returns:
            req_id -> tokens that the encode budget, the cache, the look-ahead and the chunking
            rule allow. A request that will fail in the step (see ``plan``) gets all it wants.

        Raises:
            UnknownRequest: not known.
        """
        return self._walk(chunks).fit

    def plan(self, chunks: Mapping[str, Chunk]) -> FeaturePlan:
        """Decide hits, evictions and encodes of a step. Changes nothing.

        Args:
            chunks: req_id -> first token and number of tokens.

        Returns:
            The plan. ``failed`` names requests that cannot go on; plan again without them.

        Raises:
            UnknownRequest: not known.
            InvalidSchedule: (``EncodeBudgetExceeded``, ``CacheFull``) fewer tokens fit.
        """
        plan = self._walk(chunks)
        if plan.blocked:
            # popped, or the error would hold this frame and the frame the error
            raise plan.blocked.pop(next(iter(plan.blocked)))
        return plan

    def _walk(self, chunks: Mapping[str, Chunk]) -> FeaturePlan:
        walk = StepWalk(
            self._requests,
            self.cache.ledger(self._wanted(chunks)),
            epoch=self.cache.epoch,
            version=self._version,
            limits=self._limits,
        )
        for req_id, (start, num_tokens) in chunks.items():
            walk.visit(self._request(req_id), start, num_tokens)
        return walk.plan

    @property
    def _version(self) -> tuple[int, int]:
        return self._num_changes, self.cache.version

    def _wanted(self, chunks: Mapping[str, Chunk]) -> list[EntryKey]:
        wanted = []
        for req_id, (start, num_tokens) in chunks.items():
            request = self._request(req_id)
            if start >= request.media_stop:
                continue
            for n in items_in(request.items, start, start + num_tokens + self.lookahead):
                content = request.items[n].item.key
                wanted.append(EntryKey(content, self.cache.epoch, request.adapter))
        return wanted

    def reserve(self, plan: FeaturePlan) -> EncodeWork:
        """Carry a plan out: drop, evict, reserve, refer.

        Raises:
            StaleOrder: requests or the cache changed since, or the plan has failed requests;
                nothing was changed.
        """
        if plan.version != self._version or plan.failed:
            raise StaleOrder("the plan was made for another state, or some of its requests failed")
        for reference in plan.shed:
            self._release(self._requests[reference.req_id], [reference.item])
        self.cache.evict([key for key in plan.evict if self.cache.rows_of(key) is not None])
        for task in plan.encode:
            rows = task.placed.num_rows
            self.cache.reserve(task.key, rows, req_id=task.reference.req_id)
            self._waiting[task.key] = task
        for reference, key in plan.refer.items():
            self.cache.reference(key, reference)
            self._requests[reference.req_id].held[reference.item] = key
            self._holders[reference.req_id] = None
        self.cache.counters.hits += len(plan.hits)
        return EncodeWork(tuple(plan.encode), tuple(plan.hits), tuple(plan.held), tuple(plan.evict))

    def commit(
        self,
        outputs: Mapping[EntryKey, Features],
        errors: Mapping[EntryKey, Exception] | None = None,
    ) -> dict[str, VlbatchError]:
        """Store encoder outputs of reserved entries, and give back what was not encoded.

        Args:
            outputs: key -> one array ``[rows, hidden]`` a level.
            errors: key -> what the encoder raised.

        Returns:
            req_id -> reason, for the requests that refer to an entry that failed or had another
            number of rows; their other references stay until they are removed.

        Raises:
            StaleOrder: a key is not reserved (any more), or is given twice; nothing was changed.
        """
        errors = errors or {}
        late = [key for key in (*outputs, *errors) if key not in self._waiting]
        if late or outputs.keys() & errors.keys():
            raise StaleOrder(
                f"no step waits for {late or sorted(outputs.keys() & errors.keys())}: it was"
                " committed or rolled back before"
            )
        failed: dict[str, VlbatchError] = {}
        for key, features in outputs.items():
            del self._waiting[key]
            try:
                self.spec.check_levels(features)
                kept = tuple(map(copy_array, features)) if self._copies else features
                self.cache.commit(key, kept)
            except FeatureRowsMismatch as error:
                for req_id in self._give_back(key):
                    failed[req_id] = FeatureRowsMismatch(str(error), req_id=req_id)
        for key, cause in errors.items():
            del self._waiting[key]
            for req_id in self._give_back(key):
                reason = f"encoding {key.content!r} raised {type(cause).__name__}: {cause}"
                failed[req_id] = EncodeFailed(reason, req_id=req_id)
                failed[req_id].__cause__ = cause
        return failed

    def rollback(self, work: EncodeWork) -> None:
        """Give back every reservation of a step that was not committed, and its references."""
        for task in work.tasks:
            if self._waiting.get(task.key) is task:
                del self._waiting[task.key]
                self._give_back(task.key)

    def _give_back(self, key: EntryKey) -> list[str]:
        """Undo a reservation; returns the requests that referred to it."""
        references = sorted(self.cache.references(key))
        for reference in references:
            held = self._requests[reference.req_id].held
            del held[reference.item]
            if not held:
                self._holders.pop(reference.req_id, None)
        self.cache.rollback(key)
        return [reference.req_id for reference in references]

    def gather(self, order: BatchOrder, *, shift: int = 0) -> FeatureInputs:
        """Feature rows of every row's chunk and the tokens that take them.

        Args:
            order: the step; decode rows have no features and are skipped.
            shift: read tokens ``[start + shift, stop + shift)`` instead (a drafter); an item not
                encoded yet is skipped only beyond the target's chunk.

        Raises:
            InvalidField: ``shift`` is beyond the look-ahead, for which features are kept.
            UnknownRequest: a request of the order has left.
            InvariantBroken: an entry is not ready, or rows and places disagree; names the
                request.
        """
        if not 0 <= shift <= self.lookahead:
            raise InvalidField(
                f"got shift {shift}; expected 0..{self.lookahead}, the tokens read ahead",
                setting="lookahead",
            )
        return gather_features(order, self._request, self.cache, shift)

    def check(self) -> None:
        """Verify that references here and in the cache are the same, and the cache itself.

        Raises:
            InvariantBroken: naming request, item and key.
        """
        self.cache.check()
        here = {
            (Reference(r, number), key)
            for r, request in self._requests.items()
            for number, key in request.held.items()
        }
        there = {(ref, key) for key in self.cache.present() for ref in self.cache.references(key)}
        if here != there:
            raise InvariantBroken(
                f"references of the store and of the cache differ: {sorted(here ^ there)}"
            )
        reserved = {key for key in self.cache.present() if not self.cache.is_ready(key)}
        if reserved != self._waiting.keys():
            raise InvariantBroken(
                f"reserved in the cache: {sorted(reserved)}; waited for: {sorted(self._waiting)}"
            )
