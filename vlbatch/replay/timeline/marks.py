"""Marks on and between the cells: moves, media, who comes and goes, regions, faults."""

from __future__ import annotations

from collections.abc import Iterator

from vlbatch.replay.timeline.grid import TOP, Grid
from vlbatch.replay.timeline.model import Timeline
from vlbatch.replay.timeline.palette import request_colour
from vlbatch.replay.timeline.shapes import (
    OTHERS,
    Blocks,
    Box,
    Drawing,
    Frame,
    Line,
    Point,
    Polygon,
    Text,
    fit_text,
)


def draw_moves(drawing: Drawing, timeline: Timeline, grid: Grid) -> None:
    """Draw, below the cells, a line through the gap from the old row of a request to the new."""
    if grid.detail == "dense":
        return
    width = 2.5 if grid.detail == "full" else 1.6
    for step, _, cell in timeline.cells():
        if cell.came_from is None or step == 0:
            continue
        x, y, _, h = grid.cell(step, cell.row)
        old_x, old_y, old_w, _ = grid.cell(step - 1, cell.came_from)
        line = [(old_x + old_w, old_y + h / 2), (x, y + h / 2)]
        colour = request_colour(cell.request)
        drawing.add(Line(line, colour, width, is_curved=True, tag=cell.request))


def draw_marks(drawing: Drawing, timeline: Timeline, grid: Grid) -> None:
    """Draw everything else, above the cells."""
    if grid.detail == "dense":
        _draw_arrivals(drawing, timeline, grid)
    _draw_media(drawing, timeline, grid)
    _draw_comings(drawing, timeline, grid)
    _draw_bounds(drawing, timeline, grid)
    _draw_faults(drawing, timeline, grid)


def _draw_arrivals(drawing: Drawing, timeline: Timeline, grid: Grid) -> None:
    """A dark edge where a request arrives by a move."""
    edges: dict[Box, None] = {}  # cells that share a place share an edge
    for step, _, cell in timeline.cells():
        if cell.came_from is not None:
            x, y, _, h = grid.cell(step, cell.row)
            edges[x, y, 1.0, h] = None
    drawing.add(Blocks(list(edges), "ink", 0.75, tag=OTHERS))


def _draw_media(drawing: Drawing, timeline: Timeline, grid: Grid) -> None:
    """Where image tokens lie in a chunk: a dark bar, jagged where the image is cut."""
    bars: dict[Box, None] = {}
    for step, _, cell in timeline.cells():
        x, y, w, h = grid.cell(step, cell.row)
        first, stop = cell.chunk
        for piece in cell.pieces:
            if grid.detail == "dense":
                bars[x, y + h * 0.55, w, max(h * 0.45, 1)] = None
                break
            left = x + 3 + (w - 6) * (piece.span[0] - first) / (stop - first)
            right = x + 3 + (w - 6) * (piece.span[1] - first) / (stop - first)
            high = 15.0 if grid.detail == "full" else h * 0.36
            box = (left, y + h - high - 3, max(right - left, 1.5), high)
            drawing.add(
                Polygon(
                    jagged(box, left=piece.is_cut_before, right=piece.is_cut_after), "ink", 0.78
                )
            )
            if grid.detail == "full":
                rows = f"{piece.key} [{piece.rows[0]},{piece.rows[1]})"
                label = fit_text(rows, 9.5, box[2] - 8) or fit_text(piece.key, 9.5, box[2] - 6)
                middle = (box[0] + box[2] / 2, box[1] + high - 4)
                drawing.add(Text(middle, label, 9.5, "on_ink", "middle"))
    drawing.add(Blocks(list(bars), "ink", 0.5, tag=OTHERS))


