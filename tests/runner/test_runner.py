"""A run from the first arrival to the last token: results, failures, counters."""

from __future__ import annotations

import numpy as np
import pytest
from hash_engine import HashEngine
from made_runs import (
    ROW_BYTES,
    MadePrompts,
    assert_consistent,
    assert_nothing_left,
    make_item,
    make_prompt,
    make_workload,
    run,
)

from vlbatch.errors import (
    DuplicateRequest,
    EncodeFailed,
    InvalidField,
    InvariantBroken,
    ItemTooLarge,
    MediaError,
)
from vlbatch.runner import Request, Runner, RunSettings
from vlbatch.runner.runner import RunCounters


def break_item(engine: HashEngine, name: str, grid: tuple[int, int, int]) -> None:
    """Let the engine raise for an item of this content."""
    patches = make_item(name, grid).payload.patches
    engine.broken[patches.tobytes()] = RuntimeError("no such kernel")


class TestEnds:
    def test_one_token(self):
        """With ``max_tokens`` 1 a request ends with its prefill: no decode step."""
        work = make_workload({"a": make_prompt(5)}, max_tokens=1, chunk=2)

        outcome = run(work)

        assert outcome.verified == ["a"]
        assert outcome.results["a"].steps == [2]  # chunks [0, 2), [2, 4), [4, 5)

    def test_prompt_of_exactly_max_model_len(self):
        """A prompt that fills ``max_model_len`` gets the one token that needs no more room."""
        work = make_workload({"a": make_prompt(20)}, max_model_len=20, max_tokens=8)

        outcome = run(work)

        assert outcome.verified == ["a"]
        assert len(outcome.results["a"].tokens) == 1

    def test_stops_at_max_model_len(self):
        """A request stops when its next token would be past ``max_model_len``."""
        work = make_workload({"a": make_prompt(18)}, max_model_len=20, max_tokens=8)
        engine = HashEngine(work.settings.kv_blocks, work.settings.block_size, 10**9)

        outcome = run(work, engine=engine)

        assert outcome.verified == ["a"]
        assert len(outcome.results["a"].tokens) == 3  # tokens 18 and 19 are computed, 20 is not

    def test_stops_at_the_end_token(self):
        """The end token is the last one, and is among the tokens."""
        work = make_workload({"a": make_prompt(4)}, max_tokens=50)
        engine = HashEngine(work.settings.kv_blocks, work.settings.block_size, 1)

        outcome = run(work, engine=engine)

        assert outcome.results["a"].tokens == [HashEngine.eos_token_id]
        assert outcome.verified == ["a"]

    def test_only_media(self):
        """A prompt of nothing but an item runs; so does one that repeats it."""
        item = make_item("x", (1, 2, 3))
        prompts = {"one": make_prompt(item), "three": make_prompt(item, item, item)}

        outcome = run(make_workload(prompts, chunk=4))

        assert outcome.verified == ["one", "three"]
        assert outcome.runner.vl.features.cache.counters.encoded == 1

    def test_arrival_gaps(self):
        """The clock runs on to the next arrival when there is nothing to do."""
        prompts = {r: make_prompt(3) for r in "abc"}
        work = make_workload(prompts, arrivals={"b": 10**15, "c": 50}, max_tokens=2)
        calls = []

        outcome = run(work, on_step=calls.append)

        assert outcome.verified == ["a", "b", "c"]
        assert len(calls) == outcome.runner.counters.steps <= 6
        steps = {r: result.steps[0] for r, result in outcome.results.items()}
        assert steps["a"] < steps["c"] < steps["b"]

    def test_arrival_is_a_step(self):
        """A request is not known before its step, whatever its place in the file."""
        prompts = {r: make_prompt(4) for r in "ab"}
        work = make_workload(prompts, arrivals={"a": 3}, chunk=1, max_tokens=8)

        outcome = run(work)

        assert outcome.results["b"].steps[0] == 3
        assert outcome.results["a"].steps[0] == 3 + 3

    def test_no_requests(self):
        """Nothing to do is no error."""
        outcome = run(make_workload({}))

        assert (outcome.results, outcome.runner.counters.steps) == ({}, 0)


