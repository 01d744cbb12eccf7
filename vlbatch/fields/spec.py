"""Declarations: what a field is, once, for moves, clears, resets, snapshots and followers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from vlbatch.backends.base import Layout
from vlbatch.backends.dtypes import STORED_AS, HostArray, convert
from vlbatch.errors import InvalidField, UnknownField

if TYPE_CHECKING:
    from vlbatch.order.batch_order import BatchOrder

Residency: TypeAlias = Literal["rows", "slots"]
OnPreempt: TypeAlias = Literal["keep", "reset"]
Rebuild: TypeAlias = "Callable[[BatchOrder], npt.ArrayLike]"

_CHOICES = {
    "residency": get_args(Residency), "layout": get_args(Layout), "on_preempt": get_args(OnPreempt)
}  # fmt: skip


class Kind(Enum):
    """What a field holds, and so what happens to it when rows move."""

    ROW = "row"  # fixed shape per request: moved
    RAGGED = "ragged"  # wide row with a valid length: the valid prefix moves
    PER_DRAFT = "per_draft"  # num_drafts + 1 rows per request: moved as a group
    HOST = "host"  # Python object per request: moved by reference
    ROW_VALUED = "row_valued"  # holds row numbers: moved and remapped
    CUMULATIVE = "cumulative"  # derived from lengths: rebuilt
    PACKED = "packed"  # derived, one entry a token: rebuilt
    GLOBAL = "global"  # one for the batch: untouched


PER_REQUEST = frozenset({Kind.ROW, Kind.RAGGED, Kind.PER_DRAFT, Kind.HOST, Kind.ROW_VALUED})


@dataclass(frozen=True, slots=True)
class Field:
    """One declared field. Use the constructors below: they leave out what a kind does not have.

    Attributes:
        name: unique in its batch.
        kind: see ``Kind``.
        shape: per request (per draft row for ``PER_DRAFT``; of the whole for ``GLOBAL`` and
            ``PACKED``; ``(width, ...)`` for ``RAGGED``; extents of 1 behind the sums of
            ``CUMULATIVE``; unused for ``HOST``).
        dtype: a key of ``STORED_AS``.
        default: value of an unused row and of a new request; for ``HOST`` a callable makes one
            object a request.
        residency: ``"rows"`` = physically in batch order; ``"slots"`` = never moves, read through
            ``slot_of_row``.
        layout: ``"contiguous"`` = ``[capacity, *shape]`` in the block of its dtype, for kernels;
            ``"arena"`` = interleaved rows in host memory, the fastest to permute; ``"auto"`` =
            what the backend prefers.
        on_preempt: whether a preempted request finds its value again when it resumes.
        rebuild: ``BatchOrder`` -> values, for the derived kinds.
        flat: a ``PER_DRAFT`` field whose array shows ``[capacity * (num_drafts + 1), *shape]``, one
            axis for requests and drafts.
        whole: a ``ROW_VALUED`` field that is one list of row numbers for the batch, not one value
            a request: its entries stay in place and are remapped.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...] = ()
    dtype: str = "int64"
    default: object = 0
    residency: Residency = "rows"
    layout: Layout = "auto"
    on_preempt: OnPreempt = "keep"
    rebuild: Rebuild | None = None
    whole: bool = False
    flat: bool = False

    def __post_init__(self) -> None:
        """Refuse contradictions at the declaration."""
        if not self.name.isidentifier():
            raise InvalidField(f"field name {self.name!r} is not an identifier")
        for setting, choices in _CHOICES.items():
            chosen = getattr(self, setting)
            if chosen not in choices:
                raise InvalidField(
                    f"field {self.name!r} got {chosen!r}; expected one of {choices}",
                    setting=setting,
                )
        self._check_kind()
        if self.kind is Kind.HOST:
            return
        if self.dtype not in STORED_AS:
            raise InvalidField(
                f"field {self.name!r} has dtype {self.dtype!r}; expected one of {list(STORED_AS)}"
            )
        if any(n <= 0 for n in self.shape):
            raise InvalidField(f"field {self.name!r} has shape {self.shape}; extents must be > 0")
        if self.kind is Kind.CUMULATIVE and any(n != 1 for n in self.shape):
            raise InvalidField(f"cumulative field {self.name!r} has shape {self.shape}; use ones")
        if self.kind is Kind.CUMULATIVE and STORED_AS[self.dtype].kind not in "iu":
            raise InvalidField(
                f"cumulative field {self.name!r} has dtype {self.dtype}: use integers"
            )
        if self.kind is Kind.RAGGED and not self.shape:
            raise InvalidField(f"ragged field {self.name!r} needs a width")
        if self.kind is Kind.ROW_VALUED and STORED_AS[self.dtype].kind != "i":
            raise InvalidField(
                f"row-valued field {self.name!r} has dtype {self.dtype}; expected a signed integer"
                " (-1 means no row)"
            )
        if convert(self.default, self.dtype, what=f"default of field {self.name!r}").ndim:
            raise InvalidField(f"default of field {self.name!r} must be a scalar")

    def _check_kind(self) -> None:
        """Refuse what another kind has."""
        for name, given, kinds in (
            ("flat", self.flat, {Kind.PER_DRAFT}),
            ("whole", self.whole, {Kind.ROW_VALUED}),
            ("rebuild", self.rebuild is not None, {Kind.CUMULATIVE, Kind.PACKED}),
        ):
            if given and self.kind not in kinds:
                raise InvalidField(f"field {self.name!r} is {self.kind.value}: it has no {name}")

    @property
    def is_per_request(self) -> bool:
        """Whether each request has its own value."""
        return self.kind in PER_REQUEST and not self.whole

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """Numpy dtype of the storage."""
        return STORED_AS[self.dtype]

    @property
    def default_value(self) -> HostArray:
        """The default as a 0-d array of the storage dtype."""
        return convert(self.default, self.dtype, what=f"default of field {self.name!r}")

    def row_shape(self, num_drafts: int) -> tuple[int, ...]:
        """Shape of one request's value when ``num_drafts`` tokens are drafted."""
        if self.kind is Kind.PER_DRAFT:
            return (num_drafts + 1, *self.shape)
        return self.shape

    def row_elements(self, num_drafts: int) -> int:
        """Elements of one request's value."""
        return prod(self.row_shape(num_drafts))


