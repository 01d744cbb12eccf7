"""Media: from files and arrays to upright 8-bit pixels, patch rows and identity keys.

Owns decoding, declared-size limits, resize rules, patch grids and the identity of pixels. Never
trusts a declared size, guesses an array's layout, keeps anything between calls, or imports PyAV
before a video file is decoded.

Main path: ``load_image`` or ``load_clip``, then ``process_image`` or ``process_clip`` with the
options of ``load_options`` or ``family_options``; ``identity_key`` names the features for the
encoder cache.
"""

from vlbatch.media.clip import Clip, ClipSource, load_clip
from vlbatch.media.config import load_options
from vlbatch.media.embeds import check_embeds
from vlbatch.media.identity import embeds_key, identity_key
from vlbatch.media.image import ImageSource, Picture, load_image
from vlbatch.media.limits import DEFAULT_LIMITS, MAX_ASPECT_RATIO, MediaLimits
from vlbatch.media.options import FAMILIES, Family, ProcessorOptions, family_options
from vlbatch.media.patches import (
    Patches,
    PatchGrid,
    merged_grid,
    patch_grid,
    process_clip,
    process_image,
)
from vlbatch.media.pixels import WHITE, Layout, Pixels, Rgb
from vlbatch.media.resize import smart_resize, smart_resize_clip

__all__ = [
    "DEFAULT_LIMITS",
    "FAMILIES",
    "MAX_ASPECT_RATIO",
    "WHITE",
    "Clip",
    "ClipSource",
    "Family",
    "ImageSource",
    "Layout",
    "MediaLimits",
    "PatchGrid",
    "Patches",
    "Picture",
    "Pixels",
    "ProcessorOptions",
    "Rgb",
    "check_embeds",
    "embeds_key",
    "family_options",
    "identity_key",
    "load_clip",
    "load_image",
    "load_options",
    "merged_grid",
    "patch_grid",
    "process_clip",
    "process_image",
    "smart_resize",
    "smart_resize_clip",
]
