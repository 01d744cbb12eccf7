from __future__ import annotations

import contextlib
import importlib
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from blake3 import blake3
from media_builders import noise
from PIL import Image

from vlbatch.errors import MediaError
from vlbatch.media import (
    Clip,
    Patches,
    Picture,
    ProcessorOptions,
    family_options,
    load_options,
    process_clip,
    process_image,
)

# Rows of transformers 5.24.0's processors; data/make_patches.py wrote them.
PROCESSOR = {
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoe",
}
GOLDEN = json.loads((Path(__file__).parent / "data" / "patches.json").read_text())["cases"]
PLAIN = ProcessorOptions(
    min_pixels=1,
    max_pixels=10**6,
    patch_size=4,
    merge_size=2,
    rescale_factor=1.0,
    image_mean=(0, 0, 0),
    image_std=(1, 1, 1),
)


def pattern(num_frames: int, height: int, width: int) -> npt.NDArray[np.uint8]:
    t, y, x, c = np.ogrid[:num_frames, :height, :width, :3]
    return ((31 * t + 13 * y + 7 * x + 29 * c + x * y) % 256).astype(np.uint8)


def process(modality: str, frames: npt.NDArray[np.uint8], options: ProcessorOptions) -> Patches:
    if modality == "image":
        return process_image(Picture(frames[0]), options)
    return process_clip(Clip(frames), options)


@pytest.mark.parametrize(
    "case",
    GOLDEN,
    ids=lambda case: "-".join(map(str, (case["family"], *case["num_frames_height_width"]))),
)
def test_patches_equal_the_reference_processors(case: dict, tmp_path: Path) -> None:
    """Patches equal those of transformers' processors, bit for bit where nothing is resized.

    Pillow 13 rounds some resized samples otherwise than Pillow 12 does: there one of the 255 steps
    is allowed. Videos are normalized by their processors in another order of operations.
    """
    kind = f"{PROCESSOR[case['family']]}{case['modality'].title()}Processor"
    config = {**case["config"], f"{case['modality']}_processor_type": kind}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    options = load_options(tmp_path, case["modality"])
    num_frames, height, width = case["num_frames_height_width"]

    result = process(case["modality"], pattern(num_frames, height, width), options)

    _, h, w = result.grid_thw
    is_resized = (h * options.patch_size, w * options.patch_size) != (height, width)
    step = 1.001 * options.rescale_factor / min(options.image_std)
    rows, columns, values = zip(*case["samples"], strict=True)
    assert [*result.grid_thw] == case["grid_thw"]
    assert [*result.patches.shape] == case["shape"]
    assert result.patches.dtype == np.float32
    np.testing.assert_allclose(
        result.patches[list(rows), list(columns)], values, rtol=0, atol=step if is_resized else 1e-6
    )
    if case["modality"] == "image" and not is_resized:
        assert blake3(result.patches.tobytes()).hexdigest() == case["blake3"]


@pytest.mark.parametrize(
    ("height", "width", "config"),
    [
        (224, 224, {}),
        (61, 75, {}),
        (300, 451, {"max_pixels": 50_176}),
        (28, 900, {}),
        (100, 90, {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}),
        (56, 90, {"resample": 2, "rescale_factor": 1 / 127.5, "temporal_patch_size": 1}),
    ],
)
def test_patches_equal_the_installed_transformers(
    height: int, width: int, config: dict, tmp_path: Path
) -> None:
    """Patches of a picture equal the installed transformers' processor bit for bit."""
    processor_type = _installed_processor()
    pixels = noise(height, width, 3)
    processor = processor_type(**json.loads(json.dumps(config)))
    expected = processor(images=[Image.fromarray(pixels)], return_tensors="np")
    processor.save_pretrained(tmp_path)

    result = process_image(Picture(pixels), load_options(tmp_path, "image"))

    np.testing.assert_array_equal(result.patches, expected["pixel_values"])
    np.testing.assert_array_equal([result.grid_thw], expected["image_grid_thw"])


def _installed_processor() -> type:
    """Return the Pillow variant, which releases before 5.24 had under another name."""
    package = "transformers.models.qwen2_vl"
    names = [
        ("image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil"),
        ("image_processing_qwen2_vl", "Qwen2VLImageProcessor"),
    ]
    for module, name in names:
        with contextlib.suppress(ImportError):
            return getattr(importlib.import_module(f"{package}.{module}"), name)
    pytest.skip("transformers is not installed, or not importable")


