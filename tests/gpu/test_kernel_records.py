"""Tables and records that the kernels read, run by the model of the kernels on the host."""

from __future__ import annotations

import random

import numpy as np
import pytest
from contract import FieldContract
from kernel_model import ModelBackend, ModelMover, run_features
from random_features import random_step
from random_rows import arrays_of, copy_rows, host_mover, random_moves, random_rows

from vlbatch.backends.cuda.records import (
    SLICE_BYTES,
    build_slices,
    feature_runs,
    num_feature_words,
    write_features,
)
from vlbatch.backends.mover import RowArrays
from vlbatch.errors import InvalidField
from vlbatch.fields.layout import Group


class TestModelOfTheKernels(FieldContract):
    """A batch whose rows move as the kernels move them, with little shared memory."""

    @pytest.fixture
    def backend(self) -> ModelBackend:
        return ModelBackend(shared_bytes=96)


@pytest.mark.parametrize("case", range(60))
def test_random_arrays_and_moves(seed: int, case: int) -> None:
    """Slices and records of any arrays and moves do what one gather an array does."""
    rng = random.Random(f"{seed} {case}")
    capacity = rng.randint(1, 100)
    num_used = rng.randint(1, capacity)
    rows = random_rows(rng, capacity, num_used, max_width=333)
    expected = copy_rows(rows)
    mover = ModelMover(rows, rng.choice((64, 1000, 4096, 65536)))
    for _ in range(2):
        moves = random_moves(rng, num_used)
        mover.move(moves)
        host_mover(expected).move(moves)
        num_used = max(num_used - len(moves.vacated), 1)

        for got, wanted in zip(arrays_of(rows), arrays_of(expected), strict=True):
            assert got.tobytes() == wanted.tobytes()
        for got, wanted in zip(rows.ragged, expected.ragged, strict=True):
            np.testing.assert_array_equal(got.lengths, wanted.lengths)


def test_every_column_is_in_one_slice(seed: int) -> None:
    """No byte of a row belongs to two blocks or to none, and no slice is wider than allowed."""
    rng = random.Random(seed)
    rows = random_rows(rng, 9, 9)
    slices = build_slices(rows, lambda array: array.ctypes.data)
    covered: dict[int, int] = {}
    for piece in slices.tolist():
        base, stride, num_bytes = piece[0], piece[1], piece[2]
        assert 0 < num_bytes <= SLICE_BYTES
        for row in range(9 if piece[8] else 1):
            for byte in range(base + row * stride, base + row * stride + num_bytes):
                covered[byte] = covered.get(byte, 0) + 1
    wanted = {a.ctypes.data + i for a in arrays_of(rows) for i in range(a.nbytes)}

    assert set(covered) == wanted
    assert set(covered.values()) == {1}


@pytest.mark.parametrize(
    ("dtype", "width", "log2_word"),
    [("int64", 4, 4), ("int64", 3, 3), ("int32", 3, 2), ("float16", 5, 1), ("bool", 7, 0)],
)
def test_widest_load(dtype: str, width: int, log2_word: int) -> None:
    """A load is as wide as base and row size allow."""
    block = np.zeros(64 + 6 * width, dtype=dtype)
    start = -block.ctypes.data % 64 // block.itemsize
    array = block[start : start + 6 * width].reshape(1, 6, width)
    group = Group(array, 1, np.zeros((1, 1, 1), dtype), "rows")
    slices = build_slices(RowArrays(6, [group], [], []), lambda a: a.ctypes.data)

    assert set(slices["log2_word"].tolist()) == {log2_word}


def test_short_rows_are_cut_narrow() -> None:
    """Slices are 256 bytes wide, or 16 where all rows together make no more than 256 of these."""

    def widths(num_bytes: int) -> list[int]:
        array = np.zeros((1, 2, num_bytes), np.uint8)
        group = Group(array, 1, np.zeros((1, 1, 1), np.uint8), "rows")
        table = build_slices(RowArrays(2, [group], [], []), lambda a: a.ctypes.data)
        return [int(width) for width in table["bytes"]]

    assert widths(40) == [16, 16, 8]
    assert widths(4096) == [16] * 256
    assert widths(4097) == [256] * 16 + [1]


def test_giant_rows_are_refused() -> None:
    """Offsets within a row are 32-bit: a row of 2 GiB is refused."""

    class Giant:
        shape = (1, 4, 2**28)

    group = Group(Giant(), 1, np.zeros((1, 1, 1), np.int64), "rows")
    with pytest.raises(InvalidField, match="2147483648 bytes a row"):
        build_slices(RowArrays(4, [group], [], []), lambda _: 4096)


# -- features -------------------------------------------------------------------------------------
def test_runs_of_features() -> None:
    """A run ends at a segment's end and where tokens jump; empty segments leave no trace."""
    tokens = np.array([3, 4, 5, 9, 10, 11, 12], dtype=np.int64)
    runs = feature_runs([7, 1000, 7, 2000, 7], [0, 4, 0, 3, 0], tokens, 10)

    assert runs.addresses.tolist() == [1000, 1030, 2000]
    assert runs.first_rows.tolist() == [0, 3, 4]
    assert runs.first_tokens.tolist() == [3, 9, 10]
    assert runs.token_bounds() == (3, 13)


def test_no_features() -> None:
    """A step without features has no run."""
    for num_rows in ([], [0, 0]):
        runs = feature_runs([4096] * len(num_rows), num_rows, np.zeros(0, np.int64), 8)

        assert (len(runs.addresses), runs.num_rows) == (0, 0)


@pytest.mark.parametrize("case", range(20))
def test_random_features(seed: int, case: int) -> None:
    """Each feature row reaches its token, and no other row of the buffer changes."""
    step = random_step(random.Random(f"{seed} {case}"), max_tokens=200)
    out = step.out.copy()
    addresses = [segment.ctypes.data for segment in step.segments]
    runs = feature_runs(addresses, step.num_rows, step.tokens, step.row_bytes)
    record = np.zeros(num_feature_words(len(runs.addresses)), dtype=np.int32)
    assert write_features(record, runs, step.row_bytes | out.ctypes.data) == len(record)
    run_features(out, step.row_bytes, record)

    assert out.tobytes() == step.expected.tobytes()
