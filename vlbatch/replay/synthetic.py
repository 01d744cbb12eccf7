"""The synthetic encoder: each feature row says which item, row, weights and level it is."""

from __future__ import annotations

from typing import Any

import numpy as np

from vlbatch.backends import Backend
from vlbatch.cache import EntryKey, Features
from vlbatch.features import FeatureInputs, FeatureSpec
from vlbatch.replay.fingerprints import to_host
from vlbatch.replay.oracle.values import FeatureValue

NUM_LEVELS = 2
SPEC = FeatureSpec(hidden_size=4, dtype="int64", num_levels=NUM_LEVELS)
"""Columns: number of the content, row of the item, weight epoch, level."""


class SyntheticEncoder:
    """Makes features on one backend, and reads them back.

    Args:
        backend: where they live.

    """

    # Any: the array types are the backend's own business
    def __init__(self, backend: Backend[Any, Any]) -> None:
        self._backend = backend
        self._contents: list[str] = []  # number - 1 -> content

    def encode(self, key: EntryKey, num_rows: int) -> Features:
        """One array ``[num_rows, 4]`` a level."""
        if key.content not in self._contents:
            self._contents.append(key.content)
        number = 1 + self._contents.index(key.content)
        levels = []
        for level in range(NUM_LEVELS):
            rows = [[number, row, key.epoch, level] for row in range(num_rows)]
            values = np.array(rows, dtype=np.int64).reshape(num_rows, 4)
            block = self._backend.allocate(4 * num_rows, "int64")
            array = self._backend.view(block, 0, (num_rows, 4))
            self._backend.write(array, 0, values)
            levels.append(self._backend.expose(array, "int64"))
        return tuple(levels)

    def read(self, inputs: FeatureInputs, level: int) -> list[tuple[int, FeatureValue]]:
        """Tokens of a step and the values that they get, at one level."""
        arrays = [to_host(array) for array in inputs.arrays(level)]
        rows = np.concatenate(arrays).tolist() if arrays else []
        tokens = inputs.tokens.tolist()
        if len(tokens) != len(rows):
            return [(-1, (f"{len(rows)} feature rows for {len(tokens)} tokens", 0, 0))]
        return [(token, self._value(row, level)) for token, row in zip(tokens, rows, strict=True)]

    def _value(self, row: list[int], level: int) -> FeatureValue:
        number, item_row, epoch, of_level = row
        known = 1 <= number <= len(self._contents)
        content = self._contents[number - 1] if known else f"no content, but {row}"
        if of_level != level:
            content = f"{content} at level {of_level}"
        return content, item_row, epoch
