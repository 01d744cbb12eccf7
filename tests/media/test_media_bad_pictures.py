"""Pictures that ``load_image`` refuses, and what it says."""

from __future__ import annotations

import contextlib
import struct
import warnings
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from media_builders import encode, noise, png, raw_png
from PIL import Image, ImageFile

from vlbatch.errors import InvalidSetting, MediaError, MediaTooLarge
from vlbatch.media import MediaLimits, load_image

FORMATS = ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"]


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("share", [0.02, 0.5, 0.9])
def test_truncated_file_is_refused(file_format: str, share: float) -> None:
    """A file cut anywhere is refused, not padded."""
    data = encode(Image.fromarray(noise(64, 64, 3)), file_format)

    with pytest.raises(MediaError, match="complete"):
        load_image(data[: int(len(data) * share)])


@pytest.mark.parametrize("file_format", FORMATS)
def test_whole_file_is_read(file_format: str) -> None:
    """Every format that is named in the refusal can be read."""
    data = encode(Image.fromarray(noise(64, 48, 3)), file_format)

    assert load_image(data).pixels.shape == (64, 48, 3)


def test_giant_header_is_refused_without_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes that declare 40000x40000 pixels are refused from their header (B94)."""

    def refuse_to_decode(image: ImageFile.ImageFile) -> None:
        raise AssertionError(f"{image} was decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", refuse_to_decode)
    data = raw_png(40_000, 40_000, 8, 2, b"")

    with pytest.raises(MediaTooLarge) as caught:
        load_image(data, name="bomb.png", req_id="r7")

    assert caught.value.setting == "max_pixels"
    assert "bomb.png" in str(caught.value)
    assert "r7" in str(caught.value)


@pytest.mark.parametrize("side", [9_000, 13_000, 19_000])
@pytest.mark.parametrize("action", ["ignore", "error"])
def test_declared_size_is_refused_whatever_pillow_thinks(
    side: int, action: Literal["ignore", "error"]
) -> None:
    """Our limit holds where Pillow is silent, warns (as an error or not) and raises."""
    with warnings.catch_warnings():
        warnings.simplefilter(action, Image.DecompressionBombWarning)
        with pytest.raises(MediaTooLarge) as caught:
            load_image(raw_png(side, side, 8, 2, b""), limits=MediaLimits(max_pixels=2**26))

    assert caught.value.setting in ("max_pixels", "max_side")


def test_pillows_own_limit_is_not_changed() -> None:
    """Reading media leaves Pillow's process-wide settings alone."""
    before = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
    load_image(png(noise(4, 4, 3)))
    with pytest.raises(MediaTooLarge):
        load_image(raw_png(40_000, 40_000, 8, 2, b""))

    assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)


def test_limits_hold_for_images_and_arrays_in_memory() -> None:
    """A Pillow image or an array is measured too."""
    limits = MediaLimits(max_side=10)

    with pytest.raises(MediaTooLarge, match="max_side"):
        load_image(Image.new("RGB", (11, 1)), limits=limits)
    with pytest.raises(MediaTooLarge, match="11x1"):
        load_image(noise(1, 11, 3), layout="HWC", limits=limits)


def test_elongated_picture_is_refused_from_its_header() -> None:
    """An aspect ratio that no resize rule takes is refused before decoding."""
    with pytest.raises(MediaError, match="crop or pad"):
        load_image(raw_png(2_001, 10, 8, 2, b""))


def test_missing_file_names_path_and_request(tmp_path: Path) -> None:
    """A missing file is a refusal of that request."""
    path = tmp_path / "nowhere.png"

    with pytest.raises(MediaError, match=r"nowhere\.png: no such file") as caught:
        load_image(path, req_id="r3")

    assert caught.value.req_id == "r3"


def test_folder_is_no_picture(tmp_path: Path) -> None:
    """A path that is not a regular file is not read."""
    with pytest.raises(MediaError, match="not a regular file"):
        load_image(tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"<html></html>", "not a picture that can be read"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture that can be read"),
    ],
)
def test_bytes_that_are_no_picture_are_refused(data: bytes, message: str) -> None:
    """Text, nothing, and formats that start helper programs are refused."""
    with pytest.raises(MediaError, match=message):
        load_image(data)


def test_long_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """A file above max_file_bytes is refused by its length on disk."""
    path = tmp_path / "long.png"
    path.write_bytes(bytes(101))

    with pytest.raises(MediaTooLarge, match="max_file_bytes"):
        load_image(path, limits=MediaLimits(max_file_bytes=100))


@pytest.mark.parametrize("background", [(0, 0), (0, 0, 256), (-1, 0, 0), (0.5, 0, 0)])
def test_background_must_be_a_colour(background: tuple[float, ...]) -> None:
    """A background that is no 8-bit RGB colour is refused, with or without alpha to show it."""
    with pytest.raises(InvalidSetting, match="background"):
        load_image(png(noise(2, 2, 3)), background=background)


@pytest.mark.parametrize("error", [OverflowError, TypeError, RuntimeError, struct.error, KeyError])
def test_whatever_a_decoder_raises_is_a_refusal(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow raises more than OSError for damaged files; each becomes a refusal."""

    def fail(image: ImageFile.ImageFile) -> None:
        raise error(str(image.size))

    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)

    with pytest.raises(MediaError, match="truncated or damaged"):
        load_image(encode(Image.fromarray(noise(4, 4, 3)), "BMP"))


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about damaged TIFF tags
@pytest.mark.parametrize("seed", range(20))
def test_damaged_files_raise_nothing_but_refusals(seed: int) -> None:
    """Random damage either reads or is refused with a typed error."""
    rng = np.random.default_rng(seed)
    for file_format in FORMATS:
        data = bytearray(encode(Image.fromarray(noise(9, 12, 3)), file_format))
        for position in rng.integers(0, len(data), 4):
            data[position] = rng.integers(0, 256)
        with contextlib.suppress(MediaError):
            load_image(bytes(data), limits=MediaLimits(max_pixels=2**16))
