"""What a picture or clip may declare about itself before any of it is decoded.

Every check takes numbers from a header, a listing or a shape; none reads media.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from vlbatch.errors import InvalidSetting, MediaError, MediaTooLarge

MAX_ASPECT_RATIO: Final = 200
"""Longer side over shorter side; every resize rule of the supported families refuses more."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Whom a refusal names: the media by its path or a name, and the request that brought it."""

    name: str
    req_id: str | None = None

    def refusal(self, message: str, setting: str | None = None) -> MediaError:
        """Build (not raise) a ``MediaError`` that names the media and the request."""
        return MediaError(f"{self.name}: {message}", req_id=self.req_id, setting=setting)

    def over_limit(self, message: str, setting: str) -> MediaTooLarge:
        """Build (not raise) a ``MediaTooLarge`` that names the media and the request."""
        return MediaTooLarge(f"{self.name}: {message}", req_id=self.req_id, setting=setting)


UNNAMED: Final = Origin("media")


def check_sides(width: int, height: int, origin: Origin) -> None:
    """Refuse a side below 1 or an aspect ratio above ``MAX_ASPECT_RATIO``."""
    size = f"declares {width}x{height} (width x height)"
    if min(width, height) < 1:
        raise origin.refusal(f"{size}; expected sides of at least 1")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise origin.refusal(
            f"{size}; the longer side may be at most {MAX_ASPECT_RATIO} times the shorter:"
            " crop or pad it"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """Upper bounds on declared sizes.

    Above one is a ``MediaTooLarge`` that names the field as the setting to change; what no limit
    could allow is a ``MediaError``.

    Attributes:
        max_file_bytes: of one encoded file.
        max_side: pixels of a picture's or frame's longer side.
        max_pixels: of one picture or frame.
        max_frames: of one clip, after ``frame_step``.
        max_clip_pixels: of a clip's frames together (three bytes each; six while being stacked).
        max_items: pictures and clips of one request.

    Raises:
        InvalidSetting: a limit that is not a positive integer.
    """

    max_file_bytes: int = 256 * 2**20
    max_side: int = 16_384
    max_pixels: int = 2**26
    max_frames: int = 768
    max_clip_pixels: int = 2**29
    max_items: int = 64

    def __post_init__(self) -> None:
        """Refuse what is no limit."""
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise InvalidSetting(
                    f"got {value!r}; expected a positive integer", setting=field.name
                )

    def check_file(self, num_bytes: int, origin: Origin) -> None:
        """Refuse a file that is empty or longer than ``max_file_bytes``."""
        if num_bytes < 1:
            raise origin.refusal("the file is empty; expected a picture or clip")
        self._check("max_file_bytes", "has", num_bytes, " bytes", origin)

    def check_picture(self, width: int, height: int, origin: Origin) -> None:
        """Refuse a declared picture or frame: impossible sides, or more than the limits."""
        size = f"declares {width}x{height} (width x height),"
        self._check("max_side", f"{size} longer side", max(width, height), "", origin)
        self._check("max_pixels", size, width * height, " pixels", origin)
        check_sides(width, height, origin)

    def check_clip(self, num_frames: int, width: int, height: int, origin: Origin) -> None:
        """Refuse a declared clip: no frame, a refused frame size, or more than the limits."""
        if num_frames < 1:
            raise origin.refusal("has no frame; a clip needs at least one")
        self.check_picture(width, height, origin)
        self._check("max_frames", "has", num_frames, " frames", origin)
        size = f"declares {num_frames} frames of {width}x{height},"
        self._check("max_clip_pixels", size, num_frames * width * height, " pixels", origin)

    def check_num_items(self, num_items: int, req_id: str | None = None) -> None:
        """Refuse a request with more than ``max_items`` media; call it before loading any."""
        origin = Origin("media", req_id)
        self._check("max_items", "has", num_items, " pictures and clips", origin)

    def _check(self, setting: str, what: str, value: int, unit: str, origin: Origin) -> None:
        limit: int = getattr(self, setting)
        if value > limit:
            raise origin.over_limit(f"{what} {value:,}{unit}; at most {limit:,}{unit}", setting)


DEFAULT_LIMITS: Final = MediaLimits()
