"""What a step's chunks need from the encoder and the cache, and how much of them fits.

Pure: everything is decided on a ``Ledger``. One walk serves the scheduler's question (``ask``)
and the plan of a step, so they cannot disagree.

Rules
- Hits are pinned as they are met; of the rest, what this step wants is evicted last, and of that
  what it needs last goes first.
- An item is encoded whole, at the first chunk (plus look-ahead) that reaches one of its places.
- What does not fit shortens the chunk to end before the item, by the look-ahead where possible.
  The shorter chunk is then tried from the start: what is decided is what the chunk that fits
  needs, and a request that cannot move takes nothing.
- If it is only the look-ahead that lacks space, or more encoding than one step may do, the chunk
  goes up to the item, and the drafter reads no feature at that one boundary.
- A request that cannot move at all takes space from references that nothing needs in this step
  (later occurrences, items behind): its own, then those of requests admitted later. So the first
  request always moves, and requests cannot block each other for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from vlbatch.cache import EntryKey, Ledger, Reference
from vlbatch.errors import CacheFull, EncodeBudgetExceeded, FeatureRowsMismatch, InvalidSchedule
from vlbatch.features.chunks import PlacedItem, items_in, uncut_stop


@dataclass(frozen=True, slots=True)
class EncodeTask:
    """One item to encode: the first of the step with its key.

    Attributes:
        key: entry that is reserved for it.
        reference: request and number of the item.
        placed: the item; ``placed.num_rows`` feature rows are expected.
    """

    key: EntryKey
    reference: Reference
    placed: PlacedItem


@dataclass(slots=True)
class FeaturePlan:
    """What carrying out a step does to the cache.

    Attributes:
        version: state of the store and the cache that it was made for.
        fit: req_id -> tokens that fit.
        blocked: req_id -> why fewer fit than were asked for.
        failed: requests that cannot use the cache entry of their key; nothing is taken for them.
        shed: references given up for space.
        evict: entries that go, in order.
        encode: entries to reserve and encode, once a key, in order.
        hits: keys found ready and newly referenced.
        held: keys found ready to which the request referred already.
        refer: references to take.
    """

    version: tuple[int, int]
    fit: dict[str, int] = field(default_factory=dict)
    blocked: dict[str, InvalidSchedule] = field(default_factory=dict)
    failed: dict[str, FeatureRowsMismatch] = field(default_factory=dict)
    shed: dict[Reference, EntryKey] = field(default_factory=dict)
    evict: list[EntryKey] = field(default_factory=list)
    encode: list[EncodeTask] = field(default_factory=list)
    hits: list[EntryKey] = field(default_factory=list)
    held: list[EntryKey] = field(default_factory=list)
    refer: dict[Reference, EntryKey] = field(default_factory=dict)


@dataclass(slots=True)
class RequestItems:
    """Items of one request and its references to cache entries.

    Attributes:
        items: by offset.
        adapter: part of the cache key.
        held: item number -> entry that the request refers to for it.
        media_stop: first token behind every item.
        occurrences: content -> numbers of the items with it that need the encoder.
    """

    req_id: str
    items: Sequence[PlacedItem]
    adapter: str
    held: dict[int, EntryKey] = field(default_factory=dict)
    media_stop: int = field(init=False)
    occurrences: dict[str, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        """Work out what depends on the items alone."""
        self.media_stop = max((placed.stop for placed in self.items), default=0)
        self.occurrences = {}
        for number, placed in enumerate(self.items):
            if placed.item.embeds is None:
                self.occurrences.setdefault(placed.item.key, []).append(number)


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings of a walk; see ``FeatureStore``."""

    encode_rows: int | None
    lookahead: int
    whole_items: bool


@dataclass(frozen=True, slots=True)
class _Obstacle:
    """Why a chunk has to end early."""

    error: type[InvalidSchedule]
    reason: str
    setting: str | None


