"""The whole state of an ``InputBatch`` as plain data, to show that a refusal changed nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from exposed import to_host

from vlbatch import InputBatch, VlbatchError
from vlbatch.fields import Kind


def state_of(batch: InputBatch[Any]) -> dict[str, Any]:
    """Everything that a verb could have changed, unused rows and slots included."""
    registry = batch.registry
    hosts = [name for name, field in registry.items() if field.kind is Kind.HOST]
    ragged = [name for name, field in registry.items() if field.kind is Kind.RAGGED]
    live = batch.req_ids
    return {
        "rows": batch.rows,
        "slots": {r: batch.slot_of(r) for r in live},
        "row_of": {r: batch.row_of(r) for r in live},
        "progress": {r: batch.progress.counts(batch.slot_of(r)) for r in live},
        "known": {r: batch.known_tokens_of(r) for r in (*live, *batch.preempted)},
        "preempted": batch.preempted,
        "addresses": batch.addresses(),
        "arrays": {name: to_host(batch[name]).tobytes() for name in batch},
        "objects": {name: [id(x) for x in batch.objects(name)] for name in hosts},
        "lengths": {name: [batch.length(r, name) for r in live] for name in ragged},
    }


@contextmanager
def refused(
    batch: InputBatch[Any],
    error: type[VlbatchError],
    match: str,
    *,
    req_id: str | None = None,
    setting: str | None = None,
) -> Iterator[None]:
    """Expect exactly this refusal, and a batch that is as it was."""
    before = state_of(batch)
    with pytest.raises(error, match=match) as caught:
        yield
    assert type(caught.value) is error
    assert (caught.value.req_id, caught.value.setting) == (req_id, setting)
    assert state_of(batch) == before
    batch.check()
