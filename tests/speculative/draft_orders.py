"""Orders of steps with drafts, made by a batch, and what they hold in plain lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlbatch import BatchOrder, InputBatch, NumpyBackend

Row = tuple[int, int, int]
"""Prompt length, computed, scheduled."""


def order_of(rows: Mapping[str, Row], *, num_drafts: int = 4, policy: Any = "split") -> BatchOrder:
    """The order of a step in which each request computes so many tokens."""
    batch: InputBatch[Any] = InputBatch(
        [],
        backend=NumpyBackend(),
        capacity=len(rows),
        max_model_len=1000,
        num_drafts=num_drafts,
        policy=policy,
        stable=True,
    )
    for req_id, (prompt_len, computed, _) in rows.items():
        batch.add(req_id, prompt_len=prompt_len)
        slot = batch.slot_of(req_id)
        batch.progress.computed[slot] = batch.progress.confirmed[slot] = computed
    return batch.apply(batch.plan({req_id: n for req_id, (*_, n) in rows.items()}))