class StepWalk:
    """Decides a step request by request on one ledger; ``plan`` is the outcome so far.

    Args:
        requests: all requests of the store, in order of admission.
        ledger: scratch copy of the cache.
        epoch: weight epoch of entries to come.
        version: state of the store and the cache.
        limits: settings.
    """

    def __init__(
        self,
        requests: dict[str, RequestItems],
        ledger: Ledger,
        *,
        epoch: int,
        version: tuple[int, int],
        limits: Limits,
    ) -> None:
        self.plan = FeaturePlan(version)
        self.requests = requests
        self.ledger = ledger
        self.epoch = epoch
        self.limits = limits
        self.encoded_rows = 0

    def visit(self, request: RequestItems, start: int, num_tokens: int) -> None:
        """Decide how much of ``[start, start + num_tokens)`` fits, and take what it needs."""
        req_id, wanted = request.req_id, start + num_tokens
        self.plan.fit[req_id] = max(num_tokens, 0)
        if start >= request.media_stop:
            return
        stop = self.uncut(request, start, wanted)
        obstacle = _Obstacle(InvalidSchedule, "a longer chunk would cut an item", "whole_items")
        while stop > start:
            trial = _Trial(self, request, start, stop)
            try:
                end = trial.run()
            except FeatureRowsMismatch as error:
                # without the traceback, whose frames would keep the plan alive
                self.plan.failed[req_id] = error.with_traceback(None)
                return
            if end == stop:
                self._adopt(trial)
                break
            stop, obstacle = end, trial.obstacle
        fit = max(stop - start, 0)
        self.plan.fit[req_id] = fit
        if fit < num_tokens:
            self.plan.blocked[req_id] = obstacle.error(
                f"{obstacle.reason}: {fit} of the {num_tokens} tokens from token {start} on fit",
                req_id=req_id,
                setting=obstacle.setting,
            )

    def uncut(self, request: RequestItems, start: int, stop: int) -> int:
        """End of the chunk after the chunking rule."""
        return uncut_stop(request.items, start, stop) if self.limits.whole_items else stop

    def _adopt(self, trial: _Trial) -> None:
        plan = self.plan
        self.ledger = trial.ledger
        self.encoded_rows = trial.encoded_rows
        plan.shed, plan.evict = self.ledger.shed, self.ledger.evicted
        plan.encode += trial.encode
        plan.hits += [key for key in trial.hits if key not in plan.hits]
        plan.held += [key for key in trial.held if key not in plan.held]
        plan.refer |= trial.refer


