"""A step: what can be scheduled, and one plan for the order of its rows."""

from __future__ import annotations

from typing import Any

import pytest
from batch_states import refused, state_of
from exposed import to_host
from small_batches import add_all, make_batch, step

from vlbatch import Backend
from vlbatch.errors import InvalidSchedule
from vlbatch.fields import cumulative, ragged, row
from vlbatch.order import OrderPolicy

AnyBackend = Backend[Any, Any]


# -- what can be scheduled -----------------------------------------------------------------------
def test_limits_of_a_schedule(backend: AnyBackend) -> None:
    """A prompt takes what is left of it, a decode one token and its drafts, no more and no less."""
    batch = make_batch(backend=backend, num_drafts=2)
    add_all(batch, prompt=9, decode=2)
    step(batch, prompt=4, decode=2)

    assert (batch.remaining_of("prompt"), batch.remaining_of("decode")) == (5, 3)
    for req_id, tokens, message in [
        ("prompt", 6, r"got 6 tokens; expected 1\.\.5 \(4 of a prompt of 9 are computed"),
        ("decode", 4, r"got 4 tokens; expected 1\.\.3 \(2 of a prompt of 2 .* 2 drafts"),
        ("prompt", 0, "got 0 tokens"),
        ("decode", -1, "got -1 tokens"),
    ]:
        with refused(batch, InvalidSchedule, message, req_id=req_id):
            batch.plan({"decode": 1, "prompt": 1, req_id: tokens})
    order = step(batch, prompt=5, decode=3)
    assert dict(zip(order.req_ids, order.scheduled.tolist(), strict=True)) == {
        "prompt": 5, "decode": 3,
    }  # fmt: skip


def test_unknown_requests_cannot_be_scheduled(backend: AnyBackend) -> None:
    """Who is not live, preempted ones included, gets no tokens, and neither do the others."""
    batch = make_batch(backend=backend)
    add_all(batch, a=3, b=3)
    batch.preempt("b")
    for req_id in ("b", "nobody"):
        with refused(batch, InvalidSchedule, "is not in the batch", req_id=req_id):
            batch.plan({"a": 1, req_id: 1})


@pytest.mark.parametrize("leave", ["remove", "preempt", "reset"])
def test_the_same_schedule_again(backend: AnyBackend, leave: str) -> None:
    """A schedule that was right a step ago is refused once its request has left."""
    batch = make_batch(backend=backend)
    add_all(batch, a=9)
    step(batch, a=1)
    batch.reset() if leave == "reset" else getattr(batch, leave)("a")
    with refused(batch, InvalidSchedule, "is not in the batch", req_id="a"):
        batch.plan({"a": 1})


def test_max_model_len_bounds_drafts(backend: AnyBackend) -> None:
    """The last tokens of a request are scheduled up to max_model_len, and not beyond."""
    batch = make_batch(backend=backend, max_model_len=6, num_drafts=3)
    add_all(batch, a=4)
    step(batch, a=4)
    assert batch.remaining_of("a") == 2
    with refused(batch, InvalidSchedule, r"expected 1\.\.2 .* max_model_len 6\)", req_id="a"):
        batch.plan({"a": 3})
    step(batch, a=2)

    assert batch.computed_of("a") == 6
    assert batch.remaining_of("a") == 0
    batch.check()


def test_empty_schedules(backend: AnyBackend) -> None:
    """A step without tokens, and one of a batch without requests, are steps like any other."""
    batch = make_batch(cumulative("sums", lambda o: o.scheduled), row("x"), backend=backend)
    empty = batch.apply(batch.plan({}))
    assert (empty.num_reqs, empty.num_tokens, empty.idle) == (0, 0, ())
    batch.advance(empty)
    add_all(batch, a=2, b=2)
    batch.remove("a")
    waiting = batch.apply(batch.plan({}))

    assert (waiting.req_ids, waiting.idle, batch.rows) == ((), ("b",), ("b",))
    assert to_host(batch["sums"]).tolist() == [0] * 5
    assert to_host(batch["slot_of_row"]).tolist() == [-1] * 4
    batch.advance(waiting)
    assert batch.computed_of("b") == 0


