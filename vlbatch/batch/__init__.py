"""The running batch.

Owns: slots, rows, progress and the field storage of live requests; applies one plan a step to
every field and every follower.
Never: decides an order by itself (``vlbatch.order`` does), or holds features.
"""

from vlbatch.batch.input_batch import BatchPlan, BatchSnapshot, InputBatch
from vlbatch.batch.progress import Progress

__all__ = ["BatchPlan", "BatchSnapshot", "InputBatch", "Progress"]
