"""Media items of a request: what they are, where their feature rows go, and what makes one legal.

Owns the vocabulary shared by features, positions and media. Never holds features or progress.
Index spaces: *token* is an index into the request's prompt; *place* is a token that takes one
feature row; *feature row* ``j`` of an item belongs to its ``j``-th place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from vlbatch.errors import InvalidItem, PlaceholderMismatch

Grid: TypeAlias = tuple[int, int, int]
"""Frames, rows, columns after the spatial merge: ``t * h * w`` is the number of places."""

IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One image, video or audio clip of a request, with its placeholder span in the prompt.

    Attributes:
        key: identity of the content; equal keys share features in the encoder cache.
        modality: ``"image"``, ``"video"`` or ``"audio"``.
        offset: first token of the span.
        length: tokens in the span ``[offset, offset + length)``.
        grid: see ``Grid``; ``None`` where the model gives the item 1-D positions.
        embed_mask: bool ``[length]``, true at the places; ``None`` means all of the span.
        seconds_per_grid: seconds between two grid frames of a video, where the model uses it.
        declared_rows: feature rows that the item's source promises; ``None`` means "as many as
            places". A different number is refused at admission.
        payload: what the encoder reads for this item (opaque here). It lives as long as the
            request: after a preemption the item may have to be encoded again.
        embeds: precomputed features, one array ``[rows, hidden]`` a level; then nothing is encoded.
    """

    key: str
    modality: str
    offset: int
    length: int
    grid: Grid | None = None
    embed_mask: BoolArray | None = None
    seconds_per_grid: float | None = None
    declared_rows: int | None = None
    payload: object = None
    embeds: object = None

    @property
    def stop(self) -> int:
        """First token after the span."""
        return self.offset + self.length

    @property
    def num_rows(self) -> int:
        """Places of the span, which is the number of feature rows that it takes."""
        if self.embed_mask is None:
            return self.length
        return int(np.count_nonzero(self.embed_mask))

    def places(self) -> IntArray:
        """Tokens that take a feature row, ascending, int64 ``[num_rows]``."""
        if self.embed_mask is None:
            return np.arange(self.offset, self.stop, dtype=np.int64)
        return self.offset + np.flatnonzero(self.embed_mask).astype(np.int64)


def validate_items(items: Sequence[Item], prompt_len: int, req_id: str) -> tuple[Item, ...]:
    """Check the items of one request and return them ordered by offset, then by stop.

    Args:
        items: in any order.
        prompt_len: tokens of the prompt; every span must lie inside ``[0, prompt_len)``.
        req_id: named in the refusals.

    Raises:
        InvalidItem: an empty key, a span outside the prompt, a mask of another length or without
            a place, a grid with a zero or that disagrees with the places, or two items that claim
            one token.
        PlaceholderMismatch: ``declared_rows`` differs from the number of places.
    """
    for item in items:
        _validate_item(item, prompt_len, req_id)
    ordered = tuple(sorted(items, key=lambda item: (item.offset, item.stop)))
    _refuse_shared_places(ordered, req_id)
    return ordered


def _validate_item(item: Item, prompt_len: int, req_id: str) -> None:
    name = f"item {item.key!r} ({item.modality})"
    if not item.key:
        raise InvalidItem(f"an item at token {item.offset} has an empty key", req_id=req_id)
    if item.length <= 0 or item.offset < 0 or item.stop > prompt_len:
        raise InvalidItem(
            f"{name} spans [{item.offset}, {item.stop}); a span must be non-empty and inside the"
            f" prompt [0, {prompt_len})",
            req_id=req_id,
        )
    mask = item.embed_mask
    if mask is not None and (mask.shape != (item.length,) or mask.dtype != np.bool_):
        raise InvalidItem(
            f"{name} has an embed mask of shape {mask.shape} and dtype {mask.dtype};"
            f" expected bool ({item.length},)",
            req_id=req_id,
        )
    if item.num_rows == 0:
        raise InvalidItem(f"{name} has an embed mask without a true place", req_id=req_id)
    if item.grid is not None:
        t, h, w = item.grid
        if min(t, h, w) <= 0 or t * h * w != item.num_rows:
            raise InvalidItem(
                f"{name} has grid {t}x{h}x{w} = {t * h * w} but {item.num_rows} places;"
                " expected a grid after the spatial merge with one cell a place",
                req_id=req_id,
            )
    if item.declared_rows is not None and item.declared_rows != item.num_rows:
        raise PlaceholderMismatch(
            f"{name} has {item.declared_rows} feature rows for {item.num_rows} placeholder"
            " tokens; expected one row a placeholder",
            req_id=req_id,
        )


def _refuse_shared_places(ordered: Sequence[Item], req_id: str) -> None:
    """Spans may overlap or nest (audio in video) only if no token is a place of two items."""
    if all(item.stop <= following.offset for item, following in pairwise(ordered)):
        return
    owner: dict[int, str] = {}
    for item in ordered:
        for token in item.places().tolist():
            if token in owner:
                raise InvalidItem(
                    f"items {owner[token]!r} and {item.key!r} both claim token {token};"
                    " overlapping spans need disjoint embed masks",
                    req_id=req_id,
                )
            owner[token] = item.key
