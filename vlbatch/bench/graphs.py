"""Steps of the transformers engine from captured graphs against the same steps run eagerly.

``python -m vlbatch.bench.graphs MODEL [--json OUT]``; needs a CUDA device.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np

from vlbatch.bench.harness import machine, measure
from vlbatch.graphs import GraphKind
from vlbatch.order import DECODE, PREFILL, BatchOrder
from vlbatch.runner import GraphEngine, RunSettings, StepInputs, make_engine

DECODE_REQUESTS = (1, 2, 4, 8, 16, 32, 64)
PREFILL_TOKENS = (64, 128, 256, 512)
_CONTEXT = 128
_PROMPT = 64

SETTINGS = RunSettings(
    max_num_seqs=64,
    chunk=_PROMPT,
    token_budget=512,
    block_size=16,
    kv_blocks=64 * _CONTEXT // 16 + 64,
    max_model_len=_CONTEXT + 16,
    device="cuda",
    graph="both",
)


def make_step(kind: GraphKind, num_reqs: int, vocab_size: int) -> StepInputs:
    """A step of so many decodes after 128 tokens each, or of so many prompts of 64 tokens."""
    is_decode = kind == "decode"
    scheduled = np.full(num_reqs, 1 if is_decode else _PROMPT, dtype=np.int64)
    computed = np.full(num_reqs, _CONTEXT if is_decode else 0, dtype=np.int64)
    order = BatchOrder(
        batch_id="bench", step=0, policy="split",
        req_ids=tuple(f"r{n}" for n in range(num_reqs)), idle=(),
        slots=np.arange(num_reqs), prompt_lens=computed if is_decode else scheduled,
        computed=computed, scheduled=scheduled,
        classes=np.full(num_reqs, DECODE if is_decode else PREFILL, dtype=np.int64),
    )  # fmt: skip
    blocks = -(-SETTINGS.max_model_len // SETTINGS.block_size)
    return StepInputs(
        token_ids=np.arange(order.num_tokens, dtype=np.int64) % vocab_size,
        positions=np.tile(order.token_indices, (3, 1)),
        query_start=order.query_start,
        computed=computed.astype(np.int32),
        block_tables=np.arange(num_reqs * blocks, dtype=np.int32).reshape(num_reqs, blocks),
        feature_tokens=np.zeros(0, dtype=np.int64),
        features=[],
        logit_tokens=(order.query_start[1:] - 1).astype(np.int64),
        order=order,
    )


def run_graphs(model_dir: Path) -> dict[str, object]:
    """Time whole steps (inputs, text layers, logits on the host), eager and captured, in turns.

    Returns:
        Capture seconds and bytes, and a row a step: kind, tokens, medians in milliseconds, the
        largest difference of a logit.
    """
    engine = make_engine("transformers", model_dir, SETTINGS)
    assert isinstance(engine, GraphEngine)  # noqa: S101 (the settings ask for graphs)
    cases: list[tuple[GraphKind, int]] = [("decode", n) for n in DECODE_REQUESTS]
    cases += [("prefill", n // _PROMPT) for n in PREFILL_TOKENS]
    rows = []
    for kind, num_reqs in cases:
        inputs = make_step(kind, num_reqs, engine.vocab_size)
        off = float(np.abs(engine.eager.forward(inputs) - engine.forward(inputs)).max())
        timings = measure(_methods(engine, inputs))
        rows.append({
            "kind": kind, "tokens": inputs.token_ids.size, "largest_difference": off,
            **{name: 1e3 * timing.median for name, timing in timings.items()},
        })  # fmt: skip
    return {"machine": machine(), "capture": engine.report(), "steps": rows}


def _methods(engine: GraphEngine, inputs: StepInputs) -> dict[str, Callable[[int], object]]:
    """A whole step, whose logits end on the host; and its text layers alone, then a wait."""
    import torch

    order = inputs.order
    assert order is not None  # noqa: S101 (make_step gives one)
    chosen = engine.dispatcher.choose(order)
    kind, num_tokens = chosen.kind, chosen.padded_tokens
    assert kind is not None  # noqa: S101 (every case is a captured size)

    def text(_: int) -> None:
        engine.eager.run_text(num_tokens)
        torch.cuda.synchronize()

    def captured_text(_: int) -> None:
        engine.pool.replay(kind, num_tokens)
        torch.cuda.synchronize()

    return {
        "eager_ms": lambda _: engine.eager.forward(inputs),
        "captured_ms": lambda _: engine.forward(inputs),
        "eager_text_ms": text,
        "captured_text_ms": captured_text,
    }


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "json_out", type=click.Path(dir_okay=False, path_type=Path))
def main(model: Path, json_out: Path | None) -> None:
    """Print a row a step: captured against eager."""
    outcome = run_graphs(model)
    click.echo(json.dumps(outcome, indent=1))
    if json_out is not None:
        json_out.write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
