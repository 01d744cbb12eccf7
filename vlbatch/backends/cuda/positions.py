"""Rotary positions of decode rows, computed on the device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from vlbatch.backends.cuda.program import Kernels

_THREADS = 256


class DecodePositions:
    """Writes index + delta of every token of rows that are past their media.

    Nothing is read on the host, so it runs inside a captured graph; only ``set_deltas``, after
    requests came or left, does not.

    Args:
        kernels: of the device that holds the arrays.
        capacity: slots.
        num_axes: axes of a position, which all get the same value.
        out: address of int64 ``[num_axes, axis_stride]``.
        axis_stride: elements from an axis to the next.
        slot_of_row: address of int32 by row; -1 for a pad row.
        index_of_row: address of int32 by row: index of the row's first token in its request.
        query_start: address of int32 by row, one more than rows: the row's first token in the
            step.
        stream: handle of the stream to work on, asked at each launch.
        max_in_flight: uploads that may be on their way before the host waits for the first.
    """

    def __init__(
        self,
        kernels: Kernels,
        *,
        capacity: int,
        num_axes: int,
        out: int,
        axis_stride: int,
        slot_of_row: int,
        index_of_row: int,
        query_start: int,
        stream: Callable[[], int],
        max_in_flight: int = 3,
    ) -> None:
        self._stream = stream
        self._deltas = kernels.allocate(8 * capacity)
        self._ring = kernels.ring(8 * capacity, max_in_flight)
        self._counts = np.zeros(2, dtype=np.int32)
        self._launch = kernels.launch(
            "decode_positions",
            np.array(out, dtype=np.uint64),
            np.array(axis_stride, dtype=np.int64),
            np.array(num_axes, dtype=np.int32),
            np.array(self._deltas.address, dtype=np.uint64),
            np.array(slot_of_row, dtype=np.uint64),
            np.array(index_of_row, dtype=np.uint64),
            np.array(query_start, dtype=np.uint64),
            self._counts[:1],
            self._counts[1:],
        )

    def set_deltas(self, delta_of_slot: npt.NDArray[np.int64]) -> None:
        """Upload ``PositionStore.delta_of_slot``, int64 ``[capacity]``."""
        words = delta_of_slot.view(np.int32)
        self._ring.slot()[: len(words)] = words
        self._ring.upload(self._deltas.address, len(words), self._stream())

    def write(self, num_rows: int, num_tokens: int) -> None:
        """Write positions of the first ``num_rows`` rows, and 0 for tokens past theirs.

        Both counts include pads.
        """
        self._counts[:] = (num_rows, num_tokens)
        self._launch(-(-max(num_rows, num_tokens, 1) // _THREADS), 0, self._stream())
