"""What the MTP drafter hands to its head, beside a head that is run over each request alone.

Head and engine are hashes: any wrong token, feature, position, hidden state, KV place or context
changes every draft after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hash_engine import _SALT, HashEngine, _mix, _running_hash
from made_runs import (
    Workload,
    assert_nothing_left,
    make_item,
    make_prompt,
    make_workload,
    random_workload,
    run,
)

from vlbatch.errors import InvalidField
from vlbatch.runner import MediaPatches, Prompt, StepInputs
from vlbatch.runner.alone import rotary_positions
from vlbatch.runner.drafting import MtpDrafter
from vlbatch.runner.outputs import StepOutputs
from vlbatch.runner.state import HostBatch

Hidden = npt.NDArray[np.uint64]
NUM_GROUPS, RUNS_PER_GROUP = 4, 12


class HiddenHashEngine(HashEngine):
    """A hash engine that gives its hidden states."""

    _hidden: Hidden

    def forward_hidden(self, inputs: StepInputs) -> tuple[npt.NDArray[np.float32], Hidden]:
        self.forward(replace(inputs, logit_tokens=np.arange(inputs.token_ids.size)))
        hidden = self._hidden
        return self._logits(hidden[inputs.logit_tokens]), hidden

    def _logits(self, hidden: Hidden) -> npt.NDArray[np.float32]:
        self._hidden = hidden
        return super()._logits(hidden)


class HashHead:
    """A draft head over one more layer of hashes, at the engine's KV places."""

    def __init__(self, engine: HashEngine) -> None:
        self._engine = engine
        noise = np.random.default_rng(1).integers(0, 2**63, engine._keys.shape[1])
        self._rows = noise.astype(np.uint64)
        self.seen: list[StepInputs] = []

    def forward(self, inputs: StepInputs, hidden: Hidden) -> tuple[npt.NDArray[np.float32], Hidden]:
        self.seen.append(inputs)
        assert len(hidden) == inputs.token_ids.size
        there = np.diff(inputs.query_start) > 0
        start = np.concatenate([[0], np.cumsum(np.diff(inputs.query_start)[there])])
        compact = replace(
            inputs,
            query_start=start.astype(np.int32),
            computed=inputs.computed[there],
            block_tables=inputs.block_tables[there],
        )
        keys = _mix(self._engine._embed(compact) ^ _mix(hidden * _SALT))
        for axis in inputs.positions.astype(np.uint64):
            keys = _mix(keys * _SALT + axis)
        rows = self._engine._slots_by_row(compact)
        written = np.concatenate([slots[done:] for slots, done in rows])
        assert len(np.unique(written)) == len(written) == len(keys), "two rows in one KV slot"
        self._rows[written] = keys
        context = [_running_hash(self._rows[slots])[done:] for slots, done in rows]
        states = _mix(keys ^ np.concatenate(context))[inputs.logit_tokens]
        return self._engine._logits(states), states

    def take(self, hidden: Hidden, rows: npt.NDArray[np.int64]) -> Hidden:
        return hidden[rows]


def draft_alone(
    engine: HiddenHashEngine, prompt: Prompt, known: list[int], count: int
) -> list[int]:
    """Draft with a fresh engine and head: the whole request as one row, then token by token."""
    head = HashHead(engine)
    positions = rotary_positions(prompt, 2.0)
    offset = max(map(max, positions)) + 1 - len(positions)
    positions += [(i + offset,) * 3 for i in range(len(positions), len(known) + count)]
    places = [i for item in prompt.items for i in range(item.offset, item.stop)]
    features: list[Any] = []
    for item in prompt.items:
        assert isinstance(item.payload, MediaPatches)
        features += engine.encode([item.payload])
    rows = np.concatenate(features) if features else np.zeros((0, 4), dtype=np.float32)

    def inputs(ids: list[int], first: int, ahead: int) -> StepInputs:
        """Tokens ``ids``; features of those that are placeholders, ``ahead`` places earlier."""
        mine = [n for n, p in enumerate(places) if first <= p - ahead < first + len(ids)]
        return StepInputs(
            token_ids=np.array(ids, dtype=np.int64),
            positions=np.array(positions[first : first + len(ids)]).T,
            query_start=np.array([0, len(ids)], dtype=np.int32),
            computed=np.array([first], dtype=np.int32),
            block_tables=np.arange(len(known) + count, dtype=np.int32)[np.newaxis],
            feature_tokens=np.array([places[n] - ahead - first for n in mine], dtype=np.int64),
            features=[rows[mine]] if mine else [],
            logit_tokens=np.array([len(ids) - 1]),
        )

    _, hidden = engine.forward_hidden(inputs(known[:-1], 0, 0))
    logits, state = head.forward(inputs(known[1:], 0, 1), hidden)
    drafts: list[int] = []
    while True:
        token = int(logits[0].argmax())
        if token == engine.eos_token_id:
            return drafts
        drafts.append(token)
        if len(drafts) == count:
            return drafts
        logits, state = head.forward(inputs([token], len(known) - 2 + len(drafts), 1), state)


