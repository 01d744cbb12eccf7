"""Features and positions of a step in torch tensors: on the host's kernels and on a device's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from exposed import to_host

from vlbatch.backends.cuda import Kernels
from vlbatch.errors import FeatureRowsMismatch, InvalidField
from vlbatch.features import FeatureInputs
from vlbatch.features.gather import Segment

torch = pytest.importorskip("torch")
torch_backend = pytest.importorskip("vlbatch.backends.torch_backend")
inputs = pytest.importorskip("vlbatch.backends.torch_inputs")

NO_TOKENS = np.zeros(0, dtype=np.int64)


@pytest.fixture(params=["host", pytest.param("device", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Any:
    """A backend with kernels; on the host its tensors are CPU tensors."""
    if request.param == "device":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        return torch_backend.TorchTensorBackend("cuda", fused=True)
    kernels: Kernels = request.getfixturevalue("host_kernels")
    made = torch_backend.TorchTensorBackend("cpu")
    made._kernels = kernels
    made.stream = lambda: 0
    return made


@pytest.fixture
def device(backend: Any) -> Any:
    return backend.device


def segment(req_id: str, item: int, rows: tuple[int, int], *levels: Any) -> Segment:
    return Segment(req_id, item, "content", rows, levels)


def test_features_reach_their_tokens(backend: Any, device: Any) -> None:
    """Slices of items, empty ones too, reach their tokens; others keep their embedding."""
    buffer = inputs.FeatureBuffer(backend, 9, 5, torch.bfloat16)
    buffer.embeds[2] = 7
    address = buffer.embeds.data_ptr()
    first = torch.randn(6, 5).bfloat16().to(device)
    second = torch.randn(2, 5).bfloat16().to(device)
    other = torch.zeros_like(first)
    segments = (
        segment("a", 0, (1, 4), other, first),
        segment("a", 1, (3, 3), other, first),
        segment("b", 0, (0, 2), other, second),
    )
    tokens = np.array([0, 1, 3, 7, 8])
    buffer.gather(FeatureInputs(tokens, segments, NO_TOKENS), level=1)
    expected = torch.zeros(9, 5, dtype=torch.bfloat16, device=device)
    expected[2] = 7
    expected[tokens] = torch.cat([first[1:4], second])

    assert torch.equal(buffer.embeds, expected)
    assert buffer.embeds.data_ptr() == address


def test_step_without_features(backend: Any) -> None:
    """A decode step leaves the buffer alone."""
    buffer = inputs.FeatureBuffer(backend, 9, 5, torch.float32)
    buffer.embeds.fill_(3)
    buffer.gather(FeatureInputs(NO_TOKENS, (), NO_TOKENS))

    assert (buffer.embeds == 3).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.zeros(2, 5, dtype=torch.float16, device=d),
        lambda d: torch.zeros(2, 4, device=d),
        lambda d: torch.zeros(2, 10, device=d)[:, ::2],
        lambda d: torch.zeros(10, device=d),
        lambda d: torch.zeros(2, 5, device="meta"),
        lambda d: np.zeros((2, 5), np.float32),
    ],
)
def test_features_that_do_not_fit(backend: Any, device: Any, make: Any) -> None:
    """Features of another dtype, width, rank or device, or with gaps, are refused by request."""
    buffer = inputs.FeatureBuffer(backend, 9, 5, torch.float32)
    step = FeatureInputs(np.array([0, 1]), (segment("r", 3, (0, 2), make(device)),), NO_TOKENS)
    with pytest.raises(FeatureRowsMismatch, match=r"request 'r': item 3 has .* conti") as caught:
        buffer.gather(step)
    assert caught.value.req_id == "r"


def test_positions_follow_index_and_delta(backend: Any, device: Any) -> None:
    """Every axis gets index + delta, token after token; pads get 0; nothing is copied at bind."""

    def int32(*values: int) -> Any:
        return torch.tensor(values, dtype=torch.int32, device=device)

    slots, indices = int32(4, 0, -1), int32(10, 20, 0)
    buffer = inputs.PositionBuffer(
        backend, capacity=6, num_axes=3, num_tokens=8,
        slot_of_row=slots, index_of_row=indices, query_start=int32(0, 2, 3, 3),
    )  # fmt: skip
    buffer.set_deltas(np.array([-5, 0, 0, 0, 100, 7], dtype=np.int64))
    buffer.write_decode(num_rows=3, num_tokens=5)
    assert to_host(buffer.positions).tolist() == [[110, 111, 15, 0, 0, 0, 0, 0]] * 3

    indices.add_(1)
    slots[1] = 5
    buffer.set_deltas(np.array([-5, 0, 0, 0, 0, 7], dtype=np.int64))
    buffer.write_decode(num_rows=2, num_tokens=3)
    assert to_host(buffer.positions).tolist() == [[11, 12, 28, 0, 0, 0, 0, 0]] * 3


def test_positions_that_do_not_fit(backend: Any, device: Any) -> None:
    """Arrays of another dtype or size, and counts beyond them, are refused before any launch."""

    def zeros(size: int, dtype: Any = torch.int32, on: Any = device) -> Any:
        return torch.zeros(size, dtype=dtype, device=on)

    arrays = {"slot_of_row": zeros(3), "index_of_row": zeros(3), "query_start": zeros(4)}
    sizes = {"capacity": 6, "num_axes": 3, "num_tokens": 8}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"query_start": zeros(3)}, r"query_start is torch.int32 \(3,\)"),
        ({"slot_of_row": zeros(3, torch.int64)}, "slot_of_row is torch.int64"),
        ({"index_of_row": zeros(3, on="meta")}, "index_of_row is .* on meta; expected 3"),
        ({"index_of_row": zeros(6)[::2]}, "index_of_row is .* expected 3 contiguous"),
    ]
    for changed, message in cases:
        with pytest.raises(InvalidField, match=message):
            inputs.PositionBuffer(backend, **sizes, **{**arrays, **changed})
    buffer = inputs.PositionBuffer(backend, **sizes, **arrays)
    for counts in ((4, 4), (3, 9)):
        with pytest.raises(InvalidField, match=f"got {counts[0]} rows and {counts[1]} tokens"):
            buffer.write_decode(*counts)
