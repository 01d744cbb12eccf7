"""From outputs by row to outputs by slot, for engines that read them so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from exposed import dtype_of, to_host
from order_factories import ints

from vlbatch.errors import InvalidField, StaleOrder
from vlbatch.order import outputs_by_slot, sums_by_slot

SLOTS = [3, 0, 4]  # of rows 0, 1, 2; of five slots 1 and 2 are nobody's


class Logprobs(NamedTuple):
    """Nested output."""

    ids: Any
    ranks: Any


def maker(library: str, dtype: str) -> Callable[[Any], Any]:
    """Constructor of one library's arrays of a dtype; skips where it is not installed."""
    tensors = pytest.importorskip(library)
    if library == "numpy":
        return lambda values: np.array(values, dtype)
    if library == "paddle":
        return lambda values: tensors.to_tensor(values, dtype=dtype)
    return lambda values: tensors.tensor(values, dtype=getattr(tensors, dtype))


libraries = pytest.mark.parametrize("library", ["numpy", "paddle", "torch"])


@libraries
@pytest.mark.parametrize(
    ("dtype", "absent"),
    [("int64", -1), ("int32", -1), ("int8", -1), ("bool", False), ("uint8", 0)],
)
def test_entries_of_exact_types(library: str, dtype: str, absent: int) -> None:
    """Entry ``j`` is slot ``j``'s; a slot without a row has -1, or the zero of its type."""
    make = maker(library, dtype)
    got = outputs_by_slot(make([1, 0, 1]), SLOTS, 5)
    assert to_host(got).tolist() == [0, absent, absent, 1, 1]
    assert dtype_of(got) == dtype_of(make([1]))
    assert type(got) is type(make([1]))


@libraries
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_absent_floats(library: str, dtype: str) -> None:
    """A slot without a row has NaN in every place of a floating output of several axes."""
    got = to_host(outputs_by_slot(maker(library, dtype)([[1, 2], [3, 4], [5, 6]]), SLOTS, 5))
    assert got[[0, 3, 4]].tolist() == [[3, 4], [1, 2], [5, 6]]
    assert np.isnan(got[1:3]).all()


@pytest.mark.parametrize("library", ["paddle", "torch"])
def test_absent_bfloat16(library: str) -> None:
    """It is NaN in bfloat16 too."""
    got: Any = outputs_by_slot(maker(library, "bfloat16")([1.0, 2.0, 3.0]), SLOTS, 5)
    got = got.astype("float32") if library == "paddle" else got.float()
    values = to_host(got)
    assert values[[0, 3, 4]].tolist() == [2, 1, 3]
    assert np.isnan(values[1:3]).all()


@libraries
def test_the_source_is_not_written(library: str) -> None:
    """The result is new even where no row moves."""
    source = maker(library, "int64")([[7], [8]])
    got: Any = outputs_by_slot(source, [0, 1], 2)
    got[0] = 99
    assert to_host(source).tolist() == [[7], [8]]


def test_lists_and_tuples() -> None:
    """Lists and tuples stay what they are, with ``None`` for a slot without a row."""
    assert outputs_by_slot(["a", "b", "c"], SLOTS, 5) == ["b", None, None, "a", "c"]
    assert outputs_by_slot(("a", "b", "c"), SLOTS, 5) == ("b", None, None, "a", "c")


@libraries
@pytest.mark.parametrize("slots", [[3, 0, 4], [0, 3, 4], [4, 3, 0]])
def test_groups(library: str, slots: list[int]) -> None:
    """With counts the groups of all slots follow each other by slot; absent slots have none."""
    groups = [[10, 11], [], [20, 21, 22]]
    flat = [value for group in groups for value in group]
    expected = [value for _, group in sorted(zip(slots, groups, strict=True)) for value in group]
    counts = ints([2, 0, 3])
    got = outputs_by_slot(maker(library, "int64")(flat), slots, 5, counts=counts)
    assert to_host(got).tolist() == expected
    assert outputs_by_slot(flat, slots, 5, counts=[2, 0, 3]) == expected


@libraries
def test_nested_containers(library: str) -> None:
    """Mappings and named tuples keep their form at any depth; ``None`` stays."""
    make = maker(library, "int64")
    output = {"top": Logprobs(make([1, 2, 3]), {"deep": ["a", "b", "c"]}), "none": None}
    got: Any = outputs_by_slot(output, SLOTS, 5)
    assert got.keys() == {"top", "none"}
    assert got["none"] is None
    assert isinstance(got["top"], Logprobs)
    assert to_host(got["top"].ids).tolist() == [2, -1, -1, 1, 3]
    assert got["top"].ranks == {"deep": ["b", None, None, "a", "c"]}

    grouped: Any = outputs_by_slot(
        Logprobs(make([1, 2, 3]), ["a", "b", "c"]), [1, 0], 2, counts=[2, 1]
    )
    assert to_host(grouped.ids).tolist() == [3, 1, 2]
    assert grouped.ranks == ["c", "a", "b"]


@libraries
def test_no_rows(library: str) -> None:
    """An output without entries stays as it is; a list gets one ``None`` a slot."""
    empty = maker(library, "int64")([])
    assert outputs_by_slot(empty, [], 2) is empty
    assert outputs_by_slot([], [], 2) == [None, None]
    assert outputs_by_slot(empty, [1, 0], 2, counts=[0, 0]) is empty
    assert outputs_by_slot(None, [1], 2) is None


