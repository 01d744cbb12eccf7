"""VLBatch: preemption, confirmed progress, new weights, ways out, and memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from naive_media import item
from vl_batches import (
    Batch,
    begun,
    delivered,
    encode_all,
    failing_for,
    make_batch,
    refused,
    run,
    run_step,
)

from vlbatch import EncodeTask, EntryKey
from vlbatch.errors import (
    CacheFull,
    InvalidSchedule,
    UnknownRequest,
)

IMAGE = item(4, 24, "X", grid=(1, 4, 6))
"""Of many reports: L = 40, delta -18."""


def positions(vl: Batch, **scheduled: int) -> list[list[int]]:
    """Run a step; returns its positions [3][tokens]."""
    order = vl.arrange(begun(vl, **scheduled))
    table = vl.positions_of(order)
    vl.complete(order)
    return [axis.tolist() for axis in table]


class TestPreemption:
    def test_resume(self) -> None:
        """3 outputs, preempted, evicted: one chunk [0, 43) has its features again (B52, B28)."""
        vl = make_batch()
        vl.add("A", prompt_len=40, items=[IMAGE])
        for number in (40, 1, 1):
            run_step(vl, A=number)
        vl.preempt("A")
        vl.check()
        assert vl.features.holding() == ()
        vl.features.cache.drop("X")
        vl.resume("A")

        assert vl.batch.known_tokens_of("A") == 43
        order, got = run_step(vl, A=43)
        assert order.regions == (0, 0, 1)
        assert got == {"A": run("X", 4, 0, 24)}
        assert vl.features.cache.counters.encoded == 2
        assert positions(vl, A=1) == [[25]] * 3

    def test_chunks_over_the_outputs(self) -> None:
        """Resumed in chunks [0, 20), [20, 43): tokens 40..42 are at 22..24 on each axis (B28)."""
        vl = make_batch()
        vl.add("A", prompt_len=40, items=[IMAGE])
        for number in (40, 1, 1):
            run_step(vl, A=number)
        vl.preempt("A")
        vl.resume("A")
        positions(vl, A=20)

        assert [axis[-3:] for axis in positions(vl, A=23)] == [[22, 23, 24]] * 3
        assert vl.positions.delta("A") == -18

    def test_resume_with_a_prefix_hit(self) -> None:
        """Resumed at token 8 of the image: the rest of its rows."""
        vl = make_batch()
        vl.add("A", prompt_len=40, items=[IMAGE])
        run_step(vl, A=20)
        vl.preempt("A")
        vl.resume("A", computed=8)

        assert run_step(vl, A=32)[1] == {"A": run("X", 8, 4, 20)}

    def test_a_preempted_request_is_not_live(self) -> None:
        """It cannot be scheduled, asked for or preempted again, and its id is taken."""
        vl = make_batch()
        vl.add("A", prompt_len=40, items=[IMAGE])
        vl.preempt("A")
        with refused(vl, UnknownRequest, req_id="A"):
            vl.preempt("A")
        with refused(vl, InvalidSchedule, req_id="A"):
            vl.begin({"A": 1})
        with refused(vl, UnknownRequest, req_id="A"):
            vl.ask({"A": 1})
        with refused(vl, UnknownRequest, req_id="A"):
            vl.confirm("A", 0)
        with refused(vl, UnknownRequest, req_id="B"):
            vl.resume("B")


class TestConfirm:
    def test_roll_back(self) -> None:
        """Chunk [0, 20) in flight, rolled back to 12: rows 2..7 of X again, no encode (B03)."""
        vl = make_batch(auto_confirm=False)
        vl.add("A", prompt_len=20, items=[item(10, 8, "X", grid=(1, 2, 4))])
        run_step(vl, A=20)
        assert vl.features.holding() == ("A",)

        assert vl.confirm("A", 12) is True
        assert run_step(vl, A=8)[1] == {"A": run("X", 12, 2, 6)}
        assert vl.confirm("A", 17) is True
        assert vl.features.holding() == ("A",)
        run_step(vl, A=3)
        assert vl.confirm("A", 20) is False
        assert vl.features.holding() == ()
        assert vl.features.cache.counters.encoded == 1

    def test_refused(self) -> None:
        """Not below what was confirmed, not above what was computed; nothing is released."""
        vl = make_batch(auto_confirm=False)
        vl.add("A", prompt_len=20, items=[item(2, 4, "X", grid=(1, 2, 2))])
        run_step(vl, A=10)
        vl.confirm("A", 4)
        for computed in (3, 11):
            with refused(vl, InvalidSchedule, req_id="A"):
                vl.confirm("A", computed)

    def test_automatic(self) -> None:
        """With auto_confirm a completed step releases what is behind every request."""
        vl = make_batch(lookahead=1)
        vl.add("A", prompt_len=9, items=[item(2, 4, "X", grid=(1, 2, 2))])
        vl.add("B", prompt_len=9, items=[item(2, 4, "Y", grid=(1, 2, 2))])
        run_step(vl, A=6, B=7)

        assert vl.features.holding() == ("A",)

    def test_drafter(self) -> None:
        """The drafter's gather in step n still finds what confirm will release (B05, B18)."""
        vl = make_batch(lookahead=1)
        vl.add("A", prompt_len=9, items=[item(2, 4, "X", grid=(1, 2, 2))])
        order = vl.arrange(begun(vl, A=9))

        assert delivered(order, vl.gather(order))["A"] == run("X", 2, 0, 4)
        assert delivered(order, vl.gather(order, shift=1), 1)["A"] == run("X", 2, 0, 4)

    def test_steps_in_flight(self) -> None:
        """A confirmed step releases what is behind it while later tokens stay counted (B03)."""
        vl = make_batch(auto_confirm=False)
        items = [item(2, 4, "X", grid=(1, 2, 2)), item(12, 4, "Y", grid=(1, 2, 2))]
        vl.add("A", prompt_len=20, items=items)
        run_step(vl, A=8)
        run_step(vl, A=8)
        assert vl.confirm("A", 8, in_flight=8) is False

        assert vl.batch.computed_of("A") == 16
        assert set(vl.features.cache.references(EntryKey("Y")))
        assert not vl.features.cache.references(EntryKey("X"))
        vl.check()


