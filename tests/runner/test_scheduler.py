"""Who goes on, who waits, who is preempted; and that nobody waits for ever."""

from __future__ import annotations

import pytest
from made_runs import (
    ROW_BYTES,
    assert_consistent,
    assert_nothing_left,
    make_item,
    make_prompt,
    make_workload,
    run,
)

from vlbatch.errors import InvariantBroken, OutOfBlocks
from vlbatch.runner import RunSettings
from vlbatch.runner.requests import Request
from vlbatch.runner.scheduler import Job, Scheduler
from vlbatch.runner.state import make_batch


def make_scheduler(**settings):
    limits = RunSettings(**settings)
    vl = make_batch(limits, hidden_size=4, tokens_per_second=2.0)
    return Scheduler(limits, vl), vl


def submit(scheduler, req_id, *parts, max_tokens=4):
    scheduler.submit(Job(Request(req_id, "made", max_tokens=max_tokens), make_prompt(*parts)))


def compute(vl, scheduled):
    """A step without a model."""
    step = vl.begin(scheduled)
    assert not step.tasks
    vl.complete(vl.arrange(step))
    for req_id in scheduled:
        vl.confirm(req_id, vl.batch.computed_of(req_id))


class TestBudgets:
    def test_chunk_and_token_budget(self):
        """No chunk is longer than ``chunk``; all together are not longer than ``token_budget``."""
        scheduler, vl = make_scheduler(chunk=5, token_budget=12, max_num_seqs=4)
        for req_id in "abcd":
            submit(scheduler, req_id, 9)

        scheduled, _ = scheduler.schedule()
        waiting = [job.req_id for job in scheduler.waiting]
        compute(vl, scheduled)
        then, _ = scheduler.schedule()

        assert scheduled == {"a": 5, "b": 5, "c": 2}
        assert waiting == ["d"]
        assert then == {"a": 4, "b": 4, "c": 4}

    def test_rows(self):
        """No more requests run than there are rows; the next one in line takes the first free."""
        scheduler, vl = make_scheduler(max_num_seqs=2, chunk=20)
        for req_id in "abc":
            submit(scheduler, req_id, 3)

        scheduled, _ = scheduler.schedule()
        compute(vl, scheduled)
        scheduler.finish("a")
        then, _ = scheduler.schedule()

        assert (scheduled, then) == ({"a": 3, "b": 3}, {"b": 1, "c": 3})
        scheduler.check()

    def test_kv_blocks_follow_the_tokens(self):
        """A request gets a block when its next token needs one, and its table names it."""
        scheduler, vl = make_scheduler(chunk=3, block_size=4)
        submit(scheduler, "a", 9)

        counts = []
        for _ in range(4):
            scheduled, _ = scheduler.schedule()
            counts.append(len(scheduler.pool.blocks_of("a")))
            scheduler.check()
            compute(vl, scheduled)

        assert counts == [1, 2, 3, 3]  # tokens [0, 3), [0, 6), [0, 9), [0, 10)

    def test_encode_rows(self):
        """A chunk stops before an item that the rest of the step's encode budget does not hold."""
        scheduler, _ = make_scheduler(encode_rows=6, chunk=20)
        submit(scheduler, "a", 2, make_item("x", (1, 2, 2)), 1)
        submit(scheduler, "b", 2, make_item("y", (1, 2, 2)), 1)

        scheduled, _ = scheduler.schedule()

        assert scheduled == {"a": 7, "b": 2}

    def test_tokens_that_the_encoder_denies_go_to_the_next_in_line(self):
        """What an item leaves of the token budget admits one more request in the same step."""
        scheduler, _ = make_scheduler(encode_rows=4, chunk=6, token_budget=12)
        submit(scheduler, "a", 1, make_item("x", (1, 2, 2)), 1)
        submit(scheduler, "b", 2, make_item("y", (1, 2, 2)))
        submit(scheduler, "c", 9)

        scheduled, _ = scheduler.schedule()

        assert scheduled == {"a": 6, "b": 2, "c": 4}

    def test_one_question_for_all_that_run(self, monkeypatch):
        """The batch is asked once a step for all that run, and once for all newcomers."""
        scheduler, vl = make_scheduler(chunk=4, max_num_seqs=6)
        asked, ask = [], vl.ask
        monkeypatch.setattr(vl, "ask", lambda wanted: asked.append(list(wanted)) or ask(wanted))
        for req_id in "abcd":
            submit(scheduler, req_id, 9)

        compute(vl, scheduler.schedule()[0])
        submit(scheduler, "e", 9)
        scheduler.schedule()

        assert [names for names in asked if names] == [list("abcd"), list("abcd"), list("abcde")]

    def test_no_one_loses_a_cached_item_that_was_promised(self):
        """A request whose hit would cost an earlier one its own waits for the next step.

        The cache holds 6 rows: y and z (2 each). Encoding x (4) evicts one of them, and the step's
        budget (4) leaves nothing to encode it again: of b and c, which hit y and z, one waits.
        """
        x, y, z = (make_item(name, (1, h, 2)) for name, h in (("x", 2), ("y", 1), ("z", 1)))
        prompts = {
            "first": make_prompt(1, y, 1, z, 1),
            "a": make_prompt(1, x, 1),
            "b": make_prompt(1, y, 1),
            "c": make_prompt(1, z, 1),
        }
        arrivals = dict.fromkeys("abc", 9)
        work = make_workload(
            prompts, max_tokens=1, arrivals=arrivals, cache_bytes=6 * ROW_BYTES, encode_rows=4
        )

        outcome = run(work)

        assert outcome.verified == list(prompts)


