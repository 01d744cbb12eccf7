"""Colour modes, alpha and array layouts, through ``load_image``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from media_builders import encode, noise, png, png_chunk, raw_png
from PIL import Image

from vlbatch.errors import MediaError
from vlbatch.media import load_image

GREY_ROW = np.array([[0, 1, 127, 128, 254, 255]], np.uint8)


def grey_rgb(row: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.repeat(row[..., None], 3, axis=2)


# -- colour modes --------------------------------------------------------------------------------
def test_rgb_is_kept() -> None:
    """8-bit RGB comes through unchanged."""
    pixels = noise(5, 7, 3)

    np.testing.assert_array_equal(load_image(png(pixels)).pixels, pixels)


def test_grey_is_repeated() -> None:
    """Greyscale fills three equal channels."""
    np.testing.assert_array_equal(load_image(png(GREY_ROW)).pixels, grey_rgb(GREY_ROW))


def test_bilevel_is_black_and_white() -> None:
    """A 1-bit picture holds 0 and 255."""
    image = Image.fromarray(GREY_ROW).point(lambda value: 255 * (value > 127), mode="1")

    pixels = load_image(encode(image, "PNG")).pixels

    np.testing.assert_array_equal(pixels, grey_rgb(np.uint8(255) * (GREY_ROW > 127)))


@pytest.mark.parametrize("background", [(255, 255, 255), (0, 0, 0), (10, 200, 60)])
def test_alpha_is_composited_on_the_background(background: tuple[int, int, int]) -> None:
    """A transparent place shows the background in proportion, rounded to nearest."""
    rgba = noise(16, 16, 4)
    alpha = rgba[..., 3:].astype(np.float64) / 255
    expected = np.rint(rgba[..., :3] * alpha + np.array(background) * (1 - alpha))

    pixels = load_image(png(rgba), background=background).pixels

    np.testing.assert_array_equal(pixels, expected)


def test_grey_with_alpha_is_composited() -> None:
    """LA is greyscale with alpha."""
    la = np.array([[[100, 255], [100, 0], [100, 51]]], np.uint8)

    pixels = load_image(png(la), background=(200, 0, 0)).pixels

    np.testing.assert_array_equal(pixels, [[[100] * 3, [200, 0, 0], [180, 20, 20]]])


def test_palette_is_looked_up() -> None:
    """A palette picture gives its colours, not its indices."""
    image = Image.new("P", (3, 1))
    image.putpalette([9, 8, 7, 60, 50, 40, 255, 0, 1])
    image.putdata([2, 0, 1])

    pixels = load_image(encode(image, "PNG")).pixels

    np.testing.assert_array_equal(pixels, [[[255, 0, 1], [9, 8, 7], [60, 50, 40]]])


@pytest.mark.parametrize(
    ("transparency", "expected"),
    [
        (1, [[255, 0, 1], [9, 8, 7], [0, 0, 255]]),
        (bytes([255, 51, 0]), [[0, 0, 255], [9, 8, 7], [12, 10, 212]]),
    ],
    ids=["one colour", "alpha a colour"],
)
def test_palette_transparency_is_composited(
    transparency: int | bytes, expected: list[list[int]]
) -> None:
    """A palette's transparent colour, or its alpha table, is composited."""
    image = Image.new("P", (3, 1))
    image.putpalette([9, 8, 7, 60, 50, 40, 255, 0, 1])
    image.putdata([2, 0, 1])
    data = encode(image, "PNG", transparency=transparency)

    pixels = load_image(data, background=(0, 0, 255)).pixels

    np.testing.assert_array_equal(pixels, [expected])


def test_transparent_colour_of_rgb_is_composited() -> None:
    """An RGB picture may declare one colour transparent."""
    pixels = np.array([[[1, 2, 3], [1, 2, 4]]], np.uint8)
    data = encode(Image.fromarray(pixels), "PNG", transparency=(1, 2, 3))

    np.testing.assert_array_equal(load_image(data).pixels, [[[255] * 3, [1, 2, 4]]])


def test_16_bit_grey_is_scaled_to_8_bits() -> None:
    """16 bits scale by 257 and round to nearest; the high byte alone would be darker."""
    values = np.array([[0, 128, 129, 257, 32_768, 65_406, 65_407, 65_535]], np.uint16)
    expected = np.array([[0, 0, 1, 1, 128, 254, 255, 255]], np.uint8)

    picture = load_image(encode(Image.fromarray(values), "PNG"))

    np.testing.assert_array_equal(picture.pixels, grey_rgb(expected))


