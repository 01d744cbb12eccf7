"""The draft model's batch: where its fields come from, who is a member, and what it follows."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from exposed import to_host
from small_batches import add_all, make_batch, step

from vlbatch import Backend, InputBatch, NumpyBackend
from vlbatch.batch import DraftField, ProposerInputBatch, copied, own, shared
from vlbatch.errors import (
    DuplicateRequest,
    InvalidField,
    InvariantBroken,
    UnknownField,
    UnknownRequest,
)
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

TARGET = (
    row("x"),
    row("kept", residency="slots"),
    ragged("ids", 16, residency="rows"),
    ragged("blocks", 8, "int32", default=-1, residency="rows", on_preempt="reset"),
    host("session", default=list),
    cumulative("starts", lambda order: order.scheduled),
)


def make_target(backend: AnyBackend, **settings: Any) -> InputBatch[Any]:
    """A target of four rows, two drafts a decode."""
    return make_batch(*TARGET, backend=backend, num_drafts=2, **settings)


def make_draft(
    target: InputBatch[Any], backend: AnyBackend, *fields: DraftField, auto_join: bool = True
) -> ProposerInputBatch[Any]:
    """A follower with an own field, a shared array and two copies, or with these fields."""
    chosen = fields or (own(row("y", default=-1)), shared("blocks"), copied("ids"), copied("x"))
    return ProposerInputBatch(target, chosen, backend=backend, auto_join=auto_join)


def add(target: InputBatch[Any], req_id: str, number: int, prompt_len: int = 4) -> None:
    """Admit a request whose fields depend on its number."""
    fields = {"x": number, "kept": number, "ids": [number] * (number % 3 + 1), "blocks": [number]}
    target.add(req_id, prompt_len=prompt_len, fields=fields)


def as_list(value: object) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


# -- declarations ----------------------------------------------------------------------------------
def test_shared_is_the_very_array(backend: AnyBackend) -> None:
    """A shared field is the target's array and moves once, with the target."""
    target = make_target(backend)
    draft = make_draft(target, backend)
    for number, req_id in enumerate("abc"):
        add(target, req_id, number)
    step(target, a=1, b=4, c=1)
    step(target, b=1, c=1)

    assert draft["blocks"] is target["blocks"]
    for number, req_id in enumerate("abc"):
        assert as_list(draft.read(req_id, "blocks")) == [number]
    draft.append("a", "blocks", 9)
    assert as_list(target.read("a", "blocks")) == [0, 9]
    assert (draft.length("a", "blocks"), target.length("a", "blocks")) == (2, 2)
    draft.set_length("a", "blocks", 1)
    assert as_list(target.read("a", "blocks")) == [0]


def test_shared_derived_and_global_fields(backend: AnyBackend) -> None:
    """What has no value per request can be shared, objects too."""
    target = make_target(backend)
    draft = make_draft(target, backend, shared("starts"), shared("slot_of_row"), shared("session"))
    add_all(target, a=4, b=4)
    step(target, a=3, b=1)

    assert draft["starts"] is target["starts"]
    assert to_host(draft["starts"])[:3].tolist() == [0, 3, 4]
    assert draft.objects("session") is target.objects("session")
    assert draft.read("a", "session") is target.read("a", "session")


def test_copies_are_filled_once(backend: AnyBackend) -> None:
    """A copy starts as the target's value and goes its own way; the target keeps its own."""
    target = make_target(backend)
    draft = make_draft(target, backend)
    add(target, "a", 5)
    target.append("a", "ids", 7)
    draft.append("a", "ids", 8)
    draft.write("a", "x", 6)

    assert draft["ids"] is not target["ids"]
    assert as_list(target.read("a", "ids")) == [5, 5, 5, 7]
    assert as_list(draft.read("a", "ids")) == [5, 5, 5, 8]
    assert (target.read("a", "x"), draft.read("a", "x")) == (5, 6)


def test_copies_of_what_was_not_given(backend: AnyBackend) -> None:
    """A copy of a field without a value holds the field's default, whoever was there before."""
    target = make_target(backend)
    draft = make_draft(target, backend, copied("x"), copied("session"), copied("blocks"))
    add(target, "a", 5)
    draft.append("a", "blocks", 4)
    target.remove("a")
    target.add("b", prompt_len=4)

    assert (target.row_of("b"), draft.read("b", "x")) == (0, 0)
    assert as_list(draft.read("b", "blocks")) == []
    assert draft.read("b", "session") is target.read("b", "session")


