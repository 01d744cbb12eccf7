"""FeatureStore: what a step finds, encodes and evicts; whole items and look-ahead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from drive import Drive, run
from naive_media import encoded, item

from vlbatch.cache import EntryKey
from vlbatch.errors import (
    CacheFull,
    EncodeBudgetExceeded,
    InvalidSchedule,
    StaleOrder,
)


class TestPlan:
    def test_a_plan_is_for_one_state(self) -> None:
        """Whatever changed since the plan was made, it is refused and nothing is half done."""
        changes: list[Callable[[Drive], object]] = [
            lambda d: d.store.remove("R"),
            lambda d: d.add("T", 10),
            lambda d: d.cache.set_epoch(1),
            lambda d: d.cache.drop("old"),
            lambda d: d.reserve(S=10),
        ]
        for change in changes:
            drive = Drive(16)
            drive.add("R", 20, item(2, 6, "X"))
            drive.add("S", 20, item(2, 6, "Y"))
            drive.cache.reserve(EntryKey("old"), 1, req_id="")
            drive.cache.commit(EntryKey("old"), (encoded("old", 1),))
            plan = drive.store.plan(drive.chunks({"R": 20}))
            change(drive)
            with drive.refused(StaleOrder, "made for another state"):
                drive.store.reserve(plan)

    def test_a_reserved_entry_is_no_hit(self) -> None:
        """While a step waits for the encoder, its entries look ready to nobody (phantom entry)."""
        drive = Drive(16)
        drive.add("A", 20, item(2, 6, "X"))
        drive.add("B", 20, item(4, 6, "X"))
        work = drive.reserve(A=20)

        assert drive.ask(B=20) == {"B": 4}
        with drive.refused(InvalidSchedule, "'X' is being encoded", req_id="B"):
            drive.reserve(B=20)
        drive.store.rollback(work)
        assert drive.step(B=20)["B"] == run("X", 4, 0, 6)

    def test_oversized_encode_budget_shortens_the_chunk(self) -> None:
        """Two items of 6 under a budget of 8 a step: the chunk ends before the second."""
        drive = Drive(100, encode_rows=8)
        drive.add("R", 40, item(4, 6, "X"), item(20, 6, "Y"))

        assert drive.ask(R=40) == {"R": 20}
        with drive.refused(
            EncodeBudgetExceeded, "'Y' needs 6 feature rows encoded; 2 of this step are left: 20 of"
            " the 40 tokens", req_id="R", setting="encode_rows",
        ):  # fmt: skip
            drive.reserve(R=40)
        assert drive.step(R=20)["R"] == run("X", 4, 0, 6)
        assert drive.step(R=20)["R"] == run("Y", 20, 0, 6)

    def test_budget_is_shared_in_the_order_of_the_schedule(self) -> None:
        """What an earlier request encodes is gone for a later one of the same step."""
        drive = Drive(100, encode_rows=8)
        for req_id in "ABC":
            drive.add(req_id, 20, item(3, 6 if req_id != "C" else 2, req_id))

        assert drive.ask(A=20, B=20, C=20) == {"A": 20, "B": 3, "C": 20}
        assert drive.ask(B=20, A=20, C=20) == {"B": 20, "A": 3, "C": 20}

    def test_an_item_is_encoded_at_the_first_chunk_that_reaches_a_place(self) -> None:
        """Not a chunk earlier, and only once (B40); masked-out tokens alone do not count."""
        drive = Drive(100)
        drive.add("R", 40, item(20, 12, "X", mask="0" * 3 + "1" * 9))

        assert drive.step(R=10) == {"R": []}
        assert drive.step(R=13) == {"R": []}
        assert drive.encoded == []
        assert drive.step(R=2)["R"] == run("X", 23, 0, 2)
        assert drive.step(R=15)["R"] == run("X", 25, 2, 7)
        assert drive.encoded == ["X"]

    def test_prefix_hit(self) -> None:
        """A hit inside an item encodes it whole and delivers the rest; behind it nothing (B41)."""
        drive = Drive(100)
        drive.add("R", 40, item(4, 24, "X"), computed=16)
        drive.add("S", 40, item(4, 24, "Y"), computed=32)

        assert drive.step(R=24, S=8) == {"R": run("X", 16, 12, 12), "S": []}
        assert drive.encoded == ["X"]

    def test_own_hits_are_pinned_before_anything_is_evicted(self) -> None:
        """LRU of 4 with A, B, C, D: a request for A, E, B keeps A and B, E replaces C (B79)."""
        drive = Drive(4)
        for key in "ABCD":
            drive.add(key, 1, item(0, 1, key))
            drive.step(**{key: 1})
            drive.store.remove(key)
        drive.add("R", 3, item(0, 1, "A"), item(1, 1, "E"), item(2, 1, "B"))
        work = drive.reserve(R=3)

        assert [key.content for key in work.evicted] == ["C"]
        assert [key.content for key in work.hits] == ["A", "B"]
        assert [task.key.content for task in work.tasks] == ["E"]

    def test_one_request_does_not_lose_its_hit_to_another_of_the_step(self) -> None:
        """Hits of later requests are wanted, so an earlier request evicts others first (V3)."""
        drive = Drive(3)
        for key in "ABC":
            drive.add(key, 1, item(0, 1, key))
            drive.step(**{key: 1})
            drive.store.remove(key)
        drive.add("R", 1, item(0, 1, "new"))
        drive.add("S", 1, item(0, 1, "A"))
        work = drive.reserve(R=1, S=1)

        assert [key.content for key in work.evicted] == ["B"]
        assert [key.content for key in work.hits] == ["A"]

    def test_what_is_needed_last_goes_first(self) -> None:
        """Too little room for three cached items and a new one: the last of the chunk gives way."""
        drive = Drive(4)
        drive.add("old", 4, item(0, 1, "A"), item(1, 1, "B"), item(2, 2, "C"))
        drive.step(old=4)
        drive.store.remove("old")
        items = [
            item(n, size, key)
            for n, size, key in ((0, 1, "new"), (1, 1, "A"), (2, 1, "B"), (3, 2, "C"))
        ]
        drive.add("R", 5, *items)

        assert drive.ask(R=5) == {"R": 3}
        assert [key.content for key in drive.reserve(R=3).evicted] == ["C"]

    def test_hits_of_a_look_ahead_are_wanted_too(self) -> None:
        """The drafter's item is not evicted for an earlier request while others can go."""
        drive = Drive(3, lookahead=1)
        for key in "ABC":
            drive.add(key, 1, item(0, 1, key))
            drive.step(**{key: 1})
            drive.store.remove(key)
        drive.add("R", 1, item(0, 1, "new"))
        drive.add("S", 9, item(4, 1, "A"))
        work = drive.reserve(R=1, S=4)

        assert [key.content for key in work.evicted] == ["B"]
        assert [key.content for key in work.hits] == ["A"]

    def test_evicted_and_encoded_again_in_one_step(self) -> None:
        """A request gives way and finds room after all: evict, then reserve, no notice is left."""
        drive = Drive(8)
        drive.add("R", 30, item(10, 4, "R"))
        drive.add("W", 30, item(0, 5, "V"), item(20, 5, "V"))
        drive.add("Y", 30, item(0, 3, "X"))
        drive.step(R=10, W=10, Y=1)
        work = drive.reserve(R=10, Y=5)

        assert [key.content for key in work.evicted] == ["X", "V"]
        assert [task.key.content for task in work.tasks] == ["R", "X"]
        drive.commit(work)
        assert drive.gather(R=10, Y=5) == {"R": run("R", 10, 0, 4), "Y": run("X", 1, 1, 2)}
        assert drive.cache.take_freed() == (EntryKey("V"),)

    def test_two_requests_that_hold_what_they_do_not_need_yet(self) -> None:
        """Each waits for the space that the other holds for later: the earlier one gets it."""
        drive = Drive(8)
        for req_id in "AB":
            drive.add(
                req_id, 30, item(0, 4, f"{req_id}1"), item(10, 8, f"{req_id}2"),
                item(20, 4, f"{req_id}1"),
            )  # fmt: skip
        drive.step(A=10, B=10)
        assert drive.cache.usage.reclaimable == 0

        assert drive.ask(B=20) == {"B": 0}
        assert drive.ask(B=10, A=10) == {"B": 0, "A": 10}
        with drive.refused(CacheFull, "'B2'", req_id="B", setting="max_rows"):
            drive.reserve(B=10)
        assert drive.step(A=10)["A"] == run("A2", 10, 0, 8)
        drive.step(A=10)
        drive.store.remove("A")
        drive.step(B=10)
        assert drive.step(B=10)["B"] == run("B1", 20, 0, 4)

    def test_space_is_taken_from_the_latest_arrivals_first(self) -> None:
        """No more requests give way than needed, and never one that came before."""
        drive = Drive(9)
        drive.add("first", 30, item(0, 3, "f"), item(20, 3, "f"))
        drive.add("R", 30, item(10, 6, "X"))
        for req_id in ("second", "third"):
            drive.add(req_id, 30, item(0, 3, req_id), item(20, 3, req_id))
        drive.step(first=10, R=10, second=10, third=10)
        plan = drive.store.plan(drive.chunks({"R": 10}))

        assert {reference.req_id for reference in plan.shed} == {"second", "third"}
        smaller = Drive(12)
        smaller.add("R", 30, item(10, 6, "X"))
        for req_id in ("second", "third", "fourth"):
            smaller.add(req_id, 30, item(0, 3, req_id), item(20, 3, req_id))
        smaller.step(R=10, second=10, third=10, fourth=10)
        plan = smaller.store.plan(smaller.chunks({"R": 10}))
        assert {reference.req_id for reference in plan.shed} == {"fourth"}

    def test_giving_up_references_is_carried_out(self) -> None:
        """References given up in a plan are gone in store and cache, and come back when needed."""
        drive = Drive(8)
        drive.add("A", 30, item(10, 8, "big"))
        drive.add("B", 30, item(0, 4, "X"), item(20, 4, "X"))
        drive.step(A=10, B=10)
        drive.step(A=10)

        assert drive.store.holding() == ()
        assert drive.cache.present() == (EntryKey("big"),)
        drive.step(B=10)
        assert drive.step(B=10)["B"] == run("X", 20, 0, 4)
        assert drive.encoded == ["X", "big", "X"]


