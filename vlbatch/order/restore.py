"""Outputs by row -> outputs by request, for every container that samplers return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from vlbatch.backends.arrays import array_like, host_values
from vlbatch.errors import InvalidField, StaleOrder


@runtime_checkable
class _Indexable(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: slice | int, /) -> object: ...


class _Array(Protocol):
    """What numpy arrays and Paddle and torch tensors have in common."""

    def __getitem__(self, index: list[int], /) -> _Array: ...

    def __setitem__(self, index: int, value: object, /) -> None: ...


@runtime_checkable
class _NamedTuple(Protocol):
    def _asdict(self) -> dict[str, object]: ...

    def _replace(self, **members: object) -> _NamedTuple: ...


def restore_outputs(
    outputs: object, num_reqs: int, counts: Sequence[int] | npt.NDArray[np.int64] | None
) -> list[object]:
    """Split outputs by row; see ``BatchOrder.restore``. Returns one entry a row."""
    bounds = None if counts is None else _bounds(counts, num_reqs)
    return _split(outputs, num_reqs, bounds, "outputs")


def _bounds(counts: Sequence[int] | npt.NDArray[np.int64], num_reqs: int) -> list[int]:
    if len(counts) != num_reqs:
        raise StaleOrder(f"counts has {len(counts)} entries; the order has {num_reqs} rows")
    lengths = host_values(counts).astype(np.int64)
    if lengths.size and lengths.min() < 0:
        raise InvalidField(f"counts has a negative entry: {lengths.tolist()}")
    return [0, *np.cumsum(lengths).tolist()]


def _split(outputs: object, num_reqs: int, bounds: list[int] | None, path: str) -> list[object]:
    if outputs is None:
        return [None] * num_reqs
    if isinstance(outputs, Mapping):
        members = {k: _split(v, num_reqs, bounds, f"{path}[{k!r}]") for k, v in outputs.items()}
        return [{k: parts[row] for k, parts in members.items()} for row in range(num_reqs)]
    if isinstance(outputs, _NamedTuple):
        fields = outputs._asdict()
        parts = {k: _split(v, num_reqs, bounds, f"{path}.{k}") for k, v in fields.items()}
        return [outputs._replace(**{k: parts[k][row] for k in parts}) for row in range(num_reqs)]
    leaf = _leaf(outputs, num_reqs if bounds is None else bounds[-1], path)
    if bounds is None:
        return [leaf[row] for row in range(num_reqs)]
    return [leaf[start:stop] for start, stop in pairwise(bounds)]


def _leaf(outputs: object, expected: int, path: str) -> _Indexable:
    has_no_axis = getattr(outputs, "ndim", 1) == 0
    if has_no_axis or not isinstance(outputs, _Indexable) or isinstance(outputs, str | bytes):
        raise InvalidField(
            f"{path} is a {type(outputs).__name__}{' without axes' if has_no_axis else ''};"
            " expected an array, a list, a mapping or a named tuple of these"
        )
    if len(outputs) != expected:
        raise StaleOrder(
            f"{path} has {len(outputs)} entries; the rows of this order have {expected}: it"
            " belongs to another step or batch"
        )
    return outputs


def outputs_by_slot(
    outputs: object,
    slots: Sequence[int],
    num_slots: int,
    *,
    counts: Sequence[int] | npt.NDArray[np.int64] | None = None,
) -> object:
    """Outputs by row -> outputs by slot, for engines that read them so.

    Args:
        outputs: as for ``BatchOrder.restore``.
        slots: row -> slot, each once, ``0 <= slot < num_slots``.
        num_slots: entries of the result.
        counts: row -> entries of a leaf; without it a leaf has one entry a row.

    Returns:
        The containers of ``outputs`` with new leaves. Without ``counts`` entry ``j`` is that of
        slot ``j``; slots that no row has get -1, NaN, ``False`` or ``None``. With ``counts`` the
        entries of all slots follow each other by slot, and such slots have none. A leaf without
        entries stays as it is.

    Raises:
        StaleOrder: a leaf has another number of entries than there are rows.
        InvalidField: slots out of range or given twice; a leaf has no length.
    """
    slots = _checked(slots, num_slots)
    bounds = None if counts is None else _bounds(counts, len(slots))
    row_of_slot = {slot: row for row, slot in enumerate(slots)}
    if bounds is not None:
        entries = [range(bounds[row], bounds[row + 1]) for _, row in sorted(row_of_slot.items())]
        index: list[int | None] = [entry for group in entries for entry in group]
        return _take(outputs, index, bounds[-1], "outputs")
    return _take(outputs, [row_of_slot.get(s) for s in range(num_slots)], len(slots), "outputs")


def sums_by_slot(sums: object, slots: Sequence[int], num_slots: int) -> object:
    """Running sums over rows -> running sums over slots.

    Args:
        sums: ``[num_rows + 1]``, an array or tensor; entry ``r`` is the sum before row ``r``.
        slots: row -> slot, as for ``outputs_by_slot``.
        num_slots: slots of the result.

    Returns:
        ``[num_slots + 1]``, new, of the same library; slots that no row has add nothing.

    Raises:
        StaleOrder: another number of entries than rows and one.
        InvalidField: slots out of range or given twice.
    """
    slots = _checked(slots, num_slots)
    leaf = _leaf(sums, len(slots) + 1, "sums")
    starts = host_values(leaf)
    if starts.size != len(starts):
        raise InvalidField(f"sums have shape {starts.shape}; expected one number an entry")
    lengths = np.zeros(num_slots, dtype=np.int64)
    lengths[np.asarray(slots, dtype=np.int64)] = np.diff(starts.reshape(-1))
    totals = np.concatenate(([0], np.cumsum(lengths)))
    shape = getattr(leaf, "shape", (len(leaf),))
    return array_like(leaf, totals.reshape(-1, *shape[1:]))


def _checked(slots: Sequence[int], num_slots: int) -> list[int]:
    found = host_values(slots)
    numbers: list[int] = found.tolist()
    if len(numbers) and found.dtype.kind not in "iu":
        raise InvalidField(f"got slots {numbers}; expected integers")
    if len(set(numbers)) != len(numbers) or not all(0 <= slot < num_slots for slot in numbers):
        raise InvalidField(f"got slots {numbers}; expected each once, in 0..{num_slots - 1}")
    return numbers


def _take(outputs: object, index: Sequence[int | None], expected: int, path: str) -> object:
    """Leaves with the entries of ``index``, ``None`` for one that there is not."""
    if outputs is None:
        return None
    if isinstance(outputs, Mapping):
        return {k: _take(v, index, expected, f"{path}[{k!r}]") for k, v in outputs.items()}
    if isinstance(outputs, _NamedTuple):
        members = outputs._asdict().items()
        taken = {k: _take(v, index, expected, f"{path}.{k}") for k, v in members}
        return outputs._replace(**taken)
    leaf = _leaf(outputs, expected, path)
    if isinstance(leaf, list | tuple):
        return type(leaf)(None if i is None else leaf[i] for i in index)
    if not expected:
        return leaf
    array = cast("_Array", leaf)[[0 if i is None else i for i in index]]
    absent = _absent(array)
    for at, entry in enumerate(index):
        if entry is None:
            array[at] = absent
    return array


def _absent(array: object) -> float | int | None:
    """What stands for no value in an array or tensor of its dtype."""
    dtype = str(getattr(array, "dtype", "")).rsplit(".", maxsplit=1)[-1]
    if dtype.startswith(("float", "bfloat", "complex")):
        return float("nan")
    if dtype == "object":
        return None
    return -1 if dtype.startswith("int") else 0
