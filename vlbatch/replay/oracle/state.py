"""What the library holds between two events, compared with what it should hold."""

from __future__ import annotations

from collections.abc import Mapping

from vlbatch.replay.oracle.cache import OracleCache
from vlbatch.replay.oracle.fields import OracleFields, same_value
from vlbatch.replay.oracle.requests import OracleRequest
from vlbatch.replay.oracle.rows import OracleRows
from vlbatch.replay.oracle.values import Finding, ObservedState


def compare_state(
    requests: Mapping[str, OracleRequest],
    rows: OracleRows,
    fields: OracleFields,
    cache: OracleCache,
    seen: ObservedState,
) -> list[Finding]:
    """All differences; where the requests differ, nothing else is compared."""
    live = {r: request for r, request in requests.items() if request.live}
    preempted = sorted(requests.keys() - live.keys())
    findings = [
        *_unequal("rows", rows.rows, seen.rows),
        *_unequal("live requests", sorted(live), sorted(seen.slots)),
        *_unequal("preempted requests", preempted, sorted(seen.preempted)),
    ]
    if findings:
        return findings
    row_of = {r: row for row, r in enumerate(rows.rows) if r is not None}
    findings = _unequal("slots in use", len(live), len(set(seen.slots.values())))
    for req_id, request in live.items():
        findings += _compare_live(request, fields.expected(req_id, row_of), seen)
    for req_id, request in requests.items():
        known = seen.known_tokens[req_id]
        findings += _unequal("tokens with a known id", request.known_tokens, known, req_id)
        findings += _unequal("delta", request.delta, seen.deltas[req_id], req_id)
    findings += _unequal("ring of rows", fields.expected_ring(row_of), seen.whole.get("ring"))
    for owner, row in row_of.items():
        what = f"entry {row} of the list that follows"
        findings += _unequal(what, owner, seen.followed[row], owner)
    return findings + _compare_cache(cache, seen)


def _unequal(what: str, expected: object, got: object, req_id: str | None = None) -> list[Finding]:
    return [] if same_value(expected, got) else [Finding(what, expected, got, req_id)]


def _compare_live(
    request: OracleRequest, expected: Mapping[str, object], seen: ObservedState
) -> list[Finding]:
    """Slot, progress and fields; a request's slot is the one where it was first seen."""
    req_id = request.req_id
    slot = seen.slots[req_id]
    request.slot = slot if request.slot is None else request.slot
    findings = _unequal("slot", request.slot, slot, req_id)
    counts = (request.prompt_len, request.computed, request.confirmed)
    what = "prompt, computed, confirmed tokens"
    findings += _unequal(what, counts, seen.progress[req_id], req_id)
    stored, read = seen.stored[req_id], seen.values.get(req_id, {})
    if stored != expected:
        for name, value in expected.items():
            findings += _unequal(f"field {name!r}", value, stored[name], req_id)
    if read != expected:
        for name, value in read.items():
            findings += _unequal(f"field {name!r} as read", expected[name], value, req_id)
    return findings


def _compare_cache(cache: OracleCache, seen: ObservedState) -> list[Finding]:
    expected = {
        key: (entry.rows, entry.ready, frozenset(entry.references))
        for key, entry in cache.entries.items()
    }
    findings = []
    for key in sorted(expected.keys() | seen.entries.keys()) if expected != seen.entries else ():
        what = f"cache entry {key} (rows, ready, references)"
        findings += _unequal(what, expected.get(key), seen.entries.get(key))
    usage = (cache.used, cache.free, cache.reclaimable)
    findings += _unequal("used, free, reclaimable feature rows", usage, seen.usage)
    return findings + _unequal("mirror of the cache", sorted(cache.entries), sorted(seen.mirror))
