"""Prefill and decode graphs.

Owns: capture sizes, the choice of a graph for each step, static buffers, attention tile tables
and the prefill gate.
Never: reallocates a captured buffer, or decides from device memory.
"""

from vlbatch.graphs.config import GraphConfig, GraphKind, automatic_sizes, padded_size
from vlbatch.graphs.dispatch import Dispatch, GraphDispatcher
from vlbatch.graphs.gate import PrefillGate
from vlbatch.graphs.tiles import TileShape, TileTables, max_query_tiles

__all__ = [
    "Dispatch",
    "GraphConfig",
    "GraphDispatcher",
    "GraphKind",
    "PrefillGate",
    "TileShape",
    "TileTables",
    "automatic_sizes",
    "max_query_tiles",
    "padded_size",
]
