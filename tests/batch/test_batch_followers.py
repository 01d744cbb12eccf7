"""Tables outside the batch that follow its rows."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
from small_batches import add_all, make_batch, step

from vlbatch import Backend, InputBatch, RowMoves, SideTable
from vlbatch.fields import row

AnyBackend = Backend[Any, Any]


class Thing:
    """An object that a weak reference can point to."""


class ArrayFollower:
    """A row table that someone keeps in an array of their own."""

    def __init__(self, capacity: int) -> None:
        self.values = np.full(capacity, -1)
        self.seen: list[RowMoves] = []

    def follow(self, moves: RowMoves) -> None:
        self.seen.append(moves)
        self.values[moves.destinations] = self.values[moves.sources]
        self.values[moves.vacated] = -1


def followed(backend: AnyBackend, **prompt_lens: int) -> tuple[InputBatch[Any], SideTable]:
    """A batch after its first step, and a side table that holds each request's id."""
    batch = make_batch(row("x"), backend=backend)
    table = SideTable(batch.capacity)
    batch.register_follower(table)
    add_all(batch, **prompt_lens)
    step(batch, **dict.fromkeys(prompt_lens, 1))
    for req_id in prompt_lens:
        table[batch.row_of(req_id)] = req_id
    return batch, table


def assert_follows(batch: InputBatch[Any], table: SideTable, *req_ids: str) -> None:
    """These requests find their entry in their row; every other row is empty."""
    expected: list[object] = [None] * batch.capacity
    for req_id in req_ids:
        expected[batch.row_of(req_id)] = req_id
    assert list(table) == expected


def test_side_tables_follow(backend: AnyBackend) -> None:
    """Entries stay with their request through moves and removals.

    FastDeploy I3: row state outside the batch (processors, sessions, logprob lists) is registered
    instead of forgotten.
    """
    batch, table = followed(backend, a=4, b=1, c=1, d=4)
    step(batch, c=1, d=1, a=1)
    assert list(batch.rows) == ["c", "a", "d", "b"]
    assert_follows(batch, table, "a", "b", "c", "d")
    batch.remove("d")
    step(batch, b=1)
    assert_follows(batch, table, "a", "b", "c")


def test_nobody_inherits_an_entry(backend: AnyBackend) -> None:
    """A newcomer in the row of a request that left finds the row empty, before any step too."""
    batch, table = followed(backend, a=1, b=1)
    batch.remove("a")
    assert_follows(batch, table, "b")
    add_all(batch, c=1)
    assert batch.row_of("c") == 0
    step(batch, b=1, c=1)
    assert_follows(batch, table, "b")


def test_entries_of_newcomers_move_too(backend: AnyBackend) -> None:
    """An entry written for a newcomer's row before its first step goes where it goes."""
    batch, table = followed(backend, a=4, b=1)
    batch.remove("a")
    add_all(batch, c=4)
    table[batch.row_of("c")] = "c"
    step(batch, c=1, b=1)

    assert batch.rows == ("b", "c")
    assert_follows(batch, table, "b", "c")


def test_reset_empties_followers(backend: AnyBackend) -> None:
    """After a reset no entry is left, and the table follows the next requests (FastDeploy R7)."""
    batch, table = followed(backend, a=1, b=1, c=1)
    batch.reset()
    assert list(table) == [None] * 4
    add_all(batch, d=4, e=1)
    step(batch, d=1, e=1)
    for req_id in "de":
        table[batch.row_of(req_id)] = req_id
    step(batch, d=1, e=1)

    assert batch.rows == ("e", "d")
    assert_follows(batch, table, "d", "e")


def test_preempted_requests_lose_their_entry(backend: AnyBackend) -> None:
    """A side table knows rows only: a request that pauses leaves it."""
    batch, table = followed(backend, a=4, b=4)
    batch.preempt("a")
    assert_follows(batch, table, "b")
    batch.resume("a")
    step(batch, a=1, b=1)
    assert_follows(batch, table, "b")


def test_entries_are_released(backend: AnyBackend) -> None:
    """A side table keeps no object of a request that left (peers M)."""
    batch, table = followed(backend, a=1, b=1)
    thing = Thing()
    table[batch.row_of("a")] = thing
    ref = weakref.ref(thing)
    del thing
    gc.disable()
    batch.remove("a")
    gc.enable()
    assert ref() is None


def test_all_followers_see_one_move(backend: AnyBackend) -> None:
    """Fields and all followers get the same moves, once a step (FastDeploy M1, M2)."""
    batch = make_batch(row("x"), backend=backend)
    followers = [ArrayFollower(4), ArrayFollower(4)]
    for follower in followers:
        batch.register_follower(follower)
    add_all(batch, a=4, b=1)
    step(batch, a=1, b=1)
    for follower in followers:
        follower.seen.clear()
    plan = batch.plan({"a": 1, "b": 1})
    batch.apply(plan)

    assert [f.seen for f in followers] == [[plan.moves], [plan.moves]]


def test_followers_may_come_late(backend: AnyBackend) -> None:
    """A table that is registered between steps starts from the rows as they are, holes included."""
    batch, _ = followed(backend, a=4, b=4, c=1)
    batch.remove("a")
    late = ArrayFollower(4)
    for req_id in "bc":
        late.values[batch.row_of(req_id)] = ord(req_id)
    batch.register_follower(late)
    step(batch, b=1, c=1)

    assert batch.rows == ("c", "b")
    assert late.values.tolist() == [ord("c"), ord("b"), -1, -1]


def test_a_broken_follower_does_not_break_the_batch(backend: AnyBackend) -> None:
    """If a follower raises, the batch itself has taken the step: no plan is applied twice."""
    batch = make_batch(row("x"), backend=backend)
    for i, req_id in enumerate("abc"):
        batch.add(req_id, prompt_len=4, fields={"x": i})
    step(batch, a=1, b=1, c=1)
    batch.register_follower(SideTable(1))
    plan = batch.plan({"c": 1})
    with pytest.raises(IndexError):
        batch.apply(plan)

    batch.check()
    assert batch.rows == ("c", "b", "a")
    assert [int(batch.read(r, "x")) for r in "abc"] == [0, 1, 2]  # type: ignore[call-overload]  # numbers


def test_random_followers(backend: AnyBackend, seed: int) -> None:
    """Over many steps every row of a follower belongs to the request in that row."""
    choose = random.Random(seed)
    batch = make_batch(row("x"), backend=backend, capacity=6, max_model_len=500)
    follower = ArrayFollower(6)
    batch.register_follower(follower)
    number: dict[str, int] = {}
    for i in range(120):
        if number and (len(number) == 6 or choose.random() < 0.3):
            gone = choose.choice(list(number))
            batch.remove(gone)
            del number[gone]
        if choose.random() < 0.6 and len(number) < 6:
            batch.add(f"r{i}", prompt_len=choose.choice([1, 2, 9]))
            number[f"r{i}"] = follower.values[batch.row_of(f"r{i}")] = i
        live = choose.sample(list(number), choose.randint(0, len(number)))
        step(batch, **dict.fromkeys(live, 1))
        expected = [number[r] for r in batch.rows if r is not None]
        assert follower.values.tolist() == expected + [-1] * (6 - len(expected))
