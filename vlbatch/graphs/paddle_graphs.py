"""CUDA graphs of Paddle behind ``GraphBackend``.

Not run yet: a CPU build has no ``CUDAGraph``, and every other call of ``paddle.device.cuda`` there
raises or crashes. The tests run it against a stand-in that records calls and addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import paddle

from vlbatch.errors import MissingDependency


class _Graph(Protocol):
    def capture_begin(self) -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...


class PaddleGraphs:
    """Graphs made by ``paddle.device.cuda.graphs.CUDAGraph``.

    Args:
        make_graph: makes an empty graph; ``None`` for Paddle's own.

    Raises:
        MissingDependency: this Paddle build has no CUDA.
    """

    def __init__(self, make_graph: Callable[[], _Graph] | None = None) -> None:
        if make_graph is None:
            if not paddle.is_compiled_with_cuda():
                raise MissingDependency(
                    "this Paddle build has no CUDA; take paddlepaddle-gpu 3.x from Paddle's index"
                )
            from paddle.device.cuda.graphs import CUDAGraph

            make_graph = CUDAGraph
        self._make_graph = make_graph

    def capture(self, work: Callable[[], paddle.Tensor]) -> tuple[_Graph, paddle.Tensor]:
        """Record between ``capture_begin`` and ``capture_end``."""
        graph = self._make_graph()
        graph.capture_begin()
        try:
            output = work()
        finally:
            graph.capture_end()
        return graph, output

    def synchronize(self) -> None:
        """Wait for the device; nothing to wait for on the CPU."""
        if paddle.is_compiled_with_cuda():
            paddle.device.synchronize()

    def address(self, buffer: paddle.Tensor) -> int:
        """First byte of a tensor."""
        return int(buffer.data_ptr())

    def reserved_bytes(self) -> int:
        """What Paddle's allocator holds; 0 on the CPU."""
        if not paddle.is_compiled_with_cuda():
            return 0
        return int(paddle.device.cuda.memory_reserved())
