from __future__ import annotations

import builtins
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from media_builders import noise, png, raw_png
from PIL import Image

from vlbatch.errors import InvalidSetting, MediaError, MediaTooLarge, MissingDependency
from vlbatch.media import Clip, MediaLimits, load_clip
from vlbatch.media.clip import _natural_key


def write_frames(folder: Path, frames: dict[str, npt.NDArray[np.uint8]]) -> None:
    folder.mkdir(exist_ok=True)
    for name, pixels in frames.items():
        (folder / name).write_bytes(png(pixels))


# -- folders -------------------------------------------------------------------------------------
def test_folder_is_read_in_natural_order(tmp_path: Path) -> None:
    """Numbers in names order by value, not by digit."""
    order = ["f1.png", "f2.png", "f9.png", "f10.png", "f011.png", "f100.png", "g0.png"]
    frames = {name: noise(4, 5, 3, seed=index) for index, name in enumerate(order)}
    write_frames(tmp_path, dict(sorted(frames.items(), reverse=True)))

    clip = load_clip(tmp_path)

    np.testing.assert_array_equal(clip.frames, np.stack([frames[name] for name in order]))
    assert clip.seconds_per_frame is None
    assert clip.name == str(tmp_path)


def test_names_that_are_equal_as_numbers_have_one_order() -> None:
    """f01 and f1 come in the order of their names, in whatever order the folder lists them."""
    for listed in (["f1.png", "f01.png"], ["f01.png", "f1.png"]):
        files = sorted(map(Path, listed), key=_natural_key)
        assert [file.name for file in files] == ["f01.png", "f1.png"]


def test_hidden_files_are_no_frames(tmp_path: Path) -> None:
    """Files whose names begin with a dot are left out."""
    write_frames(tmp_path, {"a.png": noise(4, 5, 3)})
    (tmp_path / ".DS_Store").write_bytes(b"x")

    assert len(load_clip(tmp_path).frames) == 1


def test_file_that_is_no_picture_is_refused_by_name(tmp_path: Path) -> None:
    """A visible file that is no picture is not skipped."""
    write_frames(tmp_path, {"a.png": noise(4, 5, 3)})
    (tmp_path / "notes.txt").write_text("hello")

    with pytest.raises(MediaError, match=r"notes\.txt") as caught:
        load_clip(tmp_path, req_id="r5")

    assert caught.value.req_id == "r5"


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    """A clip without a frame is refused."""
    with pytest.raises(MediaError, match="no frame"):
        load_clip(tmp_path)


def test_frames_of_different_sizes_are_refused(tmp_path: Path) -> None:
    """Frames of one clip have one size."""
    write_frames(tmp_path, {"a.png": noise(4, 5, 3), "b.png": noise(5, 4, 3)})

    with pytest.raises(MediaError, match=r"frame 1 is 4x5 but the first is 5x4"):
        load_clip(tmp_path)


def test_folder_is_limited_before_a_frame_is_decoded(tmp_path: Path) -> None:
    """The number of files is refused before any of them is opened."""
    for index in range(5):
        (tmp_path / f"{index}.png").write_bytes(b"not a picture")

    with pytest.raises(MediaTooLarge, match="max_frames"):
        load_clip(tmp_path, limits=MediaLimits(max_frames=4))


def test_giant_frame_of_a_folder_is_refused(tmp_path: Path) -> None:
    """Each frame's header is checked."""
    write_frames(tmp_path, {"a.png": noise(4, 5, 3)})
    (tmp_path / "b.png").write_bytes(raw_png(40_000, 40_000, 8, 2, b""))

    with pytest.raises(MediaTooLarge, match=r"b\.png"):
        load_clip(tmp_path)


def test_pixels_of_a_folder_are_limited_together(tmp_path: Path) -> None:
    """Many small frames are as many pixels as few large ones."""
    write_frames(tmp_path, {f"{index}.png": noise(10, 10, 3) for index in range(4)})
    load_clip(tmp_path, limits=MediaLimits(max_clip_pixels=400))

    with pytest.raises(MediaTooLarge, match="max_clip_pixels"):
        load_clip(tmp_path, limits=MediaLimits(max_clip_pixels=399))


