"""The picture of a timeline: where things lie, and that three renderers draw the same."""

from __future__ import annotations

import io
import json
import re
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from PIL import Image, ImageColor

from vlbatch.replay.timeline import Cell, Column, Piece, Timeline
from vlbatch.replay.timeline.grid import LEFT, MAX_HEIGHT, MAX_WIDTH, TOP, Grid
from vlbatch.replay.timeline.html import render_html
from vlbatch.replay.timeline.layout import lay_out, summary
from vlbatch.replay.timeline.model import REGIONS, Region
from vlbatch.replay.timeline.palette import DARK, LIGHT, REGION_OPACITY, request_colour
from vlbatch.replay.timeline.png import SCALE, render_png
from vlbatch.replay.timeline.shapes import Blocks, Drawing, Line, Text, fit_text, text_width
from vlbatch.replay.timeline.svg import render_svg

SVG = "{http://www.w3.org/2000/svg}"


def make_timeline(num_steps: int, num_rows: int, **more: Any) -> Timeline:
    """Every row has its request, which prefills, extends and then decodes."""
    timeline = Timeline("made", [f"r{row}" for row in range(num_rows)])
    for step in range(num_steps):
        region: Region = ("prefill", "extend", "decode")[min(step, 2)]
        cells = [Cell(row, row, region, (step, step + 1), 2, **more) for row in range(num_rows)]
        timeline.columns.append(Column(step + 1, step + 2, cells))
    return timeline


def parse(svg: str) -> ET.Element:
    return ET.fromstring(svg)  # noqa: S314 (of our own making)


def texts_of(drawing: Drawing) -> list[str]:
    return [shape.text for shape in drawing.shapes if isinstance(shape, Text)]


class TestGrid:
    @pytest.mark.parametrize(
        ("steps", "rows", "detail"),
        [
            (1, 1, "full"),
            (12, 12, "full"),
            (13, 4, "middle"),
            (70, 40, "middle"),
            (200, 256, "dense"),
        ],
    )
    def test_detail_goes_with_size(self, steps: int, rows: int, detail: str) -> None:
        """Small traces have words in each cell, middle ones names, large ones colours."""
        assert Grid.of(make_timeline(steps, rows)).detail == detail

    def test_256_rows_and_200_steps_need_no_sharing(self) -> None:
        """At 256 rows and 200 steps every cell is drawn by itself."""
        grid = Grid.of(make_timeline(200, 256))

        assert (grid.steps_per_column, grid.rows_per_band) == (1, 1)
        assert grid.cell_width >= 4
        assert grid.cell_height >= 2.5

    @pytest.mark.parametrize(("steps", "rows"), [(1, 1), (5, 60), (300, 2), (1000, 700), (3, 2000)])
    def test_panel_is_bounded(self, steps: int, rows: int) -> None:
        """However large the trace, the panel keeps its size and holds every cell."""
        grid = Grid.of(make_timeline(steps, rows))

        assert grid.width <= MAX_WIDTH
        assert grid.height <= MAX_HEIGHT
        x, y, w, h = grid.cell(steps - 1, rows - 1)
        assert x + w <= LEFT + grid.width + 1e-6
        assert y + h <= TOP + grid.height + 1e-6

    def test_cells_do_not_overlap(self) -> None:
        """Neighbours keep their distance: a gap between columns, a pad between rows."""
        grid = Grid.of(make_timeline(20, 8))
        x, y, w, h = grid.cell(3, 5)

        assert grid.cell(4, 5)[0] == pytest.approx(x + w + grid.gap)
        assert grid.cell(3, 6)[1] == pytest.approx(y + h + grid.pad)


