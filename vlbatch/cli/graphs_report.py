"""What would be captured: sizes, padding, buffers and tile bounds, before anything is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vlbatch.graphs.config import GraphConfig, GraphKind, padded_size
from vlbatch.graphs.tiles import (
    DECODER_TILE_ROWS,
    ENCODER_TILE_ROWS,
    TileShape,
    TileTables,
    max_query_tiles,
)

_ITEM_BYTES = {"int32": 4, "int64": 8, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Buffer:
    """A static buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        count = 1
        for side in self.shape:
            count *= side
        return count * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Padding:
    """What padding costs over some steps.

    Attributes:
        waste: pad tokens over all tokens that captured steps compute; 0 without one.
        eager: share of the steps that fit no graph.
    """

    waste: float
    eager: float


def captured_kinds(config: GraphConfig) -> list[GraphKind]:
    """Kinds with graphs."""
    kinds: tuple[GraphKind, ...] = ("decode", "prefill")
    return [kind for kind in kinds if config.sizes(kind)]


def padding_of(step_tokens: Sequence[int], sizes: Sequence[int]) -> Padding:
    """Padding over steps of so many tokens each."""
    pairs = [(n, padded_size(n, sizes)) for n in step_tokens]
    captured = [(n, padded) for n, padded in pairs if padded is not None]
    computed = sum(padded for _, padded in captured)
    real = sum(n for n, _ in captured)
    return Padding(
        waste=(computed - real) / computed if computed else 0.0,
        eager=1 - len(captured) / len(pairs) if pairs else 0.0,
    )


def step_buffers(config: GraphConfig, shape: TileShape, hidden_size: int) -> list[Buffer]:
    """All inputs of a captured step, for the largest graph.

    Args:
        config: which graphs.
        shape: rows, context, heads and KV blocks.
        hidden_size: of an embedding, bfloat16.
    """
    tokens = max((n for kind in captured_kinds(config) for n in config.sizes(kind)), default=0)
    rows = shape.max_num_seqs
    inputs = [
        Buffer("token_ids", (tokens,), "int64"),
        Buffer("embeddings", (tokens, hidden_size), "bfloat16"),
        Buffer("positions", (3, tokens), "int64"),
        Buffer("kv_slots", (tokens,), "int64"),
        Buffer("query_start", (rows + 1,), "int32"),
        Buffer("seq_lens_encoder", (rows,), "int32"),
        Buffer("seq_lens_decoder", (rows,), "int32"),
        Buffer("seq_lens_this_time", (rows,), "int32"),
        Buffer("block_table", (rows, -(-shape.max_model_len // shape.kv_block)), "int32"),
    ]
    tables = TileTables(shape).buffers()
    return inputs + [Buffer(name, array.shape, "int32") for name, array in tables.items()]


def tile_bounds(config: GraphConfig, shape: TileShape, kind: GraphKind) -> dict[int, int]:
    """Size -> most query tiles of any step of so many tokens."""
    tile_rows = DECODER_TILE_ROWS if kind == "decode" else ENCODER_TILE_ROWS
    return {
        size: max_query_tiles(size, shape.max_num_seqs, shape.group, tile_rows)
        for size in config.sizes(kind)
    }