class TestWholeItems:
    def test_chunks_stop_at_item_borders(self) -> None:
        """No chunk starts or ends inside an item, each has at most 10 tokens (B61)."""
        drive = Drive(100, whole_items=True)
        drive.add("R", 40, item(6, 8, "X"), item(20, 8, "Y"))
        chunks = []
        while drive.computed["R"] < 40:
            start = drive.computed["R"]
            drive.step(**drive.ask(R=min(10, 40 - start)))
            chunks.append((start, drive.computed["R"]))

        assert chunks == [(0, 6), (6, 16), (16, 20), (20, 30), (30, 40)]

    def test_a_cut_is_refused(self) -> None:
        """A chunk that would cut an item is refused with what fits and the setting."""
        drive = Drive(100, whole_items=True)
        drive.add("R", 40, item(6, 8, "X"))
        with drive.refused(
            InvalidSchedule, "would cut an item: 6 of the 10 tokens from token 0 on fit",
            req_id="R", setting="whole_items",
        ):  # fmt: skip
            drive.reserve(R=10)

    def test_items_with_embeddings_are_not_cut_either(self) -> None:
        """Attention inside an item does not care where its features come from."""
        drive = Drive(100, whole_items=True)
        drive.add("R", 40, item(6, 8, "P", embeds=encoded("P", 8)))

        assert drive.ask(R=10) == {"R": 6}

    @pytest.mark.parametrize("settings", [{"max_rows": 8}, {"max_rows": 100, "encode_rows": 8}])
    def test_touching_items_with_look_ahead(self, settings: dict[str, int]) -> None:
        """The drafter alone lacks the second item: the first one runs up to it all the same."""
        drive = Drive(**settings, whole_items=True, lookahead=1)
        drive.add("R", 16, item(0, 8, "X"), item(8, 8, "Y"))

        assert drive.ask(R=16) == {"R": 8}
        assert drive.step(R=8)["R"] == run("X", 0, 0, 8)
        assert drive.step(R=8)["R"] == run("Y", 8, 0, 8)


