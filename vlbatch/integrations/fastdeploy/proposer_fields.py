"""The draft model's fields: which are its own, the target's, or copied from it.

Differs on purpose from the upstream: every field that is per request follows its request, the
rotary table is the target's, and what is per token or for the whole batch never moves.
"""

from __future__ import annotations

from vlbatch.batch import DraftField, copied, shared
from vlbatch.fields import Field, batch_global, cumulative, packed, per_draft, row
from vlbatch.integrations.fastdeploy.fields import FieldSizes, output_offsets

SHARED = (
    "prompt_lens", "top_p", "top_k", "temperature", "eos_token_id", "penalty_score",
    "frequency_score", "presence_score", "infer_seed", "max_dec_len", "min_dec_len", "bad_tokens",
    "bad_tokens_len", "temp_scaled_logprobs", "top_p_normalized_logprobs", "accept_num",
    "accept_tokens", "draft_logits",
)  # fmt: skip

COPIED = (
    "block_tables", "input_ids", "seq_lens_encoder", "seq_lens_decoder", "step_idx",
    "encoder_block_lens", "seq_lens_this_time_buffer", "stop_flags", "token_ids_all",
)  # fmt: skip


def targets_fields(s: FieldSizes) -> dict[str, DraftField]:
    """Fields of the target that a proposer shares or copies, by name."""
    names = [*SHARED, *(["rope_emb"] if s.rope_table else [])]
    return {name: shared(name) for name in names} | {name: copied(name) for name in COPIED}


def declare_draft_fields(
    s: FieldSizes, *, hidden_size: int, num_model_steps: int, max_tokens: int
) -> list[Field]:
    """A proposer's own fields.

    Args:
        s: extents of the target's fields.
        hidden_size: columns of the target's hidden states.
        num_model_steps: modules of the draft model.
        max_tokens: tokens of a step of the target.
    """
    fields = [
        s.wide("input_ids_cpu", s.max_model_len, default=-1),
        s.wide("pre_ids", s.max_model_len, default=-1),
        row("fake_prompt_lens", (1,)),
        per_draft("draft_tokens", default=-1),
        row("is_block_step", (1,), "bool"),
        row("batch_drop", (1,), "bool"),
        row("used_list_len", (), "int32"),
        row("last_seq_lens_this_time", (), "int32", default=-1),
        row("input_ids_len", (1,)),
        row(
            "first_token_hidden_states", (hidden_size,), "float32", default=-1, layout="contiguous"
        ),
        row("batch_token_num", (), "int32"),
        row("next_token_num", (), "int32"),
        row("mask_rollback", (1,), "int32"),
        row("recompute_token_num", (1,), "int32", default=num_model_steps - 1),
        packed("target_hidden_states", (max_tokens, hidden_size), "bfloat16"),
        packed("ids_remove_padding", (s.max_tokens,)),
        packed("batch_id_per_token", (s.max_tokens, 1), "int32", default=-1),
        packed("cu_batch_token_offset", (s.max_num_seqs + 1,), "int32"),
        packed("cu_next_token_offset", (s.max_num_seqs + 1,), "int32"),
        cumulative("cu_seqlens_q", lambda order: order.scheduled),
        cumulative("cu_seqlens_k", lambda order: order.scheduled + order.computed),
        *output_offsets(s),
        batch_global("not_need_stop", (1,), "bool"),
        batch_global("not_need_stop_device", (1,), "bool"),
        batch_global("free_list", (s.num_blocks,), "int32"),
        batch_global("free_list_len", (1,), "int32"),
        batch_global("seq_lens_kv", (s.max_num_seqs + 8, 1), "int32"),
    ]
    if s.multimodal:
        fields += [
            per_draft("decode_states", dtype="int32", default=-1),
            packed("attn_mask_offsets", (s.max_num_seqs * s.max_model_len,), "int32", default=-1),
            s.wide("attn_mask_offsets_full", s.max_model_len, "int32", default=-1),
            row("attn_mask_offsets_decoder", (1,), "int32", default=-1),
        ]
    return fields
