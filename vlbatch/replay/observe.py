"""What the library's objects hold and did, as plain data for the oracle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields

from vlbatch import BatchOrder, EntryKey, RowMoves, SideTable, VLBatch
from vlbatch.batch import ProposerInputBatch
from vlbatch.replay.declared import DERIVED_FIELDS, DRAFT, read_values, stored_values
from vlbatch.replay.fingerprints import to_host
from vlbatch.replay.oracle import ObservedState, ObservedStep
from vlbatch.replay.oracle.values import Key


class Witness(SideTable):
    """A list that follows the rows from outside, and remembers how many requests moved."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self.num_moved = 0

    def follow(self, moves: RowMoves) -> None:
        """Move the entries."""
        self.num_moved = moves.num_moved
        super().follow(moves)


def plain(keys: Iterable[EntryKey]) -> list[Key]:
    """Content and epoch of each key."""
    return [(key.content, key.epoch) for key in keys]


def observe_state(
    vl: VLBatch[object],
    draft: ProposerInputBatch[object],
    witness: Witness,
    mirror: Iterable[Key],
) -> ObservedState:
    """Read everything that the oracle compares; changes nothing."""
    batch, cache = vl.batch, vl.features.cache
    live = batch.req_ids
    known = (*live, *batch.preempted)
    slots = {r: batch.slot_of(r) for r in live}
    rows = {req_id: row for row, req_id in enumerate(batch.rows) if req_id is not None}
    return ObservedState(
        rows=list(batch.rows),
        slots=slots,
        preempted=list(batch.preempted),
        progress={r: batch.progress.counts(slot) for r, slot in slots.items()},
        known_tokens={r: batch.known_tokens_of(r) for r in known},
        stored=_merged(stored_values(batch, rows, slots), stored_values(draft, rows, slots, DRAFT)),
        whole={
            name: to_host(batch[name]).tolist()
            for name, field in batch.registry.items()
            if not field.is_per_request
        },
        followed=list(witness),
        usage=(cache.usage.used, cache.usage.free, cache.usage.reclaimable),
        entries={
            (key.content, key.epoch): (
                cache.rows_of(key) or 0,
                cache.is_ready(key),
                frozenset((ref.req_id, ref.item) for ref in cache.references(key)),
            )
            for key in cache.present()
        },
        deltas={r: vl.positions.delta(r) for r in known},
        mirror=sorted(mirror),
    )


def observe_reads(
    vl: VLBatch[object], draft: ProposerInputBatch[object], req_ids: Sequence[str]
) -> dict[str, dict[str, object]]:
    """Request -> field -> its value, read through the library."""
    return _merged(read_values(vl.batch, req_ids), read_values(draft, req_ids, DRAFT))


def _merged(
    target: dict[str, dict[str, object]], draft: dict[str, dict[str, object]]
) -> dict[str, dict[str, object]]:
    return {req_id: values | draft[req_id] for req_id, values in target.items()}


def observe_order(step: ObservedStep, vl: VLBatch[object], order: BatchOrder) -> None:
    """Take down the order of a step and the fields derived from it."""
    step.order, step.idle = list(order.req_ids), list(order.idle)
    step.regions = (order.regions.decode, order.regions.extend, order.regions.prefill)
    step.token_indices = order.token_indices.tolist()
    step.derived = {name: to_host(vl.batch[name]).tolist() for name in DERIVED_FIELDS}


def first_difference(before: ObservedState, after: ObservedState) -> str | None:
    """Name the first part of the state that changed."""
    for part in fields(before):
        old, new = getattr(before, part.name), getattr(after, part.name)
        if old != new:
            return f"{part.name} was {old}, is {new}"
    return None
