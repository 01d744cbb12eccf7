"""Host arrays and their copies in device memory, without any array library."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlbatch.backends.cuda import Kernels
from vlbatch.backends.cuda.program import DeviceMemory
from vlbatch.backends.mover import RaggedRows, RowArrays
from vlbatch.fields.layout import Group

Array = np.ndarray[Any, Any]


@dataclass
class DeviceArray:
    """An array at an address; ``memory`` keeps it alive."""

    kernels: Kernels
    memory: DeviceMemory
    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def to_host(self) -> Array:
        """Wait for the device and copy."""
        out = np.empty(self.shape, self.dtype)
        self.kernels.call("cuMemcpyDtoH", out.ctypes.data, self.address, out.nbytes)
        return out


def to_device(kernels: Kernels, array: Array, offset: int = 0) -> DeviceArray:
    """Copy an array to the very end of new device memory, ``offset`` bytes from its start."""
    memory = kernels.allocate(offset + array.nbytes)
    values = np.ascontiguousarray(array)
    kernels.call("cuMemcpyHtoD", memory.address + offset, values.ctypes.data, values.nbytes)
    return DeviceArray(kernels, memory, memory.address + offset, array.shape, array.dtype)


def rows_to_device(
    kernels: Kernels, rows: RowArrays[Array], rng: random.Random
) -> RowArrays[DeviceArray]:
    """Copy all arrays, each to an address that is a multiple of its element size only."""

    def placed(array: Array) -> DeviceArray:
        return to_device(kernels, array, rng.randrange(17) * array.itemsize)

    homes = {g.array.ctypes.data: placed(g.array) for g in rows.groups}
    groups = [Group(homes[g.array.ctypes.data], g.axis, g.default, "rows") for g in rows.groups]
    ragged = []
    for r in rows.ragged:
        array = placed(r.array)
        ragged.append(RaggedRows(array, array, r.width, r.lengths.copy(), r.default))
    row_valued = []
    for array, dtype in rows.row_valued:
        home = homes.get(array.ctypes.data)
        row_valued.append((home or placed(array), dtype))
    return RowArrays(rows.capacity, groups, ragged, row_valued)
