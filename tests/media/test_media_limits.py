from __future__ import annotations

import pytest

from vlbatch.errors import InvalidSetting, MediaError, MediaTooLarge
from vlbatch.media import MediaLimits
from vlbatch.media.limits import Origin

LIMITS = MediaLimits(
    max_file_bytes=100,
    max_side=50,
    max_pixels=1000,
    max_frames=4,
    max_clip_pixels=3000,
    max_items=2,
)
ORIGIN = Origin("x.png", "r1")


@pytest.mark.parametrize(
    ("width", "height", "setting"),
    [
        (51, 1, "max_side"),
        (1, 51, "max_side"),
        (40, 26, "max_pixels"),
        (40_000, 40_000, "max_side"),
    ],
)
def test_picture_over_a_limit_names_setting_and_request(
    width: int, height: int, setting: str
) -> None:
    """A picture over a limit is refused with its declared size, the setting and the request."""
    with pytest.raises(MediaTooLarge) as caught:
        LIMITS.check_picture(width, height, ORIGIN)

    assert caught.value.setting == setting
    assert caught.value.req_id == "r1"
    assert "x.png" in str(caught.value)
    assert f"{width}x{height}" in str(caught.value)


@pytest.mark.parametrize(("width", "height"), [(50, 20), (20, 50), (1, 50), (1, 1)])
def test_picture_at_a_limit_is_accepted(width: int, height: int) -> None:
    """A limit is the largest accepted value."""
    LIMITS.check_picture(width, height, ORIGIN)


@pytest.mark.parametrize(("width", "height", "refused"), [(200, 1, False), (201, 1, True)])
def test_aspect_ratio_limit(width: int, height: int, refused: bool) -> None:
    """A ratio of 200 is the last that the resize rules take."""
    if not refused:
        MediaLimits().check_picture(width, height, ORIGIN)
        return
    with pytest.raises(MediaError, match="crop or pad"):
        MediaLimits().check_picture(width, height, ORIGIN)


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0)])
def test_empty_picture_is_refused(width: int, height: int) -> None:
    """A side of zero is refused, not divided by."""
    with pytest.raises(MediaError, match="at least 1"):
        LIMITS.check_picture(width, height, ORIGIN)


@pytest.mark.parametrize(
    ("num_frames", "side", "setting"), [(5, 1, "max_frames"), (4, 28, "max_clip_pixels")]
)
def test_clip_over_a_limit_names_the_setting(num_frames: int, side: int, setting: str) -> None:
    """A clip is limited in frames and in the pixels of all frames together."""
    LIMITS.check_clip(num_frames - 1, side, side, ORIGIN)
    with pytest.raises(MediaTooLarge) as caught:
        LIMITS.check_clip(num_frames, side, side, ORIGIN)

    assert caught.value.setting == setting


def test_clip_without_a_frame_is_refused() -> None:
    """A clip needs a frame."""
    with pytest.raises(MediaError, match="no frame"):
        LIMITS.check_clip(0, 2, 2, ORIGIN)


def test_num_items_is_limited_before_anything_is_loaded() -> None:
    """A request with more items than the limit is refused by its count alone."""
    LIMITS.check_num_items(2, "r1")
    with pytest.raises(
        MediaTooLarge, match=r"has 1,000 pictures and clips; at most 2 .*max_items"
    ) as caught:
        LIMITS.check_num_items(1000, "r1")

    assert caught.value.req_id == "r1"


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "9"])
def test_limit_must_be_a_positive_integer(value: object) -> None:
    """A limit that cannot limit is refused when it is made."""
    with pytest.raises(InvalidSetting, match="max_side"):
        MediaLimits(max_side=value)
