"""What Paddle does silently, and what a batch over Paddle's arrays does instead.

The dangers were measured on Paddle 3.3.1 for the CPU; each test is about our own arrays.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batch_states import refused
from exposed import to_host
from tagged import DTYPES, every_field

from vlbatch import InputBatch, make_backend
from vlbatch.errors import InvalidField, InvariantBroken, StaleOrder
from vlbatch.fields import Field, Kind, ragged, row, row_valued

paddle: Any = pytest.importorskip("paddle")

TESTS = Path(__file__).parents[1]


@pytest.fixture(params=["paddle", "paddle-tensor"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make_batch(name: str, *fields: Field, capacity: int = 4) -> InputBatch[Any]:
    return InputBatch(fields, backend=make_backend(name), capacity=capacity, max_model_len=64)


def started(name: str, *fields: Field) -> InputBatch[Any]:
    """A batch of three requests, a to c, each one prompt token in."""
    batch = make_batch(name, *fields)
    for req_id in "abc":
        batch.add(req_id, prompt_len=4)
    batch.advance(batch.apply(batch.plan({"a": 1, "b": 1, "c": 1})))
    return batch


def spans(batch: InputBatch[Any]) -> Iterator[tuple[int, int]]:
    for handle in batch.values():
        yield handle.data_ptr(), handle.data_ptr() + handle.size * handle.element_size()


# -- views of another dtype have wrong addresses -------------------------------------------------
def test_fields_of_all_dtypes_lie_apart(name: str) -> None:
    """No two contiguous fields share a byte, whatever dtypes their blocks have."""
    fields = [f for f in every_field(arena=False) if f.kind is not Kind.HOST]
    batch = make_batch(name, *(f for f in fields if "int8_auto" not in f.name))

    for (start, stop), (other_start, other_stop) in combinations(spans(batch), 2):
        assert stop <= other_start or other_stop <= start


def test_a_kernel_write_reaches_one_field(name: str) -> None:
    """Writing a whole field through its tensor changes that field alone."""
    batch = make_batch(name, *(row(f"x{i}_{d}", (3,), d) for d in DTYPES for i in range(2)))
    for field in list(batch):
        before = {other: to_host(batch[other]) for other in batch if other != field}
        batch[field].fill_(1)
        for other, values in before.items():
            np.testing.assert_array_equal(to_host(batch[other]), values)
        assert np.asarray(batch.snapshot().whole.get(field, 0)).size


def test_bfloat16_tensors_work_in_kernels(name: str) -> None:
    """A bfloat16 field is a bfloat16 tensor to every kernel, not Paddle's uint16."""
    batch = started(name, row("x", (2,), "bfloat16"))
    batch.write("b", "x", [1.5, -2.0])
    at = batch.row_of("b")

    assert batch["x"].clone()[at].astype("float32").tolist() == [1.5, -2.0]
    assert batch["x"][paddle.to_tensor([at])].astype("float32").tolist() == [[1.5, -2.0]]
    batch["x"].scale_(2.0)
    assert batch.read("b", "x").tolist() == [0x4040, 0xC080]  # type: ignore[attr-defined]  # bits of 3 and -4


# -- indices are not checked ---------------------------------------------------------------------
def test_row_numbers_beyond_the_batch_are_not_followed(name: str) -> None:
    """A wild row number, as a kernel may leave it, becomes -1 and touches no other memory."""
    batch = started(name, row_valued("next", (2,), "int64"), row("x", (), "int64"))
    batch["x"] = [10, 11, 12, 13]
    batch["next"][0] = paddle.to_tensor([10**6, -(10**6)])
    batch.remove("b")
    batch.apply(batch.plan({"c": 1, "a": 1}))

    assert to_host(batch["next"]).tolist() == [[-1, -1]] * 4
    assert [int(batch.read(r, "x")) for r in "ac"] == [10, 12]  # type: ignore[call-overload]  # numbers


