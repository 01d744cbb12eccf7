"""FeatureStore: admission, the life of references, a step's two phases, failures, memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from drive import Drive, outputs_of, run
from naive_media import encoded, item

from vlbatch.cache import CacheUsage, EncoderCache, EntryKey, Reference
from vlbatch.errors import (
    CacheFull,
    DuplicateRequest,
    EncodeBudgetExceeded,
    EncodeFailed,
    FeatureRowsMismatch,
    InvalidField,
    InvalidItem,
    InvalidSchedule,
    InvariantBroken,
    ItemTooLarge,
    PlaceholderMismatch,
    StaleOrder,
    UnknownRequest,
)
from vlbatch.features import FeatureSpec, FeatureStore


class TestAdmission:
    def test_largest_item_that_fits(self) -> None:
        """Capacity 16: 16 rows run, 17 are refused at the door with the setting (B57)."""
        drive = Drive(16)
        with drive.refused(
            ItemTooLarge, "'X' has 17 feature rows; the encoder cache holds 16",
            req_id="R", setting="max_rows",
        ):  # fmt: skip
            drive.add("R", 40, item(2, 17, "X"))
        drive.add("R", 40, item(2, 16, "X"))

        assert drive.step(R=40)["R"] == run("X", 2, 0, 16)

    def test_two_items_that_fill_the_cache_each_run_one_after_the_other(self) -> None:
        """Two of 16 in one prompt: the second takes the space of the first (B57)."""
        drive = Drive(16)
        drive.add("R", 40, item(2, 16, "X"), item(18, 16, "Y"))

        assert drive.ask(R=40) == {"R": 18}
        assert drive.step(R=18)["R"] == run("X", 2, 0, 16)
        assert drive.step(R=22)["R"] == run("Y", 18, 0, 16)

    def test_rows_count_not_tokens(self) -> None:
        """16 features + 4 separators fit budgets of 16 rows (B59, B14)."""
        drive = Drive(16, encode_rows=16)
        drive.add("R", 40, item(2, 20, "X", mask="11110" * 4))

        assert len(drive.step(R=40)["R"]) == 16

    def test_encode_budget_is_named_where_it_is_the_smaller(self) -> None:
        """An item over the encode budget can never be encoded either."""
        drive = Drive(16, encode_rows=8)
        with drive.refused(ItemTooLarge, "a step holds 8", req_id="R", setting="encode_rows"):
            drive.add("R", 40, item(2, 9, "X"))
        with drive.refused(ItemTooLarge, "cache holds 16", req_id="R", setting="max_rows"):
            drive.add("R", 40, item(2, 17, "X"))

    def test_budget_in_bytes_is_named(self) -> None:
        """A cache limited in bytes names that setting."""
        store = FeatureStore(EncoderCache(max_bytes=1024, row_bytes=256))
        with pytest.raises(ItemTooLarge, match=r"\(setting: max_bytes\)"):
            store.add("R", [item(0, 5)], 10)

    def test_uncut_overlapping_items_count_together(self) -> None:
        """Nested items that no chunk may cut are needed at once, so they must fit at once."""
        nested = (item(0, 12, "v", mask="110000111111"), item(2, 4, "a"))
        for settings in ({"max_rows": 11}, {"encode_rows": 11}):
            drive = Drive(**{"max_rows": 100, **settings}, whole_items=True)
            with drive.refused(
                ItemTooLarge, "item 'v' and 'a' has 12", req_id="R", setting=next(iter(settings))
            ):
                drive.add("R", 20, *nested)
        cut = Drive(11)
        cut.add("R", 20, *nested)
        whole = Drive(12, whole_items=True)
        whole.add("R", 20, *nested)
        shared = Drive(4, whole_items=True)
        shared.add("R", 20, item(0, 8, "v", mask="11000011"), item(2, 4, "v"))
        clash = (item(0, 9, "v", mask="110000111"), item(2, 2, "a"), item(4, 2, "v"))
        with shared.refused(ItemTooLarge, "has 7", req_id="S", setting="max_rows"):
            shared.add("S", 20, *clash)

    def test_item_checks_run(self) -> None:
        """Spans, counts and precomputed embeddings are refused here, with nothing added."""
        drive = Drive(16, spec=FeatureSpec(hidden_size=3))
        with drive.refused(InvalidItem, "spans", req_id="R"):
            drive.add("R", 10, item(8, 4))
        with drive.refused(PlaceholderMismatch, "5 rows for 4", req_id="R"):
            drive.add("R", 10, item(0, 4, embeds=np.zeros((5, 3))))
        with drive.refused(InvalidItem, "hidden size 4", req_id="R"):
            drive.add("R", 10, item(0, 4), item(4, 4, embeds=np.zeros((4, 4))))
        assert drive.store.req_ids == ()

    def test_precomputed_items_need_no_cache(self) -> None:
        """Embeddings that come along are neither encoded nor limited by the budgets."""
        drive = Drive(4, encode_rows=4)
        drive.add("R", 40, item(2, 20, "P", embeds=encoded("P", 20)))

        assert drive.step(R=10)["R"] == run("P", 2, 0, 8)
        assert drive.step(R=30)["R"] == run("P", 10, 8, 12)
        assert drive.cache.usage.used == 0

    def test_duplicate_and_unknown_ids(self) -> None:
        """An id is added once; look-ups never insert."""
        drive = Drive(16)
        drive.add("R", 10, item(0, 4))
        with drive.refused(DuplicateRequest, req_id="R"):
            drive.store.add("R", [item(0, 4)], 10)
        for look_up in (
            lambda: drive.store.remove("S"),
            lambda: drive.store.release_all("S"),
            lambda: drive.store.confirm("S", 4),
            lambda: drive.store.items_of("S"),
            lambda: drive.store.ask({"S": (0, 4)}),
            lambda: drive.store.plan({"S": (0, 4)}),
            lambda: drive.store.gather(drive_order("S")),
        ):
            with drive.refused(UnknownRequest, req_id="S"):
                look_up()

    @pytest.mark.parametrize("settings", [{"lookahead": -1}, {"encode_rows": 0}])
    def test_settings_that_cannot_work(self, settings: dict[str, int]) -> None:
        """A negative look-ahead or an empty budget is refused at the start."""
        with pytest.raises(InvalidField, match="setting: lookahead, encode_rows"):
            Drive(16, **settings)

    def test_items_come_back_by_offset(self) -> None:
        """The store keeps the very items that were admitted."""
        first, second = item(0, 4, "A"), item(4, 4, "B")
        drive = Drive(16)
        drive.add("R", 10, second, first)

        assert drive.store.items_of("R") == (first, second)


def drive_order(req_id: str) -> object:
    """An order with one prefill row of a request."""
    other = Drive(16)
    other.add(req_id, 10, item(0, 4))
    return other.order(**{req_id: 4})


class TestReferences:
    def test_repeats_in_one_prompt_are_encoded_once(self) -> None:
        """Capacity 8: X stays for its second occurrence, so Y cannot come before it (B01)."""
        drive = Drive(8)
        drive.add("R1", 30, item(4, 4, "X"), item(20, 4, "X"))
        drive.step(R1=10)
        drive.step(R1=6)
        drive.add("R2", 10, item(2, 6, "Y"))

        assert drive.cache.usage == CacheUsage(4, 4, 4)
        assert drive.ask(R2=10) == {"R2": 2}
        with drive.refused(CacheFull, "'Y' needs 6.*2 of the 10", req_id="R2", setting="max_rows"):
            drive.reserve(R2=10)
        assert drive.step(R1=14)["R1"] == run("X", 20, 0, 4)
        assert drive.encoded == ["X"]
        assert drive.step(R2=10)["R2"] == run("Y", 2, 0, 6)

    def test_repeats_in_one_chunk(self) -> None:
        """Both occurrences of one chunk get all rows from one encode."""
        drive = Drive(8)
        drive.add("R", 30, item(4, 4, "X"), item(20, 4, "X"))

        work = drive.reserve(R=30)
        assert [task.reference for task in work.tasks] == [Reference("R", 0)]
        assert drive.cache.references(EntryKey("X")) == {Reference("R", 0), Reference("R", 1)}
        drive.commit(work)
        assert drive.gather(R=30)["R"] == run("X", 4, 0, 4) + run("X", 20, 0, 4)

    def test_two_requests_of_one_step_share_an_encode(self) -> None:
        """The same key twice in a batch is encoded once (V16), and neither counts as a hit."""
        drive = Drive(8)
        drive.add("A", 10, item(2, 4, "X"))
        drive.add("B", 20, item(8, 4, "X"))
        work = drive.reserve(A=10, B=20)
        drive.commit(work)

        assert [task.key.content for task in work.tasks] == ["X"]
        assert (work.hits, work.held, drive.cache.counters.hits) == ((), (), 0)
        got = drive.gather(A=10, B=20)
        assert got == {"A": run("X", 2, 0, 4), "B": run("X", 8, 0, 4)}

    def test_hits(self) -> None:
        """A ready entry is found by a newcomer as a hit, by its own request as held."""
        drive = Drive(8)
        drive.add("A", 10, item(2, 4, "X"))
        drive.step(A=4)
        drive.add("B", 10, item(2, 4, "X"), item(6, 4, "X"))
        work = drive.reserve(A=6, B=10)

        assert (work.tasks, work.hits, work.held) == ((), (EntryKey("X"),), (EntryKey("X"),))
        assert drive.cache.counters.hits == 1
        assert drive.encoded == ["X"]

    def test_release_needs_confirmed_progress(self) -> None:
        """A step in flight releases nothing; a roll back finds the rows it needs (B03)."""
        drive = Drive(8)
        drive.add("R", 20, item(10, 8, "X"))
        drive.commit(drive.reserve(R=20))
        drive.store.confirm("R", 0)
        assert drive.cache.usage.reclaimable == 0

        drive.computed["R"] = 12  # the step rolled back
        drive.store.confirm("R", 12)
        work = drive.reserve(R=8)
        assert (work.tasks, work.held) == ((), (EntryKey("X"),))
        assert drive.gather(R=8)["R"] == run("X", 12, 2, 6)
        drive.store.confirm("R", 17)
        assert drive.cache.usage.reclaimable == 0
        drive.store.confirm("R", 18)
        assert drive.cache.usage.reclaimable == 8

    def test_look_ahead_defers_release(self) -> None:
        """With a drafter an item [8, 14) is in use until 15 tokens are confirmed (B18, B03)."""
        drive = Drive(6, lookahead=1)
        drive.add("R", 20, item(8, 6, "X"))
        drive.add("S", 20, item(0, 6, "Y"))
        drive.step(R=14)

        assert drive.ask(R=1, S=10) == {"R": 1, "S": 0}
        with drive.refused(CacheFull, "'Y'", req_id="S", setting="max_rows"):
            drive.reserve(R=1, S=10)
        drive.step(R=1)
        assert drive.ask(S=10) == {"S": 10}

    def test_confirm_is_idempotent(self) -> None:
        """Five more confirmations of the same progress release nothing more (B09)."""
        drive = Drive(16)
        drive.add("R", 20, item(2, 8, "X"))
        drive.step(R=20)
        after = drive.state()
        for _ in range(5):
            drive.store.confirm("R", 20)

        assert drive.state() == after
        assert drive.cache.usage == CacheUsage(8, 8, 16)
        with drive.refused(ItemTooLarge, req_id="S", setting="max_rows"):
            drive.add("S", 20, item(0, 17, "Y"))

    def test_holding(self) -> None:
        """Only requests with references need a confirmation."""
        drive = Drive(16)
        drive.add("R", 20, item(2, 8, "X"))
        drive.add("S", 20)
        drive.step(R=4, S=4)
        assert drive.store.holding() == ("R",)
        drive.step(R=16)
        assert drive.store.holding() == ()

    def test_a_shared_entry_outlives_one_sharer(self) -> None:
        """Abort one of two sharers: the other still reads, the entry goes with the last."""
        drive = Drive(8)
        drive.add("A", 10, item(2, 4, "X"))
        drive.add("B", 10, item(2, 4, "X"))
        drive.step(A=4, B=4)
        drive.store.remove("A")

        assert drive.step(B=6)["B"] == run("X", 4, 2, 2)
        assert drive.cache.usage == CacheUsage(4, 4, 8)


class TestAbort:
    def test_nothing_stays_referenced(self) -> None:
        """Capacity 16, ten requests aborted in mid-prefill with an item read ahead (B06)."""
        drive = Drive(16, lookahead=1)
        for number in range(10):
            drive.add("R", 40, item(2, 6, f"X{number}"), item(20, 6, f"Y{number}"))
            drive.step(R=12)
            drive.step(R=8)  # up to 20: Y is encoded for the drafter
            drive.store.remove("R")
            assert drive.cache.usage.reclaimable == 16
            with drive.refused(UnknownRequest, req_id="R"):
                drive.store.remove("R")
        assert len(drive.encoded) == 20

    @pytest.mark.parametrize("leave", ["remove", "release_all"])
    def test_between_reserve_and_commit(self, leave: str) -> None:
        """Features that arrive for nobody are kept unreferenced, or dropped, never lost (B55)."""
        drive = Drive(16)
        drive.add("R", 20, item(2, 6, "X"))
        work = drive.reserve(R=20)
        getattr(drive.store, leave)("R")
        drive.store.check()
        assert drive.cache.usage == CacheUsage(6, 10, 10)

        assert drive.commit(work) == {}
        drive.store.check()
        assert drive.cache.usage == CacheUsage(6, 10, 16)
        assert drive.cache.references(EntryKey("X")) == frozenset()

    def test_failure_that_nobody_waits_for(self) -> None:
        """The encoder fails for a request that has left: nothing fails, the space is free."""
        drive = Drive(16)
        drive.add("R", 20, item(2, 6, "X"))
        work = drive.reserve(R=20)
        drive.store.remove("R")

        assert drive.store.commit({}, {work.tasks[0].key: RuntimeError("late")}) == {}
        assert drive.cache.usage == CacheUsage(0, 16, 16)
        drive.store.check()

    def test_one_of_two_that_wait(self) -> None:
        """Abort one of two waiters: only the other one fails with the encoder."""
        drive = Drive(16)
        for req_id in "AB":
            drive.add(req_id, 20, item(2, 6, "X"))
        work = drive.reserve(A=20, B=20)
        drive.store.remove("A")

        failed = drive.store.commit({}, {work.tasks[0].key: RuntimeError("broken")})
        assert list(failed) == ["B"]

    def test_a_second_request_with_the_same_id_is_another_one(self) -> None:
        """Abort and resubmit before the commit: the newcomer waits for nothing."""
        drive = Drive(16)
        drive.add("R", 20, item(2, 6, "X"))
        work = drive.reserve(R=20)
        drive.store.remove("R")
        drive.add("R", 20, item(2, 6, "Y"))

        assert drive.store.commit({}, {work.tasks[0].key: RuntimeError("late")}) == {}
        assert drive.step(R=20)["R"] == run("Y", 2, 0, 6)

    def test_preempted_request_encodes_again_if_evicted(self) -> None:
        """L=40, item (4, 24), preempted after 3 outputs, resumed as one chunk [0, 43) (B52)."""
        for evicted in (True, False):
            drive = Drive(24)
            drive.add("R", 40, item(4, 24, "X"))
            drive.step(R=40)
            drive.store.release_all("R")
            drive.store.release_all("R")
            if evicted:
                drive.cache.drop("X")
            drive.prompt_lens["R"], drive.computed["R"] = 43, 0

            assert drive.step(R=43)["R"] == run("X", 4, 0, 24)
            assert drive.encoded == ["X", "X"] if evicted else ["X"]

    def test_reset(self) -> None:
        """Requests and reservations go; what is ready stays for the next ones; late ones do not."""
        drive = Drive(16)
        drive.add("R", 20, item(2, 6, "X"))
        drive.step(R=20)
        drive.add("S", 20, item(2, 6, "Y"))
        work = drive.reserve(S=20)
        drive.store.reset()

        drive.store.check()
        assert drive.store.req_ids == ()
        assert drive.cache.usage == CacheUsage(6, 10, 16)
        with drive.refused(StaleOrder, "no step waits"):
            drive.commit(work)


class TestIdentity:
    def test_new_weights(self) -> None:
        """R2 encodes X again after new weights; R1 in flight keeps what it has (B12, V15)."""
        drive = Drive(16)
        drive.add("R1", 20, item(2, 6, "X"))
        drive.step(R1=4)
        drive.cache.set_epoch(1)
        drive.add("R2", 20, item(2, 6, "X"))

        got = drive.step(R1=16, R2=20)
        assert got == {"R1": run("X", 4, 2, 4), "R2": run("X", 2, 0, 6)}
        assert drive.encoded == ["X", "X"]
        assert drive.cache.present() == (EntryKey("X", 1),)

    def test_space_of_old_weights_can_be_taken_back(self) -> None:
        """An entry of old weights goes with its last reference, also where a plan evicts it."""
        drive = Drive(8)
        drive.add("A", 30, item(10, 8, "big"))
        drive.add("B", 30, item(0, 4, "X"), item(20, 4, "X"))
        drive.step(A=10, B=10)
        drive.cache.set_epoch(1)

        assert drive.step(A=10)["A"] == run("big", 10, 0, 8)
        assert drive.cache.take_freed() == (EntryKey("X"),)

    def test_resumed_request_uses_new_weights(self) -> None:
        """A preempted request has no claim on features of old weights."""
        drive = Drive(16)
        drive.add("R", 20, item(2, 6, "X"))
        drive.step(R=4)
        drive.store.release_all("R")
        drive.cache.set_epoch(1)
        drive.computed["R"] = 0
        drive.step(R=20)

        assert drive.encoded == ["X", "X"]

    def test_adapters_do_not_share(self) -> None:
        """The same pixels under two adapters are two entries."""
        drive = Drive(16)
        drive.add("A", 20, item(2, 6, "X"))
        drive.add("B", 20, item(2, 6, "X"), adapter="lora")
        drive.step(A=20, B=20)

        assert drive.encoded == ["X", "X"]
        assert drive.cache.present() == (EntryKey("X"), EntryKey("X", 0, "lora"))

    def test_entry_with_other_rows_fails_that_request_alone(self) -> None:
        """Key u with 8 rows, then for 12 places: never 8 rows into 12 (B72, B73)."""
        drive = Drive(32)
        drive.add("A", 20, item(2, 8, "u"))
        drive.add("C", 20, item(2, 8, "w"))
        drive.step(A=4, C=4)
        drive.add("B", 20, item(2, 12, "u"))
        plan = drive.store.plan(drive.chunks({"A": 16, "B": 20, "C": 16}))

        assert isinstance(plan.failed["B"], FeatureRowsMismatch)
        assert plan.failed.keys() == {"B"}
        assert "holds 8 feature rows for item 'u', which has 12 placeholder" in str(
            plan.failed["B"]
        )
        with drive.refused(StaleOrder, "some of its requests failed"):
            drive.store.reserve(plan)
        assert drive.ask(B=20) == {"B": 20}  # scheduled, it fails and leaves; else it would wait
        drive.store.remove("B")
        got = drive.step(A=16, C=16)
        assert got == {"A": run("u", 4, 2, 6), "C": run("w", 4, 2, 6)}

    def test_a_failed_request_takes_nothing(self) -> None:
        """What comes before the mismatch in the failed request's prompt is not encoded for it."""
        drive = Drive(32)
        drive.add("A", 20, item(2, 8, "u"))
        drive.step(A=4)
        drive.add("B", 40, item(0, 6, "before"), item(10, 12, "u"))
        plan = drive.store.plan(drive.chunks({"B": 40, "A": 16}))

        assert (plan.encode, plan.refer, plan.hits) == ([], {}, [])
        assert plan.held == [EntryKey("u")]

    def test_two_new_items_with_one_key_and_other_rows(self) -> None:
        """The first request of the step defines the key, the second fails."""
        drive = Drive(32)
        drive.add("A", 20, item(2, 8, "u"))
        drive.add("B", 20, item(2, 12, "u"))

        assert drive.store.plan(drive.chunks({"A": 20, "B": 20})).failed.keys() == {"B"}
        assert drive.store.plan(drive.chunks({"B": 20, "A": 20})).failed.keys() == {"A"}


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


