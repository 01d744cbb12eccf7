"""FastDeploy's batch fields as declarations: names, shapes, types, defaults and places.

Facts of the upstream's ``InputBatch`` (several public commits). What differs on purpose
- Fields that only look per-row there are declared as what they hold: cumulative offsets and
  token-level buffers are rebuilt, lists of row numbers are remapped, ``draft_logits`` is k + 1
  rows a request.
- ``rope_emb`` of multimodal requests is a field only on request (``rope_table``): positions are
  runs and a delta.
- Fields that the upstream forgets to move (``req_ids``, ``entropy_list``,
  ``logits_processors_args``, ``max_reply_lens``, ``generated_modality``) are ordinary fields.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vlbatch.fields import (
    Field,
    batch_global,
    cumulative,
    host,
    packed,
    per_draft,
    ragged,
    row,
    row_valued,
)
from vlbatch.fields.spec import OnPreempt, Residency
from vlbatch.order import DECODE, BatchOrder, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSizes:
    """Extents of the fields.

    Attributes:
        max_num_seqs: requests.
        max_model_len: tokens of a request.
        max_chunk_tokens: tokens of a request in one step.
        vocab_size: token ids.
        block_size: tokens a KV block.
        enc_dec_block_num: blocks reserved past the longest request.
        num_draft_tokens: k of speculative decoding, 0 without.
        max_stop_seqs: stop sequences of a request.
        stop_seqs_max_len: tokens of a stop sequence.
        num_blocks: KV blocks of the engine that are free at the start.
        multimodal: declare the fields of vision-language models too.
        heavy_residency: where wide fields and Python objects are; ``"rows"`` is in batch order, as
            upstream.
        whole_rows: wide fields have no valid length and move whole, for runners that write them
            by row and say nothing of lengths.
        eos_tokens_lens: end tokens of the model.
        num_inject_tokens: tokens that end a thought which is too long.
        rope_table: shape of one request's rotary table, ``None`` for none: positions are runs.
        pad_token_id, top_p, temperature, min_length, penalty_score, frequency_score,
        presence_score: defaults of the model.
    """

    max_num_seqs: int
    max_model_len: int
    max_chunk_tokens: int
    vocab_size: int
    block_size: int = 64
    enc_dec_block_num: int = 2
    num_draft_tokens: int = 0
    max_stop_seqs: int = 5
    stop_seqs_max_len: int = 8
    num_blocks: int = 1024
    multimodal: bool = False
    heavy_residency: Residency = "slots"
    whole_rows: bool = False
    eos_tokens_lens: int = 1
    num_inject_tokens: int = 1
    rope_table: tuple[int, ...] | None = None
    pad_token_id: int = 0
    top_p: float = 0.7
    temperature: float = 0.95
    min_length: int = 1
    penalty_score: float = 1.0
    frequency_score: float = 0.0
    presence_score: float = 0.0

    @property
    def max_tokens(self) -> int:
        """Tokens of a step."""
        return self.max_num_seqs * self.max_chunk_tokens

    def wide(
        self,
        name: str,
        width: int,
        dtype: str = "int64",
        *,
        default: object = 0,
        on_preempt: OnPreempt = "keep",
    ) -> Field:
        """Declare a wide row, with or without a valid length."""
        if self.whole_rows:
            return row(
                name,
                (width,),
                dtype,
                default=default,
                residency=self.heavy_residency,
                layout="contiguous",
                on_preempt=on_preempt,
            )
        return ragged(
            name,
            width,
            dtype,
            default=default,
            residency=self.heavy_residency,
            on_preempt=on_preempt,
        )


def declare_fields(sizes: FieldSizes) -> list[Field]:
    """The declared fields of a batch of these sizes."""
    fields = _text(sizes)
    if sizes.num_draft_tokens:
        fields += _speculative(sizes)
    if sizes.multimodal:
        fields += _multimodal(sizes)
    return fields


def _text(s: FieldSizes) -> list[Field]:
    heavy = s.heavy_residency
    max_blocks = -(-s.max_model_len // s.block_size) + s.enc_dec_block_num
    return [
        # wide
        s.wide("token_ids_all", s.max_model_len, default=-1),
        s.wide("input_ids", s.max_chunk_tokens, default=s.pad_token_id),
        s.wide("bad_tokens", s.vocab_size, default=-1),
        s.wide("block_tables", max_blocks, "int32", default=-1, on_preempt="reset"),
        # sampling
        row("top_p", (1,), "float32", default=s.top_p),
        row("top_k", (1,), "int64"),
        host("top_k_list", default=0, residency=heavy),
        row("min_p", (1,), "float32"),
        host("min_p_list", default=0.0, residency=heavy),
        row("temperature", (1,), "float32", default=s.temperature),
        row("penalty_score", (1,), "float32", default=s.penalty_score),
        row("frequency_score", (1,), "float32", default=s.frequency_score),
        row("presence_score", (1,), "float32", default=s.presence_score),
        row("temp_scaled_logprobs", (1,), "bool"),
        row("top_p_normalized_logprobs", (1,), "bool"),
        row("min_dec_len", (1,), "int64", default=s.min_length),
        row("max_dec_len", (1,), "int64", default=s.max_model_len),
        row("infer_seed", (1,), "int64"),
        row("bad_tokens_len", (), "int64", default=1),
        row("stop_seqs_len", (s.max_stop_seqs,), "int32"),
        row("stop_seqs", (s.max_stop_seqs, s.stop_seqs_max_len), "int64", default=-1),
        # lengths and progress
        row("seq_lens_this_time_buffer", (), "int32", on_preempt="reset"),
        row("seq_lens_encoder", (), "int32", on_preempt="reset"),
        row("seq_lens_decoder", (), "int32"),
        row("step_seq_lens_encoder", (1,), "int32"),
        row("step_seq_lens_decoder", (1,), "int32"),
        row("prompt_lens", (1,), "int64"),
        row("step_idx", (1,), "int64"),
        row("sampled_token_ids", (1,), "int64", default=-1),
        row("seq_lens_this_time_cpu", (1,), "int32"),
        row("is_block_step_cpu", (), "bool"),
        row("stop_flags", (1,), "bool", default=True),
        row("next_tokens", (1,), "int64", default=-1),
        row("is_block_step", (), "bool"),
        row("is_chunk_step", (), "bool"),
        row("encoder_block_lens", (), "int32"),
        row("used_list_len", (), "int32"),
        row("first_token_ids", (1,), "int64", default=-1),
        row("ori_seq_lens_encoder", (1,), "int32"),
        row("system_lens", (1,), "int32"),
        row("system_ids", (1,), "int32", default=-1),
        row("preempted_idx", (1,), "int32"),
        row("last_preempted_idx", (1,), "int32"),
        row("mask_rollback", (1,), "int32"),
        row("generated_modality", (), "int32", default=-1),
        row_valued("step_block_list", (s.max_num_seqs,), whole=True),
        row_valued("recover_block_list", (s.max_num_seqs,), whole=True),
        row_valued("need_block_list", (s.max_num_seqs,), whole=True),
        # thinking
        row("enable_thinking", (1,), "bool", default=True),
        row("max_think_lens", (1,), "int32", default=-1),
        row("max_reply_lens", (1,), "int32", default=-1),
        row("limit_think_status", (1,), "int32"),
        row("reasoning_status", (1,), "int32"),
        # host objects
        host("req_ids", default="", residency=heavy),
        host("entropy_list", default=list, residency=heavy),
        host("logits_processors_args", default=dict, residency=heavy),
        # whole batch
        batch_global("eos_token_id", (s.eos_tokens_lens, 1)),
        batch_global("not_need_stop", (1,), "bool"),
        batch_global("not_need_stop_device", (1,), "bool"),
        batch_global("step_lens", (1,), "int32"),
        batch_global("recover_lens", (1,), "int32"),
        batch_global("need_block_len", (1,), "int32"),
        batch_global("free_list", (s.num_blocks,), "int32"),
        batch_global("free_list_len", (1,), "int32"),
        batch_global("inject_token_ids", (s.num_inject_tokens, 1)),
        batch_global("reasoning_allowed_tokens", (2,)),
        batch_global("seq_lens_kv", (s.max_num_seqs + 8, 1), "int32"),
        # rebuilt each step
        packed("ids_remove_padding", (s.max_tokens,)),
        packed(
            "batch_id_per_token", (s.max_tokens, 1), "int32",
            default=-1, rebuild=lambda order: order.row_of_token[:, np.newaxis],
        ),
        cumulative("cu_seqlens_q", lambda order: order.scheduled),
        cumulative("cu_seqlens_k", lambda order: order.scheduled + order.computed),
    ]  # fmt: skip


HOST_FIELDS = frozenset(
    {
        "sampled_token_ids", "seq_lens_this_time_cpu", "is_block_step_cpu", "is_chunk_step",
        "not_need_stop", "preempted_idx", "last_preempted_idx", "input_ids_cpu", "input_ids_len",
        "seq_lens_decoder_cpu", "prompt_lens_cpu", "accept_tokens_cpu", "accept_num_cpu",
    }
)  # fmt: skip
"""Arrays, of the target and of the draft model, that stay in host memory beside a device."""


def _speculative(s: FieldSizes) -> list[Field]:
    heavy = s.heavy_residency
    return [
        s.wide("input_ids_cpu", s.max_model_len, default=-1),
        per_draft("accept_tokens"),
        row("accept_num", (), "int32"),
        per_draft("draft_tokens", default=-1),
        row("actual_draft_token_num", (), "int32", default=s.num_draft_tokens),
        per_draft("step_draft_tokens", default=-1),
        row("step_seq_lens_this_time", (1,), "int32"),
        per_draft(
            "draft_logits", (s.vocab_size,), "float32", default=-1, residency=heavy, flat=True
        ),
        row("seq_lens_decoder_cpu", (1,), "int32"),
        row("prompt_lens_cpu", (1,), "int64"),
        per_draft("accept_tokens_cpu"),
        row("accept_num_cpu", (), "int32"),
        cumulative("cu_batch_token_offset", num_logits),
        *output_offsets(s),
    ]


def output_offsets(s: FieldSizes) -> list[Field]:
    """Where the logits of each row start: a prompt has one, a decode one a token."""
    num_drafted = s.max_num_seqs * (s.num_draft_tokens + 1)
    return [
        cumulative("cu_seqlens_q_output", num_logits, shape=(1,)),
        packed("batch_id_per_token_output", (num_drafted,), "int32"),
        packed("output_cum_offsets", (s.max_num_seqs, 1), "int32"),
        packed("output_padding_offset", (num_drafted,), "int32"),
    ]


def num_logits(order: BatchOrder) -> IntArray:
    """Row -> rows of logits: one of a prompt, finished or not, and all of a decode."""
    if order.regions.decode == order.num_reqs:
        return order.scheduled
    return np.where(order.classes == DECODE, order.scheduled, 1)


def _multimodal(s: FieldSizes) -> list[Field]:
    heavy = s.heavy_residency
    return [
        host("image_grid_thws", default=list, residency=heavy),
        host("video_features", residency=heavy),
        host("video_grid_thws", default=list, residency=heavy),
        host("video_infinity_scales", default=list, residency=heavy),
        row("attn_mask_offsets_decoder", (1,), "int32", default=-1),
        s.wide("attn_mask_offsets_full", s.max_model_len, "int32", default=-1),
        packed("attn_mask_offsets", (s.max_num_seqs * s.max_model_len,), "int32", default=-1),
        *([per_draft("decode_states", dtype="int32", default=-1)] if s.num_draft_tokens else []),
        *([row("rope_emb", s.rope_table, "float32", residency=heavy)] if s.rope_table else []),
    ]
