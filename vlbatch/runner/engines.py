"""Engines by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vlbatch.errors import InvalidField
from vlbatch.runner.alone import Answer, answer_alone
from vlbatch.runner.inputs import Engine
from vlbatch.runner.prompt import PromptBuilder
from vlbatch.runner.results import Result
from vlbatch.runner.settings import RunSettings

ENGINES = ("paddle",)


def make_engine(name: str, model_dir: Path, settings: RunSettings) -> Engine:
    """Load a model with a KV cache of the settings' size.

    Raises:
        InvalidField: no such engine.
        MissingDependency: its library is not installed.
        VlbatchError: the folder holds no usable model.
    """
    if name != "paddle":
        raise InvalidField(f"no engine {name!r}; expected one of {ENGINES}", setting="engine")
    from vlbatch.runner.paddle_engine import PaddleEngine

    return PaddleEngine(model_dir, num_blocks=settings.kv_blocks, block_size=settings.block_size)


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