class TestCommit:
    def failing(self) -> tuple[Drive, dict[str, EntryKey]]:
        """A, B and C wait for X, X and Y; D and E for Y and Z."""
        drive = Drive(100)
        for req_id, keys in {"A": "X", "B": "XZ", "C": "Y", "D": "YZ", "E": "Z"}.items():
            items = [item(5 * n, 4, key) for n, key in enumerate(keys)]
            drive.add(req_id, 20, *items)
        return drive, {key: EntryKey(key) for key in "XYZ"}

    def test_a_failed_key_fails_its_requests_only(self) -> None:
        """The encoder raises for X: A and B fail with the cause, C, D and E go on."""
        drive, keys = self.failing()
        work = drive.reserve(A=20, B=20, C=20, D=20, E=20)
        cause = RuntimeError("out of memory")
        outputs = outputs_of(work.tasks)
        del outputs[keys["X"]]
        failed = drive.store.commit(outputs, {keys["X"]: cause})

        assert sorted(failed) == ["A", "B"]
        for req_id, error in failed.items():
            assert type(error) is EncodeFailed
            assert error.req_id == req_id
            assert error.__cause__ is cause
            assert (
                str(error) == f"request {req_id!r}: encoding 'X' raised RuntimeError: out of memory"
            )
        drive.store.check()
        assert not drive.cache.rows_of(keys["X"])
        for req_id in failed:
            drive.store.remove(req_id)
        assert drive.gather(C=20, D=20, E=20) == {
            "C": run("Y", 0, 0, 4),
            "D": run("Y", 0, 0, 4) + run("Z", 5, 0, 4),
            "E": run("Z", 0, 0, 4),
        }

    @pytest.mark.parametrize("features", [(np.zeros((3, 3)),), (), (np.zeros((5, 3)),), None])
    def test_another_row_count_fails_its_requests_only(self, features: object) -> None:
        """An encoder output of other rows than placeholders reaches nobody (B72, V20)."""
        drive, keys = self.failing()
        work = drive.reserve(A=20, B=20, C=20, D=20, E=20)
        outputs = {**outputs_of(work.tasks), keys["X"]: features}
        failed = drive.store.commit(outputs)  # type: ignore[arg-type]  # on purpose

        assert sorted(failed) == ["A", "B"]
        for req_id, error in failed.items():
            assert type(error) is FeatureRowsMismatch
            assert str(error).startswith(f"request {req_id!r}: the encoder delivered")
        drive.store.check()
        assert drive.cache.is_ready(keys["Z"])

    def test_outputs_in_any_order_and_in_several_calls(self) -> None:
        """An encoder may group by modality; scatter goes by request and item (B36)."""
        drive = Drive(100)
        drive.add("R1", 10, item(0, 3, "V"), item(4, 2, "I"))
        drive.add("R2", 10, item(0, 2, "J"), item(4, 3, "W"))
        work = drive.reserve(R1=10, R2=10)
        outputs = outputs_of(work.tasks)
        for group in ("IJ", "WV"):
            drive.store.commit({EntryKey(key): outputs[EntryKey(key)] for key in group})

        assert drive.gather(R1=10, R2=10) == {
            "R1": run("V", 0, 0, 3) + run("I", 4, 0, 2),
            "R2": run("J", 0, 0, 2) + run("W", 4, 0, 3),
        }

    def test_unknown_late_or_double_keys_change_nothing(self) -> None:
        """Every key is looked at before the first is stored."""
        drive, keys = self.failing()
        work = drive.reserve(A=20, C=20)
        outputs = outputs_of(work.tasks)
        with drive.refused(StaleOrder, "no step waits for .*Z"):
            drive.store.commit({**outputs, keys["Z"]: (encoded("Z", 4),)})
        with drive.refused(StaleOrder, "no step waits for .*Z"):
            drive.store.commit(outputs, {keys["Z"]: RuntimeError()})
        with drive.refused(StaleOrder, "no step waits for .*X"):
            drive.store.commit(outputs, {keys["X"]: RuntimeError()})
        drive.store.commit(outputs)
        with drive.refused(StaleOrder, "committed or rolled back before"):
            drive.store.commit(outputs)

    def test_rollback_gives_back_what_is_not_committed(self) -> None:
        """Half encoded, then abandoned: committed entries stay, the others are gone."""
        drive, keys = self.failing()
        work = drive.reserve(A=20, B=20, C=20)
        drive.store.commit({keys["Y"]: (encoded("Y", 4),)})
        drive.store.rollback(work)

        drive.store.check()
        assert drive.cache.present() == (keys["Y"],)
        assert drive.store.holding() == ("C",)
        after = drive.state()
        drive.store.rollback(work)
        assert drive.state() == after
        assert drive.step(A=20, B=20) == {
            "A": run("X", 0, 0, 4), "B": run("X", 0, 0, 4) + run("Z", 5, 0, 4)
        }  # fmt: skip

    def test_rollback_of_an_old_step_leaves_a_new_one_alone(self) -> None:
        """A late clean-up of a failed step must not drop what a newer step has reserved."""
        drive, keys = self.failing()
        old = drive.reserve(A=20)
        drive.store.commit({}, {keys["X"]: RuntimeError()})
        drive.store.remove("A")
        new = drive.reserve(B=20)
        drive.store.rollback(old)

        assert drive.cache.rows_of(keys["X"]) == 4
        assert drive.commit(new) == {}

    def test_levels(self) -> None:
        """Deep-layer features: several arrays an item, each sliced to the chunk."""
        drive = Drive(100, spec=FeatureSpec(hidden_size=3, dtype="float64", num_levels=2))
        drive.add("R", 20, item(4, 6, "X"), item(10, 4, "P", embeds=(encoded("P", 4),) * 2))
        work = drive.reserve(R=6)
        features = (encoded("X", 6), encoded("X", 6, epoch=7))
        drive.store.commit({work.tasks[0].key: features})

        inputs = drive.store.gather(drive.order(R=6))
        levels = [np.concatenate(inputs.arrays(level)) for level in (0, 1)]
        assert levels[0].tolist() == features[0][:2].tolist()
        assert levels[1].tolist() == features[1][:2].tolist()
        drive.computed["R"] = 6
        drive.reserve(R=8)
        inputs = drive.store.gather(drive.order(R=8))
        assert [len(array) for array in inputs.arrays(1)] == [4, 4]
        assert inputs.arrays(1)[0].tolist() == features[1][2:].tolist()