def test_names_and_memory(backend: AnyBackend) -> None:
    """As a mapping it shows every declared array; memory and addresses count its own alone."""
    target = make_target(backend)
    draft = make_draft(target, backend, own(row("y")), own(host("h")), shared("x"), copied("ids"))

    assert list(draft) == ["y", "x", "ids"]
    assert len(draft) == 3
    assert "x" in draft
    assert "h" not in draft
    assert "kept" not in draft
    assert [line.name for line in draft.memory_report()] == ["y", "h", "ids"]
    assert draft.addresses().keys() == {"y", "ids"}
    with pytest.raises(UnknownField, match="kept"):
        draft["kept"]
    with pytest.raises(UnknownField, match="kept"):
        draft["kept"] = 1
    draft["x"] = 3
    assert to_host(target["x"]).tolist() == [3] * 4


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ([own(row("y")), own(row("y"))], InvalidField, "twice"),
        ([own(row("x")), shared("x")], InvalidField, "twice"),
        ([copied("x"), shared("x")], InvalidField, "twice"),
        ([shared("nothing")], UnknownField, "nothing"),
        ([copied("nothing")], UnknownField, "nothing"),
        ([copied("starts")], InvalidField, "cumulative"),
        ([copied("slot_of_row")], InvalidField, "packed"),
    ],
)
def test_bad_declarations(fields: list[DraftField], error: type[Exception], match: str) -> None:
    """A contradicting declaration is refused, and nothing follows the target."""
    target = make_target(NumpyBackend())
    add(target, "a", 1)
    with pytest.raises(error, match=match):
        ProposerInputBatch(target, fields, backend=NumpyBackend())

    assert target._followers._all == []


# -- members ---------------------------------------------------------------------------------------
def test_late_follower_takes_over(backend: AnyBackend) -> None:
    """A follower made between steps has every request in its row, copies filled as of now."""
    target = make_target(backend)
    for number, req_id in enumerate("abc"):
        add(target, req_id, number)
    step(target, a=1, b=4, c=1)
    target.remove("a")
    target.append("c", "ids", 9)
    draft = make_draft(target, backend)
    step(target, b=1, c=1)

    assert draft.req_ids == ("b", "c")
    assert target.rows == ("b", "c")
    assert as_list(draft.read("b", "ids")) == [1, 1]
    assert as_list(draft.read("c", "ids")) == [2, 2, 2, 9]
    assert to_host(draft["x"]).tolist() == [1, 2, 0, 0]
    draft.check()


def test_fewer_requests_than_the_target(backend: AnyBackend) -> None:
    """Members move with the target; other rows hold defaults; a stranger is an UnknownRequest."""
    target = make_target(backend)
    draft = make_draft(target, backend, auto_join=False)
    for number, req_id in enumerate("abcd", start=1):
        add(target, req_id, number)
    draft.join("b")
    draft.join("d")
    draft.write("b", "y", 20)
    draft.write("d", "y", 40)
    step(target, a=1, b=1, c=1, d=4)
    order = step(target, c=1, d=1, b=1)

    assert order.req_ids == ("d", "b", "c")
    assert order.idle == ("a",)
    assert to_host(draft["y"]).tolist() == [40, 20, -1, -1]
    assert to_host(draft["x"]).tolist() == [4, 2, 0, 0]
    assert draft.member_rows(order).tolist() == [True, True, False]
    assert (draft.is_member("b"), draft.is_member("a")) == (True, False)
    for act in (
        lambda: draft.read("a", "y"),
        lambda: draft.write("c", "x", 1),
        lambda: draft.append("c", "blocks", 1),
        lambda: draft.leave("a"),
    ):
        with pytest.raises(UnknownRequest, match="no member"):
            act()
    with pytest.raises(UnknownRequest, match="nobody"):
        draft.read("nobody", "y")
    with pytest.raises(UnknownRequest, match="nobody"):
        draft.join("nobody")
    with pytest.raises(DuplicateRequest, match="member already"):
        draft.join("b")
    target.check()


def test_leaving_clears(backend: AnyBackend) -> None:
    """Who leaves the follower leaves nothing in it, and stays out, preempted or not."""
    target = make_target(backend)
    draft = make_draft(
        target, backend, own(row("y")), own(row("z", residency="slots")), own(host("h"))
    )
    add(target, "a", 1)
    add(target, "b", 2)
    for name in "yz":
        draft.write("a", name, 7)
    draft.write("a", "h", "mine")
    draft.leave("a")

    assert draft.req_ids == ("b",)
    assert to_host(draft["y"]).tolist() == [0] * 4
    assert to_host(draft["z"]).tolist() == [0] * 4
    assert draft.objects("h") == [None] * 4
    target.preempt("a")
    target.resume("a")
    assert not draft.is_member("a")
    draft.join("a")
    assert draft.read("a", "y") == 0
    target.remove("a")
    add(target, "a", 3)
    assert draft.is_member("a")
    target.check()


