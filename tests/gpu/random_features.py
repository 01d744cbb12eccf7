"""Random steps with features of odd sizes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass
class FeatureStep:
    """A step with features, all arrays as bytes.

    Attributes:
        row_bytes: of a token's embedding and of a feature row.
        out: the buffer before, ``[num_tokens * row_bytes]``.
        expected: the buffer after.
        segments: feature rows that belong together, ``[rows * row_bytes]`` each.
        num_rows: rows of each segment.
        tokens: int64, token of each row.

    """

    row_bytes: int
    out: Array
    expected: Array
    segments: list[Array]
    num_rows: list[int]
    tokens: Array


def random_step(rng: random.Random, max_tokens: int, row_bytes: int | None = None) -> FeatureStep:
    """Segments of 0 rows and more, some for consecutive tokens, some not."""
    bits = np.random.default_rng(rng.getrandbits(32))
    row_bytes = row_bytes or rng.choice((1, 2, 6, 24, 64, 130, 1000, 4096))
    num_tokens = rng.randint(1, max_tokens)
    out = bits.integers(0, 256, num_tokens * row_bytes, dtype=np.uint8)
    num_places = rng.choice((0, num_tokens, rng.randint(0, num_tokens)))
    places = np.sort(bits.choice(num_tokens, num_places, replace=False)).astype(np.int64)
    segments, num_rows = [], []
    while sum(num_rows) < num_places:
        num_rows.append(rng.randint(0, num_places - sum(num_rows)))
        skipped = rng.randint(0, 3) * row_bytes
        array = bits.integers(0, 256, skipped + num_rows[-1] * row_bytes, dtype=np.uint8)
        segments.append(array[skipped:])
    expected = out.copy().reshape(num_tokens, row_bytes)
    if num_places:
        expected[places] = np.concatenate(segments).reshape(-1, row_bytes)
    return FeatureStep(row_bytes, out, expected.reshape(-1), segments, num_rows, places)
