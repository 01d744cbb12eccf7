"""What a file says that is not right, one sentence each, for the cells of the picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from vlbatch.replay.expect_features import expand
from vlbatch.replay.items import oracle_items
from vlbatch.replay.scenario import Expectation, FeatureRun, ItemSpec

Place = tuple[int, str, int]
"""Token index, key and feature row."""


def wrong_features(
    runs: Sequence[FeatureRun], items: Sequence[ItemSpec], chunk: tuple[int, int]
) -> str | None:
    """Say which feature rows of a chunk the file has otherwise than they belong there.

    Args:
        runs: of the file.
        items: of the request.
        chunk: tokens ``[first, stop)``.

    """
    first, stop = chunk
    found: dict[int, set[tuple[str, int]]] = {}
    for run in runs:
        for token, key, row in expand(run, list(items)):
            found.setdefault(token, set()).add((key, row))
    right = {
        token: {(item.key, row)}
        for item in oracle_items(items)
        for row, token in enumerate(item.places())
        if first <= token < stop
    }
    wrong = [t for t in sorted(found.keys() | right.keys()) if found.get(t) != right.get(t)]
    if not wrong:
        return None
    token = wrong[0]
    more = f" (and {len(wrong) - 1} tokens more)" if len(wrong) > 1 else ""
    return f"token {token} got {_show(found.get(token))}; right is {_show(right.get(token))}{more}"


def _show(rows: set[tuple[str, int]] | None) -> str:
    return " and ".join(f"{key} row {row}" for key, row in sorted(rows or ())) or "no feature"


def wrong_positions(
    axes: Sequence[Sequence[int]], right: Sequence[Sequence[int]], first: int
) -> str | None:
    """Say which token of a chunk has other positions in the file.

    Args:
        axes: of the file; one list stands for every axis.
        right: one list an axis.
        first: token of the chunk.

    """
    given = [tuple(axis) for axis in axes]
    if len(given) == 1:
        given *= len(right)
    if any(len(axis) != len(right[0]) for axis in given):
        return f"{len(given[0])} positions; right are {len(right[0])}"
    for number, (got, expected) in enumerate(
        zip(zip(*given, strict=True), zip(*right, strict=True), strict=True)
    ):
        if got != expected:
            return f"token {first + number} is at {got}; right is {expected}"
    return None


def wrong_rows(recorded: Sequence[str], busy: Sequence[str], rows: Sequence[str]) -> dict[int, str]:
    """Say which rows hold another request in the file: row -> sentence.

    Args:
        recorded: requests by row, of the file.
        busy: requests with tokens, by row.
        rows: these and the idle ones behind them.

    """
    if list(recorded) in (list(busy), list(rows)):
        return {}
    return {
        row: f"holds what belongs to {got}"
        for row, (got, right) in enumerate(zip(recorded, rows, strict=False))
        if got != right
    }


def wrong_encodes(
    expectation: Expectation, encoded: Mapping[str, int], hits: Sequence[str], lost: set[str]
) -> list[str]:
    """Say what the file has encoded, found or failed otherwise.

    Args:
        expectation: of the file.
        encoded: keys encoded.
        hits: keys found ready.
        lost: keys whose encode failed.

    """
    faults = []
    recorded = set(expectation.encoded or ()) - lost
    if expectation.encoded is not None and recorded != encoded.keys() - lost:
        faults.append(f"encoded {_names(recorded)}; right is {_names(encoded)}")
    if expectation.hits is not None and not set(hits) <= set(expectation.hits):
        faults.append(f"found {_names(expectation.hits)} in the cache; right is {_names(hits)}")
    return faults


def _names(keys: Iterable[str]) -> str:
    return ", ".join(sorted(keys)) or "nothing"