class TestCheck:
    @pytest.mark.parametrize(
        ("corrupt", "said"),
        [
            (lambda d: d.store._requests["R"].held.clear(), "differ.*req_id='R', item=0"),
            (lambda d: d.cache._entries[EntryKey("X")].references.add(Reference("S", 3)), "item=3"),
            (
                lambda d: d.cache._entries[EntryKey("Y")].references.add(Reference("R", 0)),
                "differ.*req_id='R', item=0.*Y",
            ),
            (lambda d: d.store._requests.pop("R"), "differ"),
            (lambda d: d.store._waiting.clear(), "reserved in the cache.*Y"),
            (lambda d: setattr(d.cache, "_used_rows", 0), "are counted"),
        ],
    )
    def test_planted_corruption_is_found(self, corrupt: Callable[[Drive], None], said: str) -> None:
        """References are compared both ways, reservations too; the message has the ids."""
        drive = Drive(100)
        drive.add("R", 20, item(2, 6, "X"))
        drive.add("S", 20, item(2, 6, "Y"))
        drive.step(R=4)
        drive.reserve(S=20)
        drive.store.check()
        corrupt(drive)

        with pytest.raises(InvariantBroken, match=said):
            drive.store.check()


class _Payload:
    """Pixels, of which tests keep weak references only."""