class TestRefused:
    def test_a_prompt_that_cannot_be_built(self):
        """The refusal of a medium ends its request; the others do not notice."""
        prompts = {
            "bad": MediaError("truncated", req_id="bad"),
            "good": make_prompt(3, make_item("x", (1, 2, 2))),
        }

        outcome = run(make_workload(prompts))

        bad = outcome.results["bad"]
        assert (bad.status, str(bad.error)) == ("refused", "request 'bad': truncated")
        assert outcome.verified == ["good"]
        assert_nothing_left(outcome.runner)

    @pytest.mark.parametrize(
        ("settings", "setting", "what"),
        [
            ({"cache_bytes": 11 * ROW_BYTES}, "cache_bytes", "encoder cache"),
            ({"encode_rows": 11}, "encode_rows", "encode budget of a step"),
        ],
    )
    def test_an_item_that_never_fits(self, settings, setting, what):
        """An item larger than the cache or the encode budget names the run's setting."""
        large = make_prompt(1, make_item("large", (1, 3, 4)), 1)
        prompts = {"a": make_prompt(2), "bad": large, "b": make_prompt(3)}

        outcome = run(make_workload(prompts, **settings))

        bad = outcome.results["bad"]
        assert isinstance(bad.error, ItemTooLarge)
        assert (bad.status, bad.error.setting) == ("refused", setting)
        assert f"'large' has 12 feature rows; the {what} holds 11" in str(bad.error)
        assert outcome.verified == ["a", "b"]
        assert_nothing_left(outcome.runner)

    def test_a_field_that_does_not_hold_the_value(self):
        """A value that its field cannot hold is refused at admission, after which others enter."""
        work = make_workload({"a": make_prompt(3), "b": make_prompt(3)}, max_tokens=2)
        work.requests[0] = Request("a", "made", max_tokens=2**31)

        outcome = run(work)

        assert isinstance(outcome.results["a"].error, InvalidField)
        assert outcome.verified == ["b"]
        assert_nothing_left(outcome.runner)

    def test_second_request_of_an_id(self):
        """Of two requests with one id the first is answered; the second has a row of its own."""
        prompts = {"a": make_prompt(3), "a#1": make_prompt(4)}
        work = make_workload(prompts)
        work.requests.insert(1, Request("a", "another"))
        prompts_of: object = MadePrompts(work.prompts)
        runner = Runner(work.engine(), prompts_of, work.settings)

        first, second, third = runner.run(work.requests)

        assert (first.status, third.status) == ("finished", "finished")
        assert (second.status, type(second.error)) == ("refused", DuplicateRequest)
        assert str(second.error).startswith("request 'a': is there twice")
        assert second.tokens == []
        assert_nothing_left(runner)

    def test_only_refusals(self):
        """A run in which every request is refused ends, and reports them all as done."""
        prompts = {r: MediaError("gone", req_id=r) for r in "abc"}
        done = []

        outcome = run(make_workload(prompts), on_step=lambda runner: done.append(runner.num_done))

        assert (done, outcome.runner.counters.steps) == ([3], 0)
        assert_nothing_left(outcome.runner)


class TestEncoderFails:
    GRID = (1, 2, 3)

    def test_only_its_requests_fail(self):
        """An item that cannot be encoded ends the requests that show it, wherever they are."""
        good, bad = make_item("good", self.GRID), make_item("bad", self.GRID)
        prompts = {
            "a": make_prompt(2, good, 6),
            "b": make_prompt(2, good, 3, bad, 2),  # fails after some chunks
            "c": make_prompt(bad, 1),  # at once, with b or later
            "d": make_prompt(4),
        }
        work = make_workload(prompts, chunk=4, encode_rows=6, block_size=4)
        engine = work.engine()
        break_item(engine, "bad", self.GRID)

        outcome = run(work, engine=engine, on_step=assert_consistent)

        for req_id in "bc":
            result = outcome.results[req_id]
            assert (result.status, type(result.error)) == ("failed", EncodeFailed)
            assert str(result.error).startswith(f"request {req_id!r}: encoding 'bad'")
            assert "no such kernel" in str(result.error)
        assert outcome.verified == ["a", "d"]
        assert_nothing_left(outcome.runner)

    def test_its_kv_blocks_come_back(self):
        """The blocks of a failed request are free for the next one."""
        good, bad = make_item("good", self.GRID), make_item("bad", self.GRID)
        prompts = {"b": make_prompt(8, bad, 1), "a": make_prompt(8, good, 1)}
        work = make_workload(
            prompts, chunk=4, encode_rows=6, block_size=4, kv_blocks=5, max_tokens=4
        )
        engine = work.engine()
        break_item(engine, "bad", self.GRID)

        outcome = run(work, engine=engine, on_step=assert_consistent)

        assert outcome.results["b"].status == "failed"
        assert outcome.verified == ["a"]
        assert_nothing_left(outcome.runner)

    def test_after_some_tokens(self):
        """A request whose item fails when it is encoded again keeps the tokens that it has.

        It was preempted in between. Its answer is not compared: alone it would fail too.
        """
        item = make_item("bad", self.GRID)
        prompts = {"a": make_prompt(16), "b": make_prompt(2, item, 2)}
        # a grows until the blocks run out; the cache holds b's item or another
        work = make_workload(
            {**prompts, "c": make_prompt(make_item("other", self.GRID), 9)},
            kv_blocks=10, block_size=4, chunk=4, max_tokens=12, cache_bytes=6 * ROW_BYTES,
            encode_rows=6, arrivals={"c": 4},
        )  # fmt: skip
        engine = HashEngine(10, 4, eos_one_in=10**9)

        def fail_from_now_on(runner):
            if "b" in runner.vl.batch.preempted:
                break_item(engine, "bad", self.GRID)

        outcome = run(work, engine=engine, on_step=fail_from_now_on)

        result = outcome.results["b"]
        assert engine.broken, "b was never preempted"
        assert result.status == "failed"
        assert len(result.tokens) > 0
        assert outcome.verified == ["a", "c"]
        assert_nothing_left(outcome.runner)

    def test_wrong_number_of_rows(self):
        """An encoder that returns another number of rows ends the requests that show the item."""

        class Short(HashEngine):
            def encode(self, items):
                features = super().encode(items)
                return [rows[: min(len(rows), 5)] for rows in features]

        prompts = {"a": make_prompt(1, make_item("x", self.GRID)), "b": make_prompt(3)}
        work = make_workload(prompts)

        outcome = run(work, engine=Short(work.settings.kv_blocks, work.settings.block_size))

        assert "delivered [5] feature rows" in str(outcome.results["a"].error)
        assert outcome.verified == ["b"]
        assert_nothing_left(outcome.runner)


