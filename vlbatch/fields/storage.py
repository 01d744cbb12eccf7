"""The arrays behind the declared fields, and everything that is done to all of them at once.

Rules
- One block a dtype (or one arena for small host fields); an address never changes.
- All per-request work is derived from the declarations: nothing here knows a field by name.
- A ragged row holds the default past its length.
- Rows without a request hold defaults and no object reference. Slots without one may hold stale
  values until they are taken again, but no object reference.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from math import prod
from typing import Generic, TypeVar, cast

import numpy as np

from vlbatch.backends.base import Backend
from vlbatch.backends.dtypes import HostArray, convert
from vlbatch.backends.mover import RaggedRows, RowArrays
from vlbatch.errors import InvalidField, InvariantBroken
from vlbatch.fields.derived import DerivedFields
from vlbatch.fields.layout import lay_out
from vlbatch.fields.spec import Field, FieldRegistry, Kind
from vlbatch.order.moves import IntArray, RowMoves, move_list

S = TypeVar("S")
E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class FieldMemory:
    """One line of a memory report. ``bytes_per_request`` is 0 for what is not per request."""

    name: str
    kind: str
    residency: str
    bytes_per_request: int
    bytes_total: int


class FieldStorage(Generic[S, E]):
    """Arrays of one batch: ``arrays`` are the user's handles, name -> array.

    ``derived`` computes and writes the fields that follow from the order of a step.

    *Index* below means the row of a row-resident field and the slot of a slot-resident one.

    Args:
        registry: the declared fields.
        capacity: rows, and slots.
        num_drafts: k; per-draft fields hold ``k + 1`` rows a request.
        backend: where the arrays live.
    """

    def __init__(
        self, registry: FieldRegistry, capacity: int, num_drafts: int, backend: Backend[S, E]
    ) -> None:
        self.registry = registry
        self.capacity = capacity
        self.num_drafts = num_drafts
        self._backend = backend
        self._layout = lay_out(registry, capacity, num_drafts, backend)
        self._stored = self._layout.arrays
        self.arrays: dict[str, E] = {
            name: backend.expose(
                self._layout.flat[name] if registry[name].flat else array, registry[name].dtype
            )
            for name, array in self._stored.items()
        }
        self.objects: dict[str, list[object]] = {
            f.name: [None] * capacity for f in registry.values() if f.kind is Kind.HOST
        }
        self.lengths: dict[str, IntArray] = {
            f.name: np.zeros(capacity, dtype=np.int64)
            for f in registry.values()
            if f.kind is Kind.RAGGED
        }
        self._row_objects = [n for n in self.objects if registry[n].residency == "rows"]
        self._slot_objects = [n for n in self.objects if registry[n].residency == "slots"]
        self.derived = DerivedFields(registry.values(), self._stored, self._layout.shapes, backend)
        self._mover = backend.mover(self.row_arrays())
        self._addresses = self.addresses()
        self.reset()

    def row_arrays(self) -> RowArrays[S]:
        """Everything that is indexed by row: what a mover of these arrays moves."""
        fields = self.registry.values()
        return RowArrays(
            capacity=self.capacity,
            groups=[g for g in self._layout.groups if g.residency == "rows"],
            ragged=[
                RaggedRows(
                    self._stored[f.name],
                    self._layout.flat[f.name],
                    f.shape[0],
                    self.lengths[f.name],
                    f.default_value,
                )
                for f in fields
                if f.kind is Kind.RAGGED and f.residency == "rows"
            ],
            row_valued=self._layout.row_valued,
        )

    # -- one request -------------------------------------------------------------------------
    def convert_values(self, values: Mapping[str, object], req_id: str) -> dict[str, object]:
        """Check values for one request against the declarations; changes nothing.

        Raises:
            UnknownField: a name is not declared.
            InvalidField: a value has the wrong dtype, shape or length, or its field is not per
                request.
        """
        return {
            name: self.convert_value(self.registry.find(name, req_id), value, req_id)
            for name, value in values.items()
        }

    def convert_value(self, field: Field, value: object, req_id: str) -> object:
        """Check one value; see ``convert_values``. Returns an array, or the object itself."""
        if not field.is_per_request:
            raise InvalidField(
                f"field {field.name!r} is {field.kind.value}, not per request", req_id=req_id
            )
        if field.kind is Kind.HOST:
            return value
        array = convert(value, field.dtype, what=f"field {field.name!r}", req_id=req_id)
        if field.kind is Kind.RAGGED:
            if array.ndim != 1 or len(array) > field.shape[0]:
                raise InvalidField(
                    f"ragged field {field.name!r} got shape {array.shape}; expected one axis of"
                    f" at most {field.shape[0]}",
                    req_id=req_id,
                    setting=f"width of {field.name!r}",
                )
            return array
        shape = field.row_shape(self.num_drafts)
        if array.shape not in (shape, ()):
            raise InvalidField(
                f"field {field.name!r} got shape {array.shape}; expected {shape}", req_id=req_id
            )
        return np.broadcast_to(array, shape)

    def fresh_objects(self, given: Container[str]) -> dict[str, object]:
        """Make the default objects of a new request, for the host fields not ``given``."""
        return {
            name: field.default() if callable(field.default) else field.default
            for name, field in self.registry.items()
            if field.kind is Kind.HOST and name not in given
        }

    def initialise(self, row: int, slot: int, values: Mapping[str, object]) -> None:
        """Give a new request its values, and the default where none is given.

        Args:
            row: index of its row-resident fields.
            slot: index of its slot-resident fields.
            values: from ``convert_values``, and from ``fresh_objects`` for the rest.
        """
        index = {"rows": row, "slots": slot}
        for group in self._layout.groups:
            i = index[group.residency]
            self._backend.clear(group.array, group.axis, i, i + 1, group.default)
        for name in self.lengths:
            self._set_length(name, index[self.registry[name].residency], 0)
        for name, value in values.items():
            self.write(name, index[self.registry[name].residency], value)

    def write(self, name: str, index: int, value: object) -> None:
        """Write one request's checked value; a ragged one sets its length."""
        field = self.registry[name]
        if field.kind is Kind.HOST:
            self.objects[name][index] = value
            return
        values = cast("HostArray", value)
        if field.kind is Kind.RAGGED:
            self._write_ragged(name, index, 0, values)
            self._set_length(name, index, len(values))
        else:
            self._backend.write(self._stored[name], index, values[np.newaxis])

    def append(self, name: str, index: int, values: HostArray, req_id: str) -> None:
        """Write values behind the valid prefix of a ragged row and extend it.

        Raises:
            InvalidField: they do not fit the declared width.
        """
        start = int(self.lengths[name][index])
        self._check_length(name, start + len(values), req_id)
        self._write_ragged(name, index, start, values)
        self.lengths[name][index] = start + len(values)

    def set_length(self, name: str, index: int, length: int, req_id: str) -> None:
        """Say how much of a ragged row is valid: after a kernel wrote it, or to shorten it.

        Raises:
            InvalidField: longer than the width.
        """
        self._check_length(name, length, req_id)
        self._set_length(name, index, length)

    def _check_length(self, name: str, length: int, req_id: str) -> None:
        width = self.registry[name].shape[0]
        if not 0 <= length <= width:
            raise InvalidField(
                f"ragged field {name!r} would hold {length} values; expected 0..{width}",
                req_id=req_id,
                setting=f"width of {name!r}",
            )

    def _set_length(self, name: str, index: int, length: int) -> None:
        field = self.registry[name]
        stale = int(self.lengths[name][index]) - length
        if stale > 0:
            self._write_ragged(name, index, length, np.full(stale, field.default_value))
        self.lengths[name][index] = length

    def _write_ragged(self, name: str, index: int, start: int, values: HostArray) -> None:
        if len(values):
            position = index * self.registry[name].shape[0] + start
            self._backend.write(self._layout.flat[name], position, values)

    def read(self, name: str, index: int) -> object:
        """Host copy of one request's value (a ragged one: its valid prefix), or its object."""
        field = self.registry[name]
        if field.kind is Kind.HOST:
            return self.objects[name][index]
        if field.kind is Kind.RAGGED:
            start = index * field.shape[0]
            stop = start + int(self.lengths[name][index])
            return self._backend.read(self._layout.flat[name], start, stop)
        return self._backend.read(self._stored[name], index, index + 1)[0]

    def release(self, slot: int) -> None:
        """Drop the references that a departed request's slot holds; ``move`` clears its row."""
        for name in self._slot_objects:
            self.objects[name][slot] = None

    # -- all requests ------------------------------------------------------------------------
    def move(self, moves: RowMoves) -> None:
        """Bring every row-resident field from the old order to the new, and clear what is left."""
        if moves.is_identity:
            return
        self._mover.move(moves)
        for name in self._row_objects:
            move_list(self.objects[name], moves, None)

    def convert_whole(self, name: str, value: object) -> HostArray:
        """Check a host value, of the array's full shape or a scalar, for a whole field.

        Raises:
            InvalidField: another shape or dtype; or a host or ragged field, which are written by
                request.
        """
        field = self.registry[name]
        if field.kind in (Kind.HOST, Kind.RAGGED):
            raise InvalidField(f"field {name!r} is {field.kind.value}: write it request by request")
        values = convert(value, field.dtype, what=f"field {name!r}")
        shape = whole = self._layout.shapes[name]
        if field.flat:
            shape = (whole[0] * whole[1], *whole[2:])
        if values.shape not in (shape, ()):
            raise InvalidField(f"field {name!r} got shape {values.shape}; expected {shape}")
        return values.reshape(whole) if values.ndim else np.broadcast_to(values, whole)

    def write_whole(self, name: str, values: HostArray) -> None:
        """Copy what ``convert_whole`` returned over a whole field."""
        self._backend.write(self._stored[name], 0, values)
        self.derived.forget(name)

    def reset(self) -> None:
        """Set everything to its default; addresses stay valid."""
        for name, array in self._stored.items():
            self._backend.fill(array, self.registry[name].default_value)
        for lengths in self.lengths.values():
            lengths[:] = 0
        self.derived.reset()
        for rows in self.objects.values():
            rows[:] = [None] * self.capacity

    # -- reports -----------------------------------------------------------------------------
    def addresses(self) -> dict[str, int]:
        """Field -> first byte of its array; constant for the life of the batch."""
        return {name: self._backend.address(array) for name, array in self._stored.items()}

    def read_whole(self, name: str) -> HostArray:
        """Host copy of a whole field."""
        return self._backend.read(self._stored[name], 0, self._layout.shapes[name][0])

    def memory_report(self) -> list[FieldMemory]:
        """Bytes of every field, in order of declaration (Python objects are not counted)."""
        report = []
        for name, field in self.registry.items():
            total = prod(self._layout.shapes.get(name, (0,))) * field.stored_dtype.itemsize
            per_request = total // self.capacity if field.is_per_request else 0
            report.append(FieldMemory(name, field.kind.value, field.residency, per_request, total))
        return report

    def check(self) -> None:
        """Verify that no array moved and that ragged rows hold the default past their length.

        Raises:
            InvariantBroken: naming the field, and row or slot.
        """
        for name, address in self.addresses().items():
            if address != self._addresses[name]:
                raise InvariantBroken(
                    f"field {name!r} moved from address {self._addresses[name]} to {address}"
                )
        for name, lengths in self.lengths.items():
            default = self.registry[name].default_value
            values = self.read_whole(name)
            past = np.arange(values.shape[1]) >= lengths[:, np.newaxis]
            same = (values == default) | ((values != values) & (default != default))  # NaN too
            dirty = ~same & past
            if dirty.any():
                index = int(np.argmax(dirty.any(axis=1)))
                raise InvariantBroken(
                    f"ragged field {name!r} at index {index} holds values past its length"
                    f" {lengths[index]}"
                )