class _Trial:
    """One chunk of one request, decided on a copy of the walk's ledger."""

    def __init__(self, walk: StepWalk, request: RequestItems, start: int, stop: int) -> None:
        self._walk = walk
        self._request = request
        self._start = start
        self._stop = stop
        self.ledger = walk.ledger.copy()
        self.encoded_rows = walk.encoded_rows
        self.encode: list[EncodeTask] = []
        self.hits: list[EntryKey] = []
        self.held: list[EntryKey] = []
        self.refer: dict[Reference, EntryKey] = {}
        self.obstacle: _Obstacle  # set by ``run`` where it returns less than the chunk

    def run(self) -> int:
        """Provide for the items of the chunk in order; returns where the chunk has to end.

        Raises:
            FeatureRowsMismatch: the entry of an item's key has another number of rows.
        """
        items = self._request.items
        for number in items_in(items, self._start, self._stop + self._walk.limits.lookahead):
            if items[number].item.embeds is None and not self._take(number):
                stop = self._stop_before(number)
                if stop > self._start:
                    return stop
                if not self._make_room(number):
                    return self._start
        return self._stop

    def _take(self, number: int) -> bool:
        """Provide for one item: find its entry or decide to encode it. False if neither fits."""
        placed, key = self._request.items[number], self._key_of(number)
        rows = self.ledger.rows_of(key)
        if rows is None:
            if self._encode_left() < placed.num_rows or not self.ledger.can_take(placed.num_rows):
                return False
            self.ledger.take(key, placed.num_rows)
            self.encoded_rows += placed.num_rows
            self.encode.append(EncodeTask(key, self._reference(number), placed))
        elif rows != placed.num_rows:
            raise FeatureRowsMismatch(
                f"the cache holds {rows} feature rows for item {placed.item.key!r}, which has"
                f" {placed.num_rows} placeholder tokens: the key does not identify its content",
                req_id=self._request.req_id,
            )
        elif self.ledger.is_pending(key):
            return False
        elif key not in self.ledger.taken:
            found = self.held if self._is_held(number) else self.hits
            if key not in found:
                found.append(key)
        self.ledger.pin(key)
        self._refer_occurrences(key)
        return True

    def _stop_before(self, number: int) -> int:
        """Best end of the chunk without this item, which cannot be had; says why."""
        self.obstacle = self._obstacle(number)
        place = self._request.items[number].first_place_from(self._start)
        stop = self._uncut(place - self._walk.limits.lookahead)
        if stop > self._start or self._should_wait(number):
            return max(stop, self._start)
        return self._uncut(min(place, self._stop))

    def _uncut(self, stop: int) -> int:
        return self._walk.uncut(self._request, self._start, stop)

    def _should_wait(self, number: int) -> bool:
        """Whether the item could be had in a step that belongs to this request alone."""
        if self.ledger.is_pending(self._key_of(number)):
            return True
        rows = self._request.items[number].num_rows
        own_rows = self.encoded_rows - self._walk.encoded_rows
        limit = self._walk.limits.encode_rows
        return limit is not None and self._encode_left() < rows <= limit - own_rows

    def _make_room(self, number: int) -> bool:
        """Provide for an item with space that is held for later; False if that is not enough."""
        if self.obstacle.error is not CacheFull:
            return False
        last_first = reversed(self._walk.requests.values())
        later = takewhile(lambda request: request is not self._request, last_first)
        for request in (self._request, *later):
            for other, key in request.held.items():
                self.ledger.drop_reference(key, Reference(request.req_id, other))
            if self._take(number):
                return True
        return False

    def _reference(self, number: int) -> Reference:
        return Reference(self._request.req_id, number)

    def _is_held(self, number: int) -> bool:
        return number in self._request.held and self._reference(number) not in self.ledger.shed

    def _key_of(self, number: int) -> EntryKey:
        if self._is_held(number):
            return self._request.held[number]
        content = self._request.items[number].item.key
        return EntryKey(content, self._walk.epoch, self._request.adapter)

    def _refer_occurrences(self, key: EntryKey) -> None:
        """Refer to the entry for every occurrence that is still to come, not for this one only."""
        for number in self._request.occurrences[key.content]:
            ahead = self._request.items[number].stop > self._start
            if ahead and not self._is_held(number) and self._key_of(number) == key:
                self.refer[self._reference(number)] = key

    def _encode_left(self) -> float:
        limit = self._walk.limits.encode_rows
        return float("inf") if limit is None else limit - self.encoded_rows

    def _obstacle(self, number: int) -> _Obstacle:
        placed = self._request.items[number]
        name = f"item {placed.item.key!r}"
        if self.ledger.is_pending(self._key_of(number)):
            return _Obstacle(
                InvalidSchedule, f"{name} is being encoded for a step that is still open", None
            )
        if self._encode_left() < placed.num_rows:
            return _Obstacle(
                EncodeBudgetExceeded,
                f"{name} needs {placed.num_rows} feature rows encoded;"
                f" {self._encode_left()} of this step are left",
                "encode_rows",
            )
        return _Obstacle(
            CacheFull,
            f"{name} needs {placed.num_rows} feature rows of cache space, and not so many can be"
            " freed now",
            self.ledger.setting,
        )
