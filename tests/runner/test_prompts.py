"""Prompts of the tiny model: tokens and items worked out by hand, and refusals."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlbatch.errors import MediaTooLarge, MissingDependency, PlaceholderMismatch, VlbatchError
from vlbatch.media import MediaLimits
from vlbatch.runner import PromptBuilder, Request

MODEL = Path(__file__).parents[2] / "fixtures" / "tiny-vl"
FILES = (
    "config.json", "tokenizer.json", "preprocessor_config.json", "video_preprocessor_config.json",
)  # fmt: skip

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tokenizers") is None, reason="needs the extra vlbatch[run]"
)


@pytest.fixture
def model(tmp_path) -> Path:
    """A copy of the model's folder, without weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in FILES:
        shutil.copy(MODEL / name, folder)
    return folder


@pytest.fixture
def builder(model) -> PromptBuilder:
    return PromptBuilder(model)


@pytest.fixture
def picture(tmp_path):
    """Write a random picture of so many 28-pixel squares."""

    def write(rows: int, columns: int, seed: int = 0) -> Path:
        path = tmp_path / f"{rows}x{columns}-{seed}.png"
        pixels = np.random.default_rng(seed).integers(0, 256, (28 * rows, 28 * columns))
        Image.fromarray(pixels.astype(np.uint8)).save(path)
        return path

    return write


@pytest.fixture
def clip(tmp_path, picture) -> Path:
    """Four frames of one square by two, as a folder."""
    folder = tmp_path / "clip"
    folder.mkdir()
    for n in range(4):
        shutil.copy(picture(1, 2, n), folder / f"{n}.png")
    return folder


def ask(prompt: str, images=(), videos=()) -> Request:
    return Request("q", prompt, tuple(images), tuple(videos))


def vocabulary(*words: str) -> list[int]:
    ids = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    return [ids[word] for word in words]


class TestLayout:
    def test_media_in_the_order_of_the_marks(self, builder, picture, clip):
        """Start, one placeholder a feature row, end; then text; each mark takes the next file."""
        request = ask(
            "<video> list <image>digits <image> ?", [picture(2, 3), picture(1, 1)], [clip]
        )

        prompt = builder.build(request)

        start, stop = 2, 3
        assert prompt.token_ids.tolist() == [
            start, *[5] * 4, stop, *vocabulary("list"),
            start, *[4] * 6, stop, *vocabulary("digits"),
            start, 4, stop, *vocabulary("?"),
        ]  # fmt: skip
        assert [(i.modality, i.offset, i.length, i.grid) for i in prompt.items] == [
            ("video", 1, 4, (2, 1, 2)),
            ("image", 8, 6, (1, 2, 3)),
            ("image", 17, 1, (1, 1, 1)),
        ]
        assert [i.payload.grid_thw for i in prompt.items] == [(2, 2, 4), (1, 4, 6), (1, 2, 2)]
        assert [i.payload.modality for i in prompt.items] == ["video", "image", "image"]

    def test_only_media(self, builder, picture):
        """A prompt may be a mark and nothing else."""
        assert builder.build(ask("<image>", [picture(1, 1)])).token_ids.tolist() == [2, 4, 3]

    def test_words_that_the_model_does_not_know(self, builder):
        """Any Unicode text is a prompt; unknown words become the unknown token."""
        prompt = builder.build(ask("which \u6570\u5b57 \u00e9\U0001f600 ?"))

        assert prompt.token_ids.tolist() == vocabulary("which", "<|unk|>", "<|unk|>", "?")

    def test_decode_stops_at_the_end_token(self, builder):
        """What is generated after the end token is no part of the answer."""
        assert builder.eos_token_id == 1
        assert builder.decode([*vocabulary("4", "2"), 1, *vocabulary("7")]) == "4 2"
        assert builder.decode([]) == ""


