"""Frames of an animated GIF, WebP, APNG or AVIF, composited as a viewer would show them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from vlbatch.media.image import decode
from vlbatch.media.pixels import stack_frames
from vlbatch.media.source import decoding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from PIL import Image

    from vlbatch.media.limits import MediaLimits, Origin
    from vlbatch.media.pixels import Pixels, Rgb

_ANIMATED: Final = ("GIF", "WEBP", "PNG", "AVIF")
_GIF_IMAGE: Final = 0x2C
_GIF_TRAILER: Final = 0x3B


class Frames(NamedTuple):
    """Decoded frames and their pace.

    Attributes:
        pixels: uint8 RGB ``[frames, height, width, 3]``, read-only.
        seconds_per_frame: mean time between two of them, or ``None`` if the file does not say.
    """

    pixels: Pixels
    seconds_per_frame: float | None


def read_animation(
    image: Image.Image,
    data: bytes,
    *,
    background: Rgb,
    frame_step: int,
    limits: MediaLimits,
    origin: Origin,
) -> Frames:
    """Decode every ``frame_step``-th frame of an open Pillow image; a still one gives one frame.

    Only GIF, WebP, APNG and AVIF move; further pages or views of other formats are not frames.
    Disposal, blending and partial frames are composited; what stays transparent shows the
    background.

    Args:
        image: as ``open_header`` returned it; it is moved through its frames.
        data: the encoded file that it was opened from.
        background: colour behind transparent places.
        frame_step: keep frames 0, ``frame_step``, 2 * ``frame_step``, ...
        limits: checked against the number of frames before any is decoded.
        origin: named in a refusal.

    Raises:
        MediaError: a frame is missing, truncated, damaged, or of another size than the first.
        MediaTooLarge: more frames or pixels than the limits.
    """
    # NOTE: a PNG may carry a still picture for viewers without APNG; Pillow counts it as frame 0.
    start = 1 if getattr(image, "default_image", False) else 0
    num_stored = _num_stored_frames(image, data, start + limits.max_frames * frame_step + 1, origin)
    kept = range(start, num_stored, frame_step)
    limits.check_clip(len(kept), image.width, image.height, origin)

    durations_ms: list[float] = []

    def kept_frames() -> Iterator[Pixels]:
        for index in range(start, num_stored):
            with decoding(origin):
                image.seek(index)
                image.load()  # some decoders state a frame's duration only now
            durations_ms.append(float(image.info.get("duration", 0)))
            if index in kept:
                yield decode(image, background, origin)

    pixels = stack_frames(kept_frames(), len(kept), origin)
    mean = sum(durations_ms) / len(durations_ms) / 1000
    return Frames(pixels, mean * frame_step if mean > 0 else None)


def _num_stored_frames(image: Image.Image, data: bytes, stop: int, origin: Origin) -> int:
    """Count stored frames without decoding any; counting a GIF's ends at ``stop``."""
    if image.format == "GIF":
        try:
            return _num_gif_frames(data, stop)
        except IndexError as error:
            raise origin.refusal(
                "ends in the middle of a frame or without the GIF trailer; expected a complete file"
            ) from error
    return int(getattr(image, "n_frames", 1)) if image.format in _ANIMATED else 1


def _num_gif_frames(data: bytes, stop: int) -> int:
    """Walk the blocks of a GIF and count its image descriptors, up to ``stop`` of them.

    A GIF's header declares no frame count, and Pillow's own count has no upper end. Block layout:
    GIF89a specification, sections 18 to 27.

    Raises:
        IndexError: the data ends before the trailer.
    """
    position = 13 + _colour_table_bytes(data[10])
    num_frames = 0
    while data[position] != _GIF_TRAILER and num_frames < stop:
        if data[position] == _GIF_IMAGE:  # descriptor of 10 bytes, colour table, LZW code size
            num_frames += 1
            position += 11 + _colour_table_bytes(data[position + 9])
        else:  # extension: introducer, label
            position += 2
        while data[position]:  # sub-blocks, each led by its length, up to one of length 0
            position += 1 + data[position]
        position += 1
    return num_frames


def _colour_table_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0
