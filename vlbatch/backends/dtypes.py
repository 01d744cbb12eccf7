"""Element types of fields, and how a value becomes one without losing anything silently."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from vlbatch.errors import InvalidField

# Any: the element type is known at run time only, from the declaration of a field
HostArray: TypeAlias = npt.NDArray[Any]

BFLOAT16 = "bfloat16"
"""numpy has no such type: it is stored, and seen by the numpy backend, as its uint16 bits."""

STORED_AS: dict[str, np.dtype[Any]] = {
    name: np.dtype("uint16" if name == BFLOAT16 else name)
    for name in (
        "bool", "uint8", "int8", "int16", "int32", "int64",
        "float16", "float32", "float64", BFLOAT16,
    )
}  # fmt: skip
"""Field dtype -> numpy dtype of its storage. (uint16 itself is left out: Paddle reads it as
bfloat16.)"""


def bfloat16_bits(values: HostArray) -> npt.NDArray[np.uint16]:
    """Round float values to bfloat16 (nearest, ties to even) and return the bits."""
    bits = np.array(values, dtype=np.float32, order="C").view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet_nan = np.uint32(0x7FC0)
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)


_INTEGERS = {dtype: np.iinfo(dtype) for dtype in STORED_AS.values() if dtype.kind in "iu"}


def convert(value: object, dtype: str, *, what: str, req_id: str | None = None) -> HostArray:
    """Return ``value`` as an array of the storage dtype of ``dtype``.

    Numbers may narrow only if every value fits; floats never become integers; only bools,
    0 and 1 become bools.

    Args:
        value: a scalar, a sequence, or an array that numpy can read.
        dtype: a key of ``STORED_AS``.
        what: names the target in the refusal.
        req_id: names the request in the refusal.

    Raises:
        InvalidField: the value cannot be held by the dtype.
    """
    stored = STORED_AS[dtype]
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InvalidField(f"{what} got a value that is no array: {error}", req_id=req_id) from None
    if array.dtype == stored:
        return array
    if array.size == 0 and array.ndim:
        return array.astype(stored)
    floating = stored.kind == "f" or dtype == BFLOAT16
    if array.dtype.kind in "iu" and stored.kind in "iu" and not floating:
        info = _INTEGERS[stored]
        fits = array.size == 0 or (array.min() >= info.min and array.max() <= info.max)
        if fits:
            return array.astype(stored)
        raise InvalidField(
            f"{what} got integers in [{array.min()}, {array.max()}]; expected {dtype} values in"
            f" [{info.min}, {info.max}]",
            req_id=req_id,
        )
    if stored.kind == "b" and array.dtype.kind in "iu" and np.isin(array, (0, 1)).all():
        return array.astype(stored)
    if array.dtype.kind in "fiu" and floating:
        floats, overflowed = _narrow(array, dtype)
        if not overflowed:
            return floats
        raise InvalidField(
            f"{what} got floats in [{array.min()}, {array.max()}]; expected {dtype} values",
            req_id=req_id,
        )
    raise InvalidField(
        f"{what} got a value of dtype {array.dtype}; expected {dtype}", req_id=req_id
    )


def _narrow(array: HostArray, dtype: str) -> tuple[HostArray, bool]:
    """Numbers as a float dtype, and whether a finite one became infinite."""
    with np.errstate(over="ignore"):
        if dtype == BFLOAT16:
            floats: HostArray = bfloat16_bits(array)
            infinite = (floats & 0x7FFF) == 0x7F80
        else:
            floats = array.astype(STORED_AS[dtype])
            infinite = np.isinf(floats)
    return floats, bool((infinite & np.isfinite(array)).any())
