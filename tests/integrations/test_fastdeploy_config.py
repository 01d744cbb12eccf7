"""The configuration is read by its names alone, and what lacks or contradicts is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vlbatch.errors import InvalidSetting
from vlbatch.integrations.fastdeploy import InputBatch, ProposerInputBatch

TEXT: dict[str, dict[str, Any]] = {
    "scheduler_config": {"max_num_seqs": 4, "max_num_batched_tokens": 24},
    "model_config": {"max_model_len": 40, "vocab_size": 11},
    "cache_config": {"total_block_num": 16},
    "speculative_config": {"method": None},
}
MULTIMODAL = {
    **TEXT,
    "model_config": {
        **TEXT["model_config"],
        "enable_mm": True,
        "model_type": "qwen2_5_vl",
        "head_dim": 8,
        "hidden_size": 4,
    },
}


def namespace(config: dict[str, dict[str, Any]]) -> SimpleNamespace:
    """The same as objects."""
    return SimpleNamespace(**{name: SimpleNamespace(**part) for name, part in config.items()})


def changed(config: dict[str, dict[str, Any]], path: str, value: object) -> Any:
    """A configuration with one other value; ``...`` takes it out."""
    section, name = path.split(".")
    part = {k: v for k, v in config[section].items() if k != name}
    return {**config, section: part if value is ... else {**part, name: value}}


def made(config: object, **settings: Any) -> InputBatch:
    batch = InputBatch(config, backend="numpy", **settings)
    batch.init_share_inputs()
    return batch


@pytest.mark.parametrize("config", [TEXT, namespace(TEXT)])
def test_the_least_of_a_text_model(config: object) -> None:
    """Six settings are enough for text, in mappings or in objects; the rest has defaults."""
    batch = made(config)
    assert batch["input_ids"].shape == (4, 24)
    assert batch["block_tables"].shape == (4, 1 + 2)
    assert "draft_tokens" not in batch
    assert "image_grid_thws" not in batch
    assert batch.vl.family == "1d"
    batch.add(7, prompt_len=5)
    batch["seq_lens_encoder"][0] = batch["seq_lens_this_time_buffer"][0] = 5
    batch.condense()
    assert batch.positions().tolist() == [[0, 1, 2, 3, 4]]
    assert batch.fd_config is config


def test_mixed_mappings_and_objects() -> None:
    """Sections may be mappings in an object, or objects in a mapping."""
    assert made(SimpleNamespace(**TEXT)).sizes == made(vars(namespace(TEXT))).sizes


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("scheduler_config.max_num_seqs", ...),
        ("scheduler_config.max_num_seqs", 0),
        ("scheduler_config.max_num_seqs", "8"),
        ("scheduler_config.max_num_batched_tokens", -1),
        ("model_config.max_model_len", ...),
        ("model_config.max_model_len", True),
        ("model_config.vocab_size", None),
        ("cache_config.block_size", 0),
        ("model_config.eos_tokens_lens", 0),
        ("model_config.max_stop_seqs_num", 0),
        ("model_config.stop_seqs_max_len", 1.5),
        ("cache_config.total_block_num", ...),
        ("cache_config.total_block_num", 0),
    ],
)
@pytest.mark.parametrize("form", [dict, namespace])
def test_impossible_settings(path: str, value: object, form: Any) -> None:
    """What is missing or no count is refused at once, by its path."""
    with pytest.raises(InvalidSetting, match="expected a positive integer") as caught:
        InputBatch(form(changed(TEXT, path, value)), backend="numpy")
    assert caught.value.setting == path


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("cache_config.max_encoder_cache", "8", "an integer"),
        ("cache_config.max_encoder_cache", True, "an integer"),
        ("cache_config.enc_dec_block_num", -1, "at least 0"),
        ("cache_config.kv_cache_ratio", "0.5", "a number"),
        ("cache_config.kv_cache_ratio", float("nan"), "a number"),
        ("cache_config.kv_cache_ratio", -0.5, "less than 1"),
        ("cache_config.kv_cache_ratio", 1.5, "less than 1"),
        ("cache_config.kv_cache_ratio", 1.0, "less than 1"),
        ("model_config.enable_mm", "yes", "True or False"),
        ("model_config.model_type", 7, "text"),
        ("model_config.top_p", "0.5", "a number"),
        ("model_config.temperature", True, "a number"),
        ("model_config.min_length", 0.5, "at least 0"),
        ("model_config.pad_token_id", "0", "an integer"),
        ("model_config.hidden_size", 4.0, "a positive integer"),
        ("model_config.think_truncate_prompt_ids", "ab", "a list of token ids"),
        ("model_config.think_truncate_prompt_ids", [1.5], "a list of token ids"),
        ("model_config.vision_config", {"tokens_per_second": "2"}, "a number"),
    ],
)
def test_settings_of_another_type(path: str, value: object, expected: str) -> None:
    """A setting of another type is refused when the batch is made, not converted or used later."""
    with pytest.raises(InvalidSetting, match=expected) as caught:
        InputBatch(changed(MULTIMODAL, path, value), backend="numpy")
    assert (caught.value.setting or "").startswith(path)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"family": "llama"}, "family"),
        ({"encoder_cache_rows": 0}, "encoder_cache_rows"),
        ({"encoder_cache_rows": "8"}, "encoder_cache_rows"),
    ],
)
def test_arguments_are_checked_at_once(settings: dict[str, Any], named: str) -> None:
    """What ``init_share_inputs`` could not use is refused before it, by its name."""
    with pytest.raises(InvalidSetting) as caught:
        InputBatch(TEXT, backend="numpy", **settings)
    assert caught.value.setting == named


def test_a_refused_init_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ``init_share_inputs`` that fails half way can be called again."""
    batch = InputBatch(TEXT, backend="numpy")

    def refuse(*args: object, **kwargs: object) -> None:
        raise InvalidSetting("not now")

    with monkeypatch.context() as patch:
        patch.setattr("vlbatch.integrations.fastdeploy.input_batch.VLBatch", refuse)
        with pytest.raises(InvalidSetting, match="not now"):
            batch.init_share_inputs()
    assert "top_k" not in batch
    batch.init_share_inputs()
    assert "top_k" in batch


