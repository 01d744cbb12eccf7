"""From outputs by row to outputs by request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from order_factories import ints, make_order

from vlbatch import InputBatch, NumpyBackend
from vlbatch.errors import InvalidField, StaleOrder


class SamplerOutput(NamedTuple):
    """What a sampler may return."""

    sampled_token_ids: Any
    selected_token_ranks: Any
    logprobs: Any = None


def as_list(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values


ARRAYS = ("numpy", "paddle", "torch")


@pytest.fixture(params=ARRAYS)
def make_array(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Constructor of one library's arrays; skipped where it is not installed."""
    library = pytest.importorskip(request.param)
    makers = {"numpy": "array", "paddle": "to_tensor", "torch": "tensor"}
    maker: Callable[[Any], Any] = getattr(library, makers[request.param])
    return maker


def test_array_rows(make_array: Callable[[Any], Any]) -> None:
    """Each request gets its row of an array, in any library, by name and never by rank.

    FastDeploy I14: the slots 7, 2 and 5 have no influence on who gets what.
    """
    order = make_order("abc", slots=[7, 2, 5])
    got = order.restore(make_array([[1, 2], [3, 4], [5, 6]]))

    assert {r: as_list(v) for r, v in got.items()} == {"a": [1, 2], "b": [3, 4], "c": [5, 6]}


def test_array_entries(make_array: Callable[[Any], Any]) -> None:
    """One axis gives one number a request."""
    got = make_order("abc").restore(make_array([4, 5, 6]))

    assert {r: as_list(v) for r, v in got.items()} == {"a": 4, "b": 5, "c": 6}


def test_ragged_logits(make_array: Callable[[Any], Any]) -> None:
    """With counts a request gets its own consecutive rows, or none (FastDeploy I17, I18)."""
    logits = make_array([[float(i), 10.0 * i] for i in range(6)])
    got = make_order("abcd").restore(logits, counts=[1, 0, 3, 2])

    assert {r: as_list(v) for r, v in got.items()} == {
        "a": [[0.0, 0.0]],
        "b": [],
        "c": [[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]],
        "d": [[4.0, 40.0], [5.0, 50.0]],
    }


def test_per_draft_groups(make_array: Callable[[Any], Any]) -> None:
    """K + 1 rows of a flat buffer belong to one request each (FastDeploy I4, I18)."""
    got = make_order("ab").restore(make_array(list(range(6))), counts=ints([3, 3]))

    assert {r: as_list(v) for r, v in got.items()} == {"a": [0, 1, 2], "b": [3, 4, 5]}


def test_sparse_slots_in_row_order() -> None:
    """Nothing is taken for granted when no row moved: a gap in the slots is no gap in outputs.

    FastDeploy I24: consumers by slot would read row 1 for slot 1, which nobody has.
    """
    batch = InputBatch([], backend=NumpyBackend(), capacity=4, max_model_len=32)
    for req_id in "abc":
        batch.add(req_id, prompt_len=4)
    batch.apply(batch.plan({"a": 1, "b": 1, "c": 1}))
    batch.remove("b")
    batch.apply(batch.plan({"a": 1, "c": 1}))
    plan = batch.plan({"a": 1, "c": 1})
    order = batch.apply(plan)

    assert plan.moves.is_identity
    assert order.slots.tolist() == [0, 2]
    assert order.restore(["of a", "of c"]) == {"a": "of a", "c": "of c"}


def test_slices_are_views() -> None:
    """Restoring copies no logits."""
    logits = np.zeros((4, 8))
    order = make_order("ab")

    assert all(np.shares_memory(v, logits) for v in order.restore(logits, counts=[1, 3]).values())
    assert all(np.shares_memory(v, logits) for v in order.restore(logits[:2]).values())


def test_lists() -> None:
    """Python lists are restored like arrays, by row and by counts (FastDeploy I15, I19, I20)."""
    order = make_order("abcd", slots=[3, 0, 1, 2])

    assert order.restore(["w", "x", "y", "z"]) == {"a": "w", "b": "x", "c": "y", "d": "z"}
    assert order.restore([1, 2, 3], counts=[2, 0, 0, 1]) == {
        "a": [1, 2],
        "b": [],
        "c": [],
        "d": [3],
    }
    assert order.restore((1, 2, 3, 4)) == {"a": 1, "b": 2, "c": 3, "d": 4}


def test_list_entries_may_be_anything() -> None:
    """What lies in a list is passed on as it is."""
    entries = [None, {"x": 1}, [1, 2]]
    got = make_order("abc").restore(entries)

    assert all(mine is theirs for mine, theirs in zip(got.values(), entries, strict=True))


