"""Families: runs and positions of whole prompts, against recorded, naive and hand-made values."""

from __future__ import annotations

import json
import math
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_positions import as_axes, naive_positions

from vlbatch.errors import InvalidItem, InvalidSetting
from vlbatch.items import Item, validate_items
from vlbatch.positions import FAMILIES, build_runs
from vlbatch.positions.runs import MAX_GRID_SIDE

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "mrope.json").read_text()
)["cases"]
FAMILY_OF_CASE = {"ernie4_5_vl_moe": "ernie4_5_vl"}


def image(offset: int, grid: tuple[int, int, int], **fields: Any) -> Item:
    """Return an unmasked item at ``offset``."""
    fields.setdefault("modality", "image")
    return Item(
        key=f"{fields['modality']}@{offset}",
        offset=offset,
        length=math.prod(grid),
        grid=grid,
        **fields,
    )


def masked(offset: int, mask: str, grid: tuple[int, int, int], **fields: Any) -> Item:
    """Return an item whose places are the ones of ``mask``."""
    fields.setdefault("modality", "video")
    return Item(
        key=f"{fields['modality']}@{offset}",
        offset=offset,
        length=len(mask),
        grid=grid,
        embed_mask=np.array([mark == "1" for mark in mask]),
        **fields,
    )


