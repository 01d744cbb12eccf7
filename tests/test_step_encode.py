"""VLBatch: encoding, its failures, and requests that leave while a step is open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from naive_media import encoded, item
from vl_batches import (
    Batch,
    delivered,
    encode_all,
    failing_for,
    make_batch,
    refused,
    run,
    run_step,
    state_of,
)

from vlbatch import EncodeTask, EntryKey
from vlbatch.errors import (
    EncodeFailed,
    FeatureRowsMismatch,
    InvalidSchedule,
    StaleOrder,
    UnknownRequest,
)

IMAGE = item(4, 24, "X", grid=(1, 4, 6))
"""Of many reports: L = 40, delta -18."""


class TestEncode:
    def three(self) -> Batch:
        """A and B need X, C needs Y, D nothing."""
        vl = make_batch()
        for req_id, key in (("A", "X"), ("B", "X"), ("C", "Y")):
            vl.add(req_id, prompt_len=9, items=[item(2, 4, key, grid=(1, 2, 2))])
        vl.add("D", prompt_len=9)
        return vl

    def test_failure_of_one_item(self) -> None:
        """The encoder raises for X: A and B leave with the cause, C and D finish the step."""
        vl = self.three()
        step = vl.begin({"A": 9, "B": 9, "C": 9, "D": 9})
        vl.encode(step, failing_for("X"), max_rows=4)

        assert step.failed.keys() == {"A", "B"}
        assert step.scheduled == {"C": 9, "D": 9}
        for req_id, error in step.failed.items():
            assert type(error) is EncodeFailed
            said = f"request {req_id!r}: encoding 'X' raised RuntimeError: cannot encode X"
            assert str(error) == said
            assert isinstance(error.__cause__, RuntimeError)
        assert set(vl.batch.req_ids) == {"C", "D"}
        order = vl.arrange(step)
        assert delivered(order, vl.gather(order)) == {"C": run("Y", 2, 0, 4), "D": []}
        vl.complete(order)
        vl.check()

    def test_failed_requests_may_come_again(self) -> None:
        """Nothing of a failed request is left that would refuse it."""
        vl = self.three()
        step = vl.begin({"A": 9})
        vl.encode(step, failing_for("X"))
        vl.add("A", prompt_len=9, items=[item(2, 4, "X", grid=(1, 2, 2))])

        assert run_step(vl, A=9)[1] == {"A": run("X", 2, 0, 4)}

    @pytest.mark.parametrize(
        ("encoder", "error", "said"),
        [
            (lambda tasks: encode_all(tasks)[:-1], EncodeFailed, "0 outputs for 1 items"),
            (lambda tasks: encode_all(tasks) * 2, EncodeFailed, "2 outputs for 1 items"),
            (lambda tasks: None, EncodeFailed, "NoneType"),
            (lambda tasks: [None] * 2, FeatureRowsMismatch, "a NoneType; expected a tuple"),
            (lambda tasks: [np.zeros((4, 3))] * 2, FeatureRowsMismatch, "a ndarray; expected a tu"),
            (lambda tasks: [(np.zeros((5, 3)),)] * 2, FeatureRowsMismatch, r"\[5\] feature rows"),
        ],
    )
    def test_an_encoder_that_returns_nonsense(
        self, encoder: Callable[[Sequence[EncodeTask]], Any], error: type[Exception], said: str
    ) -> None:
        """Too few, too many or no outputs fail the items, tried alone too; D does not notice."""
        vl = self.three()
        step = vl.begin({"A": 9, "B": 9, "C": 9, "D": 9})
        vl.encode(step, encoder)

        assert step.failed.keys() == {"A", "B", "C"}
        for failure in step.failed.values():
            assert type(failure) is error
        with pytest.raises(error, match=said):
            raise step.failed["C"]
        assert vl.arrange(step).req_ids == ("D",)
        vl.check()

    def test_one_bad_item_fails_nobody_else(self) -> None:
        """If a call for several items raises, each is tried alone: only X's requests fail."""
        vl = self.three()
        step = vl.begin({"A": 9, "B": 9, "C": 9, "D": 9})
        sizes: list[int] = []

        def fails_with_x(tasks: Sequence[EncodeTask]) -> Any:
            sizes.append(len(tasks))
            return failing_for("X")(tasks)

        vl.encode(step, fails_with_x)

        assert sizes == [2, 1, 1]
        assert step.failed.keys() == {"A", "B"}
        assert set(vl.arrange(step).req_ids) == {"C", "D"}
        vl.check()

    def test_calls_are_bounded(self) -> None:
        """At most ``max_rows`` rows a call, in order; a larger item goes alone."""
        vl = make_batch()
        sizes = (2, 3, 1, 9, 1, 1)
        items, offset = [], 0
        for number, size in enumerate(sizes):
            items.append(item(offset, size, f"k{number}", grid=(1, 1, size)))
            offset += size
        vl.add("A", prompt_len=20, items=items)
        step = vl.begin({"A": 20})
        calls: list[list[int]] = []

        def encoder(tasks: Sequence[EncodeTask]) -> list[Any]:
            calls.append([task.placed.num_rows for task in tasks])
            return encode_all(tasks)

        vl.encode(step, encoder, max_rows=5)
        assert calls == [[2, 3], [1], [9], [1, 1]]
        assert not step.open

    def test_only_what_is_still_open_is_encoded(self) -> None:
        """Encoding goes on where commits by hand have left off; a second time is no work."""
        vl = self.three()
        step = vl.begin({"A": 9, "C": 9})
        vl.commit(step, {EntryKey("Y"): (encoded("Y", 4),)})
        calls: list[str] = []

        def encoder(tasks: Sequence[EncodeTask]) -> list[Any]:
            calls.extend(task.key.content for task in tasks)
            return encode_all(tasks)

        vl.encode(step, encoder)
        vl.encode(step, encoder)
        assert calls == ["X"]

    def test_commit_of_another_step_is_refused(self) -> None:
        """Outputs are for the step that asked for them; nothing is stored."""
        vl = self.three()
        first, second = vl.begin({"A": 9}), vl.begin({"C": 9})
        outputs = {EntryKey(key): (encoded(key, 4),) for key in "XY"}
        with refused(vl, StaleOrder, "does not wait for .*'Y'"):
            vl.commit(first, outputs)
        with refused(vl, StaleOrder, "does not wait for .*'X'"):
            vl.commit(second, {}, {EntryKey("X"): RuntimeError()})
        vl.commit(second, {EntryKey("Y"): outputs[EntryKey("Y")]})
        assert (first.open, second.open) == ({EntryKey("X")}, set())

    def test_an_open_step_shares_nothing_yet(self) -> None:
        """B needs what A's step is about to encode: it waits until the step has it."""
        vl = self.three()
        first = vl.begin({"A": 9})
        assert vl.ask({"B": 9, "C": 9}) == {"B": 2, "C": 9}
        with refused(vl, InvalidSchedule, "'X' is being encoded", req_id="B"):
            vl.begin({"B": 9})
        vl.encode(first, encode_all)
        assert run_step(vl, B=9)[1] == {"B": run("X", 2, 0, 4)}


