"""FastDeploy's configuration, read by duck typing: any object or mapping with these names works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from numbers import Real
from typing import Any

import numpy as np

from vlbatch.backends import Backend, make_backend
from vlbatch.errors import InvalidSetting
from vlbatch.integrations.fastdeploy.fields import FieldSizes

FAMILIES = {
    "qwen3_vl": "qwen3_vl", "qwen2_5_vl": "qwen2_5_vl", "qwen2_vl": "qwen2_vl",
    "ernie4_5_moe_vl": "ernie4_5_vl", "ernie4_5_vl": "ernie4_5_vl",
    "paddleocr_vl": "qwen2_vl",
}  # fmt: skip
"""Part of ``model_config.model_type`` -> rules of rotary positions."""

_COUNTS = {
    "block_size": "cache_config.block_size",
    "max_stop_seqs": "model_config.max_stop_seqs_num",
    "stop_seqs_max_len": "model_config.stop_seqs_max_len",
    "eos_tokens_lens": "model_config.eos_tokens_lens",
}
_NUMBERS = ("top_p", "temperature", "penalty_score", "frequency_score", "presence_score")


# -- one setting -----------------------------------------------------------------------------------
def look_up(fd_config: object, path: str) -> object:
    """Read one setting by the names of its sections and its own; ``None`` if it is not there."""
    found: object = fd_config
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else getattr(found, name, None)
    return found


def integer(
    fd_config: object, path: str, default: int | None = None, *, least: int | None = 1
) -> int:
    """Read an integer of at least ``least``.

    Raises:
        InvalidSetting: missing without a default, no integer, or less.
    """
    found = look_up(fd_config, path)
    found = default if found is None else found
    if isinstance(found, int | np.integer) and not isinstance(found, bool):
        value = int(found)
        if least is None or value >= least:
            return value
    expected = {1: "a positive integer", None: "an integer"}.get(
        least, f"an integer of at least {least}"
    )
    raise InvalidSetting(f"got {found!r}; expected {expected}", setting=path)


def number(fd_config: object, path: str, default: float) -> float:
    """Read a number; raises ``InvalidSetting`` for anything else, and for infinity and NaN."""
    found = look_up(fd_config, path)
    found = default if found is None else found
    if isinstance(found, bool) or not isinstance(found, Real) or not isfinite(found):
        raise InvalidSetting(f"got {found!r}; expected a number", setting=path)
    return float(found)


def flag(fd_config: object, path: str) -> bool:
    """Read a switch that is off where it is missing; raises ``InvalidSetting`` for no bool."""
    found = look_up(fd_config, path)
    if found is not None and not isinstance(found, bool | np.bool_):
        raise InvalidSetting(f"got {found!r}; expected True or False", setting=path)
    return bool(found)


def text(fd_config: object, path: str) -> str:
    """Read a name that is empty where it is missing; raises ``InvalidSetting`` for no text."""
    found = look_up(fd_config, path)
    if not isinstance(found, str | None):
        raise InvalidSetting(f"got {found!r}; expected text", setting=path)
    return found or ""


# -- what several settings say ---------------------------------------------------------------------
def num_draft_tokens(fd_config: object) -> int:
    """Drafts of a decode: 0 without a speculative method."""
    if not look_up(fd_config, "speculative_config.method"):
        return 0
    return integer(fd_config, "speculative_config.num_speculative_tokens")


def num_model_steps(fd_config: object) -> int:
    """Modules of the draft model, each of which reads one token further ahead."""
    return integer(fd_config, "speculative_config.num_model_steps", 1)


def lookahead(fd_config: object) -> int:
    """Tokens past a chunk that a drafter reads: 0 without one."""
    return num_model_steps(fd_config) if num_draft_tokens(fd_config) else 0


def max_chunk_tokens(fd_config: object) -> int:
    """Most tokens of one request in one step: chunks of prompts with media may be of any length."""
    longest = integer(fd_config, "model_config.max_model_len")
    if flag(fd_config, "model_config.enable_mm"):
        return longest
    return min(integer(fd_config, "scheduler_config.max_num_batched_tokens", longest), longest)


def hidden_tokens(fd_config: object, sizes: FieldSizes) -> int:
    """Most tokens of a step, as the configuration has it."""
    most = integer(fd_config, "scheduler_config.max_num_batched_tokens", sizes.max_tokens)
    drafts = sizes.max_num_seqs * (sizes.num_draft_tokens + 1)
    path = "scheduler_config.max_extra_num_batched_tokens"
    return most + integer(fd_config, path, drafts, least=0)


def cache_budget(fd_config: object, sizes: FieldSizes) -> tuple[int, bool]:
    """Feature rows of the encoder cache, and whether it keeps what no request needs now.

    ``cache_config.max_encoder_cache``; without a positive one as many rows as a step of full
    chunks can need, and at 0 or less none is kept after its last reader.
    """
    rows = integer(fd_config, "cache_config.max_encoder_cache", sizes.max_tokens, least=None)
    return (rows, True) if rows > 0 else (sizes.max_tokens, False)


def inject_tokens(fd_config: object) -> list[int]:
    """Tokens that end a thought which is too long; at least one, -1 for none."""
    path = "model_config.think_truncate_prompt_ids"
    found = look_up(fd_config, path)
    found = [] if found is None else found
    if not isinstance(found, list | tuple) or not all(
        isinstance(t, int | np.integer) for t in found
    ):
        raise InvalidSetting(f"got {found!r}; expected a list of token ids", setting=path)
    return [int(token) for token in found] or [-1]


def read_family(fd_config: object) -> str:
    """Rules of rotary positions.

    Raises:
        InvalidSetting: a multimodal model of a type that is not known here.
    """
    if not flag(fd_config, "model_config.enable_mm"):
        return "1d"
    model_type = text(fd_config, "model_config.model_type")
    for part, family in FAMILIES.items():
        if part in model_type:
            return family
    raise InvalidSetting(
        f"got {model_type!r}; expected a name with one of {', '.join(FAMILIES)} in it, or give"
        " family=",
        setting="model_config.model_type",
    )


def read_sizes(fd_config: object, *, rope_table: bool) -> FieldSizes:
    """Extents and defaults of the fields.

    Args:
        fd_config: the whole configuration.
        rope_table: declare ``rope_emb`` of multimodal requests.

    Raises:
        InvalidSetting: one that is needed is missing or impossible.
    """
    longest = integer(fd_config, "model_config.max_model_len")
    multimodal = flag(fd_config, "model_config.enable_mm")
    sizes = FieldSizes(
        max_num_seqs=integer(fd_config, "scheduler_config.max_num_seqs"),
        max_model_len=longest,
        max_chunk_tokens=max_chunk_tokens(fd_config),
        vocab_size=integer(fd_config, "model_config.vocab_size"),
        num_draft_tokens=num_draft_tokens(fd_config),
        num_inject_tokens=len(inject_tokens(fd_config)),
        num_blocks=len(free_blocks(fd_config)),
        multimodal=multimodal,
        heavy_residency="rows",
        whole_rows=True,
        rope_table=_rope_shape(fd_config, longest) if rope_table and multimodal else None,
    )
    return replace(sizes, **_given(fd_config))


# Any: integers and numbers, by the field of FieldSizes
def _given(fd_config: object) -> dict[str, Any]:
    """Optional settings that the configuration has."""
    found: dict[str, Any] = {
        name: integer(fd_config, path)
        for name, path in _COUNTS.items()
        if look_up(fd_config, path) is not None
    }
    for name, path, least in (
        ("enc_dec_block_num", "cache_config.enc_dec_block_num", 0),
        ("min_length", "model_config.min_length", 0),
        ("pad_token_id", "model_config.pad_token_id", None),
    ):
        if look_up(fd_config, path) is not None:
            found[name] = integer(fd_config, path, least=least)
    for name in _NUMBERS:
        if look_up(fd_config, f"model_config.{name}") is not None:
            found[name] = number(fd_config, f"model_config.{name}", 0)
    return found


def free_blocks(fd_config: object) -> list[int]:
    """KV blocks of ``free_list``: descending ids of those that no one reserved.

    Raises:
        InvalidSetting: no number of blocks, or none of them is free.
    """
    num_blocks = integer(fd_config, "cache_config.total_block_num")
    ratio = number(fd_config, "cache_config.kv_cache_ratio", 0.75)
    first = int(num_blocks * ratio)
    if not 0 <= first < num_blocks:
        raise InvalidSetting(
            f"got {ratio}, which leaves none of {num_blocks} KV blocks free; expected 0 or more,"
            " and less than 1",
            setting="cache_config.kv_cache_ratio",
        )
    return list(range(num_blocks - 1, first - 1, -1))


# Any: the array type is the backend's own business
def paddle_backend() -> Backend[Any, Any]:
    """Make the backend of Paddle's current place: host memory shared with numpy, or a device.

    Raises:
        MissingDependency: Paddle is not installed.
    """
    backend = make_backend("paddle")  # says what to install
    from paddle import get_device

    return backend if get_device() == "cpu" else make_backend("paddle-tensor")


def _rope_shape(fd_config: object, max_model_len: int) -> tuple[int, ...]:
    """Table of one request: all of the head for rotations by halves, else half of it."""
    head_dim = integer(fd_config, "model_config.head_dim")
    model_type = text(fd_config, "model_config.model_type")
    by_halves = "qwen" in model_type or "paddleocr" in model_type
    return 2, 1, max_model_len, 1, head_dim if by_halves else head_dim // 2
