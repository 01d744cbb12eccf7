"""How a model's processor cuts pictures and clips into patches: the values, and the families."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from vlbatch.errors import MediaError

ResizeRule: TypeAlias = Literal["frame", "clip"]
"""Whether the pixel budget holds for each frame or for the whole clip."""

_CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)
_HALF: Final = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorOptions:
    """Everything that decides a picture's or clip's patches; part of its identity.

    Attributes:
        min_pixels: lower end of the pixel budget after the resize.
        max_pixels: upper end of the pixel budget after the resize.
        patch_size: side of a patch, pixels.
        merge_size: side of the square of patches that the model merges into one feature row.
        temporal_patch_size: frames in one patch; a picture is repeated to fill it.
        temporal_merge_size: grid frames that the model merges into one feature row.
        resize_rule: what the pixel budget holds for.
        resample: Pillow's number of the resize filter (3 is bicubic).
        rescale_factor: multiplies the 8-bit value before mean and deviation.
        image_mean: subtracted, a channel each.
        image_std: divides, a channel each.
    """

    min_pixels: int
    max_pixels: int
    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2
    temporal_merge_size: int = 1
    resize_rule: ResizeRule = "frame"
    resample: int = 3
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, float, float] = _CLIP_MEAN
    image_std: tuple[float, float, float] = _CLIP_STD

    def __post_init__(self) -> None:
        """Refuse values that no processor can work with; equal options become equal bit for bit."""
        for name in (
            "min_pixels",
            "max_pixels",
            "patch_size",
            "merge_size",
            "temporal_patch_size",
            "temporal_merge_size",
        ):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise _bad(name, value, "a positive integer")
        if self.min_pixels > self.max_pixels:
            raise _bad("min_pixels", self.min_pixels, f"at most max_pixels = {self.max_pixels}")
        if self.resize_rule not in ("frame", "clip"):
            raise _bad("resize_rule", self.resize_rule, "'frame' or 'clip'")
        if type(self.resample) is not int or not 0 <= self.resample <= 5:
            raise _bad("resample", self.resample, "a Pillow filter number, 0 to 5")
        object.__setattr__(self, "rescale_factor", float(self.rescale_factor))
        for name in ("image_mean", "image_std"):
            values = tuple(float(value) for value in getattr(self, name))
            if len(values) != 3 or not all(math.isfinite(value) for value in values):
                raise _bad(name, values, "three finite numbers")
            object.__setattr__(self, name, values)
        if 0.0 in self.image_std:
            raise _bad("image_std", self.image_std, "no zero")

    @property
    def factor(self) -> int:
        """Pixels of a side that one feature row covers; resized sides are multiples of it."""
        return self.patch_size * self.merge_size

    @property
    def frames_per_row(self) -> int:
        """Frames that one feature row covers; clips are padded to a multiple of it."""
        return self.temporal_patch_size * self.temporal_merge_size


@dataclass(frozen=True, slots=True)
class Family:
    """Default options of one model family.

    Attributes:
        image: for pictures.
        video: for clips.
    """

    image: ProcessorOptions
    video: ProcessorOptions

    def options(self, modality: str) -> ProcessorOptions:
        """Return the options of ``"image"`` or ``"video"``.

        Raises:
            MediaError: another modality.
        """
        if modality == "image":
            return self.image
        if modality == "video":
            return self.video
        raise _bad("modality", modality, "'image' or 'video'")


_QWEN2_VL: Final = Family(
    image=ProcessorOptions(min_pixels=56 * 56, max_pixels=1280 * 28 * 28),
    video=ProcessorOptions(min_pixels=128 * 28 * 28, max_pixels=768 * 28 * 28),
)
_QWEN3_VL_IMAGE: Final = ProcessorOptions(
    min_pixels=256 * 256,
    max_pixels=4096 * 4096,
    patch_size=16,
    image_mean=_HALF,
    image_std=_HALF,
)

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "qwen2_vl": _QWEN2_VL,
        "qwen2_5_vl": _QWEN2_VL,
        "qwen3_vl": Family(
            image=_QWEN3_VL_IMAGE,
            video=replace(
                _QWEN3_VL_IMAGE,
                min_pixels=128 * 32 * 32,
                max_pixels=768 * 32 * 32,
                resize_rule="clip",
            ),
        ),
        # ERNIE's tower takes single frames and merges pairs of them after it. The time stamps that
        # its processor draws on frames are the caller's to draw.
        "ernie4_5_vl_moe": Family(
            image=ProcessorOptions(
                min_pixels=56 * 56, max_pixels=6177 * 28 * 28, temporal_patch_size=1
            ),
            video=ProcessorOptions(
                min_pixels=299 * 28 * 28,
                max_pixels=1196 * 28 * 28,
                temporal_patch_size=1,
                temporal_merge_size=2,
            ),
        ),
    }
)
"""Family name -> defaults, the values of transformers' processors."""


def family_options(family: str, modality: str) -> ProcessorOptions:
    """Return a family's default options for ``"image"`` or ``"video"``.

    Raises:
        MediaError: an unknown family or modality.
    """
    if family not in FAMILIES:
        raise _bad("family", family, f"one of {', '.join(FAMILIES)}")
    return FAMILIES[family].options(modality)


def _bad(name: str, value: object, expected: str) -> MediaError:
    return MediaError(f"processor option {name} is {value!r}; expected {expected}", setting=name)
