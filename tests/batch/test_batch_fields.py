"""Reading and writing declared fields, and only those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from batch_states import refused
from exposed import address_of, to_host
from small_batches import add_all, make_batch, step

from vlbatch import Backend, InputBatch
from vlbatch.errors import InvalidField, UnknownField, UnknownRequest
from vlbatch.fields import (
    batch_global,
    cumulative,
    host,
    packed,
    per_draft,
    ragged,
    row,
    row_valued,
)

AnyBackend = Backend[Any, Any]
AnyBatch = InputBatch[Any]


@pytest.fixture
def batch(backend: AnyBackend) -> AnyBatch:
    """Two requests, a and b, in a batch with a field of each kind."""
    made = make_batch(
        row("temperature", (), "float32", default=1.0),
        row("stops", (3,), "int64", residency="slots"),
        row("half", (2,), "bfloat16"),
        ragged("tokens", 6),
        ragged("blocks", 5, "int32", default=-1, residency="rows"),
        per_draft("drafts", (), "int64", default=-1),
        row_valued("parent"),
        row_valued("waiting", (3,), whole=True),
        host("processor"),
        batch_global("eos", (2,)),
        cumulative("sums", lambda order: order.scheduled),
        packed("ids", (16,)),
        backend=backend,
        num_drafts=2,
    )
    add_all(made, a=4, b=4)
    return made


def values(batch: AnyBatch, req_id: str, name: str) -> Any:
    got = batch.read(req_id, name)
    return got.tolist() if hasattr(got, "tolist") else got


# -- as a mapping --------------------------------------------------------------------------------
def test_mapping_of_declared_arrays(batch: AnyBatch) -> None:
    """As a mapping a batch is its declared arrays and nothing else (FastDeploy R8)."""
    names = [
        "temperature", "stops", "half", "tokens", "blocks", "drafts", "parent", "waiting", "eos",
        "sums", "ids", "slot_of_row",
    ]  # fmt: skip

    assert sorted(batch) == sorted(names)
    assert len(batch) == len(names)
    assert all(name in batch for name in names)
    for name in ("processor", "add", "capacity", "rows", "nothing", ""):
        assert name not in batch
    assert batch.get("temperature") is batch["temperature"]


@pytest.mark.parametrize("name", ["nothing", "add", "capacity", "Temperature", "temperature "])
def test_undeclared_names_are_refused(batch: AnyBatch, name: str) -> None:
    """Only declared names are read and written; the refusal lists them (FastDeploy R8)."""
    verbs: list[Callable[[], object]] = [
        lambda: batch[name],
        lambda: batch.__setitem__(name, 1),
        lambda: batch.get(name),
        lambda: batch.objects(name),
    ]
    of_a_request: list[Callable[[], object]] = [
        lambda: batch.read("a", name),
        lambda: batch.write("a", name, 1),
        lambda: batch.append("a", name, 1),
        lambda: batch.length("a", name),
        lambda: batch.set_length("a", name, 0),
    ]
    for verb in verbs:
        with refused(batch, UnknownField, rf"no field '{name}'.*'temperature'", setting="fields"):
            verb()
    for verb in of_a_request:
        with refused(batch, UnknownField, f"no field '{name}'", req_id="a", setting="fields"):
            verb()
    with refused(batch, UnknownField, f"no field '{name}'", req_id="c", setting="fields"):
        batch.add("c", prompt_len=1, fields={"temperature": 0.5, name: 1})
    assert name not in batch


def test_host_fields_are_lists(batch: AnyBatch) -> None:
    """Python objects are no array: their list is asked for as such, by slot or by row."""
    batch.write("b", "processor", "p")

    assert batch.objects("processor") == [None, "p", None, None]
    with refused(batch, InvalidField, r"Python objects: use objects\('processor'\)"):
        batch["processor"]
    with refused(batch, InvalidField, "'temperature' is not a host field"):
        batch.objects("temperature")
    with refused(batch, InvalidField, "write it request by request"):
        batch["processor"] = 1
    with refused(batch, InvalidField, "write it request by request"):
        batch["tokens"] = 1


def test_two_batches_are_never_equal(backend: AnyBackend) -> None:
    """A batch is equal to itself alone, and can be a key."""
    one, other = make_batch(row("x"), backend=backend), make_batch(row("x"), backend=backend)

    assert one == one
    assert one != other
    assert {one: 1}[one] == 1


# -- one request ---------------------------------------------------------------------------------
def test_write_and_read(batch: AnyBatch) -> None:
    """A value written for a request is read for it, and seen in the array, in its dtype."""
    batch.write("b", "temperature", 0.25)
    batch.write("b", "stops", [1, 2, 3])
    batch.write("b", "drafts", np.array([7, 8, 9], dtype=np.int32))
    batch.write("b", "processor", {"x": 1})

    assert values(batch, "b", "temperature") == 0.25
    assert values(batch, "b", "stops") == [1, 2, 3]
    assert values(batch, "b", "drafts") == [7, 8, 9]
    assert batch.read("b", "processor") == {"x": 1}
    assert to_host(batch["temperature"]).tolist()[:2] == [1.0, 0.25]
    assert to_host(batch["stops"])[batch.slot_of("b")].tolist() == [1, 2, 3]
    assert values(batch, "a", "stops") == [0, 0, 0]


def test_a_scalar_fills_a_row(batch: AnyBatch) -> None:
    """One number is written to every element of a request's value."""
    batch.write("a", "stops", 5)

    assert values(batch, "a", "stops") == [5, 5, 5]
    assert values(batch, "b", "stops") == [0, 0, 0]


