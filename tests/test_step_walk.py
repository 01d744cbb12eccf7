"""A long random walk over every verb of ``VLBatch``, beside a model of plain dicts and lists.

The model knows no row, no slot and no cache policy. It says who is alive and how far, which
feature row and which position each token must get, and what cache accounting must add up to.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from naive_media import encoded, owners_of, positions_of, random_items
from vl_batches import Batch, delivered, make_batch, refused

from vlbatch import BatchOrder, EncodeTask, Step
from vlbatch.errors import (
    BatchFull,
    DuplicateRequest,
    EncodeFailed,
    EntryInUse,
    FeatureRowsMismatch,
    InvalidSchedule,
    ItemTooLarge,
    StaleOrder,
    UnknownRequest,
)
from vlbatch.items import Item

CAPACITY = 4
MAX_MODEL_LEN = 48


@dataclass
class Known:
    """What the model knows of a request."""

    items: list[Item]
    tag: int
    prompt_len: int
    epoch: int
    computed: int = 0
    confirmed: int = 0
    live: bool = True
    touched: set[int] = field(default_factory=set)

    @property
    def known_tokens(self) -> int:
        return self.prompt_len if self.computed < self.prompt_len else self.computed + 1

    @property
    def in_prompt(self) -> bool:
        return self.computed < self.prompt_len


class Walk:
    """One walk: a batch, its model, and one method an action."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.max_rows = rng.choice((8, 12, 20, 60))
        self.encode_rows = rng.choice((None, 8, 12))
        self.lookahead = rng.randrange(3)
        self.whole = rng.random() < 0.3
        self.num_drafts = rng.choice((0, 2))
        self.auto_confirm = rng.random() < 0.6
        self.vl: Batch = make_batch(
            self.max_rows,
            capacity=CAPACITY,
            max_model_len=MAX_MODEL_LEN,
            num_drafts=self.num_drafts,
            policy=rng.choice(("split", "two", "arrival")),
            auto_confirm=self.auto_confirm,
            encode_rows=self.encode_rows,
            lookahead=self.lookahead,
            whole_items=self.whole,
        )
        self.requests: dict[str, Known] = {}
        self.epoch = 0
        self.num_encoded = self.num_hits = self.num_added = 0

    # -- what must be so ---------------------------------------------------------------------
    def live(self) -> list[str]:
        return [req_id for req_id, known in self.requests.items() if known.live]

    def preempted(self) -> list[str]:
        return [req_id for req_id, known in self.requests.items() if not known.live]

    def remaining(self, known: Known) -> int:
        most = known.prompt_len - known.computed if known.in_prompt else 1 + self.num_drafts
        return min(most, MAX_MODEL_LEN - known.computed)

    def check(self) -> None:
        """Compare everything that the model knows."""
        vl, cache = self.vl, self.vl.features.cache
        vl.check()
        assert set(vl.batch.req_ids) == set(self.live())
        assert set(vl.batch.preempted) == set(self.preempted())
        for req_id, known in self.requests.items():
            assert vl.batch.known_tokens_of(req_id) == known.known_tokens
            held = set(vl.features._requests[req_id].held)
            assert held <= {n for n in known.touched if not self.is_behind(known, n)}
            if known.live:
                assert vl.batch.computed_of(req_id) == known.computed
                assert vl.batch.read(req_id, "tag") == known.tag
                assert vl.batch.read(req_id, "note") is known
            else:
                assert not held

        used = [int(key.content[1:]) for key in cache.present()]
        in_use = [
            int(key.content[1:]) for key in cache.present()
            if cache.references(key) or not cache.is_ready(key)
        ]  # fmt: skip
        assert cache.usage == (sum(used), self.max_rows - sum(used), self.max_rows - sum(in_use))
        assert 0 <= cache.usage.free <= cache.usage.reclaimable <= self.max_rows
        assert cache.counters.encoded == self.num_encoded
        assert cache.counters.hits == self.num_hits

    def is_behind(self, known: Known, number: int) -> bool:
        return known.items[number].stop + self.lookahead <= known.confirmed

    def expected(self, known: Known, start: int, stop: int) -> list[tuple[int, str, int]]:
        owners = owners_of(known.items)
        tokens = [token for token in range(start, stop) if token in owners]
        return [(t, known.items[owners[t][0]].key, owners[t][1]) for t in tokens]

    def check_order(self, order: BatchOrder, scheduled: dict[str, int]) -> None:
        """Rows, features of target and drafter, and positions of one step."""
        assert sorted(order.req_ids) == sorted(scheduled)
        decodes = [not self.requests[r].in_prompt for r in order.req_ids]
        assert order.policy == "arrival" or decodes == sorted(decodes, reverse=True)
        got = delivered(order, self.vl.gather(order))
        table = self.vl.positions_of(order).T.tolist()
        for row, req_id in enumerate(order.req_ids):
            known = self.requests[req_id]
            start, stop = known.computed, known.computed + scheduled[req_id]
            assert [entry[:3] for entry in got[req_id]] == self.expected(known, start, stop)
            assert all(known.epoch <= epoch <= self.epoch for *_, epoch in got[req_id])
            first = int(order.query_start[row])
            expected = positions_of(known.items, stop)[start:]
            assert table[first : first + stop - start] == [list(p) for p in expected]
            assert self.vl.batch["tag"][row] == known.tag
        if self.lookahead:
            self.check_drafter(order)

    def check_drafter(self, order: BatchOrder) -> None:
        """A drafter gets every place of its shifted chunk, but for items beyond the target's."""
        inputs = self.vl.gather(order, shift=1)
        got = delivered(order, inputs, shift=1)
        skipped: dict[str, list[int]] = {req_id: [] for req_id in order.req_ids}
        for token in inputs.skipped.tolist():
            row = int(order.row_of_token[token])
            skipped[order.req_ids[row]].append(int(order.token_indices[token]) + 1)
        for row, req_id in enumerate(order.req_ids):
            known = self.requests[req_id]
            stop = known.computed + int(order.scheduled[row])
            wanted = self.expected(known, known.computed + 1, stop + 1)
            assert set(skipped[req_id]) <= {stop}
            assert [entry[:3] for entry in got[req_id]] == [
                entry for entry in wanted if entry[0] not in skipped[req_id]
            ]

    # -- actions -----------------------------------------------------------------------------
    def add(self) -> None:
        rng, vl = self.rng, self.vl
        prompt_len = rng.randint(4, 30)
        items = random_items(rng, prompt_len, rng.randint(0, 4))
        known = Known(items, self.num_added, prompt_len, self.epoch)
        known.computed = known.confirmed = rng.choice((0, 0, rng.randrange(prompt_len)))
        taken = rng.random() < 0.1 and bool(self.requests)
        req_id = rng.choice(list(self.requests)) if taken else f"r{self.num_added}"

        def act() -> None:
            vl.add(
                req_id, prompt_len=prompt_len, items=items, computed=known.computed,
                fields={"tag": known.tag, "note": known},
            )  # fmt: skip

        if taken:
            with refused(vl, DuplicateRequest, req_id=req_id):
                act()
        elif len(self.live()) == CAPACITY:
            with refused(vl, BatchFull, req_id=req_id, setting="capacity"):
                act()
        elif (setting := self.too_large(items)) is not None:
            with refused(vl, ItemTooLarge, req_id=req_id, setting=setting):
                act()
        else:
            act()
            self.requests[req_id] = known
            self.num_added += 1

    def too_large(self, items: Sequence[Item]) -> str | None:
        """Setting that an item, or uncut overlapping ones, can never meet; by marking tokens."""
        tokens = {t for each in items for t in range(each.offset, each.stop)}
        together: list[list[Item]] = [[each] for each in items]
        if self.whole:
            inside = {t for each in items for t in range(each.offset + 1, each.stop)}
            borders = [*sorted(tokens - inside), MAX_MODEL_LEN]
            together = [
                [each for each in items if start <= each.offset < stop]
                for start, stop in pairwise(borders)
            ]
        for group in together:
            rows = sum({each.key: each.num_rows for each in group}.values())
            for limit, setting in ((self.max_rows, "max_rows"), (self.encode_rows, "encode_rows")):
                if limit is not None and rows > limit:
                    return setting
        return None

    def remove(self) -> None:
        if not self.requests or self.rng.random() < 0.1:
            with refused(self.vl, UnknownRequest, req_id="nobody"):
                self.vl.remove("nobody")
            return
        req_id = self.rng.choice(list(self.requests))
        self.vl.remove(req_id)
        del self.requests[req_id]

    def preempt(self) -> None:
        live = self.live()
        if live:
            self.leave_slot(self.rng.choice(live))

    def leave_slot(self, req_id: str) -> None:
        known = self.requests[req_id]
        self.vl.preempt(req_id)
        known.live, known.prompt_len = False, known.known_tokens
        known.computed = known.confirmed = 0
        known.touched.clear()

    def resume(self) -> None:
        preempted = self.preempted()
        if not preempted:
            return
        req_id = self.rng.choice(preempted)
        known = self.requests[req_id]
        hit = self.rng.choice((0, self.rng.randrange(known.prompt_len)))
        if len(self.live()) == CAPACITY:
            with refused(self.vl, BatchFull, req_id=req_id, setting="capacity"):
                self.vl.resume(req_id, computed=hit)
        elif known.prompt_len <= MAX_MODEL_LEN:
            self.vl.resume(req_id, computed=hit)
            known.live, known.epoch = True, self.epoch
            known.computed = known.confirmed = hit

    def confirm(self) -> None:
        live = self.live()
        if self.auto_confirm or not live:
            return
        req_id = self.rng.choice(live)
        known = self.requests[req_id]
        computed = self.rng.randint(known.confirmed, known.computed)
        if self.rng.random() < 0.1:
            with refused(self.vl, InvalidSchedule, req_id=req_id):
                self.vl.confirm(req_id, known.computed + 1)
        if self.rng.random() < 0.4:  # the rest is in flight
            assert not self.vl.confirm(req_id, computed, in_flight=known.computed - computed)
            known.confirmed = computed
            return
        assert self.vl.confirm(req_id, computed) == (computed < known.computed)
        known.confirmed = known.computed = computed

    def new_weights(self) -> None:
        if self.rng.random() < 0.3:
            self.epoch += 1
            self.vl.features.cache.set_epoch(self.epoch)

    def drop(self) -> None:
        cache = self.vl.features.cache
        contents = sorted({key.content for key in cache.present()})
        if not contents:
            return
        content = self.rng.choice(contents)
        if any(cache.references(k) for k in cache.present() if k.content == content):
            with refused(self.vl, EntryInUse):
                cache.drop(content)
        else:
            cache.drop(content)
            assert content not in {key.content for key in cache.present()}

    def bad_schedule(self) -> None:
        live = self.live()
        if not live:
            return
        good = {req_id: 1 for req_id in live[:1] if self.remaining(self.requests[req_id])}
        req_id = live[-1]
        too_many = self.remaining(self.requests[req_id]) + 1
        for bad in ({"nobody": 1}, {req_id: 0}, {req_id: too_many}):
            with refused(self.vl, InvalidSchedule, req_id=next(iter(bad))):
                self.vl.begin({**good, **bad})

    # -- a step ------------------------------------------------------------------------------
    def step(self) -> None:
        scheduled = self.schedule()
        step = self.begin(scheduled)
        if self.rng.random() < 0.1:
            self.vl.abandon(step)
            return
        self.encode(step)
        if step.open:
            with refused(self.vl, StaleOrder):
                self.vl.arrange(step)
            self.vl.abandon(step)
            return
        self.somebody_leaves(0.15)
        left = {r: n for r, n in step.scheduled.items() if r in self.live()}
        order = self.vl.arrange(step)
        self.check_order(order, left)
        self.somebody_leaves(0.1)
        self.complete(order)

    def schedule(self) -> dict[str, int]:
        """What fits of a random wish; somebody moves, if all that may hold features can move."""
        rng, vl = self.rng, self.vl
        live = [req_id for req_id in self.live() if self.remaining(self.requests[req_id])]
        wanted = {}
        for req_id in rng.sample(live, len(live)):
            most = self.remaining(self.requests[req_id])
            wanted[req_id] = most if self.whole else rng.randint(1, most)
        fit = vl.ask(wanted)
        scheduled = {req_id: n for req_id, n in fit.items() if n}
        assert scheduled or len(live) < len(self.live()) or not live, f"nobody moves: {wanted}"
        assert all(n <= wanted[req_id] for req_id, n in scheduled.items())
        return scheduled

    def begin(self, scheduled: dict[str, int]) -> Step:
        cache = self.vl.features.cache
        ready = {key for key in cache.present() if cache.is_ready(key)}
        step = self.vl.begin(scheduled)
        assert step.scheduled == scheduled
        assert not step.failed
        keys = [task.key for task in step.tasks]
        assert len(set(keys)) == len(keys), "once a key and step"
        assert not (set(keys) & ready) - set(step.work.evicted), "never what is ready"
        assert all(key.epoch == self.epoch for key in keys)
        num_rows = sum(task.placed.num_rows for task in step.tasks)
        assert self.encode_rows is None or num_rows <= self.encode_rows
        self.num_hits += len(step.work.hits)
        for req_id, num_tokens in scheduled.items():
            known = self.requests[req_id]
            stop = known.computed + num_tokens + self.lookahead
            keys_met = {key for _, key, _ in self.expected(known, known.computed, stop)}
            known.touched |= {
                number for number, each in enumerate(known.items)
                if each.key in keys_met and each.stop > known.computed
            }  # fmt: skip
        return step

    def encode(self, step: Step) -> None:
        """Encode, sometimes with a failing item, sometimes only a part."""
        rng = self.rng
        contents = [task.key.content for task in step.tasks]
        bad = rng.choice(contents) if contents and rng.random() < 0.15 else None
        way = rng.choice(("raise", "rows"))
        if contents and rng.random() < 0.1:
            self.somebody_leaves(1.0)
        waiting = {
            reference.req_id
            for task in step.tasks if task.key.content == bad
            for reference in self.vl.features.cache.references(task.key)
        }  # fmt: skip

        def encoder(tasks: Sequence[EncodeTask]) -> list[tuple[Any]]:
            outputs = []
            for task in tasks:
                content, rows = task.key.content, task.placed.num_rows
                if content == bad and way == "raise":
                    raise RuntimeError(content)
                outputs.append((encoded(content, rows + (content == bad), task.key.epoch),))
            return outputs

        if len(contents) > 1 and rng.random() < 0.1:  # only a part arrives
            task = step.tasks[0]
            if task.key.content != bad:
                self.vl.commit(step, {task.key: encoder([task])[0]})
                self.num_encoded += 1
            return
        self.vl.encode(step, encoder, max_rows=1)
        self.num_encoded += len(contents) - (bad is not None)
        assert set(step.failed) == waiting
        for req_id in waiting:
            expected = EncodeFailed if way == "raise" else FeatureRowsMismatch
            assert type(step.failed[req_id]) is expected
            del self.requests[req_id]

    def somebody_leaves(self, chance: float) -> None:
        live = self.live()
        if live and self.rng.random() < chance:
            req_id = self.rng.choice(live)
            if self.rng.random() < 0.5:
                self.leave_slot(req_id)
            else:
                self.vl.remove(req_id)
                del self.requests[req_id]

    def complete(self, order: BatchOrder) -> None:
        accepted = {}
        for row, req_id in enumerate(order.req_ids):
            known = self.requests.get(req_id)
            if known is None or not known.live:
                continue
            grown = int(order.scheduled[row])
            if not known.in_prompt and self.rng.random() < 0.5:
                accepted[req_id] = self.rng.randrange(grown)
                grown = 1 + accepted[req_id]
            known.computed += grown
        self.vl.complete(order, accepted)
        if self.auto_confirm:
            for req_id in self.live():
                self.requests[req_id].confirmed = self.requests[req_id].computed


