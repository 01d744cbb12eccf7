"""FastDeploy's configuration, read by duck typing: any object or mapping with these names works."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any, TypeVar, cast

from vlbatch.backends import Backend, make_backend
from vlbatch.errors import InvalidSetting
from vlbatch.integrations.fastdeploy.fields import FieldSizes

T = TypeVar("T")

FAMILIES = {
    "qwen3_vl": "qwen3_vl", "qwen2_5_vl": "qwen2_5_vl", "qwen2_vl": "qwen2_vl",
    "ernie4_5_moe_vl": "ernie4_5_vl", "ernie4_5_vl": "ernie4_5_vl",
    "paddleocr_vl": "qwen2_vl",
}  # fmt: skip
"""Part of ``model_config.model_type`` -> rules of rotary positions."""


def setting(fd_config: object, path: str, default: T) -> T:
    """Read one setting, by the names of its sections and its own.

    Args:
        fd_config: the whole configuration.
        path: such as ``"model_config.vocab_size"``.
        default: where a name is missing or its value is ``None``.
    """
    found = fd_config
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else getattr(found, name, None)
        if found is None:
            return default
    return cast("T", found)


def required(fd_config: object, path: str, default: int | None = None) -> int:
    """Read one setting that must be a positive integer.

    Raises:
        InvalidSetting: missing without a default, or no positive integer.
    """
    found: object = setting(fd_config, path, default)
    if isinstance(found, bool) or not isinstance(found, Integral) or found < 1:
        raise InvalidSetting(f"got {found!r}; expected a positive integer", setting=path)
    return int(found)


def num_draft_tokens(fd_config: object) -> int:
    """Drafts of a decode: 0 without a speculative method."""
    if not setting(fd_config, "speculative_config.method", ""):
        return 0
    return required(fd_config, "speculative_config.num_speculative_tokens")


def max_chunk_tokens(fd_config: object) -> int:
    """Most tokens of one request in one step: chunks of prompts with media may be of any length."""
    longest = required(fd_config, "model_config.max_model_len")
    if setting(fd_config, "model_config.enable_mm", False):
        return longest
    return min(required(fd_config, "scheduler_config.max_num_batched_tokens", longest), longest)


def hidden_tokens(fd_config: object, sizes: FieldSizes) -> int:
    """Most tokens of a step, as the configuration has it."""
    most = required(fd_config, "scheduler_config.max_num_batched_tokens", sizes.max_tokens)
    drafts = sizes.max_num_seqs * (sizes.num_draft_tokens + 1)
    return most + setting(fd_config, "scheduler_config.max_extra_num_batched_tokens", drafts)


def cache_rows(fd_config: object) -> int:
    """Budget of the encoder cache in feature rows, 0 where none is set."""
    return max(setting(fd_config, "cache_config.max_encoder_cache", 0), 0)


def inject_tokens(fd_config: object) -> list[int]:
    """Tokens that end a thought which is too long; at least one, -1 for none."""
    return list(setting(fd_config, "model_config.think_truncate_prompt_ids", [])) or [-1]


def read_family(fd_config: object) -> str:
    """Rules of rotary positions.

    Raises:
        InvalidSetting: a multimodal model of a type that is not known here.
    """
    if not setting(fd_config, "model_config.enable_mm", False):
        return "1d"
    model_type = setting(fd_config, "model_config.model_type", "")
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

    def model(name: str, default: T) -> T:
        return setting(fd_config, f"model_config.{name}", default)

    longest = required(fd_config, "model_config.max_model_len")
    multimodal = model("enable_mm", False)
    return FieldSizes(
        max_num_seqs=required(fd_config, "scheduler_config.max_num_seqs"),
        max_model_len=longest,
        max_chunk_tokens=max_chunk_tokens(fd_config),
        vocab_size=required(fd_config, "model_config.vocab_size"),
        block_size=required(fd_config, "cache_config.block_size", 64),
        enc_dec_block_num=setting(fd_config, "cache_config.enc_dec_block_num", 2),
        num_draft_tokens=num_draft_tokens(fd_config),
        max_stop_seqs=required(fd_config, "model_config.max_stop_seqs_num", 5),
        stop_seqs_max_len=required(fd_config, "model_config.stop_seqs_max_len", 8),
        num_inject_tokens=len(inject_tokens(fd_config)),
        num_blocks=len(free_blocks(fd_config)) or 1,
        multimodal=multimodal,
        heavy_residency="rows",
        whole_rows=True,
        eos_tokens_lens=required(fd_config, "model_config.eos_tokens_lens", 1),
        rope_table=_rope_shape(fd_config, longest) if rope_table and multimodal else None,
        pad_token_id=model("pad_token_id", 0),
        top_p=model("top_p", 0.7),
        temperature=model("temperature", 0.95),
        min_length=model("min_length", 1),
        penalty_score=model("penalty_score", 1.0),
        frequency_score=model("frequency_score", 0.0),
        presence_score=model("presence_score", 0.0),
    )


def free_blocks(fd_config: object) -> list[int]:
    """KV blocks of ``free_list``: descending ids of those that no one reserved."""
    num_blocks = setting(fd_config, "cache_config.total_block_num", 1024)
    first = int(num_blocks * setting(fd_config, "cache_config.kv_cache_ratio", 0.75))
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
    head_dim = required(fd_config, "model_config.head_dim")
    model_type = setting(fd_config, "model_config.model_type", "")
    by_halves = "qwen" in model_type or "paddleocr" in model_type
    return 2, 1, max_model_len, 1, head_dim if by_halves else head_dim // 2
