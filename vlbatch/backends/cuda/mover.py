"""Moving every row-resident array of a batch in one launch, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from vlbatch.backends.cuda.program import Kernels
from vlbatch.backends.cuda.records import (
    HEADER_WORDS,
    RECORD_WORDS,
    SLICE_BYTES,
    build_slices,
    num_move_words,
    write_moves,
)
from vlbatch.backends.mover import RowArrays
from vlbatch.errors import InvalidField

if TYPE_CHECKING:
    from vlbatch.order.moves import RowMoves

S = TypeVar("S")

_SHARED_BYTES = 64 * 1024
"""Shared memory of a block that suffices for speed; with more moves its columns get narrower."""

_WIDEST_WORD = 16


class CudaMover(Generic[S]):
    """All row-resident arrays of one batch.

    ``move`` is one launch whose arguments hold the moves, or, if they are too many for that, one
    small upload and one launch. For a captured graph use ``stage`` before each replay and
    ``launch_staged`` in the capture: the launch is as large as any step needs and reads from
    device memory what there is to move.

    Args:
        kernels: of the device that holds the arrays.
        rows: what moves.
        address: first byte of an array.
        stream: handle of the stream to work on, asked at each launch.
        max_in_flight: uploads that may be on their way before the host waits for the first.

    Raises:
        InvalidField: too many rows for the shared memory of a block.

    """

    def __init__(
        self,
        kernels: Kernels,
        rows: RowArrays[S],
        *,
        address: Callable[[S], int],
        stream: Callable[[], int],
        max_in_flight: int = 3,
    ) -> None:
        self._rows = rows
        self._stream = stream
        self._max_shared = max(_SHARED_BYTES, _WIDEST_WORD * rows.capacity)
        if self._max_shared > kernels.max_shared_bytes:
            raise InvalidField(
                f"{rows.capacity} rows are too many for a block;"
                f" expected at most {kernels.max_shared_bytes // _WIDEST_WORD}",
                setting="capacity",
            )
        slices = build_slices(rows, address)
        self._num_slices = len(slices)
        self._slices = kernels.allocate(slices.nbytes)
        self._slices.fill(slices)
        max_words = HEADER_WORDS + (2 + len(rows.ragged)) * rows.capacity
        self._record = np.zeros(RECORD_WORDS, dtype=np.int32)
        self._staged = kernels.allocate(4 * max_words)
        self._ring = kernels.ring(4 * max_words, max_in_flight)

        table = np.array(self._slices.address, dtype=np.uint64)
        self._shared = np.array(0, dtype=np.int32)
        self._launch = kernels.launch("move_rows_by_value", table, self._shared, self._record)
        self._launch_staged = kernels.launch(
            "move_rows_staged",
            table,
            np.array(self._max_shared, dtype=np.int32),
            np.array(self._staged.address, dtype=np.uint64),
        )

    def move(self, moves: RowMoves) -> None:
        """Move rows, remap row numbers, set vacated rows to the default; lengths follow."""
        if moves.is_identity:
            return
        if num_move_words(moves, len(self._rows.ragged)) > RECORD_WORDS:
            self.stage(moves)
            self.launch_staged()
            return
        write_moves(self._record, moves, self._rows.ragged)
        num_bytes = SLICE_BYTES * int(self._record[0])
        shared = min(max(num_bytes, 4 * self._rows.capacity), self._max_shared)
        self._shared[...] = shared
        if self._num_slices:
            self._launch(self._num_slices, shared, self._stream())

    def stage(self, moves: RowMoves) -> None:
        """Upload what the next ``launch_staged`` does; lengths follow at once.

        Not to be captured, unlike that launch.
        """
        write_moves(self._ring.slot(), moves, self._rows.ragged)
        num_words = num_move_words(moves, len(self._rows.ragged))
        self._ring.upload(self._staged.address, num_words, self._stream())

    def launch_staged(self) -> None:
        """Do what was staged last; nothing, if that was no move. Launch it once a ``stage``."""
        if self._num_slices:
            self._launch_staged(self._num_slices, self._max_shared, self._stream())
