"""Drafts from the request's own tokens: what followed the last time the same words were said."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from vlbatch.errors import InvalidSetting
from vlbatch.order import IntArray


def propose_ngram(
    token_ids: IntArray,
    *,
    num_drafts: int,
    max_ngram: int = 4,
    min_ngram: int = 1,
    window: int = 8192,
    excluded: Collection[int] = (),
) -> IntArray:
    """Draft what followed the latest earlier occurrence of the longest matching suffix.

    Later occurrences that are not followed by a whole draft count only where none is.

    Prompt lookup decoding (Saxena, 2023). At most ``max_ngram`` passes over ``window`` tokens.

    Args:
        token_ids: int64 ``[num_known]`` prompt and outputs, the newest token included.
        num_drafts: most tokens to draft.
        max_ngram: longest suffix to look for.
        min_ngram: shortest suffix worth a draft.
        window: latest tokens to search.
        excluded: ids at which a draft ends, before them: placeholders, which a model must not be
            given as text.

    Returns:
        int64 ``[0 .. num_drafts]``; empty if no suffix occurs earlier.

    Raises:
        InvalidSetting: a number is below 1, or ``min_ngram`` above ``max_ngram``.

    """
    if min(num_drafts, min_ngram, window) < 1 or max_ngram < min_ngram:
        raise InvalidSetting(
            f"got num_drafts {num_drafts}, min_ngram {min_ngram}, max_ngram {max_ngram}, window"
            f" {window}; expected 1 <= min_ngram <= max_ngram and the others >= 1",
            setting="num_drafts, min_ngram, max_ngram, window",
        )
    recent = token_ids[-window:]
    ends = _suffix_ends(recent, min_ngram, max_ngram)
    if not len(ends):
        return recent[:0].copy()
    followed = ends[ends + num_drafts < len(recent)]  # by a whole draft
    after = int(followed[-1] if len(followed) else ends[0]) + 1
    draft = recent[after : after + num_drafts]
    banned = np.flatnonzero(np.isin(draft, list(excluded)))
    return draft[: banned[0]].copy() if len(banned) else draft.copy()


def _suffix_ends(tokens: IntArray, min_ngram: int, max_ngram: int) -> IntArray:
    """Where the longest suffix ends that occurs before the end, ascending; empty for none."""
    ends: IntArray = np.arange(len(tokens) - 1)
    found = ends[:0]
    for length in range(1, min(max_ngram, len(tokens) - 1) + 1):
        ends = ends[ends >= length - 1]
        ends = ends[tokens[ends - (length - 1)] == tokens[-length]]
        if not len(ends):
            break
        if length >= min_ngram:
            found = ends
    return found
