"""The public typing surface, checked by mypy where it is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def mypy(*files: Path) -> str:
    """Check files with the project's settings; returns what mypy says."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *map(str, files)],
        cwd=HERE.parent, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_public_types(tmp_path: Path) -> None:
    """Right uses of the public API type-check, wrong ones do not."""
    pytest.importorskip("mypy")
    assert "Success" in (said := mypy(HERE / "typing_api.py")), said
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from vlbatch import InputBatch\nInputBatch(7)\n")
    assert "wrong.py:2: error" in mypy(wrong)
