"""Requests come, go, pause and come back: slots, rows, Python objects."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from batch_states import refused, state_of
from small_batches import add_all, make_batch, step

from vlbatch import Backend, InputBatch
from vlbatch.errors import (
    BatchFull,
    DuplicateRequest,
    InvalidSchedule,
    PromptTooLong,
    UnknownField,
    UnknownRequest,
)
from vlbatch.fields import host, ragged, row

AnyBackend = Backend[Any, Any]
AnyBatch = InputBatch[Any]


class Thing:
    """An object that a weak reference can point to."""


@pytest.fixture
def no_cycles() -> Iterator[None]:
    """Objects must go by reference count alone."""
    gc.disable()
    yield
    gc.enable()


# -- slots and rows ------------------------------------------------------------------------------
def test_add_takes_the_lowest_free_slot(backend: AnyBackend) -> None:
    """A slot is the lowest that is free, and is what ``add`` returns (FastDeploy I5, I6)."""
    batch = make_batch(backend=backend)
    assert [batch.add(r, prompt_len=1) for r in "abcd"] == [0, 1, 2, 3]
    for req_id in "ca":
        batch.remove(req_id)

    assert batch.add("e", prompt_len=1) == 0
    assert batch.add("f", prompt_len=1) == 2
    assert sorted(map(batch.slot_of, batch.req_ids)) == [0, 1, 2, 3]


def test_slots_never_change(backend: AnyBackend) -> None:
    """A request keeps its slot from admission to its end, whatever its row does."""
    batch = make_batch(row("x"), backend=backend)
    add_all(batch, a=4, b=1, c=1)
    slots = {r: batch.slot_of(r) for r in "abc"}
    for scheduled in ({"a": 1, "b": 1, "c": 1}, {"c": 1, "a": 1}, {"b": 1}, {}):
        order = step(batch, **scheduled)
        assert {r: batch.slot_of(r) for r in "abc"} == slots
        assert order.slots.tolist() == [slots[r] for r in order.req_ids]


def test_a_hole_is_seen_and_closed(backend: AnyBackend) -> None:
    """A request that left leaves a hole; the next order has none, and dead rows do not count.

    FastDeploy I8, I9, I10: rows are the live requests, not a range up to the highest slot.
    """
    batch = make_batch(backend=backend)
    add_all(batch, a=1, b=1, c=1, d=1)
    step(batch, a=1, b=1, c=1, d=1)
    batch.remove("a")
    batch.remove("c")

    assert list(batch.rows) == [None, "b", None, "d"]
    order = step(batch, b=1, d=1)
    assert list(batch.rows) == list(order.req_ids) == ["d", "b"]
    assert order.num_reqs == batch.num_reqs == 2


def test_a_newcomer_takes_the_lowest_hole(backend: AnyBackend) -> None:
    """Until the next order a newcomer sits in the lowest hole, then behind the last row."""
    batch = make_batch(backend=backend)
    add_all(batch, a=1, b=1, c=1)
    batch.remove("b")
    add_all(batch, d=1, e=1)

    assert batch.rows == ("a", "d", "c", "e")


def test_look_ups_never_insert(backend: AnyBackend) -> None:
    """Asking for a request that is not there raises, again and again (FastDeploy I7)."""
    batch = make_batch(row("x"), ragged("t", 4), backend=backend)
    add_all(batch, a=1)
    asks = (
        batch.slot_of, batch.row_of, batch.computed_of, batch.remaining_of, batch.known_tokens_of,
        lambda r: batch.read(r, "x"), lambda r: batch.length(r, "t"),
    )  # fmt: skip
    for ask in asks * 2:
        with refused(batch, UnknownRequest, "not in the batch", req_id="nobody"):
            ask("nobody")
    assert not batch.is_live("nobody")


def test_capacity_is_reused(backend: AnyBackend) -> None:
    """A full batch refuses one more; emptied in any order it takes as many again (peers M)."""
    batch = make_batch(row("x"), host("h"), backend=backend)
    for turn in range(3):
        names = [f"{turn}{i}" for i in range(4)]
        for name in names:
            batch.add(name, prompt_len=1, fields={"x": turn})
        with refused(batch, BatchFull, "all 4 slots are taken", req_id="more", setting="capacity"):
            batch.add("more", prompt_len=1)
        if turn != 1:
            step(batch, **dict.fromkeys(names, 1))
        for name in names[turn:] + names[:turn]:
            batch.remove(name)
        assert (batch.num_reqs, batch.req_ids) == (0, ())
        batch.check()


def test_batch_of_one(backend: AnyBackend) -> None:
    """A batch with one row admits, steps, preempts, resumes and empties like any other."""
    batch = make_batch(row("x"), ragged("t", 3, residency="rows"), backend=backend, capacity=1)
    batch.add("a", prompt_len=2, fields={"x": 5, "t": [1, 2]})
    assert step(batch, a=2).req_ids == ("a",)
    assert step(batch, a=1).req_ids == ("a",)
    batch.preempt("a")
    batch.add("b", prompt_len=1)
    assert step(batch, b=1).req_ids == ("b",)
    batch.remove("b")
    batch.resume("a")
    assert step(batch).idle == ("a",)
    assert batch.read("a", "x") == 5
    assert list(batch.read("a", "t")) == [1, 2]  # type: ignore[call-overload]  # array
    batch.remove("a")
    assert step(batch).idle == ()
    batch.check()


# -- admission -----------------------------------------------------------------------------------
def test_refused_admissions(backend: AnyBackend) -> None:
    """A duplicate, a prompt out of bounds and a prefix that leaves nothing are refused."""
    batch = make_batch(row("x"), backend=backend)
    add_all(batch, a=1, p=1)
    batch.preempt("p")
    for req_id in "ap":
        with refused(batch, DuplicateRequest, "already alive", req_id=req_id):
            batch.add(req_id, prompt_len=1)
    for length in (33, 0, -1):
        with refused(
            batch, PromptTooLong, f"{length} prompt tokens; expected 1..32", req_id="b",
            setting="max_model_len",
        ):  # fmt: skip
            batch.add("b", prompt_len=length)
    for computed in (4, 5, -1):
        with refused(batch, InvalidSchedule, f"{computed} computed tokens of 4", req_id="b"):
            batch.add("b", prompt_len=4, computed=computed)


def test_bounds_of_a_prompt(backend: AnyBackend) -> None:
    """A prompt of max_model_len tokens is admitted; it can be computed but not decoded."""
    batch = make_batch(backend=backend)
    batch.add("a", prompt_len=32, computed=31)

    assert batch.remaining_of("a") == 1
    step(batch, a=1)
    assert batch.remaining_of("a") == 0
    with refused(batch, InvalidSchedule, r"got 1 tokens; expected 1\.\.0", req_id="a"):
        batch.plan({"a": 1})


def test_check_add_changes_nothing(backend: AnyBackend) -> None:
    """The question whether a request fits admits nothing."""
    batch = make_batch(row("x"), host("h", default=Thing), backend=backend)
    before = state_of(batch)
    batch.check_add("a", prompt_len=3, fields={"x": 1})

    assert state_of(batch) == before


# -- leaving -------------------------------------------------------------------------------------
def test_remove_twice(backend: AnyBackend) -> None:
    """A request leaves once, whether it was live or preempted."""
    batch = make_batch(row("x"), backend=backend)
    add_all(batch, a=1, b=1, c=1)
    batch.preempt("b")
    for req_id in "ab":
        batch.remove(req_id)
        with refused(batch, UnknownRequest, "not in the batch", req_id=req_id):
            batch.remove(req_id)

    assert (batch.req_ids, batch.preempted) == (("c",), ())


def test_preempt_and_resume_refusals(backend: AnyBackend) -> None:
    """Only a live request is preempted, only a preempted one resumed (FastDeploy R9)."""
    batch = make_batch(row("x"), backend=backend, capacity=2)
    add_all(batch, a=4, b=4)
    batch.preempt("b")
    add_all(batch, c=1)
    for req_id in ("b", "nobody"):
        with refused(batch, UnknownRequest, "not in the batch", req_id=req_id):
            batch.preempt(req_id)
    for req_id in ("a", "nobody"):
        with refused(batch, UnknownRequest, "is not preempted", req_id=req_id):
            batch.resume(req_id)
    with refused(batch, BatchFull, "all 2 slots are taken", req_id="b", setting="capacity"):
        batch.resume("b")
    batch.remove("c")
    with refused(batch, InvalidSchedule, "4 computed tokens of 4", req_id="b"):
        batch.resume("b", computed=4)
    assert batch.resume("b", computed=3) == 1


def test_resume_with_other_values(backend: AnyBackend) -> None:
    """A value given at the resumption stands for the one that was kept, wrong ones are refused."""
    batch = make_batch(row("x"), row("y"), backend=backend)
    batch.add("a", prompt_len=3, fields={"x": 1, "y": 2})
    batch.preempt("a")
    with refused(batch, UnknownField, "'z'", req_id="a", setting="fields"):
        batch.resume("a", fields={"z": 1})
    batch.resume("a", fields={"x": 5})
    assert (batch.read("a", "x"), batch.read("a", "y")) == (5, 2)


def test_resumed_prompt_has_the_outputs(backend: AnyBackend) -> None:
    """After a resume the prompt is the old one and every sampled token (peers I)."""
    batch = make_batch(backend=backend)
    add_all(batch, a=3, b=3)
    step(batch, a=3, b=2)
    step(batch, a=1)
    step(batch, a=1)
    assert (batch.known_tokens_of("a"), batch.known_tokens_of("b")) == (6, 3)
    for req_id in "ab":
        batch.preempt(req_id)
    assert (batch.known_tokens_of("a"), batch.known_tokens_of("b")) == (6, 3)
    batch.resume("b")
    batch.resume("a", computed=4)

    assert batch.progress.counts(batch.slot_of("a")) == (6, 4, 4)
    assert batch.progress.counts(batch.slot_of("b")) == (3, 0, 0)
    assert batch.remaining_of("a") == 2


def test_on_preempt(backend: AnyBackend) -> None:
    """A field that says "reset" starts again from its default, one that says "keep" does not."""
    fields = [
        make(name, on_preempt=choice, residency=residency)
        for choice in ("keep", "reset")
        for residency in ("rows", "slots")
        for make, name in (
            (row, f"row_{choice}_{residency}"),
            (host, f"host_{choice}_{residency}"),
        )
    ] + [ragged("ragged_keep", 4), ragged("ragged_reset", 4, on_preempt="reset")]
    batch = make_batch(*fields, backend=backend)
    given = {f.name: [7, 8] if f.name.startswith("ragged") else 7 for f in fields}
    batch.add("a", prompt_len=1, fields=given)
    batch.preempt("a")
    batch.add("b", prompt_len=1)
    batch.resume("a")

    for field in fields:
        got = batch.read("a", field.name)
        if field.name.startswith("ragged"):
            assert list(got) == ([7, 8] if field.on_preempt == "keep" else [])  # type: ignore[call-overload]  # array
        elif field.on_preempt == "keep":
            assert got == 7
        else:
            assert got == field.default


# -- Python objects ------------------------------------------------------------------------------
@pytest.fixture(params=["rows", "slots"])
def object_batch(request: pytest.FixtureRequest, backend: AnyBackend) -> AnyBatch:
    """A batch with one host field, in rows and in slots."""
    return make_batch(host("h", residency=request.param), backend=backend)


def watched(batch: AnyBatch, *req_ids: str) -> dict[str, weakref.ref[Thing]]:
    """Admit requests with one object each, held by the batch alone."""
    refs = {}
    for req_id in req_ids:
        thing = Thing()
        batch.add(req_id, prompt_len=2, fields={"h": thing})
        refs[req_id] = weakref.ref(thing)
    return refs


def alive(refs: dict[str, weakref.ref[Thing]]) -> set[str]:
    return {req_id for req_id, ref in refs.items() if ref() is not None}


def test_objects_are_held_by_reference(object_batch: AnyBatch) -> None:
    """A host field gives back the very object, before and after moves (FastDeploy I3)."""
    things = {req_id: Thing() for req_id in "abc"}
    for req_id, thing in things.items():
        object_batch.add(req_id, prompt_len=2, fields={"h": thing})
    step(object_batch, a=1, b=1, c=1)
    step(object_batch, c=1)
    object_batch.preempt("a")
    step(object_batch, b=1)
    object_batch.resume("a")

    assert all(object_batch.read(r, "h") is thing for r, thing in things.items())


@pytest.mark.usefixtures("no_cycles")
def test_objects_go_with_their_request(object_batch: AnyBatch) -> None:
    """On every way out the reference is dropped at once (peers M)."""
    refs = watched(object_batch, "a", "b", "c", "d")
    step(object_batch, d=1, b=1)
    object_batch.remove("b")
    assert alive(refs) == {"a", "c", "d"}
    object_batch.preempt("a")
    assert alive(refs) == {"a", "c", "d"}
    object_batch.remove("a")
    assert alive(refs) == {"c", "d"}
    step(object_batch, c=1, d=1)
    object_batch.write("c", "h", None)
    assert alive(refs) == {"d"}
    object_batch.reset()
    assert alive(refs) == set()


@pytest.mark.usefixtures("no_cycles")
def test_preempted_objects_go_on_reset(object_batch: AnyBatch) -> None:
    """Reset drops what preempted requests keep, too."""
    refs = watched(object_batch, "a", "b")
    object_batch.preempt("a")
    object_batch.reset()
    assert alive(refs) == set()


@pytest.mark.usefixtures("no_cycles")
def test_a_resumed_request_holds_its_object_once(object_batch: AnyBatch) -> None:
    """After a resume the preempted copy of the reference is gone."""
    refs = watched(object_batch, "a")
    object_batch.preempt("a")
    object_batch.resume("a")
    object_batch.remove("a")
    assert alive(refs) == set()


def test_callable_default_makes_one_object_a_request(backend: AnyBackend) -> None:
    """Requests do not share a default made by a callable, nor inherit one with the slot."""
    batch = make_batch(host("log", default=list), host("shared", default=0), backend=backend)
    add_all(batch, a=1, b=1)
    first = batch.read("a", "log")
    assert isinstance(first, list)
    first.append("x")

    assert batch.read("b", "log") == []
    batch.remove("a")
    add_all(batch, c=1)
    assert batch.slot_of("c") == 0
    assert batch.read("c", "log") == []
    assert batch.read("c", "shared") == 0


def test_a_default_that_raises_admits_nothing(backend: AnyBackend) -> None:
    """If making a default fails, the batch is as it was: for an admission and for a resume."""
    healthy = True

    def default() -> str:
        if not healthy:
            raise RuntimeError("no more")
        return "made"

    batch = make_batch(host("h", default=default, on_preempt="reset"), backend=backend)
    add_all(batch, a=1, b=1)
    batch.preempt("a")
    healthy = False
    before = state_of(batch)
    with pytest.raises(RuntimeError, match="no more"):
        batch.add("c", prompt_len=1)
    with pytest.raises(RuntimeError, match="no more"):
        batch.resume("a")

    assert state_of(batch) == before
    batch.add("c", prompt_len=1, fields={"h": "given"})
    assert batch.read("c", "h") == "given"
