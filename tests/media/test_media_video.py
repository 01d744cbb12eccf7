"""Encoded videos; every test needs PyAV, the ``video`` extra."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest

from vlbatch.errors import MediaError, MediaTooLarge
from vlbatch.media import MediaLimits, load_clip

if TYPE_CHECKING:
    import av
else:
    av = pytest.importorskip("av")

CONTAINERS = ["mp4", "mov"]
COLOURS = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]], np.uint8)


def quarters(height: int, width: int, turn: int = 0) -> npt.NDArray[np.uint8]:
    """Four flat quarters, so that lossy coding cannot hide which corner is which."""
    order = np.roll(COLOURS, turn, axis=0).reshape(2, 2, 3)
    return order.repeat(height // 2, axis=0).repeat(width // 2, axis=1)


def encode_video(
    frames: list[npt.NDArray[np.uint8]],
    container: str = "mp4",
    path: Path | None = None,
    options: dict[str, str] | None = None,
) -> bytes:
    buffer = io.BytesIO()
    target = str(path or "") or buffer
    with av.open(target, "w", format=container, options=options or {}) as output:
        stream = output.add_stream("mpeg4", rate=10)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        output.mux(stream.encode())
    return path.read_bytes() if path else buffer.getvalue()


def corners(frame: npt.NDArray[np.uint8]) -> list[int]:
    """Index of the nearest colour in the middle of each quarter: row by row."""
    height, width = frame.shape[:2]
    middles = frame[height // 4 :: height // 2, width // 4 :: width // 2].reshape(4, 3)
    distance = np.abs(middles[:, None].astype(int) - COLOURS[None]).sum(axis=2)
    assert distance.min(axis=1).max() < 100

    return distance.argmin(axis=1).tolist()


@pytest.mark.parametrize("container", CONTAINERS)
def test_video_is_decoded_in_order(container: str) -> None:
    """Every frame of a video comes out, in order, with the container's pace."""
    frames = [quarters(32, 48, turn=index % 4) for index in range(6)]

    clip = load_clip(encode_video(frames, container))

    assert clip.frames.shape == (6, 32, 48, 3)
    assert clip.seconds_per_frame == pytest.approx(0.1)
    assert [corners(frame) for frame in clip.frames] == [corners(frame) for frame in frames]


def test_frame_step_keeps_every_second_frame() -> None:
    """Every second frame is kept, twice as far apart."""
    frames = [quarters(32, 32, turn=index % 4) for index in range(5)]

    clip = load_clip(encode_video(frames), frame_step=2)

    assert [corners(frame) for frame in clip.frames] == [corners(frame) for frame in frames[::2]]
    assert clip.seconds_per_frame == pytest.approx(0.2)


# Display matrix a b c d -> corners 0 1 / 2 3 as they are shown, row by row.
MATRICES = {
    "upright": ((1, 0, 0, 1), [0, 1, 2, 3]),
    "clockwise": ((0, 1, -1, 0), [2, 0, 3, 1]),
    "half turn": ((-1, 0, 0, -1), [3, 2, 1, 0]),
    "counter-clockwise": ((0, -1, 1, 0), [1, 3, 0, 2]),
    "mirrored": ((-1, 0, 0, 1), [1, 0, 3, 2]),
    "upside down": ((1, 0, 0, -1), [2, 3, 0, 1]),
}


def with_display_matrix(data: bytes, matrix: tuple[int, int, int, int]) -> bytes:
    """Write a display matrix into the track header of an MP4 (ISO/IEC 14496-12, 8.3.2)."""
    start = data.index(b"tkhd") + 4 + 4 + 20 + 8 + 8
    a, b, c, d = (value << 16 for value in matrix)
    content = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    return data[:start] + content + data[start + 36 :]


