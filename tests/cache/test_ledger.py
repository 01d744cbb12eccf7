"""Ledger: deciding what fits and what goes, without a trace in the cache."""

from __future__ import annotations

import numpy as np
import pytest

from vlbatch.cache import EncoderCache, EntryKey, Reference

A, B, C, D, E = (EntryKey(name) for name in "ABCDE")
R0, R1, S0 = Reference("R", 0), Reference("R", 1), Reference("S", 0)


def cache_of(max_rows: int = 4, **entries: int) -> EncoderCache:
    """A cache with these unreferenced entries, the first one least recently used."""
    cache = EncoderCache(max_rows=max_rows)
    for name, rows in entries.items():
        cache.reserve(EntryKey(name), rows, req_id="R")
        cache.commit(EntryKey(name), (np.zeros((rows, 1)),))
    return cache


def test_own_hits_survive() -> None:
    """LRU of 4 with A, B, C, D: a request for A, E, B drops C, the oldest unwanted (B79, V3)."""
    ledger = cache_of(A=1, B=1, C=1, D=1).ledger([A, E, B])
    ledger.pin(A)
    assert ledger.can_take(1)
    ledger.take(E, 1)
    ledger.pin(B)

    assert ledger.evicted == [C]
    assert ledger.taken == {E: 1}


@pytest.mark.parametrize(
    ("wanted", "evicted"),
    [
        ([], [A, B, C, D]),
        ([A, C], [B, D, C, A]),
        ([C, A], [B, D, A, C]),
        ([E, C, A, C], [B, D, A, C]),
    ],
)
def test_wanted_goes_last(wanted: list[EntryKey], evicted: list[EntryKey]) -> None:
    """Others go least recently used first; then what the step wants, the last needed first."""
    ledger = cache_of(A=1, B=1, C=1, D=1).ledger(wanted)
    ledger.take(E, 4)

    assert ledger.evicted == evicted


def test_only_as_many_go_as_are_needed() -> None:
    """Free rows are used first, then one entry after the other."""
    ledger = cache_of(6, A=2, B=2).ledger()
    ledger.take(C, 2)
    assert (ledger.evicted, ledger.free_rows) == ([], 0)
    ledger.take(D, 1)
    assert (ledger.evicted, ledger.free_rows) == ([A], 1)


def test_can_take_counts_free_and_idle_rows_that_are_not_pinned() -> None:
    """The whole budget fits once, one row more never; pinned rows are out (V12)."""
    ledger = cache_of(A=1, B=2).ledger()

    assert [ledger.can_take(rows) for rows in (4, 5)] == [True, False]
    ledger.pin(B)
    assert [ledger.can_take(rows) for rows in (2, 3)] == [True, False]


def test_rows_follow_the_decisions() -> None:
    """Evicted entries look absent, taken ones present, without a change in the cache."""
    cache = cache_of(A=3)
    ledger = cache.ledger()
    assert (ledger.rows_of(A), ledger.rows_of(B)) == (3, None)
    ledger.take(B, 2)
    assert (ledger.rows_of(A), ledger.rows_of(B)) == (None, 2)
    ledger.take(A, 1)
    assert ledger.rows_of(A) == 1


def test_nothing_is_written_to_the_cache() -> None:
    """Whatever is decided, the cache stays as it was."""
    cache = cache_of(A=2, B=1)
    cache.reference(B, R0)
    before = (cache.digest(), cache.usage, cache.version, cache.present())
    ledger = cache.ledger([A])
    ledger.drop_reference(B, R0)
    ledger.take(C, 4)
    ledger.copy().pin(C)

    assert (cache.digest(), cache.usage, cache.version, cache.present()) == before


def test_copies_part_ways() -> None:
    """Deciding on a copy leaves the original, and the other way round."""
    cache = cache_of(A=2, B=1)
    cache.reference(B, R0)
    one = cache.ledger()
    one.pin(A)
    other = one.copy()
    other.drop_reference(B, R0)
    other.take(C, 2)
    one.take(D, 1)

    assert (one.evicted, one.taken, one.shed, one.free_rows) == ([], {D: 1}, {}, 0)
    assert (other.evicted, other.taken, other.shed, other.free_rows) == ([B], {C: 2}, {R0: B}, 0)
    assert not one.can_take(1)
    other.pin(D)
    one.copy().pin(B)
    one.drop_reference(B, R0)
    assert one.shed == {R0: B}


def test_pending_is_reserved_by_somebody_else() -> None:
    """A reserved entry is pending; one that this ledger takes, or a ready one, is not."""
    cache = cache_of(8, A=1)
    cache.reserve(B, 1, req_id="R")
    ledger = cache.ledger()
    ledger.take(C, 1)

    assert [ledger.is_pending(key) for key in (A, B, C, D)] == [False, True, False, False]


class TestDropReference:
    def test_entry_can_go_with_its_last_reference(self) -> None:
        """Both references dropped: the rows can be taken, and count once."""
        cache = cache_of(A=4)
        cache.reference(A, R0)
        cache.reference(A, S0)
        ledger = cache.ledger()
        ledger.drop_reference(A, R0)
        assert not ledger.can_take(1)
        ledger.drop_reference(A, S0)
        assert [ledger.can_take(rows) for rows in (4, 5)] == [True, False]
        ledger.take(B, 4)
        ledger.drop_reference(A, S0)  # again, by another request of the step

        assert ledger.shed == {R0: A, S0: A}
        assert not ledger.can_take(1)

    def test_dropped_entries_go_after_unreferenced_ones(self) -> None:
        """Space is taken from what nobody wants before what somebody gave up."""
        cache = cache_of(A=1, B=1)
        cache.reference(A, R0)
        ledger = cache.ledger()
        ledger.drop_reference(A, R0)
        ledger.take(C, 3)

        assert ledger.evicted == [B]

    def test_pinned_entries_keep_their_references(self) -> None:
        """What this step reads is not given up."""
        cache = cache_of(A=4)
        cache.reference(A, R0)
        ledger = cache.ledger()
        ledger.pin(A)
        ledger.drop_reference(A, R0)

        assert ledger.shed == {}
        assert not ledger.can_take(1)

    def test_reserved_entries_never_go(self) -> None:
        """An entry that is being encoded cannot be evicted, whoever gives it up."""
        cache = cache_of()
        cache.reserve(A, 4, req_id="R")
        cache.reference(A, R0)
        ledger = cache.ledger()
        ledger.drop_reference(A, R0)

        assert not ledger.can_take(1)
