"""What feature arrays must look like: precomputed embeddings and encoder outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from vlbatch.errors import FeatureRowsMismatch, InvalidItem, PlaceholderMismatch
from vlbatch.items import Item


@runtime_checkable
class _Array(Protocol):
    """What numpy arrays and Paddle and torch tensors have in common."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> object: ...


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """Declared form of features; ``None`` leaves a property unchecked.

    Attributes:
        hidden_size: columns of each level.
        dtype: name such as ``"float32"``, the same in every library.
        num_levels: arrays an item: 1, more for models that feed deeper layers too.
        allow_nan: accept NaN in precomputed embeddings.
    """

    hidden_size: int | None = None
    dtype: str | None = None
    num_levels: int = 1
    allow_nan: bool = False

    def check_levels(self, features: tuple[object, ...], *, req_id: str | None = None) -> None:
        """Check an encoder's output; rows are the cache's business.

        Raises:
            FeatureRowsMismatch: another number of levels, hidden size or dtype.
        """
        problem = self._problem(features)
        if problem:
            raise FeatureRowsMismatch(f"the encoder delivered {problem}", req_id=req_id)

    def _problem(self, levels: object) -> str | None:
        if not isinstance(levels, tuple | list):
            return f"a {type(levels).__name__}; expected a tuple of arrays, one a level"
        if len(levels) != self.num_levels:
            return f"{len(levels)} levels; expected {self.num_levels}"
        for level in levels:
            if not isinstance(level, _Array) or len(level.shape) != 2 or _is_sparse(level):
                shape = tuple(getattr(level, "shape", ()))
                return f"a {type(level).__name__} of shape {shape}; expected dense [rows, hidden]"
            if self.hidden_size is not None and level.shape[1] != self.hidden_size:
                return f"hidden size {level.shape[1]}; expected {self.hidden_size}"
            if self.dtype is not None and dtype_name(level.dtype) != self.dtype:
                return f"dtype {dtype_name(level.dtype)}; expected {self.dtype}"
        return None


def check_embeds(item: Item, num_rows: int, spec: FeatureSpec, req_id: str) -> None:
    """Check precomputed embeddings at admission. On a device, the NaN check waits for it.

    Args:
        item: its ``embeds`` is one array ``[rows, hidden]``, or a tuple of one a level.
        num_rows: places of the item.
        spec: declared form.
        req_id: named in the refusals.

    Raises:
        InvalidItem: wrong levels, rank, hidden size or dtype; sparse; NaN where not allowed.
        PlaceholderMismatch: another number of rows than places.
    """
    levels = item.embeds if isinstance(item.embeds, tuple) else (item.embeds,)
    name = f"precomputed embeddings of item {item.key!r}"
    problem = spec._problem(levels)  # noqa: SLF001 (same module)
    if problem:
        raise InvalidItem(f"{name} have {problem}", req_id=req_id)
    for level in levels:
        assert isinstance(level, _Array)  # noqa: S101 (checked by _problem)
        if level.shape[0] != num_rows:
            raise PlaceholderMismatch(
                f"{name} have {level.shape[0]} rows for {num_rows} placeholder tokens",
                req_id=req_id,
            )
        if not spec.allow_nan and _has_nan(level):
            raise InvalidItem(f"{name} contain NaN", req_id=req_id, setting="allow_nan")


def dtype_name(dtype: object) -> str:
    """``float32`` from ``numpy.dtype('float32')``, ``torch.float32`` or ``paddle.float32``."""
    return str(dtype).rsplit(".", maxsplit=1)[-1]


def _is_sparse(level: object) -> bool:
    """Whether zeros are left out: Paddle has a method for it, torch a layout, scipy a module."""
    is_sparse = getattr(level, "is_sparse", False)
    if is_sparse() if callable(is_sparse) else is_sparse:
        return True
    return "sparse" in str(getattr(level, "layout", type(level).__module__))


def _has_nan(level: object) -> bool:
    unequal = level != level
    return bool(unequal.any())  # type: ignore[attr-defined]  # an array of bool
