"""CUDA graphs of torch behind ``GraphBackend``."""

from __future__ import annotations

from collections.abc import Callable

import torch


class TorchGraphs:
    """All graphs share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(
        self, work: Callable[[], torch.Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Record on a side stream, as torch requires."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = work()
        return graph, output

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def address(self, buffer: torch.Tensor) -> int:
        """First byte of a tensor."""
        return int(buffer.data_ptr())

    def reserved_bytes(self) -> int:
        """What torch's allocator holds, pools of graphs included."""
        return int(torch.cuda.memory_reserved())
