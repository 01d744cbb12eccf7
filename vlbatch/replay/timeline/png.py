"""The picture as PNG, drawn with Pillow at twice the size; small ones are smoothed as well."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import pairwise

from PIL import Image, ImageColor, ImageDraw, ImageFont

from vlbatch.replay.timeline.palette import THEMES
from vlbatch.replay.timeline.shapes import Blocks, Box, Drawing, Frame, Line, Point, Polygon, Text

SCALE = 2
"""Pixels of the image for one of the drawing."""

_SMOOTH_BELOW = 1.2e6
"""Drawings of fewer pixels are drawn twice as large once more, and scaled down."""

_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


def render_png(drawing: Drawing, theme: str = "light") -> bytes:
    """Draw a picture.

    Args:
        drawing: what to draw.
        theme: ``"light"`` or ``"dark"``; a PNG cannot follow the viewer.

    """
    canvas = _Canvas(drawing, theme)
    for shape in drawing.shapes:
        match shape:
            case Blocks():
                canvas.blocks(shape)
            case Polygon():
                canvas.polygon(shape)
            case Line():
                canvas.line(shape)
            case Frame():
                canvas.frame(shape)
            case Text():
                canvas.text(shape)
    return canvas.to_bytes()


class _Canvas:
    def __init__(self, drawing: Drawing, theme: str) -> None:
        self._theme = THEMES[theme]
        self._size = (round(drawing.width * SCALE), round(drawing.height * SCALE))
        is_small = drawing.width * drawing.height < _SMOOTH_BELOW
        self._scale = SCALE * (2 if is_small else 1)
        size = (round(drawing.width * self._scale), round(drawing.height * self._scale))
        self._image = Image.new("RGB", size, self._theme["page"])
        self._draw = ImageDraw.Draw(self._image, "RGBA")  # blends what is not opaque
        self._fonts: dict[float, ImageFont.FreeTypeFont | ImageFont.ImageFont] = {}

    def blocks(self, blocks: Blocks) -> None:
        colour = self._colour(blocks.paint, blocks.opacity)
        for box in blocks.boxes:
            corners = self._corners(box)
            if blocks.radius:
                self._draw.rounded_rectangle(corners, blocks.radius * self._scale, fill=colour)
            else:
                self._draw.rectangle(corners, fill=colour)

    def polygon(self, polygon: Polygon) -> None:
        self._draw.polygon(
            self._scaled(polygon.points), fill=self._colour(polygon.paint, polygon.opacity)
        )

    def frame(self, frame: Frame) -> None:
        self._draw.rounded_rectangle(
            self._corners(frame.box),
            frame.radius * self._scale,
            outline=self._colour(frame.paint),
            width=round(frame.width * self._scale),
        )

    def line(self, line: Line) -> None:
        points = _curve(line.points) if line.is_curved else list(line.points)
        colour = self._colour(line.paint, line.opacity)
        width = max(1, round(line.width * self._scale))
        if line.is_dashed:
            for start, stop in _dashes(points):
                self._draw.line(self._scaled([start, stop]), fill=colour, width=width)
        else:
            self._draw.line(self._scaled(points), fill=colour, width=width, joint="curve")

    def text(self, text: Text) -> None:
        x, y = (side * self._scale for side in text.at)
        font, colour = self._font(text.size), self._colour(text.paint)
        for shift in (0, 1) if text.is_bold else (0,):  # the built-in font has no bold
            self._draw.text((x + shift, y), text.text, colour, font, _ANCHORS[text.anchor])

    def _font(self, size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
        if size not in self._fonts:
            self._fonts[size] = ImageFont.load_default(size * self._scale)
        return self._fonts[size]

    def _colour(self, paint: str, opacity: float = 1.0) -> tuple[int, int, int, int]:
        red, green, blue = ImageColor.getrgb(self._theme.get(paint, paint))[:3]
        return red, green, blue, round(255 * opacity)

    def _corners(self, box: Box) -> tuple[float, float, float, float]:
        """Corner pixels; Pillow draws the last row and column too."""
        x, y, w, h = (side * self._scale for side in box)
        return round(x), round(y), max(round(x + w) - 1, round(x)), max(round(y + h) - 1, round(y))

    def _scaled(self, points: Sequence[Point]) -> list[Point]:
        return [(x * self._scale, y * self._scale) for x, y in points]

    def to_bytes(self) -> bytes:
        image = self._image
        if image.size != self._size:
            image = image.resize(self._size, Image.Resampling.LANCZOS)
        stream = io.BytesIO()
        image.save(stream, "PNG", optimize=True)
        return stream.getvalue()


def _curve(points: Sequence[Point]) -> list[Point]:
    """A soft S in short straight pieces."""
    (x0, y0), *_, (x1, y1) = points
    steps = [n / 16 for n in range(17)]
    middle = (x0 + x1) / 2
    return [
        (
            (1 - t) ** 3 * x0 + 3 * t * (1 - t) * middle + t**3 * x1,
            (1 - t) ** 3 * y0 + 3 * t * (1 - t) ** 2 * y0 + 3 * t**2 * (1 - t) * y1 + t**3 * y1,
        )
        for t in steps
    ]


def _dashes(points: list[Point]) -> list[tuple[Point, Point]]:
    """Pieces of 4 with gaps of 3, begun afresh in each segment."""
    pieces = []
    for (x0, y0), (x1, y1) in pairwise(points):
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        at = 0.0
        while at < length:
            end = min(at + 4, length)
            pieces.append(
                (
                    (x0 + (x1 - x0) * at / length, y0 + (y1 - y0) * at / length),
                    (x0 + (x1 - x0) * end / length, y0 + (y1 - y0) * end / length),
                )
            )
            at += 7
    return pieces
