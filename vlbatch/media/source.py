"""From a path or bytes to an open Pillow image whose declared size has been accepted.

Rules
- A header is read first; the limits see its numbers before any pixel is decoded.
- Only the formats listed here are opened: Pillow's others include some that start helper programs.
- Pillow's process-wide settings (its decompression-bomb limit among them) are never changed.
"""

from __future__ import annotations

import io
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from PIL import Image, UnidentifiedImageError

from vlbatch.media.limits import MediaLimits, Origin

_FORMATS: Final[tuple[str, ...]] = (
    "PNG",
    "JPEG",
    "WEBP",
    "GIF",
    "BMP",
    "TIFF",
    "PPM",
    "JPEG2000",
    "AVIF",
)

# What Pillow's decoders raise for damaged input, besides OSError (which covers "truncated").
_DAMAGE: Final = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    RuntimeError,
    struct.error,
)


def read_bytes(
    source: str | os.PathLike[str] | bytes, limits: MediaLimits, origin: Origin
) -> bytes:
    """Return the encoded file's bytes; its length is checked before it is read.

    Raises:
        MediaError: missing, unreadable, empty, or not a regular file.
        MediaTooLarge: longer than ``max_file_bytes``.
    """
    if isinstance(source, bytes):
        limits.check_file(len(source), origin)
        return source
    path = Path(source)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise origin.refusal("is not a regular file; expected an encoded picture or clip")
        limits.check_file(status.st_size, origin)
        return path.read_bytes()
    except FileNotFoundError as error:
        raise origin.refusal("no such file; check the path in the request") from error
    except (OSError, ValueError) as error:
        raise origin.refusal(f"cannot be read ({error}); check the path and its rights") from error


def open_header(data: bytes, limits: MediaLimits, origin: Origin) -> Image.Image | None:
    """Open an encoded picture without decoding it; ``None`` if it is in none of the formats.

    Returns:
        A Pillow image whose declared size is within the limits and whose pixels are not loaded.

    Raises:
        MediaError: a damaged header, or a side or aspect ratio that is unusable.
        MediaTooLarge: the declared size is over a limit.
    """
    Image.init()
    formats = [name for name in _FORMATS if name in Image.OPEN]
    with decoding(origin):
        try:
            image = Image.open(io.BytesIO(data), formats=formats)
        except UnidentifiedImageError:
            return None
    limits.check_picture(image.width, image.height, origin)
    return image


@contextmanager
def decoding(origin: Origin) -> Iterator[None]:
    """Turn what Pillow raises for damaged or enormous input into this package's refusals.

    NOTE: Pillow pads a truncated file with grey instead of raising if the process has set
    ``PIL.ImageFile.LOAD_TRUNCATED_IMAGES``; leave it unset.
    """
    try:
        yield
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise origin.over_limit(
            f"declares more pixels than Pillow opens ({error})", "max_pixels"
        ) from error
    except _DAMAGE as error:
        raise origin.refusal(
            f"cannot be decoded, it is truncated or damaged ({error}); expected a complete file"
        ) from error