@pytest.mark.parametrize(("colour_type", "channels"), [(0, 1), (2, 3)], ids=["grey", "RGB"])
def test_transparent_16_bit_colour_is_refused(colour_type: int, channels: int) -> None:
    """Pillow cannot match such a colour in 16 bits; it must not turn opaque in silence."""
    rows = b"\0" + np.array([0x1234] * channels, ">u2").tobytes()
    data = raw_png(1, 1, 16, colour_type, rows, png_chunk(b"tRNS", b"\x12\x34" * channels))

    with pytest.raises(MediaError, match="alpha channel"):
        load_image(data)


@pytest.mark.parametrize(("mode", "dtype"), [("I", np.int32), ("I;16B", ">u2")])
def test_wide_integers_hold_16_bits(mode: str, dtype: object) -> None:
    """Integer pictures hold 0 to 65535, in either byte order."""
    values = np.array([[0, 257, 65_535]], dtype)
    image = Image.frombytes(mode, (3, 1), values.tobytes())

    np.testing.assert_array_equal(load_image(image).pixels, grey_rgb(np.array([[0, 1, 255]])))


@pytest.mark.parametrize(
    "values",
    [
        np.array([[0, 0.5]], np.float32),
        np.array([[0, 65_536]], np.int32),
        np.array([[-1, 0]], np.int32),
    ],
    ids=str,
)
def test_samples_without_a_known_range_are_refused(values: npt.NDArray[np.generic]) -> None:
    """No range is guessed: floats and integers beyond 16 bits are refused."""
    with pytest.raises(MediaError, match="rescale"):
        load_image(Image.fromarray(values))


def test_cmyk_is_converted() -> None:
    """CMYK ink becomes RGB light."""
    image = Image.new("CMYK", (2, 1))
    image.putpixel((1, 0), (255, 0, 0, 0))

    pixels = load_image(encode(image, "TIFF")).pixels

    np.testing.assert_array_equal(pixels, [[[255, 255, 255], [0, 255, 255]]])


def test_cmyk_jpeg_is_not_inverted() -> None:
    """The inverted ink of Adobe's JPEG is undone: white paper is white."""
    image = Image.new("CMYK", (16, 16), (0, 0, 0, 0))

    assert load_image(encode(image, "JPEG")).pixels.min() >= 250


def test_mode_without_a_conversion_is_refused() -> None:
    """A colour mode that Pillow does not convert is named."""
    with pytest.raises(MediaError, match="from La"):
        load_image(Image.new("La", (2, 2)))


# -- arrays --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("layout", "axes"), [("HWC", (0, 1, 2)), ("CHW", (2, 0, 1))], ids=["HWC", "CHW"]
)
@pytest.mark.parametrize("num_channels", [1, 2, 3, 4])
def test_array_is_read_by_its_stated_layout(
    layout: str, axes: tuple[int, int, int], num_channels: int
) -> None:
    """An array's axes are those the caller states, for grey to RGBA alike."""
    hwc = noise(5, 7, num_channels)
    expected = load_image(png(hwc if num_channels > 1 else hwc[..., 0])).pixels

    picture = load_image(hwc.transpose(axes), layout=layout)

    np.testing.assert_array_equal(picture.pixels, expected)


def test_ambiguous_shape_follows_the_statement() -> None:
    """1x1x3 is one pixel in HWC, and three rows of one channel in no layout (B90)."""
    array = np.array([[[1, 2, 3]]], np.uint8)

    assert load_image(array, layout="HWC").pixels.tolist() == [[[1, 2, 3]]]
    assert load_image(array, layout="CHW").pixels.tolist() == [[[1] * 3, [2] * 3, [3] * 3]]


def test_array_without_a_layout_is_refused() -> None:
    """A layout is never guessed (B90)."""
    with pytest.raises(MediaError, match="layout"):
        load_image(noise(4, 4, 3))


def test_layout_for_another_source_is_refused() -> None:
    """A layout that would be ignored is refused."""
    with pytest.raises(MediaError, match="layout"):
        load_image(png(noise(4, 4, 3)), layout="HWC")


@pytest.mark.parametrize(
    ("array", "layout"),
    [
        (noise(4, 4, 5), "HWC"),
        (noise(5, 4, 4), "CHW"),
        (noise(4, 4), "HWC"),
        (noise(4, 4, 3), "HW"),
        (noise(4, 4, 3), "WHC"),
        (noise(4, 0, 3), "HWC"),
        (noise(4, 4, 0), "HWC"),
        (np.zeros((4, 4, 3), np.float32), "HWC"),
    ],
)
def test_array_that_is_no_picture_is_refused(array: npt.NDArray[np.generic], layout: str) -> None:
    """Axes, channels and dtype must be those of a picture."""
    with pytest.raises(MediaError, match="ndarray"):
        load_image(array, layout=layout)


def test_array_is_copied() -> None:
    """Writing the caller's array later does not change the picture."""
    array = noise(4, 4, 3)
    picture = load_image(array, layout="HWC")
    before = picture.pixels.copy()

    array[:] = 0

    np.testing.assert_array_equal(picture.pixels, before)
