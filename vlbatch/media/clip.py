"""One clip: frames of one size, decoded, upright, uint8 RGB, with their pace where it is known."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from vlbatch.media.animation import Frames, read_animation
from vlbatch.media.image import ImageSource, Picture, load_image, source_name
from vlbatch.media.limits import DEFAULT_LIMITS, MediaLimits, Origin
from vlbatch.media.pixels import (
    WHITE,
    Layout,
    Pixels,
    Rgb,
    check_background,
    check_rgb,
    frozen,
    stack_frames,
)
from vlbatch.media.source import open_header, read_bytes
from vlbatch.media.video import container_of, read_video

ClipSource: TypeAlias = "str | os.PathLike[str] | bytes | Sequence[ImageSource | Picture]"
"""A file or folder, an encoded file's bytes, or a list or tuple of the frames in order."""


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
        check_rgb(self.frames, 4, self.name)
        _check_pace(self.seconds_per_frame, Origin(self.name))
        object.__setattr__(self, "frames", frozen(self.frames))

    @property
    def num_frames(self) -> int:
        """Number of frames."""
        return int(self.frames.shape[0])

    @property
    def height(self) -> int:
        """Rows of pixels of a frame."""
        return int(self.frames.shape[1])

    @property
    def width(self) -> int:
        """Columns of pixels of a frame."""
        return int(self.frames.shape[2])


def load_clip(
    source: ClipSource,
    *,
    limits: MediaLimits = DEFAULT_LIMITS,
    background: Rgb = WHITE,
    layout: Layout | None = None,
    frame_step: int = 1,
    seconds_per_frame: float | None = None,
    name: str | None = None,
    req_id: str | None = None,
) -> Clip:
    """Decode one clip.

    A folder's frames are its visible files in natural order of their names (``f2`` before
    ``f10``); each must be a picture. Animated GIF, WebP, APNG and AVIF give composited frames; a
    still picture is a clip of one frame. MP4/MOV, Matroska/WebM and AVI need the ``video`` extra.
    Frames are used as stored: nothing is resampled in time but by ``frame_step``.

    Args:
        source: see ``ClipSource``.
        limits: checked against declared sizes and counts before anything is decoded.
        background: colour behind transparent places.
        layout: axes of each frame, for a sequence of arrays; for nothing else.
        frame_step: keep frames 0, ``frame_step``, 2 * ``frame_step``, ...
        seconds_per_frame: time between two *stored* frames; replaces what the file says.
        name: what to call the clip; a path's own text by default.
        req_id: the request to name in a refusal.

    Raises:
        MediaError: missing, unreadable, truncated, of an unknown format, without a frame, or with
            frames of different sizes.
        MediaTooLarge: a declared size or count is over a limit.
        MissingDependency: a video file, and PyAV is not installed.
    """
    origin = Origin(name or source_name(source), req_id)
    check_background(background, origin)
    _check_pace(seconds_per_frame, origin)
    if type(frame_step) is not int or frame_step < 1:
        raise origin.refusal(
            f"frame_step is {frame_step!r}; expected a positive integer", "frame_step"
        )

    if isinstance(source, (str, os.PathLike)) and Path(source).is_dir():
        source = _frame_files(Path(source), origin)
    if isinstance(source, (str, os.PathLike, bytes)):
        data = read_bytes(source, limits, origin)
        found = _read_file(data, background, frame_step, limits, origin)
    elif isinstance(source, (list, tuple)):
        pictures = source[::frame_step]
        found = Frames(_read_pictures(pictures, background, layout, limits, origin), None)
    else:
        raise origin.refusal(
            f"source is a {type(source).__name__}; expected a path, bytes, or a list or tuple of"
            " frames (for an array of frames: list(array), layout='HWC')"
        )
    pace = found.seconds_per_frame
    if seconds_per_frame is not None:
        pace = seconds_per_frame * frame_step
    return Clip(found.pixels, pace, origin.name)


def _frame_files(folder: Path, origin: Origin) -> list[Path]:
    try:
        names = [entry.name for entry in folder.iterdir() if not entry.name.startswith(".")]
    except OSError as error:
        raise origin.refusal(f"cannot be listed ({error}); check its rights") from error
    return [folder / name for name in sorted(names, key=_natural_key)]


def _natural_key(name: str) -> tuple[list[tuple[str, int]], str]:
    """Order runs of digits by their value; names that differ in leading zeros keep an order."""
    parts = re.findall(r"(\D*)(\d*)", name)
    return [(text, int(digits or -1)) for text, digits in parts], name


def _read_file(
    data: bytes, background: Rgb, frame_step: int, limits: MediaLimits, origin: Origin
) -> Frames:
    image = open_header(data, limits, origin)
    if image is not None:
        with image:
            return read_animation(
                image,
                data,
                background=background,
                frame_step=frame_step,
                limits=limits,
                origin=origin,
            )
    demuxer = container_of(data)
    if demuxer is None:
        raise origin.refusal(
            "is not a clip that can be read; expected a folder of pictures, GIF, WebP, PNG, AVIF,"
            " MP4/MOV, Matroska/WebM or AVI, complete"
        )
    return read_video(data, demuxer, frame_step=frame_step, limits=limits, origin=origin)


def _read_pictures(
    pictures: Sequence[ImageSource | Picture],
    background: Rgb,
    layout: Layout | None,
    limits: MediaLimits,
    origin: Origin,
) -> Pixels:
    limits.check_clip(len(pictures), 1, 1, origin)

    def decoded() -> Iterator[Pixels]:
        for index, source in enumerate(pictures):
            picture = _as_picture(source, index, background, layout, limits, origin)
            if index == 0:
                limits.check_clip(len(pictures), picture.width, picture.height, origin)
            yield picture.pixels

    return stack_frames(decoded(), len(pictures), origin)


def _as_picture(
    source: ImageSource | Picture,
    index: int,
    background: Rgb,
    layout: Layout | None,
    limits: MediaLimits,
    origin: Origin,
) -> Picture:
    if isinstance(source, Picture):
        return source
    is_path = isinstance(source, (str, os.PathLike))
    return load_image(
        source,
        limits=limits,
        background=background,
        layout=layout,
        name=source_name(source) if is_path else f"frame {index} of {origin.name}",
        req_id=origin.req_id,
    )


def _check_pace(seconds_per_frame: float | None, origin: Origin) -> None:
    if seconds_per_frame is not None and not 0 < seconds_per_frame < math.inf:
        raise origin.refusal(
            f"seconds_per_frame is {seconds_per_frame}; expected a positive number or None",
            "seconds_per_frame",
        )
