"""A run whose steps come from graphs equals an eager one; graphs are stood in for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hash_engine import _SALT, HashEngine, _mix
from made_runs import (
    MadePrompts,
    Workload,
    assert_nothing_left,
    make_prompt,
    make_workload,
    random_workload,
    run,
)

from vlbatch.errors import InvalidSetting, InvariantBroken, MissingDependency
from vlbatch.graphs import GraphConfig
from vlbatch.runner import GraphEngine, Runner, RunSettings, StepInputs, make_engine
from vlbatch.runner.graph_engine import graph_config

POISON = np.uint64(0xDEAD)


class FakeGraph:
    """Repeats the recorded work into the output of the capture."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.output = work, work().copy()

    def replay(self) -> None:
        np.copyto(self.output, self.work())


class FakeBackend:
    def capture(self, work: Callable[[], Any]) -> tuple[FakeGraph, Any]:
        graph = FakeGraph(work)
        return graph, graph.output

    def synchronize(self) -> None:
        pass

    def address(self, buffer: Any) -> int:
        return int(buffer.ctypes.data)

    def reserved_bytes(self) -> int:
        return 0


class StaticHashEngine(HashEngine):
    """The hash engine token by token, over buffers that never move; the last KV slot is for pads.

    Attributes:
        clones: hidden states that were copied so far.

    """

    def __init__(self, settings: RunSettings, max_tokens: int) -> None:
        super().__init__(settings.kv_blocks + 1, settings.block_size)
        self.pad_slot = settings.kv_blocks * settings.block_size
        width = settings.max_model_len
        self.buffers: dict[str, np.ndarray[Any, Any]] = {
            "keys": np.zeros(max_tokens, dtype=np.uint64),
            "slots": np.zeros(max_tokens, dtype=np.int64),
            "context": np.zeros((max_tokens, width), dtype=np.int64),
            "visible": np.zeros((max_tokens, width), dtype=bool),
        }
        self.clones = 0

    def static_tensors(self) -> dict[str, Any]:
        return {**self.buffers, "cache": self._keys}

    def load_pads(self, num_tokens: int) -> None:
        self._pads(slice(0, num_tokens), poison=False)

    def _pads(self, pads: slice, *, poison: bool) -> None:
        b = self.buffers
        b["keys"][pads] = POISON if poison else 0
        b["slots"][pads] = b["context"][pads] = self.pad_slot
        b["visible"][pads] = False

    def load(self, inputs: StepInputs, *, padded_tokens: int = 0, poison: bool = False) -> int:
        keys = self._embed(inputs)
        for axis in inputs.positions.astype(np.uint64):
            keys = _mix(keys * _SALT + axis)
        num, b = len(keys), self.buffers
        b["keys"][:num] = keys
        token = 0
        for slots, done in self._slots_by_row(inputs):
            for index in range(done, len(slots)):
                b["slots"][token] = slots[index]
                b["context"][token, : index + 1] = slots[: index + 1]
                b["context"][token, index + 1 :] = slots[index]
                b["visible"][token] = np.arange(b["visible"].shape[1]) <= index
                token += 1
        self._pads(slice(num, max(num, padded_tokens)), poison=poison)
        return num

    def run_text(self, num_tokens: int) -> Any:
        b, n = self.buffers, num_tokens
        keys = b["keys"][:n]
        places = np.arange(b["context"].shape[1], dtype=np.uint64) * _SALT
        for layer in self._keys:
            layer[b["slots"][:n]] = keys
            seen = np.where(b["visible"][:n], _mix(layer[b["context"][:n]] + places), 0)
            keys = _mix(keys ^ seen.sum(axis=1, dtype=np.uint64))
        return keys

    def logits(self, hidden: Any, tokens: Any) -> Any:
        return self._logits(hidden[tokens])

    def clone(self, hidden: Any) -> Any:
        self.clones += 1
        return hidden.copy()

    def forward_hidden(self, inputs: StepInputs) -> Any:
        raise NotImplementedError

    def make_draft_head(self, model_dir: object) -> Any:
        raise NotImplementedError


def make(work: Workload, graph: Any, *, poison: bool = True) -> GraphEngine:
    settings = replace(work.settings, device="cuda", graph=graph)
    config = graph_config(settings)
    max_tokens = max(settings.token_budget, settings.max_model_len, *config.sizes("decode"), 1)
    engine = StaticHashEngine(settings, max_tokens)
    return GraphEngine(engine, config, FakeBackend(), poison=poison, check_every=1)


@pytest.mark.parametrize("graph", ["decode", "prefill", "both"])
def test_same_as_eager(seed, graph):
    """Tokens and logits equal an eager run's bit for bit: rows move, leave and come back."""
    counts: Counter[str] = Counter()
    events: Counter[str] = Counter()
    for number in range(15):
        case = f"VLBATCH_SEED={seed}, {graph=}, {number=}"
        work = random_workload(np.random.default_rng([seed, number]))
        engine = make(work, graph)

        outcome = run(work, engine=engine)  # type: ignore[arg-type]  # in place of its like
        eager = run(work)

        assert outcome.mismatches == [], case
        for req_id, result in eager.results.items():
            assert outcome.results[req_id].tokens == result.tokens, case
            for got, wanted in zip(outcome.results[req_id].logits, result.logits, strict=True):
                np.testing.assert_array_equal(got, wanted, err_msg=case)
        assert_nothing_left(outcome.runner)
        counts.update(engine.dispatcher.counts)
        counters = outcome.runner.counters
        events.update(moved=counters.reorders, condensed=counters.condenses)
        assert sum(engine.dispatcher.counts.values()) == counters.steps, case
    assert (counts["decode"] > 0, counts["prefill"] > 0) == (graph != "prefill", graph != "decode")
    assert min(events["moved"], events["condensed"]) > 0, events


