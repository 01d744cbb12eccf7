"""Rotary positions of one request as media runs and text deltas.

A *media run* is a maximal range of consecutive tokens that are cells of one grid. All other tokens
are text, which is implied: a text token sits at ``index + text_delta`` of the run before it, and
``delta``, that of the last run, holds for every later token, so generated tokens and resumed
prompts need nothing more. Memory grows with media runs, never with tokens.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from vlbatch.errors import InvalidSchedule

PositionArray: TypeAlias = npt.NDArray[np.int64]
"""Rotary positions ``[num_axes, num_tokens]``; three axes are t, h, w."""

RunArray: TypeAlias = npt.NDArray[np.void]
"""Media runs ``[num_runs]`` of ``RUN_DTYPE``, ascending by ``start``, disjoint."""

RunRecord: TypeAlias = tuple[int, int, int, int, int, int, int, float]
"""One media run as Python numbers, in the order of the fields of ``RUN_DTYPE``."""

RUN_DTYPE: Final = np.dtype(
    [
        ("start", np.int32),  # first token of the run
        ("stop", np.int32),  # first token after it
        ("base", np.int32),  # position of cell 0 of the grid, on all axes
        ("first_cell", np.int32),  # cell of token ``start``; above 0 where a grid goes on
        ("text_delta", np.int32),  # position minus index of the text after the run
        ("h", np.uint16),  # rows of the grid
        ("w", np.uint16),  # columns of the grid
        ("t_scale", np.float64),  # positions from one frame to the next, may be fractional
    ]
)
_PACKED_RUN: Final = struct.Struct("=5i2Hd")  # the layout of RUN_DTYPE

MAX_GRID_SIDE: Final = int(np.iinfo(np.uint16).max)
MAX_POSITION: Final = int(np.iinfo(np.int32).max)


@dataclass(frozen=True, slots=True, eq=False)
class PositionRuns:
    """Positions of every token of a request, computed for any range on demand.

    Cell ``(i, j, k)`` of a grid is at ``(base + int(i * t_scale), base + j, base + k)``.

    Attributes:
        num_axes: 1, or 3 for t, h, w.
        runs: read-only; 32 bytes a media run, none for text.
        delta: position minus index, on every axis, of each token from ``media_stop`` on.
        media_stop: first token after the last media run; 0 without one.
    """

    num_axes: int
    runs: RunArray
    delta: int
    media_stop: int

    @classmethod
    def from_records(cls, num_axes: int, records: Sequence[RunRecord]) -> PositionRuns:
        """Pack media runs that are ascending, disjoint and within int32."""
        packed = b"".join(starmap(_PACKED_RUN.pack, records))
        runs: RunArray = np.ndarray(len(records), RUN_DTYPE, packed)  # read-only, as bytes are
        _, media_stop, _, _, delta, _, _, _ = records[-1] if records else _NO_RUN
        return cls(num_axes, runs, delta, media_stop)

    @property
    def nbytes(self) -> int:
        """Bytes of the run records."""
        return self.runs.nbytes

    def positions(self, start: int, stop: int) -> PositionArray:
        """Return int64 ``[num_axes, stop - start]`` for tokens ``[start, stop)``.

        Tokens past the prompt are allowed: they are text.

        Raises:
            InvalidSchedule: unless ``0 <= start <= stop``.
        """
        if not 0 <= start <= stop:
            raise InvalidSchedule(
                f"positions of tokens [{start}, {stop}) were asked for; expected 0 <= start <= stop"
            )
        first = bisect_right(self.runs["stop"].data, start)
        last = bisect_left(self.runs["start"].data, stop)
        delta = int(self.runs["text_delta"][first - 1]) if first else 0
        if first >= last:
            text = np.empty((self.num_axes, stop - start), dtype=np.int64)
            text[:] = np.arange(start + delta, stop + delta)
            return text
        return _expand(self.runs[first:last], start, stop, delta)

    def position_at(self, index: int) -> tuple[int, ...]:
        """Return the position of one token, one number an axis."""
        return tuple(self.positions(index, index + 1)[:, 0].tolist())


_NO_RUN: Final[RunRecord] = (0, 0, 0, 0, 0, 1, 1, 0.0)


def _expand(runs: RunArray, start: int, stop: int, text_delta: int) -> PositionArray:
    """Return positions ``[3, stop - start]`` of a chunk that touches every one of ``runs``.

    The chunk is cut into *segments*: the text before each run (perhaps no token) and the run, in
    turn, and the text after the last run. A run is cut further into *stretches*, the rows of its
    grid; a text is one stretch. Along a stretch w grows by one a token, while t and h stay. So one
    offset a stretch and axis gives the positions of all tokens, without a loop over runs; text,
    where all axes are equal, then takes t and h from w.

    Args:
        runs: media runs that overlap the chunk, at least one.
        start: first token of the chunk.
        stop: first token after it.
        text_delta: position minus index of the text before the first run.
    """
    edges = np.empty(2 * len(runs) + 2, dtype=np.int64)  # first token of each segment, then stop
    edges[1:-1:2] = runs["start"]
    edges[2:-1:2] = runs["stop"]
    edges[0], edges[1] = start, max(start, edges[1])  # only these runs may reach beyond the chunk
    edges[-1], edges[-2] = stop, min(stop, edges[-2])
    segment_lengths = edges[1:] - edges[:-1]
    is_text = np.zeros(len(segment_lengths), dtype=np.bool_)
    is_text[::2] = True

    offsets, lengths = _cut_into_stretches(runs, edges, segment_lengths, text_delta)
    positions = offsets.repeat(lengths, axis=1)
    positions[2] += np.arange(start, stop)
    np.copyto(positions[:2], positions[2], where=is_text.repeat(segment_lengths))
    return positions


def _cut_into_stretches(
    runs: RunArray, edges: PositionArray, segment_lengths: PositionArray, text_delta: int
) -> tuple[PositionArray, PositionArray]:
    """Return the stretches of a chunk from its segments; arguments as in ``_expand``.

    Returns:
        offsets: ``[3, num_stretches]``, positions of t and h (in text of no meaning), and what to
            add to a token for w.
        lengths: ``[num_stretches]``, tokens of each.
    """
    # By run: its rows that the chunk touches, counted over all frames.
    origin = runs["start"] - runs["first_cell"]  # the token where cell 0 is, or would be
    w = runs["w"].astype(np.int64)
    first_row, cut_front = np.divmod(edges[1:-1:2] - origin, w)
    last_row, last_column = np.divmod(edges[2:-1:2] - origin - 1, w)
    cut_back = w - 1 - last_column

    # By segment, then by stretch. Offsets are those of row 0; a text is one row, of number 0.
    segments = np.zeros((6, len(segment_lengths)), dtype=np.int64)
    texts, grids = segments[:, ::2], segments[:, 1::2]
    texts[0] = 1
    texts[1] = segment_lengths[::2]
    texts[3:, 0] = text_delta
    texts[3:, 1:] = runs["text_delta"]
    grids[0] = last_row - first_row + 1
    grids[1] = w
    grids[2] = first_row
    grids[3:] = runs["base"]
    grids[5] -= origin
    num_rows = segments[0]
    stops = num_rows.cumsum()  # first stretch after each segment
    segments[2] -= stops - num_rows
    stretches = segments[1:].repeat(num_rows, axis=1)
    lengths, row, offsets = stretches[0], stretches[1], stretches[2:]
    row += np.arange(len(row))
    offsets[1] += row
    offsets[2] -= row * lengths
    if np.count_nonzero(last_row >= runs["h"]):
        _start_frames_anew(offsets, row, runs, num_rows)
    if np.count_nonzero(cut_front + cut_back):  # some first or last row is not whole
        lengths[stops[:-1:2]] -= cut_front
        lengths[stops[1::2] - 1] -= cut_back
    return offsets, lengths


def _start_frames_anew(
    offsets: PositionArray, row: PositionArray, runs: RunArray, num_rows: PositionArray
) -> None:
    """Move the t and h offsets of rows beyond a grid's first frame, in place."""
    h = np.ones(len(num_rows), dtype=np.int64)
    h[1::2] = runs["h"]
    t_scale = np.zeros(len(num_rows))
    t_scale[1::2] = runs["t_scale"]
    h = h.repeat(num_rows)
    frame = row // h
    offsets[0] += (frame * t_scale.repeat(num_rows)).astype(np.int64)  # truncates
    offsets[1] -= frame * h
