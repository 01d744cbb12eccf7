"""What a drafter reads in a step: the target's tokens, ``shift`` places ahead.

Row ``i`` of a draft head takes the target's hidden state of token ``i``, its rotary position and
its KV slot, but the embedding of token ``i + shift``: 1 for one head, 1, 2, .. for several in a
chain. Where those tokens are features, ``FeatureStore.gather(order, shift=shift)`` has them.

Rules
- The last ``shift`` places of a chunk take what follows it in the same request: the newly sampled
  token, or the prompt's next one. Never what comes next in the flattened step, the neighbour's.
- Arrays are new; what the target was given stays as it is.
- Rejected drafts are left out: the drafter never computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlbatch.errors import InvalidField
from vlbatch.features import FeatureInputs
from vlbatch.order import DECODE, BatchOrder, IntArray
from vlbatch.speculative.drafts import consecutive

UNKNOWN = -1
"""A token that is not sampled yet."""


@dataclass(frozen=True, slots=True, eq=False)
class DrafterRows:
    """The tokens of a step that a drafter computes, by row of the step's order.

    Attributes:
        lengths: int64 ``[num_reqs]`` tokens of each row: its chunk, less rejected drafts; 0 for a
            row that is left out.
        places: int64 ``[num_tokens]`` tokens of the target's flattened step, whose hidden states
            and rotary positions the drafter takes.
        query_start: int32 ``[num_reqs + 1]`` row -> first of ``places``.

    """

    lengths: IntArray
    places: IntArray
    query_start: npt.NDArray[np.int32]

    @classmethod
    def of(
        cls,
        order: BatchOrder,
        accepted: IntArray | None = None,
        *,
        skip: Sequence[int] | IntArray = (),
    ) -> DrafterRows:
        """Choose a drafter's tokens of a step.

        Args:
            order: the step.
            accepted: int64 ``[num_reqs]`` accepted drafts, read for decode rows; all if not given.
            skip: rows to leave out: finished, gone, or no members of the proposer batch.

        Raises:
            InvalidField: more drafts accepted than there were, or fewer than none.

        """
        lengths = order.scheduled.copy()
        if accepted is not None:
            decodes = order.classes == DECODE
            wrong = decodes & ((accepted < 0) | (accepted >= lengths))
            if wrong.any():
                row = int(np.argmax(wrong))
                raise InvalidField(
                    f"accepted {accepted[row]} drafts; expected 0..{lengths[row] - 1}",
                    req_id=order.req_ids[row],
                )
            lengths[decodes] = 1 + accepted[decodes]
        lengths[np.asarray(skip, dtype=np.int64)] = 0
        start = np.zeros(order.num_reqs + 1, dtype=np.int32)
        np.cumsum(lengths, out=start[1:])
        places = consecutive(order.query_start[:-1].astype(np.int64), lengths)
        return cls(lengths, places, start)

    def features(self, order: BatchOrder, inputs: FeatureInputs) -> FeatureInputs:
        """Features of a shifted gather, by the drafter's tokens; without rows that are left out.

        Args:
            order: the step.
            inputs: ``FeatureStore.gather(order, shift=...)``.

        """
        new_token = np.full(order.num_tokens, -1, dtype=np.int64)
        new_token[self.places] = np.arange(len(self.places))
        kept = [s for s in inputs.segments if self.lengths[order.row_of(s.req_id)]]
        tokens, skipped = new_token[inputs.tokens], new_token[inputs.skipped]
        return FeatureInputs(tokens[tokens >= 0], tuple(kept), skipped[skipped >= 0])


def following_tokens(
    order: BatchOrder, known_ids: npt.NDArray[np.int64], sampled: IntArray
) -> IntArray:
    """Find the token right behind each row's chunk, int64 ``[num_reqs, 1]``.

    Args:
        order: the step.
        known_ids: slot -> token ids of its request, int64 ``[capacity, width]``.
        sampled: int64 ``[num_reqs]`` newest token of each row whose chunk reaches its last known
            token (of a decode: the one after its accepted drafts); ignored in other rows.

    """
    stops = order.computed + order.scheduled
    unfinished = stops < order.prompt_lens
    inside = np.where(unfinished, stops, 0)
    return np.where(unfinished, known_ids[order.slots, inside], sampled)[:, np.newaxis]


def shift_tokens(rows: DrafterRows, token_ids: IntArray, following: IntArray) -> IntArray:
    """Token ids that a drafter reads, int64, one a place of ``rows``.

    Args:
        rows: the drafter's tokens of the step.
        token_ids: int64 ``[num_tokens]`` of the target's flattened step; not changed.
        following: int64 ``[num_reqs, shift]`` the tokens behind each row's chunk, or behind its
            accepted drafts; ``UNKNOWN`` where there is none yet. Its width is the shift.

    Raises:
        InvalidField: there is no row of ``following`` for each row of the step.

    """
    num_reqs = len(rows.lengths)
    if following.ndim != 2 or following.shape[0] != num_reqs or following.shape[1] < 1:
        raise InvalidField(
            f"following has shape {following.shape}; expected ({num_reqs}, shift), shift >= 1"
        )
    shift = following.shape[1]
    row = np.repeat(np.arange(num_reqs), rows.lengths)
    offset = np.arange(len(rows.places)) - rows.query_start[row] + shift
    behind = offset - rows.lengths[row]  # >= 0: a token behind the chunk
    ahead = np.where(behind < 0, rows.places + shift, rows.places)
    return np.where(behind < 0, token_ids[ahead], following[row, np.maximum(behind, 0)])


def clamp_placeholders(
    token_ids: IntArray, feature_tokens: IntArray, *, vocab_size: int, req_ids: Sequence[str] = ()
) -> IntArray:
    """Make every id one that an embedding table has, int64 ``[num_tokens]``; a new array.

    Prompts may hold ids outside the vocabulary where a feature goes: their embedding is replaced,
    but it is looked up first.

    Args:
        token_ids: int64 ``[num_tokens]``.
        feature_tokens: int64, tokens that take a feature or are skipped for want of one.
        vocab_size: ids are ``0 .. vocab_size - 1``.
        req_ids: request of each token, for the message.

    Raises:
        InvalidField: an id outside the vocabulary at any other token.

    """
    bad = (token_ids < 0) | (token_ids >= vocab_size)
    bad[feature_tokens] = False
    if bad.any():
        token = int(np.argmax(bad))
        raise InvalidField(
            f"token {token} of the step has id {token_ids[token]} and takes no feature; expected"
            f" an id in [0, {vocab_size})",
            req_id=req_ids[token] if req_ids else None,
        )
    return np.clip(token_ids, 0, vocab_size - 1)
