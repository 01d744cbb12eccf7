"""A FastDeploy request's ``multimodal_inputs`` as items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from vlbatch.errors import InvalidItem
from vlbatch.items import Item

_MODALITIES = ("image", "video", "audio")


def items_of(
    multimodal_inputs: Mapping[str, object] | None,
    *,
    merge_size: int = 2,
    payloads: Sequence[object] | None = None,
) -> list[Item]:
    """Make one item of each image and video, so that no running offset is needed afterwards.

    Args:
        multimodal_inputs: ``mm_positions`` (an ``(offset, length)`` pair, or an object with these
            names, an item), ``mm_hashes`` (content keys), ``grid_thw`` ``[items, 3]`` in patches,
            and optionally ``image_type_ids`` (0 image, 1 video) or ``mm_types`` (names), by item.
        merge_size: patches a side that become one feature row.
        payloads: what the encoder reads, by item; ``None``: the item's own slice of ``images``,
            patches ``[sum of t*h*w, ...]`` of all items one after the other.

    Raises:
        InvalidItem: lists of different lengths, or patches that do not add up.
    """
    if not multimodal_inputs:
        return []
    positions = [_span(each) for each in _list(multimodal_inputs, "mm_positions")]
    keys = _list(multimodal_inputs, "mm_hashes")
    grids = np.asarray(_list(multimodal_inputs, "grid_thw"), dtype=np.int64).reshape(-1, 3)
    types = _list(multimodal_inputs, "mm_types") or _list(multimodal_inputs, "image_type_ids")
    types = types or [0] * len(positions)
    if payloads is None:
        payloads = _patches(multimodal_inputs.get("images"), grids)
    lengths = {len(positions), len(keys), len(grids), len(types), len(payloads)}
    if len(lengths) > 1:
        raise InvalidItem(
            f"got {len(positions)} positions, {len(keys)} hashes, {len(grids)} grids,"
            f" {len(types)} types, {len(payloads)} payloads; expected as many of each"
        )
    return [
        Item(
            key=str(key),
            modality=kind if isinstance(kind, str) else _MODALITIES[int(cast("int", kind))],
            offset=offset,
            length=length,
            grid=(int(t), int(h) // merge_size, int(w) // merge_size),
            payload=payload,
        )
        for (offset, length), key, (t, h, w), kind, payload in zip(
            positions, keys, grids.tolist(), types, payloads, strict=True
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


def _patches(
    images: object, grids: np.ndarray[tuple[int, int], np.dtype[np.int64]]
) -> list[object]:
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