@pytest.mark.parametrize("name", MATRICES)
def test_stored_turn_is_applied(name: str) -> None:
    """A phone's turned video is shown upright, as a picture with an EXIF tag is (B92)."""
    matrix, expected = MATRICES[name]
    data = with_display_matrix(encode_video([quarters(32, 64)] * 3), matrix)

    clip = load_clip(data)

    shape = (64, 32) if matrix[0] == 0 else (32, 64)
    assert clip.frames.shape == (3, *shape, 3)
    assert [corners(frame) for frame in clip.frames] == [expected] * 3


def test_oblique_turn_is_refused() -> None:
    """A turn that is no multiple of 90 degrees is not dropped in silence."""
    data = with_display_matrix(encode_video([quarters(32, 64)] * 3), (1, 1, -1, 1))

    with pytest.raises(MediaError, match="90 degrees"):
        load_clip(data)


@pytest.mark.parametrize("flags", ["", "faststart", "frag_keyframe+empty_moov"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.8, 0.99])
def test_truncated_video_is_refused(flags: str, share: float, tmp_path: Path) -> None:
    """A video that is cut is refused, though FFmpeg would read its beginning."""
    path = tmp_path / "clip.mp4"
    frames = [quarters(32, 48, turn=index % 4) for index in range(9)]
    data = encode_video(frames, path=path, options={"movflags": flags} if flags else {})

    with pytest.raises(MediaError, match="complete"):
        load_clip(data[: int(len(data) * share)])


def test_damaged_frame_is_refused() -> None:
    """A frame that FFmpeg marks as damaged is refused by its number, not patched up."""
    data = bytearray(encode_video([quarters(64, 64)] * 3))
    start = data.index(b"mdat") + 40
    data[start : start + 8] = b"\xff" * 8

    with pytest.raises(MediaError, match="frame 0 is damaged"):
        load_clip(bytes(data))


def test_declared_frame_count_is_refused() -> None:
    """The container's frame count is checked before a frame is decoded, after frame_step."""
    data = encode_video([quarters(32, 48)] * 9)

    assert load_clip(data, limits=MediaLimits(max_frames=3), frame_step=3).frames.shape[0] == 3
    with pytest.raises(MediaTooLarge, match="has 9 frames"):
        load_clip(data, limits=MediaLimits(max_frames=5))


def test_frames_are_counted_where_the_container_does_not_say() -> None:
    """A fragmented file declares no frame; decoding stops at the limit."""
    data = encode_video([quarters(32, 48)] * 6, options={"movflags": "frag_keyframe+empty_moov"})

    with pytest.raises(MediaTooLarge, match="has 4 frames"):
        load_clip(data, limits=MediaLimits(max_frames=3))


def test_declared_frame_size_is_refused() -> None:
    """The stream's size is checked before a frame is decoded."""
    with pytest.raises(MediaTooLarge, match=r"48x32.*max_side"):
        load_clip(encode_video([quarters(32, 48)]), limits=MediaLimits(max_side=40))


def test_video_without_a_frame_is_refused() -> None:
    """A container without a video frame is refused."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        stream = output.add_stream("mpeg4", rate=10)
        stream.height = stream.width = 32
        stream.pix_fmt = "yuv420p"

    with pytest.raises(MediaError):
        load_clip(buffer.getvalue())


def test_sound_without_pictures_is_refused() -> None:
    """A container with sound only has no video stream."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        stream = output.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate = 8000
        output.mux(stream.encode(frame))
        output.mux(stream.encode())

    with pytest.raises(MediaError, match="no video stream"):
        load_clip(buffer.getvalue(), req_id="r4")


@pytest.mark.parametrize("seed", range(10))
def test_damaged_video_raises_nothing_but_refusals(seed: int) -> None:
    """Random damage either reads or is refused with a typed error."""
    rng = np.random.default_rng(seed)
    for container in CONTAINERS:
        data = bytearray(encode_video([quarters(32, 32)] * 3, container))
        for position in rng.integers(0, len(data), 6):
            data[position] = rng.integers(0, 256)
        try:
            clip = load_clip(bytes(data), limits=MediaLimits(max_pixels=2**16, max_frames=9))
        except MediaError:
            continue
        assert len(clip.frames) <= 9
