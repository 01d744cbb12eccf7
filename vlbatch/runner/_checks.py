"""Checks of what a step or an encoder call hands to an engine, made before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import numpy as np

from vlbatch.errors import FeatureRowsMismatch, InvalidField, InvalidItem

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from vlbatch.runner.inputs import MediaPatches, StepInputs


def check_inputs(inputs: StepInputs, *, vocab_size: int) -> None:
    """Refuse token ids, positions, feature places or logit places that are out of bounds.

    Raises:
        InvalidField: naming the array, what was got and what was expected.
    """
    num_tokens = inputs.token_ids.size
    if inputs.token_ids.shape != (num_tokens,) or num_tokens == 0:
        refuse("token_ids", f"shape {inputs.token_ids.shape}", "[num_tokens], at least one token")
    if inputs.positions.shape != (3, num_tokens):
        refuse("positions", f"shape {inputs.positions.shape}", f"(3, {num_tokens})")
    _check_bounds("token_ids", inputs.token_ids, vocab_size)
    _check_bounds("feature_tokens", inputs.feature_tokens, num_tokens)
    _check_bounds("logit_tokens", inputs.logit_tokens, num_tokens)
    if np.unique(inputs.feature_tokens).size < inputs.feature_tokens.size:
        refuse("feature_tokens", "a token place given twice", "each place once")


def check_feature_rows(
    inputs: StepInputs, shapes: Sequence[tuple[int, ...]], *, hidden_size: int
) -> None:
    """Refuse features (given by their shapes) that do not fill ``feature_tokens`` exactly.

    Raises:
        FeatureRowsMismatch: too few or too many rows, or rows of another width.
    """
    for shape in shapes:
        if len(shape) != 2 or shape[1] != hidden_size:
            raise FeatureRowsMismatch(
                f"features have shape {shape}, expected [rows, {hidden_size}]"
            )
    rows = sum(shape[0] for shape in shapes)
    if rows != inputs.feature_tokens.size:
        raise FeatureRowsMismatch(
            f"{rows} feature rows for {inputs.feature_tokens.size} placeholder tokens of the step"
        )


def check_hidden_rows(inputs: StepInputs, num_hidden: int) -> None:
    """Refuse another number of hidden states than tokens, for a draft head.

    Raises:
        InvalidField: with both numbers.
    """
    if num_hidden != inputs.token_ids.size:
        raise InvalidField(f"got {num_hidden} hidden states for {inputs.token_ids.size} tokens")


def count_feature_rows(items: Sequence[MediaPatches], *, merge: int, patch_dim: int) -> list[int]:
    """Return each item's feature rows, ``t * h * w / merge**2``.

    Raises:
        InvalidItem: the grid is empty or no multiple of ``merge``, or the patches do not fill it.
    """
    rows = []
    for index, item in enumerate(items):
        t, h, w = item.grid_thw
        if min(t, h, w) < 1 or h % merge or w % merge:
            raise InvalidItem(
                f"item {index} has grid {item.grid_thw}, expected h and w in multiples of {merge}"
            )
        if item.patches.shape != (t * h * w, patch_dim):
            raise InvalidItem(
                f"item {index} has patches {item.patches.shape}, "
                f"expected {(t * h * w, patch_dim)} for grid {item.grid_thw}"
            )
        rows.append(t * h * w // merge**2)
    return rows


def _check_bounds(name: str, values: npt.NDArray[np.int64], end: int) -> None:
    if values.ndim != 1:
        refuse(name, f"{values.ndim} dimensions", "one")
    if values.size and not 0 <= values.min() <= values.max() < end:
        refuse(name, f"values in [{values.min()}, {values.max()}]", f"values in [0, {end})")


def refuse(name: str, got: str, expected: str) -> NoReturn:
    """Raise ``InvalidField`` for the step's array of this name."""
    raise InvalidField(f"{name}: got {got}, expected {expected}")
