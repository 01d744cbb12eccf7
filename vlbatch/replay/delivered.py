"""What a model is about to read in a step: which feature row every token really gets.

The runner's belief is not asked for. A token's row is the one that belongs there if it has the
same fingerprint, else the one that the fingerprint names, else ``UNKNOWN_ROW``. Rows of an item
whose encode was not announced (or is forgotten) are taken at their word, unless they are another
item's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from vlbatch.errors import FeatureRowsMismatch, InvalidField
from vlbatch.items import IntArray, Item
from vlbatch.replay.fingerprints import FingerprintBook, Fingerprints, row_fingerprints, to_host

UNKNOWN_ROW = "(unknown row)"
"""Key of a feature row that no item announced as encoded has."""


@dataclass(slots=True)
class Watched:
    """A request of the runner.

    Attributes:
        req_id: its name.
        prompt_len: tokens to prefill; after a resume the prompt and the outputs so far.
        items: as admitted.
        computed: tokens computed.
        live: false while it is preempted.
        media_stop: first token behind every item.

    """

    req_id: str
    prompt_len: int
    items: tuple[Item, ...]
    computed: int
    live: bool = True
    media_stop: int = field(init=False)

    def __post_init__(self) -> None:
        """Work out what depends on the items alone."""
        self.media_stop = max((item.stop for item in self.items), default=0)

    @property
    def known_tokens(self) -> int:
        """Tokens with a known id: the prompt, or all that are computed and the sampled one."""
        return self.prompt_len if self.computed < self.prompt_len else self.computed + 1


class Delivered(NamedTuple):
    """A token of a request, and the feature row that it gets."""

    token: int
    key: str
    row: int


@dataclass(slots=True)
class Gathered:
    """What a model is about to read, by request.

    Attributes:
        features: request -> its feature rows, in the order given; requests whose chunk is past
            their media, and which get none, are left out.
        positions: request -> one list an axis; empty if none were given.
        kv_index: request -> token indices whose KV it writes; empty if none were given.

    """

    features: dict[str, list[Delivered]] = field(default_factory=dict)
    positions: dict[str, list[list[int]]] = field(default_factory=dict)
    kv_index: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Layout:
    """Requests whose tokens lie one behind the other.

    Attributes:
        requests: in that order.
        stops: int64 ``[num_requests + 1]`` where the tokens of each begin and end.

    """

    requests: Sequence[Watched]
    stops: IntArray

    @classmethod
    def of(cls, requests: Sequence[Watched], lengths: Sequence[int]) -> Layout:
        """Requests with so many tokens each."""
        return cls(requests, np.cumsum([0, *lengths], dtype=np.int64))

    @property
    def num_tokens(self) -> int:
        """Tokens of all."""
        return int(self.stops[-1])


def find_sources(
    layout: Layout, tokens: object, features: object, book: FingerprintBook
) -> dict[str, list[Delivered]]:
    """Say of every token that takes a feature row which one it is.

    Args:
        layout: the requests.
        tokens: integers ``[n]``, token numbers in the layout.
        features: their rows; see ``RunnerWatch.gathered``.
        book: fingerprints of what was encoded.

    Raises:
        FeatureRowsMismatch: another number of rows than of tokens.
        InvalidField: a token outside the layout.

    """
    numbers = np.asarray(to_host(tokens)).astype(np.int64).reshape(-1)
    blocks = features if isinstance(features, list) else [features]
    parts = [row_fingerprints(block) for block in blocks if block is not None]
    prints = np.concatenate([*parts, np.zeros(0, dtype=np.uint64)])
    if len(prints) != len(numbers):
        raise FeatureRowsMismatch(f"{len(prints)} feature rows for {len(numbers)} tokens")
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < layout.num_tokens:
        raise InvalidField(
            f"feature tokens are in [{numbers.min()}, {numbers.max()}];"
            f" expected [0, {layout.num_tokens})"
        )
    owners = np.searchsorted(layout.stops, numbers, side="right") - 1
    found = {}
    for n, request in enumerate(layout.requests):
        if request.computed >= request.media_stop and n not in owners:
            continue
        mine = owners == n
        indices = numbers[mine] - layout.stops[n] + request.computed
        found[request.req_id] = _sources(request, indices, prints[mine], book)
    return found


def _sources(
    request: Watched, indices: IntArray, prints: Fingerprints, book: FingerprintBook
) -> list[Delivered]:
    keys = [UNKNOWN_ROW] * len(indices)
    rows = np.arange(len(indices))
    settled = np.zeros(len(indices), dtype=np.bool_)
    first, last = (int(indices.min()), int(indices.max())) if len(indices) else (0, -1)
    for item in request.items:
        if item.stop <= first or item.offset > last:
            continue
        places, place_rows = _rows_at(item, indices)
        if book.knows(item.key):
            agrees = book.agrees(item.key, place_rows, prints[places])
        else:
            agrees = np.array([source is None for source in book.find(prints[places])])
        rows[places[agrees]] = place_rows[agrees]
        settled[places] |= agrees
        for n in places[agrees].tolist():
            keys[n] = item.key
    wrong = np.flatnonzero(~settled)
    if len(wrong):
        sources = book.find(prints[wrong], [item.key for item in request.items])
        for n, source in zip(wrong.tolist(), sources, strict=True):
            if source is not None:
                keys[n], rows[n] = source
    return list(map(Delivered, indices.tolist(), keys, rows.tolist()))


def _rows_at(item: Item, indices: IntArray) -> tuple[IntArray, IntArray]:
    """Which of the tokens are places of an item, and the feature row that belongs to each."""
    inside = (indices >= item.offset) & (indices < item.stop)
    if item.embed_mask is None:
        places = np.flatnonzero(inside)
        return places, indices[places] - item.offset
    in_span = np.where(inside, indices - item.offset, 0)
    places = np.flatnonzero(inside & item.embed_mask[in_span])
    return places, np.cumsum(item.embed_mask)[in_span[places]] - 1


def split_positions(layout: Layout, positions: object) -> dict[str, list[list[int]]]:
    """Positions by request, one list an axis.

    Args:
        layout: the requests.
        positions: integers ``[axes, num_tokens]``, or ``[num_tokens]`` for one axis.

    Raises:
        InvalidField: another shape.

    """
    axes = np.atleast_2d(to_host(positions))
    if axes.ndim != 2 or axes.shape[1] != layout.num_tokens:
        raise InvalidField(
            f"positions have shape {axes.shape}; expected [axes, {layout.num_tokens}] or"
            f" [{layout.num_tokens}]"
        )
    lists: list[list[int]] = axes.astype(np.int64).tolist()
    bounds = layout.stops.tolist()
    return {
        request.req_id: [axis[bounds[n] : bounds[n + 1]] for axis in lists]
        for n, request in enumerate(layout.requests)
    }
