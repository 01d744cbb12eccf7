"""The size at which a model sees a picture or a clip, from numbers alone.

The rules are those of transformers' processors (checked against 5.24.0): ``smart_resize`` of
Qwen2-VL, which Qwen2.5-VL, Qwen3-VL images and ERNIE-4.5-VL share, and that of Qwen3-VL videos,
whose pixel budget is for all frames together.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

from vlbatch.media.limits import UNNAMED, Origin, check_sides

if TYPE_CHECKING:
    from vlbatch.media.options import ProcessorOptions

PatchGrid: TypeAlias = tuple[int, int, int]
"""Frames, rows and columns in patches, *before* the merge; ``grid_thw`` of the usual models."""


def smart_resize(
    num_frames: int, height: int, width: int, options: ProcessorOptions, origin: Origin = UNNAMED
) -> tuple[int, int]:
    """Return the resized ``(height, width)`` of each frame; a picture is one frame.

    Both are multiples of ``options.factor``; halves round to the even multiple. One side is never
    less than the factor, so an elongated picture may stay above ``max_pixels``.

    Raises:
        MediaError: a side below 1, an aspect ratio above ``MAX_ASPECT_RATIO``, or too few frames
            for a whole-clip budget.
    """
    check_sides(width, height, origin)
    factor = options.factor
    true_frames = budget_frames = 1
    if options.clip_budget:
        # The budget is compared with a rounded number of frames, and filled by the true one.
        per_patch = options.temporal_patch_size
        if num_frames < per_patch:
            raise origin.refusal(
                f"has {num_frames} frames; this model's videos need at least {per_patch}: repeat"
                " the frame, or pass it as an image"
            )
        true_frames, budget_frames = num_frames, round(num_frames / per_patch) * per_patch
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)

    rounded = round(height / factor) * factor, round(width / factor) * factor
    num_pixels = budget_frames * rounded[0] * rounded[1]
    if num_pixels > options.max_pixels:
        shrink = math.sqrt(true_frames * height * width / options.max_pixels)
        return (
            max(factor, math.floor(height / shrink / factor) * factor),
            max(factor, math.floor(width / shrink / factor) * factor),
        )
    if num_pixels < options.min_pixels:
        grow = math.sqrt(options.min_pixels / (true_frames * height * width))
        return (
            math.ceil(height * grow / factor) * factor,
            math.ceil(width * grow / factor) * factor,
        )
    return rounded


def patch_grid(
    num_frames: int, height: int, width: int, options: ProcessorOptions, origin: Origin = UNNAMED
) -> PatchGrid:
    """Compute the patch grid of a clip, or of a picture as one frame; raises as ``smart_resize``.

    Frames are padded to a multiple of what one feature row covers.
    """
    resized_height, resized_width = smart_resize(num_frames, height, width, options, origin)
    num_rows = -(-num_frames // options.frames_per_row)
    side = options.patch_size
    return num_rows * options.temporal_merge_size, resized_height // side, resized_width // side


def merged_grid(grid_thw: PatchGrid, options: ProcessorOptions) -> tuple[int, int, int]:
    """Divide a patch grid by the merge: its product is the number of feature rows."""
    t, h, w = grid_thw
    side = options.merge_size
    return t // options.temporal_merge_size, h // side, w // side
