"""One picture: decoded, upright, uint8 RGB."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image

from vlbatch.media.limits import DEFAULT_LIMITS, MediaLimits, Origin
from vlbatch.media.pixels import (
    WHITE,
    Layout,
    Pixels,
    Rgb,
    Turn,
    array_size,
    check_background,
    check_rgb,
    frozen,
    rgb_from_array,
    rgb_from_pil,
    turned,
)
from vlbatch.media.source import decoding, open_header, read_bytes

ImageSource: TypeAlias = "str | os.PathLike[str] | bytes | Image.Image | npt.NDArray[np.generic]"
"""A path, an encoded file's bytes, a Pillow image, or an array with a stated layout."""


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A decoded picture.

    Attributes:
        pixels: uint8 RGB ``[height, width, 3]``, upright, read-only; a writeable array passed
            here is copied.
        mode: what the source held (``"RGBA"``, ``"P"``, ``"I;16"``, ``"CHW uint8"``), for people
            to read; nothing is decided by it.
        name: what refusals call the picture.
    """

    pixels: Pixels
    mode: str = "RGB"
    name: str = "picture"

    def __post_init__(self) -> None:
        """Refuse anything but non-empty uint8 RGB."""
        check_rgb(self.pixels, 3, self.name)
        object.__setattr__(self, "pixels", frozen(self.pixels))

    @property
    def height(self) -> int:
        """Rows of pixels."""
        return int(self.pixels.shape[0])

    @property
    def width(self) -> int:
        """Columns of pixels."""
        return int(self.pixels.shape[1])


def load_image(
    source: ImageSource,
    *,
    limits: MediaLimits = DEFAULT_LIMITS,
    background: Rgb = WHITE,
    layout: Layout | None = None,
    name: str | None = None,
    req_id: str | None = None,
) -> Picture:
    """Decode one picture.

    The orientation that the file states (EXIF or XMP) is applied, so that grid, identity and
    positions come from the same upright pixels. An animated file gives its first frame, a Pillow
    image the frame it is at; neither a Pillow image nor an array is changed.

    Args:
        source: see ``ImageSource``.
        limits: checked against the declared size before anything is decoded.
        background: colour behind transparent places.
        layout: axes of an array source, which must be stated; for nothing else.
        name: what to call the picture; a path's own text by default.
        req_id: the request to name in a refusal.

    Raises:
        MediaError: missing, unreadable, truncated, of an unknown format, or of an unusable shape.
        MediaTooLarge: the declared size is over a limit.
    """
    origin = Origin(name or source_name(source), req_id)
    check_background(background, origin)
    if (layout is not None) != isinstance(source, np.ndarray):
        raise origin.refusal(
            f"layout is {layout!r} for a {type(source).__name__}; an array source needs its axes"
            " stated ('HW', 'HWC' or 'CHW') and no other source takes any",
            "layout",
        )
    if isinstance(source, np.ndarray) and layout is not None:
        height, width, _ = array_size(source, layout, origin)
        limits.check_picture(width, height, origin)
        pixels = rgb_from_array(source, layout, background, origin)
        return Picture(pixels, f"{layout} {source.dtype}", origin.name)
    if isinstance(source, Image.Image):
        limits.check_picture(source.width, source.height, origin)
        return Picture(decode(source, background, origin), source.mode, origin.name)
    if isinstance(source, (str, os.PathLike, bytes)):
        image = open_header(read_bytes(source, limits, origin), limits, origin)
        if image is None:
            raise origin.refusal(
                "is not a picture that can be read; expected PNG, JPEG, WebP, GIF, BMP, TIFF, PPM,"
                " JPEG 2000 or AVIF, complete"
            )
        with image:
            return Picture(decode(image, background, origin), image.mode, origin.name)
    raise origin.refusal(
        f"source is a {type(source).__name__}; expected a path, bytes, a Pillow image or an array"
    )


def decode(image: Image.Image, background: Rgb, origin: Origin) -> Pixels:
    """Decode the current frame of a Pillow image: upright, read-only uint8 RGB.

    Raises:
        MediaError: truncated or damaged, or of a colour mode that has no conversion.
    """
    with decoding(origin):
        image.load()
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    turn = Turn(  # EXIF tag 0x0112; values other than 1 to 8 mean upright
        transpose=orientation in (5, 6, 7, 8),
        flip_columns=orientation in (2, 3, 6, 7),
        flip_rows=orientation in (3, 4, 7, 8),
    )
    return frozen(turned(rgb_from_pil(image, background, origin), turn))


def source_name(source: object) -> str:
    """Name a source for refusals when the caller gave no name."""
    if isinstance(source, (str, os.PathLike)):
        return str(source)
    if isinstance(source, bytes):
        return f"file of {len(source):,} bytes"
    if isinstance(source, Image.Image):
        return str(getattr(source, "filename", "")) or "Pillow image"
    return type(source).__name__