class TestMemory:
    @pytest.fixture(autouse=True)
    def _no_collector(self) -> object:
        """References alone must free everything."""
        gc.disable()
        yield
        gc.enable()

    @pytest.mark.parametrize(
        "ending", ["finish", "abort", "refused", "blocked", "mismatch", "failed", "abandoned"]
    )
    def test_nothing_of_a_request_is_kept(self, ending: str) -> None:
        """However a request ends, its pixels and features go with it, without a collector."""
        drive = Drive(8)
        drive.add("other", 20, item(0, 4, "u"), item(19, 1, "one"))
        drive.step(other=20 if ending == "finish" else 2)
        payload, embeds = _Payload(), encoded("P", 2)
        kept = [weakref.ref(payload), weakref.ref(embeds)]
        rows = {"refused": 9, "mismatch": 5}.get(ending, 4)
        key = "u" if ending == "mismatch" else "X"
        items = [
            item(2, rows, key, payload=payload),
            item(12, 2, "P", embeds=embeds, payload=payload),
        ]
        del payload, embeds
        if ending == "refused":
            with pytest.raises(ItemTooLarge):
                drive.add("R", 20, *items)
        else:
            drive.add("R", 20, *items)
        del items
        if ending == "finish":
            drive.step(R=20)
        elif ending == "abort":
            drive.step(R=3)
        elif ending == "blocked":
            drive.add("late", 20, item(0, 4, "L"))
            with pytest.raises(CacheFull):  # after R's item was planned
                drive.reserve(R=20, late=20)
        elif ending == "mismatch":
            plan = drive.store.plan(drive.chunks({"R": 20}))
            errors = plan.failed
            assert errors
            del plan
        elif ending in ("failed", "abandoned"):
            work = drive.reserve(R=20)
            if ending == "abandoned":
                drive.store.rollback(work)
            else:
                failed = drive.store.commit({}, {work.tasks[0].key: RuntimeError()})
                assert list(failed) == ["R"]
            del work
        if ending != "refused":
            drive.store.remove("R")

        assert [reference() for reference in kept] == [None, None]

    def test_features_go_when_they_are_evicted(self) -> None:
        """The store keeps no second reference to what the cache has dropped."""
        drive = Drive(4)
        drive.add("R", 20, item(2, 4, "X"))
        work = drive.reserve(R=20)
        features = encoded("X", 4)
        kept = weakref.ref(features)
        drive.store.commit({work.tasks[0].key: (features,)})
        del features, work
        inputs = drive.store.gather(drive.order(R=20))
        drive.store.remove("R")
        assert kept() is not None
        drive.cache.clear()
        assert kept() is not None  # the step that gathered may still read
        del inputs

        assert kept() is None

    def test_a_thousand_short_requests(self) -> None:
        """Finished, aborted and failed in turn: only what the cache holds is alive (B100)."""
        drive = Drive(16)
        alive: weakref.WeakSet[object] = weakref.WeakSet()
        features: list[weakref.ref[object]] = []
        handles = []
        for number in range(1000):
            req_id, payload = f"r{number}", _Payload()
            alive.add(payload)
            drive.add(req_id, 12, item(2, 4, f"k{number}", payload=payload))
            del payload
            work = drive.reserve(**{req_id: 6})
            if number % 3 == 2:
                drive.store.commit({}, {task.key: RuntimeError() for task in work.tasks})
            else:
                outputs = outputs_of(work.tasks)
                features += [weakref.ref(levels[0]) for levels in outputs.values()]
                drive.store.commit(outputs)
                del outputs
            if number % 3 == 0:
                drive.store.confirm(req_id, 12)
            drive.store.remove(req_id)
            handles.append(req_id)
            del work

            assert len(alive) == 0
        assert drive.cache.usage.reclaimable == 16
        assert sum(f() is not None for f in features) == len(drive.cache.present()) == 4
        drive.cache.clear()
        assert all(f() is None for f in features)
