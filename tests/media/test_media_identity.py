from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from dataclasses import fields, replace

import numpy as np
import numpy.typing as npt
import pytest
from blake3 import blake3

from vlbatch.errors import MediaError
from vlbatch.media import embeds_key, family_options, identity_key

OPTIONS = family_options("qwen2_5_vl", "image")
PIXELS = np.arange(30 * 50 * 3, dtype=np.uint8).reshape(30, 50, 3)

KNOWN_KEY = "a0efb028effb96fe1103815fc3ea4b6c51750550e68b2a9215c6b6e1bf9fb3a5"
KNOWN_EMBEDS = "f80b3808e80aff2c6e71c78f7a911d6e7b4b469cb1ef9b50b544c6fc2cd3d777"


def key_of(pixels: npt.NDArray[np.uint8] = PIXELS, **changes: object) -> str:
    arguments: dict = {"modality": "image", "options": OPTIONS, "model": "tiny", **changes}
    return identity_key(pixels, **arguments)


def test_known_answer() -> None:
    """The key of known pixels is known: a change of format must be a decision."""
    assert key_of() == KNOWN_KEY
    assert embeds_key([np.ones((2, 3), np.float32)], modality="image", model="tiny") == KNOWN_EMBEDS


def test_key_is_the_digest_of_a_framed_header_and_the_pixels() -> None:
    """The format is a JSON header led by its length, then the samples."""
    options = {field.name: getattr(OPTIONS, field.name) for field in fields(OPTIONS)}
    header = {
        "format": "vlbatch media identity 1",
        "kind": "RGB",
        "modality": "image",
        "model": "tiny",
        "options": options,
        "arrays": [["|u1", [30, 50, 3]]],
    }
    text = json.dumps(header, sort_keys=True).encode()

    assert key_of() == blake3(struct.pack("<Q", len(text)) + text + PIXELS.tobytes()).hexdigest()


def test_same_bytes_in_another_shape_differ() -> None:
    """30x150 and 150x30 pixels of the same bytes are two pictures (B69)."""
    pixels = np.zeros((30, 150, 3), np.uint8)
    shapes = [(30, 150, 3), (150, 30, 3), (1, 30, 150, 3), (30, 1, 150, 3)]

    assert len({key_of(pixels.reshape(shape)) for shape in shapes}) == len(shapes)


def test_every_option_is_in_the_key() -> None:
    """Changing any one option changes the key: no field is left out (B75)."""
    changes = {
        "min_pixels": 1,
        "max_pixels": 2**20,
        "patch_size": 16,
        "merge_size": 1,
        "temporal_patch_size": 1,
        "temporal_merge_size": 2,
        "clip_budget": True,
        "resample": 2,
        "rescale_factor": 1 / 254,
        "image_mean": (0.4578275, 0.48145466, 0.40821073),
        "image_std": (1.0, 1.0, 1.0),
    }
    assert changes.keys() == {field.name for field in fields(OPTIONS)}

    keys = {key_of(options=replace(OPTIONS, **{name: value})) for name, value in changes.items()}

    assert len(keys | {key_of()}) == len(changes) + 1


@pytest.mark.parametrize("changes", [{"modality": "video"}, {"model": "tiny2"}], ids=str)
def test_modality_and_model_are_in_the_key(changes: dict) -> None:
    """The same pixels for another use are another entry."""
    assert key_of(**changes) != key_of()


def test_fields_cannot_run_into_each_other() -> None:
    """Framed texts keep apart what concatenation would join."""
    assert key_of(modality="ab", model="c") != key_of(modality="a", model="bc")


def test_one_changed_sample_changes_the_key() -> None:
    """Every sample counts, the last one too."""
    changed = PIXELS.copy()
    changed[-1, -1, -1] ^= 1

    assert key_of(changed) != key_of()


@pytest.mark.parametrize(
    "pixels",
    [
        np.asfortranarray(PIXELS),
        np.repeat(PIXELS, 2, axis=1)[:, ::2],
        PIXELS[::-1][::-1],
        PIXELS.copy(),
    ],
    ids=["fortran", "strided", "reversed twice", "copy"],
)
def test_memory_layout_is_no_part_of_the_identity(pixels: npt.NDArray[np.uint8]) -> None:
    """Equal pixels have one key however they lie in memory."""
    assert key_of(pixels) == key_of()


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_key_is_the_same_in_every_process(seed: str) -> None:
    """A process with another hash seed computes the same key."""
    program = (
        "import numpy as np\n"
        "from vlbatch.media import family_options, identity_key\n"
        "pixels = np.arange(30 * 50 * 3, dtype=np.uint8).reshape(30, 50, 3)\n"
        "options = family_options('qwen2_5_vl', 'image')\n"
        "print(identity_key(pixels, modality='image', options=options, model='tiny'))\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}

    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=True, text=True
    )

    assert result.stdout.strip() == key_of()


def test_key_is_not_cut() -> None:
    """A key holds all 256 bits of the digest."""
    assert len(key_of()) == 64


@pytest.mark.parametrize("pixels", [np.zeros((2, 2, 3), np.float32), np.zeros((0, 2, 3), np.uint8)])
def test_what_is_not_decoded_pixels_has_no_key(pixels: npt.NDArray[np.uint8]) -> None:
    """Only non-empty uint8 pixels have an identity here."""
    with pytest.raises(MediaError, match="decode them first"):
        key_of(pixels)


# -- precomputed features ------------------------------------------------------------------------
def embeds(*shape: int, dtype: str = "float32") -> npt.NDArray[np.generic]:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def test_embeds_differ_by_values_shape_dtype_levels_and_model() -> None:
    """Whatever makes features other features changes their key."""
    base = embeds(4, 6)
    variants = [
        ([base], "m"),
        ([base + 1], "m"),
        ([base.reshape(6, 4)], "m"),
        ([base.astype(np.float64)], "m"),
        ([base.view(np.int32)], "m"),
        ([base[:2], base[2:]], "m"),
        ([base, base], "m"),
        ([base], "m2"),
    ]

    keys = {embeds_key(levels, modality="image", model=model) for levels, model in variants}

    assert len(keys) == len(variants)