def test_values_are_copied(batch: AnyBatch) -> None:
    """Neither what was written nor what was read is tied to the batch."""
    given = np.array([1, 2, 3])
    batch.write("a", "stops", given)
    given[:] = 9
    got = batch.read("a", "stops")
    assert isinstance(got, np.ndarray)
    got[:] = 7

    assert values(batch, "a", "stops") == [1, 2, 3]


def test_bfloat16(batch: AnyBatch) -> None:
    """bfloat16 takes numbers, or bits as uint16, and is read as its bits."""
    batch.write("a", "half", [1.5, -2.0])
    batch.write("b", "half", np.array([0x3FC0, 0x4000], dtype=np.uint16))

    assert values(batch, "a", "half") == [0x3FC0, 0xC000]
    assert values(batch, "b", "half") == [0x3FC0, 0x4000]
    batch["half"] = 2.5
    assert values(batch, "b", "half") == [0x4020, 0x4020]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", [1.0, 2.0], r"got shape \(2,\); expected \(\)"),
        ("stops", [1, 2], r"got shape \(2,\); expected \(3,\)"),
        ("stops", [[1, 2, 3]], r"got shape \(1, 3\); expected \(3,\)"),
        ("drafts", [1, 2], r"got shape \(2,\); expected \(3,\)"),
        ("stops", 1.5, "a value of dtype float64; expected int64"),
        ("stops", "abc", "a value of dtype <U3"),
        ("stops", None, "a value of dtype object"),
        ("stops", [[1], [1, 2]], "a value that is no array"),
        ("parent", 2**40, "expected int32 values"),
        ("temperature", 1e99, "expected float32 values"),
        ("eos", 1, "is global, not per request|expected a per-request one"),
        ("sums", 1, "is cumulative, not per request|expected a per-request one"),
        ("ids", 1, "is packed, not per request|expected a per-request one"),
        ("waiting", 1, "is row_valued, not per request|expected a per-request one"),
        ("slot_of_row", 1, "is packed, not per request|expected a per-request one"),
    ],
)
def test_wrong_values_are_refused(batch: AnyBatch, name: str, value: object, message: str) -> None:
    """A value of another shape or dtype, or for a field that no request has, is refused."""
    with refused(batch, InvalidField, message, req_id="a"):
        batch.write("a", name, value)
    with refused(batch, InvalidField, message, req_id="c"):
        batch.add("c", prompt_len=1, fields={"temperature": 0.5, name: value})


