"""Drafts: their rows in a step, what is accepted of them, what a drafter reads.

Owns: pure functions over a step's ``BatchOrder``; no state.
Never: holds a request, decides an order, proposes a token, or runs a model. The draft model's
fields live in ``vlbatch.batch.ProposerInputBatch``; its look-ahead in the features, in
``FeatureStore``.
"""

from vlbatch.speculative.drafts import accept_greedy, logit_tokens, num_drafts, num_logits
from vlbatch.speculative.shift import (
    DrafterRows,
    clamp_placeholders,
    following_tokens,
    shift_tokens,
)

__all__ = [
    "DrafterRows",
    "accept_greedy",
    "clamp_placeholders",
    "following_tokens",
    "logit_tokens",
    "num_drafts",
    "num_logits",
    "shift_tokens",
]
