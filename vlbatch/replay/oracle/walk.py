"""What a step needs from the cache and whether it fits, request after request on a scratch copy.

The rules. An item is encoded whole, once a key, for the first chunk (and look-ahead) that holds one
of its places. What is found is used, if it has the right number of rows; else the request fails.
Entries that nobody refers to make room, longest unused first, those wanted in this step last; of
these, what is needed first goes last of all.

A chunk that does not fit ends before the item in question, by the look-ahead where it can; the
shorter chunk is tried anew, and what does not move takes nothing. If the item is only read ahead,
the chunk goes up to it and the follower does without, unless waiting a step would give it encoding.
Where there is no room and the request could not move at all, references that nothing uses yet in
this step are given up: its own, then those of requests admitted later, the latest first.
"""

from __future__ import annotations

from collections.abc import Mapping

from vlbatch.replay.oracle.cache import OracleCache
from vlbatch.replay.oracle.requests import OracleRequest
from vlbatch.replay.oracle.values import Finding, Key, Occurrence

_UNWANTED, _WANTED, _GIVEN_UP = range(3)

Turn = tuple[int, int]
"""When an entry goes: the smallest first, of equal ones any."""


class _Scratch:
    """What the cache would be after the requests seen so far."""

    def __init__(self, rows: dict[Key, int], evictable: dict[Key, Turn]) -> None:
        self.rows = rows  # of every entry
        self.evictable = evictable  # in order of eviction
        self.evicted: list[Key] = []
        self.used: set[Key] = set()  # by a request seen so far
        self.refer: dict[Occurrence, Key] = {}
        self.give_up: dict[Occurrence, Key] = {}
        self.encode: list[Key] = []
        self.hits: list[Key] = []
        self.held: list[Key] = []
        self.findings: list[Finding] = []

    def copy(self) -> _Scratch:
        """A copy that can be changed."""
        twin = _Scratch(dict(self.rows), dict(self.evictable))
        twin.evicted, twin.encode = list(self.evicted), list(self.encode)
        twin.hits, twin.held = list(self.hits), list(self.held)
        twin.refer, twin.give_up = dict(self.refer), dict(self.give_up)
        twin.used, twin.findings = set(self.used), list(self.findings)
        return twin


