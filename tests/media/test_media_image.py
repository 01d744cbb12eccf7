from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from media_builders import encode, noise, png
from PIL import Image

from vlbatch.errors import MediaError
from vlbatch.media import Picture, load_image

# -- orientation ---------------------------------------------------------------------------------
# Stored pixels a b c / d e f as a viewer shows them, by EXIF orientation (its figure of the F).
SHOWN = {
    1: ["abc", "def"],
    2: ["cba", "fed"],
    3: ["fed", "cba"],
    4: ["def", "abc"],
    5: ["ad", "be", "cf"],
    6: ["da", "eb", "fc"],
    7: ["fc", "eb", "da"],
    8: ["cf", "be", "ad"],
}
COLOUR = {letter: noise(3, seed=ord(letter)) for letter in "abcdef"}


def picture_of(rows: list[str]) -> npt.NDArray[np.uint8]:
    return np.array([[COLOUR[letter] for letter in row] for row in rows])


@pytest.mark.parametrize("file_format", ["PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_stored_orientation_is_applied(file_format: str, orientation: int) -> None:
    """Each of the eight EXIF orientations gives the picture that a viewer shows (B92)."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if file_format == "WEBP" else {}
    data = encode(Image.fromarray(picture_of(SHOWN[1])), file_format, exif=exif, **options)

    pixels = load_image(data).pixels

    np.testing.assert_array_equal(pixels, picture_of(SHOWN[orientation]))


@pytest.mark.parametrize("orientation", [0, 9, 200])
def test_unknown_orientation_means_upright(orientation: int) -> None:
    """A value outside 1 to 8 turns nothing."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(Image.fromarray(picture_of(SHOWN[1])), "PNG", exif=exif)

    np.testing.assert_array_equal(load_image(data).pixels, picture_of(SHOWN[1]))


def test_orientation_of_a_jpeg_turns_its_shape() -> None:
    """A camera's JPEG with tag 6 is as tall as its stored rows are wide."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(Image.fromarray(noise(16, 40, 3)), "JPEG", exif=exif)

    assert load_image(data).pixels.shape == (40, 16, 3)


# -- the result ----------------------------------------------------------------------------------
def test_pixels_are_read_only_and_contiguous() -> None:
    """Decoded pixels cannot be written, and need no copy to be hashed."""
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = load_image(encode(Image.fromarray(noise(4, 6, 3)), "PNG", exif=exif)).pixels

    assert pixels.flags.c_contiguous
    with pytest.raises(ValueError, match="read-only"):
        pixels[0, 0, 0] = 1


def test_picture_from_a_writeable_array_holds_a_copy() -> None:
    """A picture made by hand keeps its pixels whatever becomes of the array."""
    array = noise(4, 4, 3)
    picture = Picture(array)
    first = int(picture.pixels[0, 0, 0])

    array[0, 0, 0] = first ^ 1

    assert picture.pixels[0, 0, 0] == first


@pytest.mark.parametrize(
    "pixels", [noise(4, 4), noise(4, 4, 4), noise(0, 4, 3), np.zeros((4, 4, 3), np.float32)]
)
def test_picture_that_is_not_rgb_is_refused(pixels: npt.NDArray[np.uint8]) -> None:
    """A picture holds non-empty uint8 RGB and nothing else."""
    with pytest.raises(MediaError, match="expected non-empty uint8"):
        Picture(pixels)


def test_pillow_image_is_left_as_it_was() -> None:
    """The caller's image keeps its pixels, mode, place and orientation tag."""
    exif = Image.Exif()
    exif[0x0112] = 3
    image = Image.fromarray(noise(4, 6, 4))
    image.info["exif"] = exif.tobytes()
    before = image.tobytes()

    load_image(image)

    assert image.tobytes() == before
    assert image.mode == "RGBA"
    assert image.getexif()[0x0112] == 3


def test_animated_file_gives_its_first_frame() -> None:
    """A moving picture read as an image is its first frame."""
    frames = [noise(4, 4, 3, seed=index) for index in range(3)]
    first, *rest = (Image.fromarray(frame) for frame in frames)
    data = encode(first, "PNG", save_all=True, append_images=rest)

    np.testing.assert_array_equal(load_image(data).pixels, frames[0])


def test_name_is_the_path_by_default(tmp_path: Path) -> None:
    """A picture knows the path it came from, or the name it was given."""
    path = tmp_path / "cat.png"
    path.write_bytes(png(noise(4, 4, 3)))

    assert load_image(path).name == str(path)
    assert load_image(str(path), name="cat").name == "cat"
