"""Random row-resident arrays of odd sizes, and random moves of their rows."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from vlbatch.backends.host import HostOperations
from vlbatch.backends.mover import GroupMover, RaggedRows, RowArrays
from vlbatch.fields.layout import Group
from vlbatch.order import HOLE, RowMoves, place_rows

Array = np.ndarray[Any, Any]

DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
SIGNED = ("int8", "int16", "int32", "int64")
ODD_WIDTHS = (1, 2, 3, 5, 7, 8, 16, 31, 64, 100, 127, 255, 257, 333, 512, 1031)


class HostRows(HostOperations):
    """Host arrays moved by numpy: the oracle."""

    name = "host"

    def expose(self, array: Array, dtype: str) -> Array:
        return array

    def mover(self, rows: RowArrays[Array]) -> GroupMover[Array]:
        return GroupMover(self, rows)


def random_rows(rng: random.Random, capacity: int, num_used: int, max_width: int = 2000) -> Any:
    """Arrays of ``capacity`` rows with random values in ``num_used`` rows and defaults past them.

    Arrays start at any multiple of their element size.
    """
    bits = np.random.default_rng(rng.getrandbits(32))
    widths = [w for w in ODD_WIDTHS if w <= max_width]

    def block(shape: tuple[int, ...], dtype: str) -> Array:
        """Contiguous, at an odd place of a larger block."""
        size = int(np.prod(shape))
        whole = np.zeros(size + 64, dtype=dtype)
        start = rng.randrange(64)
        return whole[start : start + size].reshape(shape)

    groups, ragged, row_valued = [], [], []
    for _ in range(rng.randint(1, 5)):
        dtype = rng.choice(DTYPES)
        num_fields = rng.randint(1, 3)
        array = block((num_fields, capacity, rng.choice(widths)), dtype)
        array[...] = np.frombuffer(bits.bytes(array.nbytes), np.uint8).view(dtype).reshape(
            array.shape
        ) if dtype != "bool" else bits.integers(0, 2, array.shape)  # fmt: skip
        defaults = np.array([rng.randrange(2) for _ in range(num_fields)], dtype=dtype)
        defaults = defaults.reshape(-1, 1, 1)
        array[:, num_used:] = defaults
        groups.append(Group(array, 1, defaults, "rows"))
    for _ in range(rng.randint(0, 2)):
        dtype, width = rng.choice(DTYPES), rng.choice(widths)
        default = np.array(rng.randrange(2), dtype=dtype)
        array = block((capacity, width), dtype)
        array[...] = default
        lengths = np.zeros(capacity, dtype=np.int64)
        for row in range(num_used):
            lengths[row] = rng.choice((0, width, rng.randint(0, width)))
            array[row, : lengths[row]] = bits.integers(0, 2, lengths[row])
        ragged.append(RaggedRows(array, array.reshape(-1), width, lengths, default))
    for _ in range(rng.randint(0, 2)):
        dtype = rng.choice([d for d in SIGNED if np.iinfo(d).max >= capacity])
        array = block((1, capacity, rng.choice(widths[:9])), dtype)
        array[...] = bits.integers(-1, num_used + 1, array.shape)
        array[:, num_used:] = -1
        groups.append(Group(array, 1, np.full((1, 1, 1), -1, dtype), "rows"))
        row_valued.append((array[0], array.dtype))
    if rng.random() < 0.5:
        dtype = rng.choice([d for d in SIGNED if np.iinfo(d).max >= capacity])
        array = block((rng.choice(widths),), dtype)
        array[...] = bits.integers(-1, num_used + 1, array.shape)
        row_valued.append((array, array.dtype))
    return RowArrays(capacity, groups, ragged, row_valued)


def copy_rows(rows: RowArrays[Array]) -> RowArrays[Array]:
    """The same values elsewhere, row-valued arrays again inside their groups."""
    copies = {id(g.array): g.array.copy() for g in rows.groups}
    groups = [Group(copies[id(g.array)], g.axis, g.default, g.residency) for g in rows.groups]
    ragged = []
    for r in rows.ragged:
        array = r.array.copy()
        ragged.append(RaggedRows(array, array.reshape(-1), r.width, r.lengths.copy(), r.default))
    homes = {g.array.ctypes.data: copies[id(g.array)][0] for g in rows.groups}
    row_valued = [
        (homes[array.ctypes.data] if array.ctypes.data in homes else array.copy(), dtype)
        for array, dtype in rows.row_valued
    ]
    return RowArrays(rows.capacity, groups, ragged, row_valued)


def arrays_of(rows: RowArrays[Any]) -> list[Any]:
    """Every array once."""
    whole = [array for array, _ in rows.row_valued if len(np.shape(array)) == 1]
    return [g.array for g in rows.groups] + [r.array for r in rows.ragged] + whole


def random_moves(rng: random.Random, num_rows: int) -> RowMoves:
    """Moves from a random order with holes and newcomers to the next, not none at all."""
    while (moves := _random_moves(rng, num_rows)).is_identity:
        pass
    return moves


def _random_moves(rng: random.Random, num_rows: int) -> RowMoves:
    holes = rng.choice((0.0, 0.1, 0.5, 1.0))
    classes = [HOLE if rng.random() < holes else rng.randrange(4) for _ in range(num_rows)]
    newcomers = [i if rng.random() < 0.2 else -1 for i in range(num_rows)]
    return place_rows(
        np.array(classes, dtype=np.int64),
        np.array(newcomers, dtype=np.int64),
        stable=rng.random() < 0.5,
    )


def host_mover(rows: RowArrays[Array]) -> GroupMover[Array]:
    return GroupMover(HostRows(), rows)
