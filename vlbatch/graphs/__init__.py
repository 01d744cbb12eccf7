"""Prefill and decode graphs.

Owns: capture sizes, the choice of a graph for each step, capture and replay over static buffers,
attention tile tables.
Never: reallocates a captured buffer, or decides from device memory.
"""

from vlbatch.graphs.config import GraphConfig, GraphKind, automatic_sizes, padded_size
from vlbatch.graphs.dispatch import Dispatch, GraphDispatcher
from vlbatch.graphs.tiles import TileShape, TileTables, max_query_tiles

__all__ = [
    "Dispatch",
    "GraphConfig",
    "GraphDispatcher",
    "GraphKind",
    "TileShape",
    "TileTables",
    "automatic_sizes",
    "max_query_tiles",
    "padded_size",
]
