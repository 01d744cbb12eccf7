"""The oracle's positions against hand-computed and recorded ones."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from vlbatch.replay.oracle import OracleItem, prompt_positions
from vlbatch.replay.oracle.positions import delta_of

CASES = json.loads((Path(__file__).parents[1] / "positions" / "data" / "mrope.json").read_text())[
    "cases"
]
FAMILY = {"ernie4_5_vl_moe": "ernie4_5_vl"}


def image(offset: int, grid: tuple[int, int, int], **more: Any) -> OracleItem:
    """An item without a mask."""
    t, h, w = grid
    return OracleItem("X", more.pop("modality", "image"), offset, t * h * w, grid, **more)


def masked(offset: int, mask: str, grid: tuple[int, int, int]) -> OracleItem:
    """An item with a mask."""
    places = tuple(c == "1" for c in mask)
    return OracleItem("X", "video", offset, len(mask), grid, places)


class TestByHand:
    def test_text(self) -> None:
        """Text advances every axis by one."""
        assert prompt_positions("qwen2_vl", 3, [], 2.0) == [(0,) * 3, (1,) * 3, (2,) * 3]

    def test_wide_image(self) -> None:
        """L=40, image 1x4x6 at 4: index 27 at (4, 7, 9), 28 at 10, delta -18 (B26)."""
        positions = prompt_positions("qwen2_vl", 40, [image(4, (1, 4, 6))], 2.0)

        assert [positions[i] for i in (3, 4, 15, 16, 27, 28, 39)] == [
            (3, 3, 3),
            (4, 4, 4),
            (4, 5, 9),
            (4, 6, 4),
            (4, 7, 9),
            (10, 10, 10),
            (21, 21, 21),
        ]
        assert delta_of(positions) == -18

    def test_touching_images(self) -> None:
        """The second starts at 1 + the maximum of the first; index 12 is at 7 (B46)."""
        positions = prompt_positions(
            "qwen2_vl", 30, [image(2, (1, 2, 2)), image(6, (1, 2, 3))], 2.0
        )

        assert positions[5:8] == [(2, 3, 3), (4, 4, 4), (4, 4, 5)]
        assert positions[11:13] == [(4, 5, 6), (7, 7, 7)]
        assert delta_of(positions) == -5

    def test_timed_video(self) -> None:
        """0.75 s a grid at 2 tokens per second: frames at 0, 1, 3, 4 (1.5, 3, 4.5 cut down)."""
        video = image(1, (4, 1, 1), modality="video", seconds_per_grid=0.75)

        positions = prompt_positions("qwen2_5_vl", 6, [video], 2.0)

        assert [t for t, _, _ in positions] == [0, 1, 2, 4, 5, 6]
        assert prompt_positions("qwen2_vl", 6, [video], 2.0)[4] == (4, 1, 1)

    def test_separate_frames(self) -> None:
        """qwen3_vl: each frame starts at its own next position, on every axis."""
        video = masked(1, "1111001111", (2, 2, 2))

        positions = prompt_positions("qwen3_vl", 12, [video], 2.0)

        assert positions[1:5] == [(1, 1, 1), (1, 1, 2), (1, 2, 1), (1, 2, 2)]
        assert positions[5:7] == [(3, 3, 3), (4, 4, 4)]
        assert positions[7:] == [(5, 5, 5), (5, 5, 6), (5, 6, 5), (5, 6, 6), (7, 7, 7)]

    def test_text_inside_a_grid(self) -> None:
        """A token between places is at 1 + the maximum before it; the grid goes on unmoved."""
        video = masked(1, "01101110", (1, 1, 5))

        positions = prompt_positions("qwen2_vl", 10, [video], 2.0)

        assert [w for _, _, w in positions] == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8]
        assert [t for t, _, _ in positions] == [0, 1, 2, 2, 4, 2, 2, 2, 7, 8]

    def test_item_without_grid(self) -> None:
        """Audio is placed like text."""
        audio = OracleItem("S", "audio", 1, 3)

        assert prompt_positions("qwen2_vl", 5, [audio], 2.0)[4] == (4, 4, 4)

    def test_one_axis(self) -> None:
        """One axis counts tokens."""
        assert prompt_positions("1d", 5, [image(1, (1, 1, 2))], 2.0)[4] == (4,)


def items_of(case: dict[str, Any]) -> list[OracleItem]:
    """Items of a recorded prompt: its grids, laid over its image and video tokens."""
    merge = case["spatial_merge_size"]
    seconds = iter(case.get("second_per_grid_ts") or [])
    items = []
    for kind, modality in ((1, "image"), (2, "video")):
        tokens = [i for i, other in enumerate(case["mm_token_type_ids"]) if other == kind]
        for t, h, w in case[f"{modality}_grid_thw"]:
            frames = t // case.get("temporal_merge_size", 1) if modality == "video" else t
            grid = (frames, h // merge, w // merge)
            places, tokens = tokens[: prod(grid)], tokens[prod(grid) :]
            offset, length = places[0], places[-1] + 1 - places[0]
            mask = tuple(offset + i in places for i in range(length))
            pace = next(seconds, None) if modality == "video" else None
            items.append(OracleItem("X", modality, offset, length, grid, mask, pace))
        assert tokens == []
    return sorted(items, key=lambda item: item.offset)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_recorded(case: dict[str, Any]) -> None:
    """The positions of the model families' own code, for every recorded prompt."""
    family = FAMILY.get(case["family"], case["family"])
    rate = case.get("tokens_per_second", 2.0)

    positions = prompt_positions(family, case["length"], items_of(case), rate)

    assert [list(axis) for axis in zip(*positions, strict=True)] == case["expected"]
    assert delta_of(positions) == case["expected_delta"]
