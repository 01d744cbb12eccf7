"""Media that no request can use, written to a folder: file name -> what the refusal says."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image


def _png_chunk(kind: bytes, content: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + checksum


def _png_header(width: int, height: int) -> bytes:
    """A PNG that declares a size and has no pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", b""), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_png_chunk(*chunk) for chunk in chunks)


def write_bad_pictures(folder: Path) -> dict[str, str]:
    """Write pictures that are refused; returns name -> pattern of the reason."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)
    Image.fromarray(noise).save(folder / "whole.png")
    whole = (folder / "whole.png").read_bytes()
    (folder / "truncated.png").write_bytes(whole[: len(whole) // 2])
    (folder / "text.png").write_text("no picture")
    (folder / "empty.png").write_bytes(b"")
    (folder / "long-side.png").write_bytes(_png_header(100_000, 10))
    (folder / "giant.png").write_bytes(_png_header(10_000, 10_000))
    (folder / "folder.png").mkdir()
    Image.new("L", (400, 1)).save(folder / "flat.png")
    return {
        "missing.png": "missing.png: no such file; check the path in the request",
        "truncated.png": "it is truncated or damaged",
        "text.png": "is not a picture that can be read",
        "empty.png": "the file is empty",
        "long-side.png": r"declares 100000x10 .* at most 16,384 \(setting: max_side\)",
        "giant.png": r"100,000,000 pixels; at most 67,108,864 .* \(setting: max_pixels\)",
        "folder.png": "is not a regular file",
        "flat.png": "declares 400x1 .* at most 200 times the shorter",
    }


def write_bad_clips(folder: Path) -> dict[str, str]:
    """Write clips that are refused; returns name -> pattern of the reason."""
    (folder / "no-frame").mkdir()
    (folder / "stray").mkdir()
    Image.new("L", (28, 28)).save(folder / "stray" / "0.png")
    (folder / "stray" / "1.png").write_text("no picture")
    (folder / "sizes").mkdir()
    for n in range(2):
        Image.new("L", (28, 28 + n)).save(folder / "sizes" / f"{n}.png")
    (folder / "clip.txt").write_text("no clip")
    (folder / "cut.mp4").write_bytes(b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom")
    return {
        "none.gif": "no such file",
        "no-frame": "has no frame; a clip needs at least one",
        "stray": "1.png: is not a picture that can be read",
        "sizes": "sizes",
        "clip.txt": "is not a clip that can be read",
        "cut.mp4": "cut.mp4",
    }
