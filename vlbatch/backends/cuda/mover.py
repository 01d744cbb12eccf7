"""Moving every row-resident array of a batch in one launch, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from vlbatch.backends.cuda.program import Kernels, Launch
from vlbatch.backends.cuda.records import (
    HEADER_WORDS,
    RECORD_WORDS,
    SHORT_WORDS,
    SLICE_BYTES,
    build_slices,
    write_moves,
)
from vlbatch.backends.mover import RowArrays
from vlbatch.errors import InvalidSetting

if TYPE_CHECKING:
    from vlbatch.order.moves import RowMoves

S = TypeVar("S")

_DATA_BYTES = 64 * 1024
"""Shared memory for a block's columns that suffices; with more moves they get narrower."""

_WIDEST_WORD = 16
_OP_BYTES = 8
"""Source and destination, which a block keeps in shared memory too."""


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
        InvalidSetting: too many rows for the shared memory of a block.
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
        self._max_data = max(_DATA_BYTES, _WIDEST_WORD * rows.capacity)
        if self._size(rows.capacity)[1] > kernels.max_shared_bytes:
            most = kernels.max_shared_bytes // (_WIDEST_WORD + _OP_BYTES) - 1
            raise InvalidSetting(
                f"{rows.capacity} rows are too many for a block; expected at most {most}",
                setting="capacity",
            )
        slices = build_slices(rows, address)
        self._num_slices = len(slices)
        self._slices = kernels.allocate(slices.nbytes)
        self._slices.fill(slices)
        words_an_op = 2 + len(rows.ragged)
        max_words = HEADER_WORDS + words_an_op * rows.capacity
        self._max_few = (SHORT_WORDS - HEADER_WORDS) // words_an_op
        self._max_by_value = (RECORD_WORDS - HEADER_WORDS) // words_an_op
        self._sizes = [self._size(num_ops) for num_ops in range(rows.capacity + 1)]
        self._record = np.zeros(RECORD_WORDS, dtype=np.int32)
        self._staged = kernels.allocate(4 * max_words)
        self._ring = kernels.ring(4 * max_words, max_in_flight)

        table = np.array(self._slices.address, dtype=np.uint64)
        self._data_bytes = np.zeros(1, dtype=np.int32)
        staged = np.array(self._staged.address, dtype=np.uint64)
        self._launch = kernels.launch("move_rows_by_value", table, self._data_bytes, self._record)
        self._launch_few = kernels.launch(
            "move_few_rows_by_value", table, self._data_bytes, self._record
        )
        self._launch_staged = kernels.launch("move_rows_staged", table, self._data_bytes, staged)

    def move(self, moves: RowMoves) -> None:
        """Move rows, remap row numbers, set vacated rows to the default; lengths follow."""
        num_ops = len(moves.sources) + len(moves.vacated)
        if num_ops > self._max_by_value:
            self.stage(moves)
            self._run(self._launch_staged, num_ops)
        elif num_ops:
            write_moves(self._record, moves, self._rows.ragged)
            self._run(self._launch_few if num_ops <= self._max_few else self._launch, num_ops)

    def stage(self, moves: RowMoves) -> None:
        """Upload what the next ``launch_staged`` does; lengths follow at once.

        Not to be captured, unlike that launch.
        """
        num_words = write_moves(self._ring.slot(), moves, self._rows.ragged)
        self._ring.upload(self._staged.address, num_words, self._stream())

    def launch_staged(self) -> None:
        """Do what was staged last; nothing, if that was no move. Launch it once a ``stage``."""
        self._run(self._launch_staged, self._rows.capacity)

    def _size(self, num_ops: int) -> tuple[int, int]:
        """Shared memory of a block, in bytes: for its columns, and in all."""
        table = 4 * self._rows.capacity if self._rows.row_valued else 0
        data = max(min(SLICE_BYTES * num_ops, self._max_data), table)
        return data, _OP_BYTES * (num_ops + 1) + data

    def _run(self, launch: Launch, max_ops: int) -> None:
        data_bytes, shared_bytes = self._sizes[max_ops]
        self._data_bytes[0] = data_bytes
        if self._num_slices:
            launch(self._num_slices, shared_bytes, self._stream())
