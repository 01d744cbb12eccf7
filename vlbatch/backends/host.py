"""Host memory: numpy arrays do the work; other libraries see the same memory."""

from __future__ import annotations

from math import prod

import numpy as np

from vlbatch.backends.base import Indices, Layout, pow2_buckets
from vlbatch.backends.dtypes import STORED_AS, HostArray
from vlbatch.backends.mover import GroupMover, RowArrays


class HostOperations:
    """Every operation of ``Backend`` but ``expose`` and ``mover``, on numpy arrays."""

    on_host = True
    preferred_layout: Layout = "contiguous"

    def allocate(self, num_elements: int, dtype: str) -> HostArray:
        """Allocate one zeroed flat block."""
        return np.zeros(num_elements, dtype=STORED_AS[dtype])

    def view(self, block: HostArray, start: int, shape: tuple[int, ...]) -> HostArray:
        """Contiguous view of part of a block."""
        return block[start : start + prod(shape)].reshape(shape)

    def fill(self, array: HostArray, value: HostArray) -> None:
        """Set every element to a 0-d value."""
        array[...] = value

    def clear(self, array: HostArray, axis: int, start: int, stop: int, default: HostArray) -> None:
        """Set entries of one axis to a broadcast default."""
        if axis == 0:
            array[start:stop] = default
        else:
            array[:, start:stop] = default

    def write(self, array: HostArray, start: int, values: HostArray) -> None:
        """Copy host values in along axis 0."""
        array[start : start + len(values)] = values

    def read(self, array: HostArray, start: int, stop: int) -> HostArray:
        """Copy entries out."""
        return array[start:stop].copy()

    def move(self, array: HostArray, axis: int, destinations: Indices, sources: Indices) -> None:
        """Permute along an axis; fancy indexing on the right reads all sources first."""
        if axis == 0:
            array[destinations] = array[sources]
        else:
            array[:, destinations] = array[:, sources]

    def move_prefixes(
        self, array: HostArray, widths: Indices, destinations: Indices, sources: Indices
    ) -> None:
        """Permute valid prefixes, rows of similar width together."""
        taken = [
            (members, array[sources[members], :width]) for width, members in pow2_buckets(widths)
        ]
        for members, values in taken:
            array[destinations[members], : values.shape[1]] = values

    def remap(self, array: HostArray, table: Indices) -> None:
        """Look every row number up; what is out of range becomes -1."""
        padded = np.full(len(table) + 2, -1, dtype=array.dtype)
        padded[1:-1] = table  # so that what is out of range, clipped, finds a -1
        padded.take(np.add(array, 1, dtype=np.int64), mode="clip", out=array)

    def address(self, array: HostArray) -> int:
        """First byte of the array."""
        return int(array.__array_interface__["data"][0])


class NumpyBackend(HostOperations):
    """numpy arrays, small fields interleaved in an arena."""

    name = "numpy"
    preferred_layout: Layout = "arena"

    def expose(self, array: HostArray, dtype: str) -> HostArray:  # noqa: ARG002 (protocol)
        """Give the array itself; bfloat16 fields show their uint16 bits."""
        return array

    def mover(self, rows: RowArrays[HostArray]) -> GroupMover[HostArray]:
        """Move group by group."""
        return GroupMover(self, rows)
