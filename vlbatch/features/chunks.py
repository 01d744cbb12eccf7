"""Chunk arithmetic: which feature rows belong to which tokens of a chunk. Pure functions.

A chunk is the half-open token range ``[start, stop)`` of one request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vlbatch.items import IntArray, Item


@dataclass(frozen=True, slots=True, eq=False)
class PlacedItem:
    """An item with its places worked out once.

    Attributes:
        item: as admitted.
        num_rows: feature rows, one a place.
        places: tokens of the places, ascending; ``None`` if they are the whole span.
    """

    item: Item
    num_rows: int
    places: IntArray | None

    @classmethod
    def of(cls, item: Item) -> PlacedItem:
        """Work out the places of an item."""
        dense = item.embed_mask is None or bool(item.embed_mask.all())
        return cls(item, item.num_rows, None if dense else item.places())

    @property
    def stop(self) -> int:
        """First token after the span."""
        return self.item.stop

    def rows_in(self, start: int, stop: int) -> tuple[int, int]:
        """Half-open range of feature rows whose places lie in a chunk."""
        if self.places is None:
            offset, length = self.item.offset, self.item.length
            return min(max(start - offset, 0), length), min(max(stop - offset, 0), length)
        first, last = np.searchsorted(self.places, (start, stop))
        return int(first), int(last)

    def places_in(self, start: int, stop: int) -> IntArray:
        """Tokens of the places in a chunk, ascending: the places of ``rows_in``."""
        if self.places is None:
            return np.arange(
                max(start, self.item.offset), min(stop, self.item.stop), dtype=np.int64
            )
        first, last = self.rows_in(start, stop)
        return self.places[first:last]

    def first_place_from(self, start: int) -> int:
        """First place at or after a token; the item must have one."""
        if self.places is None:
            return max(start, self.item.offset)
        return int(self.places[np.searchsorted(self.places, start)])


def items_in(items: Sequence[PlacedItem], start: int, stop: int) -> Iterator[int]:
    """Numbers of the items with a place in a chunk, by their first place in it.

    A span that touches the chunk with masked-out tokens only is not among them. Spans may nest,
    so every item that starts before ``stop`` is looked at.
    """
    touched = []
    for number, placed in enumerate(items):
        if placed.item.offset >= stop:
            break
        if placed.stop > start:
            first, last = placed.rows_in(start, stop)
            if first < last:
                touched.append((placed.first_place_from(start), number))
    return (number for _, number in sorted(touched))


def uncut_stop(items: Iterable[PlacedItem], start: int, stop: int) -> int:
    """Largest chunk end up to ``stop`` that cuts no item which starts in the chunk.

    An item that the chunk starts inside of (after a prefix hit) may be finished or cut again.
    """
    changed = True
    while changed:
        changed = False
        for placed in items:
            if start <= placed.item.offset < stop < placed.stop:
                stop = placed.item.offset
                changed = True
    return stop


def overlapping(items: Iterable[PlacedItem]) -> Iterator[list[PlacedItem]]:
    """Groups of items whose spans overlap or nest: what a chunk that cuts no item holds at once.

    Args:
        items: by offset.
    """
    group: list[PlacedItem] = []
    reach = 0
    for placed in items:
        if group and placed.item.offset >= reach:
            yield group
            group = []
        group.append(placed)
        reach = max(reach, placed.stop)
    if group:
        yield group
