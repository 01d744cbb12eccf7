"""The storage by itself: what derives from the declarations, and its own invariants."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vlbatch import NumpyBackend
from vlbatch.errors import InvariantBroken
from vlbatch.fields import Field, FieldRegistry, FieldStorage, host, ragged, row, row_valued
from vlbatch.order import DECODE, HOLE, place_rows, vacate_rows


def make_storage(*fields: Field, capacity: int = 4) -> FieldStorage[Any, Any]:
    return FieldStorage(FieldRegistry(fields), capacity, 0, NumpyBackend())


def close_hole(num_rows: int, hole: int) -> Any:
    """Moves that close one hole among decodes: the last row goes there."""
    classes = np.full(num_rows, DECODE)
    classes[hole] = HOLE
    return place_rows(classes, np.full(num_rows, -1))


def test_a_long_row_moves_into_a_short_one_and_back() -> None:
    """The valid prefix moves; what was longer in the destination is gone (FastDeploy I13)."""
    storage = make_storage(ragged("t", 100, residency="rows", default=-1))
    storage.write("t", 0, np.arange(100))
    storage.write("t", 1, np.arange(2))
    storage.move(close_hole(2, 0))
    assert storage.read("t", 0).tolist() == [0, 1]  # type: ignore[attr-defined]  # array
    assert (storage.arrays["t"][0, 2:] == -1).all()
    assert (storage.arrays["t"][1] == -1).all()
    assert storage.lengths["t"].tolist() == [2, 0, 0, 0]
    storage.check()


def test_reset_forgets_lengths() -> None:
    """After a reset no ragged row has a valid prefix."""
    storage = make_storage(ragged("t", 4), ragged("u", 4, residency="rows"))
    for name in "tu":
        storage.write(name, 1, np.arange(3))
    storage.reset()

    assert [storage.lengths[name].tolist() for name in "tu"] == [[0] * 4] * 2


def test_slot_resident_fields_stay() -> None:
    """No move touches a field that is indexed by slot."""
    fields = row("x", residency="slots"), ragged("t", 3), host("h")
    storage = make_storage(*fields)
    for slot in range(3):
        storage.initialise(
            slot, slot, {"x": np.array(slot), "t": np.array([slot]), "h": f"h{slot}"}
        )
    before = {name: array.copy() for name, array in storage.arrays.items()}
    storage.move(close_hole(3, 0))
    storage.move(vacate_rows(0, 2, np.zeros(2, dtype=np.bool_)))

    for name, array in storage.arrays.items():
        np.testing.assert_array_equal(array, before[name])
    assert storage.objects["h"] == ["h0", "h1", "h2", None]
    assert storage.lengths["t"].tolist() == [1, 1, 1, 0]


def test_release_drops_slot_objects() -> None:
    """A departed request's slot holds no object; a row's are dropped by the move that clears it."""
    storage = make_storage(host("s"), host("r", residency="rows"))
    storage.initialise(1, 2, {"s": "s", "r": "r"})
    storage.release(2)
    assert (storage.objects["s"], storage.objects["r"]) == ([None] * 4, [None, "r", None, None])
    storage.move(vacate_rows(1, 2, np.zeros(2, dtype=np.bool_)))
    assert storage.objects["r"] == [None] * 4


def test_row_numbers_are_remapped_without_a_move() -> None:
    """A row that is vacated is no longer named, though nothing moved (FastDeploy I27)."""
    storage = make_storage(row_valued("r"), row_valued("w", (3,), whole=True))
    storage.arrays["r"][:] = [1, 0, 2, -1]
    storage.arrays["w"][:] = [2, 1, 0]
    storage.move(vacate_rows(2, 3, np.zeros(3, dtype=np.bool_)))

    assert storage.arrays["r"].tolist() == [1, 0, -1, -1]
    assert storage.arrays["w"].tolist() == [-1, 1, 0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_may_be_a_default(dtype: str) -> None:
    """A ragged row that is filled up with NaN is as it should be; another value is found."""
    storage = make_storage(ragged("t", 3, dtype, default=float("nan")))
    storage.write("t", 0, np.array([1.0]).astype(storage.registry["t"].stored_dtype))
    storage.check()
    storage.arrays["t"][0, 2] = 0
    with pytest.raises(InvariantBroken, match="'t' at index 0 holds values past its length 1"):
        storage.check()


def test_fresh_objects_are_made_for_what_is_not_given() -> None:
    """A default is made only for the fields that are not given."""
    numbers = iter(range(9))
    storage = make_storage(
        host("a", default=lambda: next(numbers)), host("b", default=5), row("x")
    )  # fmt: skip

    assert storage.fresh_objects({"b"}) == {"a": 0}
    assert storage.fresh_objects({"a"}) == {"b": 5}
    assert storage.fresh_objects(()) == {"a": 1, "b": 5}


def test_check_finds_a_moved_array() -> None:
    """An array that got another address is named."""
    storage = make_storage(row("x"), row("y"))
    storage._stored["y"] = np.zeros(4, dtype=np.int64)
    with pytest.raises(InvariantBroken, match=r"field 'y' moved from address \d+ to \d+"):
        storage.check()
