"""Frames of an encoded video, through PyAV (the ``video`` extra)."""

from __future__ import annotations

import io
import struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vlbatch.errors import MissingDependency
from vlbatch.media.animation import Frames
from vlbatch.media.pixels import Turn, stack_frames, turned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from av.video.frame import VideoFrame

    from vlbatch.media.limits import MediaLimits, Origin
    from vlbatch.media.pixels import Pixels

_MOV: Final = "mov"
_MATROSKA: Final = "matroska"
_AVI: Final = "avi"

# HEIF stills share MP4's boxes; as a video they would give their first tile.
_STILL_BRANDS: Final = (b"heic", b"heix", b"heim", b"heis", b"mif1", b"avif")


def container_of(data: bytes) -> str | None:
    """Name the demuxer of an encoded video by its first bytes; ``None`` if it is none of them.

    The demuxer is never left to FFmpeg's guess, which may pick one that opens other files.
    """
    if data[4:8] == b"ftyp":
        return None if data[8:12] in _STILL_BRANDS else _MOV
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return _MATROSKA
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return _AVI
    return None


def read_video(
    data: bytes, demuxer: str, *, frame_step: int, limits: MediaLimits, origin: Origin
) -> Frames:
    """Decode every ``frame_step``-th frame of the first video stream, upright.

    The turn in the stream's display matrix is applied; non-square pixels are not stretched.
    Declared sizes are checked before decoding and counted again during it.

    Args:
        data: the encoded file.
        demuxer: what ``container_of`` said of it.
        frame_step: keep frames 0, ``frame_step``, 2 * ``frame_step``, ...
        limits: checked against the kept frames.
        origin: named in a refusal.

    Raises:
        MissingDependency: PyAV is not installed.
        MediaError: no video stream, no frame, damaged or truncated, or a frame size that changes.
        MediaTooLarge: more declared or more decoded frames or pixels than the limits.
    """
    try:
        import av  # an optional package, and slow to import
    except ImportError as error:
        raise MissingDependency(
            f"{origin.name}: decoding a video needs PyAV; install the extra 'video':"
            " pip install 'vlbatch[video]'",
            req_id=origin.req_id,
        ) from error

    missing = _declared_bytes(data, demuxer) - len(data)
    if missing > 0:
        raise origin.refusal(f"is truncated: its last {missing:,} bytes are missing")
    try:
        with av.open(io.BytesIO(data), format=demuxer, metadata_errors="replace") as container:
            if not container.streams.video:
                raise origin.refusal("has no video stream; expected one")
            stream = container.streams.video[0]
            codec: Any = stream.codec_context  # None, whatever its type says, without a decoder
            if codec is None:
                raise origin.refusal("has a video stream in a codec that PyAV cannot decode")
            # A container that does not say how many frames it has declares 0.
            declared = max(1, -(-stream.frames // frame_step))
            limits.check_clip(declared, codec.width, codec.height, origin)
            frames = _decode(container.decode(stream), frame_step, limits, origin)
            rate = stream.average_rate
    except av.FFmpegError as error:
        raise origin.refusal(
            f"cannot be decoded, it is truncated or damaged ({error}); expected a complete file"
        ) from error
    return Frames(
        stack_frames(frames, len(frames), origin), float(frame_step / rate) if rate else None
    )


def _decode(
    decoded: Iterator[VideoFrame], frame_step: int, limits: MediaLimits, origin: Origin
) -> list[Pixels]:
    """Convert the kept frames to upright RGB, counting them against the limits as they come."""
    frames: list[Pixels] = []
    for index, frame in enumerate(decoded):
        if frame.is_corrupt:
            raise origin.refusal(f"frame {index} is damaged; expected a complete file")
        if index == 0:
            turn = _stored_turn(frame, origin)
        if index % frame_step == 0:
            limits.check_clip(len(frames) + 1, frame.width, frame.height, origin)
            pixels = np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)
            frames.append(turned(pixels, turn))
    if not frames:
        raise origin.refusal("has no video frame; a clip needs at least one")
    return frames


def _stored_turn(frame: VideoFrame, origin: Origin) -> Turn:
    """Read the display matrix of the first frame.

    The matrix is nine native int32, 16.16 fixed point: ``x' = a x + c y``, ``y' = b x + d y`` with
    ``a, b, _, c, d`` its first five (ISO/IEC 14496-12, track header).
    """
    side_data: Any = frame.side_data  # PyAV's own types say mapping; every version has indices
    for index in range(len(side_data)):
        if side_data[index].type.name == "DISPLAYMATRIX":
            a, b, _, c, d = struct.unpack_from("=5i", bytes(side_data[index]))
            if a == d == 0 and b and c:
                return Turn(transpose=True, flip_columns=c < 0, flip_rows=b < 0)
            if b == c == 0 and a and d:
                return Turn(flip_columns=a < 0, flip_rows=d < 0)
            raise origin.refusal(
                "is to be shown turned by an angle that is no multiple of 90 degrees; re-encode it"
            )
    return Turn()


def _declared_bytes(data: bytes, demuxer: str) -> int:
    """Length of the file by its own outermost boxes; FFmpeg reads a cut file without complaint.

    Boxes of ISO/IEC 14496-12 (section 4.2), RIFF chunks, or EBML elements (RFC 8794). A box that
    reaches to the end of the file, whatever that is, makes the length that of the data.
    """
    box_end = {_MOV: _mov_box_end, _MATROSKA: _ebml_element_end, _AVI: _riff_chunk_end}[demuxer]
    position = 0
    while position + 8 <= len(data):
        position = box_end(data, position)
    return position


def _mov_box_end(data: bytes, position: int) -> int:
    size = int.from_bytes(data[position : position + 4], "big")
    if size == 1:  # a 64-bit size follows the type
        size = int.from_bytes(data[position + 8 : position + 16], "big")
    return position + max(size, 8) if size else len(data)


def _riff_chunk_end(data: bytes, position: int) -> int:
    if data[position : position + 4] != b"RIFF":
        return len(data)
    return position + 8 + int.from_bytes(data[position + 4 : position + 8], "little")


def _ebml_element_end(data: bytes, position: int) -> int:
    position += 9 - data[position].bit_length()  # the id: its leading zeros give its length
    first = data[position] if position < len(data) else 0
    num_bytes = 9 - first.bit_length()
    size_bits = (1 << 7 * num_bytes) - 1
    size = int.from_bytes(data[position : position + num_bytes], "big") & size_bits
    return len(data) if size == size_bits else position + num_bytes + size
