"""What is timed on a CUDA device: moves of rows, feature gathers, positions.

Wall times are from the call to the end of a synchronisation; bandwidths count bytes read and
written, over the time between two events around many launches. Buffers hold random bytes. Each
method is checked once before it is timed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from vlbatch.backends.cuda import CudaMover
from vlbatch.backends.cuda.records import RECORD_WORDS
from vlbatch.backends.torch_backend import TorchTensorBackend
from vlbatch.backends.torch_inputs import FeatureBuffer, PositionBuffer
from vlbatch.bench.device_timing import Bandwidth, Launches, bandwidths, issue_times, wall_times
from vlbatch.bench.harness import Timing
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


# -- what is moved ---------------------------------------------------------------------------------
def field_sizes(*, heavy_in_rows: bool) -> FieldSizes:
    """FastDeploy's fields at 32k context, with or without the wide ones among the rows."""
    return FieldSizes(
        max_num_seqs=NUM_REQS,
        max_model_len=MAX_MODEL_LEN,
        max_chunk_tokens=64,
        vocab_size=151936,
        num_draft_tokens=1,
        multimodal=True,
        heavy_residency="rows" if heavy_in_rows else "slots",
    )


def half_of_rows() -> RowMoves:
    """Every other row decodes: half of the rows move to bring those in front."""
    classes = np.tile([DECODE, PREFILL], NUM_REQS // 2)
    return place_rows(classes, np.full(NUM_REQS, -1))


def make_storage(
    backend: TorchTensorBackend, *, heavy_in_rows: bool
) -> FieldStorage[torch.Tensor, torch.Tensor]:
    """Arrays of all fields, random, every ragged row full; heavy ones with a table of rope."""
    sizes = field_sizes(heavy_in_rows=heavy_in_rows)
    fields = [f for f in declare_fields(sizes) if f.kind is not Kind.HOST]
    if heavy_in_rows:
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
    # a flat field has several entries a row
    by_row = {name: storage.arrays[name].view(torch.uint8).view(NUM_REQS, -1) for name in names}
    expected = {name: array[index] for name, array in by_row.items()}
    storage.move(moves)
    for name, values in expected.items():
        if not torch.equal(by_row[name], values):
            raise AssertionError(f"field {name!r} was not moved right")


# -- the parts -------------------------------------------------------------------------------------
def time_moves(
    backend: TorchTensorBackend, *, rounds: int = 1000, peer_rounds: int = 40
) -> tuple[dict[str, Timing], dict[str, Timing], int]:
    """Time a move of half of the rows, wide fields in slots, and the methods of engines.

    Returns:
        Wall times, issue times, number of fields that move.
    """
    moves = half_of_rows()
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
    moves = half_of_rows()
    storage = make_storage(backend, heavy_in_rows=True)
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


def time_decode_features(
    backend: TorchTensorBackend, rounds: int = 1000
) -> tuple[dict[str, Timing], dict[str, Timing]]:
    """Wall and issue times of a steady decode step's features: there are none."""
    empty = FeatureInputs(np.zeros(0, dtype=np.int64), (), np.zeros(0, dtype=np.int64))
    buffer = FeatureBuffer(backend, 8192, HIDDEN_SIZE, torch.bfloat16)
    methods: dict[str, Launches] = {"features of a decode step": lambda: buffer.gather(empty)}
    return wall_times(methods, rounds), issue_times(methods, rounds)


def time_positions(
    backend: TorchTensorBackend, rounds: int = 1000
) -> tuple[dict[str, Timing], dict[str, Timing]]:
    """Wall and issue times of positions of decode rows."""
    methods: dict[str, Launches] = {}
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
