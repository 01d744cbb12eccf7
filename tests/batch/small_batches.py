"""Small batches, and the three calls that make a step."""

from __future__ import annotations

from typing import Any

from vlbatch import Backend, BatchOrder, InputBatch, NumpyBackend
from vlbatch.fields import Field


def make_batch(
    *fields: Field, backend: Backend[Any, Any] | None = None, **settings: Any
) -> InputBatch[Any]:
    """Make a batch of four rows and 32 tokens a request, over numpy, unless told otherwise."""
    chosen = {"capacity": 4, "max_model_len": 32, **settings}
    return InputBatch(fields, backend=backend or NumpyBackend(), **chosen)


def add_all(batch: InputBatch[Any], **prompt_lens: int) -> None:
    """Admit requests of these prompt lengths."""
    for req_id, prompt_len in prompt_lens.items():
        batch.add(req_id, prompt_len=prompt_len)


def step(batch: InputBatch[Any], **scheduled: int) -> BatchOrder:
    """Plan, apply and count a step."""
    order = batch.apply(batch.plan(scheduled))
    batch.advance(order)
    return order
