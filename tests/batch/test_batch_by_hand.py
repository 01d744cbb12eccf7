"""Engines that keep progress and rows themselves: ``set_progress``, ``swap_rows``, a policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batch_states import refused
from exposed import to_host
from small_batches import add_all, make_batch, step

from vlbatch import SideTable
from vlbatch.errors import (
    InvalidField,
    InvalidSchedule,
    InvariantBroken,
    PromptTooLong,
    UnknownRequest,
    VlbatchError,
)
from vlbatch.fields import host, ragged, row, row_valued
from vlbatch.order import DECODE, EXTEND, PREFILL


def test_swapped_rows_keep_everything_of_their_requests() -> None:
    """After a swap each request finds its own values, and row numbers name the same requests.

    FastDeploy I1, I2, I3: no field is forgotten, none is swapped twice.
    """
    batch = make_batch(row("x"), ragged("t", 4, residency="rows"), host("h"), row_valued("peer"))
    table = SideTable(4)
    batch.register_follower(table)
    for number, req_id in enumerate("abc"):
        values = {"x": number, "t": [number] * number, "h": req_id, "peer": 2 - number}
        batch.add(req_id, prompt_len=5, fields=values)
        table[number] = req_id
    batch.swap_rows(0, 2)

    assert batch.rows == ("c", "b", "a")
    assert [batch.read(r, "x") for r in "abc"] == [0, 1, 2]
    assert [list(batch.read(r, "t")) for r in "abc"] == [[], [1], [2, 2]]  # type: ignore[call-overload]
    assert [batch.read(r, "h") for r in "abc"] == ["a", "b", "c"]
    assert to_host(batch["peer"]).tolist()[:3] == [2, 1, 0]  # still: c's peer is a, in row 2
    assert table[:3] == ["c", "b", "a"]
    batch.check()


def test_a_hole_is_swapped_like_a_request() -> None:
    """A request that changes places with a hole leaves a cleared row behind."""
    batch = make_batch(row("x"))
    for number, req_id in enumerate("abc", start=1):
        batch.add(req_id, prompt_len=5, fields={"x": number})
    batch.remove("a")
    batch.swap_rows(0, 2)

    assert batch.rows == ("c", "b")
    assert to_host(batch["x"]).tolist() == [3, 2, 0, 0]
    batch.check()
    batch.add("d", prompt_len=5)
    assert batch.rows == ("c", "b", "d")


def test_rows_that_are_not_in_use_cannot_be_swapped() -> None:
    """A row past the last is refused, and nothing changes."""
    batch = make_batch(row("x"))
    add_all(batch, a=3, b=3)
    with refused(batch, UnknownRequest, "row 2 is not in use; expected 0..1"):
        batch.swap_rows(0, 2)


def test_a_step_after_a_swap_has_the_swapped_rows() -> None:
    """A steady decode step after a swap is not a copy of the step before it."""
    batch = make_batch(row("x"))
    add_all(batch, a=1, b=1)
    step(batch, a=1, b=1)
    step(batch, a=1, b=1)
    batch.swap_rows(0, 1)
    order = batch.apply(batch.plan({"a": 1, "b": 1}))

    assert order.req_ids == batch.rows == ("b", "a")
    assert order.slots.tolist() == [batch.slot_of("b"), batch.slot_of("a")]


def test_progress_of_an_engine_decides_classes() -> None:
    """The counts that an engine sets, by row, are what the next plan goes by."""
    batch = make_batch(row("x"))
    add_all(batch, a=1, b=1, c=1)
    batch.set_progress(np.array([9, 9, 9]), np.array([0, 4, 9]))
    order = batch.apply(batch.plan({"a": 2, "b": 5, "c": 1}))

    assert order.req_ids == ("c", "b", "a")
    assert order.classes.tolist() == [DECODE, EXTEND, PREFILL]
    assert order.computed.tolist() == [9, 4, 0]


def test_progress_may_go_back() -> None:
    """An engine that takes a decoding request back into its prompt gets a prefill."""
    batch = make_batch(row("x"))
    add_all(batch, a=2, b=2)
    for _ in range(3):
        step(batch, a=1, b=1)
    batch.set_progress(np.array([4, 2]), np.array([0, 3]))
    order = batch.apply(batch.plan({"a": 1, "b": 1}))

    assert dict(zip(order.req_ids, order.classes.tolist(), strict=True)) == {
        "a": PREFILL,
        "b": DECODE,
    }
    assert order.prompt_lens.tolist() == [2, 4]


@pytest.mark.parametrize(("prompt_len", "computed"), [(0, 0), (33, 0), (3, -1), (3, 33)])
def test_impossible_progress_is_refused(prompt_len: int, computed: int) -> None:
    """Counts out of range name the request of their row; a hole's counts do not matter."""
    batch = make_batch(row("x"))
    add_all(batch, a=3, b=3)
    batch.remove("a")
    with refused(batch, InvalidSchedule, f"{computed} computed .* {prompt_len};", req_id="b"):
        batch.set_progress(np.array([-7, prompt_len]), np.array([-7, computed]))


