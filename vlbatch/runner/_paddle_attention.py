"""Paged attention as a function of PaddleFormers' attention registry.

Rules
- The step arrives as a keyword argument; nothing is kept here between calls.
- Gathers and scatters go over flat rows of ``head_dim`` with indices computed on the host: on the
  CPU a strided copy or a broadcast costs Paddle more than the arithmetic around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import paddle
from paddle.nn import functional

if TYPE_CHECKING:
    import numpy.typing as npt

    from vlbatch.runner.paged import PagedPlan, QueryGroup

Tensor: TypeAlias = "paddle.Tensor"


@dataclass(frozen=True, slots=True)
class KVCache:
    """One key and one value tensor a layer, ``[num_blocks * block_size, num_kv_heads, head_dim]``.

    Allocated once, written in place.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    num_blocks: int
    block_size: int
    num_heads: int

    @classmethod
    def empty(
        cls,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> KVCache:
        shape = [num_blocks * block_size, num_kv_heads, head_dim]
        return cls(
            keys=tuple(paddle.zeros(shape, dtype="float32") for _ in range(num_layers)),
            values=tuple(paddle.zeros(shape, dtype="float32") for _ in range(num_layers)),
            num_blocks=num_blocks,
            block_size=block_size,
            num_heads=num_heads,
        )


@dataclass(frozen=True, slots=True)
class _GroupTensors:
    """One ``QueryGroup`` as indices of flat rows; query heads are sorted by the KV head they read.

    Attributes:
        queries: int64 ``[rows * num_heads * query_len]`` rows of ``[num_heads * num_tokens]``.
        outputs: the same queries as rows of ``[num_tokens * num_heads]``.
        context: int64 ``[rows * num_kv_heads * max_context]`` rows of ``[slots * num_kv_heads]``.
        bias: float32 ``[rows, num_kv_heads, heads_per_kv * query_len, max_context]``, 0 or -inf.
    """

    queries: Tensor
    outputs: Tensor
    context: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class PagedStep:
    """What the attention of every layer needs of one step.

    Attributes:
        cache: the engine's KV cache.
        writes: int64 ``[num_kv_heads * num_tokens]`` rows of the cache that keys and values go to.
        groups: every query in exactly one of them.
    """

    cache: KVCache
    writes: Tensor
    groups: tuple[_GroupTensors, ...]

    @classmethod
    def create(cls, cache: KVCache, plan: PagedPlan) -> PagedStep:
        kv_heads = np.arange(cache.keys[0].shape[1])
        writes = plan.kv_slots * kv_heads.size + kv_heads[:, None]
        groups = (
            _group_tensors(group, plan.kv_slots.size, cache.num_heads, kv_heads)
            for group in plan.groups
        )
        return cls(cache=cache, writes=paddle.to_tensor(writes.reshape(-1)), groups=tuple(groups))


def _group_tensors(
    group: QueryGroup, num_tokens: int, num_heads: int, kv_heads: npt.NDArray[np.int64]
) -> _GroupTensors:
    rows, query_len, max_context = group.visible.shape
    heads = np.arange(num_heads)[:, None]
    tokens = group.tokens[:, None, :]
    context = group.context[:, None, :] * kv_heads.size + kv_heads[:, None]
    heads_per_kv = num_heads // kv_heads.size
    hidden = np.where(group.visible, np.float32(0), np.float32(-np.inf))[:, None, None]
    bias = np.broadcast_to(hidden, (rows, kv_heads.size, heads_per_kv, query_len, max_context))
    return _GroupTensors(
        queries=paddle.to_tensor((heads * num_tokens + tokens).reshape(-1)),
        outputs=paddle.to_tensor((tokens * num_heads + heads).reshape(-1)),
        context=paddle.to_tensor(context.reshape(-1)),
        bias=paddle.to_tensor(bias.reshape(rows, kv_heads.size, -1, max_context)),
    )


def paged_attention(
    module: paddle.nn.Layer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    paged_step: PagedStep,
    **_unused: object,
) -> tuple[Tensor, None]:
    """Write keys and values of the step into the cache and attend over each row's whole context.

    The signature is that of PaddleFormers' attention registry; ``_unused`` takes its mask, dropout
    and causal arguments, which the step replaces.

    Args:
        module: the attention layer; its ``layer_idx`` picks the cache.
        query: float32 ``[1, num_heads, num_tokens, head_dim]``, rotated.
        key: float32 ``[1, num_kv_heads, num_tokens, head_dim]``, rotated.
        value: as ``key``.
        scaling: factor of the scores.
        paged_step: where to write and what to read.

    Returns:
        float32 ``[1, num_tokens, num_heads * head_dim]`` and no attention weights.
    """
    _, num_heads, num_tokens, dim = query.shape
    keys = paged_step.cache.keys[module.layer_idx].reshape([-1, dim])
    values = paged_step.cache.values[module.layer_idx].reshape([-1, dim])
    keys.scatter_(paged_step.writes, key.reshape([-1, dim]))
    values.scatter_(paged_step.writes, value.reshape([-1, dim]))

    queries = query.reshape([-1, dim]) * scaling
    output = paddle.empty_like(queries)
    for group in paged_step.groups:
        of_group = [*group.bias.shape[:2], -1, dim]  # [rows, num_kv_heads, .., head_dim]
        group_keys = paddle.gather(keys, group.context).reshape(of_group)
        group_values = paddle.gather(values, group.context).reshape(of_group)
        group_queries = paddle.gather(queries, group.queries).reshape(of_group)
        scores = paddle.matmul(group_queries, group_keys, transpose_y=True).add_(group.bias)
        attended = paddle.matmul(functional.softmax(scores), group_values)
        output.scatter_(group.outputs, attended.reshape([-1, dim]))
    return output.reshape([1, num_tokens, num_heads * dim]), None
