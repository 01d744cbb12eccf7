"""FeatureStore: admission, the life of references, identity of entries, ``check``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from drive import Drive, run
from naive_media import encoded, item

from vlbatch.cache import CacheUsage, EncoderCache, EntryKey, Reference
from vlbatch.errors import (
    CacheFull,
    DuplicateRequest,
    FeatureRowsMismatch,
    InvalidItem,
    InvalidSetting,
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
        with pytest.raises(InvalidSetting, match="setting: lookahead, encode_rows"):
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
