"""What a picture or clip may declare about itself before a byte of it is decoded.

Every check here takes numbers that come from a header, a directory listing or an array's shape,
and either returns or refuses; none of them reads media.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from vlbatch.errors import MediaError, MediaTooLarge

MAX_ASPECT_RATIO: Final = 200
"""Longer side over shorter side; every resize rule of the supported families refuses more."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Whom a refusal names.

    Attributes:
        name: the file's path, or what the caller calls a picture that has none.
        req_id: the request that brought it, where there is one.
    """

    name: str
    req_id: str | None = None

    def refusal(self, message: str, setting: str | None = None) -> MediaError:
        """Build (not raise) the error for media that cannot be read or used."""
        return MediaError(f"{self.name}: {message}", req_id=self.req_id, setting=setting)

    def over_limit(self, message: str, setting: str | None) -> MediaTooLarge:
        """Build (not raise) the error for media that declares more than the limit."""
        return MediaTooLarge(f"{self.name}: {message}", req_id=self.req_id, setting=setting)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """Upper bounds on declared sizes; the field name is the setting that a refusal names.

    Attributes:
        max_file_bytes: bytes of one encoded file.
        max_side: pixels of a picture's or frame's longer side.
        max_pixels: pixels of one picture or frame.
        max_frames: frames of one clip, after ``frame_step``.
        max_clip_pixels: pixels of all frames of one clip together (three bytes each, decoded).
        max_items: pictures and clips of one request.
    """

    max_file_bytes: int = 256 * 2**20
    max_side: int = 16_384
    max_pixels: int = 2**26
    max_frames: int = 768
    max_clip_pixels: int = 2**29
    max_items: int = 64

    def __post_init__(self) -> None:
        """Refuse a limit that is not a positive integer."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise MediaError(
                    f"limit {field.name} is {value!r}; expected a positive integer",
                    setting=field.name,
                )

    def check_file(self, num_bytes: int, origin: Origin) -> None:
        """Refuse an encoded file that is empty or too long.

        Raises:
            MediaError: no bytes.
            MediaTooLarge: more than ``max_file_bytes``.
        """
        if num_bytes == 0:
            raise origin.refusal("the file is empty; expected an encoded picture or clip")
        if num_bytes > self.max_file_bytes:
            raise origin.over_limit(
                f"has {num_bytes:,} bytes; at most {self.max_file_bytes:,} are read",
                "max_file_bytes",
            )

    def check_picture(self, width: int, height: int, origin: Origin) -> None:
        """Refuse a declared picture or frame size.

        Raises:
            MediaError: a side of zero, or an aspect ratio above ``MAX_ASPECT_RATIO``.
            MediaTooLarge: a side above ``max_side``, or more than ``max_pixels``.
        """
        size = f"declares {width}x{height} (width x height)"
        if min(width, height) <= 0:
            raise origin.refusal(f"{size}; expected both sides to be at least 1")
        if max(width, height) > self.max_side:
            raise origin.over_limit(
                f"{size}; the longer side may be at most {self.max_side:,}", "max_side"
            )
        if width * height > self.max_pixels:
            raise origin.over_limit(
                f"{size}, {width * height:,} pixels; at most {self.max_pixels:,} are decoded",
                "max_pixels",
            )
        if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            raise origin.refusal(
                f"{size}; the longer side may be at most {MAX_ASPECT_RATIO} times the shorter:"
                " crop or pad it"
            )

    def check_clip(self, num_frames: int, width: int, height: int, origin: Origin) -> None:
        """Refuse a declared clip: its frame size as ``check_picture`` does, then its length.

        Raises:
            MediaError: no frame, or a frame size that is unusable.
            MediaTooLarge: more than ``max_frames`` or ``max_clip_pixels``.
        """
        self.check_picture(width, height, origin)
        if num_frames <= 0:
            raise origin.refusal("has no frame; a clip needs at least one")
        if num_frames > self.max_frames:
            raise origin.over_limit(
                f"has {num_frames:,} frames; at most {self.max_frames:,} are decoded:"
                " shorten it, or raise frame_step",
                "max_frames",
            )
        total = num_frames * width * height
        if total > self.max_clip_pixels:
            raise origin.over_limit(
                f"declares {num_frames} frames of {width}x{height}, {total:,} pixels; at most"
                f" {self.max_clip_pixels:,} are decoded: shorten it, or raise frame_step",
                "max_clip_pixels",
            )

    def check_num_items(self, num_items: int, req_id: str | None = None) -> None:
        """Refuse a request that brings more than ``max_items`` pictures and clips.

        Raises:
            MediaTooLarge: the count is above the limit; call this before loading any of them.
        """
        if num_items > self.max_items:
            raise MediaTooLarge(
                f"has {num_items:,} pictures and clips; at most {self.max_items} are accepted",
                req_id=req_id,
                setting="max_items",
            )


DEFAULT_LIMITS: Final = MediaLimits()
