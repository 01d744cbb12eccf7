"""Attention tile tables: which block of a kernel works on which rows of which request.

A kernel with a grid of ``num_blocks`` runs block ``x`` on sequence ``batch_ids[x]``, tile
``tile_ids[x]`` of it; a batch id of -1 means: nothing to do. Shapes and rules are those of the
append-attention of FastDeploy. Everything is written in place into buffers that are allocated
once; this is the numpy version, which the CUDA one must equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt

from vlbatch.errors import InvalidField, InvalidSetting

Ints = npt.NDArray[np.int32]
Lengths = npt.NDArray[np.int32] | npt.NDArray[np.int64]

ENCODER_TILE_ROWS = 64
"""Query rows (query heads of a group count each) that one tile of a prefill covers."""

DECODER_TILE_ROWS = 16
"""The same for decodes."""

_DECODER_SPLITS = 1024
"""Chunks of the KV sequence that a decode may be split into, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """What decides the tables' sizes.

    Attributes:
        max_num_seqs: rows.
        max_model_len: tokens of a request; a multiple of ``kv_block`` and of 64.
        group: query heads a KV head.
        kv_block: tokens a KV block.
        decode_tokens: tokens of a decoding request in one step.

    Raises:
        InvalidSetting: a length that is no multiple, naming both settings.
    """

    max_num_seqs: int
    max_model_len: int
    group: int
    kv_block: int = 64
    decode_tokens: int = 1

    def __post_init__(self) -> None:
        """Check what the kernels take for granted."""
        for name in ("max_num_seqs", "max_model_len", "group", "kv_block", "decode_tokens"):
            if getattr(self, name) < 1:
                raise InvalidSetting(f"got {getattr(self, name)}; expected >= 1", setting=name)
        for name, unit in (("kv_block", self.kv_block), ("64", ENCODER_TILE_ROWS)):
            if self.max_model_len % unit:
                raise InvalidSetting(
                    f"{self.max_model_len} is no multiple of {name} = {unit}",
                    setting="max_model_len, kv_block",
                )


class TileTables:
    """The buffers, at fixed addresses, and ``fill``.

    Attributes:
        decoder_batch_ids, decoder_tile_ids_per_batch: int32, decode rows.
        decoder_num_blocks: int32 ``[1]``.
        encoder_batch_ids, encoder_tile_ids_per_batch: int32, query tiles of prefill rows.
        encoder_num_blocks_x: int32 ``[1]``.
        kv_batch_ids, kv_tile_ids_per_batch: int32, KV tiles of prefill rows.
        kv_num_blocks_x: int32 ``[1]``.
        max_len: int32 ``[9]``, six used: largest this-time, encoder, decoder, decoder + this-time
            of rows that compute, decoder of pure decodes, this-time + decoder of rows with a
            prefix.
        decoder_chunk_size: int32 ``[1]``.
    """

    def __init__(self, shape: TileShape) -> None:
        self.shape = shape
        rows = shape.max_num_seqs
        per_decode = -(-shape.decode_tokens * shape.group // DECODER_TILE_ROWS)
        decoder = _DECODER_SPLITS * rows * per_decode
        encoder = rows * (shape.max_model_len * shape.group // ENCODER_TILE_ROWS)
        kv = rows * (shape.max_model_len // shape.kv_block)
        self.decoder_batch_ids: Ints = np.zeros(decoder, dtype=np.int32)
        self.decoder_tile_ids_per_batch: Ints = np.zeros(decoder, dtype=np.int32)
        self.decoder_num_blocks: Ints = np.zeros(1, dtype=np.int32)
        self.decoder_chunk_size: Ints = np.full(1, 64, dtype=np.int32)
        self.encoder_batch_ids: Ints = np.zeros(encoder, dtype=np.int32)
        self.encoder_tile_ids_per_batch: Ints = np.zeros(encoder, dtype=np.int32)
        self.encoder_num_blocks_x: Ints = np.zeros(1, dtype=np.int32)
        self.kv_batch_ids: Ints = np.zeros(kv, dtype=np.int32)
        self.kv_tile_ids_per_batch: Ints = np.zeros(kv, dtype=np.int32)
        self.kv_num_blocks_x: Ints = np.zeros(1, dtype=np.int32)
        self.max_len: Ints = np.zeros(9, dtype=np.int32)

    def buffers(self) -> dict[str, Ints]:
        """Name -> array."""
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}

    def fill(self, encoder: Lengths, decoder: Lengths, this_time: Lengths) -> None:
        """Write the tables of one step, in place.

        Args:
            encoder: int ``[rows]`` prompt tokens computed in this step, 0 for decodes.
            decoder: int ``[rows]`` tokens in the KV cache before this step.
            this_time: int ``[rows]`` tokens computed in this step.
        """
        decodes = (encoder == 0) & (this_time > 0)
        prefills = encoder > 0
        active = this_time > 0
        group = self.shape.group
        self.max_len[:6] = [
            this_time.max(initial=0),
            encoder.max(initial=0),
            decoder.max(initial=0),
            (decoder + this_time)[active].max(initial=0),
            decoder[encoder == 0].max(initial=0),
            (decoder + this_time)[decoder > 0].max(initial=0),
        ]
        queries = np.where(decodes, -(-this_time.astype(np.int64) * group // DECODER_TILE_ROWS), 0)
        _write(self.decoder_batch_ids, self.decoder_tile_ids_per_batch,
               self.decoder_num_blocks, queries)  # fmt: skip
        queries = np.where(prefills, -(-encoder.astype(np.int64) * group // ENCODER_TILE_ROWS), 0)
        _write(self.encoder_batch_ids, self.encoder_tile_ids_per_batch,
               self.encoder_num_blocks_x, queries)  # fmt: skip
        block = self.shape.kv_block
        tiles = np.where(prefills, -(-(encoder + decoder % block) // block), 0)
        _write(self.kv_batch_ids, self.kv_tile_ids_per_batch, self.kv_num_blocks_x, tiles)


def _write(batch_ids: Ints, tile_ids: Ints, num_blocks: Ints, tiles: npt.NDArray[np.int64]) -> None:
    """Pack ``tiles[row]`` tiles of each row, in row order; everything behind is no work."""
    total = int(tiles.sum())
    if total > len(batch_ids):
        raise InvalidField(
            f"a step has {total} tiles; the table holds {len(batch_ids)}",
            setting="max_num_seqs, max_model_len",
        )
    used = max(int(num_blocks[0]), total)
    batch_ids[total:used] = -1
    tile_ids[total:used] = 0
    batch_ids[:total] = np.repeat(np.arange(len(tiles)), tiles)
    starts = np.cumsum(tiles) - tiles
    tile_ids[:total] = np.arange(total) - np.repeat(starts, tiles)
    num_blocks[0] = total


def max_query_tiles(num_tokens: int, max_num_seqs: int, group: int, tile_rows: int) -> int:
    """Upper bound of the query tiles of any batch of ``num_tokens`` in at most that many rows.

    A row of ``n`` tokens has ``ceil(n * group / tile_rows)`` tiles. ``n * group`` is a multiple of
    ``gcd(group, tile_rows)``, so rounding up adds at most ``(tile_rows - gcd) / tile_rows`` a row.
    A dummy batch of one long row and single tokens is no bound unless ``group`` is a power of 2.
    """
    rows = min(num_tokens, max_num_seqs)
    slack = tile_rows - gcd(group, tile_rows)
    return (num_tokens * group + rows * slack) // tile_rows