def jagged(box: Box, *, left: bool, right: bool) -> list[Point]:
    """A rectangle whose cut sides are sawtooth edges."""
    x, y, w, h = box
    tooth = min(3.0, w / 3)
    teeth = 3
    points: list[Point] = []
    if right:
        for n in range(teeth):
            points += [(x + w - tooth, y + h * n / teeth), (x + w, y + h * (n + 0.5) / teeth)]
        points.append((x + w - tooth, y + h))
    else:
        points += [(x + w, y), (x + w, y + h)]
    if left:
        for n in range(teeth, 0, -1):
            points += [(x + tooth, y + h * n / teeth), (x, y + h * (n - 0.5) / teeth)]
        points.append((x + tooth, y))
    else:
        points += [(x, y + h), (x, y)]
    return points


def _draw_comings(drawing: Drawing, timeline: Timeline, grid: Grid) -> None:
    """Two bars where a request is preempted, a triangle where it comes back."""
    for step, column in enumerate(timeline.columns):
        rows = {cell.request: cell.row for cell in column.cells}
        for request in column.preempted:
            if request in rows:
                x, y, w, h = grid.cell(step, rows[request])
                drawing.add(Blocks(preempted_mark((x + w, y), h, grid), "ink"))
        for request in column.resumed:
            if request in rows:
                x, y, _, h = grid.cell(step, rows[request])
                drawing.add(Polygon(resumed_mark((x, y), h, grid), "ink"))


def preempted_mark(corner: Point, height: float, grid: Grid) -> list[Box]:
    """Two bars behind a cell, or one at its end where there is no gap."""
    x, y = corner
    if grid.detail == "dense":
        return [(x - 2.5, y, 2.5, height)]
    return [(x + 1.5, y, 2.0, height), (x + 5, y, 2.0, height)]


def resumed_mark(corner: Point, height: float, grid: Grid) -> list[Point]:
    """A triangle before a cell, or at its beginning where there is no gap."""
    x, y = corner
    side = min(height, 12.0)
    left = x if grid.detail == "dense" else x - side * 0.7 - 1.5
    top = y + (height - side) / 2
    return [(left, top), (left + side * 0.7, top + side / 2), (left, top + side)]


def _draw_bounds(drawing: Drawing, timeline: Timeline, grid: Grid) -> None:
    """Stepped lines where extend ends and, on top, where decode ends."""
    for bound in (1, 0):
        for points in _bound_lines(timeline, grid, bound):
            drawing.add(Line(points, "page", 3.2, 0.7))
            drawing.add(Line(points, "ink", 1.6, is_dashed=bound == 1))


def _bound_lines(timeline: Timeline, grid: Grid, bound: int) -> Iterator[list[Point]]:
    """The end of a region, as far as it is connected."""
    points: list[Point] = []
    for step in range(0, len(timeline.columns), grid.steps_per_column):
        column = timeline.columns[step]
        if not column.has_bound(bound):
            if points:
                yield points
            points = []
            continue
        x, y = grid.x(step), grid.y(column.region_bounds()[bound])
        if points:
            turn = x + grid.gap / 2
            points += [(turn, points[-1][1]), (turn, y)]
        else:
            points = [(x + grid.gap, y)]
        points.append((x + grid.cell_width, y))
    if points:
        yield points


def _draw_faults(drawing: Drawing, timeline: Timeline, grid: Grid) -> None:
    for step, column in enumerate(timeline.columns):
        for cell in column.cells:
            if not cell.faults:
                continue
            x, y, w, h = grid.cell(step, cell.row)
            if grid.detail == "dense":
                middle = (x + w / 2, y + h / 2)
                drawing.add(
                    Polygon(diamond(middle, 7.5), "page"), Polygon(diamond(middle, 6), "fault")
                )
            else:
                drawing.add(Frame((x - 1, y - 1, w + 2, h + 2), "fault", 2.5, 5))
        if column.faults:
            middle = (grid.x(step) + (grid.cell_width + grid.gap) / 2, TOP - 20)
            drawing.add(Polygon(diamond(middle, 6), "fault"))


def diamond(middle: Point, size: float) -> list[Point]:
    """A square on its corner."""
    x, y = middle
    return [(x, y - size), (x + size, y), (x, y + size), (x - size, y)]
