"""A FastDeploy request's ``multimodal_inputs`` as items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

import numpy as np

from vlbatch.errors import InvalidItem
from vlbatch.items import Item

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
        InvalidItem: lists of different lengths, a hash that is no text, a grid that merging would
            cut, or patches that do not add up.
    """
    if not multimodal_inputs:
        return []
    positions = [_span(each) for each in _list(multimodal_inputs, "mm_positions")]
    keys = _list(multimodal_inputs, "mm_hashes")
    grids = np.asarray(_list(multimodal_inputs, "grid_thw"), dtype=np.int64).reshape(-1, 3)
    types = _types(_list(multimodal_inputs, "image_type_ids"), grids)
    if payloads is None:
        payloads = _patches(multimodal_inputs.get("images"), grids)
    seconds = seconds_per_grid or [None] * len(grids)
    lengths = {len(positions), len(keys), len(grids), len(payloads), len(seconds)}
    if len(lengths) > 1:
        raise InvalidItem(
            f"got {len(positions)} positions, {len(keys)} hashes, {len(grids)} grids,"
            f" {len(payloads)} payloads, {len(seconds)} seconds; expected as many of each"
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
            positions, keys, grids.tolist(), types, seconds, payloads, strict=True
        )
    ]


def _list(inputs: Mapping[str, object], name: str) -> list[object]:
    value = inputs.get(name)
    return [] if value is None else list(cast("Sequence[object]", value))


def _span(position: object) -> tuple[int, int]:
    if hasattr(position, "offset") and hasattr(position, "length"):
        return int(position.offset), int(position.length)
    offset, length = cast("tuple[int, int]", position)
    return int(offset), int(length)


def _types(type_ids: Sequence[object], grids: _Grids) -> list[str]:
    """Each item's modality: that of its first frame."""
    if not type_ids:
        return ["image"] * len(grids)
    stops = np.cumsum(grids[:, 0]).tolist()
    if len(type_ids) != (stops[-1] if stops else 0):
        raise InvalidItem(f"got {len(type_ids)} image_type_ids; the grids have {stops[-1:]} frames")
    return ["video" if type_ids[start] else "image" for start in [0, *stops[:-1]]]


def _patches(images: object, grids: _Grids) -> list[object]:
    """Each item's own patches."""
    if images is None:
        return [None] * len(grids)
    stops = np.cumsum(grids.prod(axis=1)).tolist()
    total = stops[-1] if stops else 0
    if len(cast("Sequence[object]", images)) != total:
        raise InvalidItem(
            f"got {len(cast('Sequence[object]', images))} patches; the grids have {total}"
        )
    starts = [0, *stops[:-1]]
    return [images[i:j] for i, j in zip(starts, stops, strict=True)]  # type: ignore[index]  # array
