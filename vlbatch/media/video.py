"""Frames of an MP4 or MOV file, through PyAV (the ``video`` extra)."""

from __future__ import annotations

import io
import struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vlbatch.errors import MissingDependency
from vlbatch.media.image import stack_frames

if TYPE_CHECKING:
    from collections.abc import Iterator

    from av.video.frame import VideoFrame

    from vlbatch.media.image import Pixels
    from vlbatch.media.limits import MediaLimits, Origin

# HEIF stills share MP4's boxes; as a video they would give their first tile.
_STILL_BRANDS: Final = (b"heic", b"heix", b"heim", b"heis", b"mif1", b"avif")


def is_video(data: bytes) -> bool:
    """Whether an encoded file begins as MP4 or MOV does."""
    return data[4:8] == b"ftyp" and data[8:12] not in _STILL_BRANDS


def decode_video(
    data: bytes, frame_step: int, limits: MediaLimits, origin: Origin
) -> tuple[Pixels, float | None]:
    """Decode every ``frame_step``-th frame of the first video stream; returns frames and pace.

    The turn in the stream's display matrix is applied; non-square pixels are not stretched. The
    limits hold for what the file declares and again for what comes out of it.
    """
    try:
        import av  # an optional package, and slow to import
    except ImportError as error:
        raise MissingDependency(
            f"{origin.name}: decoding a video needs PyAV: pip install 'vlbatch[video]'",
            req_id=origin.req_id,
        ) from error

    if _declared_bytes(data) > len(data):
        raise origin.refusal("is truncated; expected a complete file")
    try:
        # NOTE: FFmpeg never guesses the format, which may pick one that opens other files.
        with av.open(io.BytesIO(data), format="mov", **_lenient(av.__version__)) as container:
            if not container.streams.video:
                raise origin.refusal("has no video stream; expected one")
            stream = container.streams.video[0]
            codec: Any = stream.codec_context  # None, whatever its type says, without a decoder
            if codec is None:
                raise origin.refusal("has a video stream in a codec that PyAV cannot decode")
            # A fragmented file declares 0 frames.
            declared = max(1, -(-stream.frames // frame_step))
            limits.check_clip(declared, codec.width, codec.height, origin)
            kept = _decode(container.decode(stream), frame_step, origin)
            pixels = stack_frames(kept, limits, origin)
            rate = stream.average_rate
    except av.FFmpegError as error:
        raise origin.refusal(
            f"cannot be decoded, it is truncated or damaged ({error}); expected a complete file"
        ) from error
    return pixels, float(frame_step / rate) if rate else None


def _lenient(version: str) -> dict[str, str]:
    """Let tags in another encoding than UTF-8 pass; PyAV does so by itself from 19 on."""
    return {} if int(version.split(".")[0]) >= 19 else {"metadata_errors": "replace"}


def _decode(frames: Iterator[VideoFrame], frame_step: int, origin: Origin) -> Iterator[Pixels]:
    for index, frame in enumerate(frames):
        if frame.is_corrupt:
            raise origin.refusal(f"frame {index} is damaged; expected a complete file")
        if index == 0:
            is_transposed, down, across = _stored_turn(frame, origin)
        if index % frame_step == 0:
            pixels = np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)
            yield (pixels.swapaxes(0, 1) if is_transposed else pixels)[::down, ::across]


def _stored_turn(frame: VideoFrame, origin: Origin) -> tuple[bool, int, int]:
    """Read the display matrix: whether to exchange the axes, then the step along each (1 or -1).

    The matrix is nine native int32, 16.16 fixed point: ``x' = a x + c y``, ``y' = b x + d y`` with
    ``a, b, _, c, d`` its first five (ISO/IEC 14496-12, track header).
    """
    side_data: Any = frame.side_data  # PyAV's own types say mapping; every version has indices
    for index in range(len(side_data)):
        if side_data[index].type.name == "DISPLAYMATRIX":
            a, b, _, c, d = struct.unpack_from("=5i", bytes(side_data[index]))
            if a == d == 0 and b and c:
                return True, 1 if b > 0 else -1, 1 if c > 0 else -1
            if b == c == 0 and a and d:
                return False, 1 if d > 0 else -1, 1 if a > 0 else -1
            raise origin.refusal("is turned by no multiple of 90 degrees; re-encode it")
    return False, 1, 1


def _declared_bytes(data: bytes) -> int:
    """Length of the file by its outermost boxes (ISO/IEC 14496-12, section 4.2).

    NOTE: FFmpeg reads the beginning of a cut file without complaint.
    """
    position = 0
    while position + 8 <= len(data):
        size = int.from_bytes(data[position : position + 4], "big")
        if size == 1:  # a 64-bit size follows the type
            size = int.from_bytes(data[position + 8 : position + 16], "big")
        position = position + max(size, 8) if size else len(data)  # 0: to the end of the file
    return position
