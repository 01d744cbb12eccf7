"""EncoderCache: two phases, references by occurrence, budgets, eviction, notices, accounting."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from vlbatch.cache import CacheUsage, EncoderCache, EntryKey, Reference
from vlbatch.errors import (
    CacheFull,
    EntryInUse,
    FeatureRowsMismatch,
    InvalidSetting,
    InvariantBroken,
    VlbatchError,
)

X, Y, Z = EntryKey("X"), EntryKey("Y"), EntryKey("Z")
R0, R1, S0 = Reference("R", 0), Reference("R", 1), Reference("S", 0)


def rows(number: int, levels: int = 1) -> tuple[object, ...]:
    """Features of an entry: one array [number, 2] a level."""
    return tuple(np.zeros((number, 2)) for _ in range(levels))


def put(cache: EncoderCache, key: EntryKey, number: int, *references: Reference) -> None:
    """Reserve, refer and commit."""
    cache.reserve(key, number, req_id="R")
    for reference in references:
        cache.reference(key, reference)
    cache.commit(key, rows(number))


def state_of(cache: EncoderCache) -> tuple[object, ...]:
    """Everything that a verb could have changed."""
    keys = cache.present()
    entries = [(cache.rows_of(k), cache.is_ready(k), cache.references(k)) for k in keys]
    order = list(cache.ledger()._idle.items())
    freed = list(cache._freed)
    counters = repr(cache.counters)
    return keys, entries, order, freed, cache.usage, counters, cache.digest(), cache.version


@contextmanager
def refused(cache: EncoderCache, error: type[VlbatchError], match: str) -> Iterator[None]:
    """Expect exactly this error, and a cache that is as it was."""
    before = state_of(cache)
    with pytest.raises(error, match=match) as caught:
        yield
    assert type(caught.value) is error
    assert state_of(cache) == before
    cache.check()


class TestBudget:
    def test_rows(self) -> None:
        """A budget in rows is the capacity; usage counts rows, never entries."""
        cache = EncoderCache(max_rows=8)
        put(cache, X, 5)

        assert cache.usage == CacheUsage(used=5, free=3, reclaimable=8)
        assert (cache.capacity_rows, cache.setting) == (8, "max_rows")

    def test_bytes(self) -> None:
        """A budget in bytes is turned into whole rows."""
        cache = EncoderCache(max_bytes=1023, row_bytes=256)

        assert (cache.capacity_rows, cache.setting) == (3, "max_bytes")

    @pytest.mark.parametrize(
        ("max_rows", "capacity", "setting"),
        [(2, 2, "max_rows"), (4, 4, "max_rows"), (5, 4, "max_bytes")],
    )
    def test_the_smaller_budget_counts_and_is_named(
        self, max_rows: int, capacity: int, setting: str
    ) -> None:
        """With both budgets the smaller one is the capacity, and refusals name it."""
        cache = EncoderCache(max_rows=max_rows, max_bytes=1024, row_bytes=256)

        assert (cache.capacity_rows, cache.setting) == (capacity, setting)

    @pytest.mark.parametrize(
        ("settings", "named"),
        [
            ({}, "max_rows, max_bytes"),
            ({"max_rows": 0}, "max_rows, max_bytes"),
            ({"max_rows": -1}, "max_rows, max_bytes"),
            ({"max_bytes": 255, "row_bytes": 256}, "max_rows, max_bytes"),
            ({"max_bytes": 1024}, "row_bytes"),
        ],
    )
    def test_no_budget_is_refused(self, settings: dict[str, int], named: str) -> None:
        """A cache that holds no row, or cannot tell how many, is a mistake of the settings."""
        with pytest.raises(InvalidSetting) as caught:
            EncoderCache(**settings)
        assert caught.value.setting == named

    def test_full(self) -> None:
        """A reservation over the free rows is refused with the setting; nothing is evicted."""
        cache = EncoderCache(max_bytes=8 * 64, row_bytes=64)
        put(cache, X, 5)
        with refused(cache, CacheFull, r"needs 4 feature rows; 3 of 8 are free \(setting: max_b"):
            cache.reserve(Y, 4, req_id="R")
        cache.reserve(Y, 3, req_id="R")

        assert cache.usage == CacheUsage(8, 0, 5)


class TestTwoPhases:
    def test_a_reserved_entry_is_not_ready(self) -> None:
        """Reserved: space is taken, nothing can be read, nothing can be evicted."""
        cache = EncoderCache(max_rows=8)
        cache.reserve(X, 5, req_id="R")

        assert (cache.rows_of(X), cache.is_ready(X)) == (5, False)
        assert cache.usage == CacheUsage(5, 3, 3)
        with refused(cache, InvariantBroken, "reserved but not encoded"):
            cache.features(X, req_id="R")
        with refused(cache, EntryInUse, "references"):
            cache.evict([X])

    def test_commit_makes_it_ready(self) -> None:
        """The features that come back are the ones that were given, uncopied."""
        cache = EncoderCache(max_rows=8)
        features = rows(5, levels=3)
        cache.reserve(X, 5, req_id="R")
        cache.reference(X, R0)
        cache.commit(X, features)

        assert cache.is_ready(X)
        assert cache.features(X, req_id="R") is features
        assert cache.usage == CacheUsage(5, 3, 3)

    def test_a_cache_that_retains_nothing(self) -> None:
        """Features go with their last reader, and at once where there is none when they come."""
        cache = EncoderCache(max_rows=8, retain=False)
        put(cache, X, 3, R0, Reference("S", 0))
        cache.release(X, R0)
        assert cache.is_ready(X)
        cache.release(X, Reference("S", 0))
        assert cache.rows_of(X) is None
        put(cache, X, 3)
        assert cache.usage == CacheUsage(0, 8, 8)
        cache.check()

    def test_commit_without_references_is_evictable_at_once(self) -> None:
        """Everybody who waited has left: the features stay until the space is needed (B55)."""
        cache = EncoderCache(max_rows=8)
        cache.reserve(X, 5, req_id="R")
        cache.reference(X, R0)
        cache.release(X, R0)
        assert cache.usage.reclaimable == 3
        cache.commit(X, rows(5))

        assert cache.usage == CacheUsage(5, 3, 8)

    def test_rollback_gives_space_and_references_back(self) -> None:
        """After a rollback the key is absent, and can be reserved again."""
        cache = EncoderCache(max_rows=8)
        cache.reserve(X, 8, req_id="R")
        cache.reference(X, R0)
        cache.rollback(X)

        assert cache.usage == CacheUsage(0, 8, 8)
        assert (cache.rows_of(X), cache.references(X), cache.present()) == (None, frozenset(), ())
        cache.check()
        put(cache, X, 8)

    @pytest.mark.parametrize(
        "features", [rows(7), rows(9), (*rows(8, 2), *rows(7)), (), (np.zeros(8),), ("12345678",)]
    )
    def test_other_row_count_is_refused(self, features: tuple[object, ...]) -> None:
        """Each level must have the reserved rows; else the entry stays reserved (B72, V20)."""
        cache = EncoderCache(max_rows=8)
        cache.reserve(X, 8, req_id="R")
        with refused(cache, FeatureRowsMismatch, "features? (rows|are)"):
            cache.commit(X, features, req_id="R")
        assert not cache.is_ready(X)
        cache.commit(X, rows(8, 3))

    def test_phases_in_the_wrong_order_are_broken_invariants(self) -> None:
        """Commit, rollback and reserve fit one state each; look-ups never insert."""
        cache = EncoderCache(max_rows=8)
        for verb in (lambda: cache.commit(X, rows(1)), lambda: cache.rollback(X)):
            with refused(cache, InvariantBroken, "not reserved"):
                verb()
        with refused(cache, InvariantBroken, "absent"):
            cache.features(X, req_id="R")
        with refused(cache, InvariantBroken, "absent"):
            cache.reference(X, R0)
        put(cache, X, 1)
        for verb in (lambda: cache.commit(X, rows(1)), lambda: cache.rollback(X)):
            with refused(cache, InvariantBroken, "not reserved"):
                verb()
        with refused(cache, InvariantBroken, "reserved twice"):
            cache.reserve(X, 1, req_id="R")


class TestReferences:
    def test_one_reference_an_occurrence(self) -> None:
        """An item that comes twice in a prompt is free only after the second (B01)."""
        cache = EncoderCache(max_rows=8)
        put(cache, X, 4, R0, R1)
        cache.release(X, R0)

        assert cache.usage.reclaimable == 4
        with refused(cache, EntryInUse, r"Reference\(req_id='R', item=1\)"):
            cache.evict([X])
        cache.release(X, R1)
        assert cache.usage.reclaimable == 8

    def test_sharers_count_apart(self) -> None:
        """When one of two sharers is aborted only its own reference goes."""
        cache = EncoderCache(max_rows=8)
        put(cache, X, 4, R0, S0)
        cache.release(X, R0)

        assert cache.references(X) == {S0}
        assert cache.usage.reclaimable == 4

    def test_release_is_idempotent(self) -> None:
        """Five releases free 8 rows once: free space is 16, never more (B09)."""
        cache = EncoderCache(max_rows=16)
        put(cache, X, 8, R0)
        cache.release(X, R0)
        after = state_of(cache)
        for _ in range(5):
            cache.release(X, R0)
            cache.release(X, R1)
            cache.release(Y, R0)

        assert state_of(cache) == after
        assert cache.usage == CacheUsage(8, 8, 16)
        assert not cache.ledger().can_take(17)

    def test_a_reference_takes_the_entry_off_the_eviction_list(self) -> None:
        """A hit pins an entry that nobody referred to."""
        cache = EncoderCache(max_rows=8)
        put(cache, X, 4)
        cache.reference(X, R0)

        assert cache.usage == CacheUsage(4, 4, 4)
        cache.check()


class TestRemoval:
    def test_eviction_is_least_recently_used_first(self) -> None:
        """The order is that of the last release; a hit moves an entry to the end."""
        cache = EncoderCache(max_rows=8)
        for key in (X, Y, Z):
            put(cache, key, 1, R0)
        for key in (Z, X, Y):
            cache.release(key, R0)
        cache.reference(Z, S0)
        cache.release(Z, S0)

        assert list(cache.ledger()._idle) == [X, Y, Z]

    def test_evict_all_or_none(self) -> None:
        """One referenced key among those to evict: nothing is dropped, the reference is named."""
        cache = EncoderCache(max_rows=8)
        put(cache, X, 1)
        put(cache, Y, 1, S0)
        with refused(
            cache, EntryInUse, r"Y.* cannot be dropped: references \[Reference\(req_id='S"
        ):
            cache.evict([X, Y])
        with refused(cache, EntryInUse, "Z.* references absent"):
            cache.evict([X, Z])
        cache.evict([X])

        assert cache.present() == (Y,)
        assert cache.counters.evicted == 1

    def test_drop_loses_every_entry_of_a_content(self) -> None:
        """Drop goes by content, whatever the adapter; a referenced one refuses all."""
        cache = EncoderCache(max_rows=8)
        lora = EntryKey("X", 0, "lora")
        put(cache, X, 1)
        put(cache, lora, 1, R0)
        put(cache, Y, 1)
        with refused(cache, EntryInUse, "lora"):
            cache.drop("X")
        cache.release(lora, R0)
        cache.drop("X")
        cache.drop("X")

        assert cache.present() == (Y,)
        assert cache.counters.evicted == 0

    def test_clear_keeps_what_is_in_use(self) -> None:
        """Clear drops unreferenced entries only: never what a request still reads (B82)."""
        cache = EncoderCache(max_rows=8)
        put(cache, X, 2)
        put(cache, Y, 2, R0)
        cache.reserve(Z, 2, req_id="R")
        cache.clear()

        assert cache.present() == (Y, Z)
        assert cache.take_freed() == (X,)
        cache.check()


class TestIdentity:
    def test_adapter_and_epoch_are_part_of_the_key(self) -> None:
        """One content under two adapters or weights is two entries."""
        cache = EncoderCache(max_rows=8)
        for key in (X, EntryKey("X", 0, "lora"), EntryKey("X", 1)):
            put(cache, key, 1, R0)

        assert cache.usage.used == 3
        assert len(cache.present()) == 3

    def test_new_weights_drop_unreferenced_entries_now(self) -> None:
        """Entries of old weights are gone at once where nobody refers to them (B12)."""
        cache = EncoderCache(max_rows=8)
        put(cache, X, 2)
        put(cache, Y, 2, R0)
        cache.set_epoch(1)

        assert cache.present() == (Y,)
        assert cache.take_freed() == (X,)
        assert cache.features(Y, req_id="R")  # in flight keeps what it has
        cache.check()
        cache.release(Y, R0)
        assert cache.present() == ()
        cache.check()

    def test_commit_for_old_weights(self) -> None:
        """Features that arrive after new weights serve those who wait for them, then go."""
        cache = EncoderCache(max_rows=8)
        for key, references in ((X, [R0]), (Y, [])):
            cache.reserve(key, 2, req_id="R")
            for reference in references:
                cache.reference(key, reference)
        cache.set_epoch(1)
        cache.commit(X, rows(2))
        cache.commit(Y, rows(2))

        assert cache.present() == (X,)
        cache.check()
        cache.release(X, R0)
        assert cache.usage == CacheUsage(0, 8, 8)


class TestFreedNotices:
    def test_each_key_is_reported_once(self) -> None:
        """Evicted, dropped and outdated keys are told to a mirror once, in order."""
        cache = EncoderCache(max_rows=8)
        for key in (X, Y, Z):
            put(cache, key, 1)
        assert cache.take_freed() == ()
        cache.evict([Y])
        cache.drop("X")
        cache.set_epoch(1)

        assert cache.take_freed() == (Y, X, Z)
        assert cache.take_freed() == ()

    def test_a_key_that_came_back_is_not_reported(self) -> None:
        """Evicted and reserved again in one step: a mirror must not drop the new features."""
        cache = EncoderCache(max_rows=8)
        put(cache, X, 1)
        put(cache, Y, 1)
        cache.evict([X, Y])
        cache.reserve(X, 1, req_id="R")

        assert cache.take_freed() == (Y,)

    def test_a_reader_of_the_same_step_still_finds_the_features(self) -> None:
        """A mirror that drops after the last reader serves the follower of step n (B05)."""
        cache = EncoderCache(max_rows=8)
        put(cache, X, 1)
        mirror = {X: "features"}
        cache.evict([X])

        assert mirror[X] == "features"  # the follower of step n gathers
        for key in cache.take_freed():
            del mirror[key]
        assert X not in mirror  # step n + 1


class TestCountersAndDigest:
    def test_counters(self) -> None:
        """Encoded counts commits, evicted counts entries, the peak counts reserved rows too."""
        cache = EncoderCache(max_rows=8)
        put(cache, X, 5)
        cache.reserve(Y, 3, req_id="R")
        cache.rollback(Y)
        cache.evict([X])

        counters = cache.counters
        assert (counters.encoded, counters.evicted, counters.peak_rows) == (1, 1, 8)

    @pytest.mark.parametrize(
        "change",
        [
            lambda c: c.reserve(Z, 1, req_id="R"),
            lambda c: c.reference(X, R1),
            lambda c: c.release(X, R0),
            lambda c: c.evict([Y]),
            lambda c: c.set_epoch(1),
            lambda c: (c.reference(Y, R0), c.release(Y, R0)),  # order of eviction only
            lambda c: c.commit(EntryKey("P"), rows(1)),
        ],
    )
    def test_digest_tells_apart_what_ranks_must_agree_on(
        self, change: Callable[[EncoderCache], object]
    ) -> None:
        """Equal histories have equal digests; any change that later decisions see shows."""

        def make() -> EncoderCache:
            cache = EncoderCache(max_rows=8)
            put(cache, X, 1, R0)
            put(cache, Y, 1)
            put(cache, EntryKey("W"), 1)
            cache.reserve(EntryKey("P"), 1, req_id="R")
            return cache

        one, other = make(), make()
        assert one.digest() == other.digest()
        change(other)
        assert one.digest() != other.digest()


class TestCheck:
    @pytest.mark.parametrize(
        ("corrupt", "said"),
        [
            (lambda c: setattr(c, "_used_rows", 3), "entries hold 4 rows, 3 are counted"),
            (lambda c: setattr(c, "capacity_rows", 3), "capacity is 3"),
            (lambda c: c._idle.update({Y: None}), "Y.*references.*is evictable"),
            (lambda c: c._idle.pop(X), r"X.*references \[\] and is not evictable"),
            (lambda c: c._idle.update({Z: None}), "evictable but absent"),
            (lambda c: c._entries[Y].references.clear(), "Y.*not evictable"),
            (lambda c: setattr(c, "epoch", 1), "X.*outlived its weights"),
            (lambda c: c._freed.update({X: None}), "present and freed"),
            (lambda c: setattr(c._entries[X], "features", rows(1)), r"X.*holds \[1\]"),
        ],
    )
    def test_planted_corruption_is_found(
        self, corrupt: Callable[[EncoderCache], Any], said: str
    ) -> None:
        """Each invariant is checked, and the message names the key or the terms."""
        cache = EncoderCache(max_rows=8)
        put(cache, X, 2)
        put(cache, Y, 2, R0)
        cache.check()
        corrupt(cache)

        with pytest.raises(InvariantBroken, match=said):
            cache.check()


class NaiveCache:
    """What the cache must do, with a dict, two lists and no counter."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.epoch = 0
        self.rows: dict[EntryKey, int] = {}
        self.ready: list[EntryKey] = []
        self.references: dict[EntryKey, set[Reference]] = {}
        self.idle: list[EntryKey] = []
        self.freed: list[EntryKey] = []

    @property
    def used(self) -> int:
        return sum(self.rows.values())

    def can(self, verb: str, key: EntryKey) -> bool:
        """Whether the caller may do this."""
        if verb == "reserve":
            return key not in self.rows
        if verb in ("commit", "rollback"):
            return key in self.rows and key not in self.ready
        return verb != "reference" or key in self.rows

    def reserve(self, key: EntryKey, number: int) -> None:
        self.rows[key], self.references[key] = number, set()
        self.freed = [other for other in self.freed if other != key]

    def commit(self, key: EntryKey) -> None:
        self.ready.append(key)
        self._settle(key)

    def rollback(self, key: EntryKey) -> None:
        self._remove(key)

    def reference(self, key: EntryKey, reference: Reference) -> None:
        self.references[key].add(reference)
        self.idle = [other for other in self.idle if other != key]

    def release(self, key: EntryKey, reference: Reference) -> None:
        if reference in self.references.get(key, ()):
            self.references[key].remove(reference)
            self._settle(key)

    def evict(self, keys: list[EntryKey]) -> None:
        for key in keys:
            self._remove(key)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.evict([key for key in self.idle if key.epoch != epoch])

    def take_freed(self) -> tuple[EntryKey, ...]:
        freed, self.freed = self.freed, []
        return tuple(freed)

    def _settle(self, key: EntryKey) -> None:
        if key in self.ready and not self.references[key]:
            if key.epoch == self.epoch:
                self.idle.append(key)
            else:
                self._remove(key)

    def _remove(self, key: EntryKey) -> None:
        del self.rows[key], self.references[key]
        self.ready = [other for other in self.ready if other != key]
        self.idle = [other for other in self.idle if other != key]
        self.freed.append(key)

    def agrees_with(self, cache: EncoderCache) -> None:
        reclaimable = self.capacity - self.used + sum(self.rows[key] for key in self.idle)
        assert cache.usage == CacheUsage(self.used, self.capacity - self.used, reclaimable)
        assert cache.present() == tuple(self.rows)
        assert list(cache.ledger()._idle) == self.idle
        for key, number in self.rows.items():
            assert cache.rows_of(key) == number
            assert cache.is_ready(key) == (key in self.ready)
            assert cache.references(key) == self.references[key]
        cache.check()


