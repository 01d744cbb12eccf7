"""Where each field lies: blocks, groups that move together, the arena."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Generic, TypeVar, cast

import numpy as np

from vlbatch.backends.base import Backend
from vlbatch.backends.dtypes import HostArray
from vlbatch.errors import InvalidField
from vlbatch.fields.spec import Field, FieldRegistry, Kind, Residency

S = TypeVar("S")

ARENA_ROW_LIMIT = 512
"""Bytes of one request's value above which ``layout="auto"`` keeps a field out of the arena."""

_ALIGNMENT = 64
"""Bytes; groups and lone fields start on a cache line."""


@dataclass(frozen=True, slots=True)
class Group(Generic[S]):
    """Per-request fields that are moved and cleared with one operation.

    Attributes:
        array: ``[requests, ...]`` or ``[fields, requests, ...]``.
        axis: the axis of requests, 0 or 1.
        default: value of an unused entry, broadcastable over that axis.
        residency: whether that axis counts rows (moved) or slots (not moved).
    """

    array: S
    axis: int
    default: HostArray
    residency: Residency


@dataclass(slots=True)
class StorageLayout(Generic[S]):
    """The outcome; ``groups`` cover every per-request array but the ragged ones."""

    arrays: dict[str, S] = field(default_factory=dict)
    flat: dict[str, S] = field(default_factory=dict)  # two axes as one: ragged, ``Field.flat``
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    groups: list[Group[S]] = field(default_factory=list)
    row_valued: list[tuple[S, np.dtype[Any]]] = field(default_factory=list)


def lay_out(
    registry: FieldRegistry, capacity: int, num_drafts: int, backend: Backend[S, object]
) -> StorageLayout[S]:
    """Allocate the arrays of all fields.

    Raises:
        InvalidField: an arena is asked for where stored arrays are not in host memory, or a
            row-valued field cannot hold the number of the last row.
    """
    out: StorageLayout[S] = StorageLayout()
    blocks: dict[str, list[Field]] = defaultdict(list)
    arena: list[Field] = []
    for f in registry.values():
        if f.kind is Kind.HOST:
            continue
        if f.kind is Kind.ROW_VALUED and np.iinfo(f.stored_dtype).max < capacity - 1:
            raise InvalidField(
                f"row-valued field {f.name!r} is {f.dtype}, too small for row {capacity - 1}",
                setting=f"dtype of {f.name!r}",
            )
        out.shapes[f.name] = _whole_shape(f, capacity, num_drafts)
        if _wants_arena(f, num_drafts, backend):
            arena.append(f)
        else:
            blocks[f.dtype].append(f)
    if arena:
        _add_arena(out, arena, capacity, num_drafts)
    for dtype, fields in blocks.items():
        _add_block(out, dtype, fields, num_drafts, backend)
    return out


def _whole_shape(f: Field, capacity: int, num_drafts: int) -> tuple[int, ...]:
    if f.kind is Kind.CUMULATIVE:
        return (capacity + 1, *f.shape)
    if f.kind in (Kind.PACKED, Kind.GLOBAL):
        return f.shape or (1,)
    if f.whole:
        return f.shape or (capacity,)
    return (capacity, *f.row_shape(num_drafts))


def _is_grouped(f: Field) -> bool:
    """Whether entries of the field are moved and cleared whole."""
    return f.is_per_request and f.kind is not Kind.RAGGED


def _wants_arena(f: Field, num_drafts: int, backend: Backend[S, object]) -> bool:
    if f.layout == "arena" and not backend.on_host:
        raise InvalidField(
            f"field {f.name!r} asks for the arena, but backend {backend.name!r} keeps its arrays"
            " on a device",
            setting="layout",
        )
    if not _is_grouped(f) or f.residency != "rows":
        return False
    small = f.row_elements(num_drafts) * f.stored_dtype.itemsize <= ARENA_ROW_LIMIT
    return f.layout == "arena" or (
        f.layout == "auto" and backend.preferred_layout == "arena" and small
    )


