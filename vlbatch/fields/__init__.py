"""Declared fields and their storage.

Owns: the declarations (name, kind, shape, dtype, default, residency), the arrays behind them, and
moves, clears, resets, snapshots and memory reports derived from the declarations.
Never: knows a field by name, decides an order, holds features, or gives an array a new address.
"""

from vlbatch.fields.spec import (
    Field,
    FieldRegistry,
    Kind,
    batch_global,
    cumulative,
    host,
    packed,
    per_draft,
    ragged,
    row,
    row_valued,
)
from vlbatch.fields.storage import FieldMemory, FieldStorage

__all__ = [
    "Field",
    "FieldMemory",
    "FieldRegistry",
    "FieldStorage",
    "Kind",
    "batch_global",
    "cumulative",
    "host",
    "packed",
    "per_draft",
    "ragged",
    "row",
    "row_valued",
]
