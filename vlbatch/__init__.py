"""Batch state for vision-language model runners.

Rows, image and video features, and rotary positions of a continuously batched run, kept so that
none can reach the wrong request. Start with ``VLBatch`` (everything together) or with
``InputBatch`` (rows and fields alone); ``docs/`` and the README show both.
"""

from vlbatch import fields
from vlbatch.backends import Backend, NumpyBackend, make_backend
from vlbatch.batch import BatchPlan, BatchSnapshot, InputBatch, ProposerInputBatch
from vlbatch.cache import EncoderCache, EntryKey
from vlbatch.errors import VlbatchError
from vlbatch.features import EncodeTask, FeatureInputs, FeatureSpec, FeatureStore
from vlbatch.items import Item
from vlbatch.order import BatchOrder, RowMoves, SideTable
from vlbatch.positions import PositionRuns, PositionStore, build_runs
from vlbatch.step import Step, VLBatch

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "BatchOrder",
    "BatchPlan",
    "BatchSnapshot",
    "EncodeTask",
    "EncoderCache",
    "EntryKey",
    "FeatureInputs",
    "FeatureSpec",
    "FeatureStore",
    "InputBatch",
    "Item",
    "NumpyBackend",
    "PositionRuns",
    "PositionStore",
    "ProposerInputBatch",
    "RowMoves",
    "SideTable",
    "Step",
    "VLBatch",
    "VlbatchError",
    "build_runs",
    "fields",
    "make_backend",
]
