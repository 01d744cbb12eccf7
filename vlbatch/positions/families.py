"""Rotary position rules of the model families, and the runs that they give a prompt.

The rule shared by all families with three axes: text advances every axis by one; a grid starts at
the next position ``s``, and its cell ``(i, j, k)`` is at ``(s + int(i * t_scale), s + j, s + k)``;
the next position is 1 + the maximum over all axes of every token so far.

Masked items follow from it. A token of a span that is not a place is text: it is at the next
position. Places after it go on in the grid, whose start was fixed at its first place. So spans may
nest or interleave (audio inside a video): each maximal range of one item's places is a run, and
runs are laid out in token order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np

from vlbatch.errors import InvalidItem, InvalidSetting
from vlbatch.items import Grid, Item
from vlbatch.positions.runs import MAX_GRID_SIDE, MAX_POSITION, PositionRuns, RunRecord


@dataclass(frozen=True, slots=True)
class Family:
    """How one model family places media.

    Attributes:
        num_axes: 1 (media is placed like text), or 3 for t, h, w.
        timed_videos: a video's ``t_scale`` is seconds per grid times tokens per second; else 1.
        separate_frames: each frame of a grid is a grid of its own, at its own next position.
    """

    num_axes: int
    timed_videos: bool = False
    separate_frames: bool = False


FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "1d": Family(num_axes=1),
        "qwen2_vl": Family(num_axes=3),
        "qwen2_5_vl": Family(num_axes=3, timed_videos=True),
        "qwen3_vl": Family(num_axes=3, separate_frames=True),
        # Its temporal merge is already in the grid of an item.
        "ernie4_5_vl": Family(num_axes=3),
    }
)

DEFAULT_SECONDS_PER_GRID: Final = 1.0
"""Of a timed video that states none; transformers and vLLM take the same value."""

_Piece: TypeAlias = tuple[int, int, int, int, int, int, float, int]
"""A run that has no base yet: start, stop, first place of its grid, first cell, h, w, t_scale, and
its extent (see ``_extent``)."""


def family_of(name: str) -> Family:
    """Return the rules of a family.

    Raises:
        InvalidSetting: no family has this name; the message lists those that there are.
    """
    if name not in FAMILIES:
        raise InvalidSetting(
            f"position family {name!r} is unknown; expected one of {', '.join(FAMILIES)}",
            setting="family",
        )
    return FAMILIES[name]


def build_runs(
    family: str,
    items: Sequence[Item],
    *,
    tokens_per_second: float = 2.0,
    req_id: str | None = None,
) -> PositionRuns:
    """Lay out the prompt of one request.

    Args:
        family: a key of ``FAMILIES``.
        items: the request's items as ``validate_items`` returned them.
        tokens_per_second: of a family with timed videos.
        req_id: named in refusals.

    Raises:
        InvalidSetting: unknown family.
        InvalidItem: an image or video without a grid (audio without one is placed like text), a
            grid side over ``MAX_GRID_SIDE``, seconds per grid that are not above 0, or positions
            over ``MAX_POSITION``.
    """
    rules = family_of(family)
    if rules.num_axes == 1:
        return PositionRuns.from_records(1, ())
    pieces: list[_Piece] = []
    for item in items:
        if item.grid is None:
            if item.modality == "audio":
                continue
            raise _missing_grid(item, req_id)
        t, h, w = item.grid
        if h > MAX_GRID_SIDE or w > MAX_GRID_SIDE:
            raise _oversized_grid(item, item.grid, req_id)
        t_scale = 1.0
        if rules.timed_videos and item.modality == "video":
            t_scale = _video_scale(item, tokens_per_second, req_id)
        if t == 1 and item.embed_mask is None:  # most items: one run
            start = item.offset
            extent = h if h > w else w
            pieces.append((start, start + item.length, start, 0, h, w, t_scale, extent))
        elif rules.separate_frames:
            pieces.extend(_frame_pieces(item, h, w))
        else:
            pieces.extend(_grid_pieces(item, h, w, t_scale))
    pieces.sort()
    return PositionRuns.from_records(rules.num_axes, _lay_out(pieces, req_id))


def _missing_grid(item: Item, req_id: str | None) -> InvalidItem:
    return InvalidItem(
        f"item {item.key!r} ({item.modality}) has no grid; its positions on three axes need one,"
        " also where its pixels are not sent along",
        req_id=req_id,
    )


def _oversized_grid(item: Item, grid: Grid, req_id: str | None) -> InvalidItem:
    return InvalidItem(
        f"item {item.key!r} ({item.modality}) has grid {'x'.join(map(str, grid))};"
        f" expected at most {MAX_GRID_SIDE} rows and columns",
        req_id=req_id,
    )


def _video_scale(item: Item, tokens_per_second: float, req_id: str | None) -> float:
    """Return the positions from one frame of a timed video to the next."""
    seconds = item.seconds_per_grid
    if seconds is None:
        seconds = DEFAULT_SECONDS_PER_GRID
    t_scale = seconds * tokens_per_second
    if not 0.0 < t_scale <= MAX_POSITION:
        raise InvalidItem(
            f"item {item.key!r} ({item.modality}) has {seconds} seconds per grid at"
            f" {tokens_per_second} tokens per second; expected a product above 0 and at most"
            f" {MAX_POSITION}",
            req_id=req_id,
            setting="tokens_per_second",
        )
    return t_scale


def _place_ranges(item: Item) -> Iterator[tuple[int, int]]:
    """Yield the maximal ranges ``[start, stop)`` of consecutive places."""
    if item.embed_mask is None:
        yield item.offset, item.stop
        return
    mask = np.concatenate(([False], item.embed_mask, [False]))
    edges = item.offset + np.flatnonzero(mask[1:] != mask[:-1])
    yield from zip(edges[0::2].tolist(), edges[1::2].tolist(), strict=True)


def _grid_pieces(item: Item, h: int, w: int, t_scale: float) -> Iterator[_Piece]:
    """Yield the runs of an item that is one grid."""
    cell, grid_start = 0, -1
    for start, stop in _place_ranges(item):
        if cell == 0:
            grid_start = start
        stop_cell = cell + stop - start
        yield start, stop, grid_start, cell, h, w, t_scale, _extent(cell, stop_cell, h, w, t_scale)
        cell = stop_cell


def _frame_pieces(item: Item, h: int, w: int) -> Iterator[_Piece]:
    """Yield the runs of an item of which each frame is a grid."""
    cell, grid_start = 0, -1  # of the frame under way
    for range_start, range_stop in _place_ranges(item):
        start = range_start
        while start < range_stop:
            if cell == 0:
                grid_start = start
            stop = min(range_stop, start + h * w - cell)
            stop_cell = cell + stop - start
            yield start, stop, grid_start, cell, h, w, 1.0, _extent(cell, stop_cell, h, w, 1.0)
            start, cell = stop, stop_cell % (h * w)


def _extent(first_cell: int, stop_cell: int, h: int, w: int, t_scale: float) -> int:
    """Return 1 + the largest position of cells ``[first_cell, stop_cell)``, from the base on."""
    first_row, last_row = first_cell // w, (stop_cell - 1) // w  # over all frames
    last_frame = last_row // h
    if first_row // h < last_frame:  # holds the last cell of a frame
        num_rows, num_columns = h, w
    else:
        num_rows = last_row % h + 1
        num_columns = w if first_row < last_row else (stop_cell - 1) % w + 1
    return max(int(last_frame * t_scale) + 1, num_rows, num_columns)


def _lay_out(pieces: Sequence[_Piece], req_id: str | None) -> list[RunRecord]:
    """Give each piece, in token order, its base and the text after it."""
    bases: dict[int, int] = {}
    records: list[RunRecord] = []
    next_position = delta = 0
    for start, stop, grid_start, first_cell, h, w, t_scale, extent in pieces:
        next_position = start + delta
        base = bases.setdefault(grid_start, next_position)
        if base + extent > next_position:
            next_position = base + extent
        delta = next_position - stop
        records.append((start, stop, base, first_cell, delta, h, w, t_scale))
    if next_position > MAX_POSITION:
        raise InvalidItem(
            f"media reaches position {next_position - 1}; expected less than {MAX_POSITION}",
            req_id=req_id,
        )
    return records
