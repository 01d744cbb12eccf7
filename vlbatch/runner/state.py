"""The batch of the reference runner: its declared fields, and a step's inputs built from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vlbatch.backends import NumpyBackend
from vlbatch.batch import InputBatch, ProposerInputBatch, own
from vlbatch.cache import EncoderCache
from vlbatch.errors import InvalidSetting
from vlbatch.features import FeatureInputs, FeatureSpec, FeatureStore
from vlbatch.fields import Field, per_draft, ragged, row
from vlbatch.order import DECODE, BatchOrder
from vlbatch.runner.inputs import StepInputs
from vlbatch.runner.settings import RunSettings
from vlbatch.speculative import logit_tokens, num_drafts
from vlbatch.step import VLBatch

HostBatch = VLBatch[npt.NDArray[Any]]  # Any: fields differ in dtype
DraftBatch = ProposerInputBatch[npt.NDArray[Any]]

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


def make_batch(
    settings: RunSettings, hidden_size: int, tokens_per_second: float, *, lookahead: int = 0
) -> HostBatch:
    """Make the state of a run; steps are confirmed one by one, when their outputs are read.

    Args:
        settings: of the run.
        hidden_size: columns of a feature row.
        tokens_per_second: of video positions.
        lookahead: tokens past a chunk that a drafter reads.
    """
    batch = InputBatch(
        declare_fields(settings),
        backend=NumpyBackend(),
        capacity=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        num_drafts=settings.num_drafts,
        policy=settings.order,
        stable=settings.stable,
    )
    cache = make_cache(settings, hidden_size)
    features = FeatureStore(
        cache,
        encode_rows=settings.encode_rows,
        lookahead=lookahead,
        spec=FeatureSpec(hidden_size=hidden_size, dtype="float32"),
    )
    return VLBatch(
        batch,
        features,
        family="qwen2_5_vl",
        tokens_per_second=tokens_per_second,
        auto_confirm=False,
    )


def make_draft_batch(vl: HostBatch) -> DraftBatch:
    """Make the drafts' fields, on the rows of the batch.

    ``draft_tokens`` holds the newest token and the drafts after it, as a decode computes them.
    """
    fields = [
        own(per_draft("draft_tokens", on_preempt="reset")),
        own(row("num_drafts", dtype="int32", on_preempt="reset")),
    ]
    return ProposerInputBatch(vl.batch, fields, backend=NumpyBackend())


def make_cache(settings: RunSettings, hidden_size: int) -> EncoderCache:
    """Make the encoder cache; its refusals name the run's own setting.

    Raises:
        InvalidSetting: the budget holds no feature row.
    """
    row_bytes = hidden_size * FEATURE_BYTES
    if settings.cache_bytes < row_bytes:
        raise InvalidSetting(
            f"got {settings.cache_bytes} bytes; a feature row of this model has {row_bytes}",
            setting="cache_bytes",
        )
    cache = EncoderCache(max_bytes=settings.cache_bytes, row_bytes=row_bytes)
    cache.setting = "cache_bytes"
    return cache


def step_inputs(
    vl: HostBatch,
    draft: DraftBatch,
    order: BatchOrder,
    features: FeatureInputs,
    positions: npt.NDArray[np.int64],
) -> StepInputs:
    """Read one step's inputs from the fields.

    Drafts and a row whose chunk reaches its last known token get logits.
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
    drafts = num_drafts(order)
    for row_number in np.flatnonzero(drafts).tolist():
        first, count = int(order.query_start[row_number]), 1 + int(drafts[row_number])
        token_ids[first + 1 : first + count] = draft["draft_tokens"][row_number, 1:count]
    return StepInputs(
        token_ids=token_ids,
        positions=positions,
        query_start=order.query_start,
        computed=order.computed.astype(np.int32),
        block_tables=batch["block_table"][:num],
        feature_tokens=features.tokens,
        features=features.arrays(),
        logit_tokens=logit_tokens(order),
        order=order,
    )
