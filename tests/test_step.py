"""VLBatch: one admission and one step for every part; reset and ``check``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from naive_media import encoded, item, positions_of
from vl_batches import (
    Batch,
    begun,
    delivered,
    encode_all,
    make_batch,
    refused,
    run,
    run_step,
    state_of,
)

from vlbatch import EntryKey
from vlbatch.errors import (
    BatchFull,
    CacheFull,
    DuplicateRequest,
    EncodeBudgetExceeded,
    FeatureRowsMismatch,
    InvalidField,
    InvalidItem,
    InvalidSchedule,
    InvariantBroken,
    ItemTooLarge,
    PlaceholderMismatch,
    PromptTooLong,
    StaleOrder,
    UnknownField,
    UnknownRequest,
)

IMAGE = item(4, 24, "X", grid=(1, 4, 6))
"""Of many reports: L = 40, delta -18."""

FIVE_FOR_FOUR = item(4, 4, grid=(1, 2, 2), embeds=encoded("P", 5))


def positions(vl: Batch, **scheduled: int) -> list[list[int]]:
    """Run a step; returns its positions [3][tokens]."""
    order = vl.arrange(begun(vl, **scheduled))
    table = vl.positions_of(order)
    vl.complete(order)
    return [axis.tolist() for axis in table]


class TestAdmission:
    def test_everywhere(self) -> None:
        """An admitted request has a slot, its fields, its items and its positions."""
        vl = make_batch()
        slot = vl.add("A", prompt_len=40, items=[IMAGE], computed=8, fields={"tag": 7})

        assert vl.batch.slot_of("A") == slot
        assert vl.batch.computed_of("A") == 8
        assert vl.batch.read("A", "tag") == 7
        assert vl.features.items_of("A") == (IMAGE,)
        assert vl.positions.delta("A") == -18
        vl.check()

    @pytest.mark.parametrize(
        ("error", "setting", "request_"),
        [
            (DuplicateRequest, None, {"req_id": "live"}),
            (DuplicateRequest, None, {"req_id": "preempted"}),
            (PromptTooLong, "max_model_len", {"prompt_len": 65}),
            (PromptTooLong, "max_model_len", {"prompt_len": 0}),
            (InvalidSchedule, None, {"computed": 40}),
            (InvalidSchedule, None, {"computed": -1}),
            (UnknownField, "fields", {"fields": {"tga": 1}}),
            (InvalidField, None, {"fields": {"tag": [1, 2]}}),
            (InvalidItem, None, {"items": [item(38, 4, grid=(1, 2, 2))]}),
            (InvalidItem, None, {"items": [item(4, 4, grid=(1, 2, 3))]}),
            (InvalidItem, None, {"items": [item(4, 4)]}),  # three axes need a grid
            (PlaceholderMismatch, None, {"items": [FIVE_FOR_FOUR]}),
            (ItemTooLarge, "max_rows", {"items": [item(0, 25, grid=(1, 5, 5))]}),
        ],
    )  # fmt: skip
    def test_or_nowhere(
        self, error: type[Exception], setting: str | None, request_: dict[str, Any]
    ) -> None:
        """Whichever part refuses, no part has written anything (B90)."""
        vl = make_batch(24)
        vl.add("preempted", prompt_len=20, items=[item(2, 4, "P", grid=(1, 2, 2))])
        vl.preempt("preempted")
        vl.add("live", prompt_len=20, items=[item(2, 4, "Y", grid=(1, 2, 2))], fields={"tag": 5})
        run_step(vl, live=4)
        arguments = {"req_id": "R", "prompt_len": 40, "items": [IMAGE], **request_}
        with refused(vl, error, req_id=arguments["req_id"], setting=setting):
            vl.add(**arguments)
        vl.add("R", prompt_len=40, items=[IMAGE])

    def test_full(self) -> None:
        """No slot: nothing of the request is anywhere, and a slot given back can be taken."""
        vl = make_batch(capacity=1)
        vl.add("A", prompt_len=40, items=[IMAGE])
        with refused(vl, BatchFull, req_id="B", setting="capacity"):
            vl.add("B", prompt_len=40, items=[IMAGE])
        vl.remove("A")
        vl.add("B", prompt_len=40, items=[IMAGE])

    def test_resume_without_a_slot(self) -> None:
        """A preempted request that finds no slot stays preempted, with items and positions."""
        vl = make_batch(capacity=1)
        vl.add("A", prompt_len=40, items=[IMAGE])
        vl.preempt("A")
        vl.add("B", prompt_len=40)
        with refused(vl, BatchFull, req_id="A", setting="capacity"):
            vl.resume("A")
        vl.remove("B")
        vl.resume("A")
        assert run_step(vl, A=40)[1]["A"] == run("X", 4, 0, 24)

    def test_an_unknown_family_is_refused(self) -> None:
        """The position family is looked up before anything is made."""
        with pytest.raises(Exception, match="position family 'qwen9' is unknown"):
            make_batch(family="qwen9")

    def test_one_axis(self) -> None:
        """With 1-D positions an item needs no grid, and media is placed like text."""
        vl = make_batch(family="1d")
        vl.add("A", prompt_len=10, items=[item(2, 4, "X")])

        assert positions(vl, A=10) == [list(range(10))]


class TestStep:
    def test_features_positions_and_fields_reach_their_own_request(self) -> None:
        """Two prompts with pictures of other sizes, in chunks, one decoding (V1, V9, B44)."""
        vl = make_batch()
        small = item(2, 4, "Y", grid=(1, 2, 2))
        vl.add("A", prompt_len=40, items=[IMAGE], fields={"tag": 1})
        vl.add("B", prompt_len=10, items=[small], fields={"tag": 2})
        order, got = run_step(vl, A=16, B=10)
        assert got == {"A": run("X", 4, 0, 12), "B": run("Y", 2, 0, 4)}
        assert order.regions == (0, 0, 2)

        order = vl.arrange(begun(vl, A=24, B=1))
        assert order.req_ids == ("B", "A")
        assert delivered(order, vl.gather(order)) == {"A": run("X", 16, 12, 12), "B": []}
        table = vl.positions_of(order).T.tolist()
        assert table == [[8, 8, 8], *map(list, positions_of([IMAGE], 40)[16:])]
        assert [vl.batch["tag"][row] for row in range(2)] == [2, 1]

    def test_decode_steps_carry_no_features(self) -> None:
        """Features are used once: a decode step has none to concatenate (V7, B38)."""
        vl = make_batch()
        vl.add("A", prompt_len=40, items=[IMAGE])
        run_step(vl, A=40)
        for _ in range(3):
            _, got = run_step(vl, A=1)
            assert got == {"A": []}
        assert vl.features.holding() == ()

    def test_same_request_in_another_row(self) -> None:
        """Alone in row 0 or last behind three others: the same features and positions (B56)."""
        seen = []
        for others in (0, 3):
            vl = make_batch()
            for number in range(others):
                vl.add(f"o{number}", prompt_len=9, items=[item(1, 6, f"o{number}", grid=(1, 2, 3))])
            vl.add("A", prompt_len=40, items=[IMAGE])
            order = vl.arrange(begun(vl, **{r: 9 if r != "A" else 40 for r in vl.batch.req_ids}))
            start = int(order.query_start[order.row_of("A")])
            table = vl.positions_of(order)[:, start : start + 40]
            seen.append((delivered(order, vl.gather(order))["A"], table.tolist()))

        assert seen[0] == seen[1]

    def test_positions_of_any_chunking(self) -> None:
        """L = 40, chunks [0, 16), [16, 32), [32, 40): the table of the prompt, cut (B26, B27)."""
        vl = make_batch()
        vl.add("A", prompt_len=40, items=[IMAGE])
        table: list[list[int]] = [[], [], []]
        for number in (16, 16, 8):
            for axis, values in zip(table, positions(vl, A=number), strict=True):
                axis += values
            assert vl.positions.delta("A") == -18

        at = [tuple(axis[i] for axis in table) for i in (3, 4, 15, 16, 27, 28, 39)]
        assert at == [(3, 3, 3), (4, 4, 4), (4, 5, 9), (4, 6, 4), (4, 7, 9), (10,) * 3, (21,) * 3]
        assert positions(vl, A=1) == [[22]] * 3

    def test_drafts_of_two_requests(self) -> None:
        """Next index 40 with delta -18 and 12 with 0, 4 tokens each: shape (3, 8) (B24, B20)."""
        vl = make_batch(num_drafts=3)
        vl.add("A", prompt_len=40, items=[IMAGE])
        vl.add("B", prompt_len=12)
        run_step(vl, A=40, B=12)
        order = vl.arrange(begun(vl, A=4, B=4))

        assert vl.positions_of(order).tolist() == [[22, 23, 24, 25, 12, 13, 14, 15]] * 3
        assert order.token_indices.tolist() == [40, 41, 42, 43, 12, 13, 14, 15]
        vl.complete(order, {"A": 1, "B": 0})
        assert positions(vl, A=1, B=1) == [[24, 13]] * 3

    def test_a_newer_prefill_leaves_a_decoding_request_its_delta(self) -> None:
        """A decodes at 27, then 28, although B with delta -2 came in between (B30)."""
        vl = make_batch()
        vl.add("A", prompt_len=45, items=[IMAGE])
        run_step(vl, A=45)
        vl.add("B", prompt_len=10, items=[item(2, 4, "Y", grid=(1, 2, 2))])
        first = positions(vl, A=1, B=10)

        assert [axis[0] for axis in first] == [27] * 3
        assert [axis[-1] for axis in first] == [7] * 3
        assert positions(vl, A=1, B=1) == [[28, 8]] * 3

    def test_shapes_depend_on_the_rows_of_this_step(self) -> None:
        """Four requests finish; the next step has one (B33)."""
        vl = make_batch()
        for req_id in "ABCD":
            vl.add(req_id, prompt_len=9)
        run_step(vl, A=9, B=9, C=9, D=9)
        for req_id in "ABCD":
            vl.remove(req_id)
        vl.add("E", prompt_len=3)

        assert positions(vl, E=3) == [[0, 1, 2]] * 3

    def test_prefix_hit(self) -> None:
        """A hit of 16 inside the image, of 32 behind it: rows 12..23, or nothing at all (B41)."""
        vl = make_batch()
        vl.add("A", prompt_len=40, items=[IMAGE], computed=16)
        vl.add("B", prompt_len=40, items=[item(4, 24, "Y", grid=(1, 4, 6))], computed=32)
        order = vl.arrange(begun(vl, A=24, B=8))
        got = delivered(order, vl.gather(order))

        assert got == {"A": run("X", 16, 12, 12), "B": []}
        assert vl.positions_of(order)[:, 24:].tolist() == [list(range(14, 22))] * 3
        assert vl.features.cache.present() == (EntryKey("X"),)

    def test_sharing(self) -> None:
        """R3 with X shares with R1, never with R2 (B77)."""
        vl = make_batch()
        for req_id, key in (("R1", "X"), ("R2", "Y"), ("R3", "X")):
            vl.add(req_id, prompt_len=9, items=[item(2, 4, key, grid=(1, 2, 2))])
            _, got = run_step(vl, **{req_id: 9})
            assert got[req_id] == run(key, 2, 0, 4)

        assert vl.features.cache.counters.encoded == 2

    def test_scheduling_by_ask_runs_two_items_that_need_the_whole_cache(self) -> None:
        """Two of 16 rows in 16: one after the other, with a drafter too (B57, B18)."""
        for lookahead in (0, 1):
            vl = make_batch(16, lookahead=lookahead)
            keys = [item(0, 16, "X", grid=(1, 4, 4)), item(16, 16, "Y", grid=(1, 4, 4))]
            vl.add("A", prompt_len=33, items=keys)
            got: list[Any] = []
            while vl.batch.computed_of("A") < 33:
                got += run_step(vl, **vl.ask({"A": 99}))[1]["A"]
            assert got == run("X", 0, 0, 16) + run("Y", 16, 0, 16)


class TestBegin:
    @pytest.mark.parametrize(
        ("error", "setting", "scheduled", "settings"),
        [
            (InvalidSchedule, None, {"A": 4, "nobody": 1}, {}),
            (InvalidSchedule, None, {"B": 4, "A": 0}, {}),
            (InvalidSchedule, None, {"B": 4, "A": -1}, {}),
            (InvalidSchedule, None, {"B": 4, "A": 41}, {}),
            (CacheFull, "max_rows", {"B": 9, "A": 40}, {"max_rows": 26}),
            (EncodeBudgetExceeded, "encode_rows", {"B": 9, "A": 40}, {"encode_rows": 26}),
            (InvalidSchedule, "whole_items", {"B": 9, "A": 10}, {"whole_items": True}),
        ],
    )
    def test_refusals(
        self,
        error: type[Exception],
        setting: str | None,
        scheduled: dict[str, int],
        settings: dict[str, Any],
    ) -> None:
        """A schedule that cannot run is refused as a whole; B has not moved either."""
        vl = make_batch(**settings)
        vl.add("A", prompt_len=40, items=[IMAGE])
        vl.add("B", prompt_len=9, items=[item(2, 4, "Y", grid=(1, 2, 2))])
        req_id = "nobody" if "nobody" in scheduled else "A"
        with refused(vl, error, req_id=req_id, setting=setting):
            vl.begin(scheduled)
        run_step(vl, B=9)

    def test_ask(self) -> None:
        """Capped by what remains, pure, and for live requests only."""
        vl = make_batch(24, num_drafts=2)
        vl.add("A", prompt_len=40, items=[IMAGE])
        vl.add("B", prompt_len=9, items=[item(2, 4, "Y", grid=(1, 2, 2))])
        before = state_of(vl)

        assert vl.ask({"A": 99, "B": 99}) == {"A": 40, "B": 2}
        assert vl.ask({"B": 99, "A": 99}) == {"B": 9, "A": 4}
        assert vl.ask({}) == {}
        assert state_of(vl) == before
        run_step(vl, B=9)
        assert vl.ask({"B": 99}) == {"B": 3}
        with refused(vl, UnknownRequest, req_id="nobody"):
            vl.ask({"nobody": 1})

    def test_a_key_with_other_rows_fails_that_request_alone(self) -> None:
        """'u' with 4 rows is cached, B needs 6: B leaves, A and D go on, the entry stays (B73)."""
        vl = make_batch()
        vl.add("A", prompt_len=9, items=[item(2, 4, "u", grid=(1, 2, 2))])
        vl.add("D", prompt_len=4)
        run_step(vl, A=3, D=4)
        vl.add("B", prompt_len=9, items=[item(2, 6, "u", grid=(1, 2, 3))])
        assert vl.ask({"B": 9}) == {"B": 9}  # a scheduler that asks first must get rid of it too
        step = vl.begin({"A": 6, "B": 9, "D": 1})

        assert step.failed.keys() == {"B"}
        assert type(step.failed["B"]) is FeatureRowsMismatch
        assert step.scheduled == {"A": 6, "D": 1}
        assert not vl.batch.is_live("B")
        vl.check()
        order = vl.arrange(step)
        assert delivered(order, vl.gather(order)) == {"A": run("u", 3, 1, 3), "D": []}

    def test_a_failure_does_not_change_what_fits(self) -> None:
        """The space of a request that fails is free in the next step, not in this one.

        With it A could read its image ahead, and B's chunk, accepted before, would not fit.
        """
        vl = make_batch(6, lookahead=1)
        wrong = [item(0, 2, "Z", grid=(1, 1, 2)), item(4, 3, "Z", grid=(1, 1, 3))]
        vl.add("F", prompt_len=12, items=wrong)
        run_step(vl, F=1)
        vl.add("A", prompt_len=12, items=[item(1, 6, "X", grid=(1, 2, 3))])
        vl.add("B", prompt_len=12, items=[item(2, 4, "Y", grid=(1, 2, 2))])
        assert vl.ask({"F": 11, "A": 1, "B": 2}) == {"F": 11, "A": 1, "B": 2}
        step = vl.begin({"F": 11, "A": 1, "B": 2})

        assert (list(step.failed), step.scheduled) == (["F"], {"A": 1, "B": 2})
        vl.check()

    def test_everybody_fails(self) -> None:
        """A step of which nothing is left is an empty step."""
        vl = make_batch()
        vl.add("A", prompt_len=9, items=[item(2, 4, "u", grid=(1, 2, 2))])
        run_step(vl, A=3)
        vl.add("B", prompt_len=9, items=[item(2, 6, "u", grid=(1, 2, 3))])
        step = vl.begin({"B": 9})
        order = vl.arrange(step)

        assert (step.scheduled, order.num_reqs) == ({}, 0)
        assert vl.gather(order).tokens.tolist() == []
        assert vl.positions_of(order).shape == (3, 0)
        vl.complete(order)
        vl.check()

    def test_one_after_the_other(self) -> None:
        """The first request of a step defines a key; the second fails, whatever comes behind."""
        vl = make_batch()
        vl.add("A", prompt_len=9, items=[item(2, 4, "u", grid=(1, 2, 2))])
        vl.add("B", prompt_len=9, items=[item(2, 6, "u", grid=(1, 2, 3))])
        vl.add("C", prompt_len=9, items=[item(2, 4, "u", grid=(1, 2, 2))])
        step = vl.begin({"A": 9, "B": 9, "C": 9})

        assert (list(step.failed), list(step.scheduled)) == (["B"], ["A", "C"])


class TestReset:
    def test_reset(self) -> None:
        """Live, preempted and open: all gone, ready features stay, stale steps are refused."""
        vl = make_batch()
        for req_id, key in (("A", "X"), ("B", "Y"), ("C", "Z")):
            vl.add(req_id, prompt_len=9, items=[item(2, 4, key, grid=(1, 2, 2))])
        order, _ = run_step(vl, A=4)
        vl.preempt("B")
        step = vl.begin({"C": 9})
        left: list[str] = []
        vl.before_leave = left.append
        vl.reset()

        vl.check()
        assert left == ["A", "C"]
        assert vl.batch.req_ids == vl.batch.preempted == vl.features.req_ids == ()
        assert vl.features.cache.present() == (EntryKey("X"),)
        assert vl.features.cache.usage.reclaimable == 1000
        with refused(vl, StaleOrder, "no step waits"):
            vl.encode(step, encode_all)
        with refused(vl, StaleOrder):
            vl.complete(order)
        vl.add("A", prompt_len=9, items=[item(2, 4, "X", grid=(1, 2, 2))])
        assert run_step(vl, A=9)[1] == {"A": run("X", 2, 0, 4)}


class TestCheck:
    @pytest.mark.parametrize(
        ("corrupt", "said"),
        [
            (lambda vl: vl.features.remove("A"), "batch and features differ.*'A'"),
            (lambda vl: vl.positions.remove("A"), "batch and positions differ.*'A'"),
            (lambda vl: vl.batch.remove("A"), "batch and features differ.*'A'"),
            (lambda vl: vl.features.add("Z", [], 9), "batch and features differ.*'Z'"),
            (lambda vl: vl.features._requests["A"].held.clear(), "references of the store"),
            (lambda vl: setattr(vl.features.cache, "_used_rows", 9), "are counted"),
            (lambda vl: vl.batch.progress.confirmed.fill(30), "confirmed 30"),
            (lambda vl: vl.positions._delta_of_slot.fill(1), "delta"),
        ],
    )  # fmt: skip
    def test_planted_corruption_is_found(self, corrupt: Callable[[Batch], Any], said: str) -> None:
        """Each part is checked, and that they know the same requests."""
        vl = make_batch()
        vl.add("A", prompt_len=9, items=[item(2, 4, "X", grid=(1, 2, 2))])
        run_step(vl, A=4)
        corrupt(vl)

        with pytest.raises(InvariantBroken, match=said):
            vl.check()
