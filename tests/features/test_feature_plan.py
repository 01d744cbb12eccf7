"""Ask, plan and progress as properties: tight caches, shared keys, look-ahead, whole items."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from drive import Drive
from naive_media import item, owners_of, random_items

from vlbatch.errors import InvalidSchedule, ItemTooLarge
from vlbatch.items import Item


class World:
    """Random requests under tight limits, run by a scheduler that knows nothing but ``ask``."""

    def __init__(self, rng: random.Random, *, whole: bool, wrong: float = 0.0) -> None:
        self.rng = rng
        prompts = {f"r{n}": rng.randint(5, 40) for n in range(rng.randint(1, 6))}
        self.items = {r: random_items(rng, n, rng.randint(0, 6)) for r, n in prompts.items()}
        keys = [each.key for items in self.items.values() for each in items]
        for items in self.items.values():  # keys that say too little about their content
            items[:] = [
                replace(each, key=rng.choice(keys)) if rng.random() < wrong else each
                for each in items
            ]
        most = max((i.num_rows for items in self.items.values() for i in items), default=1)
        self.lookahead = rng.randrange(4)
        self.encode_rows = rng.choice((None, most, most + 2))
        self.chunk = 100 if whole else rng.choice((1, 4, 16, 100))
        self.drive = Drive(
            most + rng.choice((0, 0, 1, 4, 20)),
            encode_rows=self.encode_rows,
            lookahead=self.lookahead,
            whole_items=whole,
        )
        for req_id, length in prompts.items():
            hit = rng.choice((0, 0, rng.randrange(length)))
            try:
                self.drive.add(req_id, length, *self.items[req_id], computed=hit)
            except ItemTooLarge:
                assert whole, "single items fit by construction"

    def wanted(self) -> dict[str, int]:
        """Every request's next chunk, in a random order: decodes want one token."""
        drive = self.drive
        wanted = {
            r: min(self.chunk, drive.prompt_lens[r] - computed)
            if computed < drive.prompt_lens[r]
            else 1
            for r, computed in drive.computed.items()
        }
        return {r: wanted[r] for r in self.rng.sample(list(wanted), len(wanted))}

    def finish(self) -> None:
        """Let go of requests that have decoded enough for their last item to be released."""
        drive = self.drive
        for req_id in list(drive.computed):
            if drive.computed[req_id] >= drive.prompt_lens[req_id] + self.lookahead:
                drive.store.remove(req_id)
                del drive.computed[req_id]

    def expected(self, req_id: str, start: int, stop: int) -> list[tuple[int, str, int]]:
        """What the chunk must get, counted token by token."""
        owners, items = owners_of(self.items[req_id]), self.items[req_id]
        tokens = [token for token in range(start, stop) if token in owners]
        return [(t, items[owners[t][0]].key, owners[t][1]) for t in tokens]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("case", range(150))
