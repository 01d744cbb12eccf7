"""A FastDeploy request's ``multimodal_inputs`` as items."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from operator import index
from typing import TypeAlias

import numpy as np

from vlbatch.backends.dtypes import convert
from vlbatch.errors import InvalidField, InvalidItem
from vlbatch.integrations.fastdeploy.config import integer
from vlbatch.items import IntArray, Item

_Grids: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.int64]]


def items_of(
    multimodal_inputs: Mapping[str, object] | None,
    *,
    merge_size: int = 2,
    temporal_merge_size: int = 1,
    seconds_per_grid: Sequence[float | None] | None = None,
    payloads: Sequence[object] | None = None,
) -> list[Item]:
    """Make one item of each image and video, so that no running offset is needed afterwards.

    Args:
        multimodal_inputs: ``mm_positions`` (an ``(offset, length)`` pair, or an object with these
            names, an item), ``mm_hashes`` (content keys), ``grid_thw`` ``[items, 3]`` in patches,
            and optionally ``image_type_ids`` (0 image, 1 video; by frame, as many as the ``t`` of
            all grids add up to), without which everything is an image.
        merge_size: patches a side that become one feature row.
        temporal_merge_size: frames of a video that become one (2 for ERNIE).
        seconds_per_grid: seconds between two frames of the grid, by item, where the positions of
            a video depend on it (Qwen2.5-VL).
        payloads: what the encoder reads, by item; ``None``: the item's own slice of ``images``,
            patches ``[sum of t*h*w, ...]`` of all items one after the other.

    Raises:
        InvalidItem: something that is no list of entries; lists of different lengths, a hash that
            is no text, a grid that merging would cut, or patches that do not add up.
        InvalidSetting: a merge size below 1.
    """
    for name, size in (("merge_size", merge_size), ("temporal_merge_size", temporal_merge_size)):
        integer({name: size}, name)
    if multimodal_inputs is None:
        return []
    if not isinstance(multimodal_inputs, Mapping):
        raise InvalidItem(f"got a {type(multimodal_inputs).__name__}; expected a mapping")
    inputs = multimodal_inputs
    positions = [_span(each) for each in _entries(inputs.get("mm_positions"), "mm_positions")]
    keys = _entries(inputs.get("mm_hashes"), "mm_hashes")
    grids = _grids(inputs.get("grid_thw"))
    types = _types(inputs.get("image_type_ids"), grids)
    own = _patches(inputs.get("images"), grids) if payloads is None else payloads
    pixels = _entries(own, "payloads")
    seconds = _seconds(seconds_per_grid, len(grids))
    lengths = {len(positions), len(keys), len(grids), len(pixels), len(seconds)}
    if len(lengths) > 1:
        raise InvalidItem(
            f"got {len(positions)} positions, {len(keys)} hashes, {len(grids)} grids,"
            f" {len(pixels)} payloads, {len(seconds)} seconds; expected as many of each"
        )
    if not all(isinstance(key, str) and key for key in keys):
        raise InvalidItem(f"got mm_hashes {keys}; expected text: equal ones share their features")
    if (grids[:, 1:] % merge_size).any():
        raise InvalidItem(
            f"got grid_thw {grids.tolist()}; expected heights and widths in multiples of"
            f" merge_size {merge_size}"
        )
    return [
        Item(
            key=str(key),
            modality=modality,
            offset=offset,
            length=length,
            grid=(-(-t // temporal_merge_size), h // merge_size, w // merge_size),
            seconds_per_grid=second,
            payload=payload,
        )
        for (offset, length), key, (t, h, w), modality, second, payload in zip(
            positions, keys, grids.tolist(), types, seconds, pixels, strict=True
        )
    ]


def _entries(value: object, name: str) -> list[object]:
    """Entries of a list or array by item, none for ``None``."""
    if value is None:
        return []
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidItem(f"{name} is a {type(value).__name__}; expected a list, one entry an item")
    return list(value)


def _integers(value: object, name: str) -> IntArray:
    """Integers of a list or array, flat."""
    entries = _entries(value, name)
    try:
        return convert(entries, "int64", what=name).reshape(-1)
    except InvalidField as error:
        raise InvalidItem(str(error)) from None


def _span(position: object) -> tuple[int, int]:
    """First token and number of tokens."""
    try:
        offset, length = getattr(position, "offset", None), getattr(position, "length", None)
        if offset is None or length is None:
            offset, length = position  # type: ignore[misc]  # tried
        return index(offset), index(length)  # type: ignore[arg-type]  # tried
    except (TypeError, ValueError):
        raise InvalidItem(
            f"got position {position!r}; expected two integers, offset and length"
        ) from None


def _grids(value: object) -> _Grids:
    """Frames, rows and columns in patches, by item."""
    numbers = _integers(value, "grid_thw")
    if numbers.size % 3 or (numbers < 1).any():
        raise InvalidItem(
            f"got grid_thw {numbers.tolist()}; expected frames, rows and columns of each item,"
            " all positive"
        )
    return numbers.reshape(-1, 3)


def _types(value: object, grids: _Grids) -> list[str]:
    """Each item's modality: that of its first frame."""
    type_ids = _integers(value, "image_type_ids").tolist()
    if not type_ids:
        return ["image"] * len(grids)
    stops = np.cumsum(grids[:, 0]).tolist()
    if len(type_ids) != (stops[-1] if stops else 0):
        raise InvalidItem(f"got {len(type_ids)} image_type_ids; the grids have {stops[-1:]} frames")
    return ["video" if type_ids[start] else "image" for start in [0, *stops[:-1]]]


def _seconds(value: Sequence[float | None] | None, num_items: int) -> list[float | None]:
    """Each item's seconds between frames, ``None`` where positions do not depend on it."""
    if value is None:
        return [None] * num_items
    found: list[float | None] = []
    for second in _entries(value, "seconds_per_grid"):
        if second is not None and (isinstance(second, bool) or not isinstance(second, Real)):
            raise InvalidItem(f"got seconds_per_grid {second!r}; expected a number or None")
        found.append(None if second is None else float(second))
    return found


def _patches(images: object, grids: _Grids) -> list[object]:
    """Each item's own patches."""
    if images is None:
        return [None] * len(grids)
    if not hasattr(images, "__len__") or not hasattr(images, "__getitem__"):
        raise InvalidItem(f"images are a {type(images).__name__}; expected an array of patches")
    stops = np.cumsum(grids.prod(axis=1)).tolist()
    total = stops[-1] if stops else 0
    if len(images) != total:
        raise InvalidItem(f"got {len(images)} patches; the grids have {total}")
    starts = [0, *stops[:-1]]
    return [images[i:j] for i, j in zip(starts, stops, strict=True)]
