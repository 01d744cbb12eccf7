"""Comparison of a batched run with each request alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from vlbatch.runner.alone import Answer
from vlbatch.runner.results import Result

LOGIT_TOLERANCE = 1e-3
"""Largest difference of a logit in float32. Batching changes sums by about 1e-5; features shifted
by one token, or 1-D positions, by 0.06 and more."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first place where a request did not get what it gets alone.

    Attributes:
        req_id: the request.
        step: step of the batched run.
        token: number of the generated token.
        what: the difference.
    """

    req_id: str
    step: int
    token: int
    what: str


def compare(
    results: Iterable[Result], answer: Callable[[Result], Answer]
) -> tuple[list[str], list[Mismatch]]:
    """Compare every finished request with the answer that it gets alone.

    Returns:
        ``(verified, mismatches)``: requests that agree; first differences, earliest step first.
    """
    verified: list[str] = []
    mismatches: list[Mismatch] = []
    for result in results:
        if result.status != "finished":
            continue
        found = _first_difference(result, answer(result))
        if found is None:
            verified.append(result.request.req_id)
        else:
            mismatches.append(found)
    return verified, sorted(mismatches, key=lambda m: m.step)


def _first_difference(result: Result, alone: Answer) -> Mismatch | None:
    req_id = result.request.req_id
    for i, step in enumerate(result.steps):
        if i >= len(alone.tokens):
            what = f"goes on with token {result.tokens[i]}; alone it ends here"
            return Mismatch(req_id, step, i, what)
        gap = float(np.abs(result.logits[i] - alone.logits[i]).max())
        if not gap <= LOGIT_TOLERANCE:  # NaN differs
            what = f"logits differ by {gap:.3g} (tolerance {LOGIT_TOLERANCE:g})"
            if result.tokens[i] != alone.tokens[i]:
                what += f", token {result.tokens[i]} instead of {alone.tokens[i]}"
            return Mismatch(req_id, step, i, what)
    return _end_difference(result, alone)


def _end_difference(result: Result, alone: Answer) -> Mismatch | None:
    """Compare where a request ended, and its fields."""
    req_id, step, count = result.request.req_id, result.steps[-1], len(result.tokens)
    if count < len(alone.tokens):
        what = f"ends; alone it goes on with token {alone.tokens[count]}"
        return Mismatch(req_id, step, count, what)
    assert result.prompt is not None  # noqa: S101 (it is finished)
    expected = {
        "token_ids": [*result.prompt.token_ids.tolist(), *result.tokens[:-1]],
        "max_tokens": result.request.max_tokens,
    }
    for name, value in expected.items():
        if not np.array_equal(np.asarray(result.final[name]), np.asarray(value)):
            what = f"field {name} is {result.final[name]}; expected {value}"
            return Mismatch(req_id, step, count - 1, what)
    return None
