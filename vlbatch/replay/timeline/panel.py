"""The panel of rows and steps: who is where, what is computed, and how rows move."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from vlbatch.replay.timeline.grid import LEFT, TOP, Grid
from vlbatch.replay.timeline.marks import draw_marks, draw_moves
from vlbatch.replay.timeline.model import Column, Region, Timeline
from vlbatch.replay.timeline.palette import REGION_OPACITY, request_colour
from vlbatch.replay.timeline.shapes import (
    Anchor,
    Blocks,
    Box,
    Drawing,
    Line,
    Text,
    fit_text,
    text_width,
)

Run = tuple[int, int, Region, int, int]
"""Band, request, region, first and last column."""

MIXED = -1
"""Stands for the request of a cell in which none has the majority."""


def draw_panel(drawing: Drawing, timeline: Timeline, grid: Grid) -> None:
    """Draw everything between the axes."""
    drawing.add(Blocks([(LEFT, TOP, grid.width, grid.height)], "panel"))
    _draw_axes(drawing, timeline, grid)
    draw_moves(drawing, timeline, grid)
    _draw_cells(drawing, timeline, grid)
    draw_marks(drawing, timeline, grid)
    if grid.detail == "full":
        _draw_captions(drawing, timeline, grid)
    else:
        _draw_names(drawing, timeline, grid)


# -- axes ----------------------------------------------------------------------------------------
def _draw_axes(drawing: Drawing, timeline: Timeline, grid: Grid) -> None:
    every = _tick(len(timeline.columns), grid.cell_width / grid.steps_per_column, 34)
    is_dense = grid.detail == "dense"
    for step in range(len(timeline.columns)):
        number = step + 1
        if number == 1 or number % every == 0:
            x = grid.x(step) + grid.gap + (0 if is_dense else (grid.cell_width - grid.gap) / 2)
            anchor: Anchor = "start" if is_dense else "middle"
            drawing.add(Text((x, TOP - 8), str(number), 10, "muted", anchor))
            if is_dense:
                drawing.add(Line([(x, TOP - 5), (x, TOP)], "muted", 0.75))
    drawing.add(Text((LEFT - 8, TOP - 8), "step", 10, "muted", "end"))
    every = _tick(timeline.num_rows, grid.cell_height / grid.rows_per_band, 15)
    for row in range(0, timeline.num_rows, every):
        y = grid.y(row)
        middle = y + (min(grid.cell_height / 2, 5.5) if is_dense else grid.cell_height / 2)
        drawing.add(Text((LEFT - 8, middle + 3.5), f"row {row}", 10, "muted", "end"))
        if is_dense:
            drawing.add(Line([(LEFT - 5, y), (LEFT, y)], "muted", 0.75))


def _tick(count: int, pixels: float, room: float) -> int:
    """Smallest round step that leaves so many pixels between ticks."""
    for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000):
        if step * pixels >= room:
            return step
    return max(count, 1)


# -- cells ---------------------------------------------------------------------------------------
def _draw_cells(drawing: Drawing, timeline: Timeline, grid: Grid) -> None:
    boxes: dict[tuple[int, Region], list[Box]] = defaultdict(list)
    for band, request, region, first, last in _runs(timeline, grid):
        step = first * grid.steps_per_column
        x, y, w, h = grid.cell(step, band * grid.rows_per_band)
        boxes[request, region].append((x, y, w + (last - first) * grid.cell_width, h))
    radius = {"full": 5.0, "middle": 2.5, "dense": 0.0}[grid.detail]
    for (request, region), each in sorted(boxes.items()):
        if request == MIXED:
            drawing.add(Blocks(each, "muted", 0.35))
        else:
            colour = request_colour(request)
            drawing.add(Blocks(each, colour, REGION_OPACITY[region], radius, request))


def _runs(timeline: Timeline, grid: Grid) -> Iterator[Run]:
    """Cells of one look that touch, as one; where there are gaps, each cell is one."""
    open_runs: dict[int, Run] = {}
    for column in range(grid.num_columns):
        first = column * grid.steps_per_column
        steps = timeline.columns[first : first + grid.steps_per_column]
        looks = _looks(steps, grid.rows_per_band)
        for band in sorted(open_runs.keys() | looks.keys()):
            run = open_runs.get(band)
            look = looks.get(band)
            if run is not None and (look != run[1:3] or grid.gap):
                yield open_runs.pop(band)
                run = None
            if look is not None:
                start = column if run is None else run[3]
                open_runs[band] = (band, *look, start, column)
    yield from open_runs.values()


def _looks(steps: Sequence[Column], rows_per_band: int) -> dict[int, tuple[int, Region]]:
    """Band -> request and region of most of its cells, if one request has half of them."""
    if len(steps) == 1 and rows_per_band == 1:
        return {cell.row: (cell.request, cell.region) for cell in steps[0].cells}
    votes: dict[int, Counter[tuple[int, Region]]] = defaultdict(Counter)
    for column in steps:
        for cell in column.cells:
            votes[cell.row // rows_per_band][cell.request, cell.region] += 1
    looks: dict[int, tuple[int, Region]] = {}
    for band, counts in votes.items():
        by_request: Counter[int] = Counter()
        for (request, _), count in counts.items():
            by_request[request] += count
        request, most = by_request.most_common(1)[0]
        look = max((n, look) for look, n in counts.items() if look[0] == request)[1]
        looks[band] = look if 2 * most >= by_request.total() else (MIXED, "idle")
    return looks


# -- words ---------------------------------------------------------------------------------------
def _draw_captions(drawing: Drawing, timeline: Timeline, grid: Grid) -> None:
    """In each cell: the request, and its tokens."""
    for step, _, cell in timeline.cells():
        x, y, w, _ = grid.cell(step, cell.row)
        first, stop = cell.chunk
        tokens = f"[{first},{stop})" if stop > first + 1 else f"{first}"
        if stop == first:
            tokens = "waits"
        room = w - 16 - text_width(tokens, 10)
        name = fit_text(timeline.requests[cell.request], 12, room)
        paint = _text_paint(cell.region)
        drawing.add(Text((x + 6, y + 15), name, 12, paint, is_bold=True))
        drawing.add(Text((x + w - 5, y + 15), tokens, 10, paint, "end"))


def _text_paint(region: Region) -> str:
    return "on_colour" if region == "prefill" else "ink"


def _draw_names(drawing: Drawing, timeline: Timeline, grid: Grid) -> None:
    """The request at the beginning of a run of cells that is long enough."""
    if grid.cell_height < 9 or grid.steps_per_column > 1 or grid.rows_per_band > 1:
        return
    size = min(10.0, grid.cell_height - 4)
    runs: dict[int, tuple[int, int, int]] = {}  # row -> request, first and last step
    done: list[tuple[int, int, int, int]] = []
    for step, column in enumerate(timeline.columns):
        for cell in column.cells:
            run = runs.get(cell.row)
            if run is not None and run[0] == cell.request and run[2] == step - 1:
                runs[cell.row] = (run[0], run[1], step)
            else:
                done += [(cell.row, *run)] if run else []
                runs[cell.row] = (cell.request, step, step)
    done += [(row, *run) for row, run in runs.items()]
    for row, request, first, last in done:
        x, y, w, h = grid.cell(first, row)
        room = (last - first) * grid.cell_width + w - 4
        name = fit_text(timeline.requests[request], size, room)
        high = h * 0.62 if grid.detail == "middle" else h
        if name:
            region = timeline.columns[first].cells[row].region
            at = (x + 2.5, y + high / 2 + size * 0.36)
            drawing.add(Text(at, name, size, _text_paint(region)))
