"""Random walks over all verbs of a batch, against the naive model after every action."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from batch_states import refused
from exposed import to_host
from naive_batch import NaiveBatch, NaiveRequest

from vlbatch import Backend, BatchOrder, BatchPlan, InputBatch, SideTable
from vlbatch.errors import (
    BatchFull,
    DuplicateRequest,
    InvalidField,
    InvalidSchedule,
    StaleOrder,
    UnknownField,
    UnknownRequest,
)
from vlbatch.fields import (
    batch_global,
    cumulative,
    host,
    packed,
    per_draft,
    ragged,
    row,
    row_valued,
)
from vlbatch.order import OrderPolicy

CAPACITY, MAX_LEN, DRAFTS, WIDTH = 5, 40, 2, 23

FIELDS = [
    row("x", (2,), "int64"),
    row("y", (), "float32", residency="slots"),
    row("b", (3,), "bool"),
    row("reset", (), "int32", default=1, on_preempt="reset"),
    per_draft("d", (2,), "int16"),
    ragged("t", WIDTH, "int32", residency="rows", default=-1),
    ragged("u", WIDTH, "int64"),
    host("h", residency="rows"),
    host("g"),
    row_valued("names", (2,)),
    row_valued("waiting", (3,), whole=True),
    cumulative("sums", lambda order: order.scheduled),
    packed("row_of_token", (256,), "int32", default=-1, rebuild=lambda o: o.row_of_token),
    batch_global("seed"),
]


class Walk:
    """A batch and its model, driven by one random generator."""

    def __init__(
        self, backend: Backend[Any, Any], policy: OrderPolicy, stable: bool, seed: int
    ) -> None:
        self.choose = random.Random(f"{seed} {policy} {stable}")
        self.batch: InputBatch[Any] = InputBatch(
            FIELDS, backend=backend, capacity=CAPACITY, max_model_len=MAX_LEN, num_drafts=DRAFTS,
            policy=policy, stable=stable,
        )  # fmt: skip
        self.model = NaiveBatch(CAPACITY, MAX_LEN, DRAFTS, policy, stable)
        self.table = SideTable(CAPACITY)
        self.batch.register_follower(self.table)
        self.addresses = self.batch.addresses()
        self.kept: list[tuple[BatchOrder, list[str], dict[str, str]]] = []
        self.old_plan: BatchPlan | None = None
        self.last_scheduled: dict[str, int] = {}
        self.num_named = 0

    # -- random things -------------------------------------------------------------------------
    def some(self, *, live: bool = True) -> str | None:
        among = list(self.model.live if live else self.model.preempted)
        return self.choose.choice(among) if among else None

    def value(self, name: str) -> Any:
        """A random plain value for a field."""
        number = self.choose.randrange(100)
        many = {"x": 2, "t": self.choose.randint(0, WIDTH), "u": self.choose.randint(0, WIDTH)}
        if name in many:
            return [number + i for i in range(many[name])]
        if name == "b":
            return [bool(number & bit) for bit in (1, 2, 4)]
        if name == "d":
            return [[number, i] for i in range(DRAFTS + 1)]
        return {"y": number / 4, "reset": number}.get(name, f"object {number}")

    # -- actions: each does the same to the batch and to the model -------------------------------
    def add(self) -> None:
        self.num_named += 1
        req_id, prompt_len = f"r{self.num_named}", self.choose.choice([1, 2, 7, MAX_LEN])
        computed = self.choose.choice([0, 0, prompt_len - 1])
        defaults: dict[str, Any] = {
            "x": [0, 0], "y": 0.0, "b": [False] * 3, "reset": 1, "d": [[0, 0]] * (DRAFTS + 1),
            "t": [], "u": [], "h": None, "g": None,
        }  # fmt: skip
        given = {name: self.value(name) for name in defaults if self.choose.random() < 0.7}
        admit: dict[str, Any] = {"prompt_len": prompt_len, "computed": computed, "fields": given}
        if len(self.model.live) == CAPACITY:
            with refused(self.batch, BatchFull, "all 5 slots", req_id=req_id, setting="capacity"):
                self.batch.add(req_id, **admit)
            return
        slot = self.batch.add(req_id, **admit)
        self.model.add(req_id, NaiveRequest(prompt_len, computed, computed, {**defaults, **given}))
        assert slot == self.model.slots[req_id]

    def remove(self) -> None:
        for live in (True, False):
            req_id = self.some(live=live)
            if req_id is not None and self.choose.random() < 0.7:
                self.batch.remove(req_id)
                if live:
                    self.model.leave(req_id)
                else:
                    del self.model.preempted[req_id]

    def preempt(self) -> None:
        if (req_id := self.some()) is not None:
            self.batch.preempt(req_id)
            self.model.preempt(req_id)

    def resume(self) -> None:
        req_id = self.some(live=False)
        if req_id is None or len(self.model.live) == CAPACITY:
            return
        prompt_len = self.model.preempted[req_id].prompt_len
        if prompt_len <= MAX_LEN:
            computed = self.choose.randrange(prompt_len)
            self.batch.resume(req_id, computed=computed)
            self.model.resume(req_id, computed)

    def write(self) -> None:
        if (req_id := self.some()) is None:
            return
        values = self.model.live[req_id].values
        name = self.choose.choice(list(values))
        if name in ("t", "u") and self.choose.random() < 0.6:
            length = self.choose.randint(0, len(values[name]))
            self.batch.set_length(req_id, name, length)
            more = self.value("x")[: WIDTH - length]
            self.batch.append(req_id, name, more)
            values[name] = values[name][:length] + more
        else:
            values[name] = self.value(name)
            self.batch.write(req_id, name, values[name])

    def name_rows(self) -> None:
        """Point row numbers, of one request and of the whole batch, at requests."""
        if (req_id := self.some()) is None:
            return
        names = [self.choose.choice([None, self.some()]) for _ in range(5)]
        rows = [self.model.row_of(name) for name in names]
        self.model.live[req_id].names = names[:2]
        self.batch.write(req_id, "names", rows[:2])
        self.model.waiting = names[2:]
        self.batch["waiting"] = rows[2:]

    def enter(self) -> None:
        """Write a request's entry in the side table."""
        if (req_id := self.some()) is not None:
            self.model.live[req_id].entry = self.table[self.model.row_of(req_id)] = f"of {req_id}"

    def step(self) -> None:
        able = [r for r in self.model.live if self.model.limit(r) > 0]
        chosen = self.choose.sample(able, self.choose.randint(0, len(able)))
        scheduled = {r: self.choose.randint(1, self.model.limit(r)) for r in chosen}
        plan = self.batch.plan(scheduled)
        self.last_scheduled = scheduled
        must_move, stable_order = (
            self.model.must_move(scheduled),
            self.model.stable_order(scheduled),
        )
        order = self.batch.apply(plan)
        self.assert_order(order, plan, scheduled, must_move, stable_order)
        self.model.take_order([*order.req_ids, *order.idle])
        outputs = [f"{order.step} {r}" for r in order.req_ids]
        self.kept.append((order, outputs, {r: f"{order.step} {r}" for r in order.req_ids}))
        if self.choose.random() < 0.9:
            self.count(order, scheduled)
        if self.choose.random() < 0.3:
            self.old_plan = self.batch.plan({})

    def count(self, order: BatchOrder, scheduled: dict[str, int]) -> None:
        """Count the step, after some requests have left or come back."""
        lives = {r: self.model.live[r].life for r in scheduled}
        decodes = [r for r in scheduled if self.model.class_of(r, scheduled) == "decode"]
        accepted = {
            r: self.choose.randrange(scheduled[r]) for r in decodes if self.choose.random() < 0.7
        }
        for act in self.choose.choices([self.remove, self.preempt, self.resume, self.add], k=1):
            if self.choose.random() < 0.4:
                act()
        self.batch.advance(order, accepted)
        for req_id, tokens in scheduled.items():
            request = self.model.live.get(req_id)
            if request is not None and request.life == lives[req_id]:
                request.computed += accepted[req_id] + 1 if req_id in accepted else tokens
        with refused(self.batch, StaleOrder, "latest order"):
            self.batch.advance(order)

    def confirm(self) -> None:
        if (req_id := self.some()) is None:
            return
        request = self.model.live[req_id]
        computed = self.choose.randint(request.confirmed, request.computed)
        assert self.batch.confirm(req_id, computed) == (computed < request.computed)
        request.computed = request.confirmed = computed

    def confirm_all(self) -> None:
        self.batch.confirm_all()
        for request in self.model.live.values():
            request.confirmed = request.computed

    def reset(self) -> None:
        if self.choose.random() < 0.2:
            self.batch.reset()
            self.model.reset()

    def restore(self) -> None:
        """Outputs of any earlier step still find their requests."""
        if self.kept:
            order, outputs, expected = self.choose.choice(self.kept)
            assert order.restore(outputs) == expected

    def misuse(self) -> None:
        """Verbs that must be refused, and leave everything as it is."""
        live, paused = self.some(), self.some(live=False)
        batch = self.batch
        with refused(batch, UnknownRequest, "not in the batch", req_id="nobody"):
            batch.remove("nobody")
        with refused(batch, UnknownRequest, "not preempted", req_id=live or "nobody"):
            batch.resume(live or "nobody")
        if live is None:
            return
        with refused(batch, DuplicateRequest, "already alive", req_id=paused or live):
            batch.add(paused or live, prompt_len=1)
        with refused(batch, UnknownField, "no field 'z'", req_id=live, setting="fields"):
            batch.write(live, "z", 1)
        with refused(batch, InvalidField, "got shape", req_id=live):
            batch.write(live, "x", [1, 2, 3])
        limit = self.model.limit(live)
        with refused(batch, InvalidSchedule, f"got {limit + 1} tokens", req_id=live):
            batch.plan({live: limit + 1})
        gone = [r for r in self.last_scheduled if r not in self.model.live]
        if gone:
            with refused(batch, InvalidSchedule, "is not in the batch", req_id=gone[0]):
                batch.plan(self.last_scheduled)
        if self.old_plan is not None and self.old_plan.state.version != batch._version:
            with refused(batch, StaleOrder, "earlier state"):
                batch.apply(self.old_plan)

    # -- what must hold --------------------------------------------------------------------------
    def assert_order(
        self,
        order: BatchOrder,
        plan: BatchPlan,
        scheduled: dict[str, int],
        must_move: set[str],
        stable_order: list[str],
    ) -> None:
        """The order is a correct one, with the fewest moves, and says what each row computes."""
        model = self.model
        rows = [*order.req_ids, *order.idle]
        assert sorted(rows) == sorted(model.live)
        assert set(order.req_ids) == set(scheduled)
        regions = [model.region_of(r, scheduled) for r in rows]
        assert regions == sorted(regions)
        moved = {r for r in rows if model.rows.index(r) != rows.index(r)}
        if model.stable:
            assert rows == stable_order
        else:
            assert moved == must_move
        assert plan.moves.num_moved == sum(not model.live[r].is_new for r in moved)

        lengths = [scheduled[r] for r in order.req_ids]
        classes = [model.class_of(r, scheduled) for r in order.req_ids]
        names = ("decode", "extend", "prefill")
        assert order.slots.tolist() == [model.slots[r] for r in order.req_ids]
        assert order.computed.tolist() == [model.live[r].computed for r in order.req_ids]
        assert order.prompt_lens.tolist() == [model.live[r].prompt_len for r in order.req_ids]
        assert order.scheduled.tolist() == lengths
        assert order.regions == tuple(classes.count(name) for name in names)
        assert order.num_leading_decodes in (order.regions.decode, 0)
        sums = [sum(lengths[: i + 1]) for i in range(len(lengths))]
        pad = [sum(lengths)] * (CAPACITY - len(lengths))
        assert to_host(self.batch["sums"]).tolist() == [0, *sums, *pad]
        tokens = [row for row, n in enumerate(lengths) for _ in range(n)]
        packed_rows = to_host(self.batch["row_of_token"]).tolist()
        assert packed_rows == tokens + [-1] * (256 - len(tokens))

    def assert_equal(self) -> None:
        """Batch, side table and model agree about everything."""
        batch, model = self.batch, self.model
        batch.check()
        assert batch.addresses() == self.addresses
        assert list(batch.rows) == model.rows
        assert (batch.req_ids, batch.preempted) == (tuple(model.live), tuple(model.preempted))
        for req_id, request in model.preempted.items():
            assert batch.known_tokens_of(req_id) == request.prompt_len
        for req_id, request in model.live.items():
            slot = model.slots[req_id]
            assert (batch.slot_of(req_id), batch.row_of(req_id)) == (slot, model.row_of(req_id))
            progress = (request.prompt_len, request.computed, request.confirmed)
            assert batch.progress.counts(slot) == progress
            assert batch.remaining_of(req_id) == model.limit(req_id)
            assert batch.known_tokens_of(req_id) == model.known_tokens(request)
            for name, value in request.values.items():
                got = batch.read(req_id, name)
                assert (got.tolist() if isinstance(got, np.ndarray | np.generic) else got) == value
            named = [model.row_of(name) for name in request.names]
            assert to_host(batch["names"])[model.row_of(req_id)].tolist() == named
        assert to_host(batch["waiting"]).tolist() == [model.row_of(n) for n in model.waiting]
        entries = [None if r is None else model.live[r].entry for r in model.rows]
        assert list(self.table) == entries + [None] * (CAPACITY - len(entries))


ACTIONS = {
    Walk.add: 8, Walk.remove: 3, Walk.preempt: 3, Walk.resume: 4, Walk.write: 6, Walk.name_rows: 4,
    Walk.enter: 4, Walk.step: 12, Walk.confirm: 2, Walk.confirm_all: 1, Walk.reset: 1,
    Walk.restore: 2, Walk.misuse: 2,
}  # fmt: skip


@pytest.mark.parametrize("stable", [False, True], ids=["fewest", "stable"])
@pytest.mark.parametrize("policy", ["split", "two", "arrival"])
def test_walk(backend: Backend[Any, Any], policy: OrderPolicy, stable: bool, seed: int) -> None:
    """After every action of a random walk the batch is what the model says."""
    walk = Walk(backend, policy, stable, seed)
    actions = walk.choose.choices(list(ACTIONS), list(ACTIONS.values()), k=250)
    for number, action in enumerate(actions):
        print(number, action.__name__)  # noqa: T201 (shown with the failure: the way there)
        action(walk)
        walk.assert_equal()