def test_named_tuples_keep_their_type() -> None:
    """A named tuple comes back as the same type, every member restored (FastDeploy I16)."""
    outputs = SamplerOutput(np.array([5, 6]), [0, 3])
    got = make_order("ab").restore(outputs)

    assert got == {"a": SamplerOutput(5, 0, None), "b": SamplerOutput(6, 3, None)}
    assert all(type(part) is SamplerOutput for part in got.values())


def test_nested_containers() -> None:
    """Mappings of named tuples of lists are split all the way down, ``None`` stays ``None``."""
    outputs = {"sampler": SamplerOutput([1, 2], None), "extra": {"text": ["x", "y"]}, "mask": None}

    assert make_order("ab").restore(outputs) == {
        "a": {"sampler": SamplerOutput(1, None), "extra": {"text": "x"}, "mask": None},
        "b": {"sampler": SamplerOutput(2, None), "extra": {"text": "y"}, "mask": None},
    }
    assert make_order("ab").restore(None) == {"a": None, "b": None}


def test_counts_reach_every_member() -> None:
    """Counts hold for all leaves of a container."""
    outputs = {"ids": [1, 2, 3], "logits": np.arange(6).reshape(3, 2)}
    got = make_order("ab").restore(outputs, counts=[2, 1])

    assert got["a"]["ids"] == [1, 2]  # type: ignore[index]  # a mapping, as it was given
    assert got["b"]["logits"].tolist() == [[4, 5]]  # type: ignore[index]  # as above


@pytest.mark.parametrize(
    ("outputs", "counts", "got"),
    [
        (np.zeros(2), None, "outputs has 2 entries; the rows of this order have 3"),
        (np.zeros((4, 2)), None, "outputs has 4 entries"),
        ([], None, "outputs has 0 entries"),
        ({"ids": [1, 2, 3], "x": [1]}, None, r"outputs\['x'\] has 1 entries"),
        (SamplerOutput([1, 2, 3], [1, 2]), None, "outputs.selected_token_ranks has 2 entries"),
        (np.zeros(5), [1, 2, 1], "outputs has 5 entries; the rows of this order have 4"),
        (np.zeros(5), [3, 2], "counts has 2 entries; the order has 3 rows"),
        (np.zeros(5), ints([1, 1, 1, 2]), "counts has 4 entries"),
    ],
)
def test_wrong_lengths_are_refused(outputs: object, counts: Any, got: str) -> None:
    """Outputs of another step are refused, naming the member and both numbers."""
    with pytest.raises(StaleOrder, match=got):
        make_order("abc").restore(outputs, counts=counts)


@pytest.mark.parametrize(
    ("outputs", "got"),
    [
        (7, "outputs is a int"),
        ("abc", "outputs is a str"),
        (b"abc", "outputs is a bytes"),
        ({1, 2, 3}, "outputs is a set"),
        (np.array(7), "outputs is a ndarray without axes"),
        (np.int64(7), "outputs is a int64"),
        (iter([1, 2, 3]), "outputs is a list_iterator"),
        ({"step": 1}, r"outputs\['step'\] is a int"),
        (SamplerOutput(3, None), "outputs.sampled_token_ids is a int"),
    ],
)
def test_other_types_are_refused(outputs: object, got: str) -> None:
    """A type that has no rows is an error at once, naming the member (FastDeploy I23)."""
    with pytest.raises(InvalidField, match=got):
        make_order("abc").restore(outputs)


def test_tensor_without_axes_is_refused(make_array: Callable[[Any], Any]) -> None:
    """So is a tensor with a single number, in any library."""
    with pytest.raises(InvalidField, match="without axes"):
        make_order("a").restore(make_array(7))


def test_negative_counts_are_refused() -> None:
    """Counts that add up but run backwards are refused."""
    with pytest.raises(InvalidField, match=r"negative entry: \[2, -1, 1\]"):
        make_order("abc").restore([1, 2], counts=[2, -1, 1])


def test_overlapping_steps(make_array: Callable[[Any], Any]) -> None:
    """Outputs of a step find their requests after a later step has reordered the batch.

    FastDeploy I21, I22: the order is a snapshot, not a reference to the map of the moment.
    """
    batch = InputBatch([], backend=NumpyBackend(), capacity=4, max_model_len=32)
    for req_id, prompt_len in {"a": 8, "b": 1, "c": 1}.items():
        batch.add(req_id, prompt_len=prompt_len)
    first = batch.apply(batch.plan({"a": 1, "b": 1, "c": 1}))
    batch.advance(first)
    outputs = make_array([ord(r) for r in first.req_ids])
    batch.remove("b")
    batch.add("d", prompt_len=4)
    second = batch.apply(batch.plan({"a": 1, "c": 1, "d": 1}))

    assert first.req_ids == ("a", "b", "c")
    assert second.req_ids == ("c", "a", "d")
    got = {req_id: as_list(entry) for req_id, entry in first.restore(outputs).items()}
    assert got == {req_id: ord(req_id) for req_id in "abc"}
