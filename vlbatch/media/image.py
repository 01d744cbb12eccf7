"""One picture: decoded, upright, uint8 RGB.

Rules
- A header is read first; the limits see its numbers before any pixel is decoded.
- Only the formats listed here are opened: Pillow's others include some that start helper programs.
- Pillow's process-wide settings (its decompression-bomb limit among them) are never changed.
- Colour profiles are not applied. 16-bit grey keeps the nearest of 256 levels.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from vlbatch.errors import InvalidSetting, MediaError
from vlbatch.media.limits import DEFAULT_LIMITS, MediaLimits, Origin

Pixels: TypeAlias = npt.NDArray[np.uint8]
"""uint8 RGB ``[height, width, 3]`` or ``[frames, height, width, 3]``, C-contiguous, read-only."""

Rgb: TypeAlias = tuple[int, int, int]
"""Red, green, blue, each in ``[0, 256)``."""

Layout: TypeAlias = Literal["HW", "HWC", "CHW"]
"""Axes of an array: the caller states them, a shape never decides (1x1x3 fits two)."""

ImageSource: TypeAlias = "str | os.PathLike[str] | bytes | Image.Image | npt.NDArray[np.uint8]"
"""A path, an encoded file's bytes, a Pillow image, or a uint8 array with a stated layout."""

WHITE: Final[Rgb] = (255, 255, 255)

_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")

