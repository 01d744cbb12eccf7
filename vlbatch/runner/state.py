"""The batch of the reference runner: its declared fields, and a step's inputs built from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vlbatch.backends import NumpyBackend
from vlbatch.batch import InputBatch
from vlbatch.cache import EncoderCache
from vlbatch.errors import InvalidField
from vlbatch.features import FeatureInputs, FeatureSpec, FeatureStore
from vlbatch.fields import Field, ragged, row
from vlbatch.order import DECODE, BatchOrder
from vlbatch.runner.inputs import StepInputs
from vlbatch.runner.settings import RunSettings
from vlbatch.step import VLBatch

HostBatch = VLBatch[npt.NDArray[Any]]  # Any: fields differ in dtype

FEATURE_BYTES = 4
"""Bytes of a feature element; the engines run in float32."""


def declare_fields(settings: RunSettings) -> list[Field]:
    """Fields of the reference runner."""
    max_blocks = -(-settings.max_model_len // settings.block_size)
    return [
        # All known tokens; read by prefill rows only, so they need not be in batch order.
        ragged("token_ids", settings.max_model_len, residency="slots"),
        # What a kernel indexes by row.
        ragged(
            "block_table", max_blocks, "int32",
            default=-1, residency="rows", on_preempt="reset",
        ),
        row("next_token", dtype="int64", on_preempt="reset"),
        row("max_tokens", dtype="int32"),
    ]  # fmt: skip


def moving_fields(settings: RunSettings) -> dict[str, Field]:
    """Declared fields that move with the rows of the batch, by name."""
    fields = declare_fields(settings)
    return {f.name: f for f in fields if f.is_per_request and f.residency == "rows"}


def make_batch(settings: RunSettings, hidden_size: int, tokens_per_second: float) -> HostBatch:
    """Make the state of a run."""
    batch = InputBatch(
        declare_fields(settings),
        backend=NumpyBackend(),
        capacity=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        policy=settings.order,
        stable=settings.stable,
    )
    cache = make_cache(settings, hidden_size)
    features = FeatureStore(
        cache,
        encode_rows=settings.encode_rows,
        spec=FeatureSpec(hidden_size=hidden_size, dtype="float32"),
    )
    return VLBatch(batch, features, family="qwen2_5_vl", tokens_per_second=tokens_per_second)


def make_cache(settings: RunSettings, hidden_size: int) -> EncoderCache:
    """Make the encoder cache; its refusals name the run's own setting.

    Raises:
        InvalidField: the budget holds no feature row.
    """
    row_bytes = hidden_size * FEATURE_BYTES
    if settings.cache_bytes < row_bytes:
        raise InvalidField(
            f"got {settings.cache_bytes} bytes; a feature row of this model has {row_bytes}",
            setting="cache_bytes",
        )
    cache = EncoderCache(max_bytes=settings.cache_bytes, row_bytes=row_bytes)
    cache.setting = "cache_bytes"
    return cache


def step_inputs(
    vl: HostBatch, order: BatchOrder, features: FeatureInputs, positions: npt.NDArray[np.int64]
) -> StepInputs:
    """Read one step's inputs from the fields.

    A row whose chunk reaches its last known token gets logits.
    """
    batch = vl.batch
    num = order.num_reqs
    token_ids = np.repeat(batch["next_token"][:num], order.scheduled)
    for row_number in np.flatnonzero(order.classes != DECODE).tolist():
        start = int(order.computed[row_number])
        stop = start + int(order.scheduled[row_number])
        first = int(order.query_start[row_number])
        slot = int(order.slots[row_number])
        token_ids[first : first + stop - start] = batch["token_ids"][slot, start:stop]
    sampling = sampling_rows(order)
    return StepInputs(
        token_ids=token_ids,
        positions=positions,
        query_start=order.query_start,
        computed=order.computed.astype(np.int32),
        block_tables=batch["block_table"][:num],
        feature_tokens=features.tokens,
        features=features.arrays(),
        logit_tokens=order.query_start[1:][sampling].astype(np.int64) - 1,
    )


def sampling_rows(order: BatchOrder) -> npt.NDArray[np.int64]:
    """Rows whose chunk reaches the last known token: they sample one token."""
    return np.flatnonzero(order.computed + order.scheduled >= order.prompt_lens)