def test_preempted_members(backend: AnyBackend) -> None:
    """After a resume own fields are kept or reset as declared, and copies are taken anew."""
    target = make_target(backend)
    draft = make_draft(
        target,
        backend,
        own(row("kept_y")),
        own(row("reset_y", on_preempt="reset")),
        copied("x"),
        copied("blocks"),
        auto_join=False,
    )
    add(target, "a", 1)
    add(target, "b", 2)
    draft.join("a")
    for name in ("kept_y", "reset_y", "x"):
        draft.write("a", name, 9)
    draft.append("a", "blocks", 9)
    target.preempt("a")
    assert draft.req_ids == ()
    assert to_host(draft["kept_y"]).tolist() == [0] * 4
    draft.check()
    target.preempt("b")
    target.resume("a")
    target.resume("b")

    assert draft.req_ids == ("a",)
    assert (draft.read("a", "kept_y"), draft.read("a", "reset_y"), draft.read("a", "x")) == (
        9,
        0,
        1,
    )
    assert as_list(draft.read("a", "blocks")) == []


def test_removed_while_preempted(backend: AnyBackend) -> None:
    """What a preempted request left to be found again goes with the request."""
    target = make_target(backend)
    draft = make_draft(target, backend)
    add(target, "a", 1)
    draft.write("a", "y", 9)
    target.preempt("a")
    target.remove("a")
    draft.check()
    add(target, "a", 2)

    assert draft.read("a", "y") == -1


def test_reset(backend: AnyBackend) -> None:
    """A reset of the target empties the follower in place."""
    target = make_target(backend)
    draft = make_draft(target, backend)
    addresses, handle = draft.addresses(), draft["ids"]
    add(target, "a", 1)
    add(target, "b", 2)
    target.preempt("b")
    target.reset()

    assert draft.req_ids == ()
    assert to_host(draft["x"]).tolist() == [0] * 4
    assert not to_host(handle).any()
    assert draft.addresses() == addresses
    target.check()
    add(target, "b", 3)
    assert draft.read("b", "y") == -1


def test_objects_are_released(backend: AnyBackend) -> None:
    """No object of a request that left is held, on any way out."""

    class Thing:
        pass

    target = make_target(backend)
    draft = make_draft(target, backend, own(host("h")), own(host("r", residency="rows")))
    gc.disable()
    for way_out in (target.remove, draft.leave, lambda _: target.reset()):
        add(target, "a", 1)
        things = [Thing(), Thing()]
        refs = [weakref.ref(thing) for thing in things]
        draft.write("a", "h", things[0])
        draft.write("a", "r", things[1])
        del things
        way_out("a")
        assert [ref() for ref in refs] == [None, None]
        if target.is_live("a"):
            target.remove("a")
    gc.enable()


def test_check_finds_lost_members(backend: AnyBackend) -> None:
    """``check`` of the target looks at its followers, and names the request."""
    target = make_target(backend)
    draft = make_draft(target, backend)
    add(target, "a", 1)
    draft._members.pop("a")
    with pytest.raises(InvariantBroken, match=r"never joined.*'a'"):
        target.check()
    draft._members["ghost"] = draft._members["a"] = None
    with pytest.raises(InvariantBroken, match=r"does not have.*'ghost'"):
        target.check()
    del draft._members["ghost"]
    draft._kept["ghost"] = {}
    with pytest.raises(InvariantBroken, match=r"gone.*'ghost'"):
        target.check()