def _add_arena(out: StorageLayout[S], fields: list[Field], capacity: int, num_drafts: int) -> None:
    """Interleave the fields of one request, widest elements first so that all are aligned."""
    fields = sorted(fields, key=lambda f: -f.stored_dtype.itemsize)
    formats = [(f.stored_dtype, f.row_shape(num_drafts)) for f in fields]
    sizes = [np.dtype(item).itemsize for item in formats]
    record = np.dtype(
        {
            "names": [f.name for f in fields],
            "formats": formats,
            "offsets": [sum(sizes[:i]) for i in range(len(sizes))],
            "itemsize": -(-sum(sizes) // 8) * 8,
        }
    )
    records = np.zeros(capacity, dtype=record)
    default = np.zeros(1, dtype=record)
    for f in fields:
        default[f.name] = f.default_value
        out.arrays[f.name] = cast("S", records[f.name])
        if f.kind is Kind.ROW_VALUED:
            out.row_valued.append((out.arrays[f.name], f.stored_dtype))
    raw = np.dtype((np.void, record.itemsize))  # whole records move as bytes, not field by field
    out.groups.append(Group(cast("S", records.view(raw)), 0, default.view(raw), "rows"))


def _add_block(
    out: StorageLayout[S],
    dtype: str,
    fields: list[Field],
    num_drafts: int,
    backend: Backend[S, object],
) -> None:
    """Lay the fields of one dtype out in one block, fields that move alike side by side.

    Grouped fields of one residency with equally many elements a request lie unpadded next to
    each other, so that one view ``[fields, requests, elements]`` moves or clears them at once.
    """
    clusters: dict[object, list[Field]] = defaultdict(list)
    for f in fields:
        clusters[_alike(f, out.shapes[f.name], num_drafts)].append(f)
    unit = max(_ALIGNMENT // fields[0].stored_dtype.itemsize, 1)
    starts: list[int] = []
    size = 0
    for members in clusters.values():
        size = -(-size // unit) * unit
        starts.append(size)
        size += sum(prod(out.shapes[f.name]) for f in members)
    block = backend.allocate(size, dtype)
    for start, members in zip(starts, clusters.values(), strict=True):
        _place_cluster(out, block, start, members, num_drafts, backend)


def _alike(f: Field, shape: tuple[int, ...], num_drafts: int) -> object:
    """Key of the fields of a dtype that one operation serves."""
    if _is_grouped(f):
        return f.residency, f.row_elements(num_drafts)
    return shape if f.whole else f.name


def _place_cluster(
    out: StorageLayout[S],
    block: S,
    start: int,
    members: Sequence[Field],
    num_drafts: int,
    backend: Backend[S, object],
) -> None:
    first = members[0]
    shape = out.shapes[first.name]
    size = prod(shape)
    for i, f in enumerate(members):
        out.arrays[f.name] = backend.view(block, start + i * size, out.shapes[f.name])
        if f.flat:
            num_reqs, num_each, *entry = out.shapes[f.name]
            merged = (num_reqs * num_each, *entry)
            out.flat[f.name] = backend.view(block, start + i * size, merged)
    if first.kind is Kind.RAGGED:
        out.flat[first.name] = backend.view(block, start, (size,))
    elif _is_grouped(first):
        elements = first.row_elements(num_drafts)
        view = backend.view(block, start, (len(members), shape[0], elements))
        defaults = np.array([f.default_value for f in members]).reshape(-1, 1, 1)
        out.groups.append(Group(view, 1, defaults, first.residency))
        out.row_valued += [
            (out.arrays[f.name], f.stored_dtype) for f in members if f.kind is Kind.ROW_VALUED
        ]
    elif first.whole:
        view = backend.view(block, start, (len(members) * size,))
        out.row_valued.append((view, first.stored_dtype))
