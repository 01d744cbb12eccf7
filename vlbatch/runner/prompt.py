"""Text and media of a request -> token ids and items."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from vlbatch.errors import MissingDependency, PlaceholderMismatch, VlbatchError
from vlbatch.items import IntArray, Item
from vlbatch.media import (
    DEFAULT_LIMITS,
    MediaLimits,
    Patches,
    identity_key,
    load_clip,
    load_image,
    load_options,
    process_clip,
    process_image,
)
from vlbatch.runner.inputs import MediaPatches
from vlbatch.runner.requests import Request

_MARK = re.compile(r"(<image>|<video>)")


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What the batch and the engine need of a request.

    Attributes:
        token_ids: int64 ``[prompt_len]``, placeholder ids included.
        items: media; ``payload`` is a ``MediaPatches``.
    """

    token_ids: IntArray
    items: tuple[Item, ...]


class PromptBuilder:
    """Builds prompts for the model in a folder.

    Args:
        model_dir: with ``config.json``, ``tokenizer.json`` and the processor's options.
        limits: of media.

    Attributes:
        eos_token_id: ends an answer.
        tokens_per_second: of the model's video positions.

    Raises:
        VlbatchError: a file is missing or not what it should be.
        MissingDependency: the tokenizer library is not installed.
    """

    def __init__(self, model_dir: Path, limits: MediaLimits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        config = read_model_config(model_dir)
        try:
            self._pad = {m: int(config[f"{m}_token_id"]) for m in ("image", "video")}
            self._start = int(config["vision_start_token_id"])
            self._end = int(config["vision_end_token_id"])
            self.eos_token_id = int(config["eos_token_id"])
            self.tokens_per_second = float(config["vision_config"].get("tokens_per_second", 2))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise VlbatchError(
                f"{model_dir}/config.json is not a Qwen2.5-VL's: {error!r}", setting="model"
            ) from error
        self._tokenizer = _load_tokenizer(model_dir / "tokenizer.json")
        self._options = {m: load_options(model_dir, m) for m in ("image", "video")}
        self._model_id = _model_id(model_dir)

    @property
    def placeholder_ids(self) -> frozenset[int]:
        """Token ids that stand for features; no text may hold them."""
        return frozenset(self._pad.values())

    def build(self, request: Request) -> Prompt:
        """Decode the media of a request, in the order of its marks, and lay out its prompt.

        Raises:
            PlaceholderMismatch: there are not as many marks as media of each kind, or the text
                spells a placeholder token.
            MediaError: a picture or clip cannot be used.
        """
        self._limits.check_num_items(
            len(request.images) + len(request.videos), req_id=request.req_id
        )
        parts = _MARK.split(request.prompt)
        for mark, media in (("<image>", request.images), ("<video>", request.videos)):
            if parts.count(mark) != len(media):
                raise PlaceholderMismatch(
                    f"the prompt has {parts.count(mark)} {mark} marks for {len(media)} files",
                    req_id=request.req_id,
                )
        images, videos = iter(request.images), iter(request.videos)
        token_ids: list[int] = []
        items: list[Item] = []
        for part in parts:
            if part == "<image>":
                item = self._image(next(images), len(token_ids) + 1, request.req_id)
            elif part == "<video>":
                item = self._video(next(videos), len(token_ids) + 1, request.req_id)
            else:
                token_ids += self._text(part, request.req_id)
                continue
            pads = [self._pad[item.modality]] * item.length
            token_ids += [self._start, *pads, self._end]
            items.append(item)
        return Prompt(np.array(token_ids, dtype=np.int64), tuple(items))

    def decode(self, token_ids: list[int]) -> str:
        """Text of generated tokens, up to the end token."""
        if self.eos_token_id in token_ids:
            token_ids = token_ids[: token_ids.index(self.eos_token_id)]
        return str(self._tokenizer.decode(token_ids))

    def _text(self, text: str, req_id: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        for modality, pad in self._pad.items():
            if pad in ids:
                raise PlaceholderMismatch(
                    f"the prompt's text holds the placeholder token {pad}, and no {modality} for"
                    f" it; expected <{modality}> marks only",
                    req_id=req_id,
                )
        return ids

    def _image(self, path: Path, offset: int, req_id: str) -> Item:
        picture = load_image(path, limits=self._limits, req_id=req_id)
        options = self._options["image"]
        patches = process_image(picture, options, req_id=req_id)
        key = identity_key(picture.pixels, modality="image", options=options, model=self._model_id)
        return _item(key, "image", offset, patches)

    def _video(self, path: Path, offset: int, req_id: str) -> Item:
        clip = load_clip(path, limits=self._limits, req_id=req_id)
        options = self._options["video"]
        patches = process_clip(clip, options, req_id=req_id)
        key = identity_key(clip.frames, modality="video", options=options, model=self._model_id)
        return _item(key, "video", offset, patches)


def _item(key: str, modality: str, offset: int, patches: Patches) -> Item:
    return Item(
        key=key,
        modality=modality,
        offset=offset,
        length=patches.num_tokens,
        grid=patches.merged_grid,
        seconds_per_grid=patches.seconds_per_grid,
        payload=MediaPatches(patches.patches, patches.grid_thw, modality),
    )


def read_model_config(model_dir: Path) -> dict[str, Any]:  # Any: JSON
    """Parse a model folder's ``config.json``.

    Raises:
        VlbatchError: it is missing or not a JSON object.
    """
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise VlbatchError(f"cannot read {path}: {error}", setting="model") from error
    if not isinstance(config, dict):
        raise VlbatchError(f"{path} is not a JSON object", setting="model")
    return config


def _load_tokenizer(path: Path) -> Any:  # Any: tokenizers is optional
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise MissingDependency("prompts need tokenizers: pip install 'vlbatch[run]'") from error
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise VlbatchError(f"cannot read {path}: {error}", setting="model") from error


def _model_id(model_dir: Path) -> str:
    """Digest of the configuration and the weights: part of every item's identity."""
    hasher = blake3()
    for path in (model_dir / "config.json", *sorted(model_dir.glob("model*.safetensors"))):
        hasher.update_mmap(path)
    return hasher.hexdigest()
