"""torch on a CUDA device, with our kernels and without."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from contract import ArrayContract, FieldContract
from exposed import to_host

torch = pytest.importorskip("torch")
torch_backend = pytest.importorskip("vlbatch.backends.torch_backend")

from vlbatch.backends.cuda import CudaMover, FeatureGather  # noqa: E402 (torch first)
from vlbatch.backends.mover import RowArrays  # noqa: E402
from vlbatch.backends.torch_inputs import PositionBuffer  # noqa: E402
from vlbatch.fields.layout import Group  # noqa: E402
from vlbatch.order import place_rows, vacate_rows  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def fused_backend() -> Any:
    return torch_backend.TorchTensorBackend("cuda", fused=True)


@pytest.fixture(params=["fused", "torch operations"])
def backend(request: pytest.FixtureRequest, fused_backend: Any) -> Any:
    if request.param == "fused":
        return fused_backend
    return torch_backend.TorchTensorBackend("cuda", fused=False)


class TestArrays(ArrayContract):
    """Array operations on the device."""


class TestFields(FieldContract):
    """Fields of every kind on the device, moved by one launch and by torch."""


def some_rows(backend: Any, capacity: int) -> tuple[RowArrays[Any], Any]:
    """One row-resident field, whose rows hold their number."""
    block = backend.allocate(capacity * 3, "int64")
    array = backend.view(block, 0, (1, capacity, 3))
    array.copy_(torch.arange(capacity).view(1, -1, 1).expand(1, -1, 3))
    group = Group(array, 1, np.full((1, 1, 1), -1, np.int64), "rows")
    return RowArrays(capacity, [group], [], []), array


def moved(rows: list[int], moves: Any) -> list[int]:
    """By hand: what a list of row contents becomes."""
    out = list(rows)
    for row in moves.vacated:
        out[row] = -1
    for destination, source in zip(moves.destinations, moves.sources, strict=True):
        out[destination] = rows[source]
    return out


def test_moves_in_a_captured_graph(fused_backend: Any, seed: int) -> None:
    """A captured launch does what was staged before each replay, also if that is nothing."""
    rng = random.Random(seed)
    rows, array = some_rows(fused_backend, 40)
    mover = CudaMover(
        fused_backend.kernels(),
        rows,
        address=fused_backend.address,
        stream=fused_backend.stream,
    )
    mover.stage(vacate_rows(0, 0, np.zeros(40, dtype=np.bool_)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mover.launch_staged()
    expected = list(range(40))
    for step in range(12):
        moves = vacate_rows(0, 0, np.zeros(40, dtype=np.bool_))
        if step % 3:
            classes = np.array([rng.randrange(4) for _ in range(40)])
            moves = place_rows(classes, np.full(40, -1))
        mover.stage(moves)
        graph.replay()
        expected = moved(expected, moves)

        assert array[0, :, 1].tolist() == expected


def test_many_moves_in_flight(fused_backend: Any, seed: int) -> None:
    """No wait between steps: uploads and arguments of earlier ones are not overwritten."""
    rng = random.Random(seed)
    rows, array = some_rows(fused_backend, 600)
    mover = CudaMover(
        fused_backend.kernels(),
        rows,
        address=fused_backend.address,
        stream=fused_backend.stream,
    )
    expected = list(range(600))
    torch.cuda._sleep(20_000_000)  # the device lags behind
    for step in range(50):
        size = 600 if step % 2 else 300  # staged, by value
        moves = place_rows(np.array([rng.randrange(4) for _ in range(size)]), np.full(size, -1))
        mover.move(moves)
        expected = moved(expected, moves)

    assert array[0, :, 2].tolist() == expected


def test_positions_in_a_captured_graph(fused_backend: Any) -> None:
    """A captured launch reads slots, indices and deltas as they are at each replay."""

    def int32(*values: int) -> Any:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    slots, indices = int32(4, 0, -1), int32(10, 20, 0)
    buffer = PositionBuffer(
        fused_backend, capacity=6, num_axes=3, num_tokens=8,
        slot_of_row=slots, index_of_row=indices, query_start=int32(0, 2, 3, 3),
    )  # fmt: skip
    deltas = np.array([-5, 0, 0, 0, 100, 7], dtype=np.int64)
    buffer.set_deltas(deltas)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffer.write_decode(num_rows=3, num_tokens=5)
    graph.replay()
    assert to_host(buffer.positions).tolist() == [[110, 111, 15, 0, 0, 0, 0, 0]] * 3

    indices.add_(1)
    slots[1] = 5
    deltas[4] = 0
    buffer.set_deltas(deltas)
    graph.replay()
    assert to_host(buffer.positions).tolist() == [[11, 12, 28, 0, 0, 0, 0, 0]] * 3


def test_features_in_a_captured_graph(fused_backend: Any) -> None:
    """A captured gather copies what was staged before each replay."""
    buffer = torch.zeros(6, 8, device="cuda")
    source = torch.randn(6, 8, device="cuda")
    gather = FeatureGather(
        fused_backend.kernels(), out=buffer.data_ptr(), num_tokens=6, row_bytes=32,
        stream=fused_backend.stream,
    )  # fmt: skip
    gather.stage([], [], np.zeros(0, dtype=np.int64))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather.launch_staged()
    expected = torch.zeros_like(buffer)
    for tokens in ([1, 2, 4], [], [5, 0]):
        first = source.data_ptr() + 32
        gather.stage(
            [first] if tokens else [],
            [len(tokens)] if tokens else [],
            np.array(tokens, dtype=np.int64),
        )
        graph.replay()
        expected[tokens] = source[1 : 1 + len(tokens)]

        assert torch.equal(buffer, expected)
