"""Precomputed features that a request brings in place of media: the check before admission."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vlbatch.errors import InvalidItem, PlaceholderMismatch

if TYPE_CHECKING:
    import numpy.typing as npt


def check_embeds(
    levels: Sequence[npt.NDArray[np.generic]],
    *,
    num_rows: int,
    hidden_size: int,
    num_levels: int = 1,
    dtype: str = "float32",
    name: str = "embeddings",
    req_id: str | None = None,
) -> None:
    """Refuse precomputed features that the model could not take in place of its encoder's.

    Args:
        levels: one array ``[num_rows, hidden_size]`` a level, in the encoder's order.
        num_rows: placeholder tokens that take a row.
        hidden_size: width of the language model's embeddings.
        num_levels: levels that the model reads (more than one with deep-layer features).
        dtype: numpy name of the dtype that the model runs in.
        name: what to call the features in a refusal.
        req_id: the request to name in a refusal.

    Raises:
        PlaceholderMismatch: another number of rows than placeholders.
        InvalidItem: something else than dense numpy arrays, or another number of levels, width or
            dtype, or a value that is not finite.
    """
    if len(levels) != num_levels:
        raise InvalidItem(
            f"{name} have {len(levels)} levels; the model reads {num_levels}", req_id=req_id
        )
    for number, level in enumerate(levels):
        text = f"level {number} of {name}"
        if not isinstance(level, np.ndarray):
            raise InvalidItem(
                f"{text} is a {type(level).__name__}; expected a dense numpy array", req_id=req_id
            )
        if level.ndim != 2 or level.shape[1] != hidden_size or level.dtype != np.dtype(dtype):
            raise InvalidItem(
                f"{text} is {level.dtype} {level.shape}; expected {dtype} [rows, {hidden_size}]",
                req_id=req_id,
            )
        if len(level) != num_rows:
            raise PlaceholderMismatch(
                f"{text} has {len(level)} rows for {num_rows} placeholder tokens;"
                " expected one row a placeholder",
                req_id=req_id,
            )
        if not np.isfinite(level.astype(np.float32, copy=False)).all():
            raise InvalidItem(f"{text} holds values that are not finite", req_id=req_id)
