"""Capture and replay through a stand-in that records what a framework would be asked to do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from vlbatch.errors import InvariantBroken
from vlbatch.graphs import GraphConfig
from vlbatch.graphs.capture import CapturedGraph, GraphPool

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


class FakeGraph:
    """Repeats the recorded work on the recorded memory."""

    def __init__(self, work: Callable[[], Array]) -> None:
        self._work = work
        self.output = work().copy()

    def replay(self) -> None:
        np.copyto(self.output, self._work())


class FakeBackend:
    """Captures by keeping the work."""

    def __init__(self) -> None:
        self.captured: list[int] = []

    def capture(self, work: Callable[[], Array]) -> tuple[CapturedGraph, Array]:
        graph = FakeGraph(work)
        self.captured.append(len(graph.output))
        return graph, graph.output

    def synchronize(self) -> None:
        """Nothing runs in the background."""

    def address(self, buffer: Array) -> int:
        return buffer.ctypes.data

    def reserved_bytes(self) -> int:
        return 0


def make(check_every: int = 1) -> tuple[GraphPool[Array], FakeBackend, dict[str, Array], list[int]]:
    """Pool over one buffer whose output is twice the input; and the sizes that were run."""
    buffers: dict[str, Array] = {"x": np.zeros(8)}
    runs: list[int] = []

    def run(num_tokens: int) -> Array:
        runs.append(num_tokens)
        return buffers["x"][:num_tokens] * 2

    config = GraphConfig(
        max_num_seqs=4, prefill_graphs=True, max_capture_shape_prefill=8, num_of_warmups=2
    )
    backend = FakeBackend()
    pool = GraphPool(config, backend, lambda: buffers, run, check_every=check_every)
    return pool, backend, buffers, runs


def test_largest_first_with_warmups() -> None:
    """Sizes of both kinds are captured from the largest down, each after its warm-ups."""
    pool, backend, _, runs = make()
    reports = pool.capture_all()

    assert backend.captured == [8, 4, 4, 2, 2, 1, 1]
    assert [report.num_tokens for report in reports] == backend.captured
    assert runs[:3] == [8, 8, 8]  # two warm-ups and the capture


def test_replay_reads_the_buffers_of_now() -> None:
    """A replay computes on what is in the buffers then, not on what was there at capture."""
    pool, _, buffers, _ = make()
    pool.capture_all()
    buffers["x"][:2] = [3, 4]

    assert pool.replay("decode", 2).tolist() == [6, 8]


def test_moved_buffer_is_caught() -> None:
    """A buffer with another address than at capture is named, before anything is replayed."""
    pool, _, buffers, _ = make()
    pool.capture_all()
    pool.replay("decode", 1)
    buffers["x"] = buffers["x"].copy()

    with pytest.raises(InvariantBroken, match=r"\['x'\] moved"):
        pool.replay("decode", 1)


def test_sampled_check() -> None:
    """With check_every=3 a moved buffer is caught at the third replay at the latest."""
    pool, _, buffers, _ = make(check_every=3)
    pool.capture_all()
    pool.replay("decode", 1)
    buffers["x"] = buffers["x"].copy()
    pool.replay("decode", 1)
    pool.replay("decode", 1)

    with pytest.raises(InvariantBroken, match="moved"):
        pool.replay("decode", 1)


def test_unknown_graph() -> None:
    """Replaying a size that was not captured is an error with kind and size."""
    pool, _, _, _ = make()
    pool.capture_all()

    with pytest.raises(InvariantBroken, match="no prefill graph of 3 tokens"):
        pool.replay("prefill", 3)


def test_paddle_interface() -> None:
    """Paddle's graphs are begun, ended and replayed in order, also when the work raises."""
    pytest.importorskip("paddle")
    from vlbatch.graphs.paddle_graphs import PaddleGraphs

    calls: list[str] = []

    class Recorder:
        def capture_begin(self) -> None:
            calls.append("begin")

        def capture_end(self) -> None:
            calls.append("end")

        def replay(self) -> None:
            calls.append("replay")

    import paddle

    tensor = paddle.zeros([2])
    graphs = PaddleGraphs(Recorder)
    graph, output = graphs.capture(lambda: tensor)
    graph.replay()
    assert (calls, output is tensor) == (["begin", "end", "replay"], True)
    assert graphs.address(tensor) == tensor.data_ptr()

    def fails() -> object:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        graphs.capture(fails)
    assert calls[3:] == ["begin", "end"]
