"""What a step's chunks need from the encoder and the cache, and how much of them fits.

Pure: everything is decided on a ``Ledger``. One walk serves the scheduler's question (``ask``)
and the plan of a step, so they cannot disagree.

Rules
- Hits are pinned as they are met; of the rest, an entry wanted in this step is evicted last.
- An item is encoded whole, at the first chunk (plus look-ahead) that reaches one of its places.
- What does not fit shortens the chunk to end before the item, by the look-ahead where possible.
- A request that cannot move at all gives up references that are not needed now (for later
  occurrences, for a look-ahead behind it), so requests cannot block each other for ever.
- If it is only the look-ahead that lacks cache space, the chunk goes up to the item, and the
  drafter reads no feature at that one boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
        version: state of the cache that it was made for.
        fit: req_id -> tokens that fit.
        blocked: req_id -> why fewer fit than were asked for.
        failed: requests that cannot use the cache entry of their key.
        shed: references given up for space.
        evict: entries that go, in order.
        encode: entries to reserve and encode, once a key, in order.
        hits: keys found ready and newly referenced.
        held: keys found ready to which the request referred already.
        refer: references to take.

    """

    version: int
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

    """

    req_id: str
    items: Sequence[PlacedItem]
    adapter: str
    held: dict[int, EntryKey] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings of a walk; see ``FeatureStore``."""

    encode_rows: int | None
    lookahead: int
    whole_items: bool


class StepWalk:
    """Decides a step request by request on one ledger; ``plan`` is the outcome so far.

    Args:
        ledger: scratch copy of the cache.
        epoch: weight epoch of entries to come.
        version: state of the cache.
        limits: settings.

    """

    def __init__(self, ledger: Ledger, *, epoch: int, version: int, limits: Limits) -> None:
        self.plan = FeaturePlan(version, evict=ledger.evicted)
        self.ledger = ledger
        self.epoch = epoch
        self.limits = limits
        self.encode_left = limits.encode_rows

    def visit(self, request: RequestItems, start: int, num_tokens: int) -> None:
        """Decide how much of ``[start, start + num_tokens)`` fits, and take what it needs."""
        stop = start + num_tokens
        if self.limits.whole_items:
            stop = uncut_stop(request.items, start, stop)
        if stop < start + num_tokens:
            self.plan.blocked[request.req_id] = InvalidSchedule(
                f"a chunk of {num_tokens} tokens at token {start} would cut an item;"
                f" expected at most {stop - start}",
                req_id=request.req_id,
                setting="whole_items",
            )
        try:
            stop = _Visit(self, request, start, stop).run() if stop > start else start
        except FeatureRowsMismatch as error:
            self.plan.failed[request.req_id] = error
            stop = start
        self.plan.fit[request.req_id] = stop - start


class _Visit:
    """The walk through one request's chunk."""

    def __init__(self, walk: StepWalk, request: RequestItems, start: int, stop: int) -> None:
        self._walk = walk
        self._plan = walk.plan
        self._ledger = walk.ledger
        self._request = request
        self._start = start
        self._stop = stop
        self._held = dict(request.held)  # without what is shed
        self._taken: set[int] = set()  # items of this chunk that are provided for

    def run(self) -> int:
        """Take the items of the chunk in order; returns where the chunk has to end."""
        items = self._request.items
        lookahead = self._walk.limits.lookahead
        for number in items_in(items, self._start, self._stop + lookahead):
            if items[number].item.embeds is None and not self._take(number):
                place = items[number].first_place_from(self._start)
                before = max(place - lookahead, self._start)
                if before > self._start:
                    return self._shorten(before, number)
                self._shed_unneeded(number)
                if not self._take(number):
                    space = self._ledger.can_take(items[number].num_rows)
                    return self._shorten(before if space else place, number)
            self._taken.add(number)
        return self._stop

    def _key_of(self, number: int) -> EntryKey:
        request = self._request
        content = request.items[number].item.key
        return self._held.get(number) or EntryKey(content, self._walk.epoch, request.adapter)

    def _take(self, number: int) -> bool:
        """Provide for one item: find its entry or decide to encode it. False if neither fits."""
        placed = self._request.items[number]
        key = self._key_of(number)
        rows = self._ledger.rows_of(key)
        if rows is None:
            if not self._reserve(key, placed.num_rows):
                return False
            reference = Reference(self._request.req_id, number)
            self._plan.encode.append(EncodeTask(key, reference, placed))
        elif rows != placed.num_rows:
            raise FeatureRowsMismatch(
                f"the cache holds {rows} feature rows for item {placed.item.key!r}, which has"
                f" {placed.num_rows} placeholder tokens: the key does not identify its content",
                req_id=self._request.req_id,
            )
        elif key not in self._ledger.taken:
            found = self._plan.held if number in self._held else self._plan.hits
            if key not in found:
                found.append(key)
        self._ledger.pin(key)
        self._refer_occurrences(key)
        return True

    def _refer_occurrences(self, key: EntryKey) -> None:
        """Refer to the entry for every occurrence that is still to come, not for this one only."""
        for number, placed in enumerate(self._request.items):
            ahead = placed.stop > self._start and placed.item.embeds is None
            if ahead and number not in self._held and self._key_of(number) == key:
                self._held[number] = key
                self._plan.refer[Reference(self._request.req_id, number)] = key

    def _reserve(self, key: EntryKey, rows: int) -> bool:
        budget = self._walk.encode_left
        if (budget is not None and rows > budget) or not self._ledger.can_take(rows):
            return False
        self._ledger.take(key, rows)
        if budget is not None:
            self._walk.encode_left = budget - rows
        return True

    def _shed_unneeded(self, wanted: int) -> None:
        """Give up references to all but the items provided for so far and the wanted one."""
        for number, key in list(self._held.items()):
            if number not in self._taken and number != wanted:
                reference = Reference(self._request.req_id, number)
                del self._held[number]
                if self._plan.refer.pop(reference, None) is None:
                    self._plan.shed[reference] = key
                    self._ledger.shed(key, reference)

    def _shorten(self, stop: int, blocker: int) -> int:
        placed = self._request.items[blocker]
        budget = self._walk.encode_left
        if self._walk.limits.whole_items:
            stop = uncut_stop(self._request.items, self._start, stop)
        if budget is not None and placed.num_rows > budget:
            error: InvalidSchedule = EncodeBudgetExceeded(
                f"item {placed.item.key!r} needs {placed.num_rows} feature rows encoded; {budget}"
                f" of this step are left: at most {stop - self._start} tokens fit",
                req_id=self._request.req_id,
                setting="encode_rows",
            )
        else:
            error = CacheFull(
                f"item {placed.item.key!r} needs {placed.num_rows} feature rows of cache space,"
                f" and not so many can be freed now: at most {stop - self._start} tokens fit",
                req_id=self._request.req_id,
                setting=self._ledger.setting,
            )
        self._plan.blocked[self._request.req_id] = error
        return stop