ACTIONS: dict[Callable[[Walk], None], int] = {
    Walk.step: 14,
    Walk.add: 6,
    Walk.remove: 2,
    Walk.preempt: 1,
    Walk.resume: 2,
    Walk.confirm: 3,
    Walk.new_weights: 1,
    Walk.drop: 1,
    Walk.bad_schedule: 1,
}


def take_actions(walk: Walk, number: int) -> None:
    """Act at random and check after each action."""
    actions, weights = list(ACTIONS), list(ACTIONS.values())
    for _ in range(number):
        walk.rng.choices(actions, weights)[0](walk)
        walk.check()


@pytest.mark.parametrize("case", range(40))
def test_every_part_agrees_with_the_model(seed: int, case: int) -> None:
    """After every action every part is as the model says, and every token gets its own."""
    walk = Walk(random.Random(f"{seed}/{case}"))
    take_actions(walk, 300)
    for req_id in list(walk.requests):
        walk.vl.remove(req_id)
    walk.requests.clear()
    walk.check()
    assert walk.vl.features.cache.usage.reclaimable == walk.max_rows


def test_walks_reach_what_matters(seed: int) -> None:
    """Walks that never hit or evict would prove nothing."""
    walks = [Walk(random.Random(f"{seed}/reach/{number}")) for number in range(8)]
    for walk in walks:
        take_actions(walk, 150)

    counters = [walk.vl.features.cache.counters for walk in walks]
    assert sum(c.encoded for c in counters) > 50
    assert sum(c.hits for c in counters) > 10
    assert sum(c.evicted for c in counters) > 10