class TestAggregation:
    def blocks(self, timeline: Timeline) -> dict[tuple[str, float], int]:
        """Paint and opacity -> number of boxes of the panel."""
        drawing, _ = lay_out(timeline)
        return {
            (shape.paint, shape.opacity): len(shape.boxes)
            for shape in drawing.shapes
            if isinstance(shape, Blocks)
        }

    def test_majority_wins(self) -> None:
        """A shared cell has the colour of the request with most of its cells."""
        timeline = make_timeline(600, 1)
        for column in timeline.columns[2::3]:  # one of the three steps of a cell
            column.cells[0] = Cell(1, 0, "decode", (5, 6), 2)
        timeline.requests.append("other")

        blocks = self.blocks(timeline)

        assert (request_colour(0), REGION_OPACITY["decode"]) in blocks
        assert (request_colour(1), REGION_OPACITY["decode"]) not in blocks
        assert ("muted", 0.35) not in blocks

    def test_without_majority_grey(self) -> None:
        """Where no request has half of a shared cell, it is grey and not some mixture."""
        timeline = make_timeline(600, 1)
        for step, column in enumerate(timeline.columns):
            column.cells[0] = Cell(step % 3, 0, "decode", (5, 6), 2)
        timeline.requests += ["x", "y"]

        assert self.blocks(timeline)["muted", 0.35] == 1

    def test_it_is_said(self) -> None:
        """The legend says how many steps and rows share a cell, and nothing if none do."""
        large, _ = lay_out(make_timeline(600, 700))
        small, _ = lay_out(make_timeline(200, 256))

        assert any("a cell stands for 3 steps and 3 rows" in text for text in texts_of(large))
        assert not any("stands for" in text for text in texts_of(small))

    def test_lanes_sum_up(self) -> None:
        """Bars below count all events of the steps that share a column."""
        timeline = make_timeline(600, 1)
        timeline.columns[4].encoded = {"x": 3}
        timeline.columns[5].encoded = {"y": 4, "z": 5}

        drawing, _ = lay_out(timeline)

        assert "max 12" in texts_of(drawing)


class TestPanel:
    def test_words_in_full_detail(self) -> None:
        """In a small picture each cell names its request, its tokens and its media."""
        piece = Piece("cat", "image", (0, 4), (0, 4), 6, is_cut_before=False, is_cut_after=True)
        timeline = make_timeline(1, 1)
        timeline.columns[0].cells = [Cell(0, 0, "prefill", (0, 8), 9, pieces=(piece,))]

        texts = texts_of(lay_out(timeline)[0])

        assert {"r0", "[0,8)", "cat [0,4)", "cut by the chunk"} <= set(texts)

    def test_bounds_follow_the_regions(self) -> None:
        """The end of decode is drawn below the last decode row, the end of extend likewise."""
        timeline = Timeline("made", list("abc"))
        regions: tuple[Region, ...] = ("decode", "extend", "prefill")
        cells = [Cell(n, n, region, (0, 1), 2) for n, region in enumerate(regions)]
        timeline.columns = [Column(1, 2, cells)]

        drawing, grid = lay_out(timeline)

        lines = {
            shape.is_dashed: {y for _, y in shape.points}
            for shape in drawing.shapes
            if isinstance(shape, Line) and shape.paint == "ink" and shape.points[0][0] < 300
            and shape.points[0][1] < TOP + grid.height
        }  # fmt: skip
        assert lines == {False: {grid.y(1)}, True: {grid.y(2)}}

    def test_no_bounds_without_regions(self) -> None:
        """Where rows are in no region order, no end of a region is drawn."""
        column = Column(1, 2, [Cell(n, n, r, (0, 1), 2) for n, r in enumerate(REGIONS[1::-1])])

        assert column.region_bounds() == []

    def test_moves(self) -> None:
        """A move is a line from the old row to the new one; in a dense picture a dark edge."""
        for steps, rows in ((2, 2), (200, 100)):
            timeline = make_timeline(steps, rows)
            timeline.columns[1].cells[0] = Cell(0, 0, "extend", (1, 2), 2, came_from=1)
            timeline.columns[1].moved = 1

            drawing, grid = lay_out(timeline)

            curves = [s for s in drawing.shapes if isinstance(s, Line) and s.tag == 0]
            edges = [s for s in drawing.shapes if isinstance(s, Blocks) and s.paint == "ink"]
            if grid.detail == "dense":
                assert not curves
                assert (*grid.cell(1, 0)[:2], 1.0, grid.cell(1, 0)[3]) in edges[0].boxes
            else:
                (start, stop) = curves[0].points
                assert start[1] == grid.cell(0, 1)[1] + grid.cell(0, 1)[3] / 2
                assert stop[1] == grid.cell(1, 0)[1] + grid.cell(1, 0)[3] / 2

    def test_fault_is_told(self) -> None:
        """The head has the first fault with step, request and row."""
        timeline = make_timeline(3, 2)
        timeline.columns[1].cells[1] = Cell(1, 1, "decode", (1, 2), 2, faults=("is wrong",))

        texts = texts_of(lay_out(timeline)[0])

        assert "first fault, step 2: r1 in row 1: is wrong" in texts

    def test_summary_counts(self) -> None:
        """The summary counts what happened and leaves out what did not."""
        timeline = make_timeline(2, 1)
        timeline.columns[0].encoded = {"x": 3, "y": 4}

        assert summary(timeline) == "1 request · 2 steps · 1 row · 2 encoded"

    def test_empty(self) -> None:
        """A file without a step makes a picture, too."""
        drawing, grid = lay_out(Timeline("empty"))

        assert render_png(drawing)
        assert "0 requests" not in render_svg(drawing)
        assert "empty" in render_html(Timeline("empty"), drawing, grid)


