"""Speculative runs, with and without overlap, beside each request alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hash_engine import HashEngine
from made_runs import (
    MadePrompts,
    Workload,
    assert_consistent,
    assert_nothing_left,
    make_item,
    make_prompt,
    make_workload,
    random_workload,
    run,
)

from vlbatch.errors import InvalidSetting
from vlbatch.runner import Drafter, Prompt, Runner, RunSettings, StepInputs
from vlbatch.runner.alone import answer_alone
from vlbatch.runner.drafting import NgramDrafter
from vlbatch.runner.outputs import StepOutputs
from vlbatch.runner.state import HostBatch

NUM_GROUPS, RUNS_PER_GROUP = 6, 20
METHOD: Any = "ngram"  # any that drafts: tests bring drafters of their own


class Guesses(Drafter):
    """Drafts that are right now and then: it knows the answers.

    Args:
        truth: request -> the tokens that it generates alone.
        prompt_lens: request -> tokens of its prompt.
        rng: decides what is drafted wrong.
        right: chance that a drafted token is right.

    Attributes:
        whole: draft as many tokens as are asked for, not a random number.
        asked: number of tokens asked for -> how often.

    """

    lookahead = 1
    num_ahead = 2

    def __init__(
        self,
        truth: Mapping[str, list[int]],
        prompt_lens: Mapping[str, int],
        rng: np.random.Generator,
        right: float,
    ) -> None:
        self._truth = truth
        self._prompt_lens = prompt_lens
        self._rng = rng
        self._right = right
        self.whole = False
        self.asked: Counter[int] = Counter()

    def draft(
        self, vl: HostBatch, outputs: StepOutputs, most: Mapping[str, int]
    ) -> dict[str, list[int]]:
        drafts = {}
        for req_id, count in most.items():
            self.asked[count] += 1
            done = vl.batch.length(req_id, "token_ids") - self._prompt_lens[req_id]
            length = count if self.whole else int(self._rng.integers(0, count + 1))
            drafts[req_id] = [
                token if self._rng.random() < self._right else self._wrong(token)
                for token in self._truth[req_id][done : done + length]
            ]
        return drafts

    def _wrong(self, token: int) -> int:
        return (token + int(self._rng.integers(1, HashEngine.vocab_size))) % HashEngine.vocab_size


def answers_alone(work: Workload, engine: HashEngine | None = None) -> dict[str, list[int]]:
    """The tokens of each request by itself, on an engine of their own."""
    engine, prompts = engine or work.engine(), MadePrompts(work.prompts)
    return {
        request.req_id: answer_alone(
            engine,
            prompts.build(request),
            max_tokens=request.max_tokens,
            eos_token_id=prompts.eos_token_id,
            max_model_len=work.settings.max_model_len,
            tokens_per_second=prompts.tokens_per_second,
            kv_blocks=work.settings.kv_blocks,
        ).tokens
        for request in work.requests
    }


def guesses(
    work: Workload,
    rng: np.random.Generator,
    *,
    right: float = 0.7,
    engine: HashEngine | None = None,
) -> Guesses:
    """A drafter for a workload."""
    lens = {r: len(p.token_ids) for r, p in work.prompts.items() if isinstance(p, Prompt)}
    return Guesses(answers_alone(work, engine), lens, rng, right)


def speculating(work: Workload, **settings: Any) -> Workload:
    """The workload with these settings, and drafts."""
    return replace(work, settings=replace(work.settings, speculative=METHOD, **settings))


class Watch:
    """Checks a run after each step, and that it comes to an end."""

    def __init__(self, work: Workload) -> None:
        lens = [len(p.token_ids) for p in work.prompts.values() if isinstance(p, Prompt)]
        tokens = sum(lens) + sum(request.max_tokens for request in work.requests)
        # The earliest arrival computes a token or more, then waits for its outputs at most.
        self.most_steps = tokens * (1 + work.settings.overlap)

    def __call__(self, runner: Runner) -> None:
        assert_consistent(runner)
        assert runner.counters.steps <= self.most_steps, "no end in sight"
        for req_id in runner.vl.batch.req_ids:
            *_, computed, confirmed = runner.vl.batch.progress.counts(
                runner.vl.batch.slot_of(req_id)
            )
            known = runner.vl.batch.length(req_id, "token_ids")
            assert confirmed <= computed
            assert confirmed < known, f"{req_id}: a token is confirmed that nobody knows"


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_batched_equals_alone(seed: int, group: int) -> None:
    """Whatever is drafted and however late outputs are read, each request gets what it gets alone.

    Same tokens, logits and fields; nothing of a rejected draft or a late output is left.
    """
    events: Counter[str] = Counter()
    for number in range(RUNS_PER_GROUP):
        case = f"VLBATCH_SEED={seed}, {group=}, {number=}"
        rng = np.random.default_rng([seed, 7, group, number])
        work = speculating(
            random_workload(rng),
            draft_tokens=int(rng.integers(1, 5)),
            overlap=int(rng.integers(0, 3)),
        )
        drafter = guesses(work, rng, right=rng.choice([0.0, 0.5, 0.9, 1.0]))

        outcome = run(work, drafter=drafter, on_step=Watch(work))

        assert outcome.mismatches == [], case
        assert [r.error for r in outcome.results.values() if r.error] == [], case
        assert outcome.verified == [request.req_id for request in work.requests], case
        assert max(drafter.asked, default=0) <= work.settings.num_drafts, case
        assert_nothing_left(outcome.runner)
        counters = outcome.runner.counters
        events += Counter(
            drafted=counters.drafted,
            accepted=counters.accepted,
            rejected=counters.drafted - counters.accepted,
            preemptions=outcome.runner.scheduler.num_preemptions,
            moved=counters.rows_moved,
        )
    assert min(events.values()) > 0, f"VLBATCH_SEED={seed}, {group=}: {events}"
    assert len(events) == 5, f"VLBATCH_SEED={seed}, {group=}: {events}"


@pytest.mark.parametrize("group", range(3))
def test_overlap_alone(seed: int, group: int) -> None:
    """Late outputs without drafts: extra steps of requests that have ended are discarded."""
    extra = 0
    for number in range(RUNS_PER_GROUP):
        case = f"VLBATCH_SEED={seed}, {group=}, {number=}"
        rng = np.random.default_rng([seed, 8, group, number])
        work = random_workload(rng)
        work.settings = replace(work.settings, overlap=int(rng.integers(1, 3)))

        outcome = run(work, on_step=Watch(work))

        assert outcome.mismatches == [], case
        assert len(outcome.verified) == len(work.requests), case
        assert_nothing_left(outcome.runner)
        plain = run(replace(work, settings=replace(work.settings, overlap=0)))
        extra += outcome.runner.counters.tokens - plain.runner.counters.tokens
    assert extra > 0


def one_request(max_tokens: int, **settings: Any) -> Workload:
    """A long answer of one request, whose end token is never said."""
    work = make_workload(
        {"a": make_prompt(3, make_item("x", (1, 2, 2)), 4)},
        max_tokens=max_tokens, block_size=4, kv_blocks=16, cache_bytes=1024,
    )  # fmt: skip
    return speculating(work, **settings)


class Endless(HashEngine):
    """Never ends an answer by itself."""

    def forward(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        logits = super().forward(inputs)
        logits[:, self.eos_token_id] = -1
        return logits


@pytest.mark.parametrize(
    ("draft_tokens", "right", "steps"), [(1, 1.0, 7), (3, 1.0, 4), (4, 1.0, 4), (3, 0.0, 13)]
)
def test_steps_saved(draft_tokens: int, right: float, steps: int) -> None:
    """With right drafts 13 tokens take 1 + ceil(12 / (1 + k)) steps, with wrong ones 13."""
    work = one_request(13, draft_tokens=draft_tokens)
    drafter = guesses(work, np.random.default_rng(0), right=right, engine=Endless(16, 4))
    drafter.whole = True
    outcome = run(work, engine=Endless(16, 4), drafter=drafter)

    assert outcome.mismatches == []
    counters = outcome.runner.counters
    assert counters.steps == steps
    assert counters.accepted == (counters.drafted if right else 0)
    assert len(set(outcome.results["a"].steps)) == 13 - counters.accepted


def test_no_draft_past_the_last_token() -> None:
    """A request never computes more tokens than it needs, so it fits blocks that just hold it."""
    work = one_request(6, draft_tokens=4, kv_blocks=4)  # 11 + 6 - 1 = 16 tokens
    outcome = run(work, engine=Endless(4, 4), drafter=guesses(work, np.random.default_rng(1)))

    assert outcome.mismatches == []
    assert outcome.runner.scheduler.num_preemptions == 0


def test_nobody_is_preempted_for_a_draft() -> None:
    """Where blocks are short a decode goes on with fewer drafts, and everybody stays."""
    prompts = {"a": make_prompt(8, seed=1), "b": make_prompt(4, seed=2)}
    work = make_workload(prompts, max_tokens=6, block_size=1, kv_blocks=14)
    work.requests[0] = replace(work.requests[0], max_tokens=2)
    assert run(work, engine=Endless(14, 1)).runner.scheduler.num_preemptions == 0
    work = speculating(work, draft_tokens=4)
    drafter = guesses(work, np.random.default_rng(1), right=1.0, engine=Endless(14, 1))
    drafter.whole = True
    outcome = run(work, engine=Endless(14, 1), drafter=drafter)

    assert outcome.mismatches == []
    assert outcome.runner.scheduler.num_preemptions == 0
    assert outcome.runner.counters.accepted == outcome.runner.counters.drafted > 0


def test_drafts_are_used_once() -> None:
    """Drafts that were computed, or left out for want of room, are not computed again later."""
    work = one_request(12, draft_tokens=3)

    class Once(Guesses):
        def draft(self, vl: Any, outputs: Any, most: Any) -> dict[str, list[int]]:
            return {} if self.asked else super().draft(vl, outputs, most)

    truth = answers_alone(work, Endless(16, 4))
    drafter = Once(truth, {"a": 11}, np.random.default_rng(0), 0.0)
    drafter.whole = True
    outcome = run(work, engine=Endless(16, 4), drafter=drafter)

    assert outcome.mismatches == []
    assert outcome.runner.counters.drafted == 3


def test_extra_step_after_the_end() -> None:
    """With overlap an ended request has more steps under way; nobody sees their outputs."""
    work = make_workload({"a": make_prompt(5)}, max_tokens=30, kv_blocks=16)
    alone = answers_alone(work)["a"]
    assert 1 < len(alone) < 30
    for overlap in (0, 1, 2):
        work.settings = replace(work.settings, overlap=overlap)
        outcome = run(work)
        assert outcome.results["a"].tokens == alone
        assert outcome.runner.counters.steps == len(alone) + overlap


def test_nothing_runs_past_max_tokens() -> None:
    """An end that is known beforehand, by number, costs no extra step."""
    work = make_workload({"a": make_prompt(5)}, max_tokens=7, kv_blocks=16)
    work.settings = replace(work.settings, overlap=2)
    outcome = run(work, engine=Endless(16, 8))

    assert outcome.runner.counters.steps == 7
    assert len(outcome.results["a"].tokens) == 7


def test_outputs_find_requests_after_reorders() -> None:
    """Outputs are read when rows have moved, and still reach their own request."""
    prompts = {f"r{n}": make_prompt(3 + 5 * (n % 2), seed=n) for n in range(6)}
    work = make_workload(
        prompts, max_tokens=9, kv_blocks=60, chunk=4, max_num_seqs=4, token_budget=20,
        arrivals={f"r{n}": n for n in range(6)}, overlap=2,
    )  # fmt: skip
    outcome = run(work, engine=Endless(60, 8))

    assert outcome.mismatches == []
    assert outcome.runner.counters.rows_moved > 5


def test_ngram_drafter() -> None:
    """A request that repeats itself is drafted from its own words, never an excluded one."""
    work = make_workload({"a": make_prompt(4)}, max_tokens=30, kv_blocks=16)
    work = speculating(work, draft_tokens=3)

    class Repeats(Endless):
        def forward(self, inputs: Any) -> Any:
            logits = super().forward(inputs)
            logits[:] = 0
            following = inputs.token_ids[inputs.logit_tokens] % 5 + 8  # 8 9 10 11 12 8 9 ..
            logits[np.arange(len(logits)), following] = 1
            return logits

    outcome = run(work, engine=Repeats(16, 8), drafter=NgramDrafter({1}))
    assert outcome.mismatches == []
    counters = outcome.runner.counters
    assert counters.accepted > 15
    assert counters.steps == 30 - counters.accepted
    outcome = run(work, engine=Repeats(16, 8), drafter=NgramDrafter({1, 8, 9, 10, 11, 12}))

    assert outcome.runner.counters.drafted == 0


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"draft_tokens": 0}, "draft_tokens"),
        ({"overlap": -1}, "overlap"),
        ({"overlap": 3}, "overlap"),
        ({"speculative": "eagle"}, "speculative"),
    ],
)
def test_bad_settings(settings: dict[str, Any], setting: str) -> None:
    """Settings out of range are refused by name."""
    with pytest.raises(InvalidSetting) as caught:
        RunSettings(**settings)

    assert caught.value.setting == setting


def test_no_drafts_unless_asked_for() -> None:
    """Without a method k is 0, whatever ``draft_tokens`` says."""
    assert RunSettings(draft_tokens=4).num_drafts == 0
    assert RunSettings(draft_tokens=4, speculative=METHOD).num_drafts == 4
