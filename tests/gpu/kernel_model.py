"""What the kernels of ``kernels.cu`` must do, in plain Python over host memory.

Written from the comments in that file: it reads the same tables and records, at the addresses that
they name, so that a host array can stand for device memory.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from vlbatch.backends.cuda.records import (
    RECORD_WORDS,
    build_slices,
    write_moves,
)
from vlbatch.backends.host import HostOperations
from vlbatch.backends.mover import RowArrays
from vlbatch.order import RowMoves

Array = np.ndarray[Any, Any]

ROW_NUMBERS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def memory(address: int, num_bytes: int) -> Array:
    """Bytes at an address, to read and to write."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * num_bytes).from_address(address)), np.uint8)


def run_moves(slices: Array, record: Array, shared_bytes: int) -> None:
    """Every block in turn, last first: none may depend on another."""
    for piece in slices[::-1]:
        run_block(piece, record, shared_bytes)


def run_block(piece: Any, record: Array, shared_bytes: int) -> None:
    num_ops, num_old_rows = (int(n) for n in record[:2])
    if not num_ops:
        return
    destinations, sources = record[4 : 4 + 2 * num_ops].reshape(2, num_ops).tolist()
    ragged = int(piece["ragged"])
    widths = [2**31] * num_ops
    if ragged >= 0:
        widths = record[4 + (2 + ragged) * num_ops :][:num_ops].tolist()
    if piece["is_moved"]:
        move(piece, destinations, sources, widths, shared_bytes)
    if piece["num_remapped_rows"]:
        assert 4 * num_old_rows <= shared_bytes
        new_row_of = dict.fromkeys(range(num_old_rows), -1) | {
            row: row for row in range(num_old_rows) if row not in destinations
        }
        new_row_of |= {s: d for d, s in zip(destinations, sources, strict=True) if s >= 0}
        remap(piece, new_row_of)


def move(
    piece: Any, destinations: list[int], sources: list[int], widths: list[int], shared_bytes: int
) -> None:
    base, stride, size = (int(piece[name]) for name in ("base", "stride", "bytes"))
    word = 1 << int(piece["log2_word"])
    assert base % word == stride % word == size % word == 0
    span = 256
    while span * len(sources) > shared_bytes:
        span //= 2
    assert span >= word, "a word of every operation must fit shared memory"
    for at in range(0, size, span):
        columns = min(span, size - at)
        wanted = [max(0, min(columns, w - int(piece["column"]) - at)) for w in widths]
        wanted = [-(-w // word) * word for w in wanted]
        default = np.tile(piece["fill"], 16)
        taken = [
            memory(base + s * stride + at, w).copy() if s >= 0 else default[:w]
            for s, w in zip(sources, wanted, strict=True)
        ]
        for destination, values in zip(destinations, taken, strict=True):
            memory(base + destination * stride + at, len(values))[:] = values


def remap(piece: Any, new_row_of: dict[int, int]) -> None:
    kind = ROW_NUMBERS[int(piece["remapped_bytes"])]
    for row in range(int(piece["num_remapped_rows"])):
        address = int(piece["base"]) + row * int(piece["stride"])
        values = memory(address, int(piece["bytes"])).view(kind)
        values[:] = [new_row_of.get(value, -1) for value in values.tolist()]


def run_features(out: Array, row_bytes: int, record: Array) -> None:
    """Copy every run of feature rows to its tokens; ``out`` is the buffer's bytes."""
    num_runs, num_rows, log2_word, _ = record[:4].tolist()
    addresses = record[4 : 4 + 2 * num_runs].view(np.int64).tolist()
    firsts, tokens = record[4 + 2 * num_runs : 4 + 4 * num_runs].reshape(2, num_runs).tolist()
    word = 1 << log2_word
    assert all(n % word == 0 for n in (*addresses, row_bytes, out.ctypes.data))
    stops = [*firsts[1:], num_rows][:num_runs]
    for address, first, stop, token in zip(addresses, firsts, stops, tokens, strict=True):
        num_bytes = (stop - first) * row_bytes
        out[token * row_bytes :][:num_bytes] = memory(address, num_bytes)


class ModelMover:
    """The steps of ``CudaMover.move``, with the model in place of the launch."""

    def __init__(self, rows: RowArrays[Array], shared_bytes: int) -> None:
        self.rows = rows
        self.slices = build_slices(rows, lambda array: array.ctypes.data)
        self.shared_bytes = max(shared_bytes, 16 * rows.capacity)

    def move(self, moves: RowMoves) -> None:
        record = np.full(10 * RECORD_WORDS, -99, dtype=np.int32)
        num_words = write_moves(record, moves, self.rows.ragged)
        assert (record[num_words:] == -99).all()
        run_moves(self.slices, record, self.shared_bytes)


class ModelBackend(HostOperations):
    """Host arrays laid out as on a device, moved as a device moves them."""

    name = "model of the kernels"
    on_host = False  # no arena

    def __init__(self, shared_bytes: int = 65536) -> None:
        self.shared_bytes = shared_bytes

    def expose(self, array: Array, dtype: str) -> Array:
        return array

    def mover(self, rows: RowArrays[Array]) -> ModelMover:
        return ModelMover(rows, self.shared_bytes)
