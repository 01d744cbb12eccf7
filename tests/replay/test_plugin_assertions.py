"""assert_features: byte for byte, and the message says which rows are which."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vlbatch.replay.assertions import assert_features


def rows(seed: int, num_rows: int = 4) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((num_rows, 3)).astype(np.float32)


def message_of(expected: object, got: object) -> list[str]:
    with pytest.raises(AssertionError) as raised:
        assert_features(expected, got)
    return str(raised.value).splitlines()


def test_equal() -> None:
    """Equal rows pass, as arrays and by name, NaN included."""
    holed = rows(0)
    holed[1, 1] = np.nan
    assert_features(rows(0), rows(0))
    assert_features({"a": rows(0), "b": holed}, {"b": holed.copy(), "a": rows(0)})


def test_permuted() -> None:
    """A row that is another expected row is named as that one."""
    assert message_of(rows(0), rows(0)[[0, 2, 1, 3]]) == [
        "features differ",
        "    row  is instead",
        "    1    row 2",
        "    2    row 1",
    ]


def test_swapped_between_requests() -> None:
    """By name, a row of another request is named with that request."""
    mixed = np.concatenate([rows(0)[:3], rows(1)[2:3]])
    assert message_of({"a": rows(0), "b": rows(1)}, {"a": mixed, "b": rows(1)}) == [
        "features differ",
        "     row  is instead",
        "  a  3    row 2 of b",
    ]


def test_changed() -> None:
    """A row that is no expected row at all is said to differ, and by how much."""
    changed = rows(0)
    changed[2, 1] += 0.25
    (line,) = message_of(rows(0), changed)[2:]
    assert " ".join(line.split()) == "2 no expected row (differs from its own by 0.25)"


def test_other_shape() -> None:
    """Another number of rows is said with both shapes."""
    assert message_of({"a": rows(0)}, {"a": rows(0, 3)})[1:] == [
        "  a: expected shape (4, 3), got (3, 3)"
    ]


def test_other_names() -> None:
    """A request without features, or one too many, is named."""
    assert message_of({"a": rows(0)}, {"b": rows(0)})[1:] == ["  expected ['a'], got ['b']"]


def test_tensors() -> None:
    """Tensors are compared with arrays by their values."""
    torch = pytest.importorskip("torch")
    assert_features(rows(0), torch.from_numpy(rows(0)))
