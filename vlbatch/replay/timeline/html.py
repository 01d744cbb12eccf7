"""The picture as one HTML file that needs nothing else: the SVG, and what a hover shows."""

from __future__ import annotations

import json
from html import escape
from importlib import resources

from vlbatch.replay.timeline.grid import LEFT, TOP, Grid
from vlbatch.replay.timeline.model import REGIONS, Cell, Column, Timeline
from vlbatch.replay.timeline.palette import DARK, LIGHT, THEMES, Theme
from vlbatch.replay.timeline.shapes import Drawing, printable
from vlbatch.replay.timeline.svg import FONT, render_svg

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{svg}
<div id="hover" role="status" hidden></div>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""

_STYLE = f"""
body{{margin:0;font-family:{FONT};background:var(--page);color:var(--ink)}}
svg{{display:block;margin:auto}}
#hover{{position:fixed;max-width:34em;padding:8px 11px;border-radius:7px;font-size:12.5px;
line-height:1.5;white-space:pre-line;pointer-events:none;background:var(--page);color:var(--ink);
border:1px solid var(--grid);box-shadow:0 4px 18px rgba(0,0,0,.25);overflow-wrap:anywhere}}
#hover b{{display:block}}
#hover em{{color:var(--fault);font-style:normal;font-weight:600}}
"""


def render_html(timeline: Timeline, drawing: Drawing, grid: Grid, theme: str = "auto") -> str:
    """Write one self-contained page.

    Args:
        timeline: what the hover shows.
        drawing: its picture.
        grid: where the cells are.
        theme: ``"light"``, ``"dark"``, or ``"auto"`` for the viewer's preference.

    """
    data = json.dumps(_data(timeline, grid), separators=(",", ":"))
    return _PAGE.format(
        title=escape(printable(timeline.title)),
        style=_variables(theme) + _STYLE,
        svg=render_svg(drawing, theme, attributes=' id="picture"'),
        data=data.replace("<", "\\u003c"),  # nothing in it may end the script element
        script=resources.files(__package__).joinpath("hover.js").read_text(encoding="utf-8"),
    )


def _variables(theme: str) -> str:
    def of(colours: Theme) -> str:
        return ":root{" + "".join(f"--{n}:{c};" for n, c in colours.items()) + "}"

    if theme != "auto":
        return of(THEMES[theme])
    return f"{of(LIGHT)}@media (prefers-color-scheme:dark){{{of(DARK)}}}"


def _data(timeline: Timeline, grid: Grid) -> dict[str, object]:
    return {
        "left": LEFT,
        "top": TOP,
        "cellWidth": grid.cell_width,
        "cellHeight": grid.cell_height,
        "stepsPerColumn": grid.steps_per_column,
        "rowsPerBand": grid.rows_per_band,
        "gap": grid.gap,
        "height": grid.height,
        "regions": REGIONS,
        "requests": timeline.requests,
        "steps": [_step(column, timeline) for column in timeline.columns],
    }


def _step(column: Column, timeline: Timeline) -> dict[str, object]:
    """A step: four numbers a cell in row order, and by row what only some cells have."""

    def names(requests: list[int]) -> list[str]:
        return [timeline.requests[request] for request in requests]

    data: dict[str, object] = {
        "line": column.line,
        "cells": [
            number
            for cell in column.cells
            for number in (cell.request, REGIONS.index(cell.region), *cell.chunk)
        ],
        "more": {cell.row: more for cell in column.cells if (more := _more(cell))},
        "moved": column.moved,
        "encoded": [f"{key} ({rows} rows)" for key, rows in column.encoded.items()],
        "hits": column.hits,
        "evicted": column.evicted,
        "admitted": names(column.admitted),
        "resumed": names(column.resumed),
        "finished": names(column.finished),
        "preempted": names(column.preempted),
        "failed": names(column.failed),
        "faults": column.faults,
    }
    return {key: value for key, value in data.items() if value or key == "cells"}


def _more(cell: Cell) -> list[object]:
    """Sentences on a cell that is not like the others: plain ones, then faults."""
    lines = []
    if cell.came_from is not None:
        lines.append(f"moved from row {cell.came_from}")
    for piece in cell.pieces:
        first, stop = piece.rows
        cuts = [
            *(["begun before"] if piece.is_cut_before else []),
            *(["goes on"] if piece.is_cut_after else []),
        ]
        how = f" ({', '.join(cuts)})" if cuts else ""
        lines.append(
            f"{piece.modality} {piece.key}: rows [{first}, {stop}) of {piece.num_rows}{how}"
        )
    return [lines, list(cell.faults)] if lines or cell.faults else []
