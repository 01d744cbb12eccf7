"""Identity of decoded media: equal keys mean that the encoder would be handed equal input.

A key is the BLAKE3 digest (256 bits, never cut) of a header led by its length, and the raw samples.
The header holds the shape, so that no two contents share a byte stream: 30x150 and 150x30 pixels of
the same bytes differ, and so do the same pixels under other options. It is the same in every
process. The encoder cache adds weight epoch and adapter to it. A clip's pace is not in it: that
moves positions, not features.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from vlbatch.errors import MediaError

if TYPE_CHECKING:
    import numpy.typing as npt

    from vlbatch.media.options import ProcessorOptions


def identity_key(
    pixels: npt.NDArray[np.uint8], *, modality: str, options: ProcessorOptions, model: str
) -> str:
    """Name the features of decoded pixels.

    Args:
        pixels: uint8 RGB as ``Picture`` and ``Clip`` hold it; hashed in place where C-contiguous.
        modality: ``"image"`` or ``"video"``.
        options: the processor options that the pixels will be cut with.
        model: identifies the encoder's architecture and checkpoint.

    Returns:
        64 hexadecimal digits.

    Raises:
        MediaError: pixels that are not uint8 or are empty.
    """
    if pixels.dtype != np.uint8 or pixels.size == 0:
        raise MediaError(
            f"pixels are {pixels.dtype} {pixels.shape}; expected non-empty uint8: decode them first"
        )
    return _digest([pixels], kind="RGB", modality=modality, model=model, options=asdict(options))


def embeds_key(levels: Sequence[npt.NDArray[np.generic]], *, modality: str, model: str) -> str:
    """Name precomputed features, one array ``[rows, hidden]`` a level, as ``identity_key`` does."""
    return _digest(levels, kind="embeds", modality=modality, model=model)


def _digest(arrays: Sequence[npt.NDArray[np.generic]], **header: object) -> str:
    shapes = [(array.dtype.str, array.shape) for array in arrays]
    fields = {"format": "vlbatch media identity 1", "arrays": shapes, **header}
    text = json.dumps(fields, sort_keys=True).encode()
    hasher = blake3(len(text).to_bytes(8, "little") + text)
    for array in arrays:
        hasher.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()
