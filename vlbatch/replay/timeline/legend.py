"""The legend: what the colours and marks of this picture mean."""

from __future__ import annotations

from vlbatch.replay.timeline.grid import LEFT, RIGHT, Grid
from vlbatch.replay.timeline.marks import diamond, jagged, preempted_mark, resumed_mark
from vlbatch.replay.timeline.model import REGIONS, Timeline
from vlbatch.replay.timeline.palette import REGION_OPACITY, request_colour
from vlbatch.replay.timeline.shapes import Blocks, Drawing, Line, Point, Polygon, Text, text_width

_SIZE = 10.5
_MAX_NAMES = 48
"""Requests that are named."""


class _Legend:
    """Places one entry after the other, in lines."""

    def __init__(self, drawing: Drawing, y: float) -> None:
        self._drawing = drawing
        self._x = LEFT
        self.y = y

    def entry(self, name: str, room: float = 24.0) -> Point:
        """Write a name; returns the baseline of its mark, with ``room`` pixels before the name."""
        width = room + text_width(name, _SIZE) + 16
        if self._x + width > self._drawing.width - RIGHT / 2 and self._x > LEFT:
            self._x, self.y = LEFT, self.y + 18
        at = (self._x, self.y)
        self._drawing.add(Text((self._x + room, self.y), name, _SIZE, "muted"))
        self._x += width
        return at


def draw_legend(drawing: Drawing, timeline: Timeline, grid: Grid, top: float) -> float:
    """Explain what occurs in the picture; returns the bottom."""
    legend = _Legend(drawing, top + 8)
    _explain_rows(drawing, timeline, legend)
    _explain_marks(drawing, timeline, grid, legend)
    y = legend.y
    if grid.steps_per_column * grid.rows_per_band > 1:
        y += 18
        text = (
            f"a cell stands for {grid.steps_per_column} steps and {grid.rows_per_band} rows and has"
            " the colour of the request with most of them; grey where none has half"
        )
        drawing.add(Text((LEFT, y), text, _SIZE, "muted"))
    if grid.detail == "full" or len(timeline.requests) > _MAX_NAMES:
        return y
    names = _Legend(drawing, y + 20)
    for number, name in enumerate(timeline.requests):
        x, y = names.entry(name, 15)
        drawing.add(Blocks([(x, y - 9, 10, 10)], request_colour(number), 1, 2, number))
    return names.y


def _explain_rows(drawing: Drawing, timeline: Timeline, legend: _Legend) -> None:
    """Regions, and the lines between them."""
    seen = {cell.region for column in timeline.columns for cell in column.cells}
    for region in REGIONS:
        if region in seen:
            x, y = legend.entry(region)
            box = (x, y - 9, 18.0, 11.0)
            drawing.add(Blocks([box], request_colour(0), REGION_OPACITY[region], 2))
    for bound, name in enumerate(("end of decode", "end of extend")):
        if any(column.has_bound(bound) for column in timeline.columns):
            x, y = legend.entry(name)
            drawing.add(Line([(x, y - 4), (x + 18, y - 4)], "ink", 1.6, is_dashed=bound == 1))


def _explain_marks(drawing: Drawing, timeline: Timeline, grid: Grid, legend: _Legend) -> None:
    """What lies on and between cells."""
    columns = timeline.columns
    pieces = [piece for column in columns for cell in column.cells for piece in cell.pieces]
    if pieces:
        x, y = legend.entry("image or video")
        drawing.add(Blocks([(x, y - 8, 18, 9)], "ink", 0.7))
    if grid.detail != "dense" and any(p.is_cut_before or p.is_cut_after for p in pieces):
        x, y = legend.entry("cut by the chunk")
        drawing.add(Polygon(jagged((x, y - 9, 18, 10), left=False, right=True), "ink", 0.78))
    if any(column.moved for column in columns) and grid.detail == "dense":
        x, y = legend.entry("moved here", 12)
        drawing.add(Blocks([(x + 6, y - 10, 1, 12)], "ink", 0.75))
    elif any(column.moved for column in columns):
        x, y = legend.entry("moved")
        drawing.add(Line([(x, y), (x + 18, y - 9)], request_colour(0), 2, is_curved=True))
    if any(column.preempted for column in columns):
        x, y = legend.entry("preempted", 18)
        drawing.add(Blocks(preempted_mark((x + 5, y - 10), 12, grid), "ink"))
    if any(column.resumed for column in columns):
        x, y = legend.entry("resumed", 18)
        left = x if grid.detail == "dense" else x + 10
        drawing.add(Polygon(resumed_mark((left, y - 10), 12, grid), "ink"))
    if timeline.first_fault() is not None:
        x, y = legend.entry("wrong", 18)
        drawing.add(Polygon(diamond((x + 6, y - 4), 6), "fault"))
