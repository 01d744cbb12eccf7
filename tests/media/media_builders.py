"""Small encoded files, built in memory, for the media tests."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import numpy.typing as npt
from PIL import Image


def noise(*shape: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encode(image: Image.Image, file_format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    return encode(Image.fromarray(pixels), "PNG")


def animation(frames: list[npt.NDArray[np.uint8]], file_format: str, **options: object) -> bytes:
    first, *rest = (Image.fromarray(frame) for frame in frames)
    return encode(first, file_format, save_all=True, append_images=rest, **options)


def png_chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)


def raw_png(
    width: int,
    height: int,
    depth: int,
    colour_type: int,
    rows: bytes,
    *extra: bytes,
) -> bytes:
    """Build a PNG by hand; ``rows`` are the scan lines, each led by its filter byte."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            png_chunk(b"IHDR", header),
            *extra,
            png_chunk(b"IDAT", zlib.compress(rows)),
            png_chunk(b"IEND", b""),
        )
    )


def gif(width: int, height: int, *blocks: bytes) -> bytes:
    """Build a GIF with the palette black, red, green, blue; colour 0 is the background."""
    palette = bytes((0, 0, 0, 255, 0, 0, 0, 255, 0, 0, 0, 255))
    screen = struct.pack("<HHBBB", width, height, 0x80 | 1, 0, 0)
    return b"GIF89a" + screen + palette + b"".join(blocks) + b";"


def gif_frame(
    x: int,
    y: int,
    colours: npt.NDArray[np.uint8],
    *,
    disposal: int = 0,
    transparent: int | None = None,
    centiseconds: int = 10,
) -> bytes:
    """Build one frame at ``(x, y)``; ``colours`` ``[h, w]`` are palette indices 0 to 3."""
    flags = disposal << 2 | (transparent is not None)
    control = b"!\xf9\x04" + struct.pack("<BHBB", flags, centiseconds, transparent or 0, 0)
    height, width = colours.shape
    descriptor = b"," + struct.pack("<HHHHB", x, y, width, height, 0)
    # LZW with codes of 3 bits throughout: a clear code (4) before each pixel keeps them short.
    codes = [code for colour in colours.ravel().tolist() for code in (4, colour)] + [5]
    bits = sum(code << 3 * index for index, code in enumerate(codes))
    packed = bits.to_bytes(-(-3 * len(codes) // 8), "little")
    parts = [packed[start : start + 255] for start in range(0, len(packed), 255)]
    data = b"".join(bytes((len(part),)) + part for part in parts)
    return control + descriptor + b"\x02" + data + b"\0"
