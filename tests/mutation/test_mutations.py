"""The mutations fit the library as it is, and the replay kit catches a sample of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from mutate import ROOT, judge
from mutations import MUTATIONS, Mutation

SAMPLE = (
    "one group of fields is skipped in a move",
    "a chunk takes one feature row too many",
    "references go before the look-ahead has passed",
    "a slot takes over the delta of its neighbour",
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.meaning)
def test_text_occurs_once(mutation: Mutation) -> None:
    """Each mutation changes exactly one place of the library."""
    source = (ROOT / "vlbatch" / mutation.file).read_text(encoding="utf-8")

    assert source.count(mutation.old) == 1
    assert mutation.new != mutation.old


def test_table() -> None:
    """There are at least 40 mutations, each with a meaning of its own."""
    assert len(MUTATIONS) >= 40
    assert len({mutation.meaning for mutation in MUTATIONS}) == len(MUTATIONS)


def test_apply_refuses_drift(tmp_path: Path) -> None:
    """A mutation whose place is gone is an error, not a pass."""
    shutil.copytree(ROOT / "vlbatch", tmp_path / "vlbatch")
    mutation = Mutation("step.py", "no such text", "", "nothing")

    with pytest.raises(ValueError, match=r"step\.py: 0 times 'no such text', not once"):
        mutation.apply(tmp_path / "vlbatch")


@pytest.mark.parametrize("meaning", SAMPLE)
def test_caught(meaning: str) -> None:
    """The kit catches the mutation, in a scenario or a random walk."""
    (mutation,) = (mutation for mutation in MUTATIONS if mutation.meaning == meaning)

    caught, find = judge(mutation)

    assert caught
    assert find
