"""Batch order: which request is in which row.

Owns: where rows go (``place_rows``, a pure function), the immutable ``BatchOrder`` and ``RowMoves``
of a step, the way back from outputs by row to outputs by request or slot, and ``SideTable``, a list
that follows the rows.
Never: reads device memory to decide an order, touches a field, or knows who is in the batch.
"""

from vlbatch.order.batch_order import BatchOrder, Regions, Scheduled
from vlbatch.order.moves import (
    DECODE,
    EXTEND,
    HOLE,
    IDLE,
    PREFILL,
    Follower,
    IntArray,
    OrderPolicy,
    RowMoves,
    SideTable,
    place_rows,
    stay_rows,
    swap_rows,
    vacate_rows,
)
from vlbatch.order.restore import outputs_by_slot, sums_by_slot

__all__ = [
    "DECODE",
    "EXTEND",
    "HOLE",
    "IDLE",
    "PREFILL",
    "BatchOrder",
    "Follower",
    "IntArray",
    "OrderPolicy",
    "Regions",
    "RowMoves",
    "Scheduled",
    "SideTable",
    "outputs_by_slot",
    "place_rows",
    "stay_rows",
    "sums_by_slot",
    "swap_rows",
    "vacate_rows",
]
