"""What became of each request, and what happened in a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from vlbatch.batch import BatchPlan
from vlbatch.errors import VlbatchError
from vlbatch.features import FeatureStore
from vlbatch.runner.inputs import Logits
from vlbatch.runner.prompt import Prompt
from vlbatch.runner.requests import Request

Status: TypeAlias = Literal["waiting", "finished", "refused", "failed"]
"""``refused``: nothing was computed for it; ``failed``: it left the batch before its end."""


@dataclass(slots=True)
class Result:
    """What became of a request.

    Attributes:
        request: as read.
        prompt: ``None`` if it was refused before one could be built.
        tokens: generated, the end token included.
        logits: ``[vocab]`` a generated token.
        steps: step in which each token was generated.
        final: declared fields at the end, name -> value.
        status: ``"waiting"`` until the end.
        error: why it was refused or failed.
    """

    request: Request
    prompt: Prompt | None = None
    tokens: list[int] = field(default_factory=list)
    logits: list[Logits] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    final: dict[str, object] = field(default_factory=dict)
    status: Status = "waiting"
    error: VlbatchError | None = None


@dataclass(slots=True)
class RunCounters:
    """Events of a run.

    Attributes:
        steps: forwards.
        tokens: computed in all steps.
        reorders: steps in which a request changed its row.
        condenses: steps that closed a hole.
        rows_moved: rows of requests that changed, over all steps.
        cut_items: request and number of each item that a chunk ended inside of.
        drafted: draft tokens computed, of outputs that were read.
        accepted: those that were right.
    """

    steps: int = 0
    tokens: int = 0
    reorders: int = 0
    condenses: int = 0
    rows_moved: int = 0
    cut_items: set[tuple[str, int]] = field(default_factory=set)
    drafted: int = 0
    accepted: int = 0

    def count(self, plan: BatchPlan, features: FeatureStore) -> None:
        """Count one applied plan, and the items that its chunks cut."""
        moves, order = plan.moves, plan.order
        self.steps += 1
        self.tokens += order.num_tokens
        self.reorders += moves.num_moved > 0
        self.condenses += bool((moves.new_row_of < 0).any())
        self.rows_moved += moves.num_moved
        stops = order.computed + order.scheduled
        for row in range(order.num_leading_decodes, order.num_reqs):
            req_id, stop = order.req_ids[row], int(stops[row])
            for number, item in enumerate(features.items_of(req_id)):
                if item.offset < stop < item.stop:
                    self.cut_items.add((req_id, number))