class TestRefusals:
    def test_out_of_blocks_for_one_request(self):
        """A request that needs more blocks than the pool has is refused at the door."""
        scheduler, _ = make_scheduler(kv_blocks=3, block_size=4)

        with pytest.raises(
            OutOfBlocks, match=r"'a': needs up to 4 KV blocks of 4 tokens; there are 3"
        ) as caught:
            submit(scheduler, "a", 9, max_tokens=5)

        assert caught.value.setting == "kv_blocks"
        assert not scheduler.has_work

    def test_the_last_token_needs_no_block(self):
        """The last token that is generated is never computed: 9 + 4 - 1 tokens fill 3 blocks."""
        work = make_workload({"a": make_prompt(9)}, kv_blocks=3, block_size=4, max_tokens=4)

        assert run(work).verified == ["a"]

    def test_first_chunk_larger_than_the_pool(self):
        """A first chunk that the whole pool cannot hold is refused; it does not wait for ever."""
        work = make_workload(
            {"a": make_prompt(20), "b": make_prompt(3)}, kv_blocks=1, block_size=8, chunk=16
        )

        outcome = run(work)

        assert isinstance(outcome.results["a"].error, OutOfBlocks)
        assert outcome.verified == ["b"]

    @pytest.mark.parametrize("blocks", [1, 20])
    def test_prompt_longer_than_max_model_len(self, blocks):
        """A prompt that is too long names ``max_model_len``, however few the blocks."""
        work = make_workload(
            {"a": make_prompt(161), "b": make_prompt(3)}, kv_blocks=blocks, max_model_len=160
        )

        outcome = run(work)

        assert str(outcome.results["a"].error) == (
            "request 'a': has 161 prompt tokens; expected 1..160 (setting: max_model_len)"
        )
        assert outcome.verified == ["b"]


class TestPreemption:
    def test_the_latest_arrival_gives_way(self):
        """When blocks run out the latest arrival leaves, and is the first to come back."""
        scheduler, vl = make_scheduler(kv_blocks=4, block_size=4, chunk=8)
        for req_id in "abc":
            submit(scheduler, req_id, 4)
        compute(vl, scheduler.schedule()[0])  # one block each

        scheduled, _ = scheduler.schedule()  # a and b need a second one; one is free

        assert scheduled == {"a": 1, "b": 1}
        assert [job.req_id for job in scheduler.waiting] == ["c"]
        assert (vl.batch.preempted, scheduler.num_preemptions) == (("c",), 1)
        scheduler.check()

    def test_nobody_is_admitted_in_a_step_that_preempts(self):
        """Blocks that were just taken from a request do not go to the next in line."""
        scheduler, vl = make_scheduler(kv_blocks=3, block_size=4, chunk=8)
        submit(scheduler, "a", 4)
        submit(scheduler, "b", 8)
        compute(vl, scheduler.schedule()[0])  # a has one block, b two
        submit(scheduler, "c", 1, max_tokens=1)

        scheduled, _ = scheduler.schedule()  # a needs a second one

        assert scheduled == {"a": 1}
        assert [job.req_id for job in scheduler.waiting] == ["b", "c"]

    def test_a_request_can_preempt_only_itself_or_later_ones(self):
        """The earliest arrival is never preempted for another's blocks."""
        prompts = {req_id: make_prompt(9) for req_id in "abcd"}
        work = make_workload(prompts, kv_blocks=9, block_size=2, chunk=3, max_tokens=6)
        seen = []

        outcome = run(work, on_step=lambda runner: seen.append("a" in runner.vl.batch.preempted))

        assert outcome.runner.scheduler.num_preemptions > 0
        assert outcome.verified == list("abcd")
        assert not any(seen)

    def test_preempted_in_the_middle_of_an_item(self):
        """A request preempted inside an item finds or encodes its features again."""
        x = make_item("x", (1, 4, 4))
        prompts = {"a": make_prompt(16), "b": make_prompt(2, x, 2)}
        work = make_workload(prompts, kv_blocks=14, block_size=2, chunk=1, max_tokens=8)
        reached = set()

        def watch(runner):
            assert_consistent(runner)
            if "b" in runner.vl.batch.preempted:
                reached.update(number for r, number in runner.counters.cut_items if r == "b")

        outcome = run(work, on_step=watch)

        assert outcome.verified == ["a", "b"]
        assert reached == {0}
        assert_nothing_left(outcome.runner)


