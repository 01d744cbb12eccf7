"""Draft tokens of a step: how many each row has, where their logits lie, how many are accepted.

Rules
- A row has drafts if it is a decode, which is decided by progress: a prompt chunk of ``k + 1``
  tokens has none.
- Everything here is by row of one order, so it is rebuilt each step and never moved.
"""

from __future__ import annotations

import numpy as np

from vlbatch.errors import InvalidField
from vlbatch.order import DECODE, BatchOrder, IntArray


def num_drafts(order: BatchOrder) -> IntArray:
    """Row -> draft tokens among its scheduled ones, int64 ``[num_reqs]``."""
    return np.where(order.classes == DECODE, order.scheduled - 1, 0)


def num_logits(order: BatchOrder) -> IntArray:
    """Row -> tokens whose logits are wanted, int64 ``[num_reqs]``.

    A decode of ``1 + d`` tokens wants all of them, a chunk that ends a prompt its last one, any
    other chunk none. Use it as ``counts`` of ``BatchOrder.restore``, and in the ``rebuild`` of a
    cumulative field for offsets.
    """
    ends_prompt = order.computed + order.scheduled >= order.prompt_lens
    return np.where(order.classes == DECODE, order.scheduled, ends_prompt.astype(np.int64))


def logit_tokens(order: BatchOrder) -> IntArray:
    """Tokens of the flattened step whose logits are wanted, in row order; see ``num_logits``."""
    counts = num_logits(order)
    return consecutive(order.query_start[1:] - counts, counts)


def accept_greedy(order: BatchOrder, token_ids: IntArray, sampled: IntArray) -> IntArray:
    """Row -> accepted drafts: the longest prefix of them that the model itself would have chosen.

    Leviathan, Kalman and Matias (2023) with temperature 0: a draft counts as right if it is the
    most likely token after the one before it.

    Args:
        order: the step.
        token_ids: int64 ``[num_tokens]`` what it computed; of a decode, the last known token and
            then its drafts.
        sampled: int64 ``[num_logits]`` most likely next token at each of ``logit_tokens``.

    Returns:
        int64 ``[num_reqs]``, 0 for rows without drafts.

    Raises:
        InvalidField: an array has another length than the order says.

    """
    drafts, logits = num_drafts(order), num_logits(order)
    for name, array, expected in (
        ("token_ids", token_ids, order.num_tokens),
        ("sampled", sampled, int(logits.sum())),
    ):
        if len(array) != expected:
            raise InvalidField(f"{name} has {len(array)} entries; the step has {expected}")
    first_logit = np.cumsum(logits) - logits
    drafted = token_ids[consecutive(order.query_start[:-1] + 1, drafts)]
    is_right = drafted == sampled[consecutive(first_logit, drafts)]
    row = np.repeat(np.arange(order.num_reqs), drafts)
    number = consecutive(np.zeros_like(drafts), drafts)
    accepted = drafts.copy()
    np.minimum.at(accepted, row[~is_right], number[~is_right])  # the first wrong one ends them
    return accepted


def consecutive(starts: IntArray, counts: IntArray) -> IntArray:
    """``starts[i], starts[i] + 1, ...``, ``counts[i]`` of each, one after the other."""
    ends = np.cumsum(counts)
    offsets: IntArray = np.repeat(starts - (ends - counts), counts)
    return offsets + np.arange(len(offsets))
