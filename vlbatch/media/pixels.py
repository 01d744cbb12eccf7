"""Any colour mode, any declared array layout -> uint8 RGB.

Every source is reduced to colour samples ``[h, w, 1 or 3]`` with or without alpha ``[h, w, 1]``,
scaled to 8 bits by what its type can hold, and alpha is composited on the stated background.
Colour profiles are not applied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from vlbatch.errors import MediaError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from PIL import Image

    from vlbatch.media.limits import Origin

Rgb: TypeAlias = tuple[int, int, int]
"""Red, green, blue, each in ``[0, 256)``."""

Pixels: TypeAlias = npt.NDArray[np.uint8]
"""uint8 RGB ``[height, width, 3]``, C-contiguous."""

Layout: TypeAlias = Literal["HW", "HWC", "CHW"]
"""Axes of an array source: the caller states them, a shape never decides (1x1x3 fits two)."""

WHITE: Final[Rgb] = (255, 255, 255)

_WITH_ALPHA: Final = ("RGBA", "LA", "PA", "RGBa", "La")


class Turn(NamedTuple):
    """How stored pixels are shown: rows and columns exchanged first, then either reversed."""

    transpose: bool = False
    flip_columns: bool = False
    flip_rows: bool = False


def rgb_from_pil(image: Image.Image, background: Rgb, origin: Origin) -> Pixels:
    """Decode the current frame of a Pillow image, which is left as it was.

    The result is fresh and read-only. Samples of 8 bits or fewer (grey, palette, RGB, CMYK, YCbCr,
    HSV) go through Pillow's conversion; 16-bit and ``I`` samples hold ``[0, 65535]``, ``F`` samples
    ``[0, 1]``.

    Raises:
        MediaError: samples outside that range, or a mode that has no conversion.
    """
    mode = image.mode
    key = image.info.get("transparency")
    if mode in ("I", "F") or mode.startswith("I;16"):
        grey = np.asarray(image)[..., None]
        alpha = None if key is None else np.where(grey == key, 0, 255).astype(np.uint8)
        return _flatten(_to_8bit(grey, origin), alpha, background)
    if isinstance(key, tuple) and max(key) > 255:
        # NOTE: Pillow keeps the high byte of 16-bit RGB but both bytes of the transparent colour.
        raise origin.refusal(
            "is a 16-bit RGB picture with a transparent colour; save it with an alpha channel"
        )
    has_alpha = key is not None or mode in _WITH_ALPHA or _palette_has_alpha(image)
    try:
        samples = np.asarray(image.convert("RGBA" if has_alpha else "RGB"))
    except ValueError as error:
        raise origin.refusal(f"has colour mode {mode!r} ({error}); save it as RGB") from error
    return _flatten(samples[..., :3], samples[..., 3:] if has_alpha else None, background)


def rgb_from_array(
    array: npt.NDArray[np.generic], layout: Layout, background: Rgb, origin: Origin
) -> Pixels:
    """Convert an array of 1 (grey), 2 (grey, alpha), 3 (RGB) or 4 (RGBA) channels.

    The result is fresh and read-only. bool holds 0 and 1, uint8 and uint16 their full range,
    floats ``[0, 1]``.

    Raises:
        MediaError: another dtype, axis count, channel count, or samples outside the range.
    """
    height, width, channels = array_size(array, layout, origin)
    hwc = array.transpose(1, 2, 0) if layout == "CHW" else array.reshape(height, width, channels)
    samples = _to_8bit(hwc, origin)
    if channels in (1, 3):
        return _flatten(samples, None, background)
    return _flatten(samples[..., :-1], samples[..., -1:], background)


def array_size(
    array: npt.NDArray[np.generic], layout: Layout, origin: Origin
) -> tuple[int, int, int]:
    """Read height, width and channels off an array by its declared layout.

    Raises:
        MediaError: an unknown layout, another number of axes, or not 1 to 4 channels.
    """
    if layout not in get_args(Layout):
        raise origin.refusal(f"layout is {layout!r}; expected one of {get_args(Layout)}", "layout")
    if array.ndim != len(layout):
        raise origin.refusal(
            f"array of shape {array.shape} has {array.ndim} axes; layout {layout!r} has"
            f" {len(layout)}"
        )
    size = dict(zip(layout, array.shape, strict=True))
    channels = size.get("C", 1)
    if not 1 <= channels <= 4:
        raise origin.refusal(
            f"array of shape {array.shape} has {channels} channels in layout {layout!r};"
            " expected 1 (grey), 2 (grey, alpha), 3 (RGB) or 4 (RGBA): state another layout"
        )
    return size["H"], size["W"], channels


def check_background(background: Rgb, origin: Origin) -> None:
    """Refuse a background that is not three 8-bit values."""
    if len(background) != 3 or any(value not in range(256) for value in background):
        raise origin.refusal(
            f"background is {background!r}; expected red, green, blue in 0..255", "background"
        )


def check_rgb(pixels: Pixels, num_axes: int, name: str) -> None:
    """Refuse anything but a non-empty uint8 array ``[..., 3]`` of ``num_axes`` axes.

    Raises:
        MediaError: another dtype, axis count, channel count, or an axis of length 0.
    """
    shape = pixels.shape
    if pixels.dtype != np.uint8 or len(shape) != num_axes or shape[-1] != 3 or 0 in shape:
        axes = ("frames", "height", "width", "3")[-num_axes:]
        raise MediaError(
            f"{name}: pixels are {pixels.dtype} {shape}; expected non-empty uint8"
            f" [{', '.join(axes)}]"
        )


def frozen(pixels: Pixels) -> Pixels:
    """Return the pixels read-only and C-contiguous; copies unless they are already both."""
    if pixels.flags.writeable or not pixels.flags.c_contiguous:
        pixels = pixels.copy(order="C")
        pixels.flags.writeable = False
    return pixels


def stack_frames(frames: Iterable[Pixels], num_frames: int, origin: Origin) -> Pixels:
    """Copy frames into one read-only array ``[num_frames, height, width, 3]`` as they come.

    Args:
        frames: ``num_frames`` of them, at least one.
        num_frames: how many there are.
        origin: named in a refusal.

    Raises:
        MediaError: a frame of another size than the first.
    """
    iterator = iter(frames)
    first = next(iterator)
    stack = np.empty((num_frames, *first.shape), np.uint8)
    stack[0] = first
    for index, pixels in enumerate(iterator, start=1):
        if pixels.shape != first.shape:
            raise origin.refusal(
                f"frame {index} is {pixels.shape[1]}x{pixels.shape[0]} but the first is"
                f" {first.shape[1]}x{first.shape[0]} (width x height); expected one size"
            )
        stack[index] = pixels
    stack.flags.writeable = False
    return stack


def turned(pixels: Pixels, turn: Turn) -> Pixels:
    """View ``[height, width, 3]`` as ``turn`` shows it."""
    if turn.transpose:
        pixels = pixels.swapaxes(0, 1)
    return pixels[:: -1 if turn.flip_rows else 1, :: -1 if turn.flip_columns else 1]


def _palette_has_alpha(image: Image.Image) -> bool:
    palette = image.palette
    return image.mode == "P" and palette is not None and palette.mode.endswith("A")


def _to_8bit(samples: npt.NDArray[np.generic], origin: Origin) -> Pixels:
    """Scale samples by the full range of their type, rounding to nearest."""
    kind = samples.dtype.kind
    if samples.dtype == np.uint8:
        return samples.astype(np.uint8, copy=False)
    if kind == "b":
        return np.where(samples, 255, 0).astype(np.uint8)
    if kind == "f":
        _check_range(samples, 1, origin)
        scaled: npt.NDArray[np.float32] = samples.astype(np.float32) * np.float32(255)
        return np.rint(scaled).astype(np.uint8)
    if kind == "i" or (kind == "u" and samples.dtype.itemsize == 2):
        _check_range(samples, 65_535, origin)
        # 65535 = 255 * 257, so the nearest 8-bit value is (v + 128) // 257.
        return ((samples.astype(np.int32) + 128) // 257).astype(np.uint8)
    raise origin.refusal(
        f"samples of dtype {samples.dtype} have no known range; expected bool, uint8, uint16, or"
        " floats in [0, 1]"
    )


def _check_range(samples: npt.NDArray[np.generic], top: int, origin: Origin) -> None:
    low, high = samples.min(), samples.max()
    if not (low >= 0 and high <= top):  # NaN fails both comparisons
        raise origin.refusal(
            f"{samples.dtype} samples span [{low}, {high}]; expected [0, {top}]: scale them first"
        )


def _flatten(colour: Pixels, alpha: Pixels | None, background: Rgb) -> Pixels:
    """Composite on the background, rounding to nearest; returns a fresh read-only array."""
    height, width = colour.shape[:2]
    out = np.empty((height, width, 3), np.uint8)
    if alpha is None:
        out[:] = colour
    else:
        weight = alpha.astype(np.uint16)
        behind = (255 - weight) * np.array(background, np.uint16)
        # At most 255 * 255 + 127, which uint16 holds.
        out[:] = (colour * weight + behind + 127) // 255
    out.flags.writeable = False
    return out
