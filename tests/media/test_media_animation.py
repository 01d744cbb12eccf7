"""Animated files against frames composited by hand."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import pytest
from media_builders import animation, encode, gif, gif_frame, noise, png_chunk, raw_png
from PIL import Image

from vlbatch.errors import MediaError, MediaTooLarge
from vlbatch.media import MediaLimits, load_clip

BLACK, RED, GREEN, BLUE = (0, 0, 0), (255, 0, 0), (0, 255, 0), (0, 0, 255)
PALETTE = np.array([BLACK, RED, GREEN, BLUE], np.uint8)


def filled(height: int, width: int, colour: int) -> npt.NDArray[np.uint8]:
    return np.full((height, width), colour, np.uint8)


# -- GIF -----------------------------------------------------------------------------------------
def test_partial_gif_frames_are_composited() -> None:
    """A frame smaller than the canvas is drawn over the frame before it."""
    data = gif(
        4,
        3,
        gif_frame(0, 0, filled(3, 4, 1)),
        gif_frame(1, 1, filled(2, 2, 2)),
        gif_frame(3, 0, filled(1, 1, 3)),
    )
    first = filled(3, 4, 1)
    second = first.copy()
    second[1:3, 1:3] = 2
    third = second.copy()
    third[0, 3] = 3

    clip = load_clip(data)

    np.testing.assert_array_equal(clip.frames, PALETTE[np.stack([first, second, third])])


def test_gif_disposal_to_background_clears_the_frame() -> None:
    """Disposal 2 removes a frame before the next one: its place is transparent again."""
    hole = filled(3, 4, 0)
    hole[0, 0] = 1
    data = gif(
        4,
        3,
        gif_frame(0, 0, hole, transparent=0),
        gif_frame(1, 1, filled(2, 2, 2), disposal=2, transparent=0),
        gif_frame(3, 0, filled(1, 1, 3), transparent=0),
    )
    white = (255, 255, 255)
    expected = np.full((3, 3, 4, 3), white, np.uint8)
    expected[:, 0, 0] = RED
    expected[1, 1:3, 1:3] = GREEN
    expected[2, 0, 3] = BLUE

    clip = load_clip(data, background=white)

    np.testing.assert_array_equal(clip.frames, expected)


def test_gif_disposal_to_previous_restores_it() -> None:
    """Disposal 3 brings back what the frame covered."""
    data = gif(
        4,
        3,
        gif_frame(0, 0, filled(3, 4, 1)),
        gif_frame(1, 1, filled(2, 2, 2), disposal=3),
        gif_frame(3, 0, filled(1, 1, 3)),
    )
    expected = np.stack([filled(3, 4, 1)] * 3)
    expected[1, 1:3, 1:3] = 2
    expected[2, 0, 3] = 3

    np.testing.assert_array_equal(load_clip(data).frames, PALETTE[expected])


def test_transparent_places_of_a_gif_frame_show_the_frame_before() -> None:
    """A transparent index leaves what is there."""
    patch = filled(3, 4, 0)
    patch[2] = 3
    data = gif(4, 3, gif_frame(0, 0, filled(3, 4, 1)), gif_frame(0, 0, patch, transparent=0))
    expected = np.stack([filled(3, 4, 1)] * 2)
    expected[1, 2] = 3

    np.testing.assert_array_equal(load_clip(data).frames, PALETTE[expected])


@pytest.mark.parametrize("background", [(255, 255, 255), (1, 2, 3)])
def test_transparent_gif_shows_the_background(background: tuple[int, int, int]) -> None:
    """What no frame covers takes the stated background, in every frame."""
    hole = filled(2, 2, 0)
    hole[0, 0] = 1
    data = gif(2, 2, gif_frame(0, 0, hole, transparent=0), gif_frame(1, 1, filled(1, 1, 2)))
    expected = np.full((2, 2, 2, 3), background, np.uint8)
    expected[:, 0, 0] = RED
    expected[1, 1, 1] = GREEN

    np.testing.assert_array_equal(load_clip(data, background=background).frames, expected)


def test_gif_pace_is_the_mean_duration() -> None:
    """Uneven durations give their mean, zero durations give no pace."""
    frames = [gif_frame(0, 0, filled(2, 2, 1), centiseconds=hundredths) for hundredths in (10, 30)]
    assert load_clip(gif(2, 2, *frames)).seconds_per_frame == pytest.approx(0.2)

    still = gif_frame(0, 0, filled(2, 2, 1), centiseconds=0)
    assert load_clip(gif(2, 2, still, still)).seconds_per_frame is None


def test_gif_frames_are_counted_as_they_come() -> None:
    """A GIF declares no count: reading stops one frame above the limit."""
    data = gif(1, 1, *[gif_frame(0, 0, filled(1, 1, 1))] * 5)

    assert load_clip(data, limits=MediaLimits(max_frames=5)).frames.shape[0] == 5
    assert load_clip(data, limits=MediaLimits(max_frames=3), frame_step=2).frames.shape[0] == 3
    with pytest.raises(MediaTooLarge, match="max_frames"):
        load_clip(data, limits=MediaLimits(max_frames=4))


@pytest.mark.parametrize("num_bytes", [1, 4, 12, 40])
def test_truncated_gif_is_refused(num_bytes: int) -> None:
    """A GIF that ends early is refused even where its last whole frame ends."""
    data = gif(4, 4, *[gif_frame(0, 0, filled(4, 4, index)) for index in range(3)])

    with pytest.raises(MediaError, match="complete"):
        load_clip(data[:-num_bytes])


def test_gif_without_a_frame_is_refused() -> None:
    """A GIF of a header and a trailer has no frame."""
    with pytest.raises(MediaError, match="not a clip that can be read"):
        load_clip(gif(4, 4))


def test_gif_frame_beyond_the_canvas_is_refused() -> None:
    """A frame that reaches out of the canvas would change the clip's size."""
    data = gif(2, 2, gif_frame(0, 0, filled(2, 2, 1)), gif_frame(1, 1, filled(2, 2, 2)))

    with pytest.raises(MediaError, match="expected one size"):
        load_clip(data)