def act(rng: random.Random, cache: EncoderCache, naive: NaiveCache) -> None:
    """Do one random thing to both."""
    key = EntryKey(rng.choice("ABCDE"), rng.choice((naive.epoch, naive.epoch, 0)))
    reference = Reference(rng.choice("RS"), rng.randrange(2))
    common = ["reserve", "commit", "reference", "release"]
    verb = rng.choice([*common, *common, "rollback", "evict", "take_freed", "set_epoch"])
    if not naive.can(verb, key):
        return
    if verb == "reserve":
        number = rng.randint(1, 5)
        if naive.used + number > naive.capacity:
            with refused(cache, CacheFull, "max_rows"):
                cache.reserve(key, number, req_id="R")
        else:
            cache.reserve(key, number, req_id="R")
            naive.reserve(key, number)
    elif verb == "commit":
        cache.commit(key, rows(naive.rows[key]))
        naive.commit(key)
    elif verb == "rollback":
        cache.rollback(key)
        naive.rollback(key)
    elif verb in ("reference", "release"):
        getattr(cache, verb)(key, reference)
        getattr(naive, verb)(key, reference)
    elif verb == "evict":
        victims = rng.sample(naive.idle, rng.randint(0, len(naive.idle)))
        cache.evict(victims)
        naive.evict(victims)
    elif verb == "take_freed":
        assert cache.take_freed() == naive.take_freed()
    elif rng.random() < 0.2:
        cache.set_epoch(naive.epoch + 1)
        naive.set_epoch(naive.epoch + 1)


@pytest.mark.parametrize("walk", range(20))
def test_random_walk_against_dicts(seed: int, walk: int) -> None:
    """Any sequence of verbs leaves what plain dicts and lists say, freed notices included."""
    rng = random.Random(f"{seed}/{walk}")
    cache, naive = EncoderCache(max_rows=12), NaiveCache(12)
    for _ in range(200):
        act(rng, cache, naive)
        naive.agrees_with(cache)
