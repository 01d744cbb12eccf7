"""The page on drafts: its code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "drafts.md"


def test_example(capsys: pytest.CaptureFixture[str]) -> None:
    """The example holds its own assertions, and prints what the page says."""
    text = PAGE.read_text(encoding="utf-8")
    source = re.search(r"```python title=drafts.py\n(.*?)```", text, re.DOTALL)
    assert source is not None
    exec(compile(source[1], str(PAGE), "exec"), {})  # noqa: S102 (our own page)
    printed = capsys.readouterr().out.strip()

    assert f"It prints `{printed}`." in text