# What Pillow's decoders raise for damaged input; OSError covers "truncated".
_DAMAGE: Final = (
    *(OSError, SyntaxError, ValueError, EOFError, LookupError),
    *(ArithmeticError, TypeError, RuntimeError, struct.error),
)


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A decoded picture.

    Attributes:
        pixels: uint8 RGB ``[height, width, 3]``, upright, read-only; a writeable array passed
            here is copied.
        name: what refusals call the picture.
    """

    pixels: Pixels
    name: str = "picture"

    def __post_init__(self) -> None:
        """Refuse anything but non-empty uint8 RGB with a ``MediaError``."""
        object.__setattr__(self, "pixels", checked_pixels(self.pixels, 3, self.name))


def load_image(
    source: ImageSource,
    *,
    limits: MediaLimits = DEFAULT_LIMITS,
    background: Rgb = WHITE,
    layout: Layout | None = None,
    name: str | None = None,
    req_id: str | None = None,
) -> Picture:
    """Decode one picture, of an animated one the first frame; the source is left as it was.

    A stored orientation (EXIF) is applied, so that grid, identity and positions come from the same
    upright pixels.

    Args:
        source: see ``ImageSource``.
        limits: checked against the declared size before anything is decoded.
        background: colour behind transparent places.
        layout: axes of an array; for no other source.
        name: what to call the picture; a path's own text by default.
        req_id: the request to name in a refusal.

    Raises:
        MediaError: missing, unreadable, truncated, or of an unknown format, shape or colour mode.
        MediaTooLarge: the declared size is over a limit.
        InvalidSetting: ``background`` is no colour.
    """
    origin = Origin(name or source_name(source), req_id)
    if isinstance(source, np.ndarray):
        source = _array_image(source, layout, origin)
    elif layout is not None:
        raise origin.refusal(f"layout {layout!r} is for arrays, and this is none", "layout")
    if isinstance(source, Image.Image):
        limits.check_picture(source.width, source.height, origin)
        return Picture(decode(source, background, origin), origin.name)
    with open_image(read_bytes(source, limits, origin), limits, origin) as image:
        return Picture(decode(image, background, origin), origin.name)


def decode(image: Image.Image, background: Rgb, origin: Origin) -> Pixels:
    """Decode the current frame of a Pillow image: upright RGB, alpha on the background."""
    if len(background) != 3 or any(value not in range(256) for value in background):
        raise InvalidSetting(
            f"got {background}; expected 3 x 0..255", req_id=origin.req_id, setting="background"
        )
    with decoding(origin):
        upright = ImageOps.exif_transpose(image)
        is_wide = upright.mode[0] in "IF"
        key = upright.info.get("transparency")
        # Pillow keeps the high bytes of 16-bit RGB, but all of its transparent colour.
        if key is not None and (is_wide or (isinstance(key, tuple) and max(key) > 255)):
            raise origin.refusal("has a transparent 16-bit colour; save it with an alpha channel")
        if is_wide:
            upright = _to_8_bit(upright, origin)
        canvas = upright.convert("RGBA" if upright.has_transparency_data else "RGB")
        if canvas.mode == "RGBA":
            opaque = Image.new("RGB", canvas.size, background)
            opaque.paste(canvas.convert("RGB"), mask=canvas)  # rounds to nearest
            canvas = opaque
        return np.asarray(canvas)


def checked_pixels(pixels: Pixels, num_axes: int, name: str) -> Pixels:
    """Return non-empty uint8 ``[..., 3]`` read-only and C-contiguous, copied unless both."""
    shape = pixels.shape
    if pixels.dtype != np.uint8 or len(shape) != num_axes or shape[-1] != 3 or 0 in shape:
        message = f"pixels are {pixels.dtype} {shape}; expected non-empty uint8 RGB"
        raise MediaError(f"{name}: {message}, {num_axes} axes with the channels last")
    if pixels.flags.writeable or not pixels.flags.c_contiguous:
        pixels = pixels.copy(order="C")
        pixels.flags.writeable = False
    return pixels


def stack_frames(frames: Iterable[Pixels], limits: MediaLimits, origin: Origin) -> Pixels:
    """Stack frames of one size, at least one, counting them against the limits as they come."""
    stack: list[Pixels] = []
    for pixels in frames:
        height, width, _ = pixels.shape
        limits.check_clip(len(stack) + 1, width, height, origin)
        if stack and pixels.shape != stack[0].shape:
            raise origin.refusal(
                f"frame {len(stack)} is {width}x{height} but the first is"
                f" {stack[0].shape[1]}x{stack[0].shape[0]} (width x height); expected one size"
            )
        stack.append(pixels)
    limits.check_clip(len(stack), 1, 1, origin)  # it needs one
    stacked = np.stack(stack)
    stacked.flags.writeable = False
    return stacked


def read_bytes(
    source: str | os.PathLike[str] | bytes, limits: MediaLimits, origin: Origin
) -> bytes:
    """Return the bytes of an encoded file; its length is checked before it is read."""
    if isinstance(source, bytes):
        limits.check_file(len(source), origin)
        return source
    path = Path(source)
    try:
        if not path.is_file():
            what = "is not a regular file" if path.exists() else "no such file"
            raise origin.refusal(f"{what}; check the path in the request")
        limits.check_file(path.stat().st_size, origin)
        return path.read_bytes()
    except OSError as error:
        raise origin.refusal(f"cannot be read ({error})") from error


def open_image(
    data: bytes, limits: MediaLimits, origin: Origin, kind: str = "picture"
) -> Image.Image:
    """Open an encoded picture without decoding it; its declared size is within the limits."""
    with decoding(origin):
        try:
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
        except UnidentifiedImageError as error:
            raise origin.refusal(
                f"is not a {kind} that can be read; expected a complete {', '.join(_FORMATS)}"
                ", or for clips MP4"
            ) from error
    limits.check_picture(image.width, image.height, origin)
    return image


@contextmanager
def decoding(origin: Origin) -> Iterator[None]:
    """Turn what Pillow raises for damaged or enormous input into refusals.

    NOTE: Pillow pads a truncated file with grey instead of raising if the process has set
    ``PIL.ImageFile.LOAD_TRUNCATED_IMAGES``; leave it unset.
    """
    try:
        yield
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise origin.over_limit(f"too large for Pillow ({error})", "max_pixels") from error
    except _DAMAGE as error:
        raise origin.refusal(
            f"cannot be decoded, it is truncated or damaged ({error}); expected a complete file"
        ) from error


def source_name(source: object) -> str:
    """Name a source for refusals when the caller gave no name."""
    return str(source) if isinstance(source, (str, os.PathLike)) else type(source).__name__


def _array_image(
    array: npt.NDArray[np.uint8], layout: Layout | None, origin: Origin
) -> Image.Image:
    """Wrap an array of 1 (grey), 2 (grey, alpha), 3 (RGB) or 4 (RGBA) channels."""
    channels = array.shape[-3 if layout == "CHW" else -1] if array.ndim == 3 else 1
    is_layout = layout in ("HW", "HWC", "CHW") and array.ndim == len(layout)
    if not is_layout or array.dtype != np.uint8 or array.size == 0 or channels > 4:
        raise origin.refusal(
            f"array is {array.dtype} {array.shape} in layout {layout}; expected non-empty uint8 of"
            " 1 to 4 channels, and its axes stated: HW, HWC or CHW",
            "layout",
        )
    hwc = np.moveaxis(array, 0, -1) if layout == "CHW" else array
    return Image.fromarray(hwc[..., 0] if hwc.shape[2:] == (1,) else hwc)


def _to_8_bit(image: Image.Image, origin: Origin) -> Image.Image:
    """Scale grey samples in ``[0, 65535]`` to the nearest 8-bit value."""
    samples = np.asarray(image)
    if image.mode == "F" or samples.min() < 0 or samples.max() > 65_535:
        raise origin.refusal(f"has samples outside 0..65535 or floats ({image.mode}); rescale them")
    return Image.fromarray(((samples.astype(np.int32) + 128) // 257).astype(np.uint8))