class TestIdentity:
    def test_same_pixels_same_key(self, builder, picture, tmp_path):
        """Content decides, not the file's name: a copy shares the features."""
        copy = shutil.copy(picture(1, 2), tmp_path / "copy.png")

        one, two, other = builder.build(
            ask("<image> <image> <image>", [picture(1, 2), copy, picture(1, 2, seed=9)])
        ).items

        assert one.key == two.key != other.key

    def test_picture_and_clip_of_the_same_pixels(self, builder, picture):
        """A still picture as a clip is another item than the picture."""
        still = picture(1, 2)

        image, video = builder.build(ask("<image> <video>", [still], [still])).items

        assert image.key != video.key

    def test_another_model_another_key(self, model, picture):
        """Features belong to the model: its configuration and weights are in the key."""
        keys = []
        for weights in (b"", b"1", b"2"):
            (model / "model.safetensors").write_bytes(weights)
            keys.append(PromptBuilder(model).build(ask("<image>", [picture(1, 1)])).items[0].key)

        assert len(set(keys)) == 3


class TestRefused:
    @pytest.mark.parametrize(
        ("prompt", "num_images", "num_videos", "message"),
        [
            ("<image>", 0, 0, "1 <image> marks for 0 files"),
            ("<image> <image>", 1, 0, "2 <image> marks for 1 files"),
            ("no mark", 1, 0, "0 <image> marks for 1 files"),
            ("<video>", 0, 2, "1 <video> marks for 2 files"),
            ("<video>", 1, 0, "0 <image> marks for 1 files"),
            ("<|image_pad|> ?", 0, 0, "text holds the placeholder token 4"),
            ("<|video_pad|> <image>", 1, 0, "text holds the placeholder token 5"),
        ],
    )
    def test_marks_and_media(self, builder, picture, clip, prompt, num_images, num_videos, message):
        """As many marks as media of each kind; no placeholder but those of media."""
        with pytest.raises(PlaceholderMismatch, match=message) as caught:
            builder.build(ask(prompt, [picture(1, 1)] * num_images, [clip] * num_videos))

        assert caught.value.req_id == "q"

    def test_too_many_items(self, model, picture):
        """More media than the limit are refused before any of them is opened."""
        builder = PromptBuilder(model, MediaLimits(max_items=1))

        with pytest.raises(MediaTooLarge) as caught:
            builder.build(ask("<image> <image>", [Path("none.png")] * 2))

        assert (caught.value.req_id, caught.value.setting) == ("q", "max_items")


class TestModelFolder:
    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("config.json", None, "cannot read .*config.json"),
            ("config.json", "{", "cannot read .*config.json"),
            ("config.json", "[]", "is not a JSON object"),
            ("config.json", '{"model_type": "llama"}', "is not a Qwen2.5-VL's: KeyError"),
            ("config.json", {"eos_token_id": None}, "is not a Qwen2.5-VL's: TypeError"),
            ("config.json", {"vision_config": 3}, "is not a Qwen2.5-VL's: AttributeError"),
            ("tokenizer.json", None, "cannot read .*tokenizer.json"),
            ("tokenizer.json", "{}", "cannot read .*tokenizer.json"),
            ("preprocessor_config.json", None, "holds no processor configuration"),
        ],
    )
    def test_a_broken_folder_is_named(self, model, name, content, message):
        """A file that is missing or not what it should be is a typed error that names it."""
        if content is None:
            (model / name).unlink()
        else:
            if isinstance(content, dict):
                content = json.dumps(json.loads((model / name).read_text()) | content)
            (model / name).write_text(content)

        with pytest.raises(VlbatchError, match=message):
            PromptBuilder(model)

    def test_without_tokenizers(self, model, monkeypatch):
        """Without the tokenizer library the message names the extra that brings it."""
        monkeypatch.setitem(sys.modules, "tokenizers", None)

        with pytest.raises(MissingDependency, match=r"pip install 'vlbatch\[run\]'"):
            PromptBuilder(model)
