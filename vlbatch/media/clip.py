"""One clip: frames of one size, decoded, upright, uint8 RGB, with their pace where it is known."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeAlias

from PIL import Image

from vlbatch.errors import InvalidSetting
from vlbatch.media.image import (
    WHITE,
    ImageSource,
    Pixels,
    Rgb,
    checked_pixels,
    decode,
    decoding,
    load_image,
    open_image,
    read_bytes,
    source_name,
    stack_frames,
)
from vlbatch.media.limits import DEFAULT_LIMITS, MediaLimits, Origin
from vlbatch.media.video import decode_video, is_video

ClipSource: TypeAlias = "str | os.PathLike[str] | bytes | Sequence[ImageSource]"
"""A file or folder, an encoded file's bytes, or pictures in order (an array: ``Clip`` itself)."""


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """A decoded clip.

    Attributes:
        frames: uint8 RGB ``[frames, height, width, 3]``, upright, read-only; a writeable array
            passed here is copied.
        seconds_per_frame: mean time between two frames, or ``None`` if not known.
        name: what refusals call the clip.
    """

    frames: Pixels
    seconds_per_frame: float | None = None
    name: str = "clip"

    def __post_init__(self) -> None:
        """Refuse anything but non-empty uint8 RGB frames and a positive pace."""
        object.__setattr__(self, "frames", checked_pixels(self.frames, 4, self.name))
        if self.seconds_per_frame is not None and not 0 < self.seconds_per_frame < float("inf"):
            message = f"seconds_per_frame is {self.seconds_per_frame}; expected a positive number"
            raise Origin(self.name).refusal(message, "seconds_per_frame")


def load_clip(
    source: ClipSource,
    *,
    limits: MediaLimits = DEFAULT_LIMITS,
    background: Rgb = WHITE,
    frame_step: int = 1,
    name: str | None = None,
    req_id: str | None = None,
) -> Clip:
    """Decode one clip.

    Animated GIF, WebP and APNG give composited frames, a still picture is a clip of one. MP4/MOV
    needs the ``video`` extra. A folder's frames are its visible files, all pictures, in natural
    order of their names (``f2`` before ``f10``), without a pace.

    Args:
        source: see ``ClipSource``.
        limits: checked against declared sizes and counts before anything is decoded.
        background: colour behind transparent places.
        frame_step: keep frames 0, ``frame_step``, 2 * ``frame_step``, ...
        name: what to call the clip; a path's own text by default.
        req_id: the request to name in a refusal.

    Raises:
        MediaError: as ``load_image``; or no frame, or frames of different sizes.
        MediaTooLarge: a declared size or count is over a limit.
        MissingDependency: an MP4, and PyAV is not installed.
        InvalidSetting: ``frame_step`` is no positive integer, or ``background`` no colour.
    """
    origin = Origin(name or source_name(source), req_id)
    if type(frame_step) is not int or frame_step < 1:
        raise InvalidSetting(
            f"got {frame_step!r}; expected a positive integer", req_id=req_id, setting="frame_step"
        )
    if isinstance(source, (str, os.PathLike)) and os.path.isdir(source):
        source = _frame_files(Path(source), origin)
    if not isinstance(source, (str, os.PathLike, bytes)):
        kept = source[::frame_step]
        limits.check_clip(len(kept), 1, 1, origin)
        load = partial(load_image, limits=limits, background=background, req_id=req_id)
        pictures = (load(frame).pixels for frame in kept)
        return Clip(stack_frames(pictures, limits, origin), None, origin.name)
    data = read_bytes(source, limits, origin)
    if is_video(data):
        frames, pace = decode_video(data, frame_step, limits, origin)
    else:
        frames, pace = _decode_animation(data, background, frame_step, limits, origin)
    return Clip(frames, pace, origin.name)


def _frame_files(folder: Path, origin: Origin) -> list[Path]:
    try:
        files = [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError as error:
        raise origin.refusal(f"cannot be listed ({error})") from error
    return sorted(files, key=_natural_key)


def _natural_key(path: Path) -> tuple[list[tuple[str, int]], str]:
    """Order runs of digits by value; names that differ in leading zeros alone, by the name."""
    parts = re.findall(r"(\D*)(\d*)", path.name)
    return [(text, int(digits or -1)) for text, digits in parts], path.name


def _decode_animation(
    data: bytes, background: Rgb, frame_step: int, limits: MediaLimits, origin: Origin
) -> tuple[Pixels, float | None]:
    """Decode an animated or still picture; returns its kept frames and their pace.

    Disposal, blending and partial frames are composited, skipped frames too.
    """
    durations_ms: list[float] = []

    def kept(image: Image.Image) -> Iterator[Pixels]:
        for index, stored in enumerate(_stored_frames(image, frame_step, limits, origin)):
            durations_ms.append(float(stored.info.get("duration", 0)))
            if index % frame_step == 0:
                yield decode(stored, background, origin)

    with open_image(data, limits, origin, "clip") as image:
        if image.format == "GIF" and not data.rstrip(b"\0").endswith(b";"):
            raise origin.refusal("is truncated, it has no GIF trailer; expected a complete file")
        pixels = stack_frames(kept(image), limits, origin)
    pace = frame_step * sum(durations_ms) / len(durations_ms) / 1000
    return pixels, pace if pace > 0 else None


def _stored_frames(
    image: Image.Image, frame_step: int, limits: MediaLimits, origin: Origin
) -> Iterator[Image.Image]:
    """Move a Pillow image through its frames; pages of other formats are not frames.

    WebP and APNG declare their number of frames, which is checked first; a GIF does not.
    """
    # A PNG may carry a still picture for viewers without APNG, which Pillow counts as frame 0.
    start = 1 if getattr(image, "default_image", False) else 0
    num_stored = getattr(image, "n_frames", 1) if image.format in ("PNG", "WEBP") else 1
    limits.check_clip(len(range(start, num_stored, frame_step)), *image.size, origin)
    for index in count() if image.format == "GIF" else range(start, num_stored):
        with decoding(origin):
            try:
                image.seek(index)
            except EOFError:
                if image.format != "GIF":
                    raise
                return
            limits.check_picture(*image.size, origin)  # a GIF's canvas may grow
            image.load()  # some decoders state a frame's duration only now
        yield image
