"""Every name of FastDeploy's batches, with the shape, type and default that its code expects.

The tables are typed from the upstream, not derived from the declarations.
"""

from __future__ import annotations

from types import SimpleNamespace as Section
from typing import Any, TypeAlias

import numpy as np
import pytest
from exposed import dtype_of, to_host

from vlbatch import NumpyBackend
from vlbatch.errors import InvalidSetting, UnknownField
from vlbatch.integrations.fastdeploy import LAUNCH_BUFFERS, InputBatch, ProposerInputBatch

B, L, C, V, K, H, D = 3, 40, 24, 11, 2, 4, 8
BLOCKS = 5  # ceil(40 / 16) + 2
FREE = list(range(39, 29, -1))  # of 40 blocks those past the first three quarters

# Any: what numpy can broadcast
Row: TypeAlias = tuple[tuple[int, ...], str, Any]


def text(chunk: int) -> dict[str, Row]:
    """Arrays of a text-only batch: whole shape, dtype, default."""
    return {
        "token_ids_all": ((B, L), "int64", -1),
        "input_ids": ((B, chunk), "int64", 7),
        "eos_token_id": ((2, 1), "int64", 0),
        "top_p": ((B, 1), "float32", 0.5),
        "top_k": ((B, 1), "int64", 0),
        "min_p": ((B, 1), "float32", 0.0),
        "temperature": ((B, 1), "float32", 0.25),
        "penalty_score": ((B, 1), "float32", 1.5),
        "frequency_score": ((B, 1), "float32", 0.125),
        "presence_score": ((B, 1), "float32", 0.75),
        "temp_scaled_logprobs": ((B, 1), "bool", False),
        "top_p_normalized_logprobs": ((B, 1), "bool", False),
        "min_dec_len": ((B, 1), "int64", 3),
        "max_dec_len": ((B, 1), "int64", L),
        "seq_lens_this_time_buffer": ((B,), "int32", 0),
        "seq_lens_encoder": ((B,), "int32", 0),
        "seq_lens_decoder": ((B,), "int32", 0),
        "step_seq_lens_encoder": ((B, 1), "int32", 0),
        "step_seq_lens_decoder": ((B, 1), "int32", 0),
        "prompt_lens": ((B, 1), "int64", 0),
        "step_idx": ((B, 1), "int64", 0),
        "not_need_stop": ((1,), "bool", False),
        "not_need_stop_device": ((1,), "bool", False),
        "sampled_token_ids": ((B, 1), "int64", -1),
        "seq_lens_this_time_cpu": ((B, 1), "int32", 0),
        "is_block_step_cpu": ((B,), "bool", False),
        "stop_flags": ((B, 1), "bool", True),
        "bad_tokens": ((B, V), "int64", -1),
        "bad_tokens_len": ((B,), "int64", 1),
        "next_tokens": ((B, 1), "int64", -1),
        "is_block_step": ((B,), "bool", False),
        "is_chunk_step": ((B,), "bool", False),
        "encoder_block_lens": ((B,), "int32", 0),
        "step_block_list": ((B,), "int32", -1),
        "recover_block_list": ((B,), "int32", -1),
        "need_block_list": ((B,), "int32", -1),
        "step_lens": ((1,), "int32", 0),
        "recover_lens": ((1,), "int32", 0),
        "need_block_len": ((1,), "int32", 0),
        "used_list_len": ((B,), "int32", 0),
        "infer_seed": ((B, 1), "int64", 0),
        "first_token_ids": ((B, 1), "int64", -1),
        "ori_seq_lens_encoder": ((B, 1), "int32", 0),
        "system_lens": ((B, 1), "int32", 0),
        "system_ids": ((B, 1), "int32", -1),
        "generated_modality": ((B,), "int32", -1),
        "ids_remove_padding": ((B * chunk,), "int64", 0),
        "batch_id_per_token": ((B * chunk, 1), "int32", -1),
        "cu_seqlens_q": ((B + 1,), "int32", 0),
        "cu_seqlens_k": ((B + 1,), "int32", 0),
        "enable_thinking": ((B, 1), "bool", True),
        "max_think_lens": ((B, 1), "int32", -1),
        "max_reply_lens": ((B, 1), "int32", -1),
        "limit_think_status": ((B, 1), "int32", 0),
        "inject_token_ids": ((2, 1), "int64", [[8], [9]]),
        "reasoning_status": ((B, 1), "int32", 0),
        "reasoning_allowed_tokens": ((2,), "int64", [100973, 100975]),
        "block_tables": ((B, BLOCKS), "int32", -1),
        "free_list": ((10,), "int32", FREE),
        "free_list_len": ((1,), "int32", 10),
        "stop_seqs_len": ((B, 5), "int32", 0),
        "stop_seqs": ((B, 5, 8), "int64", -1),
        "mask_rollback": ((B, 1), "int32", 0),
        "preempted_idx": ((B, 1), "int32", 0),
        "last_preempted_idx": ((B, 1), "int32", 0),
        "seq_lens_kv": ((B + 8, 1), "int32", 0),
    }