# -- order ---------------------------------------------------------------------------------------
def inverse(result: Patches, options: ProcessorOptions) -> npt.NDArray[np.float32]:
    """Put patch rows back into frames, place by place, from the documented order alone."""
    t, h, w = result.grid_thw
    patch, merge, frames = options.patch_size, options.merge_size, options.temporal_patch_size
    out = np.full((t * frames, h * patch, w * patch, 3), np.nan, np.float32)
    rows = iter(result.patches)
    for group, square_row, square_column in itertools.product(
        range(t), range(h // merge), range(w // merge)
    ):
        for row, column in itertools.product(range(merge), range(merge)):
            values = iter(next(rows))
            top = (square_row * merge + row) * patch
            left = (square_column * merge + column) * patch
            for channel, frame, y, x in itertools.product(
                range(3), range(frames), range(patch), range(patch)
            ):
                out[group * frames + frame, top + y, left + x, channel] = next(values)
    return out


@pytest.mark.parametrize("seed", range(12))
def test_patches_hold_every_pixel_once(seed: int) -> None:
    """Putting patches back in order gives the frames, the last one repeated to fill up."""
    rng = np.random.default_rng(seed)
    patch, merge, temporal, temporal_merge = rng.integers(1, 4, 4).tolist()
    num_frames = int(rng.integers(1, 6))
    options = replace(
        PLAIN,
        patch_size=patch,
        merge_size=merge,
        temporal_patch_size=temporal,
        temporal_merge_size=temporal_merge,
    )
    height, width = (rng.integers(1, 4, 2) * options.factor).tolist()
    frames = noise(num_frames, height, width, 3, seed=seed)

    result = process_clip(Clip(frames), options)

    padded = frames[np.minimum(np.arange(len(inverse(result, options))), num_frames - 1)]
    np.testing.assert_array_equal(inverse(result, options), padded, err_msg=f"seed {seed}")
    assert len(padded) % options.frames_per_row == 0
    assert len(padded) - num_frames < options.frames_per_row


def test_picture_is_repeated_to_fill_a_temporal_patch() -> None:
    """Both frames of a picture's patches are the picture."""
    pixels = noise(16, 8, 3)

    result = process_image(Picture(pixels), PLAIN)

    assert result.grid_thw == (1, 4, 2)
    np.testing.assert_array_equal(inverse(result, PLAIN), np.stack([pixels, pixels]))


def test_one_feature_row_covers_a_merge_square() -> None:
    """merged_grid counts feature rows: a square of patches each, of two frames where merged."""
    clip = Clip(noise(5, 56, 84, 3))
    qwen = replace(family_options("qwen2_5_vl", "video"), min_pixels=1)
    ernie = replace(family_options("ernie4_5_vl_moe", "video"), min_pixels=1)

    assert process_clip(clip, qwen).grid_thw == (3, 4, 6)
    assert process_clip(clip, qwen).merged_grid == (3, 2, 3)
    assert process_clip(clip, ernie).grid_thw == (6, 4, 6)
    assert process_clip(clip, ernie).merged_grid == (3, 2, 3)
    assert process_clip(clip, ernie).num_tokens == 18


def test_pace_of_a_clip_is_that_of_its_grid() -> None:
    """A grid frame lasts as long as the frames that it covers; without a pace nothing is said."""
    options = replace(family_options("qwen2_5_vl", "video"), min_pixels=1)
    ernie = replace(family_options("ernie4_5_vl_moe", "video"), min_pixels=1)

    assert process_clip(Clip(noise(4, 56, 56, 3), 0.25), options).seconds_per_grid == 0.5
    assert process_clip(Clip(noise(4, 56, 56, 3), 0.25), ernie).seconds_per_grid == 0.5
    assert process_clip(Clip(noise(4, 56, 56, 3)), options).seconds_per_grid is None


def test_clips_of_one_request_do_not_share_their_length() -> None:
    """Two clips of one request each have the grid and pace of their own frames (B97)."""
    options = replace(family_options("qwen2_5_vl", "video"), min_pixels=1)
    clips = [Clip(noise(frames, 56, 56, 3), pace) for frames, pace in ((8, 0.5), (10, 0.25))]

    results = [process_clip(clip, options) for clip in clips]

    assert [result.num_tokens for result in results] == [16, 20]
    assert [result.seconds_per_grid for result in results] == [1.0, 0.5]


def test_turned_picture_has_a_turned_grid() -> None:
    """Grid and pixels come from the same upright picture (B92)."""
    pixels = noise(28 * 2, 28 * 4, 3)
    options = family_options("qwen2_5_vl", "image")

    assert process_image(Picture(pixels), options).grid_thw == (1, 4, 8)
    assert process_image(Picture(pixels.swapaxes(0, 1)), options).grid_thw == (1, 8, 4)


def test_patches_are_read_only() -> None:
    """Patches cannot be written."""
    result = process_image(Picture(noise(8, 8, 3)), PLAIN)

    with pytest.raises(ValueError, match="read-only"):
        result.patches[0, 0] = 1


def test_refusal_names_picture_and_request() -> None:
    """A picture that the resize rule refuses is named with its request."""
    with pytest.raises(MediaError, match=r"request 'r1': strip\.png") as caught:
        process_image(Picture(noise(1, 201, 3), name="strip.png"), PLAIN, req_id="r1")

    assert caught.value.req_id == "r1"