# -- errors before any write -----------------------------------------------------------------------
@pytest.mark.parametrize("rebuild", [lambda o: range(9), lambda o: [[1]], lambda o: [1.5]])
def test_an_error_of_a_follower_moves_nothing(backend: AnyBackend, rebuild: Any) -> None:
    """If a derived field of the follower cannot hold the step, no row of anything has moved."""
    target = make_target(backend)
    wrong = [False]
    tail = packed("tail", (4,), rebuild=lambda o: rebuild(o) if wrong[0] else [0])
    draft = make_draft(target, backend, own(tail), own(row("y")))
    for number, req_id in enumerate("abc"):
        add(target, req_id, number)
        draft.write(req_id, "y", number)
    step(target, a=1, b=4, c=1)
    before = (target.snapshot(), to_host(draft["y"]).tolist())
    wrong[0] = True
    plan = target.plan({"b": 1, "c": 1})
    assert not plan.moves.is_identity
    with pytest.raises(InvalidField):
        target.apply(plan)

    assert repr(target.snapshot()) == repr(before[0])
    assert to_host(draft["y"]).tolist() == before[1]
    wrong[0] = False
    assert target.apply(plan) is plan.order
    assert [draft.read(r, "y") for r in "abc"] == [0, 1, 2]


# -- FastDeploy's faults ---------------------------------------------------------------------------
def three_cycle(backend: AnyBackend) -> tuple[InputBatch[Any], ProposerInputBatch[Any]]:
    """Requests a, b, c in rows 0, 1, 2, of which the next step makes b, c, a."""
    target = make_target(backend)
    draft = make_draft(target, backend, own(row("y")), copied("ids"))
    add(target, "a", 0, prompt_len=9)
    add(target, "b", 1, prompt_len=1)
    add(target, "c", 2, prompt_len=9)
    for number, req_id in enumerate("abc"):
        draft.write(req_id, "y", 10 + number)
    target.progress.computed[:3] = target.progress.confirmed[:3] = [9, 1, 3]
    return target, draft


def test_m1_cycles_of_three(backend: AnyBackend) -> None:
    """M1: a follower takes a cycle of three rows as the target does, and only once."""
    target, draft = three_cycle(backend)
    plan = target.plan({"b": 1, "c": 1})
    assert plan.moves.new_row_of.tolist() == [2, 0, 1]
    order = target.apply(plan)
    target.advance(order)
    assert target.rows == ("b", "c", "a")
    assert to_host(draft["y"]).tolist() == [11, 12, 10, 0]
    assert to_host(draft["ids"])[:3, 0].tolist() == [1, 2, 0]
    step(target, b=1, c=1)

    assert to_host(draft["y"]).tolist() == [11, 12, 10, 0]


def test_m2_fewer_rows_and_slots(backend: AnyBackend) -> None:
    """M2: rows and slots that the follower lacks are no error, and a departed one is cleared."""
    target = make_target(backend)
    for number, req_id in enumerate("abcd"):
        add(target, req_id, number)
    draft = make_draft(target, backend, own(row("y")), auto_join=False)
    draft.join("d")
    draft.write("d", "y", 5)
    step(target, a=1, b=1, c=1, d=4)
    target.remove("a")
    step(target, b=1, d=1)
    assert to_host(draft["y"]).tolist() == [5, 0, 0, 0]
    target.remove("d")
    assert to_host(draft["y"]).tolist() == [0] * 4
    step(target, b=1, c=1)
    target.check()


def test_m3_and_m4_outputs_from_the_first_reorder_on(backend: AnyBackend) -> None:
    """M3, M4: nothing says whether rows were reordered: outputs of every step find their request.

    The follower is made before the first request; its outputs are restored with the order of the
    step, in prefill and decode, before and after the first reorder, by row and by draft.
    """
    target = make_target(backend)
    draft = make_draft(target, backend)
    add(target, "a", 0, prompt_len=6)
    add(target, "b", 1, prompt_len=1)
    for scheduled in ({"a": 4, "b": 1}, {"a": 2, "b": 3}, {"b": 1, "a": 2}):
        order = step(target, **scheduled)
        tokens = [f"{r}{i}" for r in order.req_ids for i in range(scheduled[r])]
        rows = np.array([int(target.slot_of(r)) for r in order.req_ids])
        assert order.restore(rows) == {"a": 0, "b": 1}
        assert order.restore(tokens, counts=order.scheduled) == {
            r: [f"{r}{i}" for i in range(n)] for r, n in scheduled.items()
        }
    assert draft.member_rows(order).all()