# -- sequences and stills ------------------------------------------------------------------------
def test_sequence_mixes_every_kind_of_picture(tmp_path: Path) -> None:
    """Frames may be paths, bytes and Pillow images."""
    frames = noise(3, 6, 7, 3)
    path = tmp_path / "one.png"
    path.write_bytes(png(frames[0]))

    clip = load_clip([path, png(frames[1]), Image.fromarray(frames[2])])

    np.testing.assert_array_equal(clip.frames, frames)


def test_empty_sequence_is_refused() -> None:
    """A clip needs a frame."""
    with pytest.raises(MediaError, match="no frame"):
        load_clip([])


def test_still_picture_is_a_clip_of_one_frame() -> None:
    """A still picture given as a video is one frame without a pace."""
    pixels = noise(6, 7, 3)

    clip = load_clip(png(pixels))

    np.testing.assert_array_equal(clip.frames, pixels[None])
    assert clip.seconds_per_frame is None


def test_frame_step_keeps_every_nth_frame() -> None:
    """Frames 0, 3, 6 are kept."""
    frames = noise(8, 4, 4, 3)

    clip = load_clip([png(frame) for frame in frames], frame_step=3)

    np.testing.assert_array_equal(clip.frames, frames[::3])


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"frame_step": 0}, "frame_step"),
        ({"frame_step": 1.5}, "frame_step"),
        ({"background": (0, 0, 300)}, "background"),
    ],
)
def test_impossible_option_is_refused(options: dict[str, object], setting: str) -> None:
    """An option that means nothing is refused by name."""
    with pytest.raises(InvalidSetting) as caught:
        load_clip([png(noise(4, 4, 3))], **options)

    assert caught.value.setting == setting


def test_frames_are_read_only() -> None:
    """Decoded frames cannot be written."""
    clip = load_clip([png(noise(4, 4, 3))])

    with pytest.raises(ValueError, match="read-only"):
        clip.frames[0, 0, 0, 0] = 1


def test_clip_made_by_hand_is_checked_and_copied() -> None:
    """A clip holds non-empty uint8 RGB frames, whatever becomes of the array."""
    frames = noise(2, 4, 5, 3)
    clip = Clip(frames, 0.1)
    before = clip.frames.copy()

    frames[:] = 0

    np.testing.assert_array_equal(clip.frames, before)
    with pytest.raises(MediaError, match="expected non-empty uint8"):
        Clip(noise(4, 5, 3))


@pytest.mark.parametrize("pace", [0.0, -1.0, float("nan"), float("inf")])
def test_pace_must_be_a_positive_number(pace: float) -> None:
    """A pace that no clip has is refused by name."""
    with pytest.raises(MediaError) as caught:
        Clip(noise(2, 4, 5, 3), pace)

    assert caught.value.setting == "seconds_per_frame"


# -- files ---------------------------------------------------------------------------------------
def test_missing_file_is_refused(tmp_path: Path) -> None:
    """A missing clip is a refusal that names it, and so is a path that cannot be one."""
    with pytest.raises(MediaError, match=r"gone\.gif: no such file"):
        load_clip(tmp_path / "gone.gif")
    for path in ("x" * 5000, "x\0y", ""):
        with pytest.raises(MediaError):
            load_clip(path)


@pytest.mark.parametrize(
    "data",
    [b"hello, world", b"#EXTM3U\nhttp://example.com/a.ts\n", b"\0\0\0\x18ftypheic" + bytes(40)],
    ids=["text", "playlist", "heic"],
)
def test_file_that_is_no_clip_is_refused(data: bytes) -> None:
    """Text, playlists (which open other files) and HEIF stills are not videos."""
    with pytest.raises(MediaError, match="not a clip that can be read"):
        load_clip(data)


def test_video_without_pyav_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PyAV a video is refused with the extra that brings it."""
    real_import = builtins.__import__

    def without_av(name: str, *args: object, **kwargs: object) -> object:
        if name == "av":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_av)

    with pytest.raises(MissingDependency, match=r"vlbatch\[video\]") as caught:
        load_clip(b"\0\0\0\x18ftypisom" + bytes(40), req_id="r2")

    assert caught.value.req_id == "r2"
