"""What moves, features and positions cost on a CUDA device, beside the methods of engines.

Run it with ``python -m vlbatch.bench.device [--json OUT]``; it takes about 16 GB of device memory.
Wall times are from the call to the end of a synchronisation; bandwidths count bytes read and
written, over the time between two events around many launches. Buffers hold random bytes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import click
import numpy as np
import torch

from vlbatch.backends.cuda import CudaMover
from vlbatch.backends.cuda.records import RECORD_WORDS
from vlbatch.backends.torch_backend import TorchTensorBackend
from vlbatch.backends.torch_inputs import FeatureBuffer, PositionBuffer
from vlbatch.bench.device_timing import (
    Bandwidth,
    Launches,
    bandwidths,
    issue_times,
    raise_clocks,
    wall_times,
)
from vlbatch.bench.harness import Timing, machine
from vlbatch.bench.peers import IndexSelect, PairwiseSwaps
from vlbatch.bench.workload import Workload
from vlbatch.features import FeatureInputs
from vlbatch.features.gather import Segment
from vlbatch.fields import FieldRegistry, FieldStorage, Kind, row
from vlbatch.integrations.fastdeploy.fields import FieldSizes, declare_fields
from vlbatch.order import DECODE, PREFILL, RowMoves, place_rows

NUM_REQS = 256
MAX_MODEL_LEN = 32768
HIDDEN_SIZE = 3584
ROPE_HEAD_DIM = 128


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """All of a run. Times in seconds.

    Attributes:
        machine: what it ran on.
        num_fields: fields whose rows move with the wide ones in slots.
        walls: method -> wall time, with the device's work, at 256 rows of which 128 move.
        issues: method -> time until the call returned.
        bandwidths: one entry a size.
    """

    machine: dict[str, str]
    num_fields: int
    walls: dict[str, Timing]
    issues: dict[str, Timing]
    bandwidths: list[Bandwidth]

    @property
    def ratios(self) -> dict[str, float]:
        """Medians of wall time over that of our move, and of our move over an empty launch."""
        ours = self.walls["move"].median
        peers = {
            name: timing.median / ours
            for name, timing in self.walls.items()
            if name.startswith(("pairwise", "index_select", "torch"))
        }
        return {
            "move / empty launch": ours / self.walls["empty launch"].median,
            "move / empty record": ours / self.walls["empty record"].median,
            **peers,
        }


# -- what is moved ---------------------------------------------------------------------------------
def field_sizes(heavy_in_rows: bool, num_reqs: int = NUM_REQS) -> FieldSizes:
    """FastDeploy's fields at 32k context, with or without the wide ones among the rows."""
    return FieldSizes(
        max_num_seqs=num_reqs,
        max_model_len=MAX_MODEL_LEN,
        max_chunk_tokens=64,
        vocab_size=151936,
        num_draft_tokens=1,
        multimodal=True,
        heavy_residency="rows" if heavy_in_rows else "slots",
    )


