"""Code that must type-check: what the public names of the batch promise to a type checker.

It is never run; ``test_typing.py`` hands it to mypy. A line with ``type: ignore`` must be an error:
mypy reports an ignore that is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vlbatch import (
    Backend,
    BatchOrder,
    BatchPlan,
    BatchSnapshot,
    InputBatch,
    NumpyBackend,
    RowMoves,
    SideTable,
    VlbatchError,
    fields,
    make_backend,
)
from vlbatch.errors import BatchFull
from vlbatch.fields import Field, FieldMemory
from vlbatch.order import Follower, Regions

if TYPE_CHECKING:
    from typing_extensions import assert_type

Array = npt.NDArray[Any]


def declare() -> list[Field]:
    fields.row("x", (2,), residency="everywhere")  # type: ignore[arg-type]
    fields.row("x", layout="dense")  # type: ignore[arg-type]
    fields.row("x", (), "int64", 5)  # type: ignore[call-arg]
    fields.cumulative("x")  # type: ignore[call-arg]
    return [
        fields.row("x", (2,), "float32", default=1.0, residency="slots", layout="contiguous"),
        fields.ragged("tokens", 128),
        fields.per_draft("drafts", on_preempt="reset"),
        fields.host("processor", default=dict),
        fields.row_valued("parent", whole=True),
        fields.cumulative("starts", lambda order: order.scheduled),
        fields.packed("rows", (8,), rebuild=lambda order: order.row_of_token),
        fields.batch_global("eos"),
    ]


def make() -> InputBatch[Array]:
    batch = InputBatch(declare(), backend=NumpyBackend(), capacity=4, max_model_len=32)
    assert_type(batch, InputBatch[Array])
    InputBatch(declare(), backend=NumpyBackend(), capacity=4)  # type: ignore[call-arg]
    InputBatch(declare(), backend=NumpyBackend(), capacity=4, max_model_len=8, policy="x")  # type: ignore[arg-type]
    by_name: Backend[Any, Any] = make_backend("numpy")
    assert_type(by_name, Backend[Any, Any])
    return batch


def use_fields(batch: InputBatch[Array]) -> None:
    assert_type(batch["x"], Array)
    batch["x"] = [1.0, 2.0]
    as_mapping: Mapping[str, Array] = batch
    assert_type(as_mapping.get("x"), Array | None)
    assert_type(batch.read("a", "x"), object)
    batch.write("a", "x", 1.0)
    batch.append("a", "tokens", [1, 2])
    assert_type(batch.length("a", "tokens"), int)
    assert_type(batch.objects("processor"), list[object])
    assert_type(batch.addresses(), dict[str, int])
    assert_type(batch.memory_report(), list[FieldMemory])
    assert_type(batch.snapshot(), BatchSnapshot)


def use_requests(batch: InputBatch[Array]) -> None:
    assert_type(batch.add("a", prompt_len=3, fields={"x": [1, 2]}), int)
    batch.add("a", 3)  # type: ignore[call-arg]
    batch.preempt("a")
    assert_type(batch.resume("a", computed=1), int)
    assert_type(batch.req_ids, tuple[str, ...])
    assert_type(batch.rows, tuple[str | None, ...])
    batch.num_reqs = 3  # type: ignore[misc]


def use_order(batch: InputBatch[Array]) -> BatchOrder:
    plan = batch.plan({"a": 1})
    assert_type(plan, BatchPlan)
    order = batch.apply(plan)
    assert_type(order, BatchOrder)
    assert_type(order.regions, Regions)
    assert_type(order.slots, npt.NDArray[np.int64])
    assert_type(order.query_start, npt.NDArray[np.int32])
    assert_type(order.restore([1, 2], counts=[1, 1]), dict[str, object])
    order.step = 3  # type: ignore[misc]
    batch.advance(order, {"a": 1})
    return order


class Table:
    """What a user registers as a follower."""

    def follow(self, moves: RowMoves) -> None:
        assert_type(moves.sources, npt.NDArray[np.int64])


class NoTable:
    """Something that cannot follow."""


def register(batch: InputBatch[Array]) -> None:
    follower: Follower = Table()
    batch.register_follower(follower)
    batch.register_follower(SideTable(4))
    batch.register_follower(NoTable())  # type: ignore[arg-type]


def refusal(error: BatchFull) -> VlbatchError:
    assert_type(error.req_id, str | None)
    assert_type(error.setting, str | None)
    return error
