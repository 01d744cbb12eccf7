"""RecordedBatch: a VLBatch whose trace replays, and does not once anything is mixed up."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vlbatch import (
    BatchOrder,
    EncoderCache,
    EncodeTask,
    FeatureInputs,
    FeatureStore,
    InputBatch,
    Item,
    NumpyBackend,
    VLBatch,
    fields,
)
from vlbatch.errors import InvalidField, InvalidSchedule
from vlbatch.replay import replay_file
from vlbatch.replay.divergence import Divergence
from vlbatch.replay.recording import RecordedBatch

Batch = RecordedBatch[Any]
Tamper = Callable[[Batch, BatchOrder, FeatureInputs, Any], tuple[FeatureInputs, Any]]

DECLARED = [
    fields.row("temperature", dtype="float32"),
    fields.ragged("block_table", 12, "int32", residency="rows"),
    fields.host("grammar", residency="rows"),
    fields.ragged("token_ids", 200),
]


def make_batch(**settings: Any) -> VLBatch[Any]:
    family = settings.pop("family", "qwen2_5_vl")
    auto_confirm = settings.pop("auto_confirm", True)
    cache_rows, encode_rows = settings.pop("cache_rows", 40), settings.pop("encode_rows", 30)
    given = {"capacity": 6, "max_model_len": 120} | settings
    return VLBatch(
        InputBatch(DECLARED, backend=NumpyBackend(), **given),
        FeatureStore(EncoderCache(max_rows=cache_rows), encode_rows=encode_rows),
        family=family,
        auto_confirm=auto_confirm,
    )


def image(key: str, offset: int, h: int = 2, w: int = 3) -> Item:
    return Item(key=key, modality="image", offset=offset, length=h * w, grid=(1, h, w))


def encoder(tasks: Any) -> list[tuple[object, ...]]:
    """Feature rows that only their item has."""
    made: list[tuple[object, ...]] = []
    for task in tasks:
        seed = [*task.key.content.encode(), task.key.epoch]
        rng = np.random.default_rng(seed)
        made.append((rng.standard_normal((task.placed.num_rows, 4)),))
    return made


def run_step(
    vl: Batch, scheduled: dict[str, int], tamper: Tamper | None = None, encode: Any = encoder
) -> BatchOrder | None:
    """One step as a runner makes it; ``tamper`` breaks something between gather and forward."""
    step = vl.begin(scheduled)
    vl.encode(step, encode)
    if not step.scheduled:
        return None
    order = vl.batch.apply(vl.batch.plan(step.scheduled))
    features, positions = vl.gather(order), vl.positions_of(order)
    if tamper is not None:
        features, positions = tamper(vl, order, features, positions)
    vl.gathered(order, features, positions)
    vl.complete(order)
    return order


def divergence_of(path: Path) -> Divergence:
    divergence = replay_file(path).divergence
    assert divergence is not None
    return divergence


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def three_requests(vl: Batch) -> None:
    """Two images of one size and a text; c finishes, so that the next step moves a row."""
    vl.add("c", prompt_len=3, fields={"temperature": 0.3, "block_table": [7]})
    vl.add("a", prompt_len=16, items=[image("cat", 4)], fields={"temperature": 0.1})
    vl.add("b", prompt_len=16, items=[image("dog", 4)], fields={"temperature": 0.2})
    run_step(vl, {"c": 3, "a": 2, "b": 2})
    run_step(vl, {"c": 1, "a": 2, "b": 2})
    vl.remove("c")


def test_counts_of_an_engine_cannot_be_recorded(path: Path) -> None:
    """What the format has no line for is refused, so that no trace tells another story."""
    with RecordedBatch(make_batch(), path) as vl:
        vl.add("a", prompt_len=3)
        with pytest.raises(InvalidSchedule, match=r"prompts \[3\], computed \[2\]; a recorded"):
            vl.set_progress(np.array([3]), np.array([2]))
        assert vl.batch.computed_of("a") == 0


class TestHonestRuns:
    def test_every_verb(self, path: Path) -> None:
        """Chunks through images, hits, evictions, preemption, new weights and drops replay."""
        with RecordedBatch(make_batch(cache_rows=12), path) as vl:
            three_requests(vl)
            run_step(vl, {"a": 4, "b": 12})
            vl.preempt("a")
            vl.add("d", prompt_len=20, items=[image("dog", 2), image("owl", 10)])
            run_step(vl, {"b": 1, "d": 9})
            vl.resume("a")
            vl.remove("b")
            vl.features.cache.drop("cat")
            run_step(vl, {"d": 11})
            vl.features.cache.set_epoch(1)
            run_step(vl, {"a": 16, "d": 1})
            vl.reset()
            vl.add("a", prompt_len=10, items=[image("cat", 1)])
            run_step(vl, {"a": 10})

        result = replay_file(path)
        assert (result.status, str(result.divergence)) == ("ok", "None")
        written = path.read_text(encoding="utf-8")
        for event in ("preempt", "resume", "drop", "weights", "abort", "finish"):
            assert f'{{"{event}":' in written, event

    def test_random_runs(self, path: Path, seed: int) -> None:
        """A random walk over admissions, chunks, preemptions and failures replays."""
        for walk in range(12):
            rng = np.random.default_rng([seed, walk])
            vl = RecordedBatch(_random_batch(rng), path)
            with vl:
                _random_walk(vl, rng)

            result = replay_file(path)
            assert result.status == "ok", f"seed {seed}, walk {walk}: {result.divergence}"

    def test_drafts_and_roll_back(self, path: Path) -> None:
        """Accepted drafts, and drafts that are rolled back by a confirmation, replay."""
        for auto_confirm in (True, False):
            vl = RecordedBatch(make_batch(num_drafts=3, auto_confirm=auto_confirm), path)
            with vl:
                vl.add("a", prompt_len=9, items=[image("cat", 1)])
                run_step(vl, {"a": 9})
                if auto_confirm:
                    step = vl.begin({"a": 4})
                    order = vl.arrange(step)
                    vl.gathered(order, vl.gather(order), vl.positions_of(order))
                    vl.complete(order, {"a": 1})
                else:
                    vl.confirm("a", 9)
                    run_step(vl, {"a": 4})
                    vl.confirm("a", 11)
                run_step(vl, {"a": 2})

            assert replay_file(path).status == "ok"
            positions = [
                line["expect"]["positions"]["a"][0]
                for line in map(json.loads, path.read_text(encoding="utf-8").splitlines())
                if "positions" in line.get("expect", {})
            ]
            assert positions[-1] == [p + 2 for p in positions[1][:2]]

    def test_failing_encoder(self, path: Path) -> None:
        """A request that the encoder fails is lost in the replay too, and no other."""

        def broken(tasks: list[EncodeTask]) -> Any:
            if any(task.key.content == "cat" for task in tasks):
                raise RuntimeError("no memory")
            return encoder(tasks)

        with RecordedBatch(make_batch(), path) as vl:
            vl.add("a", prompt_len=10, items=[image("cat", 1)])
            run_step(vl, {"a": 10}, encode=broken)
            vl.add("b", prompt_len=10, items=[image("dog", 1)])
            run_step(vl, {"b": 10}, encode=broken)

        assert replay_file(path).status == "ok"
        assert '"failed":["a"]' in path.read_text(encoding="utf-8")

    def test_encoder_with_another_number_of_rows(self, path: Path) -> None:
        """A request whose item got another number of rows is lost in the replay too."""
        with RecordedBatch(make_batch(), path) as vl:
            vl.add("a", prompt_len=10, items=[image("cat", 1)])
            run_step(vl, {"a": 10}, encode=lambda tasks: [(np.ones((5, 4)),) for _ in tasks])

        assert '{"fail_encode":["cat"]}' in path.read_text(encoding="utf-8")
        assert replay_file(path).status == "ok"

    def test_back_in_another_row_is_no_move(self, path: Path) -> None:
        """A request that was preempted and resumed between two steps is written, not moved."""
        with RecordedBatch(make_batch(), path) as vl:
            for req_id in "abc":
                vl.add(req_id, prompt_len=9)
            run_step(vl, {"a": 3, "b": 3, "c": 3})
            vl.remove("a")
            vl.preempt("c")
            vl.resume("c")
            run_step(vl, {"b": 3, "c": 3})

        assert '"order":["b","c"]' in path.read_text(encoding="utf-8").splitlines()[-1]
        assert '"moved":1,' in path.read_text(encoding="utf-8").splitlines()[-1]  # b alone
        assert replay_file(path).status == "ok"

    def test_abandoned_step(self, path: Path) -> None:
        """A step given up when half of it is encoded leaves that half, here and in the replay."""
        with RecordedBatch(make_batch(cache_rows=18), path) as vl:
            vl.add("a", prompt_len=10, items=[image("cat", 1)])
            run_step(vl, {"a": 10})
            vl.add("b", prompt_len=20, items=[image("cat", 1), image("dog", 7), image("owl", 13)])
            step = vl.begin({"a": 1, "b": 20})
            dog = next(task for task in step.tasks if task.key.content == "dog")
            vl.commit(step, {dog.key: encoder([dog])[0]})
            vl.abandon(step)
            vl.features.cache.check()
            run_step(vl, {"a": 1, "b": 20})

        lines = list(map(json.loads, path.read_text(encoding="utf-8").splitlines()))
        given_up = next(n for n, line in enumerate(lines) if "abandon" in line)
        assert lines[given_up] == {"step": {"a": 1, "b": 20}, "abandon": ["dog"]}
        expected = [line["expect"] for line in lines[given_up:] if "expect" in line]
        assert expected[0] == {"hits": ["cat"], "encoded": ["dog"], "failed": []}
        assert expected[1]["encoded"] == ["owl"]
        assert replay_file(path).status == "ok"

    def test_policy_of_one_step(self, path: Path) -> None:
        """Rows ordered by another policy than the header's are noted, and the rest replays."""
        with RecordedBatch(make_batch(), path) as vl:
            vl.add("a", prompt_len=9)
            vl.add("b", prompt_len=2)
            run_step(vl, {"a": 2, "b": 2})
            step = vl.begin({"a": 2, "b": 1})
            order = vl.arrange(step, policy="arrival")
            assert order.req_ids == ("a", "b")
            vl.gathered(order, vl.gather(order), vl.positions_of(order))
            vl.complete(order)
            run_step(vl, {"a": 2, "b": 1})

        lines = list(map(json.loads, path.read_text(encoding="utf-8").splitlines()))
        assert [line["expect"].get("order") for line in lines if "expect" in line] == [
            ["a", "b"], None, None
        ]  # fmt: skip
        assert {"note": {"order": ["a", "b"]}} in lines
        assert replay_file(path).status == "ok"

    def test_refused_step_is_not_recorded(self, path: Path) -> None:
        """A schedule that is refused changes nothing, in the file neither."""
        with RecordedBatch(make_batch(), path) as vl:
            vl.add("a", prompt_len=4)
            before = path.read_bytes()
            with pytest.raises(InvalidSchedule, match=r"expected 1\.\.4"):
                vl.begin({"a": 5})
            assert path.read_bytes() == before
            run_step(vl, {"a": 4})

        assert replay_file(path).status == "ok"

    def test_adapters_are_told_apart(self, path: Path) -> None:
        """The same image under two adapters has two keys in the trace."""
        with RecordedBatch(make_batch(), path) as vl:
            vl.add("a", prompt_len=10, items=[image("cat", 1)], adapter="red")
            vl.add("b", prompt_len=10, items=[image("cat", 1)])
            run_step(vl, {"a": 10, "b": 10})

        assert '"encoded":["cat@red","cat"]' in path.read_text(encoding="utf-8")
        assert replay_file(path).status == "ok"

    def test_precomputed_embeddings(self, path: Path) -> None:
        """Precomputed embeddings are followed by their fingerprints like encoded ones."""
        rows = np.arange(24.0).reshape(6, 4)
        with RecordedBatch(make_batch(), path) as vl:
            vl.add("a", prompt_len=10, items=[replace(image("made", 1), embeds=rows)])
            run_step(vl, {"a": 10})
        assert replay_file(path).status == "ok"

        with RecordedBatch(make_batch(), path) as vl:
            vl.add("a", prompt_len=10, items=[replace(image("made", 1), embeds=rows)])
            run_step(vl, {"a": 10}, shift_rows)
        assert divergence_of(path).req_id == "a"


