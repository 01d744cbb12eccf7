"""The engine that tests of draft heads run on: Paddle's, or transformers' in a process of its own.

PaddleFormers and transformers on torch cannot be imported into one process.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest

FIXTURES = Path(__file__).parents[2] / "fixtures"
MODEL = FIXTURES / "tiny-vl"

VARIABLE = "VLBATCH_TEST_ENGINE"
NAME = os.environ.get(VARIABLE, "paddle")


def make_test_engine(num_blocks: int, block_size: int) -> Any:
    """The engine of this process; skips the test where its libraries are not installed."""
    if NAME == "paddle":
        pytest.importorskip("paddleformers", reason="needs the run extra")
        from vlbatch.runner.paddle_engine import PaddleEngine

        return PaddleEngine(MODEL, num_blocks=num_blocks, block_size=block_size)
    from vlbatch.runner.transformers_engine import TransformersEngine

    return TransformersEngine(
        MODEL, num_blocks=num_blocks, block_size=block_size, max_tokens=64, max_context=160
    )


def to_tensor(array: Any) -> Any:
    """An array of the engine's library."""
    if NAME == "paddle":
        return importlib.import_module("paddle").to_tensor(array)
    return importlib.import_module("torch").from_numpy(array)
