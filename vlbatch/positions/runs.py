"""Rotary positions of one request as media runs and text deltas.

A *media run* is a maximal range of consecutive tokens that are cells of one grid. All other tokens
are text, which is implied: a text token sits at ``index + text_delta`` of the run before it, and
``delta``, that of the last run, holds for every later token, so generated tokens and resumed
prompts need nothing more. Memory grows with media runs, never with tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
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
        packed = b"".join([_PACKED_RUN.pack(*record) for record in records])
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
        first = int(self.runs["stop"].searchsorted(start, side="right"))
        last = int(self.runs["start"].searchsorted(stop, side="left"))
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

    The chunk is cut into *stretches*: before each run the text in front of it (perhaps no token),
    then each row of the run's grid, and at the end the text after the last run. In a stretch w
    grows by one a token, while t and h stay (grid row) or grow likewise (text). So one offset a
    stretch and axis gives the positions of all tokens, without a loop over runs.

    Args:
        runs: media runs that overlap the chunk, at least one.
        start: first token of the chunk.
        stop: first token after it.
        text_delta: position minus index of the text before the first run.
    """
    offsets, edges, texts = _cut_into_stretches(runs, start, stop, text_delta)
    lengths = edges[1:] - edges[:-1]
    is_text = np.zeros(len(lengths), dtype=np.int64)
    is_text[texts] = 1
    positions = np.repeat(offsets, lengths, axis=1)
    tokens = np.arange(start, stop)
    positions[2] += tokens
    tokens *= np.repeat(is_text, lengths)
    positions[:2] += tokens
    return positions


def _cut_into_stretches(
    runs: RunArray, start: int, stop: int, text_delta: int
) -> tuple[PositionArray, PositionArray, PositionArray]:
    """Return the stretches of a chunk; arguments as for ``_expand``.

    Returns:
        offsets: ``[3, num_stretches]``, to add to the token where an axis grows.
        edges: ``[num_stretches + 1]``, first token of each stretch, then ``stop``.
        texts: ``[num_runs + 1]``, which stretches are text.
    """
    # Per run: the tokens inside the chunk and the grid rows they touch, counted over all frames.
    begin = np.maximum(runs["start"], start)
    end = np.minimum(runs["stop"], stop)
    origin = runs["start"] - runs["first_cell"]  # the token where cell 0 is, or would be
    w = runs["w"].astype(np.int64)
    first_row = (begin - origin) // w
    last_row = (end - 1 - origin) // w
    num_stretches = np.ones(len(runs) + 1, dtype=np.int64)
    num_stretches[:-1] += last_row - first_row + 1
    texts = np.cumsum(num_stretches) - num_stretches  # stretch number of each text

    # Per stretch: each text is laid out like a grid row above the first row of the run after it,
    # then overwritten.
    per_run = np.ones((4, len(texts)), dtype=np.int64)
    per_run[0, :-1] = first_row - texts[:-1] - 1
    per_run[1, :-1] = w
    per_run[2, :-1] = origin
    per_run[3, :-1] = runs["base"]
    row, w, origin, base = np.repeat(per_run, num_stretches, axis=1)
    row += np.arange(len(row))
    row_start = origin + row * w
    offsets = np.empty((3, len(row)), dtype=np.int64)
    offsets[0] = base
    offsets[1] = base + row
    offsets[2] = base - row_start
    if np.any(last_row >= runs["h"]):
        _start_frames_anew(offsets, row, runs, num_stretches)
    offsets[:, texts[1:]] = runs["text_delta"]
    offsets[:, 0] = text_delta
    edges = np.empty(len(row) + 1, dtype=np.int64)
    edges[:-1] = row_start
    edges[texts[:-1] + 1] = begin
    edges[texts[1:]] = end
    edges[0], edges[-1] = start, stop
    return offsets, edges, texts


def _start_frames_anew(
    offsets: PositionArray, row: PositionArray, runs: RunArray, num_stretches: PositionArray
) -> None:
    """Move the t and h offsets of rows beyond a grid's first frame, in place."""
    h = np.repeat(np.append(runs["h"], 1), num_stretches)
    frame = row // h
    t_scale = np.repeat(np.append(runs["t_scale"], 0.0), num_stretches)
    offsets[0] += (frame * t_scale).astype(np.int64)  # truncates
    offsets[1] -= frame * h