def spans(case: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Return (type, start, stop) of each media range of a recorded case."""
    found = []
    start = 0
    for kind, group in groupby(case["mm_token_type_ids"]):
        stop = start + len(list(group))
        if kind:
            found.append((kind, start, stop))
        start = stop
    return found


def items_of(case: dict[str, Any], *, frames_as_items: bool = False) -> tuple[Item, ...]:
    """Turn a recorded case, whose grids are in patches before the merges, into items."""
    merge = case["spatial_merge_size"]
    images = iter(case["image_grid_thw"])
    videos = iter(case["video_grid_thw"])
    seconds = iter(case.get("second_per_grid_ts", []))
    ranges = iter(spans(case))
    items = []
    for kind, start, stop in ranges:
        t, h, w = next(images if kind == 1 else videos)
        h, w = h // merge, w // merge
        if kind == 1:
            items.append(image(start, (t, h, w)))
        elif case["family"] == "qwen3_vl":  # each frame has its own range
            frames = [(start, stop), *[next(ranges)[1:] for _ in range(t - 1)]]
            if frames_as_items:
                items += [image(begin, (1, h, w), modality="video") for begin, _ in frames]
            else:
                mask = "".join(
                    str(int(any(begin <= token < end for begin, end in frames)))
                    for token in range(start, frames[-1][1])
                )
                items.append(masked(start, mask, (t, h, w)))
        else:
            t //= case.get("temporal_merge_size", 1)
            items.append(
                image(start, (t, h, w), modality="video", seconds_per_grid=next(seconds, None))
            )
    return validate_items(items, case["length"], case["id"])


def runs_of(case: dict[str, Any], **how: bool) -> Any:
    """Lay out a recorded case."""
    return build_runs(
        FAMILY_OF_CASE.get(case["family"], case["family"]),
        items_of(case, **how),
        tokens_per_second=case.get("tokens_per_second", 2),
        req_id=case["id"],
    )


class TestRecordedCases:
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
    def test_positions_and_delta(self, case: dict[str, Any]) -> None:
        """A recorded prompt has the recorded positions on every axis, and the recorded delta."""
        runs = runs_of(case)

        assert runs.positions(0, case["length"]).tolist() == case["expected"]
        assert runs.delta == case["expected_delta"]

    @pytest.mark.parametrize(
        "case", [c for c in CASES if c["family"] == "qwen3_vl"], ids=lambda case: case["id"]
    )
    def test_frames_as_items(self, case: dict[str, Any]) -> None:
        """Frames declared as items of their own are placed like one masked video."""
        runs = runs_of(case, frames_as_items=True)

        assert runs.positions(0, case["length"]).tolist() == case["expected"]

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
    def test_every_chunk(self, case: dict[str, Any]) -> None:
        """Every chunk of a recorded prompt has that slice of the recorded positions."""
        runs = runs_of(case)
        for start in range(case["length"] + 1):
            for stop in range(start, case["length"] + 1):
                expected = [axis[start:stop] for axis in case["expected"]]
                assert runs.positions(start, stop).tolist() == expected, (start, stop)

    def test_cases_of_every_family(self) -> None:
        """The recorded cases reach each three-axis family."""
        seen = {FAMILY_OF_CASE.get(case["family"], case["family"]) for case in CASES}

        assert seen == {name for name, family in FAMILIES.items() if family.num_axes == 3}


@st.composite
def prompts(draw: st.DrawFn) -> tuple[tuple[Item, ...], int]:
    """Draw items that may be masked, nested and interleaved, and the prompt's length."""
    side = st.integers(1, 3)
    grids = draw(st.lists(st.tuples(side, side, side), max_size=4))
    blocks: list[int] = []  # item number, once a block of its places
    for number in range(len(grids)):
        blocks += [number] * draw(st.integers(1, 3))
    owners: list[int] = [-1] * draw(st.integers(0, 3))  # token -> item number, -1 for text
    left = [math.prod(grid) for grid in grids]
    order = draw(st.permutations(blocks))
    for position, number in enumerate(order):
        is_last = number not in order[position + 1 :]
        size = left[number] if is_last else draw(st.integers(0, left[number]))
        left[number] -= size
        owners += [number] * size + [-1] * draw(st.integers(0, 3))

    items = []
    for number, grid in enumerate(grids):
        places = [token for token, owner in enumerate(owners) if owner == number]
        offset = max(0, places[0] - draw(st.integers(0, 2)))
        stop = min(len(owners), places[-1] + 1 + draw(st.integers(0, 2)))
        mask = np.array([owner == number for owner in owners[offset:stop]])
        items.append(
            Item(
                key=f"item {number}",
                modality=draw(st.sampled_from(["image", "video"])),
                offset=offset,
                length=stop - offset,
                grid=grid,
                embed_mask=None if mask.all() and draw(st.booleans()) else mask,
                seconds_per_grid=draw(st.sampled_from([None, 0.25, 0.7, 1.37, 3.0])),
            )
        )
    return validate_items(items, len(owners), "R"), len(owners)


class TestAgainstNaiveRule:
    @settings(derandomize=True, max_examples=400, deadline=None)
    @given(
        prompt=prompts(),
        family=st.sampled_from(sorted(set(FAMILIES) - {"1d"})),
        tokens_per_second=st.sampled_from([2.0, 25.0]),
        data=st.data(),
    )
    def test_masked_and_nested_items(
        self,
        prompt: tuple[tuple[Item, ...], int],
        family: str,
        tokens_per_second: float,
        data: st.DataObject,
    ) -> None:
        """Any mix of masks and nesting, cut anywhere, equals the rule applied token by token."""
        items, num_tokens = prompt
        total = num_tokens + 3  # three generated tokens
        expected = as_axes(naive_positions(family, items, total, tokens_per_second))
        cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=6)))

        runs = build_runs(family, items, tokens_per_second=tokens_per_second)

        chunks = [
            runs.positions(start, stop)
            for start, stop in zip([0, *cuts], [*cuts, total], strict=True)
        ]
        assert np.concatenate(chunks, axis=1).tolist() == expected
        assert runs.delta == expected[0][-1] - (total - 1)

    @pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"1d"}))
    def test_many_sizes(self, family: str) -> None:
        """Images and videos of many sizes in one prompt, whole and cut, equal the naive rule."""
        items = []
        token = 3
        for number in range(48):
            grid = (1 if number % 3 else 2, 1 + 7 * number % 19, 1 + 5 * number % 23)
            modality = "image" if number % 3 else "video"
            items.append(image(token, grid, modality=modality, seconds_per_grid=0.7))
            token = items[-1].stop + 11 * number % 29
        expected = np.array(as_axes(naive_positions(family, items, token)))

        runs = build_runs(family, items)

        assert np.array_equal(runs.positions(0, token), expected)
        for start in range(0, token, 509):
            stop = min(start + 509, token)
            assert np.array_equal(runs.positions(start, stop), expected[:, start:stop]), start

    def test_one_axis_ignores_items(self) -> None:
        """With one axis a token's position is its index, media or not."""
        runs = build_runs("1d", [image(2, (1, 2, 2)), image(8, (2, 2, 2), modality="video")])

        assert runs.positions(1, 20).tolist() == [list(range(1, 20))]
        assert (runs.delta, runs.nbytes) == (0, 0)


