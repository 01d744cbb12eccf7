"""What the cache would look like if a step were carried out: the scratch copy of a decision."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlbatch.cache.encoder_cache import EncoderCache
    from vlbatch.cache.keys import EntryKey, Reference


class Ledger:
    """What the cache would look like, for deciding what fits; changes no cache.

    Attributes:
        setting: the cache's budget, for messages.
        free_rows: rows neither held nor taken.
        evicted: entries that would have to go, in order.
        taken: entries that would be reserved: key -> rows.
        shed: references that would be dropped.
    """

    def __init__(self, cache: EncoderCache, idle: dict[EntryKey, int], free_rows: int) -> None:
        self._cache = cache
        self._idle = idle  # first to go first
        self._pinned: set[EntryKey] = set()
        self.setting = cache.setting
        self.free_rows = free_rows
        self.evicted: list[EntryKey] = []
        self.taken: dict[EntryKey, int] = {}
        self.shed: dict[Reference, EntryKey] = {}

    def copy(self) -> Ledger:
        """A ledger to decide further on, without a trace in this one."""
        twin = Ledger(self._cache, self._idle.copy(), self.free_rows)
        twin._pinned = self._pinned.copy()
        twin.evicted = self.evicted.copy()
        twin.taken = self.taken.copy()
        twin.shed = self.shed.copy()
        return twin

    def rows_of(self, key: EntryKey) -> int | None:
        """Rows of an entry that is, or would be, present."""
        if key in self.taken:
            return self.taken[key]
        return None if key in self.evicted else self._cache.rows_of(key)

    def is_pending(self, key: EntryKey) -> bool:
        """Whether the entry is reserved already, by a step that is not encoded yet."""
        present = key not in self.taken and self.rows_of(key) is not None
        return present and not self._cache.is_ready(key)

    def pin(self, key: EntryKey) -> None:
        """Keep a present entry from being evicted by later decisions."""
        self._pinned.add(key)
        self._idle.pop(key, None)

    def can_take(self, rows: int) -> bool:
        """Whether this many rows are free or can be evicted."""
        return rows <= self.free_rows + sum(self._idle.values())

    def take(self, key: EntryKey, rows: int) -> None:
        """Decide to reserve an entry, evicting what is needed; only after ``can_take``."""
        while self.free_rows < rows:
            victim = next(iter(self._idle))
            self.free_rows += self._idle.pop(victim)
            self.evicted.append(victim)
        self.free_rows -= rows
        self.taken[key] = rows

    def drop_reference(self, key: EntryKey, reference: Reference) -> None:
        """Decide to drop a reference, unless the entry is pinned; with the last it can go."""
        if key in self._pinned or reference in self.shed:
            return
        self.shed[reference] = key
        rows = self._cache.rows_of(key)
        if rows and self._cache.is_ready(key) and self._cache.references(key) <= self.shed.keys():
            self._idle[key] = rows
