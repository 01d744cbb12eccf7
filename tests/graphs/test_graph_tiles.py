"""Tile tables against counting by hand, and their upper bound against every small batch."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

from vlbatch.errors import InvalidSetting
from vlbatch.graphs import TileShape, TileTables, max_query_tiles


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """An array of row lengths."""
    return np.array(values)


def test_worked_decode_values() -> None:
    """Decode rows [1, 1, 0, 1] with a group of 4 have one tile each: ids 0, 1, 3."""
    tables = TileTables(TileShape(max_num_seqs=4, max_model_len=512, group=4))
    tables.fill(ints(0, 0, 0, 0), ints(5, 6, 7, 9), ints(1, 1, 0, 1))

    assert tables.decoder_num_blocks.tolist() == [3]
    assert tables.decoder_batch_ids[:3].tolist() == [0, 1, 3]
    assert tables.encoder_num_blocks_x.tolist() == tables.kv_num_blocks_x.tolist() == [0]


def test_worked_prefill_values() -> None:
    """Prompts of 100 and 20 tokens: 7 + 2 query tiles, and 2 + 1 KV tiles behind a prefix of 10."""
    tables = TileTables(TileShape(max_num_seqs=3, max_model_len=512, group=4))
    tables.fill(ints(100, 0, 20), ints(10, 0, 0), ints(100, 0, 20))

    assert tables.encoder_num_blocks_x.tolist() == [9]
    assert tables.encoder_batch_ids[:9].tolist() == [0] * 7 + [2] * 2
    assert tables.encoder_tile_ids_per_batch[:9].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert tables.kv_num_blocks_x.tolist() == [3]
    assert tables.kv_batch_ids[:3].tolist() == [0, 0, 2]
    assert tables.max_len[:6].tolist() == [100, 100, 10, 110, 0, 110]


def counted(rows: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Batch and tile ids of ``(row, tiles)``, one by one."""
    batch_ids, tile_ids = [], []
    for row, tiles in rows:
        for tile in range(tiles):
            batch_ids.append(row)
            tile_ids.append(tile)
    return batch_ids, tile_ids


def ceil(a: int, b: int) -> int:
    """Count how many times b has to be taken to reach a."""
    count = 0
    while count * b < a:
        count += 1
    return count


def test_random_batches_equal_counting() -> None:
    """In 10,000 batches over one set of buffers the tables equal the count; addresses stay."""
    seed = 7
    rng = np.random.default_rng(seed)
    shapes = [
        TileShape(max_num_seqs=6, max_model_len=256, group=g, kv_block=32, decode_tokens=4)
        for g in (1, 3, 4, 5, 7, 12)
    ]
    all_tables = [TileTables(shape) for shape in shapes]
    before = [{n: b.ctypes.data for n, b in t.buffers().items()} for t in all_tables]
    for number in range(10_000):
        tables = all_tables[number % len(shapes)]
        group, num = tables.shape.group, int(rng.integers(1, 7))
        encoder = rng.integers(0, 100, num) * rng.integers(0, 2, num)
        decoder = rng.integers(0, 150, num)
        decodes = (encoder == 0) * rng.integers(0, 5, num)
        tables.fill(encoder, decoder, np.where(encoder > 0, encoder, decodes))

        rows = range(num)
        decode_rows = [(r, ceil(int(decodes[r]) * group, 16)) for r in rows]
        query_rows = [(r, ceil(int(encoder[r]) * group, 64)) for r in rows]
        kv_rows = [
            (r, ceil(int(encoder[r]) + int(decoder[r]) % 32, 32) if encoder[r] else 0) for r in rows
        ]
        for name, expected in (("decoder", decode_rows), ("encoder", query_rows), ("kv", kv_rows)):
            batch_ids, tile_ids = counted(expected)
            blocks = "decoder_num_blocks" if name == "decoder" else f"{name}_num_blocks_x"
            got = getattr(tables, f"{name}_batch_ids")
            what = (seed, number, name)
            assert int(getattr(tables, blocks)[0]) == len(batch_ids), what
            assert got[: len(batch_ids)].tolist() == batch_ids, what
            got_tiles = getattr(tables, f"{name}_tile_ids_per_batch")
            assert got_tiles[: len(tile_ids)].tolist() == tile_ids, what
    after = [{n: b.ctypes.data for n, b in t.buffers().items()} for t in all_tables]
    assert before == after


def test_stale_tiles_become_no_work() -> None:
    """Tiles of a larger step before are marked -1, so that a graph's spare blocks do nothing."""
    tables = TileTables(TileShape(max_num_seqs=4, max_model_len=256, group=4))
    tables.fill(ints(200, 100), ints(0, 0), ints(200, 100))
    used = int(tables.encoder_num_blocks_x[0])
    tables.fill(ints(64), ints(0), ints(64))

    assert tables.encoder_batch_ids[:used].tolist() == [0] * 4 + [-1] * (used - 4)


@lru_cache
def true_maximum(num_tokens: int, rows: int, group: int, tile_rows: int) -> int:
    """Most tiles over all ways to split the tokens over at most so many rows."""
    if num_tokens == 0:
        return 0
    if rows == 0:
        return -1_000_000
    return max(
        -(-length * group // tile_rows)
        + true_maximum(num_tokens - length, rows - 1, group, tile_rows)
        for length in range(1, num_tokens + 1)
    )


@pytest.mark.parametrize("group", range(1, 17))
def test_bound_is_never_below_the_maximum(group: int) -> None:
    """Over every split of up to 40 tokens in up to 6 rows, no batch has more tiles."""
    for rows in range(1, 7):
        for num_tokens in range(1, 41):
            bound = max_query_tiles(num_tokens, rows, group, 16)
            most = true_maximum(num_tokens, rows, group, 16)
            assert most <= bound <= most + rows, (rows, num_tokens)


def dummy_tiles(num_tokens: int, rows: int, group: int, tile_rows: int) -> int:
    """Tiles of the batch of one long row and single tokens."""
    lengths = [1] * (rows - 1) + [num_tokens - rows + 1]
    return sum(-(-n * group // tile_rows) for n in lengths)


@pytest.mark.parametrize(
    ("group", "rows", "num_tokens", "dummy", "most"),
    [(5, 8, 104, 15, 16), (5, 32, 416, 62, 64), (6, 64, 512, 106, 108), (12, 64, 512, 148, 153)],
)
def test_a_dummy_batch_is_no_bound(
    group: int, rows: int, num_tokens: int, dummy: int, most: int
) -> None:
    """For groups that are no power of two a dummy batch has fewer tiles than a batch can have."""
    assert dummy_tiles(num_tokens, rows, group, 64) == dummy
    assert max_query_tiles(num_tokens, rows, group, 64) >= most


def test_lengths_must_fit_the_kernels() -> None:
    """A length that is no multiple of the KV block is refused with both settings."""
    with pytest.raises(InvalidSetting, match="max_model_len, kv_block"):
        TileShape(max_num_seqs=4, max_model_len=200, group=4)