def row(
    name: str,
    shape: tuple[int, ...] = (),
    dtype: str = "int64",
    *,
    default: object = 0,
    residency: Residency = "rows",
    layout: Layout = "auto",
    on_preempt: OnPreempt = "keep",
) -> Field:
    """Declare a field of fixed shape per request."""
    return Field(name, Kind.ROW, shape, dtype, default, residency, layout, on_preempt)


def ragged(
    name: str,
    width: int,
    dtype: str = "int64",
    *,
    default: object = 0,
    residency: Residency = "slots",
    on_preempt: OnPreempt = "keep",
) -> Field:
    """Declare a wide row with a valid length; elements past the length hold the default."""
    return Field(
        name, Kind.RAGGED, (width,), dtype, default, residency, "contiguous", on_preempt
    )  # fmt: skip


def per_draft(
    name: str,
    shape: tuple[int, ...] = (),
    dtype: str = "int64",
    *,
    default: object = 0,
    residency: Residency = "rows",
    layout: Layout = "auto",
    on_preempt: OnPreempt = "keep",
    flat: bool = False,
) -> Field:
    """Declare ``num_drafts + 1`` rows of ``shape`` per request, moved as one group.

    ``flat`` shows them as kernels over flattened drafts want them; see ``Field``.
    """
    layout = "contiguous" if flat else layout
    return Field(
        name, Kind.PER_DRAFT, shape, dtype, default, residency, layout, on_preempt, flat=flat
    )


def host(
    name: str,
    *,
    default: object = None,
    residency: Residency = "slots",
    on_preempt: OnPreempt = "keep",
) -> Field:
    """Declare a Python object per request; a callable ``default`` makes a fresh one each."""
    return Field(
        name, Kind.HOST, default=default, residency=residency, on_preempt=on_preempt
    )  # fmt: skip


def row_valued(
    name: str,
    shape: tuple[int, ...] = (),
    dtype: str = "int32",
    *,
    whole: bool = False,
    layout: Layout = "auto",
) -> Field:
    """Declare row numbers, -1 for none: remapped whenever rows move, -1 once that row is gone.

    A number is to name a row that has a request; what becomes of the number of a hole differs from
    backend to backend.
    """
    return Field(
        name, Kind.ROW_VALUED, shape, dtype, -1, "rows",
        "contiguous" if whole else layout, "reset", None, whole,
    )  # fmt: skip


def cumulative(
    name: str, rebuild: Rebuild, dtype: str = "int32", *, shape: tuple[int, ...] = ()
) -> Field:
    """Declare running sums ``[capacity + 1, *shape]`` of the lengths by row ``rebuild`` returns.

    Entry 0 is 0; entries past the last row repeat the total. Extents in ``shape`` are 1.
    """
    return Field(name, Kind.CUMULATIVE, shape, dtype, 0, "rows", "contiguous", "reset", rebuild)


def packed(
    name: str,
    shape: tuple[int, ...],
    dtype: str = "int64",
    *,
    default: object = 0,
    rebuild: Rebuild | None = None,
) -> Field:
    """Declare a token-level buffer, ``shape[0]`` the most tokens of a step.

    ``rebuild`` returns the values of the step's tokens, the rest is set to the default; without
    it the caller writes the buffer each step.
    """
    return Field(name, Kind.PACKED, shape, dtype, default, "rows", "contiguous", "reset", rebuild)


def batch_global(
    name: str, shape: tuple[int, ...] = (1,), dtype: str = "int64", *, default: object = 0
) -> Field:
    """Declare one array for the whole batch, untouched by moves."""
    return Field(name, Kind.GLOBAL, shape, dtype, default, "rows", "contiguous", "reset")


class FieldRegistry(Mapping[str, Field]):
    """The declared fields of one batch by name, in order of declaration; immutable.

    Raises:
        InvalidField: two fields of one name.
    """

    def __init__(self, fields: Sequence[Field]) -> None:
        by_name: dict[str, Field] = {}
        for field in fields:
            if field.name in by_name:
                raise InvalidField(f"field {field.name!r} is declared twice")
            by_name[field.name] = field
        self._by_name = MappingProxyType(by_name)

    def __getitem__(self, name: str) -> Field:
        return self.find(name)

    def find(self, name: str, req_id: str | None = None) -> Field:
        """Look a field up, on behalf of a request.

        Raises:
            UnknownField: not declared; names the request.
        """
        try:
            return self._by_name[name]
        except KeyError:
            raise UnknownField(
                f"no field {name!r} is declared; declared are {sorted(self._by_name)}",
                req_id=req_id,
                setting="fields",
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)
