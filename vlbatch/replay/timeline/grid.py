"""Where steps and rows lie: cells as large as they fit, or several steps and rows in one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from vlbatch.replay.timeline.model import Timeline
from vlbatch.replay.timeline.shapes import Box

Detail: TypeAlias = Literal["full", "middle", "dense"]
"""``full``: cells with text; ``middle``: names at the beginning of a run; ``dense``: colours."""

LEFT, RIGHT, TOP = 96.0, 24.0, 92.0
MAX_WIDTH, MAX_HEIGHT = 1120.0, 760.0
"""Of the panel of rows and steps."""
MIN_CELL_WIDTH, MIN_CELL_HEIGHT = 4.0, 2.5


@dataclass(frozen=True, slots=True)
class Grid:
    """The panel of rows and steps.

    Attributes:
        detail: what a cell shows.
        cell_width: pixels from one column to the next.
        cell_height: pixels from one row to the next.
        gap: pixels between columns, for the moves.
        pad: pixels between rows.
        steps_per_column: steps that share a column.
        rows_per_band: rows that share a band.
        num_columns: columns.
        num_bands: bands.

    """

    detail: Detail
    cell_width: float
    cell_height: float
    gap: float
    pad: float
    steps_per_column: int
    rows_per_band: int
    num_columns: int
    num_bands: int

    @classmethod
    def of(cls, timeline: Timeline) -> Grid:
        """Choose sizes for a timeline."""
        steps, rows = max(len(timeline.columns), 1), max(timeline.num_rows, 1)
        if steps <= 12 and rows <= 12:
            return cls(
                "full",
                max(min(150.0, MAX_WIDTH // steps), 92.0),
                46.0,
                20.0,
                6.0,
                1,
                1,
                steps,
                rows,
            )
        if steps <= 70 and rows <= 40:
            width = max(min(36.0, MAX_WIDTH // steps), 16.0)
            height = max(min(26.0, MAX_HEIGHT // rows), 15.0)
            return cls("middle", width, height, round(width * 0.3), 3.0, 1, 1, steps, rows)
        per_column = -(-steps // int(MAX_WIDTH // MIN_CELL_WIDTH))
        per_band = -(-rows // int(MAX_HEIGHT // MIN_CELL_HEIGHT))
        columns, bands = -(-steps // per_column), -(-rows // per_band)
        width = min(MAX_WIDTH / columns, 24.0)
        height = min(MAX_HEIGHT / bands, 16.0)
        pad = 1.0 if height >= 7 else 0.0
        return cls("dense", width, height, 0.0, pad, per_column, per_band, columns, bands)

    @property
    def width(self) -> float:
        """Pixels of all columns."""
        return self.num_columns * self.cell_width

    @property
    def height(self) -> float:
        """Pixels of all bands."""
        return self.num_bands * self.cell_height

    def x(self, step: int) -> float:
        """Left edge of the column of a step, counted from 0; the gap is before its cells."""
        return LEFT + step // self.steps_per_column * self.cell_width

    def y(self, row: float) -> float:
        """Upper edge of a row."""
        return TOP + row / self.rows_per_band * self.cell_height

    def cell(self, step: int, row: int) -> Box:
        """Where a cell is drawn."""
        band = row // self.rows_per_band
        return (
            self.x(step) + self.gap,
            TOP + band * self.cell_height + self.pad / 2,
            self.cell_width - self.gap,
            self.cell_height - self.pad,
        )
