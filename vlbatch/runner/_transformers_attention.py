"""Paged attention as a function of transformers' attention registry, over buffers that never move.

Importing this module imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class StepBuffers:
    """Inputs of a text forward at fixed addresses; a forward of ``n`` tokens reads the first n.

    Attributes:
        embeddings: float32 ``[max_tokens, hidden]``, features merged in.
        positions: int64 ``[3, max_tokens]``.
        kv_slots: int64 ``[max_tokens]`` where each token's key and value go.
        context: int64 ``[max_tokens, max_context]`` KV slots that a token attends to.
        visible: bool ``[max_tokens, max_context]`` which of them exist.
    """

    embeddings: Tensor
    positions: Tensor
    kv_slots: Tensor
    context: Tensor
    visible: Tensor

    @classmethod
    def zeros(
        cls, max_tokens: int, max_context: int, hidden_size: int, device: torch.device
    ) -> StepBuffers:
        """Allocate them, once."""

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        return cls(
            embeddings=torch.zeros(max_tokens, hidden_size, device=device),
            positions=ints(3, max_tokens),
            kv_slots=ints(max_tokens),
            context=ints(max_tokens, max_context),
            visible=torch.zeros(max_tokens, max_context, dtype=torch.bool, device=device),
        )

    def named(self) -> dict[str, Tensor]:
        """Name -> tensor."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class PagedStep:
    """What the attention function needs of a step; views of the buffers.

    Attributes:
        keys: ``[layers, kv_slots + 1, kv_heads, head_dim]``, the last slot for pads.
        values: the same.
        kv_slots, context, visible: see ``StepBuffers``, first ``n`` tokens.
    """

    keys: Tensor
    values: Tensor
    kv_slots: Tensor
    context: Tensor
    visible: Tensor

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, buffers: StepBuffers, num_tokens: int) -> PagedStep:
        """The first tokens of the buffers, over these keys and values."""
        n = num_tokens
        return cls(keys, values, buffers.kv_slots[:n], buffers.context[:n], buffers.visible[:n])


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 (the registry's signature)
    scaling: float,
    paged_step: PagedStep,
    **_: object,
) -> tuple[Tensor, None]:
    """Write keys and values of all tokens, then let each token attend to its own context.

    Args:
        module: the attention layer; its ``layer_idx`` picks the cache.
        query: ``[1, heads, tokens, dim]``.
        key: ``[1, kv_heads, tokens, dim]``.
        value: the same.
        attention_mask: not used.
        scaling: of the scores.
        paged_step: see ``PagedStep``.

    Returns:
        ``[1, tokens, heads, dim]`` and no weights.
    """
    keys, values = paged_step.keys[module.layer_idx], paged_step.values[module.layer_idx]
    keys[paged_step.kv_slots] = key[0].transpose(0, 1)
    values[paged_step.kv_slots] = value[0].transpose(0, 1)
    context = paged_step.context
    out = torch.nn.functional.scaled_dot_product_attention(
        query[0].transpose(0, 1).unsqueeze(2),  # [tokens, heads, 1, dim]
        keys[context].transpose(1, 2),  # [tokens, kv_heads, context, dim]
        values[context].transpose(1, 2),
        attn_mask=paged_step.visible[:, None, None],
        scale=scaling,
        enable_gqa=True,
    )
    return out.squeeze(2).unsqueeze(0), None
