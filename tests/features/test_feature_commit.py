"""FeatureStore: encoder outputs, failures, and requests that leave in the middle."""

from __future__ import annotations

import numpy as np
import pytest
from drive import Drive, outputs_of, run
from naive_media import encoded, item

from vlbatch.cache import CacheUsage, EntryKey
from vlbatch.errors import (
    EncodeFailed,
    FeatureRowsMismatch,
    StaleOrder,
    UnknownRequest,
)
from vlbatch.features import FeatureSpec


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


def test_features_are_copied_where_the_encoder_uses_its_buffer_again() -> None:
    """With ``copy_features`` a later write to what the encoder gave changes no feature."""
    for copies in (True, False):
        drive = Drive(100, copy_features=copies)
        drive.add("A", 10, item(0, 4, "X"))
        work = drive.reserve(A=10)
        buffer = np.ones((4, 2), dtype=np.float32)
        drive.store.commit({EntryKey("X"): (buffer,)})
        buffer[:] = 7
        got = drive.store.gather(drive.order(A=10)).arrays()[0]

        assert work.tasks
        assert np.array_equal(got, np.full((4, 2), 1 if copies else 7))  # type: ignore[arg-type]


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
