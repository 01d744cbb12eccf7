"""Reading and writing declared fields, by batch and by request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from vlbatch.backends.dtypes import HostArray, convert
from vlbatch.batch.rows import RowTable
from vlbatch.errors import InvalidField
from vlbatch.fields import FieldMemory, FieldRegistry, FieldStorage, Kind

E = TypeVar("E")


class FieldAccess(Mapping[str, E], Generic[E]):
    """Fields of the requests of one row table; as a mapping, declared field -> its array.

    ``batch["name"]`` is the whole array, ``[capacity, *shape]`` in rows or in slots, at an
    address that never changes; ``batch["name"] = values`` copies into it. A name that was not
    declared raises ``UnknownField``, for reading and for writing.
    """

    # Any: the stored array type is the backend's own business
    def __init__(self, table: RowTable, storage: FieldStorage[Any, E]) -> None:
        self._table = table
        self._storage = storage

    def __getitem__(self, name: str) -> E:
        if self.registry[name].kind is Kind.HOST:
            raise InvalidField(f"field {name!r} holds Python objects: use objects({name!r})")
        return self._home(name).arrays[name]

    def __setitem__(self, name: str, value: object) -> None:
        self.prepare(name, value)()

    def prepare(self, name: str, value: object) -> Callable[[], None]:
        """Check ``batch[name] = value``; returns what does it. Changes nothing.

        Raises:
            UnknownField: not declared.
            InvalidField: a host or ragged field; another shape or dtype.
        """
        self.registry.find(name)
        home = self._home(name)
        return partial(home.write_whole, name, home.convert_whole(name, value))

    def __iter__(self) -> Iterator[str]:
        return (name for name, field in self.registry.items() if field.kind is not Kind.HOST)

    def __len__(self) -> int:
        return sum(field.kind is not Kind.HOST for field in self.registry.values())

    def __contains__(self, name: object) -> bool:
        return name in self.registry and self.registry[str(name)].kind is not Kind.HOST

    # Unlike other mappings, one batch is never equal to another: its arrays are its own.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def registry(self) -> FieldRegistry:
        """The declared fields."""
        return self._storage.registry

    def to_host(self, name: str) -> HostArray:
        """Copy of a whole array field, in host memory; waits for a device.

        Raises:
            UnknownField: not declared.
            InvalidField: a host field.
        """
        if self.registry[name].kind is Kind.HOST:
            raise InvalidField(f"field {name!r} holds Python objects: use objects({name!r})")
        return self._home(name).read_whole(name)

    def objects(self, name: str) -> list[object]:
        """The list behind a host field, indexed by row or slot; do not change its length.

        Raises:
            UnknownField: not declared.
            InvalidField: not a host field.
        """
        if self.registry[name].kind is not Kind.HOST:
            raise InvalidField(f"field {name!r} is not a host field")
        return self._home(name).objects[name]

    def read(self, req_id: str, name: str) -> object:
        """Host copy of one request's value, or its Python object.

        Raises:
            UnknownRequest: not in the batch.
            UnknownField: not declared.
            InvalidField: not per request.
        """
        return self._home(name).read(name, self._index(req_id, name))

    def write(self, req_id: str, name: str, value: object) -> None:
        """Write one request's value in place; a ragged field takes the value's length.

        Raises:
            UnknownRequest, UnknownField: as ``read``.
            InvalidField: not per request, or another dtype, shape or length.
        """
        index = self._index(req_id, name)
        home = self._home(name)
        home.write(name, index, home.convert_value(self.registry[name], value, req_id))

    def append(self, req_id: str, name: str, values: object) -> None:
        """Write a scalar or a sequence behind the valid prefix of a ragged field.

        Raises:
            UnknownRequest, UnknownField: as ``read``.
            InvalidField: not ragged, another dtype, several axes, or longer than its width.
        """
        index = self._index(req_id, name, ragged=True)
        dtype = self.registry[name].dtype
        checked = np.atleast_1d(convert(values, dtype, what=f"field {name!r}", req_id=req_id))
        if checked.ndim != 1:
            raise InvalidField(
                f"ragged field {name!r} got shape {checked.shape}; expected one axis",
                req_id=req_id,
            )
        self._home(name).append(name, index, checked, req_id)

    def length(self, req_id: str, name: str) -> int:
        """Valid length of a ragged field; raises as ``append``."""
        index = self._index(req_id, name, ragged=True)
        return int(self._home(name).lengths[name][index])

    def set_length(self, req_id: str, name: str, length: int) -> None:
        """Shorten a ragged field, or say how far a kernel wrote it; raises as ``append``."""
        index = self._index(req_id, name, ragged=True)
        self._home(name).set_length(name, index, length, req_id)

    # Any: the stored array type is the backend's own business
    def _home(self, name: str) -> FieldStorage[Any, E]:  # noqa: ARG002 (see ProposerInputBatch)
        """Storage that holds a declared field."""
        return self._storage

    def _index(self, req_id: str, name: str, *, ragged: bool = False) -> int:
        field = self.registry.find(name, req_id)
        if not field.is_per_request or (ragged and field.kind is not Kind.RAGGED):
            wanted = "ragged" if ragged else "per-request"
            raise InvalidField(
                f"field {name!r} is {field.kind.value}; expected a {wanted} one", req_id=req_id
            )
        if field.residency == "slots":
            return self._table.slot_of(req_id)
        return self._table.row_of(req_id)

    def addresses(self) -> dict[str, int]:
        """Field -> first byte of its array; constant for the life of the batch."""
        return self._storage.addresses()

    def memory_report(self) -> list[FieldMemory]:
        """Bytes of every field."""
        return self._storage.memory_report()
