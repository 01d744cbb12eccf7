"""Steady decode: the latest order is planned again only where that is the right one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from batch_states import refused
from exposed import to_host
from small_batches import add_all, make_batch, step

from vlbatch import InputBatch
from vlbatch.errors import InvalidField, InvalidSchedule
from vlbatch.fields import cumulative, row
from vlbatch.order import DECODE, PREFILL


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


def add_another(batch: InputBatch[Any]) -> None:
    """Let a third request in, that is not scheduled."""
    batch.add("c", prompt_len=3)


@pytest.mark.parametrize(
    ("change", "rows", "classes"),
    [
        (remove_and_add, ("a", "b"), [DECODE, PREFILL]),
        (roll_back, ("a", "b"), [DECODE, PREFILL]),
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
