"""The running batch.

Owns: slots, rows, progress and the field storage of live requests; applies one plan a step to
every field and every follower. ``ProposerInputBatch`` is the draft model's follower.
Never: holds features, or finds moves by itself: ``OrderPlanner`` says which class each row is of,
``vlbatch.order`` where it goes.
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