def test_canvas_that_grows_is_limited_before_the_frame_is_decoded() -> None:
    """The size that a later GIF frame gives the canvas is checked like the first one."""
    large = gif_frame(0, 0, filled(20, 20, 1))
    data = gif(2, 2, gif_frame(0, 0, filled(2, 2, 1)), large[:-40] + b"\0")

    with pytest.raises(MediaError, match="cannot be decoded"):
        load_clip(data)
    with pytest.raises(MediaTooLarge, match="max_side"):
        load_clip(data, limits=MediaLimits(max_side=10))


def test_giant_gif_is_refused_from_its_header() -> None:
    """A GIF's declared canvas is checked before a frame is decoded."""
    with pytest.raises(MediaTooLarge):
        load_clip(gif(60_000, 60_000, gif_frame(0, 0, filled(1, 1, 1))))


# -- WebP and APNG -------------------------------------------------------------------------------
@pytest.mark.parametrize("file_format", ["WEBP", "PNG"])
def test_lossless_animation_is_read_back(file_format: str) -> None:
    """Every frame comes back as it was drawn, with alpha on the background and its pace."""
    frames = [noise(6, 8, 4, seed=index) for index in range(5)]
    for frame in frames:
        frame[..., 3] = np.where(frame[..., 3] > 127, 255, 0)
    expected = np.stack(
        [np.where(frame[..., 3:] == 255, frame[..., :3], np.uint8([9, 8, 7])) for frame in frames]
    )
    options = {"lossless": True} if file_format == "WEBP" else {}
    data = animation(frames, file_format, duration=80, disposal=1, **options)

    clip = load_clip(data, background=(9, 8, 7))

    np.testing.assert_array_equal(clip.frames, expected)
    assert clip.seconds_per_frame == pytest.approx(0.08)


@pytest.mark.parametrize("file_format", ["WEBP", "PNG", "GIF"])
def test_frame_step_skips_frames_but_still_composites_them(file_format: str) -> None:
    """Skipped frames are drawn too: what they leave behind is there."""
    rng = np.random.default_rng(0)
    canvas = np.zeros((8, 8, 3), np.uint8)
    frames = []
    for index in range(7):
        canvas = canvas.copy()
        canvas[index, rng.integers(0, 8, 3)] = PALETTE[1 + index % 3]
        frames.append(canvas)
    options = {"lossless": True} if file_format == "WEBP" else {}
    data = animation(frames, file_format, duration=40, **options)

    clip = load_clip(data, frame_step=3)

    np.testing.assert_array_equal(clip.frames, np.stack(frames[::3]))
    assert clip.seconds_per_frame == pytest.approx(0.12)


def test_still_picture_of_an_apng_is_no_frame() -> None:
    """The still picture that an APNG keeps for old viewers is not part of the animation."""
    still, *frames = (Image.fromarray(noise(4, 4, 3, seed=index)) for index in range(4))
    data = encode(
        still, "PNG", save_all=True, append_images=frames, default_image=True, duration=50
    )

    clip = load_clip(data)

    np.testing.assert_array_equal(clip.frames, np.stack([np.asarray(frame) for frame in frames]))
    assert clip.seconds_per_frame == pytest.approx(0.05)


def test_declared_frames_of_an_apng_are_refused_without_decoding() -> None:
    """A header that declares a billion frames is believed enough to be refused."""
    control = png_chunk(b"acTL", struct.pack(">II", 10**9, 0))
    data = raw_png(4, 4, 8, 2, b"", control)

    with pytest.raises(MediaTooLarge, match="has 1,000,000,000 frames"):
        load_clip(data)


def test_apng_with_fewer_frames_than_declared_is_refused() -> None:
    """A declared count is checked against what is there."""
    data = animation([noise(4, 4, 3, seed=index) for index in range(3)], "PNG")
    start = data.index(b"acTL") + 4
    content = struct.pack(">II", 5, 0)
    damaged = data[: start - 8] + png_chunk(b"acTL", content) + data[start + 12 :]

    with pytest.raises(MediaError, match="complete"):
        load_clip(damaged)


@pytest.mark.parametrize("file_format", ["WEBP", "PNG"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_truncated_animation_is_refused(file_format: str, share: float) -> None:
    """An animation that is cut is refused, not shortened."""
    data = animation([noise(16, 16, 3, seed=index) for index in range(4)], file_format)

    with pytest.raises(MediaError, match="complete"):
        load_clip(data[: int(len(data) * share)])


def test_second_page_of_a_tiff_is_no_frame() -> None:
    """Pages of a document are not frames in time: a TIFF is a still picture."""
    pages = [noise(4, 4, 3, seed=index) for index in range(2)]

    clip = load_clip(animation(pages, "TIFF"))

    np.testing.assert_array_equal(clip.frames, pages[0][None])
