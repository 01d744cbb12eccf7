"""Captured steps and tile tables on a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_arrays import DeviceArray, to_device

from vlbatch.backends.cuda import Kernels
from vlbatch.errors import InvariantBroken
from vlbatch.graphs.tiles import TileShape, TileTables
from vlbatch.runner import (
    GraphEngine,
    PromptBuilder,
    Runner,
    RunSettings,
    compare,
    load_requests,
    make_answerer,
    make_drafter,
    make_engine,
)

FIXTURES = Path(__file__).parents[2] / "fixtures"

pytestmark = pytest.mark.gpu


@pytest.fixture
def torch() -> Any:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch


SETTINGS = {
    "tight": {},
    "whole prompts": {
        "chunk": 160, "token_budget": 512, "kv_blocks": 400, "prefill_gate": (4, 0.05),
        "max_num_seqs": 16,
    },
    "drafts": {"speculative": "mtp", "kv_blocks": 60},
}  # fmt: skip


@pytest.mark.parametrize("limits", SETTINGS)
@pytest.mark.parametrize("graph", ["decode", "prefill", "both"])
def test_same_as_eager_under_poison(torch: Any, graph: Any, limits: str) -> None:
    """Captured steps with NaN pads give every request what it gets alone and eagerly."""
    settings = RunSettings(device="cuda", graph=graph, poison=True, **SETTINGS[limits])  # type: ignore[arg-type]  # names and types are those of the table
    model = FIXTURES / "tiny-vl"
    prompts = PromptBuilder(model)
    engine = make_engine("transformers", model, settings)
    assert isinstance(engine, GraphEngine)
    drafter = make_drafter(settings, engine, prompts, model)
    runner = Runner(engine, prompts, settings, drafter=drafter)

    results = runner.run(load_requests(FIXTURES / "requests.jsonl"))

    verified, mismatches = compare(results, make_answerer(engine, prompts, settings))
    assert (len(verified), mismatches) == (24, [])
    assert all(prompts.decode(r.tokens) == r.request.answer for r in results)
    counts = engine.dispatcher.counts
    print(graph, limits, dict(counts), runner.counters)  # noqa: T201 (shown with -s)
    for kind in ("decode", "prefill"):
        assert (counts[kind] > 0) == (graph in (kind, "both")), counts
    assert runner.counters.reorders
    assert runner.counters.condenses


def test_captures_outlive_runs(torch: Any) -> None:
    """Graphs stay right after requests ended and came again, and after buffers were zeroed."""
    settings = RunSettings(device="cuda", graph="both", poison=True)
    model = FIXTURES / "tiny-vl"
    prompts = PromptBuilder(model)
    engine: Any = make_engine("transformers", model, settings)
    requests = load_requests(FIXTURES / "requests.jsonl")
    for turn in (requests, requests[::-1], requests):
        results = Runner(engine, prompts, settings).run(turn)

        assert all(prompts.decode(r.tokens) == r.request.answer for r in results)
        for tensor in engine.eager.static_tensors().values():
            tensor.zero_()
    engine.eager.buffers.positions = engine.eager.buffers.positions.clone()
    with pytest.raises(InvariantBroken, match=r"\['positions'\] moved"):
        Runner(engine, prompts, settings).run(requests)


@pytest.fixture(scope="session")
def tile_kernels(device_kernels: Kernels) -> Kernels:
    from vlbatch.graphs.tiles_cuda import compile_tiles

    return compile_tiles()


def _lengths(rng: np.random.Generator, shape: TileShape) -> list[np.ndarray[Any, Any]]:
    rows = shape.max_num_seqs
    classes = rng.integers(0, 3, rows)  # idle, decode, prefill
    encoder = np.where(classes == 2, rng.integers(1, shape.max_model_len // 2, rows), 0)
    decoder = rng.integers(0, shape.max_model_len // 2, rows)
    this_time = np.where(classes == 1, rng.integers(1, shape.decode_tokens + 1, rows), encoder)
    return [a.astype(np.int32) for a in (encoder, decoder, this_time)]


def _assert_equal(kernels: Kernels, device: Any, host: TileTables, case: object) -> None:
    for name, wanted in host.buffers().items():
        got = np.empty_like(wanted)
        kernels.call("cuMemcpyDtoH", got.ctypes.data, device.addresses[name], got.nbytes)
        np.testing.assert_array_equal(got, wanted, err_msg=f"{case} {name}")


@pytest.mark.parametrize("rows", [1, 7, 256, 300, 1000])
@pytest.mark.parametrize("group", [1, 5, 8])
def test_tiles_equal_numpy(tile_kernels: Kernels, seed: int, rows: int, group: int) -> None:
    """Tables filled in place, step after step, equal the numpy version bit for bit."""
    from vlbatch.graphs.tiles_cuda import DeviceTileTables

    rng = np.random.default_rng([seed, rows, group])
    shape = TileShape(max_num_seqs=rows, max_model_len=1024, group=group, decode_tokens=4)
    arrays = [to_device(tile_kernels, np.zeros(rows, np.int32)) for _ in range(3)]
    addresses = [a.address for a in arrays]
    device = DeviceTileTables(
        tile_kernels, shape, encoder=addresses[0], decoder=addresses[1], this_time=addresses[2],
        stream=lambda: 0,
    )  # fmt: skip
    host = TileTables(shape)
    for number in range(10):
        lengths = _lengths(rng, shape)
        _upload(tile_kernels, arrays, lengths)
        device.fill()
        host.fill(*lengths)

        _assert_equal(tile_kernels, device, host, (seed, rows, group, number))


def test_tiles_in_a_graph(torch: Any, tile_kernels: Kernels, seed: int) -> None:
    """A replay computes the tables of the lengths that are there then."""
    from vlbatch.graphs.tiles_cuda import DeviceTileTables

    rng = np.random.default_rng(seed)
    shape = TileShape(max_num_seqs=64, max_model_len=1024, group=7)
    lengths = [torch.zeros(64, dtype=torch.int32, device="cuda") for _ in range(3)]
    device = DeviceTileTables(
        tile_kernels, shape, encoder=lengths[0].data_ptr(), decoder=lengths[1].data_ptr(),
        this_time=lengths[2].data_ptr(), stream=lambda: torch.cuda.current_stream().cuda_stream,
    )  # fmt: skip
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        device.fill()
    host = TileTables(shape)
    for number in range(20):
        values = _lengths(rng, shape)
        for tensor, value in zip(lengths, values, strict=True):
            tensor.copy_(torch.from_numpy(value))
        graph.replay()
        torch.cuda.synchronize()
        host.fill(*values)

        _assert_equal(tile_kernels, device, host, (seed, number))


def _upload(
    kernels: Kernels, arrays: list[DeviceArray], values: list[np.ndarray[Any, Any]]
) -> None:
    for array, value in zip(arrays, values, strict=True):
        kernels.call("cuMemcpyHtoD", array.address, value.ctypes.data, value.nbytes)
