"""How a model's processor cuts media into patches: the values, each family's, a folder's."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vlbatch.errors import InvalidSetting
from vlbatch.media.limits import Origin

if TYPE_CHECKING:
    import os

_COUNTS: Final = ("min_pixels", "max_pixels", "patch_size", "merge_size")
_FRAME_COUNTS: Final = ("temporal_patch_size", "temporal_merge_size")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and type(value) is not bool and math.isfinite(value)


def _require(is_met: bool, name: str, value: object, expected: str) -> None:
    if not is_met:
        raise InvalidSetting(
            f"processor option {name} is {value!r}; expected {expected}", setting=name
        )


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
        clip_budget: whether the pixel budget is that of a whole clip, not of each frame.
        resample: Pillow's number of the resize filter (3 is bicubic).
        rescale_factor: multiplies the 8-bit value before mean and deviation.
        image_mean: subtracted, a channel each.
        image_std: divides, a channel each.

    Raises:
        InvalidSetting: what no processor can work with.
    """

    min_pixels: int
    max_pixels: int
    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2
    temporal_merge_size: int = 1
    clip_budget: bool = False
    resample: int = 3
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)

    def __post_init__(self) -> None:
        """Check every option; equal ones become equal bit for bit."""
        for name in (*_COUNTS, *_FRAME_COUNTS):
            value = getattr(self, name)
            _require(type(value) is int and value > 0, name, value, "a positive integer")
        most = f"at most max_pixels, {self.max_pixels}"
        _require(self.min_pixels <= self.max_pixels, "min_pixels", self.min_pixels, most)
        is_filter = type(self.resample) is int and self.resample in range(6)
        _require(is_filter, "resample", self.resample, "a Pillow filter number, 0 to 5")
        factor = self.rescale_factor
        _require(_is_number(factor), "rescale_factor", factor, "a number")
        object.__setattr__(self, "rescale_factor", float(factor))
        for name in ("image_mean", "image_std"):
            value = getattr(self, name)
            is_rgb = isinstance(value, (list, tuple)) and len(value) == 3
            _require(is_rgb and all(map(_is_number, value)), name, value, "three numbers")
            object.__setattr__(self, name, tuple(map(float, value)))
        _require(0.0 not in self.image_std, "image_std", self.image_std, "no zero")

    @property
    def factor(self) -> int:
        """Pixels of a side that one feature row covers; resized sides are multiples of it."""
        return self.patch_size * self.merge_size

    @property
    def frames_per_row(self) -> int:
        """Frames that one feature row covers; clips are padded to a multiple of it."""
        return self.temporal_patch_size * self.temporal_merge_size


_HALF: Final = (0.5, 0.5, 0.5)
_QWEN3: Final = ProcessorOptions(
    min_pixels=256**2, max_pixels=4096**2, patch_size=16, image_mean=_HALF, image_std=_HALF
)
_QWEN3_VIDEO: Final = replace(
    _QWEN3, min_pixels=128 * 32**2, max_pixels=768 * 32**2, clip_budget=True
)
_QWEN2: Final = ProcessorOptions(min_pixels=56**2, max_pixels=1280 * 28**2)
_QWEN2_VIDEO: Final = replace(_QWEN2, min_pixels=128 * 28**2, max_pixels=768 * 28**2)
# ERNIE's tower takes single frames and merges pairs of them after it. The time stamps that its
# processor draws on frames are the caller's to draw.
_ERNIE: Final = replace(_QWEN2, max_pixels=6177 * 28**2, temporal_patch_size=1)
_ERNIE_VIDEO: Final = replace(
    _ERNIE, min_pixels=299 * 28**2, max_pixels=1196 * 28**2, temporal_merge_size=2
)

_DEFAULTS: Final = {
    "qwen2_vl": {"image": _QWEN2, "video": _QWEN2_VIDEO},
    "qwen2_5_vl": {"image": _QWEN2, "video": _QWEN2_VIDEO},
    "qwen3_vl": {"image": _QWEN3, "video": _QWEN3_VIDEO},
    "ernie4_5_vl_moe": {"image": _ERNIE, "video": _ERNIE_VIDEO},
}

_EDGES: Final = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}


def family_options(family: str, modality: str) -> ProcessorOptions:
    """Return the defaults of transformers' processor of a family for ``"image"`` or ``"video"``.

    Raises:
        InvalidSetting: an unknown family or modality; the message lists those known.
    """
    _require(family in _DEFAULTS, "family", family, f"one of {', '.join(_DEFAULTS)}")
    _require(modality in ("image", "video"), "modality", modality, "'image' or 'video'")
    return _DEFAULTS[family][modality]


def load_options(folder: str | os.PathLike[str], modality: str) -> ProcessorOptions:
    """Read a model folder's ``preprocessor_config.json``; for videos ``video_…`` of it first.

    What the file leaves out is the default of the family that its processor type names.

    Raises:
        MediaError: no such file, or not JSON.
        InvalidSetting: an unknown processor type, a value that is not what it should be, or a step
            that this package does not take.
    """
    path = Path(folder, "video_preprocessor_config.json")
    if modality != "video" or not path.exists():
        path = Path(folder, "preprocessor_config.json")
    if not path.exists():
        raise Origin(str(folder)).refusal(f"holds no processor configuration, {path.name}")
    config = _read_config(path)
    kind = str(config.get("video_processor_type", config.get("image_processor_type")))
    prefix = re.split("(?:Image|Video)Processor", kind)[0].replace("_", "").lower()
    families = {family.replace("_", ""): family for family in _DEFAULTS}
    defaults = family_options(families.get(prefix, kind), modality)

    for name in ("do_resize", "do_rescale", "do_normalize"):
        _require(config.get(name, True) is True, name, config.get(name), "True")
    capped = config.get("cap_pixels_per_frame", False)
    _require(capped is False, "cap_pixels_per_frame", capped, "False")
    size = config.get("size", {})
    is_budget = isinstance(size, dict) and size.keys() <= {*_EDGES, *_EDGES.values()}
    _require(is_budget, "size", size, "shortest_edge and longest_edge, pixels")
    given = {_EDGES.get(key, key): value for key, value in size.items()} | config
    if defaults.temporal_merge_size > 1 and "temporal_patch_size" in given:
        given["temporal_merge_size"] = given.pop("temporal_patch_size")
    names = {field.name for field in fields(ProcessorOptions)}
    return replace(defaults, **{name: given[name] for name in names & given.keys()})


def _read_config(path: Path) -> dict[str, Any]:  # Any: JSON
    """Parse a JSON object; nulls, also of objects in it, are left out."""
    origin = Origin(str(path))

    def given(object_: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in object_.items() if value is not None}

    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_hook=given)
    except (OSError, ValueError) as error:
        raise origin.refusal(f"cannot be read as JSON ({error})") from error
    if not isinstance(config, dict):
        raise origin.refusal(f"holds a {type(config).__name__}; expected a JSON object")
    return config