class TestNoLivelock:
    def test_two_requests_hold_the_cache_against_each_other(self):
        """The earliest arrival gets what later ones hold and do not need at once.

        Both have encoded 3 rows that they need again at their end, and need 8 more of a cache of
        10: what each could give up by itself is too little.
        """
        first, middle, end = (1, 1, 3), (1, 2, 4), (1, 1, 3)
        prompts = {
            r: make_prompt(1, make_item(r, first), 1, make_item(r * 2, middle), 1,
                           make_item(r, end), 1)
            for r in "ab"
        }  # fmt: skip
        work = make_workload(
            prompts, cache_bytes=10 * ROW_BYTES, encode_rows=10, chunk=5, token_budget=20
        )

        outcome = run(work, on_step=assert_consistent)

        assert outcome.verified == ["a", "b"]
        assert_nothing_left(outcome.runner)

    def test_cache_that_holds_one_of_two_items(self):
        """A request whose items do not fit the cache together takes them one after the other."""
        items = [make_item(name, (1, 2, 4)) for name in "xy"]
        prompts = {r: make_prompt(1, *items, 1, *items) for r in "ab"}
        work = make_workload(prompts, cache_bytes=10 * ROW_BYTES, encode_rows=8, chunk=30)

        outcome = run(work, on_step=assert_consistent)

        assert outcome.verified == ["a", "b"]
        assert_nothing_left(outcome.runner)

    def test_newcomers_do_not_starve_the_earliest(self):
        """Cache space goes to the earliest arrival first, however many come after it.

        ``big`` needs the whole cache once it is past its text. A stream of newcomers with small
        items, each slow to leave, would always hold some of it.
        """
        prompts = {"big": make_prompt(4, make_item("big", (1, 2, 4)), 1)}
        prompts |= {f"s{n}": make_prompt(make_item(f"s{n}", (1, 1, 3)), 3) for n in range(20)}
        arrivals = {f"s{n}": n for n in range(20)}
        work = make_workload(
            prompts, arrivals=arrivals, chunk=1, token_budget=8, max_num_seqs=4,
            cache_bytes=8 * ROW_BYTES, encode_rows=8, kv_blocks=40,
        )  # fmt: skip

        outcome = run(work, on_step=assert_consistent)

        assert outcome.verified == list(prompts)
        first_tokens = {r: result.steps[0] for r, result in outcome.results.items()}
        assert first_tokens["big"] == 12  # one token a step: never held up

    def test_admission_is_in_order_of_arrival(self):
        """A short request does not overtake a long one that waits for blocks."""
        prompts = {"a": make_prompt(8), "long": make_prompt(8), "short": make_prompt(1)}
        work = make_workload(
            prompts, kv_blocks=3, block_size=4, chunk=8, max_tokens=4, max_num_seqs=3
        )

        outcome = run(work)

        starts = {r: result.steps[0] for r, result in outcome.results.items()}
        assert starts["a"] < starts["long"] <= starts["short"]
        assert outcome.verified == list(prompts)


def test_check_names_what_disagrees():
    """Blocks without an owner and tables with other blocks are found."""
    scheduler, _ = make_scheduler()
    submit(scheduler, "a", 9)
    scheduler.schedule()
    scheduler.check()

    scheduler.pool.take("ghost", 2)
    with pytest.raises(InvariantBroken, match="4 KV blocks are taken; the running have"):
        scheduler.check()
    scheduler.pool.give_back("ghost")
    scheduler._vl.batch.write("a", "block_table", [5, 6])
    with pytest.raises(InvariantBroken, match=r"'a': block table \[5 6\]; expected \(0, 1\)"):
        scheduler.check()
