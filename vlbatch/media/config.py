"""Processor options from the files beside a model's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from vlbatch.media.limits import Origin
from vlbatch.media.options import ProcessorOptions, family_options

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

_Json: TypeAlias = "Mapping[str, object]"

# Files of a model folder by modality, first found wins: one file for all processors (its entry is
# named), then one file a processor. Older models have no file for videos and use the image one.
_FILES: Final = {
    "image": (("processor_config.json", "image_processor"), ("preprocessor_config.json", None)),
    "video": (
        ("processor_config.json", "video_processor"),
        ("video_preprocessor_config.json", None),
        ("preprocessor_config.json", None),
    ),
}

_FAMILY_OF_TYPE: Final = {
    "Qwen2VLImageProcessor": "qwen2_vl",
    "Qwen2_5_VLImageProcessor": "qwen2_vl",
    "Qwen2VLVideoProcessor": "qwen2_vl",
    "Qwen3VLVideoProcessor": "qwen3_vl",
    "Ernie4_5_VLMoeImageProcessor": "ernie4_5_vl_moe",
    "Ernie4_5_VLMoeVideoProcessor": "ernie4_5_vl_moe",
}

_BUDGET_KEYS: Final = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}


def load_options(
    source: str | os.PathLike[str], modality: str = "image", *, family: str | None = None
) -> ProcessorOptions:
    """Read processor options from a model folder or from one JSON file.

    A folder is searched for ``processor_config.json`` (its ``image_processor`` or
    ``video_processor`` entry), then for ``preprocessor_config.json`` or, for videos,
    ``video_preprocessor_config.json`` first. Keys that the file leaves out keep the family's value.

    Args:
        source: the folder, or the file with the options at its top level.
        modality: ``"image"`` or ``"video"``.
        family: overrides what the file's processor type says.

    Raises:
        MediaError: no such file, not JSON, a value of the wrong type, an unknown processor type or
            family, or a processor that does not resize.
    """
    path = Path(source)
    if modality not in _FILES:
        raise Origin(str(path)).refusal(
            f"modality is {modality!r}; expected 'image' or 'video'", "modality"
        )
    if not path.is_dir():
        return _options(_read_json(path), Origin(str(path)), modality, family)
    for file_name, entry in _FILES[modality]:
        file = path / file_name
        if not file.exists():
            continue
        config = _read_json(file)
        if entry is not None:
            nested = config.get(entry)
            if not isinstance(nested, dict):
                continue  # a file of that name once held other things only
            config = nested
        return _options(config, Origin(str(file)), modality, family)
    raise Origin(str(path)).refusal(
        "holds no processor configuration; expected"
        f" {', '.join(name for name, _ in _FILES[modality])}"
    )


def _read_json(path: Path) -> _Json:
    origin = Origin(str(path))
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise origin.refusal(f"cannot be read as JSON ({error})") from error
    if not isinstance(config, dict):
        raise origin.refusal(f"holds a {type(config).__name__}; expected a JSON object")
    return config


def _options(config: _Json, origin: Origin, modality: str, family: str | None) -> ProcessorOptions:
    given = {key: value for key, value in config.items() if value is not None}
    defaults = family_options(family or _family(given, origin), modality)
    for key, needed in (("do_resize", True), ("cap_pixels_per_frame", False)):
        if given.get(key, needed) is not needed:
            raise origin.refusal(f"{key} is {given[key]!r}; only {needed} is supported", key)

    min_pixels, max_pixels = _pixel_budget(given, defaults, origin)
    given = {**_fallbacks(defaults), **given}
    frames = _integer(given, "temporal_patch_size", origin)
    merges_frames = defaults.temporal_merge_size > 1
    rescale = _number(given, "rescale_factor", origin)
    mean = _channels(given, "image_mean", origin)
    std = _channels(given, "image_std", origin)
    return ProcessorOptions(
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        patch_size=_integer(given, "patch_size", origin),
        merge_size=_integer(given, "merge_size", origin),
        temporal_patch_size=defaults.temporal_patch_size if merges_frames else frames,
        temporal_merge_size=frames if merges_frames else 1,
        resize_rule=defaults.resize_rule,
        resample=_integer(given, "resample", origin),
        rescale_factor=rescale if given.get("do_rescale", True) else 1.0,
        image_mean=mean if given.get("do_normalize", True) else (0.0, 0.0, 0.0),
        image_std=std if given.get("do_normalize", True) else (1.0, 1.0, 1.0),
    )


def _fallbacks(defaults: ProcessorOptions) -> dict[str, object]:
    """Return the family's values under the names that a file would use."""
    return {
        "temporal_patch_size": defaults.frames_per_row,
        "patch_size": defaults.patch_size,
        "merge_size": defaults.merge_size,
        "resample": defaults.resample,
        "rescale_factor": defaults.rescale_factor,
        "image_mean": defaults.image_mean,
        "image_std": defaults.image_std,
    }


def _family(given: _Json, origin: Origin) -> str:
    kind = given.get("video_processor_type", given.get("image_processor_type"))
    name = str(kind).removesuffix("Fast").removesuffix("Pil")
    if name not in _FAMILY_OF_TYPE:
        raise origin.refusal(
            f"names the processor {kind!r}; expected one of {', '.join(_FAMILY_OF_TYPE)}:"
            " state the family",
            "family",
        )
    return _FAMILY_OF_TYPE[name]


def _pixel_budget(given: _Json, defaults: ProcessorOptions, origin: Origin) -> tuple[int, int]:
    """Take the budget from either spelling; ``min_pixels`` and ``max_pixels`` win over ``size``."""
    size = given.get("size", {})
    if not isinstance(size, dict):
        raise origin.refusal(f"size is {size!r}; expected an object", "size")
    budget: dict[str, object] = {
        "min_pixels": defaults.min_pixels,
        "max_pixels": defaults.max_pixels,
        **{
            _BUDGET_KEYS.get(str(key), str(key)): value
            for key, value in size.items()
            if value is not None
        },
        **{key: given[key] for key in ("min_pixels", "max_pixels") if key in given},
    }
    unknown = budget.keys() - {"min_pixels", "max_pixels"}
    if unknown:
        raise origin.refusal(
            f"size states {', '.join(sorted(unknown))}; expected shortest_edge and longest_edge",
            "size",
        )
    return _integer(budget, "min_pixels", origin), _integer(budget, "max_pixels", origin)


def _integer(given: _Json, key: str, origin: Origin) -> int:
    value = given[key]
    if type(value) is not int:
        raise origin.refusal(f"{key} is {value!r}; expected an integer", key)
    return value


def _number(given: _Json, key: str, origin: Origin) -> float:
    value = given[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise origin.refusal(f"{key} is {value!r}; expected a number", key)
    return float(value)


def _channels(given: _Json, key: str, origin: Origin) -> tuple[float, float, float]:
    """Three numbers, or one for all channels."""
    value = given[key]
    values = value if isinstance(value, (list, tuple)) else [value] * 3
    if len(values) != 3:
        raise origin.refusal(f"{key} is {value!r}; expected three numbers", key)
    red, green, blue = (_number({key: number}, key, origin) for number in values)
    return red, green, blue