SPECULATIVE: dict[str, Row] = {
    "input_ids_cpu": ((B, L), "int64", -1),
    "accept_tokens": ((B, K + 1), "int64", 0),
    "accept_num": ((B,), "int32", 0),
    "draft_tokens": ((B, K + 1), "int64", -1),
    "actual_draft_token_num": ((B,), "int32", K),
    "cu_seqlens_q_output": ((B + 1, 1), "int32", 0),
    "batch_id_per_token_output": ((B * (K + 1),), "int32", 0),
    "output_cum_offsets": ((B, 1), "int32", 0),
    "output_padding_offset": ((B * (K + 1),), "int32", 0),
    "step_draft_tokens": ((B, K + 1), "int64", -1),
    "step_seq_lens_this_time": ((B, 1), "int32", 0),
    "draft_logits": ((B * (K + 1), V), "float32", -1),
    "cu_batch_token_offset": ((B + 1,), "int32", 0),
    "seq_lens_decoder_cpu": ((B, 1), "int32", 0),
    "prompt_lens_cpu": ((B, 1), "int64", 0),
    "accept_tokens_cpu": ((B, K + 1), "int64", 0),
    "accept_num_cpu": ((B,), "int32", 0),
}
MULTIMODAL: dict[str, Row] = {
    "rope_emb": ((B, 2, 1, L, 1, D), "float32", 0),
    "attn_mask_offsets": ((B * L,), "int32", -1),
    "attn_mask_offsets_full": ((B, L), "int32", -1),
    "attn_mask_offsets_decoder": ((B, 1), "int32", -1),
}
MULTIMODAL_SPECULATIVE: dict[str, Row] = {"decode_states": ((B, K + 1), "int32", -1)}

TEXT_LISTS = {
    "top_k_list": 0, "min_p_list": 0.0, "req_ids": "", "entropy_list": [],
    "logits_processors_args": {},
}  # fmt: skip
MULTIMODAL_LISTS: dict[str, object] = {
    "image_grid_thws": [], "video_features": None, "video_grid_thws": [],
    "video_infinity_scales": [],
}  # fmt: skip

OF_TARGET = (
    "prompt_lens", "top_p", "top_k", "temperature", "eos_token_id", "penalty_score",
    "frequency_score", "presence_score", "infer_seed", "max_dec_len", "min_dec_len", "bad_tokens",
    "bad_tokens_len", "temp_scaled_logprobs", "top_p_normalized_logprobs", "accept_num",
    "accept_tokens", "draft_logits",
)  # fmt: skip
LIKE_TARGET = (
    "block_tables", "input_ids", "seq_lens_encoder", "seq_lens_decoder", "step_idx",
    "encoder_block_lens", "seq_lens_this_time_buffer", "stop_flags", "token_ids_all",
    "cu_seqlens_q_output", "batch_id_per_token_output", "ids_remove_padding",
    "batch_id_per_token", "cu_seqlens_q", "cu_seqlens_k",
)  # fmt: skip
OF_PROPOSER: dict[str, Row] = {
    "input_ids_cpu": ((B, L), "int64", -1),
    "pre_ids": ((B, L), "int64", -1),
    "not_need_stop": ((1,), "bool", False),
    "not_need_stop_device": ((1,), "bool", False),
    "target_hidden_states": ((C + 6, H), "bfloat16", 0),
    "fake_prompt_lens": ((B, 1), "int64", 0),
    "draft_tokens": ((B, K + 1), "int64", -1),
    "free_list": ((10,), "int32", FREE),
    "free_list_len": ((1,), "int32", 10),
    "is_block_step": ((B, 1), "bool", False),
    "batch_drop": ((B, 1), "bool", False),
    "used_list_len": ((B,), "int32", 0),
    "last_seq_lens_this_time": ((B,), "int32", -1),
    "input_ids_len": ((B, 1), "int64", 0),
    "first_token_hidden_states": ((B, H), "float32", -1),
    "batch_token_num": ((B,), "int32", 0),
    "next_token_num": ((B,), "int32", 0),
    "cu_batch_token_offset": ((B + 1,), "int32", 0),
    "cu_next_token_offset": ((B + 1,), "int32", 0),
    "mask_rollback": ((B, 1), "int32", 0),
    "recompute_token_num": ((B, 1), "int32", 1),
    "seq_lens_kv": ((B + 8, 1), "int32", 0),
    "decode_states": ((B, K + 1), "int32", -1),
    "attn_mask_offsets": ((B * L,), "int32", -1),
    "attn_mask_offsets_full": ((B, L), "int32", -1),
    "attn_mask_offsets_decoder": ((B, 1), "int32", -1),
}


