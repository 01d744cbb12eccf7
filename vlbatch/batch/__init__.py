"""The running batch.

Owns: slots, rows, progress and the field storage of live requests; applies one plan a step to
every field and every follower. ``ProposerInputBatch`` is the draft model's follower.
Never: decides an order by itself (``vlbatch.order`` does), or holds features.
"""

from vlbatch.batch.followers import RequestFollower
from vlbatch.batch.input_batch import InputBatch
from vlbatch.batch.plan import BatchPlan, BatchSnapshot
from vlbatch.batch.progress import Progress
from vlbatch.batch.proposer import DraftField, ProposerInputBatch, copied, own, shared

__all__ = [
    "BatchPlan",
    "BatchSnapshot",
    "DraftField",
    "InputBatch",
    "Progress",
    "ProposerInputBatch",
    "RequestFollower",
    "copied",
    "own",
    "shared",
]
