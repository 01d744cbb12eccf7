"""The whole picture: title, panel, lanes of events, legend."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from vlbatch.replay.timeline.grid import LEFT, RIGHT, TOP, Grid
from vlbatch.replay.timeline.legend import draw_legend
from vlbatch.replay.timeline.model import Column, Timeline
from vlbatch.replay.timeline.panel import draw_panel
from vlbatch.replay.timeline.shapes import Blocks, Drawing, Line, Text, fit_text

LANE_HEIGHT = 26.0

_LANES: tuple[tuple[str, str, Callable[[Column], int]], ...] = (
    ("tokens", "muted", lambda c: sum(cell.chunk[1] - cell.chunk[0] for cell in c.cells)),
    ("rows moved", "ink", lambda c: c.moved),
    ("encoded rows", "ink", lambda c: sum(c.encoded.values())),
    ("cache hits", "ink", lambda c: len(c.hits)),
    ("evicted", "ink", lambda c: len(c.evicted)),
    ("preempted", "ink", lambda c: len(c.preempted)),
    ("failed", "fault", lambda c: len(c.failed)),
    ("wrong", "fault", lambda c: c.num_faults),
)


def lay_out(timeline: Timeline) -> tuple[Drawing, Grid]:
    """Arrange a timeline; returns the drawing and where its cells are."""
    grid = Grid.of(timeline)
    drawing = Drawing(max(LEFT + grid.width + RIGHT, 640.0), 0.0)
    _draw_head(drawing, timeline)
    draw_panel(drawing, timeline, grid)
    bottom = _draw_lanes(drawing, timeline, grid, TOP + grid.height + 14)
    bottom = draw_legend(drawing, timeline, grid, bottom + 14)
    drawing.height = bottom + 10
    return drawing, grid


# -- head ----------------------------------------------------------------------------------------
def _draw_head(drawing: Drawing, timeline: Timeline) -> None:
    room = drawing.width - 40
    drawing.add(Text((20, 28), fit_text(timeline.title, 16, room), 16, is_bold=True))
    drawing.add(Text((20, 46), fit_text(summary(timeline), 11.5, room), 11.5, "muted"))
    fault = timeline.first_fault()
    if fault is not None:
        text = f"first fault, step {fault[0]}: {fault[1]}"
        drawing.add(Text((20, 63), fit_text(text, 11.5, room), 11.5, "fault", is_bold=True))


def summary(timeline: Timeline) -> str:
    """What happened, in numbers."""
    columns = timeline.columns

    def total(count: Callable[[Column], int]) -> int:
        return sum(map(count, columns))

    parts = [
        _count(len(timeline.requests), "request"),
        _count(len(columns), "step"),
        _count(timeline.num_rows, "row"),
        f"{total(lambda c: c.moved)} moved",
        f"{total(lambda c: len(c.encoded))} encoded",
        _count(total(lambda c: len(c.hits)), "cache hit"),
        f"{total(lambda c: len(c.evicted))} evicted",
        f"{total(lambda c: len(c.preempted))} preempted",
    ]
    return " · ".join(part for part in parts if not part.startswith("0 "))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# -- lanes ---------------------------------------------------------------------------------------
def _draw_lanes(drawing: Drawing, timeline: Timeline, grid: Grid, top: float) -> float:
    """Bars below the panel, a lane for each kind of event that occurs; returns the bottom."""
    for name, paint, count in _LANES:
        values = _by_column(map(count, timeline.columns), grid.steps_per_column)
        most = max(values, default=0)
        if not most:
            continue
        base = top + LANE_HEIGHT - 4
        drawing.add(Line([(LEFT, base), (LEFT + grid.width, base)], "grid", 1))
        drawing.add(Text((LEFT - 8, base - 8), name, 10, "muted", "end"))
        drawing.add(Text((LEFT - 8, base + 2), f"max {most}", 8.5, "muted", "end"))
        bars = []
        for column, value in enumerate(values):
            if not value:
                continue
            x, width = LEFT + column * grid.cell_width + grid.gap, grid.cell_width - grid.gap
            inset = min(width * 0.15, 6)
            high = (LANE_HEIGHT - 10) * value / most
            bars.append((x + inset, base - high, width - 2 * inset, high))
            if grid.detail == "full":
                below = _names(timeline.columns[column], name, value, width)
                drawing.add(Text((x + width / 2, base + 9), below, 9, "muted", "middle"))
        drawing.add(Blocks(bars, paint, 0.8 if paint == "fault" else 0.6))
        top += LANE_HEIGHT + (10 if grid.detail == "full" else 4)
    return top


def _names(column: Column, lane: str, value: int, width: float) -> str:
    """Below a bar with room for it: the keys, or the number."""
    keys = {
        "encoded rows": list(column.encoded),
        "cache hits": column.hits,
        "evicted": column.evicted,
    }
    text = ", ".join(keys.get(lane, [])) or str(value)
    return fit_text(text, 9, width) or str(value)


def _by_column(values: Iterable[int], steps_per_column: int) -> list[int]:
    """Sums of the steps that share a column."""
    each = list(values)
    return [sum(each[n : n + steps_per_column]) for n in range(0, len(each), steps_per_column)]
