"""Rotary positions of a prompt, one token after the other.

The rule: a text token sits, on every axis, at the *next position*, which is 1 + the largest
position of all tokens before it. A grid starts at the next position ``s`` of its first place, and
its cell ``(i, j, k)`` sits at ``(s + int(i * step), s + j, s + k)``. The step is 1, but for videos
of ``qwen2_5_vl``: seconds per grid times tokens per second. For ``qwen3_vl`` each frame is a grid
of its own, starting at the next position of its own first place. A token of a span that takes no
feature is text.
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
    cells = {}  # token -> item, its grid, cell of that grid
    for number, item in enumerate(items):
        if item.grid is not None:
            for cell, place in enumerate(item.places()):
                cells[place] = (number, item.grid, cell)
    starts: dict[tuple[int, int], int] = {}  # item and frame -> where the grid starts
    positions: list[Position] = []
    following = 0
    for token in range(prompt_len):
        position = (following, following, following)
        if token in cells:
            number, (_, height, width), cell = cells[token]
            frame, row, column = cell // (height * width), cell // width % height, cell % width
            if family == "qwen3_vl":
                start = starts.setdefault((number, frame), following)
                position = (start, start + row, start + column)
            else:
                start = starts.setdefault((number, 0), following)
                later = int(frame * _step(family, items[number], tokens_per_second))
                position = (start + later, start + row, start + column)
        positions.append(position)
        following = max(following, 1 + max(position))
    return positions


def _step(family: str, item: OracleItem, tokens_per_second: float) -> float:
    """Positions from one frame to the next."""
    if family != "qwen2_5_vl" or item.modality != "video":
        return 1.0
    seconds = 1.0 if item.seconds_per_grid is None else item.seconds_per_grid
    return seconds * tokens_per_second


def delta_of(positions: list[Position]) -> int:
    """Position minus index of every token after these."""
    largest = max((max(position) for position in positions), default=-1)
    return 1 + largest - len(positions)
