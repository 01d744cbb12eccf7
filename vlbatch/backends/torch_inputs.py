"""Static inputs of a step on a CUDA device: embeddings with their features, decode positions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from vlbatch.backends.cuda import DecodePositions, FeatureGather
from vlbatch.backends.torch_backend import TorchTensorBackend
from vlbatch.errors import FeatureRowsMismatch, InvalidField
from vlbatch.features import FeatureInputs


class FeatureBuffer:
    """Input embeddings of a step, at an address that never changes.

    Args:
        backend: of a CUDA device, with ``vlbatch[cuda]``.
        num_tokens: most tokens of a step.
        hidden_size: columns.
        dtype: of embeddings and features.

    Attributes:
        embeds: ``[num_tokens, hidden_size]``; the text embeddings are the caller's to write.

    Raises:
        MissingDependency: ``vlbatch[cuda]`` is not installed.
    """

    def __init__(
        self, backend: TorchTensorBackend, num_tokens: int, hidden_size: int, dtype: torch.dtype
    ) -> None:
        self.embeds = torch.zeros(num_tokens, hidden_size, dtype=dtype, device=backend.device)
        self._gather = FeatureGather(
            backend.kernels(),
            out=self.embeds.data_ptr(),
            num_tokens=num_tokens,
            row_bytes=hidden_size * self.embeds.element_size(),
            stream=backend.stream,
        )

    def gather(self, inputs: FeatureInputs, level: int = 0) -> None:
        """Copy one level of a step's features over the embeddings of their tokens.

        One launch, no concatenation, no wait; nothing at all for a step without features.

        Raises:
            FeatureRowsMismatch: features of another dtype, width or device, or with gaps.
        """
        if not inputs.segments:
            return
        addresses = []
        for segment in inputs.segments:
            features = segment.features[level]
            if not isinstance(features, torch.Tensor) or not self._fits(features):
                got = f"{getattr(features, 'dtype', type(features))} {_shape(features)}"
                expected = f"{self.embeds.dtype} [rows, {self.embeds.shape[1]}]"
                raise FeatureRowsMismatch(
                    f"item {segment.item} has {got}; expected contiguous {expected} on"
                    f" {self.embeds.device}",
                    req_id=segment.req_id,
                )
            addresses.append(
                features.data_ptr() + segment.rows[0] * features.stride(0) * features.element_size()
            )
        num_rows = [stop - first for first, stop in (s.rows for s in inputs.segments)]
        self._gather.gather(addresses, num_rows, inputs.tokens)

    def _fits(self, features: torch.Tensor) -> bool:
        like = self.embeds
        alike = features.dtype == like.dtype and features.device == like.device
        shaped = features.ndim == 2 and features.shape[1] == like.shape[1]
        return bool(alike and shaped and features.is_contiguous())


def _shape(features: object) -> tuple[int, ...]:
    return tuple(getattr(features, "shape", ()))


class PositionBuffer:
    """Rotary positions of a step's decode rows, at an address that never changes.

    The arrays that it reads are bound once, as fields of a batch keep their addresses:
    ``slot_of_row`` is there in every batch, ``query_start`` is a cumulative field.

    Args:
        backend: of a CUDA device, with ``vlbatch[cuda]``.
        capacity: slots.
        num_axes: axes of a position.
        num_tokens: most tokens of a step.
        slot_of_row: int32 ``[rows]``; -1 for a pad row.
        index_of_row: int32 ``[rows, ...]``, index of each row's first token in its request.
        query_start: int32 ``[rows + 1]``, first token of each row in the step.

    Attributes:
        positions: int64 ``[num_axes, num_tokens]``.

    Raises:
        InvalidField: an array of another dtype, device or size.
        MissingDependency: ``vlbatch[cuda]`` is not installed.
    """

    def __init__(
        self,
        backend: TorchTensorBackend,
        *,
        capacity: int,
        num_axes: int,
        num_tokens: int,
        slot_of_row: torch.Tensor,
        index_of_row: torch.Tensor,
        query_start: torch.Tensor,
    ) -> None:
        num_rows = slot_of_row.numel()
        bound = {
            "slot_of_row": (slot_of_row, num_rows),
            "index_of_row": (index_of_row, num_rows),
            "query_start": (query_start, num_rows + 1),
        }
        for name, (array, size) in bound.items():
            fits = array.dtype == torch.int32 and array.device == backend.device
            if not fits or array.numel() != size or not array.is_contiguous():
                raise InvalidField(
                    f"{name} is {array.dtype} {tuple(array.shape)} on {array.device}; expected"
                    f" {size} contiguous int32 on {backend.device}"
                )
        self._bound = bound  # keeps their memory alive
        self._max_rows = num_rows
        self.positions = torch.zeros(num_axes, num_tokens, dtype=torch.int64, device=backend.device)
        self._decode = DecodePositions(
            backend.kernels(),
            capacity=capacity,
            num_axes=num_axes,
            out=self.positions.data_ptr(),
            axis_stride=num_tokens,
            slot_of_row=slot_of_row.data_ptr(),
            index_of_row=index_of_row.data_ptr(),
            query_start=query_start.data_ptr(),
            stream=backend.stream,
        )

    def set_deltas(self, delta_of_slot: npt.NDArray[np.int64]) -> None:
        """Upload ``PositionStore.delta_of_slot`` after requests came or left."""
        self._decode.set_deltas(delta_of_slot)

    def write_decode(self, num_rows: int, num_tokens: int) -> None:
        """Write index + delta for every token of the first ``num_rows`` rows.

        One launch, nothing read on the host: it can be captured, with the counts of the captured
        size. The rows must be past their media; tokens past theirs get 0.

        Raises:
            InvalidField: more rows or tokens than there are.
        """
        if num_rows > self._max_rows or num_tokens > self.positions.shape[1]:
            raise InvalidField(
                f"got {num_rows} rows and {num_tokens} tokens; expected at most {self._max_rows}"
                f" and {self.positions.shape[1]}",
                setting="num_tokens",
            )
        self._decode.write(num_rows, num_tokens)
