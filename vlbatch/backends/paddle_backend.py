"""Paddle tensors: over host memory (CPU builds), or tensors of any place.

Dangers of Paddle 3.3 that this module is written around; each has a test
- ``view(dtype)`` of a slice reads the wrong bytes: no view here changes the item size.
- DLPack makes uint16 arrays tensors that nearly no kernel takes: bfloat16 comes as int16.
- A row's ``.numpy()`` copies the whole storage: rows are cloned first.
- Index reads and writes are not bounds-checked on the CPU: indices come checked by the planner.
- With ``FLAGS_use_stride_kernel=0`` slices are copies, and writes to indexed slices are lost: what
  needs either is refused. Views are made with ``_slice`` and their address is compared.
- ``out=`` may silently take another shape or dtype: not used.
- Small integers lack some kernels: row numbers are remapped as int64.
"""

from __future__ import annotations

from math import prod

import numpy as np
import paddle

from vlbatch.backends.base import Indices, Layout, pow2_buckets
from vlbatch.backends.cuda import CudaMover, Kernels, is_available
from vlbatch.backends.dtypes import BFLOAT16, HostArray
from vlbatch.backends.host import HostOperations
from vlbatch.backends.mover import GroupMover, Mover, RowArrays
from vlbatch.errors import InvalidSetting, InvariantBroken

_STRIDE_FLAG = "FLAGS_use_stride_kernel"


class PaddleBackend(HostOperations):
    """CPU tensors that share memory with the numpy arrays which the library moves."""

    name = "paddle"

    def expose(self, array: HostArray, dtype: str) -> paddle.Tensor:
        """Give a tensor over the array, bfloat16 by way of int16.

        Raises:
            InvalidSetting: ``FLAGS_use_stride_kernel=0`` rules out bfloat16 fields and the arena.
            InvariantBroken: this Paddle build made a copy.
        """
        if dtype == BFLOAT16 or not array.flags.c_contiguous:
            _check_views("show bfloat16 fields or an arena")
        if dtype == BFLOAT16:
            tensor = paddle.from_dlpack(array.view(np.int16)).view(BFLOAT16)
        else:
            tensor = paddle.from_dlpack(array)
        _check_same(tensor.data_ptr(), self.address(array), f"from_dlpack of a {dtype} array")
        return tensor

    def mover(self, rows: RowArrays[HostArray]) -> GroupMover[HostArray]:
        """Move group by group."""
        return GroupMover(self, rows)


class PaddleTensorBackend:
    """Tensors of one place, moved by Paddle itself.

    Args:
        place: as ``paddle.set_device`` takes it; ``None`` for the current device.

    Raises:
        InvalidSetting: ``FLAGS_use_stride_kernel=0``.
    """

    name = "paddle-tensor"
    on_host = False
    preferred_layout: Layout = "contiguous"

    def __init__(self, place: str | None = None) -> None:
        _check_views("move its own tensors in place")
        self._place = place or paddle.get_device()
        self.fused = self._place.startswith("gpu") and is_available()

    def allocate(self, num_elements: int, dtype: str) -> paddle.Tensor:
        """Allocate one zeroed flat block."""
        return paddle.zeros([num_elements], dtype=dtype).to(self._place)

    def view(self, block: paddle.Tensor, start: int, shape: tuple[int, ...]) -> paddle.Tensor:
        """View part of a block, and make sure that it is a view.

        Raises:
            InvariantBroken: this Paddle build made a copy.
        """
        view = block._slice(start, start + prod(shape)).reshape(shape)  # noqa: SLF001
        expected = block.data_ptr() + start * block.element_size()
        _check_same(view.data_ptr(), expected, f"view {shape} at element {start}")
        return view

    def expose(self, array: paddle.Tensor, dtype: str) -> paddle.Tensor:  # noqa: ARG002
        """Give the tensor itself."""
        return array

    def fill(self, array: paddle.Tensor, value: HostArray) -> None:
        """Set every element to a 0-d value."""
        array[...] = self._tensor(value, array)

    def clear(
        self, array: paddle.Tensor, axis: int, start: int, stop: int, default: HostArray
    ) -> None:
        """Set entries of one axis to a broadcast default."""
        if axis == 0:
            array[start:stop] = self._tensor(default, array)
        else:
            array[:, start:stop] = self._tensor(default, array)

    def write(self, array: paddle.Tensor, start: int, values: HostArray) -> None:
        """Copy host values in along axis 0."""
        array[start : start + len(values)] = self._tensor(values, array)

    def read(self, array: paddle.Tensor, start: int, stop: int) -> HostArray:
        """Copy entries out, and only those."""
        entries: HostArray = array[start:stop].clone().numpy()
        return entries

    def move(
        self, array: paddle.Tensor, axis: int, destinations: Indices, sources: Indices
    ) -> None:
        """Permute along an axis; indexing with a tensor copies all sources first."""
        to, of = paddle.to_tensor(destinations), paddle.to_tensor(sources)
        if axis == 0:
            array[to] = array[of]
        else:
            array[:, to] = array[:, of]

    def move_prefixes(
        self, array: paddle.Tensor, widths: Indices, destinations: Indices, sources: Indices
    ) -> None:
        """Permute valid prefixes, rows of similar width together."""
        taken = [
            (paddle.to_tensor(destinations[m]), array[paddle.to_tensor(sources[m])][:, :width])
            for width, m in pow2_buckets(widths)
        ]
        for to, values in taken:
            array[to, : values.shape[1]] = values

    def remap(self, array: paddle.Tensor, table: Indices) -> None:
        """Look every row number up; what is out of range becomes -1."""
        rows = array.astype("int64")  # small integers lack kernels
        known = (rows >= 0) & (rows < len(table))
        index = paddle.where(known, rows, paddle.full_like(rows, len(table)))
        mapped = paddle.to_tensor(np.append(table, -1))[index.flatten()]
        array[...] = mapped.reshape(array.shape).astype(array.dtype)

    def address(self, array: paddle.Tensor) -> int:
        """First byte of the tensor."""
        return int(array.data_ptr())

    def mover(self, rows: RowArrays[paddle.Tensor]) -> Mover:
        """Move everything in one launch, or group by group."""
        if not self.fused:
            return GroupMover(self, rows)
        return CudaMover(Kernels(), rows, address=self.address, stream=self._stream)

    def _stream(self) -> int:
        """Handle of Paddle's current stream on the place."""
        return int(paddle.device.current_stream(self._place).stream_base.cuda_stream)

    def _tensor(self, values: HostArray, like: paddle.Tensor) -> paddle.Tensor:
        """Host values on the tensor's place and in its dtype (uint16 bits become bfloat16)."""
        tensor = paddle.to_tensor(values, place=self._place)
        if str(tensor.dtype) != str(like.dtype):  # two classes of dtype exist, unequal
            raise InvariantBroken(f"values are {tensor.dtype}, the field is {like.dtype}")
        return tensor


def _check_views(purpose: str) -> None:
    if not paddle.get_flags(_STRIDE_FLAG)[_STRIDE_FLAG]:
        raise InvalidSetting(f"Paddle cannot {purpose} with this flag at 0", setting=_STRIDE_FLAG)


def _check_same(address: int, expected: int, what: str) -> None:
    if address != expected:
        raise InvariantBroken(
            f"{what} has address {address}, expected {expected}: this Paddle build makes a copy"
            " where a view is needed"
        )