class TestHandValues:
    """Positions written out in public bug reports; `vllm#10388` and others."""

    PROMPT = (image(4, (1, 4, 6)),)

    def test_image_prompt(self) -> None:
        """An image of 4 x 6 at token 4: corners, the text after it, and the delta."""
        runs = build_runs("qwen2_vl", self.PROMPT)

        corners = {3: 3, 4: 4, 15: (4, 5, 9), 16: (4, 6, 4), 27: (4, 7, 9), 28: 10, 39: 21}
        for index, expected in corners.items():
            axes = expected if isinstance(expected, tuple) else (expected,) * 3
            assert runs.position_at(index) == axes
        assert runs.delta == -18

    def test_prefix_hit_beyond_the_image(self) -> None:
        """Tokens 32..39 after a prefix hit of 32 are at 14..21 (`FastDeploy#6561`)."""
        runs = build_runs("qwen2_vl", self.PROMPT)

        assert runs.positions(32, 40).tolist() == [list(range(14, 22))] * 3

    def test_touching_images(self) -> None:
        """Images without text between them follow each other (`sglang#35799`)."""
        runs = build_runs("qwen2_vl", [image(2, (1, 2, 2)), image(6, (1, 2, 3))])

        assert runs.positions(2, 13).tolist() == [
            [2, 2, 2, 2, 4, 4, 4, 4, 4, 4, 7],
            [2, 2, 3, 3, 4, 4, 4, 5, 5, 5, 7],
            [2, 3, 2, 3, 4, 5, 6, 4, 5, 6, 7],
        ]
        assert runs.delta == -5

    def test_items_at_both_ends(self) -> None:
        """An image may be the first and the last tokens of a prompt."""
        runs = build_runs("qwen2_vl", [image(0, (1, 1, 2)), image(3, (1, 2, 1))])

        assert runs.positions(0, 6).tolist() == [
            [0, 0, 2, 3, 3, 5],
            [0, 0, 2, 3, 4, 5],
            [0, 1, 2, 3, 3, 5],
        ]

    def test_two_videos_keep_their_own_frames(self) -> None:
        """Each video is placed by its own frame count (`transformers#41229`)."""
        first = image(0, (4, 2, 2), modality="video")
        second = image(16, (5, 2, 2), modality="video")

        runs = build_runs("qwen2_vl", [first, second])

        assert runs.positions(0, 36)[0].tolist() == [
            position for position in range(9) for _ in range(4)
        ]
        assert runs.delta == 9 - 36

    def test_decode_side_of_a_transfer(self) -> None:
        """A decode side with grids but no pixels continues at the same position (`smg#2366`)."""
        runs = build_runs("qwen2_vl", [image(5, (1, 14, 14))])

        assert runs.delta == -182
        assert runs.position_at(210) == (28, 28, 28)

    def test_token_inside_a_masked_grid(self) -> None:
        """A false token between places is text; the grid goes on from its own base."""
        runs = build_runs("qwen2_vl", [masked(2, "11100111", (1, 2, 3), modality="image")])

        assert runs.positions(0, 12).tolist() == [
            [0, 1, 2, 2, 2, 5, 6, 2, 2, 2, 7, 8],
            [0, 1, 2, 2, 2, 5, 6, 3, 3, 3, 7, 8],
            [0, 1, 2, 3, 4, 5, 6, 2, 3, 4, 7, 8],
        ]

    def test_separate_frames_need_no_text_between(self) -> None:
        """With separate frames each frame starts at the next position, touching or not."""
        runs = build_runs("qwen3_vl", [image(1, (2, 1, 2), modality="video")])

        assert runs.positions(0, 6).tolist() == [
            [0, 1, 1, 3, 3, 5],
            [0, 1, 1, 3, 3, 5],
            [0, 1, 2, 3, 4, 5],
        ]

    def test_audio_inside_a_video(self) -> None:
        """Audio without a grid is placed like text, also between the frames of a video."""
        video = masked(0, "11001100", (2, 1, 2))
        audio = Item(
            key="sound",
            modality="audio",
            offset=2,
            length=5,
            embed_mask=np.array([True, True, False, False, True]),
        )

        runs = build_runs("qwen2_vl", validate_items([video, audio], 9, "R"))

        assert runs.positions(0, 9).tolist() == [
            [0, 0, 2, 3, 1, 1, 4, 5, 6],
            [0, 0, 2, 3, 0, 0, 4, 5, 6],
            [0, 1, 2, 3, 0, 1, 4, 5, 6],
        ]

    def test_seconds_left_out(self) -> None:
        """A timed video that states no seconds counts one second a frame."""
        stated = image(0, (3, 1, 1), modality="video", seconds_per_grid=1.0)
        silent = image(0, (3, 1, 1), modality="video")

        for item in (stated, silent):
            runs = build_runs("qwen2_5_vl", [item], tokens_per_second=2)
            assert runs.positions(0, 4)[0].tolist() == [0, 2, 4, 5]

    def test_seconds_do_not_touch_images(self) -> None:
        """An image of a timed family ignores seconds and tokens per second."""
        item = image(0, (2, 1, 1), seconds_per_grid=5.0)

        runs = build_runs("qwen2_5_vl", [item], tokens_per_second=2)

        assert runs.positions(0, 3)[0].tolist() == [0, 1, 2]


