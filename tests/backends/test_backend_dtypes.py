"""How values become field dtypes: nothing is lost silently."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import pytest
from tagged import DTYPES

from vlbatch.backends.dtypes import STORED_AS, bfloat16_bits, convert
from vlbatch.errors import InvalidField


def accepted(value: object, dtype: str) -> np.ndarray[Any, Any]:
    return convert(value, dtype, what="field 'x'")


@pytest.mark.parametrize("dtype", DTYPES)
def test_storage_dtype(dtype: str) -> None:
    """Whatever is accepted comes back in the storage dtype and with its own shape."""
    for value in ([[0, 1], [1, 0]], np.ones((2, 2), STORED_AS[dtype]), 1, [], np.zeros((0, 3))):
        got = accepted(value, dtype)
        assert got.dtype == STORED_AS[dtype]
        assert got.shape == np.shape(value)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (255, "uint8"),
        (-128, "int8"),
        (np.int64(2**31 - 1), "int32"),
        (np.uint64(2**63 - 1), "int64"),
        ([65504.0, -65504.0], "float16"),
        (3.4e38, "float32"),
        (float("inf"), "float16"),
        (float("-inf"), "float32"),
        ([True, False], "bool"),
        ([0, 1], "bool"),
        (7, "float64"),
    ],
)
def test_what_fits_is_accepted(value: object, dtype: str) -> None:
    """Numbers at the limits of a dtype are kept exactly."""
    got = accepted(value, dtype).astype(np.float64)

    np.testing.assert_allclose(got, np.asarray(value, dtype=np.float64), rtol=1e-7)


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (256, "uint8", r"integers in \[256, 256\]; expected uint8 values in \[0, 255\]"),
        ([3, -1], "uint8", r"integers in \[-1, 3\]"),
        (2**31, "int32", ".*expected int32 values"),
        (np.uint64(2**63), "int64", ".*expected int64 values"),
        (1.0, "int64", "a value of dtype float64; expected int64"),
        ([1.5], "int8", ".*expected int8"),
        (True, "int32", "a value of dtype bool; expected int32"),
        (True, "float32", "a value of dtype bool; expected float32"),
        (2, "bool", "a value of dtype int64; expected bool"),
        (0.0, "bool", "a value of dtype float64; expected bool"),
        (70000, "float16", "floats in .*; expected float16 values"),
        (1e300, "float32", "floats in .*; expected float32 values"),
        ([0.0, -1e300], "bfloat16", "floats in .*; expected bfloat16 values"),
        (3.4e38, "bfloat16", ".*expected bfloat16 values"),
        (1 + 2j, "float64", "a value of dtype complex128"),
        ("1", "int64", "a value of dtype <U1"),
        (None, "float32", "a value of dtype object"),
        (2**70, "int64", "a value of dtype object"),
        ([[1], [2, 3]], "int64", "a value that is no array"),
    ],
)
def test_what_would_change_is_refused(value: object, dtype: str, message: str) -> None:
    """A value that the dtype cannot hold is refused, naming target, request, got and expected."""
    with pytest.raises(InvalidField, match=f"request 'r': field 'x' got {message}") as caught:
        convert(value, dtype, what="field 'x'", req_id="r")

    assert caught.value.req_id == "r"


def nearest_bfloat16(value: float) -> int:
    """Bits of the nearest bfloat16, ties to even, by comparing the two neighbours."""
    bits = int.from_bytes(struct.pack("<f", value), "little")
    low = bits >> 16
    below, above = (struct.unpack("<f", struct.pack("<I", b << 16))[0] for b in (low, low + 1))
    if abs(value - below) != abs(value - above):
        return low if abs(value - below) < abs(value - above) else low + 1
    return low if low % 2 == 0 else low + 1


def test_bfloat16_rounds_to_nearest_even(seed: int) -> None:
    """Every float goes to the nearest bfloat16; a tie goes to the even one."""
    choose = random.Random(seed)
    values = [1.0, -2.5, 0.0, 1.00390625, 1.01171875, 3e38, 1e-40]
    values += [choose.uniform(-1, 1) * 10.0 ** choose.randint(-30, 30) for _ in range(2000)]
    values = np.array(values, dtype=np.float32).tolist()

    got = bfloat16_bits(np.array(values)).tolist()
    assert got == [nearest_bfloat16(v) for v in values]


def test_bfloat16_of_special_values() -> None:
    """Infinities stay, every NaN stays a NaN, zeros keep their sign."""
    every_nan = np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000], dtype=np.uint32).view(np.float32)
    values = np.array([np.inf, -np.inf, 0.0, -0.0], dtype=np.float32)

    assert bfloat16_bits(values).tolist() == [0x7F80, 0xFF80, 0x0000, 0x8000]
    assert all(b & 0x7F80 == 0x7F80 and b & 0x7F for b in bfloat16_bits(every_nan).tolist())


def test_bfloat16_bits_pass_through() -> None:
    """uint16 arrays are taken as bfloat16 bits; other integers as numbers."""
    bits = np.array([0x3F80, 0x4000], dtype=np.uint16)

    assert accepted(bits, "bfloat16").tolist() == [0x3F80, 0x4000]
    assert accepted([1, 2], "bfloat16").tolist() == [0x3F80, 0x4000]
    assert accepted(np.array([1.0, 2.0]), "bfloat16").tolist() == [0x3F80, 0x4000]
