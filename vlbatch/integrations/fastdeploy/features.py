"""The features of one step, by request and by row, for code that expects them so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vlbatch.backends.arrays import join_arrays
from vlbatch.cache import Features
from vlbatch.features import EncodeTask, FeatureInputs
from vlbatch.items import IntArray
from vlbatch.order import BatchOrder
from vlbatch.step import Encoder


def copying(extract: Encoder) -> Encoder:
    """Encode into arrays of their own: a graph's next replay overwrites what it gave before."""

    def encode(tasks: Sequence[EncodeTask]) -> list[Features]:
        return [
            tuple(map(_copy, levels)) if isinstance(levels, tuple) else levels
            for levels in extract(tasks)
        ]

    return encode


# Any: an array of whatever library the encoder uses
def _copy(array: Any) -> Any:
    copy = getattr(array, "clone", None) or getattr(array, "copy", None)
    return array if copy is None else copy()  # what is no array is refused by the store


@dataclass(frozen=True, slots=True, eq=False)
class RequestFeatures:
    """What one request's chunk takes in a step.

    Attributes:
        features: ``[n, hidden]`` rows, in order of the prompt.
        positions: int64 ``[n]`` tokens of the prompt that take them.
        places: int64 ``[n]`` tokens of the flattened step that take them.
    """

    # Any: an array of whatever library the encoder uses
    features: Any
    positions: IntArray
    places: IntArray


class StepFeatures:
    """Order of a step, and its features until they are consumed.

    Args:
        order: of the step.
        inputs: what was gathered for it.
    """

    def __init__(self, order: BatchOrder, inputs: FeatureInputs) -> None:
        self.order = order
        arrays = inputs.arrays()
        parts: dict[str, list[Any]] = {}
        for segment, array in zip(inputs.segments, arrays, strict=True):
            parts.setdefault(segment.req_id, []).append(array)
        tokens = order.token_indices[inputs.tokens]
        rows = order.row_of_token[inputs.tokens]
        self.by_request: dict[str, RequestFeatures] = {}
        for req_id, found in parts.items():
            own = rows == order.row_of(req_id)
            self.by_request[req_id] = RequestFeatures(
                join_arrays(found), tokens[own], inputs.tokens[own]
            )

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

    def clear(self) -> None:
        """Drop everything."""
        self.by_request.clear()
