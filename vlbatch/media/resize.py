"""The size at which a model sees a picture or a clip: one function a rule, no pixels touched.

Both rules bring each side to a multiple of ``factor`` (patch size x merge size), then scale the
picture into a pixel budget. They are those of transformers' processors (checked against 5.24.0):
``smart_resize`` of Qwen2-VL, which Qwen2.5-VL, Qwen3-VL images and ERNIE-4.5-VL share, and the
video rule of Qwen3-VL, whose budget counts the pixels of all frames.
"""

from __future__ import annotations

import math

from vlbatch.media.limits import MAX_ASPECT_RATIO, Origin


def smart_resize(
    height: int,
    width: int,
    factor: int,
    min_pixels: int,
    max_pixels: int,
    *,
    name: str = "picture",
    req_id: str | None = None,
) -> tuple[int, int]:
    """Return the resized ``(height, width)`` of one picture, or of each frame of a clip.

    Halves round to the even multiple, as Python's ``round`` does. One side is never less than
    ``factor``, so an elongated picture may stay above ``max_pixels``.

    Args:
        height: rows of the picture.
        width: columns of the picture.
        factor: both results are multiples of it.
        min_pixels: lower end of the budget, pixels of one picture.
        max_pixels: upper end of the budget, pixels of one picture.
        name: what to call the picture in a refusal.
        req_id: the request to name in a refusal.

    Raises:
        MediaError: a side below 1, or an aspect ratio above ``MAX_ASPECT_RATIO``.
    """
    _check_sides(height, width, Origin(name, req_id))
    return _fit(height, width, 1, 1, factor, min_pixels, max_pixels)


def smart_resize_clip(
    num_frames: int,
    height: int,
    width: int,
    temporal_factor: int,
    factor: int,
    min_pixels: int,
    max_pixels: int,
    *,
    name: str = "clip",
    req_id: str | None = None,
) -> tuple[int, int]:
    """Return the resized ``(height, width)`` of a clip's frames under a budget for the whole clip.

    Frames with a side below ``factor`` are scaled up to it first. The budget is compared with the
    frame count rounded to a multiple of ``temporal_factor``, and filled by the true one.

    Args:
        num_frames: frames of the clip.
        height: rows of a frame.
        width: columns of a frame.
        temporal_factor: frames that share one patch.
        factor: both results are multiples of it.
        min_pixels: lower end of the budget, pixels of all frames.
        max_pixels: upper end of the budget, pixels of all frames.
        name: what to call the clip in a refusal.
        req_id: the request to name in a refusal.

    Raises:
        MediaError: fewer frames than ``temporal_factor``, a side below 1, or an aspect ratio above
            ``MAX_ASPECT_RATIO``.
    """
    origin = Origin(name, req_id)
    if num_frames < temporal_factor:
        raise origin.refusal(
            f"has {num_frames} frames; this model's video rule needs at least {temporal_factor}:"
            " repeat the frame, or pass it as an image"
        )
    _check_sides(height, width, origin)
    if min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    padded_frames = round(num_frames / temporal_factor) * temporal_factor
    return _fit(height, width, num_frames, padded_frames, factor, min_pixels, max_pixels)


def _fit(
    height: int,
    width: int,
    num_frames: int,
    padded_frames: int,
    factor: int,
    min_pixels: int,
    max_pixels: int,
) -> tuple[int, int]:
    """Round both sides; where the product leaves the budget, scale the original to its border."""
    rounded = round(height / factor) * factor, round(width / factor) * factor
    num_pixels = padded_frames * rounded[0] * rounded[1]
    if num_pixels > max_pixels:
        shrink = math.sqrt(num_frames * height * width / max_pixels)
        return (
            max(factor, math.floor(height / shrink / factor) * factor),
            max(factor, math.floor(width / shrink / factor) * factor),
        )
    if num_pixels < min_pixels:
        grow = math.sqrt(min_pixels / (num_frames * height * width))
        return (
            math.ceil(height * grow / factor) * factor,
            math.ceil(width * grow / factor) * factor,
        )
    return rounded


def _check_sides(height: int, width: int, origin: Origin) -> None:
    if min(height, width) < 1:
        raise origin.refusal(
            f"is {height} high and {width} wide; expected both sides to be at least 1"
        )
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise origin.refusal(
            f"is {height} high and {width} wide; the longer side may be at most"
            f" {MAX_ASPECT_RATIO} times the shorter: crop or pad it"
        )
