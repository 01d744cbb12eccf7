"""The features of one step, by request and by row, for code that expects them so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vlbatch.backends.arrays import join_arrays
from vlbatch.features import FeatureInputs
from vlbatch.items import IntArray
from vlbatch.order import BatchOrder


@dataclass(frozen=True, slots=True, eq=False)
class RequestFeatures:
    """What one request's chunk takes in a step.

    Attributes:
        features: ``[n, hidden]`` rows, in order of the prompt; images and videos alike.
        positions: int64 ``[n]`` tokens of the prompt whose embeddings they are.
        places: int64 ``[n]`` tokens of the flattened step that take them.
    """

    # Any: an array of whatever library the encoder uses
    features: Any
    positions: IntArray
    places: IntArray


def by_request(
    order: BatchOrder, inputs: FeatureInputs, shift: int = 0
) -> dict[str, RequestFeatures]:
    """Each request's features of a step, in row order; ``shift`` as they were gathered with."""
    return {
        req_id: RequestFeatures(
            join_arrays(part.arrays()), order.token_indices[part.tokens] + shift, part.tokens
        )
        for req_id, part in inputs.by_request().items()
    }


@dataclass(slots=True, eq=False)
class StepFeatures:
    """Order of a step, and its features until they are consumed.

    Attributes:
        order: of the step.
        admissions: who was in which row; see ``RowMap``.
        by_request: req_id -> features, in row order.
    """

    order: BatchOrder
    admissions: IntArray
    by_request: dict[str, RequestFeatures]

    # Any: see RequestFeatures
    def whole(self) -> Any:
        """All rows ``[n, hidden]`` in the order of batch rows, ``None`` for none."""
        parts = [each.features for each in self.by_request.values()]
        return join_arrays(parts) if parts else None

    def by_row(self, rows: Sequence[str | None], num_rows: int) -> list[object]:
        """Row -> its features, -1 for none, as long as the batch can be."""
        out: list[object] = [-1] * num_rows
        for row, req_id in enumerate(rows):
            if req_id in self.by_request:
                out[row] = self.by_request[req_id].features
        return out
