"""The positions rule, one token at a time in plain Python: the oracle of these tests.

Shares no code with what it checks, and states the rule as the families' documentation does.
"""

from __future__ import annotations

from collections.abc import Sequence

from vlbatch.items import Item


def naive_positions(
    family: str, items: Sequence[Item], num_tokens: int, tokens_per_second: float = 2.0
) -> list[tuple[int, int, int]]:
    """Return (t, h, w) of each token."""
    cell_of: dict[int, tuple[int, int]] = {}  # token -> item number, cell
    for number, item in enumerate(items):
        if item.grid is None:
            continue
        places = [
            item.offset + index
            for index in range(item.length)
            if item.embed_mask is None or item.embed_mask[index]
        ]
        for cell, token in enumerate(places):
            cell_of[token] = (number, cell)

    positions: list[tuple[int, int, int]] = []
    bases: dict[object, int] = {}
    largest = -1
    for token in range(num_tokens):
        here = largest + 1
        if token not in cell_of:
            position = (here, here, here)
        else:
            number, cell = cell_of[token]
            item = items[number]
            assert item.grid is not None
            _, h, w = item.grid
            i, j, k = cell // (h * w), cell // w % h, cell % w
            step = 1.0
            if family == "qwen2_5_vl" and item.modality == "video":
                seconds = 1.0 if item.seconds_per_grid is None else item.seconds_per_grid
                step = seconds * tokens_per_second
            if family == "qwen3_vl":
                base, i = bases.setdefault((number, i), here), 0
            else:
                base = bases.setdefault(number, here)
            position = (base + int(i * step), base + j, base + k)
        positions.append(position)
        largest = max(largest, *position)
    return positions


def as_axes(positions: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Transpose to one list an axis, the form of ``array.tolist()``."""
    return [list(axis) for axis in zip(*positions, strict=True)]
