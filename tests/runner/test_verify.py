"""The comparison of a batched answer with the one alone: what is a difference, and where."""

from __future__ import annotations

import numpy as np
import pytest
from made_runs import make_prompt

from vlbatch.errors import EncodeFailed
from vlbatch.runner import LOGIT_TOLERANCE, Request, Result, compare
from vlbatch.runner.alone import Answer


def make_logits(*tokens: int) -> list[np.ndarray]:
    return [np.eye(9, dtype=np.float32)[token] for token in tokens]


def make_result(req_id: str = "a", tokens: tuple[int, ...] = (5, 6, 7), **changes) -> Result:
    prompt = make_prompt(2)
    known = [*prompt.token_ids.tolist(), *tokens[:-1]]
    return Result(
        **{
            "request": Request(req_id, "made", max_tokens=3),
            "prompt": prompt,
            "tokens": list(tokens),
            "logits": make_logits(*tokens),
            "steps": list(range(10, 10 + len(tokens))),
            "final": {"token_ids": np.array(known), "max_tokens": np.int32(3)},
            "status": "finished",
            **changes,
        }
    )


def alone(*tokens: int):
    return lambda _: Answer(list(tokens), make_logits(*tokens))


def test_equal_answers_are_verified():
    """The same tokens, logits and fields are no difference."""
    assert compare([make_result()], alone(5, 6, 7)) == (["a"], [])


@pytest.mark.parametrize(
    ("gap", "clean"),
    [(LOGIT_TOLERANCE * 0.9, True), (LOGIT_TOLERANCE * 1.1, False), (float("nan"), False)],
)
def test_logits_within_the_tolerance(gap, clean):
    """One logit over the tolerance, or not a number, is a difference at its step and token."""
    result = make_result()
    result.logits[1][0] += gap

    verified, mismatches = compare([result], alone(5, 6, 7))

    assert bool(verified) == clean
    if not clean:
        assert [(m.req_id, m.step, m.token) for m in mismatches] == [("a", 11, 1)]
        assert mismatches[0].what.startswith(f"logits differ by {gap:.3g} (tolerance 0.001)")


def test_another_token():
    """Where the token differs as well both are named."""
    _, (mismatch,) = compare([make_result()], alone(5, 4, 7))

    assert (mismatch.step, mismatch.token) == (11, 1)
    assert mismatch.what == "logits differ by 1 (tolerance 0.001), token 6 instead of 4"


def test_too_long():
    """An answer that goes on where it ends alone differs at its first token too many."""
    _, (mismatch,) = compare([make_result()], alone(5, 6))

    assert (mismatch.step, mismatch.token) == (12, 2)
    assert mismatch.what == "goes on with token 7; alone it ends here"


def test_too_short():
    """An answer that ends where it goes on alone differs at the token that is missing."""
    _, (mismatch,) = compare([make_result()], alone(5, 6, 7, 8))

    assert (mismatch.step, mismatch.token) == (12, 3)
    assert mismatch.what == "ends; alone it goes on with token 8"


@pytest.mark.parametrize(
    ("field", "value"), [("max_tokens", np.int32(4)), ("token_ids", np.array([5, 6]))]
)
def test_fields(field, value):
    """A field that ends with another value than the request's own is a difference."""
    result = make_result()
    result.final[field] = value

    _, (mismatch,) = compare([result], alone(5, 6, 7))

    assert mismatch.what.startswith(f"field {field} is {value}; expected")


def test_only_finished_requests_are_compared():
    """Refused and failed requests have no answer to compare; alone they might raise."""

    def never(_):
        raise AssertionError("asked")

    failed = make_result(status="failed", error=EncodeFailed("x", req_id="a"))
    refused = Result(Request("b", "made"), status="refused", error=EncodeFailed("x", req_id="b"))

    assert compare([failed, refused], never) == ([], [])


def test_earliest_step_first():
    """Mismatches come by step, so that the first one is where things went wrong."""
    late = make_result("late", steps=[20, 21, 22])
    early = make_result("early", steps=[3, 4, 30])

    _, mismatches = compare([late, early], alone(1, 6, 7))

    assert [(m.req_id, m.step) for m in mismatches] == [("early", 3), ("late", 20)]
