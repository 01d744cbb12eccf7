"""What a picture consists of, in pixels from the top left: the only thing that renderers know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

Point: TypeAlias = tuple[float, float]
Box: TypeAlias = tuple[float, float, float, float]
"""x, y, width, height."""

OTHERS = -1
"""A tag that is no request's."""

Anchor: TypeAlias = Literal["start", "middle", "end"]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Filled rectangles of one look.

    Attributes:
        boxes: where.
        paint: name of a theme colour, or ``#rrggbb``.
        opacity: 0 to 1.
        radius: of the corners.
        tag: number of the request that they belong to, for highlighting; ``OTHERS`` for what
            is faint while any is highlighted.

    """

    boxes: Sequence[Box]
    paint: str
    opacity: float = 1.0
    radius: float = 0.0
    tag: int | None = None


@dataclass(frozen=True, slots=True)
class Polygon:
    """A filled outline."""

    points: Sequence[Point]
    paint: str
    opacity: float = 1.0


@dataclass(frozen=True, slots=True)
class Line:
    """A polyline, or with ``curved`` a soft S from the first point to the last."""

    points: Sequence[Point]
    paint: str
    width: float = 1.0
    opacity: float = 1.0
    is_dashed: bool = False
    is_curved: bool = False
    tag: int | None = None


@dataclass(frozen=True, slots=True)
class Frame:
    """The outline of a rectangle."""

    box: Box
    paint: str
    width: float = 1.0
    radius: float = 0.0


@dataclass(frozen=True, slots=True)
class Text:
    """One line of text; ``at`` is on its baseline."""

    at: Point
    text: str
    size: float = 11.0
    paint: str = "ink"
    anchor: Anchor = "start"
    is_bold: bool = False


Shape: TypeAlias = Blocks | Polygon | Line | Frame | Text


@dataclass(slots=True)
class Drawing:
    """Shapes, back to front.

    Attributes:
        width: pixels.
        height: pixels.
        shapes: to draw.

    """

    width: float
    height: float
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        """Draw on top; what cannot be printed in a text is replaced."""
        for shape in shapes:
            if isinstance(shape, Text) and not shape.text.isprintable():
                self.shapes.append(replace(shape, text=printable(shape.text)))
            else:
                self.shapes.append(shape)


def printable(text: str) -> str:
    """Text without control characters and halves of surrogate pairs."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def text_width(text: str, size: float) -> float:
    """Rough width of a line in a sans-serif font."""
    return 0.56 * size * len(text)


def fit_text(text: str, size: float, width: float) -> str:
    """Shorten a line to a width; empty if not even three letters fit."""
    if text_width(text, size) <= width:
        return text
    letters = int(width / (0.56 * size)) - 1
    return text[:letters] + ".." if letters >= 2 else ""
