"""Identity of decoded media: equal keys mean that the encoder would be handed equal input.

A key is the BLAKE3 digest (256 bits, never cut) of a header and the raw samples. The header frames
every field by its length and holds the shape, so that no two contents share a byte stream: 30x150
and 150x30 pixels of the same bytes differ, and so do the same pixels under other options. It is
the same in every process and on every platform: nothing goes through ``hash()``, pickling or the
machine's byte order.

A key says nothing about the state of the model. The encoder cache adds weight epoch and adapter:
its entries are found by ``(key, epoch, adapter)``. Nor does it hold a clip's pace: that moves
positions, not features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from blake3 import blake3

from vlbatch.errors import MediaError

if TYPE_CHECKING:
    import numpy.typing as npt

    from vlbatch.media.options import ProcessorOptions

_FORMAT: Final = "vlbatch media identity 1"

_Value: TypeAlias = "int | float | str | tuple[_Value, ...]"


def identity_key(
    pixels: npt.NDArray[np.uint8],
    *,
    modality: str,
    options: ProcessorOptions,
    model: str,
    channels: str = "RGB",
) -> str:
    """Name the features of decoded pixels.

    Args:
        pixels: uint8 ``[height, width, 3]`` or ``[frames, height, width, 3]``, as ``Picture`` and
            ``Clip`` hold them; hashed in place where C-contiguous, else copied first.
        modality: ``"image"`` or ``"video"``.
        options: the processor options that the pixels will be cut with.
        model: identifies the encoder's architecture and checkpoint.
        channels: what the last axis holds.

    Returns:
        64 hexadecimal digits.

    Raises:
        MediaError: pixels that are not uint8 or are empty, or an empty text.
    """
    if pixels.dtype != np.uint8 or pixels.size == 0:
        raise MediaError(
            f"pixels are {pixels.dtype} {pixels.shape}; expected non-empty uint8: decode them first"
        )
    header: dict[str, _Value] = {
        "kind": "pixels",
        "modality": modality,
        "channels": channels,
        "model": model,
    }
    for field in fields(options):
        header[f"options.{field.name}"] = getattr(options, field.name)
    return _digest(header, (pixels,))


def embeds_key(levels: Sequence[npt.NDArray[np.generic]], *, modality: str, model: str) -> str:
    """Name precomputed features.

    Args:
        levels: one array ``[rows, hidden]`` a level, as ``Item.embeds`` holds them.
        modality: of the item that they stand for.
        model: the model whose embedding space they belong to.

    Returns:
        64 hexadecimal digits, never those of pixels.

    Raises:
        MediaError: no level, an empty one, or one that holds Python objects.
    """
    if not levels:
        raise MediaError("embeddings have no level; expected one array [rows, hidden] a level")
    for level in levels:
        if level.ndim != 2 or level.size == 0 or level.dtype.hasobject:
            raise MediaError(
                f"embeddings are {level.dtype} {level.shape}; expected a non-empty array of numbers"
                " [rows, hidden]"
            )
    return _digest({"kind": "embeds", "modality": modality, "model": model}, levels)


def _digest(header: dict[str, _Value], arrays: Sequence[npt.NDArray[np.generic]]) -> str:
    hasher = blake3(_encode(_FORMAT))
    for name, value in sorted(header.items()):
        if value == "":
            raise MediaError(f"identity field {name} is empty; expected a text", setting=name)
        hasher.update(_encode(name) + _encode(value))
    for array in arrays:
        stored = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        hasher.update(_encode(stored.dtype.name) + _encode(tuple(stored.shape)))
        hasher.update(_frame("bytes", stored.nbytes))
        hasher.update(stored.reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()


def _encode(value: _Value) -> bytes:
    """Write a value so that no two values, of the same type or not, give the same bytes."""
    if isinstance(value, tuple):
        return b"".join([_frame("tuple", len(value)), *map(_encode, value)])
    kind = type(value).__name__
    text = value.hex() if isinstance(value, float) else str(value)
    content = text.encode()
    return _frame(kind, len(content)) + content


def _frame(kind: str, length: int) -> bytes:
    """One byte of type, eight bytes of length."""
    return kind[:1].encode() + length.to_bytes(8, "little")
