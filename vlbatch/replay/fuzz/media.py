"""Random items: grids, masks, gaps, repeats, spans that nest; and how to make them impossible."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from vlbatch.replay.scenario import ItemSpec

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Medium:
    """A picture, video or sound that requests share by its key."""

    key: str
    modality: str
    grid: Grid

    @property
    def num_places(self) -> int:
        """Feature rows."""
        t, h, w = self.grid
        return t * h * w


_GRIDS: dict[str, tuple[Grid, ...]] = {
    "image": ((1, 1, 1), (1, 1, 3), (1, 2, 2), (1, 3, 2), (1, 2, 4)),
    "video": ((2, 1, 1), (2, 1, 2), (3, 1, 2), (2, 2, 2)),
    "audio": ((1, 1, 2), (1, 1, 3), (1, 1, 5)),
}


def random_media(rng: random.Random, num: int, most_rows: int) -> list[Medium]:
    """Media of one walk; most of them have at most ``most_rows`` feature rows."""
    modalities = rng.choices(("image", "video", "audio"), (5, 3, 2), k=num)
    media = [Medium(f"k{i}", m, rng.choice(_GRIDS[m])) for i, m in enumerate(modalities)]
    return [
        replace(medium, grid=_GRIDS[medium.modality][0])
        if medium.num_places > most_rows and rng.random() < 0.95
        else medium
        for medium in media
    ]


def random_items(
    rng: random.Random, media: list[Medium], most_tokens: int
) -> tuple[list[ItemSpec], int]:
    """Items in a prompt, with text between them or none.

    Returns:
        Items by offset, and the first token after them, at most ``most_tokens``.

    """
    items: list[ItemSpec] = []
    cursor = 0
    for _ in range(rng.choice((0, 1, 2, 2, 3, 3, 4, 5))):
        gap = rng.choice((0, 0, 1, 2, 5))
        again = [medium for medium in media if items and medium.key == items[-1].key]
        placed = _place(rng, again if again and rng.random() < 0.25 else media, cursor + gap)
        stop = max(item.offset + item.length for item in placed)
        if stop > most_tokens:
            break
        items += placed
        cursor = stop
    return items, cursor


def _place(rng: random.Random, media: list[Medium], offset: int) -> list[ItemSpec]:
    """One item from a token on, or two of which each has its places between the other's."""
    pair = rng.random() < 0.12
    chosen = rng.choices(media, k=2 if pair else 1)
    owners = [n for n, medium in enumerate(chosen) for _ in range(medium.num_places)]
    if pair or rng.random() < 0.3:
        owners += [-1] * rng.randint(0, 3)  # separators, also at the ends of the span
        rng.shuffle(owners)
    return [_item(rng, medium, offset, n, owners) for n, medium in enumerate(chosen)]


def _item(
    rng: random.Random, medium: Medium, offset: int, number: int, owners: list[int]
) -> ItemSpec:
    mask = [owner == number for owner in owners]
    if number or rng.random() < 0.5:  # a span that begins and ends with a place
        first, stop = mask.index(True), len(mask) - mask[::-1].index(True)
        mask, offset = mask[first:stop], offset + first
    timed = medium.modality == "video" and rng.random() < 0.5
    return ItemSpec(
        key=medium.key,
        modality=medium.modality,
        offset=offset,
        length=len(mask),
        grid=None if medium.modality == "audio" and rng.random() < 0.7 else medium.grid,
        embeds=None if all(mask) and rng.random() < 0.8 else tuple(mask),
        rows=None,
        seconds_per_grid=rng.choice((0.5, 1.0, 1.3)) if timed else None,
    )


def spoil(rng: random.Random, items: list[ItemSpec]) -> list[ItemSpec]:
    """Change one item so that it cannot be, or is not what its key says."""
    n = rng.randrange(len(items))
    item = items[n]
    places = item.length if item.embeds is None else sum(item.embeds)
    kind = rng.randrange(8)
    if kind == 0:
        item = replace(item, rows=max(1, places + rng.choice((-1, 1, 2))))
    elif kind == 1:
        item = replace(item, grid=(1, 1, places + 1))
    elif kind == 2:
        item = replace(item, offset=item.offset + rng.randint(1, 40))
    elif kind == 3:
        item = replace(item, embeds=(False,) * item.length)
    elif kind == 4:
        item = replace(item, length=0, embeds=None)
    elif kind == 5:
        item = replace(item, grid=(0, 1, places))
    elif kind == 6:
        item = replace(item, embeds=(True,) * (item.length + 1))
    else:  # another content under the same key: found in the step, where the key is cached
        grid = None if item.modality == "audio" else (1, 1, 1)
        item = replace(item, length=1, grid=grid, embeds=None)
    return [*items[:n], item, *items[n + 1 :]]
