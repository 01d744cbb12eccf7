"""Per-draft fields that show requests and drafts on one axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from exposed import address_of, to_host

from vlbatch import InputBatch
from vlbatch.errors import InvalidField
from vlbatch.fields import per_draft, row

CAPACITY, K, WIDTH = 4, 2, 3


def make_batch(backend: Any, **options: Any) -> InputBatch[Any]:
    fields = [
        per_draft("logits", (WIDTH,), "float32", default=-1, flat=True, **options),
        per_draft("tokens", dtype="int64", default=-1, flat=True, **options),
        per_draft("grouped", (WIDTH,), "float32", default=-1, **options),
        row("tag", (), "float32"),  # shares a block of memory with the others
    ]
    return InputBatch(
        fields, backend=backend, capacity=CAPACITY, max_model_len=32, num_drafts=K, policy="two"
    )


def group(row_or_slot: int) -> slice:
    """Entries of one request."""
    return slice(row_or_slot * (K + 1), (row_or_slot + 1) * (K + 1))


def value_of(tag: int) -> list[list[float]]:
    """What a request with this tag holds: no two elements are equal."""
    return [[100.0 * tag + WIDTH * j + i for i in range(WIDTH)] for j in range(K + 1)]


def test_shape(backend: Any) -> None:
    """The array is ``[capacity * (k + 1), *shape]``, and starts as the default."""
    batch = make_batch(backend)
    assert tuple(batch["logits"].shape) == (CAPACITY * (K + 1), WIDTH)
    assert tuple(batch["tokens"].shape) == (CAPACITY * (K + 1),)
    assert tuple(batch["grouped"].shape) == (CAPACITY, K + 1, WIDTH)
    assert (to_host(batch["logits"]) == -1).all()


def test_same_memory(backend: Any) -> None:
    """It is the field's own memory: what a kernel writes is what the request holds."""
    batch = make_batch(backend)
    batch.add("a", prompt_len=4)
    batch.add("b", prompt_len=4)
    assert address_of(batch["logits"]) == batch.addresses()["logits"]
    for j in range(K + 1):
        for i in range(WIDTH):
            batch["logits"][group(1).start + j, i] = value_of(2)[j][i]
    np.testing.assert_array_equal(batch.read("b", "logits"), value_of(2))  # type: ignore[arg-type]
    assert (np.asarray(batch.read("a", "logits")) == -1).all()
    batch.write("a", "logits", value_of(1))
    assert to_host(batch["logits"])[group(0)].tolist() == value_of(1)


@pytest.mark.parametrize("residency", ["rows", "slots"])
def test_moves_as_groups(backend: Any, residency: str) -> None:
    """All k + 1 entries of a request move together, at the same address; left rows are default."""
    batch = make_batch(backend, residency=residency)
    address = batch.addresses()["logits"]
    for tag, req_id in enumerate("abc", start=1):
        fields = {"logits": value_of(tag), "tokens": [tag] * (K + 1), "tag": tag}
        batch.add(req_id, prompt_len=4, fields={**fields, "grouped": value_of(tag)})
    batch.remove("a")
    batch.apply(batch.plan({"b": 4, "c": 4}))

    for tag, req_id in ((2, "b"), (3, "c")):
        index = batch.row_of(req_id) if residency == "rows" else batch.slot_of(req_id)
        assert to_host(batch["logits"])[group(index)].tolist() == value_of(tag)
        assert to_host(batch["tokens"])[group(index)].tolist() == [tag] * (K + 1)
        assert to_host(batch["grouped"])[index].tolist() == value_of(tag)
    if residency == "rows":
        assert (to_host(batch["logits"])[group(2).start :] == -1).all()
    assert batch.addresses()["logits"] == address
    batch.check()


def test_write_whole(backend: Any) -> None:
    """A whole field is assigned in the shape that it shows, or as one number."""
    batch = make_batch(backend)
    values = np.arange(CAPACITY * (K + 1) * WIDTH, dtype=np.float32).reshape(-1, WIDTH)
    batch["logits"] = values
    np.testing.assert_array_equal(to_host(batch["logits"]), values)
    np.testing.assert_array_equal(batch.to_host("logits").reshape(values.shape), values)
    batch["tokens"] = np.arange(CAPACITY * (K + 1))
    assert to_host(batch["tokens"]).tolist() == list(range(CAPACITY * (K + 1)))
    batch["logits"] = 5
    assert (to_host(batch["logits"]) == 5).all()
    with pytest.raises(InvalidField, match=r"got shape \(4, 3, 3\); expected \(12, 3\)"):
        batch["logits"] = values.reshape(CAPACITY, K + 1, WIDTH)
    assert (to_host(batch["logits"]) == 5).all()


def test_preempt_and_reset(backend: Any) -> None:
    """A preempted request finds its group again; a reset sets all to the default, in place."""
    batch = make_batch(backend)
    address = batch.addresses()["logits"]
    batch.add("a", prompt_len=4, fields={"logits": value_of(1)})
    batch.preempt("a")
    batch.add("b", prompt_len=4)
    batch.resume("a")
    assert to_host(batch["logits"])[group(batch.row_of("a"))].tolist() == value_of(1)
    assert (to_host(batch["logits"])[group(batch.row_of("b"))] == -1).all()
    batch.reset()
    assert (to_host(batch["logits"]) == -1).all()
    assert batch.addresses()["logits"] == address


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_beside_fields_of_the_same_size(backend: Any, num_drafts: int) -> None:
    """A flat field has its own shape and memory, whatever lies beside it in the block."""
    size = num_drafts + 1
    fields = [
        row("before", (2 * size,), layout="contiguous"),
        per_draft("flat", (2,), flat=True),
        row("after", (2 * size,), layout="contiguous"),
    ]
    batch: InputBatch[Any] = InputBatch(
        fields, backend=backend, capacity=4, max_model_len=8, num_drafts=num_drafts
    )
    for name, value in (("before", 7), ("after", 8), ("flat", 9)):
        batch[name] = value

    assert tuple(batch["flat"].shape) == (4 * size, 2)
    for name, value in (("before", 7), ("after", 8), ("flat", 9)):
        assert (to_host(batch[name]) == value).all()