class TestLeaving:
    @pytest.mark.parametrize("how", ["remove", "preempt", "mismatch", "failure"])
    def test_hook(self, how: str) -> None:
        """Called once a live request leaves, whichever way, while its fields can be read."""
        vl = make_batch()
        vl.add("other", prompt_len=9, items=[item(2, 4, "u", grid=(1, 2, 2))])
        run_step(vl, other=4)
        key, columns = ("u", 3) if how == "mismatch" else ("X", 2)
        picture = item(2, 2 * columns, key, grid=(1, 2, columns))
        vl.add("A", prompt_len=9, items=[picture], fields={"tag": 7})
        left: list[object] = []
        vl.before_leave = lambda req_id: left.append((req_id, vl.batch.read(req_id, "tag")))
        if how in ("remove", "preempt"):
            getattr(vl, how)("A")
        else:
            vl.encode(vl.begin({"A": 9, "other": 5}), failing_for("X"))

        assert left == [("A", 7)]
        if how == "preempt":
            vl.remove("A")  # had left already
        assert left == [("A", 7)]
        with refused(vl, UnknownRequest, req_id="A"):
            vl.remove("A")
        vl.check()


class TestWeights:
    def test_new_epoch(self) -> None:
        """R2 encodes with the new weights; R1, in flight, keeps what it has (B12)."""
        vl = make_batch()
        for req_id in ("R1", "R2"):
            vl.add(req_id, prompt_len=9, items=[item(2, 4, "X", grid=(1, 2, 2))])
        run_step(vl, R1=4)
        vl.features.cache.set_epoch(1)
        _, got = run_step(vl, R1=5, R2=9)

        assert got == {"R1": run("X", 4, 2, 2, epoch=0), "R2": run("X", 2, 0, 4, epoch=1)}

    def test_adapter(self) -> None:
        """The adapter of a request is part of its keys."""
        vl = make_batch()
        vl.add("A", prompt_len=9, items=[item(2, 4, "X", grid=(1, 2, 2))], adapter="lora")
        run_step(vl, A=9)

        assert vl.features.cache.present() == (EntryKey("X", 0, "lora"),)


class _Payload:
    """Pixels, of which tests keep weak references only."""


class TestMemory:
    @pytest.fixture(autouse=True)
    def _no_collector(self) -> Any:
        """References alone must free everything."""
        gc.disable()
        yield
        gc.enable()

    @pytest.mark.parametrize("ending", ["finish", "abort", "failed", "mismatch", "blocked"])
    def test_nothing_of_a_request_is_kept(self, ending: str) -> None:
        """However a request ends, its pixels go with it, while errors and orders live on (B100)."""
        vl = make_batch(6)
        vl.add("other", prompt_len=30, items=[item(0, 4, "u", grid=(1, 2, 2))])
        run_step(vl, other=2)
        payload, note = _Payload(), _Payload()
        kept = [weakref.ref(payload), weakref.ref(note)]
        key, rows = {"mismatch": ("u", 2), "blocked": ("X", 6)}.get(ending, ("X", 2))
        picture = item(2, rows, key, grid=(1, 1, rows), payload=payload)
        vl.add("R", prompt_len=12, items=[picture], fields={"note": note})
        del payload, picture, note
        handles: list[object] = []
        if ending == "blocked":
            with pytest.raises(CacheFull):
                vl.begin({"R": 12})
            vl.remove("R")
        else:
            step = vl.begin({"R": 12})
            vl.encode(step, failing_for("X") if ending == "failed" else encode_all)
            handles += [step.failed, vl.arrange(step)] if ending != "abort" else []
            if ending in ("finish", "abort"):
                vl.remove("R")
            else:
                handles.append(step.failed["R"])
            del step

        vl.check()
        assert [reference() for reference in kept] == [None, None]
        assert handles is not None

    def test_a_thousand_short_requests(self) -> None:
        """Finished, aborted and failed in turn, ids kept: nothing else lives on (B100)."""
        vl = make_batch(8)
        alive: weakref.WeakSet[_Payload] = weakref.WeakSet()
        features: list[weakref.ref[Any]] = []

        def encoder(tasks: Sequence[EncodeTask]) -> list[Any]:
            outputs = failing_for("bad")(tasks)
            features.extend(weakref.ref(levels[0]) for levels in outputs)
            return outputs

        for number in range(1000):
            req_id, payload = f"r{number}", _Payload()
            alive.add(payload)
            key = "bad" if number % 3 == 2 else f"k{number % 50}"
            picture = item(2, 4, key, grid=(1, 2, 2), payload=payload)
            vl.add(req_id, prompt_len=9, items=[picture])
            del payload, picture
            step = vl.begin({req_id: 9})
            vl.encode(step, encoder)
            order = vl.arrange(step)
            del step
            if number % 3 == 0:
                vl.gather(order)
                vl.complete(order)
            if number % 3 != 2:
                vl.remove(req_id)
            assert len(alive) == 0

        present = vl.features.cache.present()
        assert sum(feature() is not None for feature in features) == len(present) == 2
        assert vl.features.cache.usage.reclaimable == 8
        vl.check()
