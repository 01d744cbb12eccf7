from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vlbatch.errors import InvalidSetting, MediaError
from vlbatch.media import ProcessorOptions, family_options, load_options

QWEN = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 3136,
    "max_pixels": 12_845_056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
EXPECTED = replace(family_options("qwen2_5_vl", "image"), max_pixels=12_845_056)


def write(folder: Path, config: object, name: str = "preprocessor_config.json") -> Path:
    (folder / name).write_text(json.dumps(config))
    return folder


# -- values --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"patch_size": 0}, "patch_size"),
        ({"merge_size": 2.0}, "merge_size"),
        ({"temporal_patch_size": True}, "temporal_patch_size"),
        ({"min_pixels": 10**9}, "min_pixels"),
        ({"resample": 6}, "resample"),
        ({"image_mean": (0.5, 0.5)}, "image_mean"),
        ({"image_std": (0.5, 0.0, 0.5)}, "image_std"),
        ({"image_std": (0.5, float("nan"), 0.5)}, "image_std"),
    ],
)
def test_impossible_option_is_refused(changes: dict, setting: str) -> None:
    """An option that no processor can work with is refused by name."""
    with pytest.raises(InvalidSetting) as caught:
        replace(EXPECTED, **changes)

    assert caught.value.setting == setting


def test_equal_options_are_equal_bit_for_bit() -> None:
    """Whole numbers and lists from a file become the floats and tuples that code writes."""
    loose = replace(EXPECTED, image_mean=[0, 0, 0], rescale_factor=1)
    exact = replace(EXPECTED, image_mean=(0.0, 0.0, 0.0), rescale_factor=1.0)

    assert loose == exact
    assert repr(loose) == repr(exact)


def test_unknown_family_or_modality_is_refused() -> None:
    """A family or modality that is not known is named."""
    with pytest.raises(InvalidSetting, match="qwen9"):
        family_options("qwen9", "image")
    with pytest.raises(InvalidSetting, match="audio"):
        family_options("qwen2_vl", "audio")


def test_options_cannot_be_changed() -> None:
    """Options are values."""
    with pytest.raises(AttributeError):
        EXPECTED.patch_size = 16
    assert isinstance(EXPECTED, ProcessorOptions)


# -- files ---------------------------------------------------------------------------------------
def test_both_spellings_of_the_pixel_budget(tmp_path: Path) -> None:
    """min_pixels and max_pixels, size edges, and pixels inside size mean the same."""
    config = {key: value for key, value in QWEN.items() if not key.endswith("_pixels")}
    sizes = [
        QWEN,
        {**config, "size": {"shortest_edge": 3136, "longest_edge": 12_845_056}},
        {**config, "size": {"min_pixels": 3136, "max_pixels": 12_845_056}},
        {**QWEN, "size": {"shortest_edge": 1, "longest_edge": 2}},
        {**config, "max_pixels": 12_845_056, "size": {"shortest_edge": 3136, "longest_edge": 9}},
        {**QWEN, "size": {"shortest_edge": None, "height": None}, "do_pad": None},
        {
            **config,
            "max_pixels": None,
            "size": {"shortest_edge": 3136, "longest_edge": 12_845_056},
        },
    ]

    found = [load_options(write(tmp_path, size), "image") for size in sizes]

    assert found == [EXPECTED] * len(sizes)


