"""Fixtures of all tests: every backend that is installed, and a seed that is printed."""

from __future__ import annotations

import os
import random
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from vlbatch import Backend, make_backend
from vlbatch.backends import BACKENDS

SEED = int(os.environ.get("VLBATCH_SEED") or random.SystemRandom().getrandbits(32))


def pytest_report_header() -> str:
    """Say how to repeat the random tests of this run."""
    return f"random walks: VLBATCH_SEED={SEED}"


def pytest_configure(config: pytest.Config) -> None:
    """Ignore what Paddle warns about on every import."""
    config.addinivalue_line("filterwarnings", "ignore:No ccache found:UserWarning")


INSTALLED = [name for name, (_, _, extra) in BACKENDS.items() if not extra or find_spec(extra)]
"""Backends whose library is there; ``test_backend_factory.py`` says which are left out."""


@pytest.fixture(params=INSTALLED)
def backend(request: pytest.FixtureRequest) -> Backend[Any, Any]:
    """Each installed backend in turn."""
    made = make_backend(request.param)
    if "paddle" in sys.modules:
        # Paddle's own SIGTERM handler can leave a process hanging
        sys.modules["paddle"].disable_signal_handler()
    return made


@pytest.fixture
def seed() -> int:
    """Seed of a random test; shown with its failure, and set by VLBATCH_SEED."""
    print(f"VLBATCH_SEED={SEED}")  # noqa: T201 (pytest shows it when the test fails)
    return SEED
