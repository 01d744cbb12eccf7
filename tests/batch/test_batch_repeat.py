"""Steady decode: the latest order is planned again only where that is the right one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from batch_states import refused
from exposed import to_host
from small_batches import add_all, make_batch, step

from vlbatch import BatchOrder, InputBatch
from vlbatch.errors import InvalidField, InvalidSchedule
from vlbatch.fields import cumulative, packed, row
from vlbatch.order import DECODE, EXTEND, IDLE, PREFILL


def decoding(num_steps: int = 2, **settings: Any) -> InputBatch[Any]:
    """Two requests with one prompt token each, after some steps of one token."""
    batch = make_batch(
        row("x"),
        cumulative("kv_start", lambda order: order.scheduled + order.computed),
        cumulative("query_start", lambda order: order.scheduled),
        **settings,
    )
    add_all(batch, a=1, b=1)
    for _ in range(num_steps):
        step(batch, a=1, b=1)
    return batch


def test_a_repeated_step_is_one_token_further() -> None:
    """Each decode step has its own number, computed tokens, token indices and sums."""
    batch = decoding()
    first = batch.apply(batch.plan({"a": 1, "b": 1}))
    assert first.token_indices.tolist() == [2, 2]
    batch.advance(first)
    second = batch.apply(batch.plan({"a": 1, "b": 1}))

    assert (first.step, second.step) == (2, 3)
    assert first.computed.tolist() == [2, 2]
    assert second.computed.tolist() == [3, 3]
    assert second.token_indices.tolist() == [3, 3]
    assert to_host(batch["kv_start"]).tolist() == [0, 4, 8, 8, 8]
    assert to_host(batch["query_start"]).tolist() == [0, 1, 2, 2, 2]
    assert first.digest() != second.digest()


def remove_and_add(batch: InputBatch[Any]) -> None:
    """Give b's slot to a new prompt of the same name."""
    batch.remove("b")
    batch.add("b", prompt_len=1)


def roll_back(batch: InputBatch[Any]) -> None:
    """Take b back to the start of its prompt."""
    batch.set_progress(np.array([1, 1]), np.array([2, 0]))


def confirm_less(batch: InputBatch[Any]) -> None:
    """Say that nothing of b was computed after all."""
    assert batch.confirm("b", 0)


def add_another(batch: InputBatch[Any]) -> None:
    """Let a third request in, that is not scheduled."""
    batch.add("c", prompt_len=3)


@pytest.mark.parametrize(
    ("change", "rows", "classes"),
    [
        (remove_and_add, ("a", "b"), [DECODE, PREFILL]),
        (roll_back, ("a", "b"), [DECODE, PREFILL]),
        (confirm_less, ("a", "b"), [DECODE, PREFILL]),
        (add_another, ("a", "b", "c"), [DECODE, DECODE]),
    ],
)
def test_what_changed_is_in_the_next_order(
    change: Callable[[InputBatch[Any]], None], rows: tuple[str, ...], classes: list[int]
) -> None:
    """The same schedule after a departure, an admission or a roll back makes another order."""
    batch = decoding()
    change(batch)
    order = batch.apply(batch.plan({"a": 1, "b": 1}))

    assert order.req_ids + order.idle == rows
    assert order.classes.tolist() == classes
    batch.check()


def test_the_end_of_a_prompt_is_not_repeated() -> None:
    """The same schedule goes on as a decode where the prompt ended, in every order's own words."""
    batch = make_batch(row("x"))
    add_all(batch, a=3)
    orders = [step(batch, a=1) for _ in range(5)]

    assert [order.classes.tolist() for order in orders] == [
        [PREFILL], [EXTEND], [EXTEND], [DECODE], [DECODE]
    ]  # fmt: skip
    assert [order.regions for order in orders[2:]] == [(0, 1, 0), (1, 0, 0), (1, 0, 0)]


def test_a_prompt_that_an_engine_makes_longer_is_in_the_next_order() -> None:
    """Prompt lengths set by hand are told, also where everyone decodes on as before."""
    batch = decoding()
    batch.set_progress(np.array([2, 1]), np.array([2, 2]))

    assert batch.plan({"a": 1, "b": 1}).order.prompt_lens.tolist() == [2, 1]


