"""The tests of draft heads and of speculation on the real model, on the transformers engine."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from model_engines import NAME, VARIABLE

FILES = ("test_mtp_heads.py", "test_real_model.py")


@pytest.mark.slow
@pytest.mark.skipif(NAME != "paddle", reason="is that other process")
@pytest.mark.skipif(
    not (find_spec("torch") and find_spec("transformers")), reason="needs torch and transformers"
)
def test_on_the_transformers_engine() -> None:
    """The head equals its formulas, and drafts change no token, on torch as on Paddle."""
    here = Path(__file__).parent
    selection = "test_mtp_heads or rejected or (test_same_tokens and mtp and 4)"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *(here / name for name in FILES), "-k", selection],
        env={**os.environ, VARIABLE: "transformers", "OMP_NUM_THREADS": "1"},
        cwd=here.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1]
