"""Fields that follow from the order of a step: running sums of lengths, token-level buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from vlbatch.backends.base import Backend
from vlbatch.backends.dtypes import HostArray, convert
from vlbatch.errors import InvalidField
from vlbatch.fields.spec import Field, Kind, Rebuild
from vlbatch.order.batch_order import BatchOrder
from vlbatch.order.moves import IntArray

S = TypeVar("S")


@dataclass(slots=True)
class _Derived(Generic[S]):
    """One field.

    Attributes:
        field: its declaration.
        rebuild: of the declaration.
        array: where its values go.
        entry: shape of one entry.
        given: shape of one entry of what ``rebuild`` returns.
        most: entries that ``rebuild`` may return.
        is_sum: whether they are lengths, to be summed.
        label: names it in a refusal.
        used: entries that the array holds before its pads.
    """

    field: Field
    rebuild: Rebuild
    array: S
    entry: tuple[int, ...]
    given: tuple[int, ...]
    most: int
    is_sum: bool
    label: str
    used: int = 0


class DerivedFields(Generic[S]):
    """Computes them before rows move, and writes them after.

    Args:
        fields: of these, those with a ``rebuild``.
        arrays: name -> array, of its whole shape.
        shapes: name -> whole shape.
        backend: of the arrays.
    """

    def __init__(
        self,
        fields: Iterable[Field],
        arrays: Mapping[str, S],
        shapes: Mapping[str, tuple[int, ...]],
        # Any: what users are shown does not matter here
        backend: Backend[S, Any],
    ) -> None:
        self._backend = backend
        self._all: list[_Derived[S]] = []
        for f in fields:
            if f.rebuild is not None:
                is_sum = f.kind is Kind.CUMULATIVE
                num, *entry = shapes[f.name]
                self._all.append(
                    _Derived(
                        field=f,
                        rebuild=f.rebuild,
                        array=arrays[f.name],
                        entry=tuple(entry),
                        given=() if is_sum else tuple(entry),
                        most=num - is_sum,
                        is_sum=is_sum,
                        label=f"rebuild of field {f.name!r}",
                    )
                )
        self._scheduled: IntArray | None = None  # of the latest step: an order's, so immutable
        self._sums: dict[tuple[int, str], HostArray] = {}  # of it

    def derive(self, order: BatchOrder) -> list[HostArray]:
        """Compute the values of a step, once a ``rebuild``; changes no array.

        Raises:
            InvalidField: a ``rebuild`` returned more values than its field holds, or entries of
                another shape.
        """
        if order.scheduled is not self._scheduled:
            self._scheduled, self._sums = order.scheduled, {}
        given: dict[int, HostArray] = {}  # by id of the rebuild
        sums: dict[tuple[int, str], HostArray] = {}
        fresh = []
        for each in self._all:
            source = id(each.rebuild)
            values = given.get(source)
            if values is None:
                values = given[source] = np.asarray(each.rebuild(order))
            if not values.ndim or values.shape[1:] != each.given or len(values) > each.most:
                self._refuse(each, values)
            if not each.is_sum:
                packed = convert(values, each.field.dtype, what=each.label)
                is_theirs = packed is values and values.flags.writeable  # and may be used again
                fresh.append(packed.copy() if is_theirs else packed)
                continue
            is_kept = values is order.scheduled
            known = self._sums if is_kept else sums
            key = 0 if is_kept else source, each.field.dtype
            if key not in known:
                known[key] = self._sum(each, values)
            found = known[key]
            fresh.append(found.reshape(-1, *each.entry) if each.entry else found)
        return fresh

    def write(self, values: Sequence[HostArray]) -> None:
        """Write what ``derive`` computed, and the pads behind it up to where values were."""
        for each, fresh in zip(self._all, values, strict=True):
            self._put(each, fresh)

    def _put(self, each: _Derived[S], fresh: HostArray) -> None:
        self._backend.write(each.array, 0, fresh)
        used, each.used = each.used, len(fresh)
        if used > len(fresh):
            pads = np.full((used - len(fresh), *each.entry), each.field.default_value)
            self._backend.write(each.array, len(fresh), pads)

    def overwrite(self, name: str, values: HostArray) -> None:
        """Write another step's values of one field, and the pads behind them.

        Raises:
            InvalidField: they do not fit.
        """
        for each in self._all:
            if each.field.name == name:
                self._put(each, convert(values, each.field.dtype, what=each.label))

    def forget(self, name: str) -> None:
        """Say that a whole field was written by hand: the next step pads it up to its end."""
        for each in self._all:
            if each.field.name == name:
                each.used = each.most + each.is_sum

    def reset(self) -> None:
        """Say that every array holds its default."""
        for each in self._all:
            each.used = 0

    def _sum(self, each: _Derived[S], values: HostArray) -> HostArray:
        """Sums before each row, then the total in every entry past the last row."""
        lengths = convert(values, "int64", what=each.label)
        num = len(lengths)
        whole = np.zeros(each.most + 1, dtype=each.field.stored_dtype)
        if num:
            sums = np.add.accumulate(lengths)
            whole[1 : num + 1] = sums
            whole[num + 1 :] = whole[num]
            if whole[-1] != sums[-1] or whole.itemsize < 4:
                convert(sums, each.field.dtype, what=f"sums of field {each.field.name!r}")
        return whole

    def _refuse(self, each: _Derived[S], values: HostArray) -> None:
        if not values.ndim or values.shape[1:] != each.given:
            raise InvalidField(
                f"{each.label} got shape {values.shape}; expected {('n', *each.given)}"
            )
        raise InvalidField(
            f"{each.label} got {len(values)} entries; it holds {each.most}",
            setting=f"shape of {each.field.name!r}",
        )
