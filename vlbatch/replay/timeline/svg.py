"""The picture as SVG, which follows the viewer's light or dark scheme."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from vlbatch.replay.timeline.palette import DARK, LIGHT, THEMES, Theme
from vlbatch.replay.timeline.shapes import Blocks, Drawing, Frame, Line, Polygon, Shape, Text

FONT = "ui-sans-serif, system-ui, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif"


def render_svg(drawing: Drawing, theme: str = "auto", *, attributes: str = "") -> str:
    """Write a drawing as one SVG document.

    Args:
        drawing: what to draw.
        theme: ``"light"``, ``"dark"``, or ``"auto"`` for the viewer's preference.
        attributes: more attributes of the root element.

    """
    width, height = _number(drawing.width), _number(drawing.height)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" font-family="{FONT}"{attributes}>'
    )
    page = Blocks([(0, 0, drawing.width, drawing.height)], "page")
    body = (_element(shape) for shape in (page, *drawing.shapes))
    return "\n".join([head, f"<style>{_style(theme)}</style>", *body, "</svg>"]) + "\n"


def _style(theme: str) -> str:
    if theme != "auto":
        return _rules(THEMES[theme])
    return f"{_rules(LIGHT)}@media (prefers-color-scheme: dark){{{_rules(DARK)}}}"


def _rules(theme: Theme) -> str:
    return "".join(f".f-{n}{{fill:{c}}}.s-{n}{{stroke:{c}}}" for n, c in theme.items())


def _element(shape: Shape) -> str:
    match shape:
        case Blocks():
            look = _look("fill", shape.paint, shape.opacity, shape.tag)
            return "".join(f"<{each}{look}/>" for each in _boxes(shape))
        case Polygon():
            points = " ".join(f"{_number(x)},{_number(y)}" for x, y in shape.points)
            return f'<polygon points="{points}"{_look("fill", shape.paint, shape.opacity)}/>'
        case Line():
            look = _look("stroke", shape.paint, shape.opacity, shape.tag)
            dash = ' stroke-dasharray="4 3"' if shape.is_dashed else ""
            width = _number(shape.width)
            return f'<path d="{_path(shape)}" fill="none"{look} stroke-width="{width}"{dash}/>'
        case Frame():
            x, y, w, h = map(_number, shape.box)
            radius = f' rx="{_number(shape.radius)}"' if shape.radius else ""
            look = _look("stroke", shape.paint)
            return (
                f'<rect x="{x}" y="{y}" width="{w}" height="{h}"{radius} fill="none"{look}'
                f' stroke-width="{_number(shape.width)}"/>'
            )
        case Text():
            weight = ' font-weight="600"' if shape.is_bold else ""
            anchor = f' text-anchor="{shape.anchor}"' if shape.anchor != "start" else ""
            x, y = map(_number, shape.at)
            return (
                f'<text x="{x}" y="{y}" font-size="{_number(shape.size)}"'
                f"{_look('fill', shape.paint)}{weight}{anchor}>{escape(shape.text)}</text>"
            )


def _boxes(blocks: Blocks) -> Iterator[str]:
    """Start tags: one path for all boxes, or one rectangle each where corners are round."""
    if blocks.radius:
        for x, y, w, h in blocks.boxes:
            box = f'x="{_number(x)}" y="{_number(y)}" width="{_number(w)}" height="{_number(h)}"'
            yield f'rect {box} rx="{_number(blocks.radius)}"'
    elif blocks.boxes:
        path = "".join(
            f"M{_number(x)} {_number(y)}h{_number(w)}v{_number(h)}h{_number(-w)}z"
            for x, y, w, h in blocks.boxes
        )
        yield f'path d="{path}"'


def _path(line: Line) -> str:
    points = [f"{_number(x)} {_number(y)}" for x, y in line.points]
    if not line.is_curved:
        return "M" + "L".join(points)
    (x0, y0), (x1, y1) = line.points[0], line.points[-1]
    middle = _number((x0 + x1) / 2)
    return f"M{points[0]}C{middle} {_number(y0)} {middle} {_number(y1)} {points[-1]}"


def _look(kind: str, paint: str, opacity: float = 1.0, tag: int | None = None) -> str:
    """Attributes for a colour: a class of the theme, or the colour itself; and the highlight."""
    classes = [] if paint.startswith("#") else [f"{kind[0]}-{paint}"]
    if tag is not None:
        classes += ["t", f"r{tag}"]
    look = f' {kind}="{paint}"' if paint.startswith("#") else ""
    if classes:
        look += f' class="{" ".join(classes)}"'
    return look + (f' opacity="{opacity:g}"' if opacity < 1 else "")


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
