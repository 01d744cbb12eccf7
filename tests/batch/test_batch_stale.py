"""What has become stale is refused, and what is refused leaves nothing half done."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batch_states import refused
from exposed import to_host
from small_batches import add_all, make_batch, step

from vlbatch import Backend, BatchOrder, InputBatch
from vlbatch.errors import InvalidField, StaleOrder
from vlbatch.fields import cumulative, packed, row

AnyBackend = Backend[Any, Any]


# -- stale plans and orders ----------------------------------------------------------------------
def changes(batch: InputBatch[Any]) -> dict[str, Any]:
    """Every verb after which an earlier plan must not be applied."""
    return {
        "add": lambda: batch.add("z", prompt_len=1),
        "remove": lambda: batch.remove("b"),
        "preempt": lambda: batch.preempt("b"),
        "resume": lambda: batch.resume("p"),
        "apply": lambda: batch.apply(batch.plan({"b": 1})),
        "advance": lambda: batch.advance(batch._order),  # type: ignore[arg-type]  # there is one
        "confirm": lambda: batch.confirm("b", 0),
        "reset": batch.reset,
    }


@pytest.mark.parametrize("change", list(changes(make_batch())))
def test_plans_go_stale(backend: AnyBackend, change: str) -> None:
    """A plan is refused once the batch has changed in any way (peers H)."""
    batch = make_batch(row("x"), backend=backend)
    add_all(batch, p=3, a=3, b=3)
    batch.preempt("p")
    batch.apply(batch.plan({"a": 1, "b": 1}))
    plan = batch.plan({"a": 1})
    changes(batch)[change]()
    with refused(batch, StaleOrder, "another batch or for an earlier state"):
        batch.apply(plan)


def test_a_plan_is_applied_once(backend: AnyBackend) -> None:
    """The same plan a second time is refused: its moves were made (FastDeploy M1)."""
    batch = make_batch(row("x"), backend=backend)
    add_all(batch, a=1, b=1)
    plan = batch.plan({"b": 1})
    batch.apply(plan)
    with refused(batch, StaleOrder, "an earlier state"):
        batch.apply(plan)


def test_plans_belong_to_one_batch(backend: AnyBackend) -> None:
    """A plan of another batch in the very same state is refused."""
    batches = [make_batch(row("x"), backend=backend) for _ in range(2)]
    for batch in batches:
        add_all(batch, a=1)
    with refused(batches[0], StaleOrder, "another batch"):
        batches[0].apply(batches[1].plan({"a": 1}))


def test_orders_go_stale(backend: AnyBackend) -> None:
    """Only the latest order can be counted, once, and by its own batch."""
    batch = make_batch(backend=backend)
    add_all(batch, a=9, b=9)
    first = batch.apply(batch.plan({"a": 1, "b": 1}))
    other = make_batch(backend=backend)
    add_all(other, a=9, b=9)
    foreign = other.apply(other.plan({"a": 1, "b": 1}))
    with refused(batch, StaleOrder, "not the latest order"):
        batch.advance(foreign)
    second = batch.apply(batch.plan({"a": 1, "b": 1}))
    with refused(batch, StaleOrder, "step 0 is not the latest order"):
        batch.advance(first)
    batch.advance(second)
    with refused(batch, StaleOrder, "step 1 is not the latest order of .* or was counted already"):
        batch.advance(second)
    assert batch.computed_of("a") == 1


def test_a_counted_step_stays_counted(backend: AnyBackend) -> None:
    """A step cannot be counted again after it was rolled back."""
    batch = make_batch(backend=backend)
    add_all(batch, a=9)
    order = step(batch, a=4)
    batch.confirm("a", 0)
    with refused(batch, StaleOrder, "counted already"):
        batch.advance(order)


def test_reset_makes_everything_stale(backend: AnyBackend) -> None:
    """After a reset no earlier plan and no earlier order is taken (FastDeploy R7)."""
    batch = make_batch(row("x"), backend=backend)
    add_all(batch, a=9, b=9)
    order = batch.apply(batch.plan({"a": 1}))
    plan = batch.plan({"a": 1, "b": 1})
    old_id = batch.batch_id
    batch.reset()
    add_all(batch, a=9, b=9)
    with refused(batch, StaleOrder, "earlier state"):
        batch.apply(plan)
    with refused(batch, StaleOrder, "not the latest order"):
        batch.advance(order)
    assert batch.batch_id != old_id == order.batch_id
    assert step(batch, b=1).req_ids == ("b",)


# -- nothing half done ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("values", "message", "setting"),
    [
        ([1] * 5, "got 5 entries; it holds 4", "shape of 'f'"),
        ([0.5], "rebuild of field 'f' got a value of dtype float64; expected int8", None),
        ([200], "rebuild of field 'f' got integers", None),
        ([[1, 2]], r"got shape \(1, 2\); expected \('n',\)", None),
        (3, r"got shape \(\)", None),
    ],
)
def test_a_derived_field_that_does_not_fit(
    backend: AnyBackend, values: object, message: str, setting: str | None
) -> None:
    """If a derived field cannot hold the step, no row moves and the plan stays usable."""
    answers: list[object] = [[1], values, [2]]
    fields = packed("f", (4,), "int8", rebuild=lambda _: answers.pop(0)), row("x")  # type: ignore[arg-type,return-value]  # wrong on purpose
    batch = make_batch(*fields, backend=backend)
    add_all(batch, a=1, b=1)
    step(batch, a=1)
    plan = batch.plan({"b": 1})
    with refused(batch, InvalidField, message, setting=setting):
        batch.apply(plan)
    assert batch.apply(plan).req_ids == ("b",)
    assert to_host(batch["f"]).tolist() == [2, 0, 0, 0]


def test_sums_that_do_not_fit(backend: AnyBackend) -> None:
    """Running sums beyond their dtype, or of too many rows, are refused before a row moves."""
    lengths: list[int] = [100, 100]
    batch = make_batch(cumulative("sums", lambda _: lengths, "int8"), row("x"), backend=backend)
    add_all(batch, a=1, b=1)
    with refused(batch, InvalidField, "sums of field 'sums' got integers"):
        batch.apply(batch.plan({"b": 1}))
    lengths[:] = [1] * 5
    with refused(batch, InvalidField, "got 5 entries; it holds 4", setting="shape of 'sums'"):
        batch.apply(batch.plan({"b": 1}))
    lengths[:] = [0.5, 1.0]  # type: ignore[list-item]  # wrong on purpose
    with refused(batch, InvalidField, "rebuild of field 'sums' got a value of dtype float64"):
        batch.apply(batch.plan({"b": 1}))
    lengths[:] = [3, 4]
    batch.apply(batch.plan({"b": 1}))
    assert to_host(batch["sums"]).tolist() == [0, 3, 7, 7, 7]


def test_packed_rows(backend: AnyBackend) -> None:
    """A packed buffer may have more axes; the rows behind the step's tokens are reset."""

    def pairs(order: BatchOrder) -> Any:
        return np.stack([order.row_of_token, order.token_indices], axis=1)

    fields = packed("pairs", (5, 2), "int32", default=-1, rebuild=pairs), packed("written", (3,))
    batch = make_batch(*fields, backend=backend)
    add_all(batch, a=3, b=3)
    batch["written"] = [1, 2, 3]
    step(batch, a=2, b=1)
    assert to_host(batch["pairs"]).tolist() == [[0, 0], [0, 1], [1, 0], [-1, -1], [-1, -1]]
    step(batch, b=1)

    assert to_host(batch["pairs"]).tolist() == [[0, 1], [-1, -1], [-1, -1], [-1, -1], [-1, -1]]
    assert to_host(batch["written"]).tolist() == [1, 2, 3]
    batch["pairs"] = 7
    step(batch, b=1)
    assert to_host(batch["pairs"]).tolist() == [[0, 2], [-1, -1], [-1, -1], [-1, -1], [-1, -1]]
