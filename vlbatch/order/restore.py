"""Outputs by row -> outputs by request, for every container that samplers return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from vlbatch.errors import InvalidField, StaleOrder


@runtime_checkable
class _Indexable(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: slice | int, /) -> object: ...


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
    lengths = np.asarray(counts, dtype=np.int64)
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
    has_no_axis = getattr(outputs, "ndim", 1) == 0
    if has_no_axis or not isinstance(outputs, _Indexable) or isinstance(outputs, str | bytes):
        raise InvalidField(
            f"{path} is a {type(outputs).__name__}{' without axes' if has_no_axis else ''};"
            " expected an array, a list, a mapping or a named tuple of these"
        )
    expected = num_reqs if bounds is None else bounds[-1]
    if len(outputs) != expected:
        raise StaleOrder(
            f"{path} has {len(outputs)} entries; this order has {num_reqs} rows with {expected}"
            " entries: it belongs to another step or batch"
        )
    if bounds is None:
        return [outputs[row] for row in range(num_reqs)]
    return [outputs[start:stop] for start, stop in pairwise(bounds)]
