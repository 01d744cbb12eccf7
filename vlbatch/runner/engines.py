"""Engines by name.

A framework is imported where an engine on it is made.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vlbatch.errors import InvalidSetting
from vlbatch.runner.alone import Answer, answer_alone
from vlbatch.runner.graph_engine import GraphEngine, graph_config
from vlbatch.runner.inputs import Engine
from vlbatch.runner.prompt import PromptBuilder
from vlbatch.runner.results import Result
from vlbatch.runner.settings import RunSettings

ENGINES = ("paddle", "transformers")


def make_engine(name: str, model_dir: Path, settings: RunSettings) -> Engine:
    """Load a model with a KV cache of the settings' size.

    Raises:
        InvalidSetting: no such engine, or it captures no graphs.
        MissingDependency: its library is not installed.
        VlbatchError: the folder holds no usable model.
    """
    if name == "paddle":
        return _make_paddle(model_dir, settings)
    if name == "transformers":
        return _make_transformers(model_dir, settings)
    raise InvalidSetting(f"no engine {name!r}; expected one of {ENGINES}", setting="engine")


def _make_paddle(model_dir: Path, settings: RunSettings) -> Engine:
    if settings.graph != "none":
        raise InvalidSetting(
            "only steps of the transformers engine are captured", setting="graph, engine"
        )
    from vlbatch.runner.paddle_engine import PaddleEngine

    return PaddleEngine(
        model_dir,
        num_blocks=settings.kv_blocks,
        block_size=settings.block_size,
        device=settings.device.replace("cuda", "gpu"),  # Paddle's name
    )


def _make_transformers(model_dir: Path, settings: RunSettings) -> Engine:
    from vlbatch.runner.transformers_engine import TransformersEngine

    config = graph_config(settings)
    engine = TransformersEngine(
        model_dir,
        num_blocks=settings.kv_blocks,
        block_size=settings.block_size,
        max_tokens=max(
            settings.token_budget,
            settings.max_model_len,  # a prompt alone is one step
            *config.sizes("decode"),
        ),
        max_context=settings.max_model_len,
        device=settings.device,
    )
    if settings.graph == "none":
        return engine
    from vlbatch.graphs.torch_graphs import TorchGraphs

    return GraphEngine(
        engine,
        config,
        TorchGraphs(),
        poison=settings.poison,
        check_every=1 if settings.poison else 64,
    )


def make_answerer(
    engine: Engine, prompts: PromptBuilder, settings: RunSettings
) -> Callable[[Result], Answer]:
    """A function that answers a result's request by itself, on the engine of the run."""

    def answer(result: Result) -> Answer:
        assert result.prompt is not None  # noqa: S101 (compare asks for finished requests only)
        return answer_alone(
            engine,
            result.prompt,
            max_tokens=result.request.max_tokens,
            eos_token_id=prompts.eos_token_id,
            max_model_len=settings.max_model_len,
            tokens_per_second=prompts.tokens_per_second,
            kv_blocks=settings.kv_blocks,
        )

    return answer