class TestColours:
    def test_one_colour_a_request(self) -> None:
        """The first hundred requests have colours of their own."""
        assert len({request_colour(n) for n in range(100)}) == 100

    def test_neighbours_differ(self) -> None:
        """Requests admitted one after the other differ clearly in colour."""
        for n in range(200):
            one, other = (ImageColor.getrgb(request_colour(k)) for k in (n, n + 1))
            assert sum(abs(a - b) for a, b in zip(one, other, strict=True)) > 90, n


class TestRenderers:
    def test_pixels_of_the_png(self) -> None:
        """A cell of the PNG has its request's colour, as strong as its region, over the panel."""
        timeline = make_timeline(300, 20)
        drawing, grid = lay_out(timeline)
        for theme, colours in (("light", LIGHT), ("dark", DARK)):
            image = Image.open(io.BytesIO(render_png(drawing, theme)))
            assert image.size == (round(drawing.width * SCALE), round(drawing.height * SCALE))
            assert image.getpixel((2, 2)) == ImageColor.getrgb(colours["page"])
            for step, region in ((0, "prefill"), (4, "decode"), (299, "decode")):
                for row in (0, 7, 19):
                    x, y, w, h = grid.cell(step, row)
                    pixel = image.getpixel((int((x + w / 2) * SCALE), int((y + h / 2) * SCALE)))
                    paint = ImageColor.getrgb(request_colour(row))
                    panel = ImageColor.getrgb(colours["panel"])
                    strength = REGION_OPACITY[region]
                    expected = [
                        p * strength + q * (1 - strength) for p, q in zip(paint, panel, strict=True)
                    ]
                    assert pixel == pytest.approx(expected, abs=2), (theme, step, row)

    def test_svg_is_xml_with_both_themes(self) -> None:
        """The SVG parses, follows the viewer's scheme, and draws the shapes of the drawing."""
        drawing, _ = lay_out(make_timeline(3, 2))
        root = parse(render_svg(drawing))

        style = root.findtext(f"{SVG}style") or ""
        assert LIGHT["page"] in style.split("@media (prefers-color-scheme: dark)")[0]
        assert DARK["page"] in style.split("@media (prefers-color-scheme: dark)")[1]
        assert [e.text for e in root.iter(f"{SVG}text")] == texts_of(drawing)
        fills = {element.get("fill") for element in root.iter()}
        assert {request_colour(0), request_colour(1)} <= fills

    def test_fixed_theme(self) -> None:
        """With a theme that is asked for, the viewer's scheme does not matter."""
        drawing, _ = lay_out(make_timeline(3, 2))

        svg = render_svg(drawing, "dark")

        assert "@media" not in svg
        assert DARK["page"] in svg
        assert LIGHT["page"] not in svg

    @pytest.mark.parametrize("size", [(3, 2), (200, 256)])
    def test_nothing_from_outside(self, size: tuple[int, int]) -> None:
        """Neither the SVG nor the HTML loads anything: no link, no import, no font, no address."""
        timeline = make_timeline(*size)
        drawing, grid = lay_out(timeline)
        for page in (render_svg(drawing), render_html(timeline, drawing, grid)):
            rest = page.replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"https?:|//cdn|src=|href=|url\(|@import|fetch\(", rest)

    def test_names_cannot_break_out(self) -> None:
        """A request or key with markup in its name is text, in every format."""
        name = "</script><script>x</script>&'"
        timeline = make_timeline(1, 1)
        timeline.requests[0] = timeline.title = name
        timeline.columns[0].encoded = {name: 1}
        drawing, grid = lay_out(timeline)

        page = render_html(timeline, drawing, grid)

        assert page.count("<script") == 2
        assert name in (element.text for element in parse(render_svg(drawing)).iter())

    def test_names_that_cannot_be_printed(self) -> None:
        """Control characters, line breaks and half characters in a name spoil no format."""
        timeline = make_timeline(1, 1)
        timeline.requests[0] = timeline.title = "a\n\x00\x1b\ud800b"
        timeline.columns[0].encoded = {"\x07\udfff": 1}
        drawing, grid = lay_out(timeline)

        assert "a\ufffd\ufffd\ufffd\ufffdb" in texts_of(drawing)
        assert parse(render_svg(drawing)) is not None
        assert render_png(drawing)
        assert render_html(timeline, drawing, grid).encode()

    def test_hover_knows_every_cell(self) -> None:
        """The data in the page has each cell's request, region, chunk, origin, media and faults."""
        piece = Piece("cat", "video", (2, 4), (1, 3), 6, is_cut_before=True, is_cut_after=True)
        timeline = make_timeline(3, 2)
        timeline.columns[1].cells[1] = Cell(
            1, 1, "extend", (2, 5), 9, came_from=0, pieces=(piece,), faults=("is wrong",)
        )
        timeline.columns[1].evicted = ["dog"]
        drawing, grid = lay_out(timeline)

        page = render_html(timeline, drawing, grid)
        found = re.search(r'id="data">(.*)</script>', page)
        assert found is not None
        data = json.loads(found.group(1))

        assert data["requests"] == ["r0", "r1"]
        assert data["steps"][1]["cells"] == [0, 1, 1, 2, 1, 1, 2, 5]
        assert data["steps"][1]["evicted"] == ["dog"]
        assert data["steps"][1]["more"] == {
            "1": [
                ["moved from row 0", "video cat: rows [1, 3) of 6 (begun before, goes on)"],
                ["is wrong"],
            ]
        }
        left, top = data["left"] + data["cellWidth"] * 1, data["top"] + data["cellHeight"] * 1
        assert (left + data["gap"], top + grid.pad / 2) == grid.cell(1, 1)[:2]


class TestText:
    def test_fits(self) -> None:
        """Text that fits is left alone; other text is cut to the width, or dropped."""
        assert fit_text("short", 10, 100) == "short"
        cut = fit_text("a rather long name", 10, 60)
        assert cut.endswith("..")
        assert text_width(cut, 10) <= 66
        assert fit_text("a rather long name", 10, 8) == ""