def test_a_repeated_order_names_the_policy_that_is_asked_for() -> None:
    """A policy for one step is in its order, though rows and schedule stay."""
    batch = decoding()
    policies = [batch.plan({"a": 1, "b": 1}, policy=p).order.policy for p in ("two", None)]

    assert policies == ["two", "split"]


def test_a_schedule_that_names_a_departed_request_is_refused() -> None:
    """What was asked for step after step is refused once one of its requests has left."""
    batch = decoding()
    batch.remove("b")
    with refused(batch, InvalidSchedule, "is not in the batch", req_id="b"):
        batch.plan({"a": 1, "b": 1})


def test_the_last_token_of_the_model_is_the_last() -> None:
    """A repeated step that would outgrow ``max_model_len`` is refused like any other."""
    batch = decoding(max_model_len=3, num_steps=3)
    with refused(batch, InvalidSchedule, r"got 1 tokens; expected 1..0", req_id="a"):
        batch.plan({"a": 1, "b": 1})


def test_a_plan_that_was_not_applied_is_not_repeated() -> None:
    """Only what was applied says where rows are."""
    batch = decoding()
    batch.plan({"b": 1})
    order = batch.apply(batch.plan({"a": 1, "b": 1}))

    assert (order.req_ids, order.idle) == (("a", "b"), ())


def test_lengths_that_an_engine_overwrites_are_summed_anew() -> None:
    """Sums are kept from step to step only of lengths that cannot change."""
    lengths = np.array([1, 2])
    batch = make_batch(cumulative("sums", lambda order: lengths))
    add_all(batch, a=1, b=1)
    step(batch, a=1, b=1)
    lengths[:] = [3, 4]
    step(batch, a=1, b=1)

    assert to_host(batch["sums"]).tolist() == [0, 3, 7, 7, 7]


def test_sums_in_a_column() -> None:
    """Sums may have trailing axes of extent 1, for kernels that want them so; no other ones."""
    batch = make_batch(cumulative("sums", lambda order: order.scheduled, shape=(1,)))
    add_all(batch, a=2, b=3)
    step(batch, a=2, b=3)

    assert to_host(batch["sums"]).tolist() == [[0], [2], [5], [5], [5]]
    with pytest.raises(InvalidField, match=r"'sums' has shape \(2,\); use ones"):
        cumulative("sums", lambda order: order.scheduled, shape=(2,))


def test_lengths_seen_through_a_frozen_view_are_summed_anew() -> None:
    """An array that its rebuild cannot write may still change: only an order's own stay."""
    lengths = np.array([1, 2])
    view = lengths.view()
    view.flags.writeable = False
    batch = make_batch(cumulative("sums", lambda order: view))
    add_all(batch, a=1, b=1)
    step(batch, a=1, b=1)
    lengths[:] = [3, 4]
    step(batch, a=1, b=1)

    assert to_host(batch["sums"]).tolist() == [0, 3, 7, 7, 7]


def test_everything_of_a_repeated_order_is_its_own() -> None:
    """What follows from computed tokens is worked out anew, all else is as before, read or not."""
    batch = decoding()
    first = batch.apply(batch.plan({"a": 1, "b": 1}))
    for name in dir(first):
        getattr(first, name)  # fill every cache
    batch.advance(first)
    second = batch.apply(batch.plan({"a": 1, "b": 1}))

    assert second.token_indices.tolist() == (first.token_indices + 1).tolist() == [3, 3]
    assert second.computed.tolist() == [3, 3]
    assert (second.num_tokens, second.regions) == (first.num_tokens, first.regions)
    assert second.query_start.tolist() == [0, 1, 2]
    assert second.row_of("b") == 1
    assert not second.computed.flags.writeable


@dataclass
class Naive:
    """A request with one prompt token, in a list of rows."""

    req_id: str
    admitted: int  # rank; -1 once an order knows the request
    computed: int = 0
    confirmed: int = 0