def test_idle_requests_keep_their_place(backend: AnyBackend) -> None:
    """A request without tokens keeps slot, values and progress, behind the rows of the step."""
    batch = make_batch(row("x"), backend=backend)
    for i, req_id in enumerate("abc"):
        batch.add(req_id, prompt_len=2, fields={"x": i + 1})
    order = step(batch, c=1)

    assert (order.req_ids, order.idle) == (("c",), ("b", "a"))
    assert [int(batch.read(r, "x")) for r in "abc"] == [1, 2, 3]  # type: ignore[call-overload]  # numbers
    assert [batch.computed_of(r) for r in "abc"] == [0, 0, 1]
    assert step(batch, a=1, b=1).idle == ("c",)


# -- order ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("policy", "stable", "expected"),
    [
        ("split", True, ["d1", "d2", "e1", "e2", "p", "idle"]),
        ("two", True, ["d1", "d2", "e1", "p", "e2", "idle"]),
        ("arrival", True, ["e1", "d1", "d2", "p", "e2", "idle"]),
        ("split", False, ["d1", "d2", "e2", "e1", "p", "idle"]),
        ("two", False, ["d1", "d2", "e2", "e1", "p", "idle"]),
        ("arrival", False, ["e2", "e1", "d1", "p", "d2", "idle"]),
    ],
)
def test_policies(policy: OrderPolicy, stable: bool, expected: list[str]) -> None:
    """Rows are grouped as the policy says; only the stable option keeps the relative order."""
    batch = make_batch(capacity=6, policy=policy, stable=stable)
    add_all(batch, gone=1, e1=4, d1=1, idle=1, d2=1, p=4)
    step(batch, gone=1, e1=1, d1=1, idle=1, d2=1)
    batch.remove("gone")
    batch.add("e2", prompt_len=4, computed=2)
    assert list(batch.rows) == ["e2", "e1", "d1", "idle", "d2", "p"]
    order = batch.apply(batch.plan({"p": 1, "d2": 1, "e2": 1, "e1": 1, "d1": 1}))

    assert [*order.req_ids, *order.idle] == expected


def test_newcomers_come_last_in_their_region(backend: AnyBackend) -> None:
    """With a stable order a newcomer in the hole of an old row still comes after the old ones."""
    batch = make_batch(backend=backend, stable=True, policy="arrival")
    add_all(batch, a=2, b=2, c=2)
    step(batch, a=1, b=1, c=1)
    batch.remove("a")
    add_all(batch, d=2, e=2)
    assert batch.rows == ("d", "b", "c", "e")
    order = step(batch, e=1, d=1, c=1, b=1)

    assert order.req_ids == ("b", "c", "d", "e")


def test_planning_changes_nothing(backend: AnyBackend) -> None:
    """A plan is pure: made twice it is the same, and the batch is as it was (design rule 1)."""
    batch = make_batch(row("x"), ragged("t", 4, residency="rows"), backend=backend)
    add_all(batch, a=1, b=4, c=1)
    step(batch, a=1, b=1, c=1)
    batch.remove("a")
    before = state_of(batch)
    plans = [batch.plan({"c": 1, "b": 2}) for _ in range(2)]

    assert state_of(batch) == before
    assert plans[0].order.digest() == plans[1].order.digest()
    assert plans[0].order.req_ids == plans[1].order.req_ids == ("c", "b")
    assert plans[0].moves.sources.tolist() == plans[1].moves.sources.tolist()
    batch.apply(plans[1])


def test_a_step_that_moves_nothing(backend: AnyBackend) -> None:
    """When every row is in its region already, no row moves."""
    batch = make_batch(row("x"), backend=backend)
    add_all(batch, a=1, b=1)
    step(batch, a=1, b=1)
    plan = batch.plan({"b": 1, "a": 1})

    assert plan.moves.is_identity
    assert batch.apply(plan).req_ids == ("a", "b")


def test_steps_are_counted() -> None:
    """Each applied order has the next number; a plan that was not applied takes none."""
    batch = make_batch()
    add_all(batch, a=9)
    batch.plan({"a": 1})
    assert [step(batch, a=1).step for _ in range(3)] == [0, 1, 2]