def test_ragged_writes_stay_in_their_row(name: str) -> None:
    """No length reaches into the next row: it is refused before anything is written."""
    batch = started(name, ragged("tokens", 4, residency="rows"))
    for req_id in "abc":
        batch.write(req_id, "tokens", [1, 2, 3])
    setting = "width of 'tokens'"
    with refused(batch, InvalidField, "would hold 5 values", req_id="a", setting=setting):
        batch.append("a", "tokens", [4, 5])
    with refused(batch, InvalidField, "would hold 5 values", req_id="a", setting=setting):
        batch.set_length("a", "tokens", 5)
    with refused(batch, InvalidField, "would hold -1 values", req_id="a", setting=setting):
        batch.set_length("a", "tokens", -1)
    with refused(batch, InvalidField, r"shape \(5,\)", req_id="a", setting=setting):
        batch.write("a", "tokens", [9] * 5)


def test_old_plans_write_no_rows(name: str) -> None:
    """Moves of an earlier state are refused: their rows may not exist any more."""
    batch = started(name, row("x"))
    plan = batch.plan({"c": 1})
    batch.reset()
    batch.add("z", prompt_len=1)
    with refused(batch, StaleOrder, "an earlier state"):
        batch.apply(plan)


# -- swaps of views lose a row -------------------------------------------------------------------
def test_swapped_rows_keep_both_values(name: str) -> None:
    """Two requests that change places both keep their rows, wide and small."""
    batch = started(name, row("x", (3,), "float32"), ragged("tokens", 9, residency="rows"))
    for i, req_id in enumerate("abc"):
        batch.write(req_id, "x", [float(i)] * 3)
        batch.write(req_id, "tokens", [i] * (3 * i))
    batch.preempt("c")
    order = batch.apply(batch.plan({"b": 1}))

    assert (order.req_ids, order.idle) == (("b",), ("a",))
    assert batch["x"].tolist()[:3] == [[1.0] * 3, [0.0] * 3, [0.0] * 3]
    assert batch["tokens"][:2].tolist() == [[1, 1, 1] + [0] * 6, [0] * 9]


# -- addresses change ----------------------------------------------------------------------------
def test_no_verb_changes_an_address(name: str) -> None:
    """Tensors, and views of them taken before, see every later state of the batch."""
    batch = make_batch(name, row("x", (2,), "float32"), ragged("tokens", 6, residency="rows"))
    handles = {field: batch[field] for field in batch}
    addresses = {field: handle.data_ptr() for field, handle in handles.items()}
    view = batch["x"][0:2]
    for req_id in "abc":
        batch.add(req_id, prompt_len=2, fields={"x": [ord(req_id), 0.5]})
    batch.append("a", "tokens", [1, 2])
    batch.set_length("a", "tokens", 1)
    batch.advance(batch.apply(batch.plan({"a": 1, "b": 1, "c": 1})))
    batch.preempt("a")
    batch.advance(batch.apply(batch.plan({"c": 1})))
    batch.resume("a")
    batch["slot_of_row"] = 7

    assert view.tolist() == [[99.0, 0.5], [98.0, 0.5]]
    batch.reset()
    assert view.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    for field, handle in handles.items():
        assert handle.data_ptr() == addresses[field] == batch[field].data_ptr()
        assert batch[field] is handle


def test_another_shape_or_dtype_is_refused(name: str) -> None:
    """What Paddle would take by a new allocation or a silent cast is refused."""
    batch = started(name, row("x", (), "int64"))
    for value in (np.zeros(5, np.int64), np.zeros((4, 2), np.int64), [1, 2], np.zeros(0, np.int64)):
        with refused(batch, InvalidField, r"got shape .*; expected \(4,\)"):
            batch["x"] = value
    for cast in (np.zeros(4, np.float32), [0.5] * 4, [True] * 4):
        with refused(batch, InvalidField, "expected int64"):
            batch["x"] = cast
    with refused(batch, InvalidField, "expected int64", req_id="a"):
        batch.write("a", "x", 1.7)


def test_check_finds_a_field_that_was_allocated_anew() -> None:
    """A field whose tensor was given other memory behind the batch's back is named."""
    batch = started("paddle-tensor", row("x", (), "int64"))
    batch.check()
    paddle.assign(paddle.zeros([400], dtype="float32"), batch["x"])
    with pytest.raises(InvariantBroken, match="field 'x' moved from address"):
        batch.check()


