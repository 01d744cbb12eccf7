"""``assert_features``: are these the expected feature rows, and if not, which ones are they?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vlbatch.replay.fingerprints import FingerprintBook, host_rows, row_fingerprints

_MAX_LINES = 12
"""Lines of a table in a message."""


def assert_features(expected: object, got: object) -> None:
    """Assert that feature rows are the expected ones, byte for byte.

    Args:
        expected: array or tensor ``[rows, hidden]``, or a mapping of names (of requests, of items)
            to them.
        got: the same.

    Raises:
        AssertionError: with a table of the rows that differ, and which row each one is instead.

    """
    __tracebackhide__ = True
    wanted, found = _named(expected), _named(got)
    lines = []
    if wanted.keys() != found.keys():
        lines.append(f"  expected {sorted(wanted)}, got {sorted(found)}")
    book = FingerprintBook()
    for name, features in wanted.items():
        book.learn(name, row_fingerprints(features))
    rows: list[tuple[str, ...]] = []
    for name in [name for name in wanted if name in found]:
        shapes = [host_rows(features).shape for features in (wanted[name], found[name])]
        if shapes[0] != shapes[1]:
            lines.append(f"  {_of(name)}expected shape {shapes[0]}, got {shapes[1]}")
        else:
            rows += _wrong_rows(name, wanted[name], found[name], book)
    if rows:
        lines += table(("", "row", "is instead"), rows)
    if lines:
        raise AssertionError("\n".join(["features differ", *lines]))


def _named(features: object) -> dict[str, object]:
    if isinstance(features, Mapping):
        return {str(name): rows for name, rows in features.items()}
    return {"": features}


def _of(name: str) -> str:
    return f"{name}: " if name else ""


def _wrong_rows(
    name: str, expected: object, got: object, book: FingerprintBook
) -> list[tuple[str, ...]]:
    prints = row_fingerprints(got)
    wrong = np.flatnonzero(prints != row_fingerprints(expected))
    rows: list[tuple[str, ...]] = []
    for row, source in zip(wrong.tolist(), book.find(prints[wrong], [name]), strict=True):
        if source is None:
            gap = np.abs(
                host_rows(got)[row].astype(np.float64) - host_rows(expected)[row].astype(np.float64)
            ).max()
            what = f"no expected row (differs from its own by {gap:.3g})"
        else:
            what = f"row {source[1]}" + (f" of {source[0]}" if source[0] else "")
        rows.append((name, str(row), what))
    return rows


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay out columns of text, of many rows the first ones."""
    shown = [header, *rows[:_MAX_LINES]]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in shown
    ]
    if len(rows) > _MAX_LINES:
        lines.append(f"  and {len(rows) - _MAX_LINES} more")
    return lines
