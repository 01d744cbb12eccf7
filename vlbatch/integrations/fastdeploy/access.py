"""Attribute and key access, with the names of FastDeploy's ``share_inputs``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any

from vlbatch.batch.access import FieldAccess
from vlbatch.errors import InvalidField, InvalidSetting, StaleOrder, UnknownField
from vlbatch.fields import Kind

LAUNCH_BUFFERS = (
    "decoder_batch_ids", "decoder_tile_ids_per_batch", "decoder_num_blocks_cpu",
    "decoder_num_blocks_device", "decoder_chunk_size_device", "max_len_tensor_cpu",
    "encoder_batch_ids", "encoder_tile_ids_per_batch", "encoder_num_blocks_x_cpu",
    "kv_batch_ids", "kv_tile_ids_per_batch", "kv_num_blocks_x_cpu",
)  # fmt: skip
"""Buffers of the attention backend; the runner allocates them."""

_REQUIRED = object()


class SharedInputs:
    """Declared fields, what the runner keeps beside them, and views, all by name.

    ``batch["name"]`` and ``batch.name`` are the same. Three sorts of names exist:

    - declared fields: assigning copies into the array, whose address never changes;
    - kept objects, ``None`` until the runner assigns one. Those that captured graphs hold
      (attention buffers, KV caches, rotary tables) then stay until they are popped;
    - views, properties of the class.

    Any other name raises ``UnknownField`` (an ``AttributeError`` where it is read as an attribute).

    Args:
        declared: names of the fields that ``_parts`` will hold.
        fixed: names of kept objects that captured graphs hold.
        kept: names of kept objects that may be assigned again and again.

    Raises:
        InvalidSetting: a name to keep is something else already.
    """

    _views: tuple[str, ...] = ()

    def __init__(
        self, declared: Collection[str], fixed: Iterable[str], kept: Iterable[str] = ()
    ) -> None:
        # Any: arrays of whatever library the backend has
        self._parts: tuple[FieldAccess[Any], ...] = ()
        self._fixed = frozenset(fixed)
        names = [kept] if isinstance(kept, str) else list(kept)
        taken = [
            name
            for name in names
            if not isinstance(name, str)
            or not name.isidentifier()
            or name.startswith("_")
            or name in {*declared, *self._fixed}
            or hasattr(type(self), name)
        ]
        if taken:
            raise InvalidSetting(
                f"got {taken}; expected names that are no field, view or method here",
                setting="kept",
            )
        self._kept: dict[str, object] = dict.fromkeys([*self._fixed, *names])

    # Any: a tensor, a list, a number, by name
    def __getitem__(self, name: str) -> Any:
        """Read a field, a kept object or a view.

        Raises:
            UnknownField: no such name.
        """
        part = self._part_of(name)
        if part is not None:
            is_host = part.registry[name].kind is Kind.HOST
            return part.objects(name) if is_host else part[name]
        if name in self._kept:
            return self._kept[name]
        if name in self._views and self._parts:
            return getattr(self, name)
        raise self._unknown(name)

    # Any: see __getitem__
    def get(self, name: str, default: object = None) -> Any:
        """Read a name that is there (see ``in``), else the default."""
        return self[name] if name in self else default  # noqa: SIM401 (this is get)

    # Any: see __getitem__
    def __getattr__(self, name: str) -> Any:
        """Read by attribute what is not an attribute of the class."""
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except UnknownField as error:
            raise AttributeError(str(error)) from error

    def __setitem__(self, name: str, value: object) -> None:
        """Copy into a field, keep an object, or set a view that allows it.

        Raises:
            UnknownField: no such name.
            InvalidField: wrong shape or dtype; a view that only reads; an object kept already.
        """
        self._prepare(name, value)()

    def __setattr__(self, name: str, value: object) -> None:
        """Set by attribute; see ``__setitem__``."""
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            self[name] = value

    def update(self, values: Mapping[str, object]) -> None:
        """Set several names; nothing is written if one of them is refused, as ``__setitem__``."""
        for write in [self._prepare(name, value) for name, value in values.items()]:
            write()

    def __contains__(self, name: object) -> bool:
        """Whether there is something under the name: a field, or what is not ``None``."""
        if not isinstance(name, str):
            return False
        if self._part_of(name) is not None:
            return True
        if name in self._views and self._parts:
            return self._shows(name)
        return self._kept.get(name) is not None

    def _shows(self, name: str) -> bool:
        """Whether a view has something to show; between two steps some have not."""
        try:
            return getattr(self, name) is not None
        except StaleOrder:
            return False

    def pop(self, name: str, default: object = _REQUIRED) -> object:
        """Give up a kept object, so that another can be assigned.

        Raises:
            UnknownField: it is not there, and no default is given.
            InvalidField: a field or a view, which cannot be given up.
        """
        if self._part_of(name) is not None or name in self._views:
            raise InvalidField(f"{name!r} is no kept object; it stays as long as the batch")
        if self._kept.get(name) is not None:
            found, self._kept[name] = self._kept[name], None
            return found
        if default is _REQUIRED:
            raise self._unknown(name)
        return default

    def __delitem__(self, name: str) -> None:
        """Give up a kept object; raises as ``pop``."""
        self.pop(name)

    def check_by_row(self, name: str) -> None:
        """Refuse a field that has no entry a row.

        Raises:
            InvalidField: it has one a token or a draft, or is of the whole batch.
        """
        part = self._part_of(name)
        field = None if part is None else part.registry[name]
        if field is not None and (field.flat or not field.is_per_request):
            raise InvalidField(f"field {name!r} has no entry a row: it cannot be recovered")

    # -- inside ------------------------------------------------------------------------------
    # Any: see __init__
    def _part_of(self, name: str) -> FieldAccess[Any] | None:
        return next((part for part in self._parts if name in part.registry), None)

    def _prepare(self, name: str, value: object) -> Callable[[], None]:
        """Check an assignment and return what does it."""
        part = self._part_of(name)
        if part is not None and part.registry[name].kind is Kind.HOST:
            return self._objects(part.objects(name), name, value)
        if part is not None:
            return part.prepare(name, value)
        if name in self._views and self._parts and getattr(type(self), name).fset:
            self._check_view(name, value)
            return partial(object.__setattr__, self, name, value)
        if name in self._views:
            raise InvalidField(f"{name!r} follows from the requests; it cannot be assigned")
        if name not in self._kept:
            raise self._unknown(name)
        kept = self._kept[name]
        if name in self._fixed and kept is not None and kept is not value:
            raise InvalidField(
                f"{name!r} is kept already, and a captured graph may hold it: write into it, or"
                " pop it first"
            )
        return partial(self._kept.__setitem__, name, value)

    def _check_view(self, name: str, value: object) -> None:
        """Refuse what cannot be assigned to a view."""

    def _objects(self, objects: list[object], name: str, value: object) -> Callable[[], None]:
        if not isinstance(value, list) or len(value) != len(objects):
            raise InvalidField(
                f"field {name!r} got a {type(value).__name__}; expected a list of {len(objects)},"
                " one object a row"
            )
        return partial(objects.__setitem__, slice(None), value)

    def _unknown(self, name: str) -> UnknownField:
        if not self._parts:
            return UnknownField(f"no {name!r} yet: call init_share_inputs() first")
        names = {*self._kept, *self._views}.union(*(part.registry for part in self._parts))
        like = get_close_matches(name, names)
        hint = f"; there are {like}" if like else f" among {len(names)} names"
        return UnknownField(f"no {name!r} here{hint}", setting="kept")