# -- reading a row reads everything --------------------------------------------------------------
def test_a_row_read_keeps_only_the_row(name: str) -> None:
    """A value that was read, and what a preempted request keeps, is as small as the row."""
    batch = started(name, row("x", (1000,), "int64"), ragged("tokens", 1000))
    batch.write("a", "tokens", list(range(10)))
    batch.preempt("b")
    batch.resume("b")

    for field, size in (("x", 1000), ("tokens", 10)):
        got = batch.read("a", field)
        assert isinstance(got, np.ndarray)
        owner = got if got.base is None else got.base
        assert np.prod(owner.shape) == size
        got[:] = -1
        assert batch.read("a", field).tolist() != got.tolist()  # type: ignore[attr-defined]  # array


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is not shown")
def test_kept_reads_do_not_keep_the_field(name: str) -> None:
    """Six values of 16 KiB that are kept do not keep six copies of a field of 64 MiB."""
    batch = make_batch(name, row("x", (2048,), "int64"), capacity=4096)
    for i in range(6):
        batch.add(str(i), prompt_len=1, fields={"x": i})
    batch["x"].fill_(3)
    before = resident_bytes()
    kept = [batch.read(str(i), "x") for i in range(6)]

    assert resident_bytes() - before < 2**25
    assert len(kept) == 6


# -- values given as tensors ---------------------------------------------------------------------
def test_tensors_are_taken_as_values(name: str) -> None:
    """A Paddle tensor is copied in like an array; changing it later changes nothing."""
    batch = started(name, row("x", (3,), "float32"), row("b", (2,), "bfloat16"))
    rows = paddle.to_tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    half = paddle.to_tensor([1.0, -2.0]).astype("bfloat16")
    batch.write("a", "x", rows[1])
    batch.write("a", "b", half)
    rows.zero_()
    half.zero_()

    assert batch.read("a", "x").tolist() == [4.0, 5.0, 6.0]  # type: ignore[attr-defined]  # array
    assert batch.read("a", "b").tolist() == [0x3F80, 0xC000]  # type: ignore[attr-defined]  # array


# -- FLAGS_use_stride_kernel=0 -------------------------------------------------------------------
WITHOUT_VIEWS = """
import paddle
import tagged
from vlbatch import InputBatch, make_backend
from vlbatch.errors import InvalidSetting
from vlbatch.fields import row

x = paddle.zeros([4])
assert x[1:3].data_ptr() != x.data_ptr() + x.element_size(), "the flag is off: slices are views"

def is_refused(make):
    try:
        make()
    except InvalidSetting as error:
        return error.setting == "FLAGS_use_stride_kernel"

assert is_refused(lambda: make_backend("paddle-tensor"))
backend = make_backend("paddle")
for field in row("x", (), "bfloat16"), row("x", (2,), "int8", layout="arena"):
    make = lambda: InputBatch([field], backend=backend, capacity=2, max_model_len=2)
    assert is_refused(make), field

tagged.DTYPES = tuple(dtype for dtype in tagged.DTYPES if dtype != "bfloat16")
batch = tagged.TaggedBatch(backend, arena=False)
for i in range(3):
    for name in "abc":
        batch.add(f"{name}{i}", prompt_len=2)
    batch.step(**{f"c{i}": 1, f"b{i}": 1})
    batch.assert_all_hold()
    batch.step(**{f"a{i}": 1, f"c{i}": 1})
    batch.assert_all_hold()
    batch.remove(f"b{i}")
    batch.remove(f"a{i}")
print("all hold")
"""


def test_without_stride_kernels() -> None:
    """With FLAGS_use_stride_kernel=0 a batch works, or what cannot work is refused at once.

    Host memory works but for bfloat16 and the arena; Paddle's own tensors, whose indexed writes
    are lost then, are refused.
    """
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_VIEWS],
        env={**os.environ, "FLAGS_use_stride_kernel": "0", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert done.stdout == "all hold\n", done.stderr