def test_work_always_gets_done(seed: int, case: int, whole: bool) -> None:
    """Somebody moves in every step, what is asked for is what fits, and no budget is broken.

    With any cache and encode budget that the largest item fits, any look-ahead, whole items or
    cut ones, requests that share and repeat items, and prefix hits anywhere.
    """
    world = World(random.Random(f"{seed}/{case}/{whole}"), whole=whole)
    drive = world.drive
    for _ in range(1000):
        world.finish()
        if not drive.computed:
            break
        wanted = world.wanted()
        before = drive.state()
        fit = drive.ask(**wanted)
        assert drive.state() == before, "ask changed something"
        assert list(fit) == list(wanted)
        assert all(0 <= fit[r] <= wanted[r] for r in wanted)
        scheduled = {r: n for r, n in fit.items() if n}
        assert scheduled, f"nobody moves: {drive.computed}"

        plan = drive.store.plan(drive.chunks(scheduled))  # not refused
        assert drive.state() == before, "plan changed something"
        assert plan.fit == scheduled
        encoded = Counter(task.key for task in plan.encode)
        assert set(encoded.values()) <= {1}, "once a key and step"
        num_rows = sum(task.placed.num_rows for task in plan.encode)
        assert world.encode_rows is None or num_rows <= world.encode_rows
        assert not any(drive.cache.is_ready(key) for key in encoded.keys() - set(plan.evict))

        chunks = drive.chunks(scheduled)
        got = drive.step(**scheduled)
        for req_id, (start, num_tokens) in chunks.items():
            assert sorted(got[req_id]) == world.expected(req_id, start, start + num_tokens)
    else:
        pytest.fail(f"still at {drive.computed} after 1000 steps")
    assert drive.cache.usage.reclaimable == drive.cache.capacity_rows


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("case", range(60))
def test_failures_do_not_change_what_fits(seed: int, case: int, whole: bool) -> None:
    """Where keys clash some requests fail; what ``ask`` granted the others is accepted."""
    world = World(random.Random(f"{seed}/{case}/{whole}"), whole=whole, wrong=0.2)
    drive = world.drive
    for _ in range(1000):
        world.finish()
        if not drive.computed:
            return
        scheduled = {r: n for r, n in drive.ask(**world.wanted()).items() if n}
        assert scheduled, f"nobody moves: {drive.computed}"
        failed = drive.store.plan(drive.chunks(scheduled)).failed
        rest = {r: n for r, n in scheduled.items() if r not in failed}
        plan = drive.store.plan(drive.chunks(rest))
        assert (plan.fit, plan.failed) == (rest, {})
        assert drive.commit(drive.store.reserve(plan)) == {}
        for req_id in failed:
            drive.store.remove(req_id)
            del drive.computed[req_id]
        chunks, got = drive.chunks(rest), drive.gather(**rest)
        for req_id, (start, num_tokens) in chunks.items():
            assert sorted(got[req_id]) == world.expected(req_id, start, start + num_tokens)
        drive.confirm(**rest)
    pytest.fail(f"still at {drive.computed} after 1000 steps")


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("case", range(40))
def test_ask_is_the_most_that_plan_accepts(seed: int, case: int, whole: bool) -> None:
    """For one request in any state: ``ask`` of n fits is accepted, every number between refused."""
    world = World(random.Random(f"{seed}/{case}/{whole}"), whole=whole)
    drive, rng = world.drive, world.rng
    for _ in range(12):
        world.finish()
        if not drive.computed:
            return
        req_id, num_tokens = rng.choice(list(world.wanted().items()))
        fit = drive.ask(**{req_id: num_tokens})[req_id]
        for number in range(1, num_tokens + 1):
            chunk = drive.chunks({req_id: number})
            if number <= fit and (number == fit or not whole):
                drive.store.plan(chunk)
            elif number > fit:
                with pytest.raises(InvalidSchedule, match=f"{fit} of the {number} tokens"):
                    drive.store.plan(chunk)
        if fit:
            drive.step(**{req_id: fit})


@pytest.mark.parametrize("case", range(40))
def test_enough_space_encodes_each_item_once(seed: int, case: int) -> None:
    """With room for everything each key is encoded once, however the prompts are cut."""
    rng = random.Random(f"{seed}/{case}")
    drive = Drive(1000, lookahead=rng.randrange(3))
    keys: set[str] = set()
    for req_id in "ABC":
        items: list[Item] = random_items(rng, 30, 5)
        keys |= {each.key for each in items}
        drive.add(req_id, 30, *items)
    while any(computed < 30 for computed in drive.computed.values()):
        scheduled = {r: rng.randint(1, 30 - c) for r, c in drive.computed.items() if c < 30}
        drive.step(**drive.ask(**scheduled))

    assert sorted(drive.encoded) == sorted(keys)


def test_a_zero_or_negative_wish_fits_nothing() -> None:
    """``ask`` answers 0, whatever the setting."""
    for whole in (False, True):
        drive = Drive(8, whole_items=whole)
        drive.add("R", 10, item(2, 4))
        for computed in (0, 2, 10):
            drive.computed["R"] = computed
            assert [drive.ask(R=number)["R"] for number in (0, -3)] == [0, 0]


def test_ask_keeps_the_order_of_the_wish() -> None:
    """Answers come in the order asked, so that a schedule made of them is the same everywhere."""
    drive = Drive(8)
    for req_id in "ABC":
        drive.add(req_id, 10)

    assert list(drive.ask(C=1, A=1, B=1)) == ["C", "A", "B"]
