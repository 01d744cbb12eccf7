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
        stream: handle of the stream to work on, asked at each launch.
        max_in_flight: uploads that may be on their way before the host waits for the first.

    """

    def __init__(
        self,
        kernels: Kernels,
        *,
        capacity: int,
        num_axes: int,
        stream: Callable[[], int],
        max_in_flight: int = 3,
    ) -> None:
        self._stream = stream
        self._deltas = kernels.allocate(8 * capacity)
        self._ring = kernels.ring(8 * capacity, max_in_flight)
        self._pointers = np.zeros(4, dtype=np.uint64)  # out, slot_of_row, index_of_row, query_start
        self._stride = np.zeros((), dtype=np.int64)
        self._counts = np.zeros(2, dtype=np.int32)  # rows, tokens
        out, slot_of_row, index_of_row, query_start = (self._pointers[i : i + 1] for i in range(4))
        self._launch = kernels.launch(
            "decode_positions",
            out,
            self._stride,
            np.array(num_axes, dtype=np.int32),
            np.array(self._deltas.address, dtype=np.uint64),
            slot_of_row,
            index_of_row,
            query_start,
            self._counts[:1],
            self._counts[1:],
        )

    def set_deltas(self, delta_of_slot: npt.NDArray[np.int64]) -> None:
        """Upload ``PositionStore.delta_of_slot``, int64 ``[capacity]``."""
        words = delta_of_slot.view(np.int32)
        self._ring.slot()[: len(words)] = words
        self._ring.upload(self._deltas.address, len(words), self._stream())

    def write(
        self,
        *,
        out: int,
        axis_stride: int,
        slot_of_row: int,
        index_of_row: int,
        query_start: int,
        num_rows: int,
        num_tokens: int,
    ) -> None:
        """Write the positions of ``num_rows`` rows, and 0 for the tokens past theirs.

        Args:
            out: address of int64 ``[num_axes, >= num_tokens]``.
            axis_stride: elements from an axis to the next.
            slot_of_row: address of int32 ``[num_rows]``; -1 for a pad row.
            index_of_row: address of int32 ``[num_rows]``, index of each row's first token.
            query_start: address of int32 ``[num_rows + 1]``, first token of each row.
            num_rows: rows, pads included.
            num_tokens: tokens, pads included.

        """
        self._pointers[:] = (out, slot_of_row, index_of_row, query_start)
        self._stride[...] = axis_stride
        self._counts[:] = (num_rows, num_tokens)
        self._launch(-(-max(num_rows, num_tokens, 1) // _THREADS), 0, self._stream())
