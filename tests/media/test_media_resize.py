from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vlbatch.errors import MediaError
from vlbatch.media import (
    Origin,
    ProcessorOptions,
    family_options,
    merged_grid,
    patch_grid,
    smart_resize,
)

# Sizes by transformers 5.24.0, many of them run through its real processors.
CASES = json.loads((Path(__file__).parent / "data" / "resize.json").read_text())["cases"]
# Whole-clip sizes that a neighbouring rule (ceil for int, padded for true frames) would miss.
CLIP_CASES = json.loads((Path(__file__).parent / "data" / "resize_clip.json").read_text())["cases"]
FAMILY = {
    "qwen2_vl/qwen2_5_vl": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "ernie4_5_vl_moe": "ernie4_5_vl_moe",
    "tiny(test model)": "qwen2_5_vl",
}


QWEN2 = family_options("qwen2_vl", "image")
QWEN3_VIDEO = family_options("qwen3_vl", "video")


def clip_options(factor: int, min_pixels: int, max_pixels: int) -> ProcessorOptions:
    return replace(
        QWEN3_VIDEO, patch_size=factor // 2, min_pixels=min_pixels, max_pixels=max_pixels
    )


def name_of(case: dict) -> str:
    size = "x".join(str(case[key]) for key in ("num_frames", "height", "width") if key in case)
    return f"{case['kind']}-{case['family'].split('/')[0]}-{case['max_pixels']}-{size}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_grid_equals_the_reference(case: dict) -> None:
    """Every reference case gives the same grid, size and tokens, or is refused as there."""
    defaults = family_options(FAMILY[case["family"]], case["kind"])
    options = replace(defaults, min_pixels=case["min_pixels"], max_pixels=case["max_pixels"])
    num_frames = case.get("num_frames", 1)
    if "error" in case:
        with pytest.raises(MediaError):
            patch_grid(num_frames, case["height"], case["width"], options)
        return

    grid = patch_grid(num_frames, case["height"], case["width"], options)

    t, h, w = grid
    merged = merged_grid(grid, options)
    assert [*grid] == case["grid_thw"]
    assert [h * options.patch_size, w * options.patch_size] == case["resized"]
    assert t * h * w == case["num_patches"]
    assert merged[0] * merged[1] * merged[2] == case["num_tokens"]


@pytest.mark.parametrize("case", CLIP_CASES, ids=lambda case: "x".join(map(str, case[:4])))
def test_whole_clip_rule_equals_the_reference(case: list) -> None:
    """The whole-clip rule rounds as the reference does, for odd frame counts and tiny sides too."""
    num_frames, height, width, factor, min_pixels, max_pixels, resized = case
    options = clip_options(factor, min_pixels, max_pixels)
    if resized is None:
        with pytest.raises(MediaError):
            smart_resize(num_frames, height, width, options)
        return

    assert [*smart_resize(num_frames, height, width, options)] == resized


@pytest.mark.parametrize(
    ("kind", "family", "minimum", "maximum"),
    [
        ("image", "qwen2_vl/qwen2_5_vl", 3_136, 1_003_520),
        ("video", "qwen2_vl/qwen2_5_vl", 100_352, 602_112),
        ("image", "qwen3_vl", 65_536, 16_777_216),
        ("video", "qwen3_vl", 131_072, 786_432),
        ("image", "ernie4_5_vl_moe", 3_136, 4_842_768),
        ("video", "ernie4_5_vl_moe", 234_416, 937_664),
    ],
)
def test_defaults_of_a_family_are_the_processors(
    kind: str, family: str, minimum: int, maximum: int
) -> None:
    """A family's defaults are those under which the reference cases were made."""
    options = family_options(FAMILY[family], kind)
    cases = [case for case in CASES if (case["kind"], case["family"]) == (kind, family)]

    assert (options.min_pixels, options.max_pixels) == (minimum, maximum)
    assert {case["patch_size"] for case in cases} == {options.patch_size}
    assert {case["factor"] for case in cases} == {options.factor}
    assert {case.get("temporal_patch_size", options.frames_per_row) for case in cases} == {
        options.frames_per_row
    }


def test_cases_cover_every_family_and_kind() -> None:
    """The reference file has images and videos of all three families."""
    assert len(CASES) == 105
    assert len({(case["kind"], case["family"]) for case in CASES}) == 7


@pytest.mark.parametrize(("side", "rounded"), [(42, 56), (70, 56), (71, 84), (98, 112), (126, 112)])
def test_halves_round_to_the_even_multiple(side: int, rounded: int) -> None:
    """42 / 28 = 1.5 and 70 / 28 = 2.5 both become 2 multiples of 28."""
    options = replace(QWEN2, min_pixels=1, max_pixels=10**9)

    assert smart_resize(1, side, side, options) == (rounded, rounded)


def test_aspect_ratio_of_200_is_the_last() -> None:
    """A ratio of exactly 200 is accepted, as in the reference; the next one is named."""
    assert smart_resize(1, 1, 200, QWEN2)[0] == 28
    with pytest.raises(MediaError, match=r"cat: declares 201x1 ") as caught:
        smart_resize(1, 1, 201, QWEN2, Origin("cat", "r1"))

    assert caught.value.req_id == "r1"


@pytest.mark.parametrize(("height", "width"), [(0, 5), (5, 0), (-1, 5)])
def test_empty_side_is_refused(height: int, width: int) -> None:
    """A side below 1 is refused, not divided by."""
    for options in (QWEN2, QWEN3_VIDEO):
        with pytest.raises(MediaError):
            smart_resize(2, height, width, options)


def test_whole_clip_budget_shares_pixels_among_frames() -> None:
    """Under the clip rule more frames make smaller frames."""
    sizes = [smart_resize(num_frames, 480, 640, QWEN3_VIDEO) for num_frames in (2, 8, 32)]
    areas = [height * width for height, width in sizes]

    assert areas == sorted(areas, reverse=True)
    assert areas[0] > areas[2]


def test_single_frame_under_the_clip_rule_says_what_to_do() -> None:
    """A clip shorter than a temporal patch is refused with a way out."""
    with pytest.raises(MediaError, match="repeat the frame, or pass it as an image"):
        smart_resize(1, 480, 640, QWEN3_VIDEO)
