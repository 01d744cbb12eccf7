"""Expected features as a set of places, and the table of what differs."""

from __future__ import annotations

from typing import TypeAlias

from vlbatch.replay.oracle import FeatureRow
from vlbatch.replay.oracle.step import describe
from vlbatch.replay.scenario import FeatureRun, ItemSpec

Placed: TypeAlias = tuple[int, str, int]
"""Token index, key, feature row."""


def expand(run: FeatureRun, items: list[ItemSpec]) -> list[Placed]:
    """(token index, key, row) of a run: over the true places of its item where that has a mask."""
    rows = range(run.first, run.stop)
    tokens = list(range(run.index, run.index + len(rows)))
    for item in items:
        inside = item.offset <= run.index < item.offset + item.length
        if item.key == run.key and inside and item.embeds is not None:
            places = [item.offset + i for i, true in enumerate(item.embeds) if true]
            places = [place for place in places if place >= run.index]
            beyond = item.offset + item.length
            tokens = [*places, *range(beyond, beyond + len(rows))][: len(rows)]
            break
    return [(token, run.key, row) for token, row in zip(tokens, rows, strict=True)]


def table_of(req_id: str, expected: set[Placed], got: set[Placed]) -> tuple[FeatureRow, ...]:
    """One line for each token whose rows differ."""
    tokens = sorted({token for token, _, _ in expected ^ got})
    return tuple(
        FeatureRow(req_id, token, _rows_at(expected, token), _rows_at(got, token))
        for token in tokens
    )


def _rows_at(places: set[Placed], token: int) -> str:
    rows = [describe((key, row, 0)) for index, key, row in sorted(places) if index == token]
    return " and ".join(rows) or describe(None)
