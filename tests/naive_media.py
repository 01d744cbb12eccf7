"""Requests with media, said one token at a time in plain Python: the oracle of several tests.

Shares no code with what it checks. An *owner* of a token is ``(item number, feature row)``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vlbatch.items import Grid, Item

Array = npt.NDArray[np.float64]


def item(
    offset: int,
    length: int,
    key: str = "X",
    *,
    mask: str | None = None,
    grid: Grid | None = None,
    modality: str = "image",
    embeds: object = None,
    payload: object = None,
) -> Item:
    """Make an item; ``mask`` is written like ``"1101"``."""
    embed_mask = None if mask is None else np.array([bit == "1" for bit in mask])
    return Item(
        key=key,
        modality=modality,
        offset=offset,
        length=length,
        grid=grid,
        embed_mask=embed_mask,
        embeds=embeds,
        payload=payload,
    )


def owners_of(items: Sequence[Item]) -> dict[int, tuple[int, int]]:
    """Token -> owner, for the tokens that take a feature row."""
    owners = {}
    for number, each in enumerate(items):
        feature_row = 0
        for index in range(each.length):
            if each.embed_mask is None or each.embed_mask[index]:
                owners[each.offset + index] = (number, feature_row)
                feature_row += 1
    return owners


def random_items(
    rng: random.Random, prompt_len: int, num_items: int, *, names: str = "abc", longest: int = 8
) -> list[Item]:
    """Items by offset that touch, nest, interleave and share keys; equal keys have equal rows."""
    owner: list[int | None] = [None] * prompt_len
    for number in range(num_items):
        start, density = rng.randrange(prompt_len), rng.choice((1, 1, 0.5))
        for token in range(start, min(prompt_len, start + rng.randint(1, longest))):
            if owner[token] is None and rng.random() < density:
                owner[token] = number
    items = []
    for number in range(num_items):
        places = [token for token in range(prompt_len) if owner[token] == number]
        if places:
            start = max(0, places[0] - rng.choice((0, 0, 1)))
            stop = min(prompt_len, places[-1] + 1 + rng.choice((0, 0, 2)))
            mask = "".join(str(int(owner[token] == number)) for token in range(start, stop))
            rows = len(places)
            items.append(
                item(
                    start,
                    stop - start,
                    f"{rng.choice(names)}{rows}",
                    mask=mask if "0" in mask or rng.random() < 0.1 else None,
                    grid=(1, 1, rows) if rows % 2 else (1, 2, rows // 2),
                )
            )
    return sorted(items, key=lambda each: (each.offset, each.stop))


def encoded(key: str, num_rows: int, epoch: int = 0) -> Array:
    """Features ``[num_rows, 3]`` whose row j says (key, j, epoch)."""
    name = int.from_bytes(key.encode(), "big")
    return np.array([[name, row, epoch] for row in range(num_rows)], dtype=np.float64)


def positions_of(items: Sequence[Item], num_tokens: int) -> list[tuple[int, int, int]]:
    """Qwen2-VL positions (t, h, w): text goes one on, a grid starts there."""
    owners = owners_of(items)
    positions: list[tuple[int, int, int]] = []
    starts: dict[int, int] = {}
    following = 0
    for token in range(num_tokens):
        if token in owners:
            number, cell = owners[token]
            grid = items[number].grid
            assert grid is not None
            start = starts.setdefault(number, following)
            frame, rest = divmod(cell, grid[1] * grid[2])
            row, column = divmod(rest, grid[2])
            positions.append((start + frame, start + row, start + column))
        else:
            positions.append((following, following, following))
        following = max(following, max(positions[-1]) + 1)
    return positions