class TestRefusals:
    def test_unknown_family(self) -> None:
        """An unknown family is refused with the names of those there are and the setting."""
        with pytest.raises(InvalidSetting, match=r"'qwen9'.*1d, qwen2_vl") as refusal:
            build_runs("qwen9", [])

        assert refusal.value.setting == "family"

    @pytest.mark.parametrize("modality", ["image", "video"])
    def test_missing_grid(self, modality: str) -> None:
        """An image or video without a grid is refused, never placed like text (`smg#2366`)."""
        item = Item(key="X", modality=modality, offset=5, length=196)

        with pytest.raises(InvalidItem, match=r"request 'R'.*'X'.*no grid") as refusal:
            build_runs("qwen2_vl", [item], req_id="R")

        assert refusal.value.req_id == "R"

    def test_missing_grid_on_one_axis(self) -> None:
        """With one axis no grid is needed."""
        item = Item(key="X", modality="image", offset=5, length=196)

        assert build_runs("1d", [item]).position_at(300) == (300,)

    @pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, 1e300])
    def test_impossible_seconds(self, seconds: float) -> None:
        """Seconds per grid that give no usable distance between frames are refused."""
        item = image(0, (2, 1, 1), modality="video", seconds_per_grid=seconds)

        with pytest.raises(InvalidItem, match=re.escape(f"{seconds} seconds per grid")):
            build_runs("qwen2_5_vl", [item], req_id="R")

    @pytest.mark.parametrize("axis", [1, 2])
    def test_longest_side(self, axis: int) -> None:
        """A grid side as long as a record can hold is placed, one more is refused."""
        grid, last = [1, 1, 1], [0, 0, 0]
        grid[axis], last[axis] = MAX_GRID_SIDE, MAX_GRID_SIDE - 1

        runs = build_runs("qwen2_vl", [image(0, tuple(grid))])
        assert runs.position_at(MAX_GRID_SIDE - 1) == tuple(last)

        grid[axis] += 1
        with pytest.raises(InvalidItem, match=rf"{grid[0]}x{grid[1]}x{grid[2]}; .*{MAX_GRID_SIDE}"):
            build_runs("qwen2_vl", [image(0, tuple(grid))])

    def test_position_over_the_limit(self) -> None:
        """A video whose frames lie so far apart that positions leave int32 is refused."""
        item = image(0, (3, 1, 1), modality="video", seconds_per_grid=1e9)

        with pytest.raises(InvalidItem, match="position 4000000000"):
            build_runs("qwen2_5_vl", [item], tokens_per_second=2, req_id="R")
