"""What a step must have delivered to each of its tokens, compared with what was seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vlbatch.replay.oracle.requests import OracleRequest
from vlbatch.replay.oracle.values import FeatureRow, FeatureValue, Finding, Key, ObservedStep


@dataclass(slots=True)
class ExpectedStep:
    """One step as the oracle sees it.

    Attributes:
        scheduled: req_id -> tokens, without the requests that failed.
        encoded: keys encoded, in order.
        hits: keys found ready and newly referred to.
        held: keys found ready and referred to before.
        failed: req_id -> name of the reason.
        order: row -> request, of those with tokens.

    """

    scheduled: dict[str, int]
    encoded: list[Key] = field(default_factory=list)
    hits: list[Key] = field(default_factory=list)
    held: list[Key] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)


Token = tuple[str, int]
"""Request, and index of the token in it."""


def tokens_of(step: ExpectedStep, requests: Mapping[str, OracleRequest]) -> list[Token]:
    """Tokens of the step in row order."""
    return [
        (req_id, requests[req_id].computed + i)
        for req_id in step.order
        for i in range(step.scheduled[req_id])
    ]


def features_of(
    step: ExpectedStep, requests: Mapping[str, OracleRequest], *, shift: int
) -> tuple[dict[Token, FeatureValue], set[Token]]:
    """Features by the token that computes with them, and the tokens that do without.

    Args:
        step: the step.
        requests: before its tokens are counted.
        shift: how far ahead a follower reads; 0 for the target.

    """
    features: dict[Token, FeatureValue] = {}
    skipped: set[Token] = set()
    for req_id in step.order:
        request = requests[req_id]
        start, stop = request.computed, request.computed + step.scheduled[req_id]
        for place, number, row in request.places(start + shift, stop + shift):
            key = request.held.get(number)
            if key is not None:
                features[req_id, place - shift] = (key[0], row, key[1])
            elif place >= stop:
                skipped.add((req_id, place - shift))
            else:
                features[req_id, place - shift] = (request.items[number].key, row, -1)
    return features, skipped


def compare_step(
    step: ExpectedStep, requests: Mapping[str, OracleRequest], lookahead: int, seen: ObservedStep
) -> list[Finding]:
    """All differences of one step, the cause before its consequences."""
    tokens = tokens_of(step, requests)
    regions = [requests[r].region for r in step.order]
    counts = (regions.count(0), regions.count(1), regions.count(2))
    findings = [
        *_unequal("failed requests", step.failed, seen.failed),
        *_unequal("encoded keys", step.encoded, seen.encoded),
        *_unequal("keys found ready", sorted(step.hits), sorted(seen.hits)),
        *_unequal("keys in use before", sorted(step.held), sorted(seen.held)),
        *_unequal("regions", counts, seen.regions),
    ]
    features, _ = features_of(step, requests, shift=0)
    for level, got in enumerate(seen.features):
        findings += _compare_features(f"features (level {level})", tokens, features, got)
    drafts, skipped = features_of(step, requests, shift=lookahead)
    for level, got in enumerate(seen.draft_features):
        what = f"features of the follower (level {level})"
        findings += _compare_features(what, tokens, drafts, got)
    missing = sorted(tokens.index(token) for token in skipped)
    findings += _unequal("tokens without feature for the follower", missing, sorted(seen.skipped))
    findings += _compare_positions(tokens, requests, seen.positions)
    indices = [index for _, index in tokens]
    findings += _unequal("token indices", indices, seen.token_indices)
    for name, values in seen.derived.items():
        findings += _compare_derived(name, step, requests, indices, values)
    findings += _unequal("restored outputs", {r: r for r in step.order}, seen.restored)
    return findings


def _unequal(what: str, expected: object, got: object) -> list[Finding]:
    return [] if expected == got else [Finding(what, expected, got)]


def _compare_features(
    what: str,
    tokens: list[Token],
    expected: Mapping[Token, FeatureValue],
    got: list[tuple[int, FeatureValue]],
) -> list[Finding]:
    delivered: dict[Token, list[FeatureValue]] = {}
    for number, value in got:
        token = tokens[number] if 0 <= number < len(tokens) else ("(outside the step)", number)
        delivered.setdefault(token, []).append(value)
    in_row_order = [*tokens, *sorted(delivered.keys() - set(tokens))]
    wrong = [
        token
        for token in in_row_order
        if delivered.get(token) != ([expected[token]] if token in expected else None)
    ]
    if not wrong:
        return []
    table = tuple(
        FeatureRow(
            req_id,
            index,
            describe(expected.get((req_id, index))),
            " and ".join(map(describe, delivered.get((req_id, index), [None]))),
        )
        for req_id, index in wrong
    )
    first = table[0]
    return [
        Finding(f"{what} at token {first.token}", first.expected, first.got, first.req_id, table)
    ]


def describe(value: FeatureValue | None) -> str:
    """``(key, row)``, with the weight epoch where it is not the first."""
    if value is None:
        return "-"
    key, row, epoch = value
    return f"({key}, {row})" if epoch == 0 else f"({key}, {row}, weights {epoch})"


def _compare_positions(
    tokens: list[Token], requests: Mapping[str, OracleRequest], got: list[list[int]]
) -> list[Finding]:
    by_token = [requests[req_id].position_of(index) for req_id, index in tokens]
    if tokens and {len(axis) for axis in got} != {len(tokens)}:
        return [Finding("number of positions", len(tokens), [len(axis) for axis in got])]
    for number, expected in enumerate(by_token):
        seen = tuple(axis[number] for axis in got)
        if seen != expected:
            req_id, index = tokens[number]
            return [Finding(f"position of token {index}", expected, seen, req_id)]
    return []


def _compare_derived(
    name: str,
    step: ExpectedStep,
    requests: Mapping[str, OracleRequest],
    indices: list[int],
    got: list[int],
) -> list[Finding]:
    """Compare a field that is rebuilt each step, pads included."""
    if name == "query_start":
        expected = [0]
        for req_id in step.order:
            expected.append(expected[-1] + step.scheduled[req_id])
        pad = expected[-1]
    elif name == "token_index":
        expected, pad = indices, -1
    else:
        expected, pad = [requests[r].slot or 0 for r in step.order], -1
    padded = [*expected, *[pad] * (len(got) - len(expected))]
    return _unequal(f"derived field {name!r}", padded, got)
