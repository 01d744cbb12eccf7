"""Drafts from the request's own tokens."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from vlbatch.errors import InvalidSetting
from vlbatch.runner.ngram import propose_ngram


def drafted(tokens: list[int], num_drafts: int = 3, **settings: Any) -> list[int]:
    known = np.array(tokens, dtype=np.int64)
    return propose_ngram(known, num_drafts=num_drafts, **settings).tolist()


def naive(
    tokens: list[int], num_drafts: int, max_ngram: int, min_ngram: int, window: int
) -> list[int]:
    """The rule, one place at a time."""
    tokens = tokens[-window:]
    for length in range(min(max_ngram, len(tokens) - 1), min_ngram - 1, -1):
        suffix = tokens[-length:]
        starts = [s for s in range(len(tokens) - length) if tokens[s : s + length] == suffix]
        whole = [s for s in starts if s + length + num_drafts <= len(tokens)]
        if starts:
            after = (whole[-1] if whole else starts[0]) + length
            return tokens[after : after + num_drafts]
    return []


def test_what_followed_last_time() -> None:
    """The draft is what followed the longest suffix that occurs before."""
    assert drafted([1, 2, 3, 4, 5, 9, 2, 3]) == [4, 5, 9]
    assert drafted([1, 2, 3, 4, 5, 9, 2, 3], num_drafts=1) == [4]


def test_longer_matches_win() -> None:
    """A longer suffix far back beats a shorter one nearby; ``max_ngram`` bounds it."""
    tokens = [1, 2, 3, 7, 8, 3, 5, 6, 1, 2, 3]

    assert drafted(tokens, num_drafts=2) == [7, 8]
    assert drafted(tokens, num_drafts=2, max_ngram=1) == [5, 6]


def test_latest_whole_draft_wins() -> None:
    """Of equal matches the latest that a whole draft follows; else the longest that there is."""
    assert drafted([5, 1, 1, 1, 5, 2, 2, 2, 5]) == [2, 2, 2]
    assert drafted([4, 4, 4, 4, 4]) == [4]
    assert drafted([7, 7]) == [7]


def test_nothing_to_say() -> None:
    """No earlier occurrence, one token or none: an empty draft."""
    assert drafted([1, 2, 3]) == []
    assert drafted([1]) == []
    assert drafted([]) == []
    assert drafted([1, 2, 3, 1], min_ngram=2) == []


def test_placeholders_end_a_draft() -> None:
    """An excluded id is never drafted, nor anything after it (the model would read it as text)."""
    assert drafted([1, 2, 99, 4, 1], excluded={99}) == [2]
    assert drafted([1, 99, 4, 1], excluded={99}) == []


def test_window() -> None:
    """Only the latest tokens are searched."""
    assert drafted([1, 2, 3, 4, 5, 1], window=5) == []
    assert drafted([1, 2, 3, 4, 5, 1], window=6) == [2, 3, 4]


def test_the_draft_is_a_copy() -> None:
    """Writing to a draft does not change the request's tokens."""
    tokens = np.array([1, 2, 3, 1])
    propose_ngram(tokens, num_drafts=2)[:] = 0

    assert tokens.tolist() == [1, 2, 3, 1]


def test_settings() -> None:
    """Numbers below 1 and crossed bounds are refused."""
    for bad in (
        {"num_drafts": 0},
        {"min_ngram": 0},
        {"window": 0},
        {"min_ngram": 3, "max_ngram": 2},
    ):
        with pytest.raises(InvalidSetting, match="expected 1 <= min_ngram"):
            drafted([1, 2], **bad)


def test_random_tokens(seed: int) -> None:
    """Any tokens and settings give what a search place by place gives."""
    choose = random.Random(seed)
    for _ in range(2000):
        tokens = [choose.randint(0, 3) for _ in range(choose.randint(0, 25))]
        num_drafts, window = choose.randint(1, 4), choose.randint(1, 30)
        max_ngram = choose.randint(1, 5)
        min_ngram = choose.randint(1, max_ngram)
        got = drafted(tokens, num_drafts, max_ngram=max_ngram, min_ngram=min_ngram, window=window)

        expected = naive(tokens, num_drafts, max_ngram, min_ngram, window)
        assert got == expected, (f"VLBATCH_SEED={seed}", tokens)
