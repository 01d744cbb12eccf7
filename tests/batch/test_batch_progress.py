"""Computed and confirmed tokens of each request."""

from __future__ import annotations

from typing import Any

from batch_states import refused
from small_batches import add_all, make_batch, step

from vlbatch import Backend
from vlbatch.errors import InvalidSchedule, StaleOrder

AnyBackend = Backend[Any, Any]


def test_advance_counts_accepted_drafts(backend: AnyBackend) -> None:
    """A decode grows by one token and its accepted drafts, all of them where nothing is said."""
    batch = make_batch(backend=backend, num_drafts=3)
    add_all(batch, a=2, b=2, c=9)
    step(batch, a=2, b=2)
    order = batch.apply(batch.plan({"a": 4, "b": 4, "c": 4}))
    for accepted, req_id in [({"a": 4}, "a"), ({"a": 1, "b": -1}, "b"), ({"c": 3}, "c")]:
        with refused(
            batch, InvalidSchedule, r"accepted -?\d drafts; expected 0\.\.3", req_id=req_id
        ):
            batch.advance(order, accepted)
    batch.advance(order, {"a": 1})

    assert [batch.computed_of(r) for r in "abc"] == [4, 6, 4]
    assert [batch.known_tokens_of(r) for r in "abc"] == [5, 7, 9]


def test_requests_that_left_are_not_counted(backend: AnyBackend) -> None:
    """A step does not count for a request that left since, nor for who has its slot now."""
    batch = make_batch(backend=backend)
    add_all(batch, a=9, b=9, c=9, d=9)
    order = batch.apply(batch.plan({"a": 3, "b": 3, "c": 3, "d": 3}))
    batch.remove("a")
    batch.preempt("b")
    batch.remove("c")
    add_all(batch, e=9)
    batch.resume("b")
    assert (batch.slot_of("e"), batch.slot_of("b")) == (0, 1)
    batch.advance(order)

    assert {r: batch.computed_of(r) for r in batch.req_ids} == {"d": 3, "e": 0, "b": 0}
    batch.check()


def test_confirm_and_roll_back(backend: AnyBackend) -> None:
    """Confirmed progress only grows; what was counted beyond it can be taken back."""
    batch = make_batch(backend=backend, num_drafts=3)
    add_all(batch, a=4, b=4)
    step(batch, a=4, b=4)
    assert batch.progress.counts(batch.slot_of("a")) == (4, 4, 0)
    assert batch.confirm("a", 4) is False
    step(batch, a=4, b=1)
    assert batch.confirm("a", 6) is True
    assert batch.progress.counts(batch.slot_of("a")) == (4, 6, 6)
    for computed in (5, 7, -1):
        with refused(
            batch, InvalidSchedule, rf"confirmed {computed} .*expected 6 .*to 6", req_id="a"
        ):
            batch.confirm("a", computed)
    batch.confirm_all()

    assert batch.progress.counts(batch.slot_of("b")) == (4, 5, 5)
    batch.check()


def test_confirm_with_steps_in_flight(backend: AnyBackend) -> None:
    """Tokens of later steps stay counted after a step is confirmed, and go with its roll back."""
    batch = make_batch(backend=backend, num_drafts=3)
    add_all(batch, a=4, b=4)
    step(batch, a=4, b=4)
    batch.confirm_all()
    step(batch, a=4, b=4)
    step(batch, a=1, b=1)
    assert batch.confirm("a", 8, in_flight=1) is False
    assert batch.confirm("b", 6, in_flight=1) is True

    assert batch.progress.counts(batch.slot_of("a")) == (4, 9, 8)
    assert batch.progress.counts(batch.slot_of("b")) == (4, 6, 6)
    with refused(batch, InvalidSchedule, r"expected 8 .*to 8 .*1 in flight", req_id="a"):
        batch.confirm("a", 9, in_flight=1)


def test_roll_back_into_the_prompt(backend: AnyBackend) -> None:
    """A request that is rolled back before the end of its prompt is prompt work again."""
    batch = make_batch(backend=backend)
    add_all(batch, a=6)
    step(batch, a=6)
    batch.confirm("a", 2)

    assert batch.remaining_of("a") == 4
    assert step(batch, a=4).regions == (0, 1, 0)


def test_roll_back_under_a_step_in_flight(backend: AnyBackend) -> None:
    """A step that was planned before a roll back does not count on top of it."""
    batch = make_batch(backend=backend)
    add_all(batch, a=9, b=9)
    step(batch, a=4, b=4)
    order = batch.apply(batch.plan({"a": 1, "b": 1}))
    batch.confirm("a", 2)
    with refused(batch, StaleOrder, "rolled back since"):
        batch.advance(order)
