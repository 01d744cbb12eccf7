"""Bringing the features of a step to their tokens in one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from vlbatch.backends.base import Indices
from vlbatch.backends.cuda.program import Kernels
from vlbatch.backends.cuda.records import (
    RECORD_WORDS,
    FeatureRuns,
    feature_runs,
    num_feature_words,
    write_features,
)
from vlbatch.errors import InvariantBroken

_ROWS_A_BLOCK = 8


class FeatureGather:
    """Copies feature rows into a static buffer of input embeddings.

    ``gather`` is one launch whose arguments hold the runs of rows, or, if they are too many for
    that, one small upload and one launch. For a captured graph use ``stage`` before each replay
    and ``launch_staged`` in the capture.

    Args:
        kernels: of the device that holds the buffer and the features.
        out: address of the buffer, ``[num_tokens, hidden]``, contiguous.
        num_tokens: rows of the buffer.
        row_bytes: bytes of a token's embedding, and of a feature row.
        stream: handle of the stream to work on, asked at each launch.
        max_in_flight: uploads that may be on their way before the host waits for the first.
    """

    def __init__(
        self,
        kernels: Kernels,
        *,
        out: int,
        num_tokens: int,
        row_bytes: int,
        stream: Callable[[], int],
        max_in_flight: int = 3,
    ) -> None:
        self._multiple = out | row_bytes
        self._num_tokens = num_tokens
        self._row_bytes = row_bytes
        self._stream = stream
        max_bytes = 4 * num_feature_words(num_tokens)
        self._record = np.zeros(RECORD_WORDS, dtype=np.int32)
        self._staged = kernels.allocate(max_bytes)
        self._ring = kernels.ring(max_bytes, max_in_flight)
        buffer = np.array(out, dtype=np.uint64)
        width = np.array(row_bytes, dtype=np.int32)
        self._launch = kernels.launch("gather_features_by_value", buffer, width, self._record)
        self._launch_staged = kernels.launch(
            "gather_features_staged", buffer, width, np.array(self._staged.address, np.uint64)
        )

    def gather(self, addresses: Sequence[int], num_rows: Sequence[int], tokens: Indices) -> None:
        """Copy segments of feature rows to their tokens.

        The features must stay as they are until the launch has run: memory that is reused in
        order of the stream does.

        Args:
            addresses: first byte of each segment, its rows contiguous.
            num_rows: rows of each segment.
            tokens: token of every feature row, segment after segment.

        Raises:
            InvariantBroken: another number of tokens than rows, or a token outside the buffer.
        """
        runs = self._plan(addresses, num_rows, tokens)
        num_blocks = _blocks(runs.num_rows)
        if num_feature_words(len(runs.addresses)) > RECORD_WORDS:
            self._upload(runs)
            self._launch_staged(num_blocks, 0, self._stream())
        elif runs.num_rows:
            write_features(self._record, runs, self._multiple)
            self._launch(num_blocks, 0, self._stream())

    def stage(self, addresses: Sequence[int], num_rows: Sequence[int], tokens: Indices) -> None:
        """Upload what the next ``launch_staged`` copies; see ``gather``. Not to be captured."""
        self._upload(self._plan(addresses, num_rows, tokens))

    def launch_staged(self) -> None:
        """Copy what was staged last; nothing, if that was empty."""
        self._launch_staged(_blocks(self._num_tokens), 0, self._stream())

    def _plan(
        self, addresses: Sequence[int], num_rows: Sequence[int], tokens: Indices
    ) -> FeatureRuns:
        if sum(num_rows) != len(tokens):
            raise InvariantBroken(f"{sum(num_rows)} feature rows for {len(tokens)} tokens")
        runs = feature_runs(addresses, num_rows, tokens, self._row_bytes)
        if runs.num_rows:
            first, stop = runs.token_bounds()
            if first < 0 or stop > self._num_tokens:
                raise InvariantBroken(
                    f"tokens in [{first}, {stop}); expected [0, {self._num_tokens})"
                )
        return runs

    def _upload(self, runs: FeatureRuns) -> None:
        num_words = write_features(self._ring.slot(), runs, self._multiple)
        self._ring.upload(self._staged.address, num_words, self._stream())


def _blocks(num_rows: int) -> int:
    return -(-num_rows // _ROWS_A_BLOCK)
