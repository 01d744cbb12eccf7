"""Fields of every kind, values that tell whose they are, and a batch that checks them all."""

from __future__ import annotations

import zlib
from functools import cache
from itertools import product
from math import prod
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
from exposed import to_host

from vlbatch import Backend, BatchOrder, InputBatch
from vlbatch.backends.base import Layout
from vlbatch.fields import (
    Field,
    Kind,
    batch_global,
    cumulative,
    host,
    packed,
    per_draft,
    ragged,
    row,
    row_valued,
)
from vlbatch.fields.spec import Residency

DTYPES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bfloat16"
)  # fmt: skip
SIGNED = ("int8", "int16", "int32", "int64")
RESIDENCIES: tuple[Residency, ...] = get_args(Residency)

NUM_DRAFTS = 2
RAGGED_WIDTH = 37
MAX_STEP_TOKENS = 64


def every_field(*, arena: bool) -> list[Field]:
    """Declare every kind in every residency, layout and dtype that it can have.

    Args:
        arena: whether the backend has an arena.

    """
    layouts: tuple[Layout, ...] = get_args(Layout)
    layouts = layouts if arena else ("auto", "contiguous")
    fields: list[Field] = []
    for dtype in DTYPES:
        for residency, layout in product(RESIDENCIES, layouts):
            where = f"{dtype}_{residency}_{layout}"
            fields += [
                row(f"row_{where}", (), dtype, residency=residency, layout=layout, default=1),
                row(f"row2d_{where}", (2, 3), dtype, residency=residency, layout=layout),
                per_draft(f"draft_{where}", (2,), dtype, residency=residency, layout=layout),
            ]
        fields += [
            ragged(f"ragged_{dtype}_{r}", RAGGED_WIDTH, dtype, residency=r, default=1)
            for r in RESIDENCIES
        ]
        fields += [
            packed(f"packed2d_{dtype}", (MAX_STEP_TOKENS, 3), dtype),
            packed(f"packed_{dtype}", (MAX_STEP_TOKENS,), dtype, default=1, rebuild=_row_parity),
            batch_global(f"global_{dtype}", (5,), dtype, default=1),
        ]
    for dtype, layout in product(SIGNED, layouts):
        fields.append(row_valued(f"rows_{dtype}_{layout}", (2,), dtype, layout=layout))
    fields += [row_valued(f"whole_{dtype}", (4,), dtype, whole=True) for dtype in SIGNED]
    fields += [
        cumulative(f"sums_{dtype}", lambda order: order.scheduled, dtype) for dtype in SIGNED
    ]
    fields += [host(f"host_{residency}", residency=residency) for residency in RESIDENCIES]
    return fields


def _row_parity(order: Any) -> list[int]:
    return [row % 2 for row, n in enumerate(order.scheduled.tolist()) for _ in range(n)]


def tagged(field: Field, tag: int) -> Any:
    """A value of one request for a field, in plain Python, that depends on field and tag."""
    if field.kind is Kind.HOST:
        return (field.name, tag)
    shape: tuple[int, ...] = field.shape
    if field.kind is Kind.PER_DRAFT:
        shape = (NUM_DRAFTS + 1, *shape)
    if field.kind is Kind.RAGGED:
        shape = ((11 * tag + len(field.name)) % (RAGGED_WIDTH + 1),)
    first = zlib.crc32(field.name.encode()) + 37 * tag
    numbers = (first + 3 * np.arange(prod(shape))) % 113
    if field.dtype == "bool":
        numbers = numbers % 2 == 1
    return numbers.reshape(shape).tolist()


@cache
def tagged_array(field: Field, tag: int) -> npt.NDArray[Any]:
    """What a host copy of the storage must hold for ``tagged(field, tag)``."""
    return stored(field, tagged(field, tag))


def stored(field: Field, value: Any) -> npt.NDArray[Any]:
    """What a host copy of the storage must hold for a plain value."""
    if field.dtype == "bfloat16":  # exact for the small integers used here
        return (np.array(value, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.array(value, dtype=field.dtype)


class TaggedBatch:
    """A batch with every field, whose requests hold tagged values; it knows what must hold.

    Args:
        backend: where arrays live.
        arena: whether fields are put there; by default, if the backend has one.

    Attributes:
        batch: the batch under test.
        tags: req_id -> tag of its values.
        handles: the user's arrays, taken before anything happened.

    """

    def __init__(self, backend: Backend[Any, Any], *, arena: bool | None = None) -> None:
        self.batch: InputBatch[Any] = InputBatch(
            every_field(arena=backend.on_host if arena is None else arena),
            backend=backend,
            capacity=6,
            max_model_len=512,
            num_drafts=NUM_DRAFTS,
        )
        self.tags: dict[str, int] = {}
        self.handles = {name: self.batch[name] for name in self.batch}
        self._addresses = self.batch.addresses()
        self._num_tags = 0

    def names(self, *kinds: Kind) -> list[str]:
        """Declared fields of these kinds."""
        return [n for n, f in self.batch.registry.items() if f.kind in kinds]

    def per_request(self) -> list[Field]:
        """Per-request fields that hold tagged values."""
        return [
            f
            for f in self.batch.registry.values()
            if f.is_per_request and f.kind is not Kind.ROW_VALUED
        ]

    def add(self, req_id: str, prompt_len: int = 8) -> None:
        """Admit a request with a new tag."""
        tag = self._num_tags
        values = {f.name: tagged(f, tag) for f in self.per_request()}
        self.batch.add(req_id, prompt_len=prompt_len, fields=values)
        self.tags[req_id] = tag
        self._num_tags += 1

    def remove(self, req_id: str) -> None:
        """Let a request go."""
        self.batch.remove(req_id)
        del self.tags[req_id]

    def step(self, **scheduled: int) -> BatchOrder:
        """Plan, apply and count a step."""
        order = self.batch.apply(self.batch.plan(scheduled))
        self.batch.advance(order)
        return order

    def assert_all_hold(self) -> None:
        """Every request finds its values, by request and in the handles taken at the start."""
        self.batch.check()
        assert self.batch.addresses() == self._addresses
        whole = {name: to_host(handle) for name, handle in self.handles.items()}
        for req_id, tag in self.tags.items():
            index = {"rows": self.batch.row_of(req_id), "slots": self.batch.slot_of(req_id)}
            for field in self.per_request():
                got = self.batch.read(req_id, field.name)
                at = index[field.residency]
                if field.kind is Kind.HOST:
                    assert got == tagged(field, tag), (req_id, field.name)
                    assert self.batch.objects(field.name)[at] is got
                    continue
                expected = tagged_array(field, tag)
                assert_same(got, expected, req_id, field)
                if field.kind is Kind.RAGGED:
                    pad = np.full(field.shape[0] - len(expected), stored(field, field.default))
                    expected = np.append(expected, pad)
                assert_same(whole[field.name][at], expected, req_id, field)


def assert_same(got: Any, expected: Any, req_id: str, field: Field) -> None:
    """The values are equal; else show them, with field and request."""
    if not np.array_equal(got, expected):
        np.testing.assert_array_equal(got, expected, err_msg=f"{field.name} of {req_id}")