class Checked(MtpDrafter):
    """Compares every draft with the one that the head gives the request alone."""

    def __init__(self, work: Workload, engine: HiddenHashEngine) -> None:
        settings = work.settings
        super().__init__(
            HashHead(engine), vocab_size=engine.vocab_size, eos_token_id=engine.eos_token_id,
            num_drafts=settings.num_drafts, block_size=settings.block_size,
        )  # fmt: skip
        self._work = work
        self._engine = engine
        self._blind: set[str] = set()  # requests that the drafter read a placeholder of
        self.events: Counter[str] = Counter()

    def draft(
        self, vl: HostBatch, outputs: StepOutputs, most: Mapping[str, int]
    ) -> dict[str, list[int]]:
        drafts = super().draft(vl, outputs, most)
        assert drafts.keys() == most.keys()
        assert outputs.ahead is not None
        for token in outputs.ahead.skipped.tolist():
            self._blind.add(outputs.order.req_ids[int(outputs.order.row_of_token[token])])
        for req_id, tokens in drafts.items():
            prompt = self._work.prompts[req_id]
            assert isinstance(prompt, Prompt)
            known: list[int] = vl.batch.read(req_id, "token_ids").tolist()  # type: ignore[attr-defined]
            blocks = vl.batch.length(req_id, "block_table")
            room = blocks * self._work.settings.block_size - (len(known) - 1) + 1
            count = max(1, min(most[req_id], room))
            fresh = type(self._engine)(len(known) + count, 1)
            alone = draft_alone(fresh, prompt, known, count)
            assert tokens == alone or req_id in self._blind, (req_id, known)
            self.events["blind"] += req_id in self._blind
            self.events["drafts"] += len(tokens)
            self.events["long"] += len(tokens) > 1
            self.events["short of blocks"] += room < most[req_id]
            self.events["early end"] += len(tokens) < count
            self.events["with media"] += bool(prompt.items) and len(tokens) > 0
        return drafts


def speculating(work: Workload, **settings: Any) -> Workload:
    return replace(work, settings=replace(work.settings, speculative="mtp", **settings))


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_drafts_are_those_of_the_request_alone(seed: int, group: int) -> None:
    """Through chunks, preemption, overlap and rejects, drafts are the head's for that request."""
    events: Counter[str] = Counter()
    for number in range(RUNS_PER_GROUP):
        rng = np.random.default_rng([seed, 9, group, number])
        work = speculating(
            random_workload(rng),
            draft_tokens=int(rng.integers(1, 5)),
            overlap=int(rng.integers(0, 3)),
        )
        work = speculating(work, cache_bytes=4 * work.settings.cache_bytes)
        engine = HiddenHashEngine(work.settings.kv_blocks, work.settings.block_size)
        drafter = Checked(work, engine)

        outcome = run(work, engine=engine, drafter=drafter)

        case = f"VLBATCH_SEED={seed}, {group=}, {number=}"
        assert outcome.mismatches == [], case
        assert len(outcome.verified) == len(work.requests), case
        assert_nothing_left(outcome.runner)
        events += drafter.events
        events["preemptions"] += outcome.runner.scheduler.num_preemptions
    assert min(events[name] for name in ("drafts", "long", "early end", "with media")) > 0
    assert events["preemptions"] > 0, f"VLBATCH_SEED={seed}, {group=}: {events}"
    assert events["blind"] < 0.3 * events["drafts"], f"VLBATCH_SEED={seed}, {group=}: {events}"


def test_blocks_limit_a_draft() -> None:
    """Without a free block a draft is as long as the request's own blocks allow."""
    prompts = {"a": make_prompt(4, seed=1), "b": make_prompt(5, seed=2)}
    work = make_workload(prompts, max_tokens=12, block_size=2, kv_blocks=8)
    work = speculating(work, draft_tokens=4)

    class Endless(HiddenHashEngine):
        def _logits(self, hidden: Hidden) -> npt.NDArray[np.float32]:
            logits = super()._logits(hidden)
            logits[:, self.eos_token_id] = -1
            return logits

    engine = Endless(8, 2)
    drafter = Checked(work, engine)
    run(work, engine=engine, drafter=drafter)

    assert drafter.events["short of blocks"] > 0
    assert drafter.events["long"] > 0


def test_chunks_without_drafts_reach_the_head() -> None:
    """The head computes every chunk of a prompt, also while nobody is to draft."""
    work = make_workload(
        {"a": make_prompt(3, make_item("x", (1, 2, 3)), 4)},
        max_tokens=4, chunk=4, block_size=4, kv_blocks=8, cache_bytes=1024,
    )  # fmt: skip
    work = speculating(work, draft_tokens=2)
    engine = HiddenHashEngine(8, 4)
    drafter = Checked(work, engine)
    run(work, engine=engine, drafter=drafter)
    seen = drafter._head.seen  # type: ignore[attr-defined]  # of a HashHead

    chunks = [(int(s.computed[0]), s.token_ids.size, s.logit_tokens.size) for s in seen]
    assert chunks[:4] == [(0, 4, 0), (4, 4, 0), (8, 4, 0), (12, 1, 1)]


def test_engine_refuses_an_empty_drafter_step() -> None:
    """A sentinel at a place without a feature is an error of the drafter, not a stray read."""
    work = speculating(make_workload({"a": make_prompt(4)}, max_tokens=4), draft_tokens=2)
    engine = HiddenHashEngine(work.settings.kv_blocks, work.settings.block_size)
    drafter = Checked(work, engine)
    drafter._vocab_size = 2
    with pytest.raises(InvalidField, match=r"takes no feature; expected an id in \[0, 2\)"):
        run(work, engine=engine, drafter=drafter)