def test_no_section_at_all() -> None:
    """An empty configuration names the first thing that it lacks."""
    with pytest.raises(InvalidSetting) as caught:
        InputBatch({}, backend="numpy")
    assert caught.value.setting == "model_config.max_model_len"


def test_drafts_need_a_number() -> None:
    """A speculative method without a number of drafts is refused, by the proposer's too."""
    config = changed(TEXT, "speculative_config.method", "mtp")
    with pytest.raises(InvalidSetting) as caught:
        InputBatch(config, backend="numpy")
    assert caught.value.setting == "speculative_config.num_speculative_tokens"

    config = changed(config, "speculative_config.num_speculative_tokens", 2)
    target = made(config)
    assert target["draft_tokens"].shape == (4, 3)
    with pytest.raises(InvalidSetting) as caught:
        ProposerInputBatch(config, target).init_share_inputs()
    assert caught.value.setting == "model_config.hidden_size"


@pytest.mark.parametrize(
    ("model_type", "family", "rope_width"),
    [
        ("qwen2_vl", "qwen2_vl", 8),
        ("qwen2_5_vl", "qwen2_5_vl", 8),
        ("qwen3_vl", "qwen3_vl", 8),
        ("qwen3_vl_moe", "qwen3_vl", 8),
        ("paddleocr_vl", "qwen2_vl", 8),
        ("ernie4_5_moe_vl", "ernie4_5_vl", 4),
        ("ernie4_5_vl", "ernie4_5_vl", 4),
    ],
)
def test_model_types(model_type: str, family: str, rope_width: int) -> None:
    """The model's type gives the rules of positions and the width of its rotary table."""
    batch = made(changed(MULTIMODAL, "model_config.model_type", model_type))
    assert batch.vl.family == family
    assert batch["rope_emb"].shape == (4, 2, 1, 40, 1, rope_width)


@pytest.mark.parametrize("model_type", ["llava", "", ...])
def test_an_unknown_multimodal_model(model_type: object) -> None:
    """Positions of another model are not guessed: its type is refused unless a family is given."""
    config = changed(MULTIMODAL, "model_config.model_type", model_type)
    with pytest.raises(InvalidSetting, match="expected a name with one of qwen3_vl") as caught:
        InputBatch(config, backend="numpy")
    assert caught.value.setting == "model_config.model_type"
    assert made(config, family="qwen2_vl").vl.family == "qwen2_vl"


def test_without_a_rotary_table() -> None:
    """Kernels that take positions need no table, and no size of a head."""
    config = changed(MULTIMODAL, "model_config.head_dim", ...)
    with pytest.raises(InvalidSetting) as caught:
        InputBatch(config, backend="numpy")
    assert caught.value.setting == "model_config.head_dim"
    batch = made(config, rope_table=False)
    assert batch["rope_emb"] is None
    batch["rope_emb"] = "the runner's own"
    assert batch["rope_emb"] == "the runner's own"


def test_chunks() -> None:
    """Chunks of text are bounded by the step; those with media may be as long as a request."""
    assert made(TEXT).sizes.max_chunk_tokens == 24
    wide = changed(TEXT, "scheduler_config.max_num_batched_tokens", 9999)
    assert made(wide).sizes.max_chunk_tokens == 40
    assert made(MULTIMODAL).sizes.max_chunk_tokens == 40


def test_free_blocks() -> None:
    """The free list has the blocks that the engine has and nobody reserved, no invented ones."""
    batch = made(changed(TEXT, "cache_config.kv_cache_ratio", 0.5))
    assert batch["free_list"].tolist() == [15, 14, 13, 12, 11, 10, 9, 8]
    assert batch["free_list_len"].tolist() == [8]
    assert batch.sizes.num_blocks == 8


def test_tokens_per_second() -> None:
    """Positions of timed videos take the vision model's own rate."""
    config = changed(MULTIMODAL, "model_config.vision_config", {"tokens_per_second": 4})
    assert made(config).vl.tokens_per_second == 4
    assert made(MULTIMODAL).vl.tokens_per_second == 2.0


def test_paddle_by_default() -> None:
    """Without a backend fields are tensors of Paddle's current place."""
    paddle = pytest.importorskip("paddle")
    batch = InputBatch(TEXT)
    batch.init_share_inputs()
    assert isinstance(batch["top_p"], paddle.Tensor)
    assert batch.backend.name.startswith("paddle")