def test_unknown_requests_are_refused(batch: AnyBatch) -> None:
    """No verb on a field admits a request (FastDeploy I7)."""
    verbs: list[Callable[[], object]] = [
        lambda: batch.write("z", "stops", [1, 2, 3]),
        lambda: batch.append("z", "tokens", 1),
        lambda: batch.set_length("z", "tokens", 1),
    ]
    for verb in verbs:
        with refused(batch, UnknownRequest, "not in the batch", req_id="z"):
            verb()


# -- ragged fields -------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["tokens", "blocks"])
def test_ragged_verbs(batch: AnyBatch, name: str) -> None:
    """Write sets the length, append extends it, set_length shortens it and clears the rest."""
    default = batch.registry[name].default
    batch.write("b", name, [9, 9, 9, 9, 9])
    batch.write("a", name, [1, 2])
    batch.append("a", name, 3)
    batch.append("a", name, [4, 5])
    assert (values(batch, "a", name), batch.length("a", name)) == ([1, 2, 3, 4, 5], 5)
    batch.set_length("a", name, 1)
    assert values(batch, "a", name) == [1]
    batch.set_length("a", name, 4)
    assert values(batch, "a", name) == [1, default, default, default]
    batch.write("a", name, [])
    assert (values(batch, "a", name), batch.length("a", name)) == ([], 0)
    batch.append("a", name, [])
    assert batch.length("a", name) == 0

    assert values(batch, "b", name) == [9, 9, 9, 9, 9]
    batch.check()


def test_a_shorter_write_clears_the_rest(batch: AnyBatch) -> None:
    """Nothing of a longer value shows behind a shorter one (FastDeploy 3.6: block table tail)."""
    batch.write("a", "blocks", [1, 2, 3, 4, 5])
    batch.write("a", "blocks", [6])

    assert to_host(batch["blocks"])[batch.row_of("a")].tolist() == [6, -1, -1, -1, -1]


def test_a_kernel_writes_behind_the_prefix(batch: AnyBatch) -> None:
    """What a kernel wrote becomes valid by its length, and then moves with the request."""
    batch["blocks"][batch.row_of("a"), :3] = 7
    batch.set_length("a", "blocks", 3)
    step(batch, b=1)

    assert batch.row_of("a") == 1
    assert values(batch, "a", "blocks") == [7, 7, 7]
    assert to_host(batch["blocks"]).tolist() == [[-1] * 5, [7, 7, 7, -1, -1], [-1] * 5, [-1] * 5]


def test_ragged_refusals(batch: AnyBatch) -> None:
    """Too long, several axes, or not ragged: refused, and the old value stays."""
    batch.write("a", "tokens", [1, 2])
    width = "width of 'tokens'"
    with refused(batch, InvalidField, r"shape \(7,\); .* at most 6", req_id="a", setting=width):
        batch.write("a", "tokens", [0] * 7)
    with refused(batch, InvalidField, r"shape \(1, 2\)", req_id="a", setting=width):
        batch.write("a", "tokens", [[1, 2]])
    with refused(batch, InvalidField, r"shape \(\)", req_id="a", setting=width):
        batch.write("a", "tokens", 1)
    with refused(batch, InvalidField, r"hold 7 values; expected 0\.\.6", req_id="a", setting=width):
        batch.append("a", "tokens", [0] * 5)
    with refused(batch, InvalidField, r"shape \(1, 1\); expected one axis", req_id="a"):
        batch.append("a", "tokens", [[1]])
    with refused(batch, InvalidField, "expected int64", req_id="a"):
        batch.append("a", "tokens", 0.5)
    for length in (7, -1):
        with refused(batch, InvalidField, f"hold {length} values", req_id="a", setting=width):
            batch.set_length("a", "tokens", length)
    for verb in (
        lambda: batch.append("a", "stops", 1),
        lambda: batch.set_length("a", "stops", 1),
        lambda: batch.length("a", "stops"),
    ):
        with refused(batch, InvalidField, "'stops' is row; expected a ragged one", req_id="a"):
            verb()
    assert values(batch, "a", "tokens") == [1, 2]