def test_a_policy_for_one_step() -> None:
    """A plan may have another policy than the batch, and the next one has the batch's again."""
    batch = make_batch(row("x"))
    add_all(batch, a=9, b=1)
    step(batch, b=1)  # b decodes; a is behind it
    batch.swap_rows(0, 1)
    scheduled = {"a": 2, "b": 1}

    assert batch.plan(scheduled, policy="arrival").order.req_ids == ("a", "b")
    assert batch.plan(scheduled).order.req_ids == ("b", "a")


def test_slots_are_found_after_a_swap() -> None:
    """Kernels that find a slot by ``slot_of_row`` find the request of the row, swapped or not."""
    batch = make_batch(row("x"), row("y", residency="slots"))
    for number, req_id in enumerate("abc"):
        batch.add(req_id, prompt_len=5, fields={"x": number, "y": 10 + number})
    batch.apply(batch.plan({"a": 1, "b": 1, "c": 1}))
    batch.swap_rows(0, 2)

    slots = to_host(batch["slot_of_row"])
    assert to_host(batch["x"])[:3].tolist() == [2, 1, 0]
    assert to_host(batch["y"])[slots[:3]].tolist() == [12, 11, 10]
    assert slots.tolist() == [2, 1, 0, -1]
    batch.check()
    batch["slot_of_row"] = np.array([2, 0, 1, -1], dtype=np.int32)
    with pytest.raises(InvariantBroken, match="'b': slot_of_row says slot 0 of row 1; expected 1"):
        batch.check()


def test_counts_and_schedule_are_refused_together() -> None:
    """Counts that the schedule does not fit are not taken; without the schedule they would be."""
    batch = make_batch(row("x"))
    add_all(batch, a=3, b=3)
    counts = np.array([5, 5]), np.array([4, 0])
    with refused(batch, InvalidSchedule, r"got 2 tokens; expected 1\.\.1", req_id="a"):
        batch.set_progress(*counts, scheduled={"b": 1, "a": 2})
    batch.set_progress(*counts, scheduled={"b": 1, "a": 1})
    assert (batch.computed_of("a"), batch.computed_of("b")) == (4, 0)


def test_ranks_of_rows() -> None:
    """A request that comes back under its old name has another rank of admission."""
    batch = make_batch(row("x"))
    add_all(batch, a=3, b=3)
    before = batch.row_admissions
    batch.remove("a")
    assert batch.row_admissions.tolist() == [-1, before[1]]
    batch.add("a", prompt_len=3)
    assert batch.rows == ("a", "b")
    assert batch.num_rows == 2
    assert batch.row_admissions[0] not in before


@pytest.mark.parametrize("tokens", [2.9, "2", None, 2**63, 2**63 - 1, -(2**70)])
def test_tokens_that_are_no_number_of_tokens(tokens: object) -> None:
    """Fractions and numbers beyond any model are refused, none is cut or wraps around."""
    batch = make_batch(row("x"))
    add_all(batch, a=9, b=9)
    step(batch, a=2, b=2)
    with refused(batch, InvalidSchedule, "got .* tokens; expected", req_id="a"):
        batch.plan({"b": 1, "a": tokens})  # type: ignore[dict-item]  # refusing this is the test


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"prompt_len": 2.5}, PromptTooLong),
        ({"prompt_len": True}, PromptTooLong),
        ({"prompt_len": 5, "computed": 1.5}, InvalidSchedule),
    ],
)
def test_counts_that_are_no_integers(given: dict[str, Any], error: type[VlbatchError]) -> None:
    """A request is not admitted with half a token."""
    batch = make_batch(row("x"))
    setting = "max_model_len" if error is PromptTooLong else None
    with refused(batch, error, "expected", req_id="a", setting=setting):
        batch.add("a", **given)


@pytest.mark.parametrize("counts", [np.ones(2), np.ones(4, dtype=np.int64), [1]])
def test_progress_that_is_not_by_row(counts: Any) -> None:
    """Counts are integers, one for each row in use."""
    batch = make_batch(row("x"))
    add_all(batch, a=3, b=3)
    with refused(batch, InvalidField, "computed got"):
        batch.set_progress(np.array([3, 3]), counts)
