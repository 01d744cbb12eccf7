"""Small ``VLBatch`` objects, an encoder that makes no mistake, and their whole state as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from naive_media import Array, encoded

from vlbatch import (
    BatchOrder,
    EncoderCache,
    EncodeTask,
    FeatureInputs,
    FeatureStore,
    InputBatch,
    NumpyBackend,
    Step,
    VLBatch,
    VlbatchError,
)
from vlbatch.fields import host, ragged, row

Batch = VLBatch[Any]
Delivered = dict[str, list[tuple[int, str, int, int]]]
"""req_id -> (token index in the request, item key, feature row, epoch), in token order."""


def make_batch(
    max_rows: int = 1000,
    *,
    capacity: int = 4,
    max_model_len: int = 64,
    num_drafts: int = 0,
    policy: Any = "split",
    family: str = "qwen2_vl",
    auto_confirm: bool = True,
    **settings: Any,
) -> Batch:
    """A batch with a field that moves, one that stays and an object; ``settings`` of the store."""
    return VLBatch(
        InputBatch(
            [row("tag"), ragged("ids", max_model_len), host("note")],
            backend=NumpyBackend(),
            capacity=capacity,
            max_model_len=max_model_len,
            num_drafts=num_drafts,
            policy=policy,
        ),
        FeatureStore(EncoderCache(max_rows=max_rows), **settings),
        family=family,
        auto_confirm=auto_confirm,
    )


def encode_all(tasks: Sequence[EncodeTask]) -> list[tuple[Array]]:
    """The encoder."""
    return [(encoded(t.key.content, t.placed.num_rows, t.key.epoch),) for t in tasks]


def failing_for(*contents: str) -> Callable[[Sequence[EncodeTask]], list[tuple[Array]]]:
    """An encoder that raises if one of these contents is among its tasks."""

    def encoder(tasks: Sequence[EncodeTask]) -> list[tuple[Array]]:
        bad = [task.key.content for task in tasks if task.key.content in contents]
        if bad:
            raise RuntimeError(f"cannot encode {bad[0]}")
        return encode_all(tasks)

    return encoder


def begun(vl: Batch, **scheduled: int) -> Step:
    """Begin a step and encode what it needs."""
    step = vl.begin(scheduled)
    vl.encode(step, encode_all)
    return step


def run_step(vl: Batch, **scheduled: int) -> tuple[BatchOrder, Delivered]:
    """One whole step."""
    order = vl.arrange(begun(vl, **scheduled))
    got = delivered(order, vl.gather(order))
    vl.complete(order)
    vl.check()
    return order, got


def delivered(order: BatchOrder, inputs: FeatureInputs, shift: int = 0) -> Delivered:
    """Read back what each token of the step got, from nothing but the arrays."""
    got: Delivered = {req_id: [] for req_id in order.req_ids}
    arrays = [np.asarray(array) for array in inputs.arrays()]
    assert sum(len(array) for array in arrays) == len(inputs.tokens)
    tokens = iter(inputs.tokens.tolist())
    for array in arrays:
        for name, feature_row, epoch in array.astype(int).tolist():
            token = next(tokens)
            req_id = order.req_ids[int(order.row_of_token[token])]
            key = name.to_bytes(8, "big").strip(b"\0").decode()
            index = int(order.token_indices[token]) + shift
            got[req_id].append((index, key, feature_row, epoch))
    return {req_id: sorted(tokens_of) for req_id, tokens_of in got.items()}


def state_of(vl: Batch) -> Mapping[str, object]:
    """Everything that a refusal must leave alone, in every part."""
    features, cache, positions = vl.features, vl.features.cache, vl.positions
    return {
        "batch": repr(vl.batch.snapshot()),
        "preempted": {r: vl.batch.known_tokens_of(r) for r in vl.batch.preempted},
        "items": {r: [id(i) for i in features.items_of(r)] for r in features.req_ids},
        "held": {r: dict(request.held) for r, request in features._requests.items()},
        "waiting": list(features._waiting),
        "cache": (cache.digest(), cache.usage, repr(cache.counters), list(cache._freed)),
        "runs": {r: positions.runs_of(r).runs.tolist() for r in positions.req_ids},
        "deltas": positions.delta_of_slot.tolist(),
    }


@contextmanager
def refused(
    vl: Batch,
    error: type[VlbatchError],
    match: str | None = None,
    *,
    req_id: str | None = None,
    setting: str | None = None,
) -> Iterator[None]:
    """Expect exactly this refusal, and every part as it was."""
    before = state_of(vl)
    with pytest.raises(error, match=match) as caught:
        yield
    assert type(caught.value) is error
    assert (caught.value.req_id, caught.value.setting) == (req_id, setting)
    assert state_of(vl) == before
    vl.check()


def run(key: str, token: int, row: int, count: int, epoch: int = 0) -> list[Any]:
    """``count`` consecutive tokens with consecutive rows of one item."""
    return [(token + i, key, row + i, epoch) for i in range(count)]