class TestLeavingInTheMiddle:
    def begun(self) -> tuple[Batch, Any]:
        """A and B wait for X in an open step, C for Y."""
        vl = make_batch()
        for req_id, key in (("A", "X"), ("B", "X"), ("C", "Y")):
            vl.add(req_id, prompt_len=9, items=[item(2, 4, key, grid=(1, 2, 2))])
        return vl, vl.begin({"A": 9, "B": 9, "C": 9})

    @pytest.mark.parametrize("leave", ["remove", "preempt"])
    @pytest.mark.parametrize("encoded_before", [False, True])
    def test_between_begin_and_arrange(self, leave: str, encoded_before: bool) -> None:
        """Abort or preempt before, or after, the features come: the others go on (B55, B06)."""
        vl, step = self.begun()
        if encoded_before:
            vl.encode(step, encode_all)
        for req_id in "AC":
            getattr(vl, leave)(req_id)
        vl.check()
        vl.encode(step, encode_all)
        order = vl.arrange(step)

        assert order.req_ids == ("B",)
        assert delivered(order, vl.gather(order)) == {"B": run("X", 2, 0, 4)}
        vl.complete(order)
        vl.check()
        assert vl.features.cache.usage.reclaimable == 1000

    def test_late_features_of_an_aborted_request_fail_nobody(self) -> None:
        """The encoder fails for C, which has left: A and B do not notice (B55)."""
        vl, step = self.begun()
        vl.remove("C")
        vl.encode(step, failing_for("Y"), max_rows=4)

        assert step.failed == {}
        assert set(vl.arrange(step).req_ids) == {"A", "B"}

    def test_abort_in_every_state(self) -> None:
        """Waiting, in mid-chunk, decoding, preempted, waiting for features: gone (B55)."""
        vl = make_batch()

        def add() -> None:
            vl.add("R", prompt_len=40, items=[IMAGE])

        def wait() -> None:
            add()
            vl.begin({"R": 40})

        def mid_chunk() -> None:
            add()
            run_step(vl, R=10)

        def decode() -> None:
            add()
            run_step(vl, R=40)
            run_step(vl, R=1)

        def preempted() -> None:
            mid_chunk()
            vl.preempt("R")

        for number, reach in enumerate((add, mid_chunk, decode, preempted, wait)):
            reach()
            vl.remove("R")
            vl.check()
            assert "R" not in (*vl.batch.req_ids, *vl.batch.preempted)
            assert vl.features.req_ids == vl.positions.req_ids == ()
            reserved = 24 if reach is wait else 0  # until the step is abandoned
            assert vl.features.cache.usage.reclaimable == 1000 - reserved
            with refused(vl, UnknownRequest, req_id="R"):
                vl.remove("R")
            vl.add("other", prompt_len=3)
            assert run_step(vl, other=3)[0].req_ids == ("other",)
            vl.remove("other")
            vl.features.cache.clear()
            assert number < 5

    def test_abort_of_a_step_in_flight(self) -> None:
        """Abort after arrange, before the outputs: they go to the others, progress too."""
        vl, step = self.begun()
        vl.encode(step, encode_all)
        order = vl.arrange(step)
        vl.remove("A")
        vl.add("A", prompt_len=9, items=[item(2, 4, "X", grid=(1, 2, 2))])
        vl.complete(order)

        assert [vl.batch.computed_of(req_id) for req_id in "ABC"] == [0, 9, 9]
        vl.check()

    def test_abandon(self) -> None:
        """Given up before arrange: no reservation or reference is left, nobody has moved (V11)."""
        vl, step = self.begun()
        vl.commit(step, {EntryKey("Y"): (encoded("Y", 4),)})
        vl.abandon(step)

        vl.check()
        assert vl.features.cache.present() == (EntryKey("Y"),)
        assert vl.features.holding() == ("C",)
        assert [vl.batch.computed_of(req_id) for req_id in "ABC"] == [0, 0, 0]
        after = state_of(vl)
        vl.abandon(step)
        assert state_of(vl) == after
        with refused(vl, StaleOrder, "does not wait for"):
            vl.commit(step, {EntryKey("X"): (encoded("X", 4),)})
        assert run_step(vl, A=9, B=9, C=9)[1]["B"] == run("X", 2, 0, 4)

    def test_abandoning_an_old_step_leaves_a_new_one_alone(self) -> None:
        """The same key reserved again by a later step is not the old step's to give back."""
        vl, step = self.begun()
        vl.encode(step, failing_for("X"), max_rows=4)
        vl.add("A", prompt_len=9, items=[item(2, 4, "X", grid=(1, 2, 2))])
        new = vl.begin({"A": 9})
        vl.abandon(step)
        vl.encode(new, encode_all)

        order = vl.arrange(new)
        assert delivered(order, vl.gather(order)) == {"A": run("X", 2, 0, 4)}

    def test_arrange_waits_for_the_encoder(self) -> None:
        """No row moves while an item of the step is open."""
        vl, step = self.begun()
        vl.commit(step, {EntryKey("Y"): (encoded("Y", 4),)})
        with refused(vl, StaleOrder, "not encoded yet: .*'X'"):
            vl.arrange(step)
        vl.encode(step, encode_all)
        vl.arrange(step)
