"""Media: from files and arrays to upright 8-bit pixels, patch rows and identity keys.

Owns decoding, declared-size limits, resize rules, patch grids and the identity of pixels. Never
trusts a declared size, guesses an array's layout, keeps anything between calls, or imports PyAV
before a video file is decoded.

Main path: ``load_image`` or ``load_clip``, then ``process_image`` or ``process_clip`` with the
options of ``load_options`` or ``family_options``; ``identity_key`` names the features for the
encoder cache.
"""

from vlbatch.media.clip import Clip, load_clip
from vlbatch.media.identity import embeds_key, identity_key
from vlbatch.media.image import Picture, load_image
from vlbatch.media.limits import DEFAULT_LIMITS, MediaLimits, Origin
from vlbatch.media.options import ProcessorOptions, family_options, load_options
from vlbatch.media.patches import Patches, process_clip, process_image
from vlbatch.media.resize import merged_grid, patch_grid, smart_resize

__all__ = [
    "DEFAULT_LIMITS",
    "Clip",
    "MediaLimits",
    "Origin",
    "Patches",
    "Picture",
    "ProcessorOptions",
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
]