def half_of(num_reqs: int) -> RowMoves:
    """Every other row decodes: half of the rows move to bring those in front."""
    classes = np.tile([DECODE, PREFILL], num_reqs // 2)
    return place_rows(classes, np.full(num_reqs, -1))


def make_storage(
    backend: TorchTensorBackend, *, heavy_in_rows: bool, with_rope: bool = False
) -> FieldStorage[torch.Tensor, torch.Tensor]:
    """Arrays of all fields, random, every ragged row full."""
    sizes = field_sizes(heavy_in_rows)
    fields = [f for f in declare_fields(sizes) if f.kind is not Kind.HOST]
    if with_rope:
        fields.append(row("rope_emb", (2, 1, MAX_MODEL_LEN, 1, ROPE_HEAD_DIM // 2), "float32"))
    storage = FieldStorage(FieldRegistry(fields), NUM_REQS, sizes.num_draft_tokens, backend)
    for name, array in storage.arrays.items():
        if storage.registry[name].kind is not Kind.ROW_VALUED:
            array.view(torch.uint8).random_(0, 2 if array.dtype == torch.bool else 256)
    for name, lengths in storage.lengths.items():
        lengths[:] = storage.registry[name].shape[0]
    return storage


def moved_row_bytes(storage: FieldStorage[torch.Tensor, torch.Tensor]) -> int:
    """Bytes of one row over all fields that move."""
    return sum(
        line.bytes_per_request
        for line in storage.memory_report()
        if line.residency == "rows" and storage.registry[line.name].is_per_request
    )


def check_move(storage: FieldStorage[torch.Tensor, torch.Tensor], moves: RowMoves) -> None:
    """Move once, and compare every field with what indexing gives.

    Raises:
        AssertionError: a field differs.
    """
    source = np.arange(NUM_REQS)
    source[moves.destinations] = moves.sources
    names = [
        f.name
        for f in storage.registry.values()
        if f.is_per_request and f.residency == "rows" and f.kind is not Kind.ROW_VALUED
    ]
    index = torch.from_numpy(source).to(storage.arrays[names[0]].device)
    expected = {name: storage.arrays[name][index] for name in names}
    storage.move(moves)
    for name, values in expected.items():
        if not torch.equal(storage.arrays[name].view(torch.uint8), values.view(torch.uint8)):
            raise AssertionError(f"field {name!r} was not moved right")


# -- the parts -------------------------------------------------------------------------------------
def time_moves(
    backend: TorchTensorBackend, *, rounds: int = 1000, peer_rounds: int = 40
) -> tuple[dict[str, Timing], dict[str, Timing], int]:
    """Time a move of half of the rows, wide fields in slots, and the methods of engines.

    Returns:
        Wall times, issue times, number of fields that move.
    """
    moves = half_of(NUM_REQS)
    storage = make_storage(backend, heavy_in_rows=False)
    check_move(storage, moves)
    mover = CudaMover(
        backend.kernels(),
        storage.row_arrays(),
        address=backend.address,
        stream=backend.stream,
    )
    empty = backend.kernels().launch("do_nothing")
    no_ops = backend.kernels().launch(
        "move_rows_by_value",
        np.zeros(1, dtype=np.uint64),
        np.zeros(1, dtype=np.int32),
        np.zeros(RECORD_WORDS, dtype=np.int32),
    )
    num_fields = sum(f.is_per_request and f.residency == "rows" for f in storage.registry.values())
    no_moves = place_rows(np.full(NUM_REQS, DECODE), np.full(NUM_REQS, -1))

    def by_upload() -> None:
        mover.stage(moves)
        mover.launch_staged()

    quick: dict[str, Launches] = {
        "nothing": lambda: None,
        "empty launch": lambda: empty(1, 0, backend.stream()),
        "empty record": lambda: no_ops(num_fields, 0, backend.stream()),
        "move": lambda: mover.move(moves),
        "move by upload": by_upload,
        "nothing to move": lambda: mover.move(no_moves),
    }
    walls = wall_times(quick, rounds)
    issues = issue_times(quick, rounds)

    plain = TorchTensorBackend(str(backend.device), fused=False)
    by_torch = make_storage(plain, heavy_in_rows=False)
    work = Workload(field_sizes(heavy_in_rows=True), Workload.make(NUM_REQS).decode)
    pairwise = PairwiseSwaps(work, backend_tensor)
    select = IndexSelect(work, backend_tensor, lambda t, index: t.index_select(0, index))
    turns = itertools.count(), itertools.count()
    slow: dict[str, Launches] = {
        "torch, one gather a group": lambda: by_torch.move(moves),
        "pairwise swaps with clones": lambda: pairwise.step(work.classes(next(turns[0]))),
        "index_select a field": lambda: select.step(work.classes(next(turns[1]))),
    }
    walls |= wall_times(slow, peer_rounds)
    return walls, issues, num_fields


def backend_tensor(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> torch.Tensor:
    """Tensor on the current device."""
    return torch.tensor(array, device="cuda")


def time_everything_in_rows(backend: TorchTensorBackend) -> list[Bandwidth]:
    """Bandwidth of a move of half of the rows with every wide field in rows."""
    moves = half_of(NUM_REQS)
    storage = make_storage(backend, heavy_in_rows=True, with_rope=True)
    check_move(storage, moves)
    num_bytes = 2 * len(moves.sources) * moved_row_bytes(storage)
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device=backend.device).random_()
    target = torch.empty_like(source)
    return bandwidths(
        {
            "copy": (num_bytes, lambda: target.copy_(source)),
            "move, everything in rows": (num_bytes, lambda: storage.move(moves)),
        },
        "copy",
    )


def feature_steps(
    backend: TorchTensorBackend, num_rows: int, num_items: int, copies: int
) -> list[FeatureInputs]:
    """Steps with items of equal size, text between them, each step with features of its own."""
    rows_each = num_rows // num_items
    tokens = np.arange(num_items * (rows_each + 8)).reshape(num_items, -1)[:, 8:].reshape(-1)
    steps = []
    for _ in range(copies):
        shape = (rows_each, HIDDEN_SIZE)
        features = [
            torch.randn(shape, dtype=torch.bfloat16, device=backend.device)
            for _ in range(num_items)
        ]
        segments = tuple(
            Segment(f"r{i}", 0, "", (0, rows_each), (part,)) for i, part in enumerate(features)
        )
        steps.append(FeatureInputs(tokens, segments, np.zeros(0, dtype=np.int64)))
    return steps


def time_features(
    backend: TorchTensorBackend, megabytes: tuple[int, ...] = (16, 64, 128, 256, 512)
) -> list[Bandwidth]:
    """Bandwidth of the feature gather; features of at least 1 GB take turns, past any cache."""
    found = []
    row_bytes = 2 * HIDDEN_SIZE
    for size in megabytes:
        num_rows = size * 2**20 // row_bytes
        copies = max(2, 1024 // size)
        steps = feature_steps(backend, num_rows, num_items=8, copies=copies)
        num_rows = len(steps[0].tokens)
        buffers = [
            FeatureBuffer(backend, num_rows + 64, HIDDEN_SIZE, torch.bfloat16)
            for _ in range(copies)
        ]
        buffers[0].gather(steps[0])
        expected = torch.cat([torch.as_tensor(part) for part in steps[0].arrays()])
        if not torch.equal(buffers[0].embeds[torch.from_numpy(steps[0].tokens)], expected):
            raise AssertionError("features were not gathered right")
        sources = [torch.randn_like(expected) for _ in range(copies)]
        targets = [b.embeds[: len(expected)] for b in buffers]
        gather = _in_turn([partial(b.gather, s) for b, s in zip(buffers, steps, strict=True)])
        copy = _in_turn([partial(t.copy_, s) for t, s in zip(targets, sources, strict=True)])
        num_bytes = 2 * num_rows * row_bytes
        found += bandwidths(
            {f"copy {size} MB": (num_bytes, copy), f"features {size} MB": (num_bytes, gather)},
            f"copy {size} MB",
            launches=4 * copies,
        )
    return found


def _in_turn(methods: Sequence[Launches]) -> Launches:
    """Call the next method each time, over and over."""
    turns = itertools.cycle(methods)
    return lambda: next(turns)()


def time_inputs(
    backend: TorchTensorBackend, rounds: int = 1000
) -> tuple[dict[str, Timing], dict[str, Timing]]:
    """Wall and issue times of a steady decode step's features, and of decode positions."""
    empty = FeatureInputs(np.zeros(0, dtype=np.int64), (), np.zeros(0, dtype=np.int64))
    buffer = FeatureBuffer(backend, 8192, HIDDEN_SIZE, torch.bfloat16)
    methods: dict[str, Launches] = {"features of a decode step": lambda: buffer.gather(empty)}
    for num_rows in (256, 4096):
        slots, indices = (
            torch.randperm(num_rows, device=backend.device).to(torch.int32) for _ in range(2)
        )
        positions = PositionBuffer(
            backend,
            capacity=num_rows,
            num_axes=3,
            num_tokens=num_rows,
            slot_of_row=slots,
            index_of_row=indices,
            query_start=torch.arange(num_rows + 1, dtype=torch.int32, device=backend.device),
        )
        positions.set_deltas(np.arange(num_rows))
        write = partial(positions.write_decode, num_rows, num_rows)
        write()
        if not torch.equal(positions.positions, (slots + indices).long().expand(3, -1)):
            raise AssertionError("positions were not written right")
        methods[f"positions of {num_rows} decode rows"] = write
    return wall_times(methods, rounds), issue_times(methods, rounds)


def run_device(device: str = "cuda") -> DeviceFigures:
    """Time everything on a device.

    Raises:
        MissingDependency: ``vlbatch[cuda]`` is not installed.
        AssertionError: a result that was about to be timed is wrong.
    """
    backend = TorchTensorBackend(device, fused=True)
    with torch.cuda.device(backend.device):
        raise_clocks(backend.device)
        walls, issues, num_fields = time_moves(backend)
        more_walls, more_issues = time_inputs(backend)
        found = time_features(backend)
        torch.cuda.empty_cache()
        found += time_everything_in_rows(backend)
    about = {**machine(), "device": torch.cuda.get_device_name(backend.device)}
    return DeviceFigures(about, num_fields, walls | more_walls, issues | more_issues, found)


@click.command()
@click.option("--device", default="cuda", help="As torch takes it.")
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write all figures there.")
def main(device: str, out: Path | None) -> None:
    """Print what moves, features and positions cost on a CUDA device."""
    figures = run_device(device)
    for key, value in figures.machine.items():
        click.echo(f"{key}: {value}")
    click.echo(f"{figures.num_fields} fields in rows, {NUM_REQS} rows, half of them moved")
    for title, timings in (("wall", figures.walls), ("until return", figures.issues)):
        click.echo(f"\n{title}, µs{'':24} median      min  rounds")
        for name, timing in timings.items():
            click.echo(
                f"{name:34}{timing.median * 1e6:9.2f}{timing.minimum * 1e6:9.2f}{timing.rounds:8}"
            )
    click.echo("")
    for name, ratio in figures.ratios.items():
        click.echo(f"{name:34}{ratio:9.2f}")
    click.echo(f"\n{'bandwidth':34}       ms  best ms     TB/s  of copy")
    for found in figures.bandwidths:
        click.echo(
            f"{found.name:34}{found.seconds * 1e3:9.3f}{found.best_seconds * 1e3:9.3f}"
            f"{found.bytes_per_second / 1e12:9.3f}{found.share_of_copy:9.3f}"
        )
    if out is not None:
        out.write_text(json.dumps({**asdict(figures), "ratios": figures.ratios}, indent=1))


if __name__ == "__main__":
    main()