def test_m5_every_own_field_moves(backend: AnyBackend) -> None:
    """M5: no field of the follower can be left out of a move: one that is declared moves."""
    target = make_target(backend)
    names = (
        "stop_flags", "is_block_step", "batch_drop", "draft_tokens", "last_seq_lens_this_time",
        "used_list_len", "first_token_hidden_states", "decode_states", "pre_ids", "params", "peer",
    )  # fmt: skip
    draft = make_draft(
        target,
        backend,
        own(row("stop_flags", (1,), "bool", default=True)),
        own(row("is_block_step", (1,), "bool")),
        own(row("batch_drop", (1,), "bool")),
        own(per_draft("draft_tokens", default=-1)),
        own(row("last_seq_lens_this_time", (), "int32", default=-1)),
        own(row("used_list_len", (), "int32", residency="slots")),
        own(row("first_token_hidden_states", (6,), "float32", default=-1)),
        own(per_draft("decode_states", (), "int32", default=-1)),
        own(ragged("pre_ids", 16, default=-1, residency="rows")),
        own(host("params", residency="rows")),
        own(row_valued("peer")),
    )
    add(target, "a", 0, prompt_len=9)
    add(target, "b", 1, prompt_len=1)
    add(target, "c", 2, prompt_len=9)
    for number, req_id in enumerate("abc"):
        draft.write(req_id, "draft_tokens", [number, number + 1, number + 2])
        draft.write(req_id, "decode_states", [number] * 3)
        draft.write(req_id, "pre_ids", [number] * (number + 1))
        draft.write(req_id, "params", {"of": req_id})
        draft.write(req_id, "peer", target.row_of(req_id))
        draft.write(req_id, "first_token_hidden_states", [number / 2] * 6)
        for name in ("last_seq_lens_this_time", "used_list_len"):
            draft.write(req_id, name, number)
        for name in ("stop_flags", "is_block_step", "batch_drop"):
            draft.write(req_id, name, [number % 2])
    before = {r: {n: as_list(draft.read(r, n)) for n in names} for r in "abc"}
    target.progress.computed[:3] = target.progress.confirmed[:3] = [9, 1, 3]
    step(target, b=1, c=1)
    assert target.rows == ("b", "c", "a")

    for req_id in "abc":
        before[req_id]["peer"] = target.row_of(req_id)
        assert {n: as_list(draft.read(req_id, n)) for n in names} == before[req_id]


def test_m6_admission_moves_nobody(backend: AnyBackend) -> None:
    """M6: a request that is admitted after a reorder leaves the rows of the others as they are."""
    target, draft = three_cycle(backend)
    step(target, b=1, c=1)
    target.remove("c")
    add(target, "d", 3)
    draft.write("d", "y", 13)

    assert target.row_of("d") == 1
    assert to_host(draft["y"]).tolist() == [11, 13, 10, 0]
    assert [draft.read(r, "y") for r in "abd"] == [10, 11, 13]


def test_m8_no_state_is_shared(backend: AnyBackend) -> None:
    """M8: two followers of one target, and followers of two targets, have nothing in common."""
    targets = [make_target(backend), make_target(backend)]
    drafts = [make_draft(t, backend, own(row("y"))) for t in (targets[0], *targets)]
    add(targets[0], "a", 0)
    drafts[0].write("a", "y", 5)

    assert [d.req_ids for d in drafts] == [("a",), ("a",), ()]
    assert [to_host(d["y"])[0] for d in drafts] == [5, 0, 0]


def test_m9_packed_and_global_fields_stay(backend: AnyBackend) -> None:
    """M9: token-level and global arrays are no rows: moves leave them, orders rebuild them."""
    target, _ = three_cycle(backend)
    draft = make_draft(
        target,
        backend,
        own(packed("target_hidden", (8, 2), "float32")),
        own(batch_global("not_need_stop", (1,), "bool")),
        own(cumulative("draft_starts", lambda o: o.scheduled)),
    )
    hidden = np.arange(16, dtype=np.float32).reshape(8, 2)
    draft["target_hidden"] = hidden
    draft["not_need_stop"] = True
    step(target, b=3, c=1)

    assert target.rows == ("b", "c", "a")
    assert np.array_equal(to_host(draft["target_hidden"]), hidden)
    assert to_host(draft["not_need_stop"]).tolist() == [True]
    assert to_host(draft["draft_starts"]).tolist() == [0, 3, 4, 4, 4]


class CountingBackend(NumpyBackend):
    """Counts what is read back from arrays."""

    num_reads = 0

    def read(self, array: Any, start: int, stop: int) -> Any:
        self.num_reads += 1
        return super().read(array, start, stop)


def test_m10_admission_reads_no_array() -> None:
    """M10: copies of a new request come from the host values that it was admitted with."""
    arrays = CountingBackend()
    target = make_target(arrays)
    draft = make_draft(target, arrays)
    add(target, "a", 5)

    assert arrays.num_reads == 0
    assert as_list(draft.read("a", "ids")) == [5, 5, 5]
