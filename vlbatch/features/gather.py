"""The features of one step in row order, and the tokens that take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vlbatch.cache import EncoderCache, Features
from vlbatch.errors import InvariantBroken
from vlbatch.features.chunks import items_in
from vlbatch.features.plan import RequestItems
from vlbatch.items import IntArray
from vlbatch.order import BatchOrder


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive feature rows of one item that a step reads.

    Attributes:
        req_id: whose.
        item: number of the item in its request.
        content: identity of the item.
        rows: half-open range of feature rows.
        features: all rows, one array a level.
    """

    req_id: str
    item: int
    content: str
    rows: tuple[int, int]
    features: Features


@dataclass(frozen=True, slots=True, eq=False)
class FeatureInputs:
    """Features of a step, by batch row and token.

    Attributes:
        tokens: int64 ``[num_features]`` tokens of the flattened step (indices into its
            ``token_ids``) that take a feature row.
        segments: whose rows, in order, belong to ``tokens``.
        skipped: tokens of a drafter's look-ahead whose item is not encoded yet.
    """

    tokens: IntArray
    segments: tuple[Segment, ...]
    skipped: IntArray

    def arrays(self, level: int = 0) -> list[object]:
        """Slices ``[rows, hidden]`` of one level; their rows in order belong to ``tokens``."""
        out = []
        for segment in self.segments:
            first, stop = segment.rows
            out.append(segment.features[level][first:stop])  # type: ignore[index]  # an array
        return out

    def by_request(self) -> dict[str, FeatureInputs]:
        """Each request's own part, in row order; tokens skipped for a drafter are in none."""
        parts: dict[str, list[Segment]] = {}
        for segment in self.segments:
            parts.setdefault(segment.req_id, []).append(segment)
        found: dict[str, FeatureInputs] = {}
        start = 0
        for req_id, segments in parts.items():  # those of one row follow each other
            stop = start + sum(segment.rows[1] - segment.rows[0] for segment in segments)
            found[req_id] = FeatureInputs(self.tokens[start:stop], tuple(segments), _NO_TOKENS)
            start = stop
        return found


_NO_TOKENS: IntArray = np.zeros(0, dtype=np.int64)
_NO_TOKENS.flags.writeable = False
_NOTHING = FeatureInputs(_NO_TOKENS, (), _NO_TOKENS)


def gather_features(
    order: BatchOrder,
    request_of: Callable[[str], RequestItems],
    cache: EncoderCache,
    shift: int,
) -> FeatureInputs:
    """Collect the feature rows of every prefill row's chunk; see ``FeatureStore.gather``."""
    if order.num_leading_decodes == order.num_reqs:
        return _NOTHING
    tokens: list[IntArray] = []
    skipped: list[IntArray] = []
    segments: list[Segment] = []
    for row in range(order.num_leading_decodes, order.num_reqs):
        request = request_of(order.req_ids[row])
        start = int(order.computed[row]) + shift
        if start >= request.media_stop:
            continue
        stop = start + int(order.scheduled[row])
        to_step = int(order.query_start[row]) - start
        for number in items_in(request.items, start, stop):
            placed = request.items[number]
            places = placed.places_in(start, stop) + to_step
            features = _features(request, number, cache)
            if features is None:
                if placed.first_place_from(start) < stop - shift:
                    _raise_missing(request, number)
                skipped.append(places)
                continue
            rows = placed.rows_in(start, stop)
            if len(places) != rows[1] - rows[0]:
                raise InvariantBroken(
                    f"item {number} has {len(places)} places and feature rows {rows} in"
                    f" [{start}, {stop})",
                    req_id=request.req_id,
                )
            tokens.append(places)
            segments.append(Segment(request.req_id, number, placed.item.key, rows, features))
    return FeatureInputs(_joined(tokens), tuple(segments), _joined(skipped))


def _features(request: RequestItems, number: int, cache: EncoderCache) -> Features | None:
    """Features of an item, ``None`` if its entry is not held or not ready."""
    embeds = request.items[number].item.embeds
    if embeds is not None:
        return embeds if isinstance(embeds, tuple) else (embeds,)
    key = request.held.get(number)
    if key is None or not cache.is_ready(key):
        return None
    return cache.features(key, req_id=request.req_id)


def _raise_missing(request: RequestItems, number: int) -> None:
    key = request.held.get(number)
    state = "holds no reference" if key is None else f"refers to {key}, which is not ready"
    raise InvariantBroken(
        f"features of item {number} ({request.items[number].item.key!r}) are not there: the"
        f" request {state}",
        req_id=request.req_id,
    )


def _joined(tokens: Sequence[IntArray]) -> IntArray:
    return np.concatenate(tokens) if tokens else _NO_TOKENS