def test_video_options_come_from_their_own_file_first(tmp_path: Path) -> None:
    """Videos use the image file only where the model has no other."""
    write(tmp_path, QWEN)
    assert load_options(tmp_path, "video") == EXPECTED

    config = {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "patch_size": 16,
        "size": {"shortest_edge": 4096, "longest_edge": 25_165_824},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    write(tmp_path, config, "video_preprocessor_config.json")

    assert load_options(tmp_path, "video") == replace(
        family_options("qwen3_vl", "video"), min_pixels=4096, max_pixels=25_165_824
    )
    assert load_options(tmp_path, "image") == EXPECTED


@pytest.mark.parametrize("suffix", ["", "Fast", "Pil"])
@pytest.mark.parametrize(
    ("prefix", "family"),
    [
        ("Qwen2VL", "qwen2_vl"),
        ("Qwen2_5_VL", "qwen2_5_vl"),
        ("Qwen3VL", "qwen3_vl"),
        ("Ernie4_5_VLMoe", "ernie4_5_vl_moe"),
    ],
)
@pytest.mark.parametrize("modality", ["image", "video"])
def test_processor_type_names_the_family(
    tmp_path: Path, prefix: str, family: str, suffix: str, modality: str
) -> None:
    """The processor's type decides what the file leaves out, whatever its implementation."""
    kind = f"{prefix}{modality.title()}Processor{suffix}"
    write(tmp_path, {f"{modality}_processor_type": kind})

    assert load_options(tmp_path, modality) == family_options(family, modality)


@pytest.mark.parametrize("config", [{"image_processor_type": "MyImageProcessor"}, {}], ids=str)
def test_unknown_processor_type_is_refused(tmp_path: Path, config: dict) -> None:
    """Defaults are never those of a guessed family."""
    with pytest.raises(InvalidSetting) as caught:
        load_options(write(tmp_path, config), "image")

    assert caught.value.setting == "family"


def test_ernie_pairs_frames_after_its_tower(tmp_path: Path) -> None:
    """ERNIE's temporal_patch_size for videos is a merge: its patches hold single frames."""
    config = {"video_processor_type": "Ernie4_5_VLMoeVideoProcessor", "temporal_patch_size": 4}

    options = load_options(write(tmp_path, config), "video")

    assert (options.temporal_patch_size, options.temporal_merge_size) == (1, 4)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"do_resize": False}, "do_resize"),
        ({"do_rescale": False}, "do_rescale"),
        ({"do_normalize": False}, "do_normalize"),
        ({"cap_pixels_per_frame": True}, "cap_pixels_per_frame"),
        ({"patch_size": "14"}, "patch_size"),
        ({"patch_size": 14.0}, "patch_size"),
        ({"max_pixels": "1"}, "max_pixels"),
        ({"size": 224}, "size"),
        ({"min_pixels": None, "size": {"shortest_edge": 0}}, "min_pixels"),
        ({"size": {"patch_size": 16}}, "size"),
        ({"size": {"height": 224, "width": 224}}, "size"),
        ({"image_mean": [0.5, 0.5]}, "image_mean"),
        ({"image_mean": ["0.5"] * 3}, "image_mean"),
        ({"rescale_factor": "1/255"}, "rescale_factor"),
        ({"merge_size": 0}, "merge_size"),
    ],
)
def test_bad_value_in_a_file_is_named(tmp_path: Path, changes: dict, setting: str) -> None:
    """A value of the wrong kind, or a step that is not taken, is refused by its key."""
    with pytest.raises(InvalidSetting) as caught:
        load_options(write(tmp_path, {**QWEN, **changes}), "image")

    assert caught.value.setting == setting


@pytest.mark.parametrize("text", [b"{", b"[]", b'"x"', b"\xff\xfe"])
def test_file_that_is_no_json_object_is_refused(tmp_path: Path, text: bytes) -> None:
    """A file that cannot be read as an object is refused by its path."""
    (tmp_path / "preprocessor_config.json").write_bytes(text)

    with pytest.raises(MediaError, match=r"preprocessor_config\.json"):
        load_options(tmp_path, "image")


def test_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    """A folder without the file, or no folder at all, is refused."""
    with pytest.raises(MediaError, match=r"holds no processor configuration, preprocessor_config"):
        load_options(tmp_path, "image")
    with pytest.raises(MediaError, match="nowhere: holds no"):
        load_options(tmp_path / "nowhere", "video")
