"""Encoder outputs by identity: reserved, ready, referenced, evicted.

Rules
- An entry is *reserved* (space taken, no features) or *ready*; only ready features can be read.
- References are by occurrence: ``(req_id, number of the item)``. A referenced entry never goes.
- Unreferenced entries go least recently used first, and only when space is needed; which ones is
  decided by ``Ledger``, a scratch copy, so that deciding changes nothing and ranks can compare.
- The budget counts feature rows; a budget in bytes is turned into rows with ``row_bytes``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import blake3

from vlbatch.cache.keys import EntryKey, Features, Reference
from vlbatch.cache.ledger import Ledger
from vlbatch.errors import (
    CacheFull,
    EntryInUse,
    FeatureRowsMismatch,
    InvalidSetting,
    InvariantBroken,
)


@dataclass(slots=True)
class _Entry:
    rows: int
    features: Features | None = None  # None while reserved
    references: set[Reference] = field(default_factory=set)


@dataclass(slots=True)
class CacheCounters:
    """Totals since the cache was made. ``peak_rows`` counts reserved and ready entries."""

    encoded: int = 0
    hits: int = 0
    evicted: int = 0
    peak_rows: int = 0


class CacheUsage(NamedTuple):
    """Feature rows: ``used + free == capacity_rows``; ``reclaimable`` = free and unreferenced."""

    used: int
    free: int
    reclaimable: int


class EncoderCache:
    """Features of images, videos and audio, shared by every request with the same content.

    Args:
        max_rows: budget in feature rows; ``None`` for no limit in rows.
        max_bytes: budget in bytes; ``None`` for no limit in bytes.
        row_bytes: bytes of one feature row over all levels; needed with ``max_bytes``.
        retain: keep entries without references until their space is needed; else they go with
            their last reference.

    Raises:
        InvalidSetting: no budget at all, a budget below 1, or bytes without ``row_bytes``.
    """

    def __init__(
        self,
        *,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        row_bytes: int = 0,
        retain: bool = True,
    ) -> None:
        limits = [] if max_rows is None else [max_rows]
        if max_bytes is not None:
            if row_bytes < 1:
                raise InvalidSetting("max_bytes needs row_bytes >= 1", setting="row_bytes")
            limits.append(max_bytes // row_bytes)
        if not limits or min(limits) < 1:
            raise InvalidSetting(
                f"got max_rows {max_rows}, max_bytes {max_bytes}; expected a budget of at least"
                " one feature row",
                setting="max_rows, max_bytes",
            )
        self.capacity_rows = min(limits)
        self.setting = "max_rows" if limits[0] == max_rows == min(limits) else "max_bytes"
        self.row_bytes = row_bytes
        self.retain = retain
        self.epoch = 0
        self.version = 0
        self.counters = CacheCounters()
        self._entries: dict[EntryKey, _Entry] = {}
        self._idle: dict[EntryKey, None] = {}  # ready and unreferenced, least recently used first
        self._used_rows = 0
        self._freed: dict[EntryKey, None] = {}

    # -- queries -----------------------------------------------------------------------------
    def rows_of(self, key: EntryKey) -> int | None:
        """Feature rows of an entry, reserved or ready; ``None`` if absent."""
        entry = self._entries.get(key)
        return None if entry is None else entry.rows

    def is_ready(self, key: EntryKey) -> bool:
        """Whether the entry's features can be read."""
        entry = self._entries.get(key)
        return entry is not None and entry.features is not None

    def references(self, key: EntryKey) -> frozenset[Reference]:
        """References to an entry; empty if absent."""
        entry = self._entries.get(key)
        return frozenset() if entry is None else frozenset(entry.references)

    def present(self) -> tuple[EntryKey, ...]:
        """Keys present, reserved or ready, oldest first."""
        return tuple(self._entries)

    @property
    def usage(self) -> CacheUsage:
        """Budget in use, in feature rows."""
        free = self.capacity_rows - self._used_rows
        idle = sum(self._entries[key].rows for key in self._idle)
        return CacheUsage(self._used_rows, free, free + idle)

    def ledger(self, wanted: Sequence[EntryKey] = ()) -> Ledger:
        """Scratch copy for deciding.

        Args:
            wanted: keys in the order in which they will be needed; they are evicted only after
                all others, the last needed first.
        """
        idle = {key: self._entries[key].rows for key in self._idle}
        for key in reversed(wanted):
            if key in idle:
                idle[key] = idle.pop(key)  # to the end
        return Ledger(self, idle, self.capacity_rows - self._used_rows)

    def features(self, key: EntryKey, *, req_id: str) -> Features:
        """Features of a ready entry.

        Raises:
            InvariantBroken: absent, or reserved only: the caller's plan was not carried out.
        """
        entry = self._entries.get(key)
        if entry is None or entry.features is None:
            state = "absent" if entry is None else "reserved but not encoded"
            raise InvariantBroken(f"features of {key} are {state}", req_id=req_id)
        return entry.features

    # -- two phases --------------------------------------------------------------------------
    def reserve(self, key: EntryKey, rows: int, *, req_id: str) -> None:
        """Take space for features to come.

        Raises:
            CacheFull: fewer rows are free; evict first (see ``Ledger``).
            InvariantBroken: the key is present.
        """
        if key in self._entries:
            raise InvariantBroken(f"{key} is reserved twice", req_id=req_id)
        free = self.capacity_rows - self._used_rows
        if rows > free:
            raise CacheFull(
                f"{key} needs {rows} feature rows; {free} of {self.capacity_rows} are free",
                req_id=req_id,
                setting=self.setting,
            )
        self._entries[key] = _Entry(rows)
        self._freed.pop(key, None)
        self._used_rows += rows
        self.counters.peak_rows = max(self.counters.peak_rows, self._used_rows)
        self.version += 1

    def commit(self, key: EntryKey, features: Features, *, req_id: str | None = None) -> None:
        """Make a reserved entry ready.

        Args:
            key: reserved.
            features: one array ``[rows, hidden]`` a level; kept by reference.
            req_id: named in the refusal, where one request is meant.

        Raises:
            FeatureRowsMismatch: a level has another number of rows than reserved; the entry
                stays reserved.
            InvariantBroken: the key is not reserved.
        """
        entry = self._reserved(key, "committed", req_id)
        delivered = [_num_rows(level) for level in features]
        if not delivered or any(rows != entry.rows for rows in delivered):
            raise FeatureRowsMismatch(
                f"the encoder delivered {delivered} feature rows for {key};"
                f" expected {entry.rows} a level",
                req_id=req_id,
            )
        entry.features = features
        self._settle(key, entry)
        self.counters.encoded += 1
        self.version += 1

    def rollback(self, key: EntryKey) -> None:
        """Give back a reservation and its references.

        Raises:
            InvariantBroken: the key is not reserved.
        """
        self._reserved(key, "rolled back")
        self._remove(key)

    def _reserved(self, key: EntryKey, what: str, req_id: str | None = None) -> _Entry:
        entry = self._entries.get(key)
        if entry is None or entry.features is not None:
            raise InvariantBroken(f"{key} is {what} but not reserved", req_id=req_id)
        return entry

    # -- references --------------------------------------------------------------------------
    def reference(self, key: EntryKey, reference: Reference) -> None:
        """Pin an entry for one occurrence of an item.

        Raises:
            InvariantBroken: the key is absent.
        """
        entry = self._entries.get(key)
        if entry is None:
            raise InvariantBroken(f"{key} is referenced but absent", req_id=reference.req_id)
        entry.references.add(reference)
        self._idle.pop(key, None)
        self.version += 1

    def release(self, key: EntryKey, reference: Reference) -> None:
        """Drop one reference; releasing twice, or of an absent entry, changes nothing.

        The entry stays until its space is needed, unless its weights are outdated or the cache
        retains nothing.
        """
        entry = self._entries.get(key)
        if entry is None or reference not in entry.references:
            return
        entry.references.discard(reference)
        self._settle(key, entry)
        self.version += 1

    def _settle(self, key: EntryKey, entry: _Entry) -> None:
        """An entry without references becomes evictable, most recently used last."""
        if entry.references or entry.features is None:
            return
        if key.epoch == self.epoch and self.retain:
            self._idle[key] = None
        else:
            self._remove(key)

    # -- removal -----------------------------------------------------------------------------
    def evict(self, keys: Sequence[EntryKey]) -> None:
        """Drop unreferenced entries for space.

        Raises:
            EntryInUse: one is referenced, reserved or absent; nothing was dropped.
        """
        for key in keys:
            self._check_idle(key)
        for key in keys:
            self._remove(key)
        self.counters.evicted += len(keys)

    def drop(self, content: str) -> None:
        """Lose the unreferenced entries of a content, whatever their adapter and epoch.

        Raises:
            EntryInUse: one of them is referenced or reserved; nothing was dropped.
        """
        keys = [key for key in self._entries if key.content == content]
        for key in keys:
            self._check_idle(key)
        for key in keys:
            self._remove(key)

    def _check_idle(self, key: EntryKey) -> None:
        if key not in self._idle:
            entry = self._entries.get(key)
            users = sorted(entry.references) if entry else "absent"
            raise EntryInUse(f"{key} cannot be dropped: references {users}")

    def set_epoch(self, epoch: int) -> None:
        """Take up new weights: entries of other epochs are never found again.

        Unreferenced ones go now, referenced ones with their last reference: a request that
        already refers to features keeps them.
        """
        self.epoch = epoch
        for key in [key for key in self._idle if key.epoch != epoch]:
            self._remove(key)
        self.version += 1

    def clear(self) -> None:
        """Drop every unreferenced entry."""
        for key in list(self._idle):
            self._remove(key)

    def _remove(self, key: EntryKey) -> None:
        self._used_rows -= self._entries.pop(key).rows
        self._idle.pop(key, None)
        self._freed[key] = None
        self.version += 1

    def take_freed(self) -> tuple[EntryKey, ...]:
        """Keys gone since the last call and not back since: a mirror drops them now.

        Call it when the last reader of a step has gathered.
        """
        freed = tuple(self._freed)
        self._freed.clear()
        return freed

    # -- checks ------------------------------------------------------------------------------
    def digest(self) -> str:
        """Hex digest over all that decides what comes next, for ranks to compare.

        Keys, rows, references, what is ready, and the order of eviction.
        """
        hasher = blake3.blake3(repr((self.epoch, self.capacity_rows, list(self._idle))).encode())
        for key, entry in self._entries.items():
            ready = entry.features is not None
            hasher.update(repr((key, entry.rows, ready, sorted(entry.references))).encode())
        return hasher.hexdigest()

    def check(self) -> None:
        """Verify the accounting.

        Raises:
            InvariantBroken: with each term of the broken sum, or the key.
        """
        rows = sum(entry.rows for entry in self._entries.values())
        if rows != self._used_rows or rows > self.capacity_rows:
            raise InvariantBroken(
                f"entries hold {rows} rows, {self._used_rows} are counted, capacity is"
                f" {self.capacity_rows}"
            )
        for key, entry in self._entries.items():
            idle = entry.features is not None and not entry.references
            if idle != (key in self._idle):
                raise InvariantBroken(
                    f"{key} has references {sorted(entry.references)} and is"
                    f" {'' if key in self._idle else 'not '}evictable"
                )
            if idle and key.epoch != self.epoch:
                raise InvariantBroken(f"{key} outlived its weights; epoch is {self.epoch}")
            held = [_num_rows(level) for level in entry.features or ()]
            if any(rows != entry.rows for rows in held):
                raise InvariantBroken(f"{key} holds {held} feature rows; expected {entry.rows}")
        if not self._idle.keys() <= self._entries.keys():
            raise InvariantBroken(f"evictable but absent: {self._idle.keys() - self._entries}")
        if self._freed.keys() & self._entries:
            raise InvariantBroken(f"present and freed: {self._freed.keys() & self._entries}")


def _num_rows(level: object) -> int:
    shape = getattr(level, "shape", None)
    if shape is None or len(shape) != 2:
        raise FeatureRowsMismatch(
            f"features are a {type(level).__name__} of shape {shape}; expected [rows, hidden]"
        )
    return int(shape[0])
