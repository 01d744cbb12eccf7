"""What a step gave, until it is read: with overlap, that is after later steps have moved rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vlbatch.features import FeatureInputs
from vlbatch.order import BatchOrder, IntArray
from vlbatch.runner.inputs import Hidden, Logits
from vlbatch.runner.state import HostBatch
from vlbatch.speculative import accept_greedy, num_drafts, num_logits


@dataclass(slots=True, eq=False)
class StepOutputs:
    """Outputs of one forward. Arrays by row mean rows of its order, whatever has moved since.

    Attributes:
        number: of the step, counted from 0.
        order: of the step.
        admission: row -> rank of admission of its request; see ``InputBatch.admission_of``.
        token_ids: int64 ``[num_tokens]`` that were computed.
        positions: int64 ``[3, num_tokens]``.
        logits: ``[num_logits, vocab]``; ``num_logits(order)`` says how many each row has.
        hidden: hidden states of all tokens, where a drafter wants them.
        ahead: features that a drafter reads, where it reads ahead.
        sampled: int64 ``[num_logits]`` most likely tokens.
        accepted: int64 ``[num_reqs]`` row -> accepted drafts.
        stops: int64 ``[num_reqs]`` row -> tokens that are computed for certain after this step.
        newest: int64 ``[num_reqs]`` row -> token that comes then; -1 where it is not sampled here.
    """

    number: int
    order: BatchOrder
    admission: IntArray
    token_ids: IntArray
    positions: IntArray
    logits: Logits
    hidden: Hidden | None
    ahead: FeatureInputs | None
    sampled: IntArray = field(init=False)
    accepted: IntArray = field(init=False)
    stops: IntArray = field(init=False)
    newest: IntArray = field(init=False)

    def __post_init__(self) -> None:
        """Sample, and compare the drafts with what was sampled."""
        order = self.order
        self.sampled = self.logits.argmax(axis=1)
        self.accepted = accept_greedy(order, self.token_ids, self.sampled)
        rejected = num_drafts(order) - self.accepted
        self.stops = order.computed + order.scheduled - rejected
        counts = num_logits(order)
        last = (np.cumsum(counts) - 1 - rejected)[counts > 0]
        self.newest = np.full(order.num_reqs, -1, dtype=np.int64)
        self.newest[counts > 0] = self.sampled[last]

    def is_there(self, vl: HostBatch) -> npt.NDArray[np.bool_]:
        """Row -> whether its request has been in the batch ever since."""
        return np.equal(vl.batch.admission_of(self.order), self.admission)