class Walk:
    """The outcome for one schedule.

    Args:
        cache: present state; not changed.
        requests: all there are, in order of admission.
        scheduled: req_id -> tokens, in order.
        encode_rows: most feature rows encoded in a step.
        lookahead: tokens that a follower reads ahead.
        whole_items: chunks may not cut items.
        victims: entries that were seen to go, in order; ``None`` to choose them.

    Attributes:
        fit: req_id -> tokens that fit; of a request that fails, all of them.
        mismatched: requests that fail, because of an entry with another number of rows.
        scratch: what the cache would be.

    """

    def __init__(
        self,
        cache: OracleCache,
        requests: Mapping[str, OracleRequest],
        scheduled: Mapping[str, int],
        *,
        encode_rows: int | None,
        lookahead: int,
        whole_items: bool,
        victims: list[Key] | None = None,
    ) -> None:
        self._cache = cache
        self._requests = requests
        self._encode_rows = encode_rows
        self._lookahead = lookahead
        self._whole = whole_items
        self._victims = victims
        needs = self._needs(scheduled)
        turns = {
            key: (_WANTED, -needs[key]) if key in needs else (_UNWANTED, since)
            for key, since in cache.unused.items()
        }
        self.scratch = _Scratch(
            rows={key: entry.rows for key, entry in cache.entries.items()},
            evictable=dict(sorted(turns.items(), key=lambda each: each[1])),
        )
        self.fit: dict[str, int] = {}
        self.mismatched: list[str] = []
        for req_id, tokens in scheduled.items():
            fit = self._place(requests[req_id], tokens)
            if fit is None:
                self.mismatched.append(req_id)
            self.fit[req_id] = tokens if fit is None else fit
        self.findings = self.scratch.findings
        extra = (victims or [])[len(self.scratch.evicted) :]
        if extra:
            self.findings.append(Finding("entries evicted without need", [], extra))

    def _needs(self, scheduled: Mapping[str, int]) -> dict[Key, int]:
        """What the step needs, with the number of its first need."""
        needs: dict[Key, int] = {}
        for req_id, tokens in scheduled.items():
            request = self._requests[req_id]
            stop = request.computed + tokens + self._lookahead
            for number in request.items_in(request.computed, stop):
                needs.setdefault((request.items[number].key, self._cache.epoch), len(needs))
        return needs

    # -- one request -------------------------------------------------------------------------
    def _place(self, request: OracleRequest, tokens: int) -> int | None:
        """Find the longest chunk that fits and take what it needs; returns its tokens.

        ``None`` if the request fails.
        """
        start, stop = request.computed, request.computed + tokens
        if all(item.stop <= start for item in request.items):
            return tokens
        stop = self._uncut(request, start, stop)
        before = self.scratch
        while stop > start:
            self.scratch = before.copy()
            end = self._try(request, start, stop)
            if end == stop:
                return stop - start
            if end is None:
                self.scratch = before
                return None
            stop = end
        self.scratch = before
        return 0

    def _try(self, request: OracleRequest, start: int, stop: int) -> int | None:
        """Provide for a chunk; returns where it has to end, ``None`` if the request fails."""
        encoded_before = self._rows_to_encode()
        for number in request.items_in(start, stop + self._lookahead):
            lacking = self._take(request, number)
            if lacking is None:
                continue
            if lacking == "match":
                return None
            rows = len(request.items[number].places())
            place = next(p for p in request.items[number].places() if p >= start)
            shorter = self._uncut(request, start, place - self._lookahead)
            if shorter > start:
                return shorter
            own = self._rows_to_encode() - encoded_before
            if lacking == "budget" and self._encode_rows and rows + own <= self._encode_rows:
                return start  # others used the budget up
            up_to_item = self._uncut(request, start, min(place, stop))
            if up_to_item > start:
                return up_to_item
            if lacking == "budget" or not self._make_room(request, number):
                return start
        return stop

    def _uncut(self, request: OracleRequest, start: int, stop: int) -> int:
        """Largest chunk end that cuts no item that begins in the chunk, if none may be cut."""
        if not self._whole:
            return stop
        for end in range(stop, start, -1):
            if not any(start <= item.offset < end < item.stop for item in request.items):
                return end
        return start

    def _held(self, request: OracleRequest, number: int) -> Key | None:
        """Key to which an occurrence refers, or decided to in this step."""
        occurrence = (request.req_id, number)
        if occurrence in self.scratch.refer:
            return self.scratch.refer[occurrence]
        return None if occurrence in self.scratch.give_up else request.held.get(number)

    def _take(self, request: OracleRequest, number: int) -> str | None:
        """Find or encode one item; returns what is lacking: room, budget, or a match of rows."""
        scratch = self.scratch
        item = request.items[number]
        key = self._held(request, number) or (item.key, self._cache.epoch)
        rows = len(item.places())
        if key not in scratch.rows:
            if self._encode_rows is not None and self._rows_to_encode() + rows > self._encode_rows:
                return "budget"
            if rows > self._free() + sum(scratch.rows[k] for k in scratch.evictable):
                return "room"
            while self._free() < rows:
                self._evict()
            scratch.rows[key] = rows
            scratch.encode.append(key)
        elif scratch.rows[key] != rows:
            return "match"
        elif key not in scratch.encode:
            new = number not in request.held or (request.req_id, number) in scratch.give_up
            found = scratch.hits if new else scratch.held
            if key not in found:
                found.append(key)
        scratch.evictable.pop(key, None)
        scratch.used.add(key)
        for other, occurrence in enumerate(request.items):  # every one that is still to come
            same = (occurrence.key, self._cache.epoch) == key
            if same and occurrence.stop > request.computed and not self._held(request, other):
                scratch.refer[request.req_id, other] = key
        return None

    # -- room --------------------------------------------------------------------------------
    def _free(self) -> int:
        return self._cache.budget - sum(self.scratch.rows.values())

    def _rows_to_encode(self) -> int:
        return sum(self.scratch.rows[key] for key in self.scratch.encode)

    def _evict(self) -> None:
        """Let one entry go: the one that was seen to go, if the rules allow it."""
        scratch = self.scratch
        first = victim = next(iter(scratch.evictable))
        if self._victims is not None:
            number = len(scratch.evicted)
            seen = self._victims[number] if number < len(self._victims) else None
            if seen is None or seen not in scratch.evictable:
                scratch.findings.append(Finding("entry evicted", first, seen))
            else:
                victim = seen
                if scratch.evictable[seen] != scratch.evictable[first]:
                    scratch.findings.append(Finding("entry evicted first", first, seen))
        del scratch.rows[victim]
        del scratch.evictable[victim]
        scratch.evicted.append(victim)

    def _make_room(self, request: OracleRequest, number: int) -> bool:
        """Give references up until an item can be taken; says whether it was."""
        admitted = list(self._requests.values())
        later = admitted[admitted.index(request) + 1 :]
        for giver in (request, *reversed(later)):
            for other, key in giver.held.items():
                self._give_up(key, (giver.req_id, other))
            if self._take(request, number) is None:
                return True
        return False

    def _give_up(self, key: Key, occurrence: Occurrence) -> None:
        scratch = self.scratch
        if key in scratch.used or occurrence in scratch.give_up:
            return
        scratch.give_up[occurrence] = key
        entry = self._cache.entries[key]
        if key in scratch.rows and entry.references <= scratch.give_up.keys():
            scratch.evictable[key] = _GIVEN_UP, 0
