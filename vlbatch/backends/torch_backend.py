"""torch tensors: over host memory (CPU), or tensors of any device.

On a CUDA device with ``vlbatch[cuda]`` installed all rows move in one launch; elsewhere torch
moves them, one gather a group.
"""

from __future__ import annotations

from math import prod
from typing import cast

import numpy as np
import torch

from vlbatch.backends.base import Indices, Layout, pow2_buckets
from vlbatch.backends.cuda import CudaMover, Kernels, is_available
from vlbatch.backends.dtypes import BFLOAT16, HostArray
from vlbatch.backends.host import HostOperations
from vlbatch.backends.mover import GroupMover, Mover, RowArrays
from vlbatch.errors import InvalidSetting, MissingDependency


class TorchBackend(HostOperations):
    """CPU tensors that share memory with the numpy arrays which the library moves."""

    name = "torch"

    def expose(self, array: HostArray, dtype: str) -> torch.Tensor:
        """Give a tensor over the array."""
        return _from_host(array, dtype == BFLOAT16)

    def mover(self, rows: RowArrays[HostArray]) -> GroupMover[HostArray]:
        """Move group by group."""
        return GroupMover(self, rows)


class TorchTensorBackend:
    """Tensors of one device.

    Host values are copied to the device without waiting for it; reading waits.

    Args:
        device: as torch takes it; ``None`` for the current CUDA device, or the CPU without one.
        fused: move rows by one launch of our own kernel; ``None`` where that is possible.

    Attributes:
        device: where the tensors are.
        fused: whether rows move by one launch.

    Raises:
        MissingDependency: ``fused`` is asked for without ``vlbatch[cuda]``.
        InvalidSetting: ``fused`` is asked for on a device without CUDA.
    """

    name = "torch-tensor"
    on_host = False
    preferred_layout: Layout = "contiguous"

    def __init__(self, device: str | None = None, *, fused: bool | None = None) -> None:
        self.device = _resolve(device)
        has_cuda = self.device.type == "cuda" and torch.version.cuda is not None
        if fused and not has_cuda:
            raise InvalidSetting(f"got device {self.device}; expected a CUDA one", setting="fused")
        if fused and not is_available():
            raise MissingDependency("fused moves need cuda-core; install vlbatch[cuda]")
        self.fused = has_cuda and is_available() if fused is None else fused
        self._kernels: Kernels | None = None

    def allocate(self, num_elements: int, dtype: str) -> torch.Tensor:
        """Allocate one zeroed flat block."""
        return torch.zeros(num_elements, dtype=getattr(torch, dtype), device=self.device)

    def view(self, block: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Contiguous view of part of a block."""
        return block[start : start + prod(shape)].view(shape)

    def expose(self, array: torch.Tensor, dtype: str) -> torch.Tensor:  # noqa: ARG002 (protocol)
        """Give the tensor itself."""
        return array

    def fill(self, array: torch.Tensor, value: HostArray) -> None:
        """Set every element to a 0-d value."""
        array.copy_(self._tensor(value, array), non_blocking=True)

    def clear(
        self, array: torch.Tensor, axis: int, start: int, stop: int, default: HostArray
    ) -> None:
        """Set entries of one axis to a broadcast default."""
        array.narrow(axis, start, stop - start).copy_(self._tensor(default, array))

    def write(self, array: torch.Tensor, start: int, values: HostArray) -> None:
        """Copy host values in along axis 0."""
        array[start : start + len(values)] = self._tensor(values, array)

    def read(self, array: torch.Tensor, start: int, stop: int) -> HostArray:
        """Copy entries out."""
        entries = array[start:stop].to("cpu", copy=True)
        if entries.dtype == torch.bfloat16:
            return cast("HostArray", entries.view(torch.int16).numpy().view(np.uint16))
        return cast("HostArray", entries.numpy())

    def move(self, array: torch.Tensor, axis: int, destinations: Indices, sources: Indices) -> None:
        """Permute along an axis: one gather of all sources, one scatter."""
        taken = array.index_select(axis, self._indices(sources))
        array.index_copy_(axis, self._indices(destinations), taken)

    def move_prefixes(
        self, array: torch.Tensor, widths: Indices, destinations: Indices, sources: Indices
    ) -> None:
        """Permute valid prefixes, rows of similar width together."""
        taken = [
            (
                self._indices(destinations[m]),
                array[:, :width].index_select(0, self._indices(sources[m])),
            )
            for width, m in pow2_buckets(widths)
        ]
        for to, values in taken:
            array[:, : values.shape[1]].index_copy_(0, to, values)

    def remap(self, array: torch.Tensor, table: Indices) -> None:
        """Look every row number up; what is out of range becomes -1."""
        rows = array.to(torch.int64)
        known = (rows >= 0) & (rows < len(table))
        index = torch.where(known, rows, len(table))
        array.copy_(self._indices(np.append(table, -1))[index])

    def address(self, array: torch.Tensor) -> int:
        """First byte of the tensor."""
        return int(array.data_ptr())

    def mover(self, rows: RowArrays[torch.Tensor]) -> Mover:
        """Move everything in one launch, or group by group."""
        if not self.fused:
            return GroupMover(self, rows)
        return CudaMover(self.kernels(), rows, address=self.address, stream=self.stream)

    def kernels(self) -> Kernels:
        """Our kernels, compiled at the first call.

        Raises:
            MissingDependency: ``vlbatch[cuda]`` is not installed.
        """
        if self._kernels is None:
            with torch.cuda.device(self.device):
                torch.cuda.current_stream().synchronize()  # makes the context
                self._kernels = Kernels()
        return self._kernels

    def stream(self) -> int:
        """Handle of torch's current stream on the device."""
        # the public way makes a Stream object, which takes longer than half a launch
        return int(torch._C._cuda_getCurrentRawStream(self.device.index))  # noqa: SLF001 (see above)

    def _tensor(self, values: HostArray, like: torch.Tensor) -> torch.Tensor:
        """Host values on the device, in the dtype of ``like`` (uint16 bits become bfloat16)."""
        tensor = _from_host(np.array(values, order="C"), like.dtype == torch.bfloat16)
        # Pageable memory is read before the call returns, so it can be reused at once.
        return tensor.to(self.device, non_blocking=True)

    def _indices(self, indices: Indices) -> torch.Tensor:
        return torch.from_numpy(indices.copy()).to(self.device, non_blocking=True)


def _from_host(array: HostArray, is_bfloat16: bool) -> torch.Tensor:
    """Tensor over a numpy array; torch knows no uint16 well, so bfloat16 comes by int16."""
    if is_bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _resolve(device: str | None) -> torch.device:
    """A device with its index."""
    found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found
