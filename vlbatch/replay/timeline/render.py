"""From a timeline to the bytes of a picture."""

from __future__ import annotations

from vlbatch.replay.timeline.html import render_html
from vlbatch.replay.timeline.layout import lay_out
from vlbatch.replay.timeline.model import Timeline
from vlbatch.replay.timeline.png import render_png
from vlbatch.replay.timeline.svg import render_svg


def render(timeline: Timeline, kind: str, theme: str = "auto") -> bytes:
    """Draw a timeline.

    Args:
        timeline: what to draw.
        kind: ``".svg"``, ``".png"`` or ``".html"``.
        theme: ``"light"``, ``"dark"``, or ``"auto"`` for the viewer's preference (light in a PNG).

    """
    drawing, grid = lay_out(timeline)
    if kind == ".png":
        return render_png(drawing, "light" if theme == "auto" else theme)
    if kind == ".svg":
        return render_svg(drawing, theme).encode()
    return render_html(timeline, drawing, grid, theme).encode()