@pytest.mark.parametrize("slots", [[0, 0], [0, 5], [-1, 0]])
def test_impossible_slots(slots: list[int]) -> None:
    """Slots out of range or given twice are refused, in both functions."""
    with pytest.raises(InvalidField, match=r"expected each once, in 0\.\.4"):
        outputs_by_slot([1, 2], slots, 5)
    with pytest.raises(InvalidField, match=r"expected each once, in 0\.\.4"):
        sums_by_slot(np.array([0, 1, 2]), slots, 5)


@pytest.mark.parametrize(
    ("output", "counts", "error", "says"),
    [
        ([1, 2], None, StaleOrder, "outputs has 2 entries; the rows of this order have 3"),
        (np.zeros((4, 1)), None, StaleOrder, "outputs has 4 entries"),
        ({"a": {"b": [1]}}, None, StaleOrder, r"outputs\['a'\]\['b'\] has 1 entries"),
        (Logprobs([1, 2, 3], [1]), None, StaleOrder, "outputs.ranks has 1 entries"),
        ([1, 2, 3], [1, 1, 2], StaleOrder, "has 3 entries; the rows of this order have 4"),
        ([1, 2, 3], [1, 2], StaleOrder, "counts has 2 entries; the order has 3 rows"),
        ([1, 2, 3], [2, 2, -1], InvalidField, "negative"),
        (5, None, InvalidField, "outputs is a int"),
        ("abc", None, InvalidField, "outputs is a str"),
        (np.array(5), None, InvalidField, "without axes"),
    ],
)
def test_refused_outputs(
    output: object, counts: list[int] | None, error: type[Exception], says: str
) -> None:
    """Another number of entries is refused, and the message names the member."""
    with pytest.raises(error, match=says):
        outputs_by_slot(output, SLOTS, 5, counts=counts)


@libraries
@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_sums(library: str, shape: tuple[int, ...]) -> None:
    """Sums over rows become sums over slots, in their type and form; absent slots add nothing."""
    make = maker(library, "int32")
    sums = make([0, 2, 7, 8]).reshape(shape)  # rows of 2, 5 and 1
    got: Any = sums_by_slot(sums, SLOTS, 5)
    assert to_host(got).ravel().tolist() == [0, 5, 5, 5, 7, 8]
    assert got.ndim == len(shape)
    assert dtype_of(got) == "int32"
    assert to_host(sums).ravel().tolist() == [0, 2, 7, 8]


def test_sums_of_no_rows() -> None:
    """Without rows all sums are 0."""
    assert to_host(sums_by_slot(np.array([0]), [], 3)).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(("sums", "error"), [(np.array([0, 1, 2]), StaleOrder), (5, InvalidField)])
def test_refused_sums(sums: object, error: type[Exception]) -> None:
    """There must be one sum more than rows."""
    with pytest.raises(error, match="sums"):
        sums_by_slot(sums, SLOTS, 5)


def test_against_a_plain_loop(seed: int) -> None:
    """Random rows, slots and counts agree with a loop over slots."""
    rng = np.random.default_rng(seed)
    for _ in range(200):
        num_slots = int(rng.integers(1, 9))
        num_rows = int(rng.integers(1, num_slots + 1))
        slots = rng.permutation(num_slots)[:num_rows].tolist()
        counts = rng.integers(0, 4, num_rows)
        entries = list(range(int(counts.sum())))
        groups = np.split(np.array(entries, int), np.cumsum(counts)[:-1])
        by_slot = dict(zip(slots, groups, strict=True))
        expected = [by_slot[s].tolist() if s in by_slot else [] for s in range(num_slots)]
        got = outputs_by_slot(entries, slots, num_slots, counts=counts)
        assert got == [value for group in expected for value in group]
        sums = sums_by_slot(np.array([0, *np.cumsum(counts)]), slots, num_slots)
        assert np.diff(to_host(sums)).tolist() == [len(group) for group in expected]


@pytest.mark.parametrize(
    ("library", "make"), [("numpy", "array"), ("paddle", "to_tensor"), ("torch", "tensor")]
)
def test_slots_as_an_array(library: str, make: str) -> None:
    """Slots may be an array or tensor of integers; twice the same, or floats, are refused."""
    make_array = getattr(pytest.importorskip(library), make)
    rows = np.array([[1, 2], [3, 4]])
    got = outputs_by_slot(rows, make_array([1, 0]), 2)
    assert np.array_equal(got, [[3, 4], [1, 2]])  # type: ignore[arg-type]
    with pytest.raises(InvalidField, match="expected each once"):
        outputs_by_slot(rows, make_array([1, 1]), 2)
    with pytest.raises(InvalidField, match="expected integers"):
        outputs_by_slot(rows, make_array([1.0, 0.0]), 2)


def test_absent_objects_and_sums_of_two_columns() -> None:
    """An array of objects gets ``None`` where no row is; sums have one number an entry."""
    got = outputs_by_slot(np.array(["a", {}], dtype=object), [2, 0], 3)
    assert list(got) == [{}, None, "a"]  # type: ignore[call-overload]
    with pytest.raises(InvalidField, match=r"sums have shape \(3, 2\)"):
        sums_by_slot(np.zeros((3, 2)), [0, 1], 2)