def _random_batch(rng: np.random.Generator) -> VLBatch[Any]:
    return make_batch(
        policy=["split", "two", "arrival"][rng.integers(3)],
        stable=bool(rng.integers(2)),
        cache_rows=int(rng.integers(12, 40)),
        encode_rows=int(rng.integers(9, 30)),
        family=["1d", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"][rng.integers(4)],
    )


def _random_walk(vl: Batch, rng: np.random.Generator) -> None:
    def flaky(tasks: list[EncodeTask]) -> Any:
        if rng.random() < 0.1:
            raise RuntimeError("flaky")
        return encoder(tasks)

    for n in range(40):
        live, room = vl.batch.req_ids, vl.batch.capacity - vl.batch.num_reqs
        if room and vl.batch.preempted and rng.random() < 0.5:
            vl.resume(vl.batch.preempted[0])
        elif room and rng.random() < 0.6:
            items, at = [], int(rng.integers(0, 4))
            for _ in range(rng.integers(0, 4)):
                h, w = (int(side) for side in rng.integers(1, 4, 2))
                items.append(image(f"{h}x{w} {rng.integers(3)}", at, h, w))
                at += h * w + int(rng.integers(0, 4))
            vl.add(f"r{n}", prompt_len=at + int(rng.integers(1, 9)), items=items)
        elif live and rng.random() < 0.3:
            getattr(vl, ["remove", "preempt"][rng.integers(2)])(live[rng.integers(len(live))])
        wanted = {r: int(rng.integers(1, 12)) for r in vl.batch.req_ids if rng.random() < 0.9}
        fit = {r: tokens for r, tokens in vl.ask(wanted).items() if tokens}
        if fit:
            run_step(vl, fit, encode=flaky)


# -- faults ----------------------------------------------------------------------------------------
def swap_rows(
    vl: Batch, order: BatchOrder, features: FeatureInputs, positions: Any
) -> tuple[FeatureInputs, Any]:
    one, other = features.segments
    return replace(features, segments=(other, one)), positions


def shift_rows(
    vl: Batch, order: BatchOrder, features: FeatureInputs, positions: Any
) -> tuple[FeatureInputs, Any]:
    return replace(features, tokens=np.roll(features.tokens, -1)), positions


def shift_positions(
    vl: Batch, order: BatchOrder, features: FeatureInputs, positions: Any
) -> tuple[FeatureInputs, Any]:
    start, stop = order.query_start[order.row_of("b") :][:2]
    positions[:, start:stop] += 1
    return features, positions


def keep_field(name: str) -> Tamper:
    """Put what was in row 0 before the step back there."""

    def tamper(
        vl: Batch, order: BatchOrder, features: FeatureInputs, positions: Any
    ) -> tuple[FeatureInputs, Any]:
        if name == "grammar":
            vl.batch.objects(name)[0] = vl.batch.objects(name)[1]
        else:
            vl.batch[name][0] = vl.batch[name][1]
        return features, positions

    return tamper


class TestFaults:
    def test_swapped_features(self, path: Path) -> None:
        """Feature rows of two requests that change places diverge in that step, at the first."""
        with RecordedBatch(make_batch(), path) as vl:
            three_requests(vl)
            run_step(vl, {"a": 8, "b": 8}, swap_rows)
            run_step(vl, {"a": 4, "b": 4})

        divergence = divergence_of(path)
        assert (divergence.step, divergence.what) == (3, "features at token 4")
        assert divergence.req_id in ("a", "b")
        key = {"a": "cat", "b": "dog"}[divergence.req_id]
        assert all(row.expected.startswith(f"({key},") for row in divergence.table)
        assert not any(key in row.got for row in divergence.table)

    def test_shifted_features(self, path: Path) -> None:
        """Rows that land one token off diverge in that step, at that request."""
        with RecordedBatch(make_batch(), path) as vl:
            three_requests(vl)
            run_step(vl, {"a": 8}, shift_rows)

        divergence = divergence_of(path)
        assert (divergence.step, divergence.req_id) == (3, "a")
        assert len(divergence.table) == 6

    def test_features_changed_in_the_cache(self, path: Path) -> None:
        """An engine that changes its features in place is found when they are read next."""
        with RecordedBatch(make_batch(), path) as vl:
            vl.add("a", prompt_len=16, items=[image("cat", 4)])
            run_step(vl, {"a": 7})
            (key,) = vl.features.cache.present()
            rows: Any = vl.features.cache.features(key, req_id="a")[0]
            rows[4] *= 2
            run_step(vl, {"a": 9})

        divergence = divergence_of(path)
        assert (divergence.step, divergence.req_id) == (2, "a")
        assert divergence.what == "features at token 8"

    def test_shifted_positions(self, path: Path) -> None:
        """Positions that are one off diverge in that step, at that request."""
        with RecordedBatch(make_batch(), path) as vl:
            three_requests(vl)
            run_step(vl, {"a": 8, "b": 8}, shift_positions)

        divergence = divergence_of(path)
        assert (divergence.step, divergence.what, divergence.req_id) == (3, "positions", "b")

    @pytest.mark.parametrize("name", ["temperature", "block_table", "grammar"])
    def test_field_of_another_request(self, path: Path, name: str) -> None:
        """A row whose field holds another request's value diverges in that step, by its row."""
        with RecordedBatch(make_batch(), path) as vl:
            for n, req_id in enumerate("ab"):
                values = {"temperature": n, "block_table": [n, 7], "grammar": object()}
                vl.add(req_id, prompt_len=9, fields=values)
            run_step(vl, {"a": 3, "b": 3})
            run_step(vl, {"a": 3, "b": 3}, keep_field(name))

        divergence = divergence_of(path)
        assert (divergence.step, divergence.what) == (2, "order")
        note = {"fields with the value of another request": {"a": {name: "b"}}}
        assert json.dumps({"note": note}, separators=(",", ":")) in path.read_text("utf-8")

    def test_entries_past_the_valid_length_do_not_count(self, path: Path) -> None:
        """What a kernel leaves behind the valid prefix of a ragged field is nobody's value."""
        with RecordedBatch(make_batch(), path) as vl:
            three_requests(vl)
            vl.batch["block_table"][1:, 3:] = 5
            run_step(vl, {"a": 8, "b": 8})

        assert replay_file(path).status == "ok"

    def test_entry_that_is_encoded_again(self, path: Path) -> None:
        """A cache that loses an entry which it should have had is found by its encode."""
        with RecordedBatch(make_batch(), path) as vl:
            vl.add("a", prompt_len=16, items=[image("cat", 4)])
            run_step(vl, {"a": 16})
            vl.add("b", prompt_len=16, items=[image("cat", 4)])
            vl._entries.clear()  # the recorder does not see that the entry is dropped
            vl.features.cache.drop("cat")
            run_step(vl, {"b": 16})

        divergence = divergence_of(path)
        assert (divergence.step, divergence.what) == (2, "encoded")


def test_starts_empty(path: Path) -> None:
    """A batch with requests cannot be recorded from the middle."""
    vl = make_batch()
    vl.add("a", prompt_len=4)

    with pytest.raises(InvalidField, match=r"empty batch.*\['a'\]"):
        RecordedBatch(vl, path)


def test_header_says_the_settings(path: Path) -> None:
    """The header has the settings of the batch under the names of the format."""
    features = FeatureStore(
        EncoderCache(max_rows=33), encode_rows=22, lookahead=2, whole_items=True
    )
    batch: InputBatch[Any] = InputBatch(
        DECLARED, backend=NumpyBackend(), capacity=5, max_model_len=77, num_drafts=3,
        policy="two", stable=True,
    )  # fmt: skip
    vl = VLBatch(batch, features, family="qwen3_vl", tokens_per_second=4.0, auto_confirm=False)
    RecordedBatch(vl, path).recorder.close()

    header = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    assert header == {
        "vlbatch_scenario": 1, "capacity": 5, "max_model_len": 77, "cache_rows": 33,
        "encode_rows": 22, "lookahead": 2, "draft_tokens": 3, "positions": "qwen3_vl",
        "tokens_per_second": 4.0, "order": "two", "stable": True, "chunking": "whole",
        "confirm": "manual",
    }  # fmt: skip