class TestLookAhead:
    def test_an_item_right_behind_the_chunk_is_encoded(self) -> None:
        """A chunk [0, 8) with item (8, 6): X is encoded in this step (B16)."""
        drive = Drive(100, lookahead=1)
        drive.add("R", 20, item(8, 6, "X"))
        drive.commit(drive.reserve(R=8))

        assert drive.encoded == ["X"]
        assert drive.gather(R=8) == {"R": []}
        assert drive.gather(R=8, shift=1) == {"R": [(8, "X", 0)]}

    def test_else_the_chunk_ends_earlier(self) -> None:
        """Without budget for X the chunk ends at 7, so that the drafter misses nothing (B16)."""
        drive = Drive(100, lookahead=1, encode_rows=6)
        drive.add("other", 20, item(0, 6, "Y"))
        drive.add("R", 20, item(8, 6, "X"))

        assert drive.ask(other=20, R=8) == {"other": 20, "R": 7}

    def test_budget_of_this_step_used_up_at_the_boundary(self) -> None:
        """Right before the item a request waits for a step with budget: it will come."""
        drive = Drive(100, lookahead=1, encode_rows=6)
        drive.add("other", 20, item(0, 6, "Y"))
        drive.add("R", 20, item(8, 6, "X"))
        drive.step(R=7)

        assert drive.ask(other=20, R=1) == {"other": 20, "R": 0}
        assert drive.ask(R=1, other=20) == {"R": 1, "other": 0}

    @pytest.mark.parametrize("settings", [{"max_rows": 8}, {"max_rows": 100, "encode_rows": 8}])
    @pytest.mark.parametrize("lookahead", [1, 3])
    def test_what_can_never_be_had_together_does_not_stall(
        self, settings: dict[str, int], lookahead: int
    ) -> None:
        """Two touching items, room for one: at the boundary the drafter goes without (B18)."""
        drive = Drive(**settings, lookahead=lookahead)
        drive.add("R", 16, item(0, 8, "X"), item(8, 8, "Y"), computed=7)

        assert drive.ask(R=9) == {"R": 1}
        drive.commit(drive.reserve(R=1))
        assert drive.gather(R=1)["R"] == run("X", 7, 7, 1)
        order = drive.order(R=1)
        inputs = drive.store.gather(order, shift=1)
        assert (inputs.tokens.tolist(), inputs.skipped.tolist()) == ([], [0])

    def test_never_more_than_was_asked(self) -> None:
        """A blocked item far in a long look-ahead does not lengthen the chunk."""
        drive = Drive(8, lookahead=3)
        drive.add("hold", 20, item(0, 8, "H"))
        drive.step(hold=4)
        drive.add("R", 20, item(8, 8, "X"))
        drive.computed["R"] = 5

        assert drive.ask(R=1) == {"R": 1}
        drive.reserve(R=1)

    def test_no_references_are_given_up_for_a_look_ahead(self) -> None:
        """A drafter's boundary is not worth encoding a repeated item again."""
        drive = Drive(8, lookahead=1)
        drive.add("R", 30, item(0, 4, "X"), item(8, 8, "Y"), item(20, 4, "X"), computed=0)
        drive.step(R=7)
        assert drive.ask(R=20) == {"R": 1}
        drive.step(R=1)

        assert drive.cache.present() == (EntryKey("X"),)
