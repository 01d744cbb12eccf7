"""The kernels on raw memory, compiled for the host and on a device; no array library takes part.

Small enough to run under compute-sanitizer, which sees every allocation's exact end.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from device_arrays import rows_to_device, to_device
from random_features import random_step
from random_rows import arrays_of, copy_rows, host_mover, random_moves, random_rows

from vlbatch.backends.cuda import CudaMover, DecodePositions, FeatureGather, Kernels
from vlbatch.errors import InvalidSetting, InvariantBroken
from vlbatch.order import vacate_rows


def default_stream() -> int:
    return 0


# capacity, widest row: few rows, more than one word of each fits shared memory, more than
# arguments hold
SIZES = [(1, 2000), (7, 2000), (60, 2000), (257, 600), (700, 100), (4096, 16)]


@pytest.mark.parametrize("case", range(18))
def test_random_moves(kernels: Kernels, seed: int, case: int) -> None:
    """One launch does what one gather an array does, for arrays and moves of any kind."""
    rng = random.Random(f"{seed} {case}")
    capacity, max_width = SIZES[case % len(SIZES)]
    num_used = rng.randint((capacity + 1) // 2, capacity)
    expected = random_rows(rng, capacity, num_used, max_width)
    rows = rows_to_device(kernels, expected, rng)
    expected = copy_rows(expected)
    mover = CudaMover(kernels, rows, address=lambda a: a.address, stream=default_stream)
    for _ in range(3):
        moves = random_moves(rng, num_used)
        if rng.random() < 0.5:
            mover.move(moves)
        else:
            mover.stage(moves)
            mover.launch_staged()
        host_mover(expected).move(moves)
        num_used = max(num_used - len(moves.vacated), 1)

        for got, wanted in zip(arrays_of(rows), arrays_of(expected), strict=True):
            np.testing.assert_array_equal(
                got.to_host().view(np.uint8), wanted.view(np.uint8), err_msg=f"{wanted.dtype}"
            )
        for got, wanted in zip(rows.ragged, expected.ragged, strict=True):
            np.testing.assert_array_equal(got.lengths, wanted.lengths)


def test_staged_nothing(kernels: Kernels, seed: int) -> None:
    """A staged step without moves changes nothing."""
    rng = random.Random(seed)
    host = random_rows(rng, 9, 9)
    rows = rows_to_device(kernels, host, rng)
    mover = CudaMover(kernels, rows, address=lambda a: a.address, stream=default_stream)
    mover.stage(vacate_rows(0, 0, np.zeros(9, dtype=np.bool_)))
    mover.launch_staged()
    mover.move(vacate_rows(0, 0, np.zeros(9, dtype=np.bool_)))

    for got, wanted in zip(arrays_of(rows), arrays_of(host), strict=True):
        assert got.to_host().tobytes() == wanted.tobytes()


def test_too_many_rows_are_refused(kernels: Kernels, seed: int) -> None:
    """A word of every row must fit the shared memory of a block."""
    rows = random_rows(random.Random(seed), 5, 5)
    too_many = type(rows)(10**6, rows.groups, [], [])
    with pytest.raises(InvalidSetting, match=r"1000000 rows are too many .*capacity"):
        CudaMover(kernels, too_many, address=lambda _: 0, stream=default_stream)


@pytest.mark.parametrize("case", range(14))
def test_random_features(kernels: Kernels, seed: int, case: int) -> None:
    """Every feature row reaches its token, and the rest of the buffer stays as it was."""
    rng = random.Random(f"{seed} {case}")
    row_bytes = (1, 2, 6, 24, 64, 130, 4096)[case % 7]
    step = random_step(rng, 900 if case < 7 else 100, row_bytes)
    out = to_device(kernels, step.out, rng.randrange(3) * row_bytes)
    sources = [to_device(kernels, s, rng.randrange(3) * row_bytes) for s in step.segments]
    gather = FeatureGather(
        kernels,
        out=out.address,
        num_tokens=len(step.out) // row_bytes,
        row_bytes=row_bytes,
        stream=default_stream,
    )
    addresses = [source.address for source in sources]
    if case % 2:
        gather.gather(addresses, step.num_rows, step.tokens)
    else:
        gather.stage(addresses, step.num_rows, step.tokens)
        gather.launch_staged()

    np.testing.assert_array_equal(out.to_host(), step.expected)


def test_features_for_no_token_are_refused(kernels: Kernels) -> None:
    """Rows and tokens must agree in number and lie in the buffer; nothing is launched."""
    out = to_device(kernels, np.zeros(80, np.uint8))
    gather = FeatureGather(
        kernels, out=out.address, num_tokens=10, row_bytes=8, stream=default_stream
    )
    with pytest.raises(InvariantBroken, match="3 feature rows for 2 tokens"):
        gather.gather([out.address], [3], np.array([0, 1]))
    with pytest.raises(InvariantBroken, match=r"tokens in \[9, 11\); expected \[0, 10\)"):
        gather.gather([out.address], [2], np.array([9, 10]))


@pytest.mark.parametrize("num_rows", [1, 5, 300])
def test_decode_positions(kernels: Kernels, seed: int, num_rows: int) -> None:
    """Every token of a row gets index + delta on each axis, every other token 0."""
    rng = np.random.default_rng(seed)
    capacity, num_tokens, num_pads = num_rows + 7, 4 * num_rows + 5, min(num_rows - 1, 2)
    slots = rng.permutation(capacity)[:num_rows].astype(np.int32)
    slots[num_rows - num_pads :] = -1
    counts = rng.integers(1, 5, num_rows)
    counts[num_rows - num_pads :] = 0
    starts = np.cumsum([0, *counts]).astype(np.int32)
    indices = rng.integers(0, 2**31 - 9, num_rows).astype(np.int32)
    deltas = rng.integers(-(2**33), 2**33, capacity)
    expected = np.full((3, num_tokens + 2), -5, dtype=np.int64)
    expected[:, :num_tokens] = 0
    for row in range(num_rows - num_pads):
        for i in range(counts[row]):
            expected[:, starts[row] + i] = int(indices[row]) + i + int(deltas[slots[row]])

    out = to_device(kernels, np.full((3, num_tokens + 2), -5, dtype=np.int64))
    arrays = [to_device(kernels, array) for array in (slots, indices, starts)]
    positions = DecodePositions(
        kernels,
        capacity=capacity,
        num_axes=3,
        out=out.address,
        axis_stride=num_tokens + 2,
        slot_of_row=arrays[0].address,
        index_of_row=arrays[1].address,
        query_start=arrays[2].address,
        stream=default_stream,
    )
    positions.set_deltas(deltas)
    positions.write(num_rows, num_tokens)

    np.testing.assert_array_equal(out.to_host(), expected)