class Steady:
    """A batch whose requests mostly decode, and what its rows must be in plain Python."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.batch = make_batch(row("x"), max_model_len=4000, stable=True)
        self.rows: list[Naive | None] = []
        self.num_admitted = 0
        for req_id in "abcd":
            self.admit(req_id)

    def admit(self, req_id: str) -> None:
        """Place a request in the first hole, or behind the last row."""
        self.batch.add(req_id, prompt_len=1)
        hole = self.rows.index(None) if None in self.rows else len(self.rows)
        self.rows[hole : hole + 1] = [Naive(req_id, self.num_admitted)]
        self.num_admitted += 1

    def swap(self, first: int, second: int) -> None:
        self.batch.swap_rows(first, second)
        self.rows[first], self.rows[second] = self.rows[second], self.rows[first]

    def come_back(self, first: int, second: int) -> None:
        """Let two leave; new ones of the same names come, in each other's rows or not."""
        gone = [self.rows[at] for at in (first, second)]
        for at in (first, second):
            self.batch.remove(self.batch.rows[at] or "")
            self.rows[at] = None
        for request in gone:
            self.admit(request.req_id if request else "")

    def roll_back(self, first: int, second: int) -> None:
        for request in (self.rows[first], self.rows[second]):
            if request:
                self.batch.confirm(request.req_id, request.confirmed)
                request.computed = request.confirmed

    def set_progress(self, _first: int, _second: int) -> None:
        """Let an engine set all counts, to one of two near the start."""
        requests = [r for r in self.rows if r]
        for request in requests:
            request.computed = request.confirmed = self.choose.randrange(2)
        computed = np.array([r.computed for r in requests])
        self.batch.set_progress(np.ones_like(computed), computed)

    def step(self, scheduled: dict[str, int]) -> None:
        """Plan, apply and count; a stable order is unique."""
        requests = [r for r in self.rows if r]

        def place(request: Naive) -> tuple[int, int]:
            region = PREFILL if request.computed == 0 else DECODE
            return IDLE if request.req_id not in scheduled else region, request.admitted

        self.rows = [*(expected := sorted(requests, key=place))]
        order = self.batch.apply(self.batch.plan(scheduled))
        there = expected[: len(scheduled)]
        assert [*order.req_ids, *order.idle] == [r.req_id for r in expected]
        assert order.computed.tolist() == [r.computed for r in there]
        assert order.token_indices.tolist() == [r.computed for r in there]
        assert order.classes.tolist() == [DECODE if r.computed else PREFILL for r in there]
        self.batch.advance(order)
        for request in expected:
            request.admitted = -1
            request.computed += request.req_id in scheduled


def test_steady_steps_with_one_disturbance_at_a_time(seed: int) -> None:
    """Between swaps, returns and roll backs one schedule makes the one right order each time."""
    steady = Steady(seed)
    disturbances: list[Callable[[int, int], None]] = [
        steady.swap, steady.come_back, steady.roll_back, steady.set_progress
    ]  # fmt: skip
    scheduled = dict.fromkeys("abcd", 1)
    for _ in range(400):
        if steady.choose.random() < 0.4:
            steady.choose.choice(disturbances)(*steady.choose.sample(range(4), 2))
        if steady.choose.random() < 0.1:
            scheduled = dict.fromkeys(steady.choose.sample("abcd", 3), 1)
        steady.step(scheduled)
        assert list(steady.batch.rows) == [r and r.req_id for r in steady.rows]
        steady.batch.check()


def test_rebuilds_that_share_a_buffer() -> None:
    """Each field has what its own rebuild returned, though all return one buffer, filled anew."""
    buffer = np.zeros(2, dtype=np.int64)

    def filled(value: int) -> Any:
        def rebuild(order: BatchOrder) -> Any:
            buffer[:] = value
            return buffer

        return rebuild

    batch = make_batch(
        cumulative("twos", filled(2)),
        cumulative("threes", filled(3)),
        packed("fours", (4,), rebuild=filled(4)),
        packed("fives", (4,), rebuild=filled(5)),
    )
    add_all(batch, a=1, b=1)
    step(batch, a=1, b=1)

    assert to_host(batch["twos"]).tolist() == [0, 2, 4, 4, 4]
    assert to_host(batch["threes"]).tolist() == [0, 3, 6, 6, 6]
    assert to_host(batch["fours"]).tolist() == [4, 4, 0, 0]
    assert to_host(batch["fives"]).tolist() == [5, 5, 0, 0]


def test_orders_cannot_be_written_through_their_base() -> None:
    """No array of an order is a view of one that can be written."""
    order = decoding().plan({"a": 1}).order
    for name in ("slots", "computed", "scheduled", "prompt_lens", "classes"):
        array = getattr(order, name)
        assert not array.flags.writeable
        assert array.base is None or not array.base.flags.writeable
