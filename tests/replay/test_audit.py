"""Auditor: invariants of live objects, and features that change after they were encoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vlbatch import EncoderCache, FeatureStore, InputBatch, Item, NumpyBackend, VLBatch, fields
from vlbatch.errors import InvalidSetting, InvariantBroken
from vlbatch.replay.audit import Auditor

Batch = VLBatch[Any]
Convert = Callable[[np.ndarray[Any, Any]], Any]


def make_batch(cache_rows: int = 60) -> Batch:
    batch: InputBatch[Any] = InputBatch(
        [fields.row("temperature", dtype="float32")],
        backend=NumpyBackend(),
        capacity=6,
        max_model_len=64,
    )
    return VLBatch(batch, FeatureStore(EncoderCache(max_rows=cache_rows)))


def image(key: str, length: int = 6) -> Item:
    return Item(key=key, modality="image", offset=1, length=length, grid=(1, 1, length))


def run_step(vl: Batch, scheduled: dict[str, int], convert: Convert = np.copy) -> None:
    def encode(tasks: Any) -> list[Any]:
        rng = np.random.default_rng(len(vl.features.cache.present()))
        return [(convert(rng.standard_normal((t.placed.num_rows, 4))),) for t in tasks]

    step = vl.begin(scheduled)
    vl.encode(step, encode)
    order = vl.arrange(step)
    vl.gather(order)
    vl.complete(order)


def features_of(vl: Batch, content: str) -> Any:
    (key,) = [key for key in vl.features.cache.present() if key.content == content]
    return vl.features.cache.features(key, req_id="test")[0]


@pytest.fixture
def vl() -> Batch:
    """Two requests in the middle of their images."""
    vl = make_batch()
    for req_id, key in (("a", "cat"), ("b", "dog")):
        vl.add(req_id, prompt_len=12, items=[image(key)])
    run_step(vl, {"a": 4, "b": 4})
    return vl


class TestFeatures:
    def test_honest_batch_passes(self, vl: Batch) -> None:
        """An untouched batch passes, and the report says what was looked at."""
        auditor = Auditor(vl, every=0, sample_rows=3)
        auditor.step()

        report = auditor.audit()

        assert (report.num_requests, report.num_entries, report.num_rows) == (2, 2, 6)
        assert report.seconds > 0

    def test_changed_in_place(self, vl: Batch) -> None:
        """A sampled row that changes in place is found, with its key and a reader of it."""
        auditor = Auditor(vl, every=0)
        auditor.step()
        features_of(vl, "dog")[:] *= 2

        with pytest.raises(InvariantBroken, match=r"feature rows \[0, 2, 3, 5\].*dog") as raised:
            auditor.audit()
        assert raised.value.req_id == "b"

    def test_spread_over_the_item(self, vl: Batch) -> None:
        """Samples are spread from the first row to the last; with enough of them none is missed."""
        auditor = Auditor(vl, every=0, sample_rows=6)
        auditor.step()
        features_of(vl, "dog")[4, 2] += 1e-6

        with pytest.raises(InvariantBroken, match=r"rows \[4\]"):
            auditor.audit()

    def test_encoded_again(self, vl: Batch) -> None:
        """An entry that left and was encoded again, to other values, is not blamed."""
        auditor = Auditor(vl, every=1)
        auditor.step()
        for req_id in ("a", "b"):
            vl.remove(req_id)
        vl.features.cache.clear()
        vl.add("c", prompt_len=12, items=[image("dog")])
        run_step(vl, {"c": 12})

        report = auditor.step()

        assert report is not None
        assert report.num_entries == 1

    def test_gone_since(self, vl: Batch) -> None:
        """An entry that left the cache since the last step is not looked for."""
        auditor = Auditor(vl, every=0)
        auditor.step()
        vl.remove("a")
        vl.features.cache.drop("cat")

        assert auditor.audit().num_entries == 1

    def test_no_feature_is_kept_alive(self, vl: Batch) -> None:
        """The auditor holds no features: what the cache lets go is gone."""
        import gc
        import weakref

        auditor = Auditor(vl, every=0)
        auditor.step()
        alive = weakref.ref(features_of(vl, "cat"))
        vl.remove("a")
        vl.features.cache.drop("cat")
        gc.collect()

        assert alive() is None

    @pytest.mark.parametrize("library", ["torch", "paddle"])
    def test_tensors(self, library: str) -> None:
        """Tensors are audited like arrays."""
        module = pytest.importorskip(library)
        vl = make_batch()
        vl.add("a", prompt_len=12, items=[image("cat")])
        run_step(vl, {"a": 4}, module.tensor if library == "torch" else module.to_tensor)
        auditor = Auditor(vl, every=0)
        auditor.step()
        assert auditor.audit().num_rows == 4

        features = features_of(vl, "cat")
        features[5] = features[5] + 1

        with pytest.raises(InvariantBroken, match=r"rows \[5\]"):
            auditor.audit()


class TestInvariants:
    def test_broken_invariant_is_found(self, vl: Batch) -> None:
        """What ``check`` of any part finds, an audit finds."""
        auditor = Auditor(vl, every=0)
        vl.features.cache._used_rows += 1

        with pytest.raises(InvariantBroken, match="13 are counted"):
            auditor.audit()

    def test_reallocated_field_is_found(self, vl: Batch) -> None:
        """A field whose array moved in memory is found: a captured graph would read the old one."""
        auditor = Auditor(vl, every=0)
        auditor._addresses["temperature"] -= 64  # where it would have been at first

        with pytest.raises(InvariantBroken, match="temperature"):
            auditor.audit()


class TestSchedule:
    def test_every_n_steps(self, vl: Batch) -> None:
        """An audit takes place in every n-th step and in no other."""
        auditor = Auditor(vl, every=3)

        reports = [auditor.step() for _ in range(7)]

        assert [n for n, report in enumerate(reports, start=1) if report] == [3, 6]

    def test_zero_never(self, vl: Batch) -> None:
        """With 0 there are audits by hand only."""
        auditor = Auditor(vl, every=0)

        assert not any(auditor.step() for _ in range(5))

    def test_draw_is_bounded(self) -> None:
        """Of many entries an audit compares as many as it is told to, drawn anew each time."""
        vl = make_batch(cache_rows=100)
        for n in range(6):
            vl.add(f"r{n}", prompt_len=9, items=[image(f"image {n}", 4)])
            run_step(vl, {f"r{n}": 9})
        auditor = Auditor(vl, every=0, sample_entries=2)
        auditor.step()
        features_of(vl, "image 3")[:] = 0

        def finds_it() -> bool:
            try:
                assert auditor.audit().num_entries == 2
            except InvariantBroken:
                return True
            return False

        found = sum(finds_it() for _ in range(40))

        assert 0 < found < 40

    @pytest.mark.parametrize(
        "setting", [{"every": -1}, {"sample_rows": 0}, {"sample_entries": 0}], ids=str
    )
    def test_settings_out_of_range(self, vl: Batch, setting: dict[str, int]) -> None:
        """Settings out of range are refused by name."""
        with pytest.raises(InvalidSetting, match=next(iter(setting))):
            Auditor(vl, **setting)