def make_config(*, multimodal: bool, speculative: bool) -> Section:
    """A configuration in which no default is that of the code."""
    return Section(
        scheduler_config=Section(
            max_num_seqs=B, max_num_batched_tokens=C, max_extra_num_batched_tokens=6
        ),
        model_config=Section(
            max_model_len=L, vocab_size=V, hidden_size=H, head_dim=D, enable_mm=multimodal,
            model_type="qwen2_5_vl", pad_token_id=7, eos_tokens_lens=2, top_p=0.5,
            temperature=0.25, penalty_score=1.5, frequency_score=0.125, presence_score=0.75,
            min_length=3, think_truncate_prompt_ids=[8, 9], max_stop_seqs_num=5,
            stop_seqs_max_len=8,
        ),
        cache_config=Section(
            block_size=16, enc_dec_block_num=2, total_block_num=40, kv_cache_ratio=0.75
        ),
        speculative_config=Section(
            method="mtp" if speculative else None, num_speculative_tokens=K, num_model_steps=2
        ),
    )  # fmt: skip


def make_target(backend: Any, *, multimodal: bool = True, speculative: bool = True) -> InputBatch:
    batch = InputBatch(make_config(multimodal=multimodal, speculative=speculative), backend=backend)
    batch.init_share_inputs()
    return batch


def assert_rows(batch: InputBatch | ProposerInputBatch, rows: dict[str, Row]) -> None:
    """Each name, read both ways, is one array of that shape, type and content."""
    for name, (shape, dtype, default) in rows.items():
        array = batch[name]
        assert getattr(batch, name) is array, name
        assert name in batch, name
        assert tuple(array.shape) == shape, name
        assert dtype_of(array) in (dtype, "uint16" if dtype == "bfloat16" else dtype), name
        np.testing.assert_array_equal(to_host(array), np.broadcast_to(default, shape), name)


def arrays_of(batch: InputBatch | ProposerInputBatch) -> set[str]:
    """Declared names but for the map of slots, which is the library's own."""
    return {name for part in batch._parts for name in part.registry} - {"slot_of_row"}


@pytest.mark.parametrize("multimodal", [False, True])
@pytest.mark.parametrize("speculative", [False, True])
def test_target_fields(backend: Any, multimodal: bool, speculative: bool) -> None:
    """The upstream's names are there, none but them, and those of another mode are unknown."""
    batch = make_target(backend, multimodal=multimodal, speculative=speculative)
    modes = {
        "text": (True, text(L if multimodal else C), TEXT_LISTS),
        "speculative": (speculative, SPECULATIVE, {}),
        "multimodal": (multimodal, MULTIMODAL, MULTIMODAL_LISTS),
        "both": (multimodal and speculative, MULTIMODAL_SPECULATIVE, {}),
    }
    expected: set[str] = set()
    for is_on, rows, lists in modes.values():
        if is_on:
            assert_rows(batch, rows)
            for name in lists:
                assert batch[name] == [None] * B
                assert getattr(batch, name) is batch[name]
            expected |= rows.keys() | lists.keys()
    assert arrays_of(batch) == expected

    unknown = SPECULATIVE.keys() | MULTIMODAL.keys() | MULTIMODAL_LISTS.keys()
    for name in unknown - expected - {"rope_emb"}:
        assert name not in batch
        with pytest.raises(UnknownField, match=f"no '{name}' here"):
            batch[name]
    for name in (*LAUNCH_BUFFERS, "caches", "logits_processors"):
        assert batch[name] is None
        assert name not in batch
    if not multimodal:
        assert batch["rope_emb"] is None, "the runner's own table, one for all"


