"""Rotary positions of a prompt, one token after the other.

The rule: a text token sits, on every axis, at the *next position*, which is 1 + the largest
position of all tokens before it. A grid starts at the next position ``s`` of its first place, and
its cell ``(i, j, k)`` sits at ``(s + int(i * step), s + j, s + k)``. The step is 1, but for timed
videos of ``qwen2_5_vl``: seconds per grid × tokens per second. For ``qwen3_vl`` each frame is a
grid of its own, starting at the next position of its own first place. A token of a span that takes
no feature is text.
"""

from __future__ import annotations

from vlbatch.replay.oracle.values import OracleItem

Position = tuple[int, ...]


def prompt_positions(
    family: str, prompt_len: int, items: list[OracleItem], tokens_per_second: float
) -> list[Position]:
    """Position of each token: one number for ``1d``, else t, h and w."""
    if family == "1d":
        return [(token,) for token in range(prompt_len)]
    cell_at = {
        place: (number, cell)
        for number, item in enumerate(items)
        if item.grid is not None
        for cell, place in enumerate(item.places())
    }
    starts: dict[tuple[int, int], int] = {}  # item and frame -> position where its grid starts
    positions: list[Position] = []
    following = 0
    for token in range(prompt_len):
        if token in cell_at:
            number, cell = cell_at[token]
            position = _cell_position(family, items, number, cell, starts, following)
            position = _timed(family, items[number], position, tokens_per_second)
        else:
            position = (following, following, following)
        positions.append(position)
        following = max(following, 1 + max(position))
    return positions


def _cell_position(
    family: str,
    items: list[OracleItem],
    number: int,
    cell: int,
    starts: dict[tuple[int, int], int],
    following: int,
) -> Position:
    grid = items[number].grid
    if grid is None:
        raise ValueError(f"item {number} has no grid")
    _, height, width = grid
    frame, rest = divmod(cell, height * width)
    row, column = divmod(rest, width)
    if family == "qwen3_vl":
        start = starts.setdefault((number, frame), following)
        return (start, start + row, start + column)
    start = starts.setdefault((number, 0), following)
    return (start, start + row, start + column, frame)


def _timed(
    family: str, item: OracleItem, position: Position, tokens_per_second: float
) -> Position:
    """Add the frame, which is the fourth number if there is one, to the first axis."""
    if len(position) == 3:
        return position
    t, h, w, frame = position
    step = 1.0
    if family == "qwen2_5_vl" and item.modality == "video":
        seconds = 1.0 if item.seconds_per_grid is None else item.seconds_per_grid
        step = seconds * tokens_per_second
    return (t + int(frame * step), h, w)


def delta_of(positions: list[Position]) -> int:
    """Position minus index of every token after these."""
    largest = max((max(position) for position in positions), default=-1)
    return 1 + largest - len(positions)