def two_requests(**settings: Any) -> Workload:
    return make_workload(
        {"a": make_prompt(5, seed=17), "b": make_prompt(7, seed=18)}, max_tokens=6,
        max_num_seqs=2, chunk=16, kv_blocks=10, block_size=4, max_model_len=20, **settings,
    )  # fmt: skip


def test_same_requests_again():
    """After a run has ended the same graphs answer the same requests, in new rows and blocks."""
    work = two_requests()
    engine = make(work, "both")
    prompts: Any = MadePrompts(work.prompts)
    wanted = {r: result.tokens for r, result in run(work).results.items()}
    for requests in (work.requests, work.requests[::-1], work.requests):
        results = Runner(engine, prompts, work.settings).run(requests)
        assert {r.request.req_id: r.tokens for r in results} == wanted
    assert engine.dispatcher.counts["prefill"] == 3


@pytest.mark.parametrize("name", ["keys", "slots", "context", "visible"])
def test_moved_buffer_is_caught(name):
    """A buffer that was replaced between two steps stops the run, naming the buffer."""
    work = two_requests()
    engine = make(work, "both")
    inside: Any = engine.eager

    def move(runner: Runner) -> None:
        inside.buffers[name] = inside.buffers[name].copy()

    with pytest.raises(InvariantBroken, match=rf"\['{name}'\] moved"):
        run(work, engine=engine, on_step=move)  # type: ignore[arg-type]  # in place of its like


def test_kept_hidden_states_are_copies():
    """Hidden states that leave the engine do not change with the next replay."""
    work = two_requests()
    engine = make(work, "both")
    kept: list[tuple[Any, Any]] = []

    class Keeping(GraphEngine):
        def forward(self, inputs: StepInputs) -> Any:
            logits, hidden = self.forward_hidden(inputs)
            kept.append((hidden, hidden.copy()))
            return logits

    engine.__class__ = Keeping
    run(work, engine=engine)  # type: ignore[arg-type]  # in place of its like

    assert len(kept) > 4
    assert all((now == then).all() for now, then in kept)


def test_pads_are_poisoned():
    """The pads of a captured step hold the poison, and the tokens of the step do not."""
    work = make_workload({"a": make_prompt(3)}, max_tokens=1, max_num_seqs=4, max_model_len=20)
    engine = make(work, "prefill")
    run(work, engine=engine)  # type: ignore[arg-type]  # in place of its like
    inside: Any = engine.eager

    assert engine.dispatcher.counts == {"prefill": 1}
    assert (inside.buffers["keys"][:4] == POISON).tolist() == [False, False, False, True]


def test_report():
    """The report has the sizes of both kinds and the steps by how they ran."""
    engine = make(two_requests(token_budget=16), "both", poison=False)

    report = engine.report()

    assert report["sizes"] == {"decode": (2, 1), "prefill": (16, 8, 4, 2, 1)}
    assert (report["steps"], report["poisoned"]) == ({}, False)


@pytest.mark.parametrize(
    ("settings", "message", "names"),
    [
        ({"graph": "both"}, "captured on a CUDA device, but the engine runs on 'cpu'",
         "graph, device"),
        ({"poison": True}, "no step is padded", "poison, graph"),
        ({"graph": "all", "device": "cuda"}, "got 'all'", "graph"),
        ({"prefill_gate": (0, 0.1)}, "got 0 prompts", "prefill_gate"),
        ({"prefill_gate": (1, float("inf"))}, "inf seconds", "prefill_gate"),
    ],
)  # fmt: skip
def test_contradictions(settings, message, names):
    """Settings that contradict each other are refused, naming both."""
    with pytest.raises(InvalidSetting, match=message) as caught:
        RunSettings(**settings)

    assert caught.value.setting == names


def test_engines_by_name(tmp_path):
    """An unknown engine, and graphs of an engine that has none, are refused."""
    with pytest.raises(InvalidSetting, match=r"no engine 'x'.*paddle.*transformers"):
        make_engine("x", tmp_path, RunSettings())
    with pytest.raises((InvalidSetting, MissingDependency), match="transformers engine"):
        make_engine("paddle", tmp_path, RunSettings(graph="both", device="cuda"))


def test_graph_config():
    """A run captures what its settings can use: whole groups of drafts, and no more than a step."""
    config = graph_config(
        RunSettings(device="cuda", graph="both", speculative="ngram", draft_tokens=2)
    )

    assert config == GraphConfig(
        max_num_seqs=8, num_draft_tokens=2, prefill_graphs=True, max_capture_shape_prefill=64
    )
    assert config.sizes("decode") == (24, 12, 6, 3)
