"""Small made-up workloads for the runner, and the check that a run has left nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hash_engine import HashEngine

from vlbatch import Item, VlbatchError
from vlbatch.runner import (
    Drafter,
    Faults,
    MediaPatches,
    Mismatch,
    Prompt,
    Request,
    Result,
    Runner,
    RunSettings,
    compare,
    make_answerer,
)

ROW_BYTES = HashEngine.hidden_size * 4


class MadePrompts:
    """Prompts made beforehand, in place of a ``PromptBuilder``."""

    eos_token_id = HashEngine.eos_token_id
    tokens_per_second = 2.0

    def __init__(self, prompts: Mapping[str, Prompt | VlbatchError]) -> None:
        self._prompts = prompts

    def build(self, request: Request) -> Prompt:
        made = self._prompts[request.req_id]
        if isinstance(made, VlbatchError):
            raise made
        return made

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(map(str, token_ids))


@dataclass
class Workload:
    """Requests with their prompts, and settings under which each of them can run."""

    requests: list[Request]
    prompts: dict[str, Prompt | VlbatchError]
    settings: RunSettings

    def engine(self) -> HashEngine:
        return HashEngine(self.settings.kv_blocks, self.settings.block_size)


@dataclass
class Outcome:
    """What a run gave, compared with each request alone."""

    runner: Runner
    engine: HashEngine
    results: dict[str, Result]
    verified: list[str]
    mismatches: list[Mismatch]


def run(
    work: Workload,
    *,
    engine: HashEngine | None = None,
    drafter: Drafter | None = None,
    faults: Faults | None = None,
    on_step: Callable[[Runner], None] | None = None,
) -> Outcome:
    """Run a workload and compare it with each request alone."""
    engine = engine or work.engine()
    prompts: Any = MadePrompts(work.prompts)
    runner = Runner(engine, prompts, work.settings, drafter=drafter, faults=faults)
    results = runner.run(work.requests, on_step=on_step)
    assert [r.request for r in results] == work.requests
    verified, mismatches = compare(results, make_answerer(engine, prompts, work.settings))
    by_id = {r.request.req_id: r for r in results}
    return Outcome(runner, engine, by_id, verified, mismatches)


def assert_consistent(runner: Runner) -> None:
    """Every part of a run agrees with the others; to be true after each step."""
    runner.vl.check()
    runner.scheduler.check()


def assert_nothing_left(runner: Runner) -> None:
    """No request, row, KV block, reference or reservation outlives a run."""
    assert_consistent(runner)
    vl, scheduler = runner.vl, runner.scheduler
    assert not scheduler.has_work
    assert (vl.batch.req_ids, vl.batch.preempted) == ((), ())
    assert (vl.features.req_ids, vl.positions.req_ids) == ((), ())
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    cache = vl.features.cache
    for key in cache.present():
        assert cache.is_ready(key)
        assert not cache.references(key), f"{key} is still referred to"
    assert cache.usage.reclaimable == cache.capacity_rows
    assert runner.num_done == len(runner.results)


def make_item(
    name: str, grid: tuple[int, int, int], *, video: bool = False, seconds: float | None = None
) -> Item:
    """An item of ``t * h * w`` feature rows at token 0; its name is its content."""
    t, h, w = grid
    modality = "video" if video else "image"
    noise = np.random.default_rng(list(name.encode()))
    patches = noise.standard_normal((4 * t * h * w, 6)).astype(np.float32)
    return Item(
        key=name, modality=modality, offset=0, length=t * h * w, grid=grid,
        seconds_per_grid=seconds, payload=MediaPatches(patches, (t, 2 * h, 2 * w), modality),
    )  # fmt: skip


def make_prompt(*parts: int | Item, seed: int = 0) -> Prompt:
    """Text of so many tokens, and items, one after the other."""
    rng = np.random.default_rng(seed)
    token_ids: list[int] = []
    items: list[Item] = []
    for part in parts:
        if isinstance(part, Item):
            items.append(replace(part, offset=len(token_ids)))
            token_ids += [5 if part.modality == "video" else 4] * part.length
        else:
            token_ids += rng.integers(7, HashEngine.vocab_size, part).tolist()
    return Prompt(np.array(token_ids, dtype=np.int64), tuple(items))


def make_workload(
    prompts: Mapping[str, Prompt | VlbatchError],
    *,
    max_tokens: int = 4,
    arrivals: Mapping[str, int] | None = None,
    **settings: Any,
) -> Workload:
    """Requests for these prompts, in this order."""
    arrivals = arrivals or {}
    requests = [
        Request(r, "made", max_tokens=max_tokens, arrival=arrivals.get(r, 0)) for r in prompts
    ]
    return Workload(requests, dict(prompts), RunSettings(**settings))


def random_workload(rng: np.random.Generator, *, one_size: bool = False) -> Workload:
    """Up to ten requests that share some contents, under settings that are often just enough.

    With ``one_size`` all contents have as many feature rows as can be encoded in a step.
    """
    contents = [
        make_item(f"content {n}", (1, 2, 3)) if one_size else _random_item(rng, f"content {n}")
        for n in range(rng.integers(1, 7))
    ]
    prompts: dict[str, Prompt | VlbatchError] = {}
    requests = []
    for n in range(rng.integers(1, 11)):
        req_id = f"r{n}"
        parts: list[int | Item] = [int(rng.integers(0, 6))]
        for _ in range(rng.integers(0, 4)):
            parts += [contents[rng.integers(len(contents))], int(rng.integers(0, 4))]
        prompts[req_id] = make_prompt(1, *parts, seed=int(rng.integers(2**32)))
        requests.append(
            Request(
                req_id, "made", max_tokens=int(rng.integers(1, 9)), arrival=int(rng.integers(0, 25))
            )
        )
    settings = _random_settings(rng, requests, prompts)
    if one_size:
        settings = replace(settings, encode_rows=6)
    return Workload(requests, prompts, settings)


def _random_item(rng: np.random.Generator, name: str) -> Item:
    h, w = (int(side) for side in rng.integers(1, 4, 2))
    if rng.random() < 0.3:
        seconds = [None, 0.5, 1.0, 3.3][rng.integers(4)]
        return make_item(name, (int(rng.integers(1, 4)), h, w), video=True, seconds=seconds)
    return make_item(name, (1, h, w))


def _random_settings(
    rng: np.random.Generator, requests: list[Request], prompts: Mapping[str, Any]
) -> RunSettings:
    prompt_lens = {r: len(p.token_ids) for r, p in prompts.items()}
    longest = max(prompt_lens[r.req_id] + r.max_tokens - 1 for r in requests)
    max_model_len = max(prompt_lens.values()) + int(rng.choice([0, 2, 50]))
    largest = max((item.num_rows for p in prompts.values() for item in p.items), default=1)
    block_size = int(rng.integers(1, 9))
    fewest_blocks = -(-min(longest, max_model_len) // block_size)
    max_num_seqs = int(rng.integers(1, 7))
    return RunSettings(
        max_num_seqs=max_num_seqs,
        chunk=int(rng.integers(1, 20)),
        token_budget=max_num_seqs + int(rng.choice([0, 3, 30])),
        block_size=block_size,
        kv_blocks=int(fewest_blocks * rng.choice([1, 1.4, 5])),
        max_model_len=max_model_len,
        cache_bytes=int(largest * rng.choice([1, 1.3, 2, 10])) * ROW_BYTES,
        encode_rows=int(largest * rng.choice([1, 1.5, 10])),
        order=["split", "two", "arrival"][rng.integers(3)],  # type: ignore[arg-type]
        stable=bool(rng.integers(2)),
    )
