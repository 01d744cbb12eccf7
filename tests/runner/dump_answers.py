"""Run the fixture requests on one engine: ``dump_answers.py ENGINE OUT.npz``, a process an engine.

``captured`` is the transformers engine behind ``GraphEngine``, with graphs that are stood in for
and NaN in all pads. OUT has for each request its tokens and its logits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vlbatch.runner import (
    GraphEngine,
    PromptBuilder,
    Runner,
    RunSettings,
    load_requests,
    make_engine,
)
from vlbatch.runner.graph_engine import graph_config

FIXTURES = Path(__file__).parents[2] / "fixtures"
MODEL = FIXTURES / "tiny-vl"
SETTINGS = RunSettings()


class Recorded:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.output = work, work().clone()

    def replay(self) -> None:
        self.output.copy_(self.work())


class Stand:
    def capture(self, work: Callable[[], Any]) -> tuple[Recorded, Any]:
        graph = Recorded(work)
        return graph, graph.output

    def synchronize(self) -> None:
        pass

    def address(self, buffer: Any) -> int:
        return int(buffer.data_ptr())

    def reserved_bytes(self) -> int:
        return 0


def make(name: str) -> Any:
    if name != "captured":
        return make_engine(name, MODEL, SETTINGS)
    config = graph_config(replace(SETTINGS, device="cuda", graph="both"))
    inside: Any = make_engine("transformers", MODEL, SETTINGS)
    return GraphEngine(inside, config, Stand(), poison=True, check_every=1)


def main(name: str, out: Path) -> None:
    engine = make(name)
    runner = Runner(engine, PromptBuilder(MODEL), SETTINGS)
    answers: dict[str, Any] = {}
    for result in runner.run(load_requests(FIXTURES / "requests.jsonl")):
        answers[f"{result.request.req_id} tokens"] = np.array(result.tokens)
        answers[f"{result.request.req_id} logits"] = np.stack(result.logits)
    if isinstance(engine, GraphEngine):
        counts = engine.dispatcher.counts
        assert counts["decode"]
        assert counts["prefill"]
    np.savez(out, **answers)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
