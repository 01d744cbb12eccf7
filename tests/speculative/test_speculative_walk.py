"""Ten thousand random steps of speculation, target and follower beside plain dictionaries.

The model knows each request as a list of tokens. What a token is followed by is a function of all
tokens before it, so a lost, doubled or foreign token changes everything after it. Outputs are read
up to two steps late, as a runner with overlap reads them.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from naive_media import Array, encoded
from naive_requests import SENTINEL, Known, next_token

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
)
from vlbatch.batch import ProposerInputBatch, copied, own, shared
from vlbatch.fields import cumulative, host, per_draft, ragged, row
from vlbatch.order import DECODE, EXTEND, PREFILL
from vlbatch.speculative import (
    DrafterRows,
    accept_greedy,
    following_tokens,
    logit_tokens,
    num_logits,
    shift_tokens,
)

NUM_STEPS = 10_000
CAPACITY, MAX_LEN, MAX_DRAFTS = 5, 48, 3


@dataclass
class InFlight:
    """A step whose outputs are not read yet."""

    order: BatchOrder
    token_ids: Array
    sampled: Array
    requests: dict[str, Known]  # as they were; another object is another life


def encode(tasks: list[EncodeTask]) -> list[tuple[Array]]:
    return [(encoded(task.key.content, task.placed.num_rows),) for task in tasks]


def read_features(inputs: FeatureInputs) -> dict[int, tuple[str, int]]:
    """Token of the step -> key and feature row, from nothing but the arrays."""
    arrays = [np.asarray(array).astype(int).tolist() for array in inputs.arrays()]
    values = [tuple(value) for array in arrays for value in array]
    assert len(values) == len(inputs.tokens)
    names = [int(name).to_bytes(8, "big").strip(b"\0").decode() for name, *_ in values]
    rows = [int(value[1]) for value in values]
    return dict(zip(inputs.tokens.tolist(), zip(names, rows, strict=True), strict=True))


class Walk:
    """The library's objects, the model, and one random action after another."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        choose = self.choose
        target = [
            ragged("token_ids", MAX_LEN + 1, residency="slots"),
            ragged("blocks", MAX_LEN, "int32", default=-1, residency="rows", on_preempt="reset"),
            row("next_token", on_preempt="reset"),
            row("tag"),
            host("note"),
        ]
        self.batch: InputBatch[Any] = InputBatch(
            target,
            backend=NumpyBackend(),
            capacity=CAPACITY,
            max_model_len=MAX_LEN,
            num_drafts=MAX_DRAFTS,
            policy=choose.choice(["split", "two", "arrival"]),
            stable=choose.random() < 0.5,
        )
        self.vl: VLBatch[Any] = VLBatch(
            self.batch,
            FeatureStore(EncoderCache(max_rows=8), encode_rows=8, lookahead=1),
            auto_confirm=False,
        )
        self.draft = ProposerInputBatch(
            self.batch,
            [
                own(per_draft("draft_tokens", default=-1, on_preempt="reset")),
                own(row("num_drafts", dtype="int32", on_preempt="reset")),
                own(row("kept")),
                own(host("memo", residency="rows")),
                own(cumulative("logit_start", num_logits)),
                shared("blocks"),
                copied("tag"),
                copied("token_ids"),
            ],
            backend=NumpyBackend(),
        )
        self.live: dict[str, Known] = {}
        self.preempted: dict[str, Known] = {}
        self.in_flight: deque[InFlight] = deque()
        self.overlap = choose.choice([0, 1, 2])
        self.count = 0
        self.counters = dict.fromkeys(
            ("accepted", "rejected", "rolled_back", "preempted", "moved", "features", "late"), 0
        )

    # -- requests ------------------------------------------------------------------------------
    def add(self) -> None:
        self.count += 1
        choose, req_id = self.choose, f"r{self.count}"
        tokens: list[int] = []
        items = []
        for _ in range(choose.randint(0, 2)):
            tokens += [choose.randint(0, 49) for _ in range(choose.randint(0, 4))]
            length = choose.randint(1, 4)
            items.append(Item(f"i{choose.randint(0, 5)}x{length}", "image", len(tokens), length,
                              grid=(1, 1, length)))  # fmt: skip
            tokens += [SENTINEL] * length
        tokens += [choose.randint(0, 49) for _ in range(choose.randint(1, 5))]
        known = Known(tokens, items, len(tokens))
        known.state = {"tag": self.count, "kept": 0, "memo": None, "copied_tag": self.count}
        known.state |= {"copied_ids": list(tokens), "note": [self.count], "drafts": []}
        self.vl.add(
            req_id,
            prompt_len=len(tokens),
            items=items,
            fields={"token_ids": tokens, "tag": self.count, "note": known.state["note"]},
        )
        self.live[req_id] = known
        if choose.random() < 0.2:
            self.draft.leave(req_id)
            known.member = False

    def remove(self, req_id: str) -> None:
        self.vl.remove(req_id)
        (self.live if req_id in self.live else self.preempted).pop(req_id)

    def preempt(self, req_id: str) -> None:
        """What is in flight is given up: back to what is confirmed, then out."""
        known = self.live.pop(req_id)
        self.counters["preempted"] += 1
        self.vl.confirm(req_id, known.confirmed)
        self.vl.preempt(req_id)
        again = Known(known.tokens, known.items, len(known.tokens), member=known.member)
        again.state = {**known.state, "drafts": []}
        self.preempted[req_id] = again

    def resume(self, req_id: str) -> None:
        self.vl.resume(req_id)
        self.live[req_id] = known = self.preempted.pop(req_id)
        known.state["copied_tag"] = known.state["tag"]
        known.state["copied_ids"] = list(known.tokens)

    def change_requests(self) -> None:
        choose = self.choose
        if len(self.live) < CAPACITY and choose.random() < 0.25:
            if self.preempted and choose.random() < 0.6:
                self.resume(choose.choice(list(self.preempted)))
            else:
                self.add()
        if self.live and choose.random() < 0.04:
            self.preempt(choose.choice(list(self.live)))
        everybody = [*self.live, *self.preempted]
        if everybody and choose.random() < 0.02:
            self.remove(choose.choice(everybody))
        if self.live and choose.random() < 0.03:
            req_id = choose.choice(list(self.live))
            known = self.live[req_id]
            known.state["drafts"] = []
            if known.member:
                self.draft.leave(req_id)
            else:
                self.draft.join(req_id)
                known.state |= {"kept": 0, "memo": None, "copied_tag": known.state["tag"]}
                known.state["copied_ids"] = list(known.tokens)
            known.member = not known.member

    # -- a step --------------------------------------------------------------------------------
    def schedule(self) -> dict[str, int]:
        """Random tokens for random requests, as many as fit."""
        choose, wanted = self.choose, {}
        for req_id in choose.sample(list(self.live), len(self.live)):
            known = self.live[req_id]
            if known.undecided or choose.random() < 0.2:
                continue
            rest = known.prompt_len - known.computed
            room = MAX_LEN - known.computed
            if rest > 0:
                tokens = choose.randint(1, rest)
            elif known.unread:
                tokens = 1  # its newest token is not read yet
            else:
                tokens = 1 + len(known.state["drafts"])
            if min(tokens, room) > 0:
                wanted[req_id] = min(tokens, room)
        fit = self.vl.ask(wanted)
        earliest = next((r for r in self.vl.features.req_ids if r in self.live), None)
        if earliest is not None and self.live[earliest].computed < MAX_LEN:
            assert self.vl.ask({earliest: 1}) == {earliest: 1}, "the earliest can always go on"
        return {req_id: n for req_id, n in fit.items() if n > 0}

    def step(self) -> None:
        scheduled = self.schedule()
        if not scheduled:
            self.read(keep=0)
            return
        vl, order = self.vl, None
        step = vl.begin(scheduled)
        vl.encode(step, encode)  # type: ignore[arg-type]  # a list of tasks
        before = self.batch.rows
        order = vl.arrange(step)
        self.counters["moved"] += self.batch.rows[: len(before)] != before
        self.check_order(order, scheduled)
        self.check_inputs(order)
        token_ids = self.token_ids(order)
        sampled = self.forward(order, token_ids)
        vl.complete(order)
        requests = {r: self.live[r] for r in order.req_ids}
        self.in_flight.append(InFlight(order, token_ids, sampled, requests))
        for req_id, tokens in scheduled.items():
            known = self.live[req_id]
            was_decode = known.computed >= known.prompt_len
            known.unread.append(tokens)
            known.undecided |= was_decode and tokens > 1
            known.state["drafts"] = []
        self.read(keep=self.overlap)
        if self.choose.random() < 0.02:
            self.read(keep=0)
            self.overlap = self.choose.choice([0, 1, 2])

    def check_order(self, order: BatchOrder, scheduled: dict[str, int]) -> None:
        """Who computes what, in which class, and which token indices are written."""
        assert dict(zip(order.req_ids, order.scheduled.tolist(), strict=True)) == scheduled
        indices, starts = [], [0]
        for row_number, req_id in enumerate(order.req_ids):
            known = self.live[req_id]
            in_prompt = EXTEND if known.computed else PREFILL
            expected = DECODE if known.computed >= known.prompt_len else in_prompt
            assert order.classes[row_number] == expected
            indices += range(known.computed, known.computed + scheduled[req_id])
            done = known.computed + scheduled[req_id] >= known.prompt_len
            starts.append(starts[-1] + (scheduled[req_id] if expected == DECODE else done))
        assert order.token_indices.tolist() == indices
        starts += starts[-1:] * (CAPACITY + 1 - len(starts))
        assert self.draft["logit_start"].tolist() == starts
        region = {"split": [0, 1, 2], "two": [0, 1, 1], "arrival": [0, 0, 0]}[self.batch.policy]
        regions = [region[c] for c in order.classes.tolist()]
        assert regions == sorted(regions)

    def check_inputs(self, order: BatchOrder) -> None:
        """Positions, features of the target, and features one token ahead for the drafter."""
        expected: list[tuple[int, int, int]] = []
        target: dict[int, tuple[str, int]] = {}
        ahead: dict[int, tuple[str, int]] = {}
        edges = set()
        for row_number, req_id in enumerate(order.req_ids):
            known = self.live[req_id]
            start = int(order.computed[row_number])
            stop = start + int(order.scheduled[row_number])
            expected += known.positions(stop)[start:]
            shift = int(order.query_start[row_number]) - start
            target |= {t + shift: value for t, value in known.features(start, stop).items()}
            one = known.features(start + 1, stop + 1)
            ahead |= {t - 1 + shift: value for t, value in one.items()}
            edges.add(stop - 1 + shift)
        assert self.vl.positions_of(order).T.tolist() == [list(p) for p in expected]
        assert read_features(self.vl.gather(order)) == target
        inputs = self.vl.gather(order, shift=1)
        skipped = set(inputs.skipped.tolist())
        assert skipped <= edges
        read = read_features(inputs)
        assert read == {t: value for t, value in ahead.items() if t not in skipped}
        self.counters["features"] += len(target)

    def token_ids(self, order: BatchOrder) -> Array:
        """Read the step's tokens from the fields, like a runner."""
        out: list[int] = []
        for row_number, req_id in enumerate(order.req_ids):
            start, num = int(order.computed[row_number]), int(order.scheduled[row_number])
            if order.classes[row_number] != DECODE:
                slot = int(order.slots[row_number])
                tokens = self.batch["token_ids"][slot, start : start + num].tolist()
            else:
                tokens = [int(self.batch["next_token"][row_number])]
                tokens += self.draft["draft_tokens"][row_number, 1:num].tolist()
            known = self.live[req_id]
            drafts = known.state["drafts"][: num - 1] if order.classes[row_number] == DECODE else []
            assert tokens == known.true_tokens(start + num - len(drafts))[start:] + drafts
            out += tokens
        return np.array(out, dtype=np.int64)

    def forward(self, order: BatchOrder, token_ids: Array) -> Array:
        """The model: the next token at each wanted place, given the tokens before it."""
        contexts: list[list[int]] = []
        for row_number, req_id in enumerate(order.req_ids):
            start, first = int(order.computed[row_number]), int(order.query_start[row_number])
            past = self.live[req_id].true_tokens(start)
            chunk = token_ids[first : int(order.query_start[row_number + 1])].tolist()
            contexts += [past + chunk[: i + 1] for i in range(len(chunk))]
        sampled = np.array([next_token(contexts[t]) for t in logit_tokens(order)], dtype=np.int64)
        newest = np.cumsum(num_logits(order)) - 1
        accepted = accept_greedy(order, token_ids, sampled)
        rejected = np.where(order.classes == DECODE, order.scheduled - 1 - accepted, 0)
        sampling = num_logits(order) > 0
        # On the device: the next input of a row is there before the host has read anything.
        rows = np.flatnonzero(sampling)
        self.batch["next_token"][rows] = sampled[(newest - rejected)[sampling]]
        return sampled

    def read(self, *, keep: int) -> None:
        """Read the outputs of all steps but the latest few."""
        while len(self.in_flight) > keep:
            self.counters["late"] += len(self.in_flight) > 1
            self.read_one(self.in_flight.popleft())

    def read_one(self, step: InFlight) -> None:
        order = step.order
        accepted = accept_greedy(order, step.token_ids, step.sampled)
        restored = order.restore(step.sampled, counts=num_logits(order))
        was = [step.requests[req_id] for req_id in order.req_ids]
        gone = [i for i, req_id in enumerate(order.req_ids) if self.live.get(req_id) is not was[i]]
        newest = np.full(order.num_reqs, -1)
        for row_number, req_id in enumerate(order.req_ids):
            if row_number in gone:
                continue
            known = self.live[req_id]
            tokens = known.unread.popleft()
            before = known.confirmed
            new: list[int] = restored[req_id].tolist()  # type: ignore[attr-defined]  # a slice
            final = before + tokens
            if before >= known.prompt_len:
                right = self.naive_accept(known, step, row_number)
                assert accepted[row_number] == right
                self.counters["accepted"] += right
                self.counters["rejected"] += tokens - 1 - right
                new, final = new[: right + 1], before + 1 + right
            rolled_back = self.vl.confirm(req_id, final, in_flight=sum(known.unread))
            assert rolled_back == (final < before + tokens)
            self.counters["rolled_back"] += rolled_back
            known.confirmed = final
            known.undecided = False
            if new:
                for token in new:
                    assert token == next_token(known.tokens)
                    known.tokens.append(token)
                self.batch.append(req_id, "token_ids", new)
                newest[row_number] = new[-1]
        self.check_shift(step, accepted, newest, gone)
        for row_number, req_id in enumerate(order.req_ids):
            if row_number not in gone and newest[row_number] >= 0:
                self.after_sampling(req_id)

    def naive_accept(self, known: Known, step: InFlight, row_number: int) -> int:
        first = int(step.order.query_start[row_number])
        drafts = step.token_ids[first + 1 : int(step.order.query_start[row_number + 1])].tolist()
        truth = known.true_tokens(len(known.tokens) + len(drafts))[len(known.tokens) :]
        right = 0
        while right < len(drafts) and drafts[right] == truth[right]:
            right += 1
        return right

    def check_shift(self, step: InFlight, accepted: Array, newest: Array, gone: list[int]) -> None:
        """A drafter that runs now reads each confirmed token's successor."""
        order = step.order
        rows = DrafterRows.of(order, accepted, skip=gone)
        following = following_tokens(order, self.batch["token_ids"], newest)
        expected: list[int] = []
        for row_number, req_id in enumerate(order.req_ids):
            if row_number not in gone:
                start, length = int(order.computed[row_number]), int(rows.lengths[row_number])
                expected += self.live[req_id].true_tokens(start + length + 1)[start + 1 :]
        before = step.token_ids.copy()
        assert shift_tokens(rows, step.token_ids, following).tolist() == expected
        assert np.array_equal(step.token_ids, before)

    def after_sampling(self, req_id: str) -> None:
        """Draft for a request, or let it finish; write to its fields."""
        choose, known = self.choose, self.live[req_id]
        if len(known.tokens) >= MAX_LEN or choose.random() < 0.03:
            self.remove(req_id)
            return
        self.batch.append(req_id, "blocks", len(known.tokens))
        if not known.member or known.unread:
            return
        truth = known.true_tokens(len(known.tokens) + MAX_DRAFTS)[len(known.tokens) :]
        length = choose.randint(0, MAX_DRAFTS)
        drafts = [token if choose.random() < 0.7 else 50 for token in truth[:length]]
        number = choose.randint(1, 10**6)
        known.state |= {"drafts": drafts, "kept": number, "memo": {"is": number}}
        padded = [known.tokens[-1], *drafts, *[-1] * (MAX_DRAFTS - len(drafts))]
        self.draft.write(req_id, "draft_tokens", padded)
        self.draft.write(req_id, "num_drafts", len(drafts))
        self.draft.write(req_id, "kept", number)
        self.draft.write(req_id, "memo", known.state["memo"])

    # -- everything ----------------------------------------------------------------------------
    def check(self) -> None:
        """Target and follower hold what the model says, in every row and for every request."""
        batch, draft = self.batch, self.draft
        assert set(batch.req_ids) == self.live.keys()
        assert set(batch.preempted) == self.preempted.keys()
        assert set(draft.req_ids) == {r for r, known in self.live.items() if known.member}
        for req_id, known in self.preempted.items():
            assert batch.known_tokens_of(req_id) == known.prompt_len == len(known.tokens)
        for row_number in range(CAPACITY):
            req_id = batch.rows[row_number] if row_number < len(batch.rows) else None
            at_rest = req_id is None or not self.live[req_id].member
            own_values = [draft["kept"][row_number], draft["tag"][row_number]]
            memo = draft.objects("memo")[row_number]
            if at_rest or req_id is None:
                assert own_values == [0, 0]
                assert memo is None
                continue
            state = self.live[req_id].state
            assert own_values == [state["kept"], state["copied_tag"]]
            assert memo is state["memo"]
        for req_id, known in self.live.items():
            slot = batch.slot_of(req_id)
            counts = (known.prompt_len, known.computed, known.confirmed)
            assert batch.progress.counts(slot) == counts
            assert batch.read(req_id, "token_ids").tolist() == known.tokens  # type: ignore[attr-defined]
            assert batch.read(req_id, "tag") == known.state["tag"]
            assert batch.read(req_id, "note") is known.state["note"]
            if known.member:
                copy = draft.read(req_id, "token_ids").tolist()  # type: ignore[attr-defined]
                assert copy == known.state["copied_ids"]
                drafts = known.state["drafts"]
                if drafts:
                    held = draft.read(req_id, "draft_tokens").tolist()  # type: ignore[attr-defined]
                    assert held[1 : 1 + len(drafts)] == drafts


@pytest.mark.slow
def test_ten_thousand_steps(seed: int) -> None:
    """Whatever is drafted, accepted, rolled back, preempted and moved, both batches are right."""
    walks = [Walk(seed + i) for i in range(5)]
    for walk in walks:
        for step in range(NUM_STEPS // len(walks)):
            walk.change_requests()
            walk.step()
            walk.check()
            if step % 20 == 0:
                walk.vl.check()
    total = {name: sum(walk.counters[name] for walk in walks) for name in walks[0].counters}

    assert min(total.values()) > 100, f"VLBATCH_SEED={seed}: {total}"
