"""The fields that the replayer declares, and the tags that tell whose they are.

There is at least one field of every kind and residency. A file may give values for those of one
value a request (``fields`` of ``add``); the others get a tag, unique for each admission.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from vlbatch.batch import DraftField, copied, own, shared
from vlbatch.batch.access import FieldAccess
from vlbatch.fields import (
    Field,
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
from vlbatch.replay.fingerprints import to_host
from vlbatch.replay.oracle import FieldRule

CONSTANT = 77
"""Value of the global field, which nothing may change."""


def declare(*, max_step_tokens: int, max_token_ids: int) -> list[Field]:
    """Declare the fields of a replayed batch."""
    return [
        row("tag"),
        row("temperature", dtype="float32"),
        row("top_p", dtype="float32"),
        row("top_k", dtype="int32"),
        row("min_p", dtype="float64", residency="slots"),
        row("repetition_penalty", dtype="float32", residency="slots"),
        row("presence_penalty", dtype="float16"),
        row("frequency_penalty", dtype="float32", layout="contiguous"),
        row("seed", residency="slots"),
        row("max_tokens", dtype="int32", residency="slots"),
        row("priority", dtype="int16"),
        row("greedy", dtype="bool"),
        row("adapter_id", dtype="int32"),
        row("logit_bias", (2, 3), dtype="float32", residency="slots"),
        row("hidden", (40,), dtype="float32"),
        row("num_steps", on_preempt="reset"),
        ragged("token_ids", max_token_ids, residency="slots"),
        ragged("stop_token_ids", 16, "int32", residency="rows"),
        ragged("block_table", 8, "int32", residency="rows"),
        per_draft("draft_token_ids"),
        per_draft("draft_probs", (2,), "float32", residency="slots"),
        host("params"),
        host("grammar", residency="rows", on_preempt="reset"),
        row_valued("peer"),
        row_valued("ring", whole=True),
        cumulative("query_start", lambda o: o.scheduled),
        packed("token_index", (max_step_tokens,), default=-1, rebuild=lambda o: o.token_indices),
        batch_global("constant", default=CONSTANT),
    ]


DRAFT = "draft."
"""What the oracle calls the draft model's fields by."""


def declare_draft() -> list[DraftField]:
    """Declare the fields of the draft model's batch, which follows."""
    return [
        own(row("own_tag")),
        own(ragged("own_ids", 8, residency="rows")),
        own(per_draft("own_scores", dtype="float32")),
        own(host("own_state", residency="rows")),
        copied("tag"),
        shared("seed"),
    ]


DERIVED_FIELDS = ("query_start", "token_index", "slot_of_row")


def rules_of(fields: Iterable[Field], num_drafts: int, prefix: str = "") -> list[FieldRule]:
    """Say of each field of one value a request what the oracle has to know."""
    rules = []
    for field in fields:
        if not field.is_per_request:
            continue
        default: object = field.default
        if field.kind is Kind.RAGGED:
            default = []
        elif field.kind is not Kind.HOST:
            default = np.full(field.row_shape(num_drafts), field.default).tolist()
        rules.append(
            FieldRule(
                prefix + field.name,
                default,
                kept=field.on_preempt == "keep",
                holds="request" if field.kind is Kind.ROW_VALUED else "value",
            )
        )
    return rules


def tags_of(fields: Iterable[Field], number: int, num_drafts: int) -> dict[str, object]:
    """Values that only the ``number``-th admission has, as far as the type can tell.

    Each time some fields are left out: they must have their default, not an old value.
    """
    tags: dict[str, object] = {}
    for index, field in enumerate(fields):
        if not field.is_per_request or field.kind is Kind.ROW_VALUED or (index + number) % 3 == 0:
            continue
        tag = number * 32 + index
        if field.kind is Kind.HOST:
            tags[field.name] = {"tag": tag}
        elif field.kind is Kind.RAGGED:
            tags[field.name] = list(range(tag, tag + 1 + number % 3))
        elif field.dtype == "bool":
            tags[field.name] = bool(number & 1)
        else:
            shape = field.row_shape(num_drafts)
            most = 2048 if field.dtype == "float16" else 30000
            steps = np.arange(int(np.prod(shape))).reshape(shape)
            tags[field.name] = ((tag + steps) % most).tolist()
    return tags


def spread(field: Field, value: object, num_drafts: int) -> object:
    """Repeat a scalar for a field with a shape, as the library does."""
    if field.kind in (Kind.HOST, Kind.RAGGED):
        return value
    shape = field.row_shape(num_drafts)
    return np.broadcast_to(np.asarray(value), shape).tolist() if shape else value


def read_values(
    batch: FieldAccess[object], req_ids: Iterable[str], prefix: str = ""
) -> dict[str, dict[str, object]]:
    """Request -> field -> its value, through the accessors of the batch."""
    names = [name for name, field in batch.registry.items() if field.is_per_request]
    return {r: {prefix + n: as_plain(batch.read(r, n)) for n in names} for r in req_ids}


def stored_values(
    batch: FieldAccess[object], rows: Mapping[str, int], slots: Mapping[str, int], prefix: str = ""
) -> dict[str, dict[str, object]]:
    """Request -> field -> what lies in the arrays at its row or slot, past the accessors."""
    columns: dict[str, list[object]] = {}
    for name, field in batch.registry.items():
        if not field.is_per_request:
            continue
        index = slots if field.residency == "slots" else rows
        if field.kind is Kind.HOST:
            objects = batch.objects(name)
            columns[prefix + name] = [objects[index[r]] for r in rows]
            continue
        whole = to_host(batch[name])[: 1 + max(index.values(), default=-1)].tolist()
        if field.kind is Kind.RAGGED:
            columns[prefix + name] = [whole[index[r]][: batch.length(r, name)] for r in rows]
        else:
            columns[prefix + name] = [whole[index[r]] for r in rows]
    values = zip(*columns.values(), strict=True)
    return {
        r: dict(zip(columns, of_request, strict=True))
        for r, of_request in zip(rows, values, strict=True)
    }


def as_plain(value: object) -> object:
    """An array as a list or a number; an object as it is."""
    return value.tolist() if hasattr(value, "tolist") else value
