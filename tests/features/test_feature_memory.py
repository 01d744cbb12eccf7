"""FeatureStore: nothing of a request is kept after it, without a garbage collector."""

from __future__ import annotations

import gc
import weakref

import pytest
from drive import Drive, outputs_of
from naive_media import encoded, item

from vlbatch.errors import (
    CacheFull,
    ItemTooLarge,
)


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