class TestCounters:
    def test_against_the_orders(self):
        """Every counter equals what the applied plans and the items say, counted anew."""
        items = [make_item("x", (1, 2, 3)), make_item("y", (1, 3, 3))]
        prompts = {f"r{n}": make_prompt(n % 3, items[n % 2], 4) for n in range(9)}
        work = make_workload(
            prompts, arrivals={f"r{n}": n for n in range(9)}, chunk=5, max_num_seqs=4
        )
        plans = []

        class Recording(RunCounters):
            def count(self, plan, features):
                plans.append(plan)
                super().count(plan, features)

        runner = Runner(work.engine(), MadePrompts(work.prompts), work.settings)
        runner.counters = Recording()
        runner.run(work.requests)

        counters = runner.counters
        assert counters.steps == len(plans)
        assert counters.tokens == sum(sum(plan.order.scheduled) for plan in plans)
        assert counters.rows_moved == sum(plan.moves.num_moved for plan in plans) > 0
        assert counters.reorders == sum(plan.moves.num_moved > 0 for plan in plans) > 0
        assert counters.condenses == sum(-1 in plan.moves.new_row_of for plan in plans) > 0
        ends = {
            (req_id, int(done + new))
            for order in (plan.order for plan in plans)
            for req_id, done, new in zip(
                order.req_ids, order.computed, order.scheduled, strict=True
            )
        }
        assert counters.cut_items == {
            (req_id, 0)
            for req_id, stop in ends
            if prompts[req_id].items[0].offset < stop < prompts[req_id].items[0].stop
        }
        assert len(counters.cut_items) > 0

    def test_hits_and_evictions(self):
        """One encode for content that is shown again; an eviction where the cache is too small."""
        x, y = make_item("x", (1, 2, 3)), make_item("y", (1, 2, 3))
        prompts = {"a": make_prompt(1, x), "b": make_prompt(1, x), "c": make_prompt(1, y)}
        work = make_workload(
            prompts, arrivals={"b": 9, "c": 18}, max_tokens=1, cache_bytes=6 * ROW_BYTES
        )

        cache = run(work).runner.vl.features.cache.counters

        assert (cache.encoded, cache.hits, cache.evicted, cache.peak_rows) == (2, 1, 1, 6)


def test_stuck_is_an_error_not_a_loop():
    """A scheduler that schedules nothing and refuses nothing breaks an invariant."""
    work = make_workload({"a": make_prompt(3)})
    runner = Runner(work.engine(), MadePrompts(work.prompts), work.settings)
    runner.scheduler.schedule = lambda held: ({}, {})

    with pytest.raises(InvariantBroken, match="no request can go on"):
        runner.run(work.requests)


def test_results_keep_the_order_of_the_file():
    """Results come in the order of the requests, not in that of arrival or of their ends."""
    rng = np.random.default_rng(3)
    names = [f"r{n}" for n in range(8)]
    prompts = {r: make_prompt(int(rng.integers(1, 9))) for r in names}
    arrivals = {r: int(rng.integers(0, 9)) for r in names}
    work = make_workload(prompts, arrivals=arrivals, max_num_seqs=2)
    runner = Runner(work.engine(), MadePrompts(work.prompts), work.settings)

    assert [result.request.req_id for result in runner.run(work.requests)] == names


def test_default_settings_are_usable():
    """The defaults contradict nothing."""
    assert RunSettings().token_budget >= RunSettings().max_num_seqs
