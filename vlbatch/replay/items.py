"""Items of a scenario, for the library and for the oracle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from vlbatch import Item
from vlbatch.replay.oracle import OracleItem
from vlbatch.replay.scenario import ItemSpec


def num_places(spec: ItemSpec) -> int:
    """Tokens of the span that take a feature row."""
    return spec.length if spec.embeds is None else sum(spec.embeds)


def relax(spec: ItemSpec) -> ItemSpec:
    """Complete an item whose ``add`` the file does not expect to be refused.

    An image or video without a grid gets one row of cells; a different number of feature rows is
    left to the encoder to deliver.
    """
    grid = spec.grid
    if grid is None and spec.modality != "audio":
        grid = (1, 1, num_places(spec))
    return replace(spec, grid=grid, rows=None)


def library_items(specs: Iterable[ItemSpec]) -> list[Item]:
    """Items as the library takes them."""
    return [
        Item(
            key=spec.key,
            modality=spec.modality,
            offset=spec.offset,
            length=spec.length,
            grid=spec.grid,
            embed_mask=None if spec.embeds is None else np.array(spec.embeds, dtype=np.bool_),
            seconds_per_grid=spec.seconds_per_grid,
            declared_rows=spec.rows,
        )
        for spec in specs
    ]


def oracle_items(specs: Iterable[ItemSpec]) -> list[OracleItem]:
    """Items as the oracle takes them."""
    return [
        OracleItem(
            key=spec.key,
            modality=spec.modality,
            offset=spec.offset,
            length=spec.length,
            grid=spec.grid,
            mask=spec.embeds,
            seconds_per_grid=spec.seconds_per_grid,
            rows=spec.rows,
        )
        for spec in specs
    ]


def by_offset(specs: Iterable[ItemSpec]) -> list[ItemSpec]:
    """Items in the order in which they are numbered."""
    return sorted(specs, key=lambda spec: (spec.offset, spec.offset + spec.length))
