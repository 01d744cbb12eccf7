"""What a batch says of itself: the plan of its next step, and a copy of all it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vlbatch.backends.dtypes import HostArray
from vlbatch.order import BatchOrder, IntArray, RowMoves


class BatchState(NamedTuple):
    """What makes a plan stale when it changes: another batch, another step, any other change."""

    batch_id: str
    num_steps: int
    version: int


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """What ``apply`` will do; valid until the batch changes.

    Attributes:
        order: the order of the step.
        moves: how rows get there.
        tokens_of_slot: int64 ``[capacity]``, what was asked for; 0 for nothing.
        state: of the batch that it was made for.
    """

    order: BatchOrder
    moves: RowMoves
    tokens_of_slot: IntArray
    state: BatchState


@dataclass(frozen=True, slots=True)
class BatchSnapshot:
    """Host copies of everything at one moment; for comparisons, audits and reports.

    Attributes:
        rows: row -> req_id, ``None`` for a hole.
        slots: req_id -> slot.
        progress: req_id -> ``(prompt_len, computed, confirmed)``.
        values: req_id -> field -> value of the per-request fields.
        whole: field -> array of the others.
    """

    rows: tuple[str | None, ...]
    slots: dict[str, int]
    progress: dict[str, tuple[int, int, int]]
    values: dict[str, dict[str, object]]
    whole: dict[str, HostArray]