# -- whole fields --------------------------------------------------------------------------------
def test_whole_writes_convert_and_refuse(batch: AnyBatch) -> None:
    """A whole field takes its own shape or one number, in place, and nothing else."""
    handle, address = batch["eos"], address_of(batch["eos"])
    batch["eos"] = [3, 4]
    assert to_host(handle).tolist() == [3, 4]
    batch["eos"] = 5
    assert to_host(handle).tolist() == [5, 5]
    assert address_of(batch["eos"]) == address
    for value in ([1], [1, 2, 3], [[1, 2]]):
        with refused(batch, InvalidField, r"'eos' got shape .*; expected \(2,\)"):
            batch["eos"] = value
    with refused(batch, InvalidField, "expected int64"):
        batch["eos"] = [1.0, 2.0]
    with refused(batch, InvalidField, r"'stops' got shape \(3,\); expected \(4, 3\)"):
        batch["stops"] = [1, 2, 3]


# -- reports -------------------------------------------------------------------------------------
def test_memory_report(batch: AnyBatch) -> None:
    """Bytes of each field, in order of declaration, counted by hand."""
    report = [
        (m.name, m.kind, m.residency, m.bytes_per_request, m.bytes_total)
        for m in batch.memory_report()
    ]

    assert report == [
        ("temperature", "row", "rows", 4, 16),
        ("stops", "row", "slots", 24, 96),
        ("half", "row", "rows", 4, 16),
        ("tokens", "ragged", "slots", 48, 192),
        ("blocks", "ragged", "rows", 20, 80),
        ("drafts", "per_draft", "rows", 24, 96),
        ("parent", "row_valued", "rows", 4, 16),
        ("waiting", "row_valued", "rows", 0, 12),
        ("processor", "host", "slots", 0, 0),
        ("eos", "global", "rows", 0, 16),
        ("sums", "cumulative", "rows", 0, 20),
        ("ids", "packed", "rows", 0, 128),
        ("slot_of_row", "packed", "rows", 0, 16),
    ]


def test_snapshot(batch: AnyBatch) -> None:
    """A snapshot has everything by request and does not change with the batch."""
    batch.write("a", "tokens", [1, 2])
    batch.write("b", "processor", "p")
    step(batch, a=3, b=1)
    batch.confirm("a", 2)
    snapshot = batch.snapshot()
    batch.write("a", "tokens", [9, 9, 9])
    batch["eos"] = 9
    batch.remove("b")
    step(batch, a=1)

    assert snapshot.rows == ("a", "b")
    assert snapshot.slots == {"a": 0, "b": 1}
    assert snapshot.progress == {"a": (4, 2, 2), "b": (4, 1, 0)}
    assert snapshot.values["a"]["tokens"].tolist() == [1, 2]  # type: ignore[attr-defined]  # array
    assert snapshot.values["b"]["processor"] == "p"
    assert set(snapshot.values["a"]) == {
        "temperature", "stops", "half", "tokens", "blocks", "drafts", "parent", "processor",
    }  # fmt: skip
    assert snapshot.whole["eos"].tolist() == [0, 0]
    assert snapshot.whole["sums"].tolist() == [0, 3, 4, 4, 4]
    assert set(snapshot.whole) == {"waiting", "eos", "sums", "ids", "slot_of_row"}
    assert batch.snapshot().rows == ("a",)


def test_snapshot_shows_holes(batch: AnyBatch) -> None:
    """A row whose request left is ``None`` until the next order."""
    batch.remove("a")

    assert batch.snapshot().rows == (None, "b")
    assert set(batch.snapshot().values) == {"b"}
