"""The tiny model with drafts: the same tokens, whoever drafts and however late outputs are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hash_engine import HashEngine
from model_engines import FIXTURES, MODEL, make_test_engine

from vlbatch.errors import InvalidSetting
from vlbatch.runner import (
    Drafter,
    PromptBuilder,
    Request,
    Runner,
    RunSettings,
    compare,
    load_requests,
    make_answerer,
    make_drafter,
)
from vlbatch.runner.drafting import MtpDrafter

FEW_BLOCKS: dict[str, Any] = {
    "kv_blocks": 22, "block_size": 4, "max_num_seqs": 6, "chunk": 5, "cache_bytes": 1 << 14,
    "encode_rows": 32,
}  # fmt: skip
"""Settings under which the requests below preempt each other."""

RunIt = Callable[..., Runner]


@pytest.fixture(scope="module")
def engine() -> Any:
    """The engine of this process; see ``model_engines``."""
    return make_test_engine(22, 4)


@pytest.fixture(scope="module")
def prompts() -> PromptBuilder:
    pytest.importorskip("tokenizers", reason="needs the run extra")
    return PromptBuilder(MODEL)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Images, clips, both, one image twice, text alone; all at once."""
    wanted = ("r01", "r02", "r03", "r04", "r08", "r10", "r14", "r21")
    every = {request.req_id: request for request in load_requests(FIXTURES / "requests.jsonl")}
    return [
        Request(r.req_id, r.prompt, r.images, r.videos, r.max_tokens, 0, r.answer)
        for r in map(every.__getitem__, wanted)
    ]


@pytest.fixture(scope="module")
def run_it(engine: Any, prompts: PromptBuilder, requests: list[Request]) -> RunIt:
    """Run the requests under few blocks, with these settings."""

    def call(*, drafter: Drafter | None = None, **settings: Any) -> Runner:
        limits = RunSettings(**FEW_BLOCKS, **settings)
        chosen = drafter or make_drafter(limits, engine, prompts, MODEL)
        runner = Runner(engine, prompts, limits, drafter=chosen)
        runner.run(requests)
        runner.vl.check()
        runner.scheduler.check()
        return runner

    return call


def tokens_of(runner: Runner) -> dict[str, list[int]]:
    assert [r.error for r in runner.results] == [None] * len(runner.results)
    return {result.request.req_id: result.tokens for result in runner.results}


@pytest.fixture(scope="module")
def reference(requests: list[Request]) -> dict[str, list[int]]:
    """What transformers generates for each request alone."""
    answers: Any = json.loads((FIXTURES / "reference.json").read_text())
    return {r.req_id: answers[r.req_id]["token_ids"] for r in requests}


@pytest.mark.parametrize("overlap", [0, 1])
def test_without_drafts(run_it: RunIt, reference: dict[str, list[int]], overlap: int) -> None:
    """The baseline of this file: what transformers says, with preemptions on the way."""
    runner = run_it(overlap=overlap)

    assert tokens_of(runner) == reference
    assert runner.scheduler.num_preemptions > 0
    assert runner.counters.drafted == 0


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("draft_tokens", [1, 2, 4])
@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_same_tokens(
    run_it: RunIt, reference: dict[str, list[int]], method: str, draft_tokens: int, overlap: int
) -> None:
    """Speculation changes no token, on images and clips, with few KV blocks."""
    runner = run_it(speculative=method, draft_tokens=draft_tokens, overlap=overlap)

    assert tokens_of(runner) == reference
    assert runner.scheduler.num_preemptions > 0
    assert 0 < runner.counters.accepted <= runner.counters.drafted
    if method == "mtp":
        assert runner.counters.accepted >= 0.6 * runner.counters.drafted


class Unreliable(MtpDrafter):
    """A head's drafts, of which every third is replaced by a wrong digit."""

    num_wrong = 0

    def draft(self, *args: Any) -> dict[str, list[int]]:
        drafts = super().draft(*args)
        for req_id, tokens in drafts.items():
            for place in range(len(tokens)):
                self.num_wrong += 1
                if self.num_wrong % 3 == 0:
                    drafts[req_id][place] = 6 + (tokens[place] + 1) % 10
        return drafts


@pytest.mark.parametrize("overlap", [0, 1])
def test_rejected_drafts(
    engine: Any,
    prompts: PromptBuilder,
    run_it: RunIt,
    reference: dict[str, list[int]],
    overlap: int,
) -> None:
    """Rejected drafts leave nothing in the caches: same tokens and logits, later drafts right."""
    drafter = Unreliable(
        engine.make_draft_head(MODEL), vocab_size=engine.vocab_size,
        eos_token_id=prompts.eos_token_id, num_drafts=4, block_size=4,
    )  # fmt: skip
    runner = run_it(drafter=drafter, speculative="mtp", draft_tokens=4, overlap=overlap)
    counters = runner.counters

    assert tokens_of(runner) == reference
    assert counters.drafted - counters.accepted > 3
    assert counters.accepted > 3
    settings = RunSettings(**FEW_BLOCKS)
    verified, mismatches = compare(runner.results, make_answerer(engine, prompts, settings))
    assert mismatches == []
    assert len(verified) == len(reference)


def test_fewer_steps(run_it: RunIt) -> None:
    """Accepted drafts save steps."""
    steps = [
        run_it(**settings).counters.steps
        for settings in ({}, {"speculative": "mtp", "draft_tokens": 4})
    ]
    assert steps[1] < steps[0]


def test_an_engine_without_hidden_states(prompts: PromptBuilder) -> None:
    """An engine that gives no hidden states can have no draft head; it is refused by name."""
    settings = RunSettings(speculative="mtp")
    with pytest.raises(InvalidSetting, match="HashEngine can have no draft head") as caught:
        make_drafter(settings, HashEngine(4, 4), prompts, MODEL)

    assert caught.value.setting == "speculative"
