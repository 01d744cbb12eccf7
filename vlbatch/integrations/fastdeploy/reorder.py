"""FastDeploy's functions that order rows, and its switch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vlbatch.integrations.fastdeploy.input_batch import InputBatch
from vlbatch.integrations.fastdeploy.proposer import ProposerInputBatch


def ids_reorder_enabled(attn_backends: Sequence[object]) -> bool:
    """Whether the first attention backend's class wants decodes before prefills."""
    return bool(attn_backends) and bool(getattr(attn_backends[0], "enable_ids_reorder", False))


def process_reorder(
    input_batch: InputBatch,
    attn_backends: Sequence[object] = (),
    proposer_batch: ProposerInputBatch | None = None,
) -> None:
    """Order the rows of a step; call it in every step, after requests were inserted and encoded.

    With an attention backend that says ``enable_ids_reorder = True`` (the first decides), or once
    ``enable_pd_reorder`` is set, decodes come before prefills; else rows stay in order of arrival
    and only holes are closed. It is one plan: each row moves at most once, the proposer with it.

    Raises:
        VlbatchError: see ``InputBatch.arrange``.
    """
    wanted = input_batch.enable_pd_reorder or ids_reorder_enabled(attn_backends)
    input_batch.arrange("two" if wanted else "arrival")
    input_batch.enable_pd_reorder = wanted
    if proposer_batch is not None:
        proposer_batch.reorder_inputs(input_batch)


def reorder_split_prefill_and_decode(input_batch: InputBatch) -> None:
    """Put decodes before prefills, and rows without tokens last; holes are closed too.

    Raises:
        VlbatchError: see ``InputBatch.arrange``.
    """
    input_batch.arrange("two")


def reorder_split_prefill_and_decode_form_index_to_batch_id(
    input_batch: ProposerInputBatch,
    target_model_input_batch: InputBatch | Mapping[int, int] | None = None,
) -> None:
    """Let a proposer follow; it has already, when its target moved.

    Raises:
        StaleOrder: see ``ProposerInputBatch.reorder_inputs``.
    """
    input_batch.reorder_inputs(target_model_input_batch)