def test_target_views(backend: Any) -> None:
    """Names that follow from the requests read as the upstream's before the first request."""
    batch = make_target(backend)
    assert tuple(batch.seq_lens_this_time.shape) == (0,)
    assert batch.image_features is None
    assert batch.image_features_list == [-1] * B
    assert dict(batch.index_to_batch_id) == {}
    assert (batch.num_running_requests, batch.running_requests_ids) == (0, range(0))
    assert batch.enable_pd_reorder is False


def test_defaults_of_a_request(backend: Any) -> None:
    """A newcomer's lists hold what the upstream gives every row, mutable ones of its own."""
    batch = make_target(backend)
    rows = [batch.add(batch_id, prompt_len=5) for batch_id in (4, 9)]
    for name, default in {**TEXT_LISTS, **MULTIMODAL_LISTS}.items():
        first, second = (batch[name][row] for row in rows)
        assert first == second == default, name
        assert first is not second or not isinstance(default, list | dict), name
        assert batch[name][2] is None


def test_proposer_fields(backend: Any) -> None:
    """The draft model's names: the target's very arrays, arrays like them, and its own."""
    target = make_target(backend)
    proposer = ProposerInputBatch(target.fd_config, target)
    proposer.init_share_inputs()
    rows = {**text(L), **SPECULATIVE}

    assert_rows(proposer, OF_PROPOSER)
    assert_rows(proposer, {name: rows[name] for name in (*OF_TARGET, *LIKE_TARGET)})
    for name in (*OF_TARGET, "rope_emb"):
        assert proposer[name] is target[name], name
    for name in LIKE_TARGET:
        assert proposer[name] is not target[name], name
    assert proposer["base_model_draft_tokens"] is target["draft_tokens"]
    assert {*OF_TARGET, *LIKE_TARGET, *OF_PROPOSER, "rope_emb"} <= arrays_of(proposer)
    assert proposer["substep"] == 0
    for name in (*LAUNCH_BUFFERS, "caches"):
        assert proposer[name] is None


def test_proposer_of_a_text_model(backend: Any) -> None:
    """Without media there is no mask of media, and the rotary table is the runner's own."""
    target = make_target(backend, multimodal=False)
    proposer = ProposerInputBatch(target.fd_config, target)
    proposer.init_share_inputs()

    assert "attn_mask_offsets" not in proposer
    assert "decode_states" not in proposer
    assert proposer["rope_emb"] is None
    assert tuple(proposer["input_ids"].shape) == (B, C)


ON_HOST = {
    "sampled_token_ids", "seq_lens_this_time_cpu", "is_block_step_cpu", "is_chunk_step",
    "not_need_stop", "preempted_idx", "last_preempted_idx", "input_ids_cpu",
    "seq_lens_decoder_cpu", "prompt_lens_cpu", "accept_tokens_cpu", "accept_num_cpu",
}  # fmt: skip


def test_fields_in_host_memory(backend: Any) -> None:
    """Beside a device both batches have the upstream's host fields on the host, else no part."""
    target = make_target(backend)
    proposer = ProposerInputBatch(target.fd_config, target)
    proposer.init_share_inputs()
    hosted = [[set(part.registry) for part in each._parts[1:]] for each in (target, proposer)]

    if backend.on_host:
        assert hosted == [[], []]
    else:
        assert hosted == [[ON_HOST], [{"input_ids_cpu", "not_need_stop", "input_ids_len"}]]


class Elsewhere(NumpyBackend):
    """A user's own backend of a device."""

    name = "elsewhere"
    on_host = False


def test_a_backend_of_ones_own() -> None:
    """Which arrays go beside another library's device cannot be guessed: it is refused or given."""
    config = make_config(multimodal=True, speculative=True)
    batch = InputBatch(config, backend=Elsewhere())
    with pytest.raises(InvalidSetting, match="elsewhere") as caught:
        batch.init_share_inputs()
    assert caught.value.setting == "host_backend"
    assert "top_k" not in batch

    target = InputBatch(config, backend=Elsewhere(), host_backend="numpy")
    target.init_share_inputs()
    proposer = ProposerInputBatch(config, target)
    proposer.init_share_inputs()
    assert_rows(target, {name: text(L)[name] for name in ON_HOST & text(L).keys()})
    assert {"input_ids_cpu", "not_need_stop", "input_ids_len"} == set(proposer._parts[1].registry)
