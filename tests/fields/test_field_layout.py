"""Where fields lie: one block a dtype, what moves alike side by side, small ones in the arena."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from vlbatch import NumpyBackend
from vlbatch.backends.base import Layout
from vlbatch.errors import InvalidField
from vlbatch.fields import (
    Field,
    FieldRegistry,
    batch_global,
    cumulative,
    per_draft,
    ragged,
    row,
    row_valued,
)
from vlbatch.fields.layout import ARENA_ROW_LIMIT, StorageLayout, lay_out
from vlbatch.fields.spec import Residency

Array = npt.NDArray[Any]


class BlockBackend(NumpyBackend):
    """numpy without an arena, counting what it allocates."""

    name = "block"
    preferred_layout: Layout = "contiguous"

    def __init__(self) -> None:
        self.blocks: list[Array] = []

    def allocate(self, num_elements: int, dtype: str) -> Array:
        self.blocks.append(super().allocate(num_elements, dtype))
        return self.blocks[-1]


class DeviceBackend(BlockBackend):
    """A backend whose arrays are not in host memory."""

    name = "device"
    on_host = False


def layout_of(*fields: Field, backend: NumpyBackend | None = None) -> StorageLayout[Array]:
    return lay_out(FieldRegistry(fields), 5, 2, backend or BlockBackend())


def start(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def assert_apart(spans: Iterable[tuple[int, int]]) -> None:
    """No two of these half-open byte ranges overlap."""
    for (_, stop), (following, _) in pairwise(sorted(spans)):
        assert stop <= following


def test_one_block_a_dtype() -> None:
    """All fields of a dtype, of whatever kind, are in one allocation."""
    backend = BlockBackend()
    fields = [
        row("a", (2,), "int32"), row("b", (), "float32"), ragged("c", 7, "int32"),
        per_draft("d", (), "float32"), row_valued("e", (), "int32"),
        cumulative("f", lambda o: o.scheduled), batch_global("g", (3,), "float32"),
    ]  # fmt: skip
    arrays = layout_of(*fields, backend=backend).arrays

    assert sorted(str(b.dtype) for b in backend.blocks) == ["float32", "int32"]
    for field in fields:
        assert sum(np.shares_memory(arrays[field.name], block) for block in backend.blocks) == 1


def test_shapes() -> None:
    """Each kind has its extent: capacity rows, one more for sums, its own for whole fields."""
    arrays = layout_of(
        row("a", (2, 3)), ragged("b", 7), per_draft("c", (4,)), row_valued("d"),
        row_valued("e", (3,), whole=True), row_valued("f", whole=True),
        cumulative("g", lambda o: o.scheduled), batch_global("h"), batch_global("i", ()),
    ).arrays  # fmt: skip

    assert {name: array.shape for name, array in arrays.items()} == {
        "a": (5, 2, 3), "b": (5, 7), "c": (5, 3, 4), "d": (5,), "e": (3,), "f": (5,), "g": (6,),
        "h": (1,), "i": (1,),
    }  # fmt: skip


def test_contiguous_fields_are_contiguous_and_apart() -> None:
    """A field outside the arena is dense, aligned to its element, and overlaps no other."""
    places: list[tuple[int, Residency]] = [(1, "rows"), (3, "slots"), (5, "rows")]
    arrays = layout_of(*(
        row(f"{dtype}_{size}", (size,), dtype, residency=residency)
        for dtype in ("bool", "int16", "int32", "float64", "bfloat16")
        for size, residency in places
    )).arrays  # fmt: skip

    for array in arrays.values():
        assert array.flags.c_contiguous
        assert array.flags.aligned
    assert_apart((start(a), start(a) + a.nbytes) for a in arrays.values())


def test_groups_start_on_a_cache_line() -> None:
    """What does not move together does not share a line of 64 bytes."""
    backend = BlockBackend()
    arrays = layout_of(
        row("a", (), "int16"), row("b", (), "int16", residency="slots"), row("c", (3,), "int16"),
        ragged("d", 7, "int16"), batch_global("e", (3,), "int16"), backend=backend,
    ).arrays  # fmt: skip
    (block,) = backend.blocks

    assert [(start(a) - start(block)) % 64 for a in arrays.values()] == [0] * 5


def test_what_moves_alike_moves_at_once() -> None:
    """One group a dtype, residency and number of elements: a reorder is one gather for each."""
    layout = layout_of(
        row("a", (6,), "int32"), per_draft("b", (2,), "int32"), row("c", (2, 3), "int32"),
        row("d", (), "int32"), row_valued("e", (), "int32"),
        row("f", (6,), "int32", residency="slots"), row("g", (6,), "float32"),
        ragged("h", 6, "int32"), batch_global("i", (6,), "int32"),
    )  # fmt: skip
    groups = sorted((g.residency, str(g.array.dtype), g.array.shape) for g in layout.groups)

    assert groups == [
        ("rows", "float32", (1, 5, 6)),
        ("rows", "int32", (2, 5, 1)),
        ("rows", "int32", (3, 5, 6)),
        ("slots", "int32", (1, 5, 6)),
    ]
    assert all(g.axis == 1 for g in layout.groups)


def test_groups_show_their_fields() -> None:
    """Entry f, i of a group is what request i has in field f, and each field has its default."""
    layout = layout_of(row("a", (2,), default=3), row("b", (2,), default=5))
    (group,) = layout.groups
    layout.arrays["a"][:] = np.arange(10).reshape(5, 2)
    layout.arrays["b"][:] = np.arange(10, 20).reshape(5, 2)

    assert group.array[0].tolist() == layout.arrays["a"].tolist()
    assert group.array[1].tolist() == layout.arrays["b"].tolist()
    assert np.broadcast_to(group.default, (2, 1, 2)).tolist() == [[[3, 3]], [[5, 5]]]


def test_ragged_fields_have_a_flat_view() -> None:
    """A ragged field is also one axis over the same bytes."""
    layout = layout_of(ragged("a", 4, residency="rows"))
    layout.arrays["a"][2, 1] = 9

    assert layout.flat["a"].shape == (20,)
    assert layout.flat["a"][9] == 9
    assert layout.groups == []


def test_arena_holds_small_rows() -> None:
    """With ``auto`` small row-resident fields are in the arena, wide and slot ones are not."""
    limit = ARENA_ROW_LIMIT // 8
    layout = layout_of(
        row("a", (), "bool"), row("b", (limit,), "int64"), row("c", (limit + 1,), "int64"),
        row("d", (), "int64", residency="slots"), row("e", (), layout="contiguous"),
        per_draft("f", (), "int16"), row_valued("g"), ragged("h", 3), batch_global("i"),
        backend=NumpyBackend(),
    )  # fmt: skip
    stride = layout.arrays["a"].strides[0]
    in_arena = {name for name, array in layout.arrays.items() if array.strides[0] == stride}

    assert in_arena == {"a", "b", "f", "g"}
    assert stride == math.ceil((ARENA_ROW_LIMIT + 4 + 3 * 2 + 1) / 8) * 8


def test_arena_fields_are_aligned_and_apart() -> None:
    """Every field of an arena row is aligned to its element, and no two share a byte."""
    fields = [
        row("a", (3,), "bool"), row("b", (), "int64"), row("c", (5,), "int16"),
        row("d", (), "float32"), row("e", (2,), "bfloat16"), row("f", (), "int8"),
    ]  # fmt: skip
    arrays = layout_of(*fields, backend=NumpyBackend()).arrays
    spans = sorted((start(a), start(a) + a[0].nbytes) for a in arrays.values())

    assert all(array.flags.aligned for array in arrays.values())
    assert_apart(spans)
    assert spans[-1][1] - spans[0][0] <= arrays["a"].strides[0]


def test_arena_is_one_group() -> None:
    """All fields of the arena move and clear at once, with their defaults."""
    layout = layout_of(
        row("a", (2,), "float32", default=0.5),
        row("b", (), "int8", default=-1),
        backend=NumpyBackend(),
    )
    (group,) = layout.groups
    group.array[3:4] = group.default

    assert group.axis == 0
    assert layout.arrays["a"].tolist()[3] == [0.5, 0.5]
    assert layout.arrays["b"].tolist() == [0, 0, 0, -1, 0]


def test_arena_of_a_device_is_refused() -> None:
    """Without host memory there is no arena: asking for it is refused, ``auto`` is not."""
    with pytest.raises(
        InvalidField, match="'a' asks for the arena, but backend 'device'"
    ) as caught:
        layout_of(row("a", layout="arena"), backend=DeviceBackend())

    assert caught.value.setting == "layout"
    assert layout_of(row("a"), backend=DeviceBackend()).arrays["a"].flags.c_contiguous


def test_row_numbers_must_fit() -> None:
    """A row-valued field must be able to name the last row."""
    field = row_valued("a", (), "int8")
    lay_out(FieldRegistry([field]), 128, 0, BlockBackend())
    with pytest.raises(InvalidField, match="'a' is int8, too small for row 128") as caught:
        lay_out(FieldRegistry([field]), 129, 0, BlockBackend())

    assert caught.value.setting == "dtype of 'a'"
