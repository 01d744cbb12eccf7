"""The page for those who come from FastDeploy: its code runs as it stands, its names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vlbatch.integrations import fastdeploy

PAGE = Path(__file__).parents[2] / "docs" / "fastdeploy.md"
TEXT = PAGE.read_text(encoding="utf-8")


def code_of(title: str) -> str:
    """A block of the page."""
    found = re.search(rf"```python title={title}\n(.*?)```", TEXT, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("backend", ["numpy", "paddle", "paddle-tensor"])
def test_two_steps(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The example holds its own assertions on numpy and Paddle, and prints what the page says."""
    if backend != "numpy":
        pytest.importorskip("paddle")
    source = code_of("two_steps.py")
    assert source.count('backend="numpy"') == 1
    source = source.replace('backend="numpy"', f'backend="{backend}"')
    exec(compile(source, str(PAGE), "exec"), {})  # noqa: S102 (our own page)
    printed = capsys.readouterr().out.strip()
    assert f"It prints `{printed}`." in TEXT


def test_text_only() -> None:
    """The example of a text model runs."""
    exec(compile(code_of("text_only.py"), str(PAGE), "exec"), {})  # noqa: S102 (our own page)


def test_the_import_exists() -> None:
    """Each name of the import to change is one of the module."""
    block = re.search(r"```diff\n(.*?)```", TEXT, re.DOTALL)
    assert block is not None
    names = re.findall(r"^ +(\w+),$", block[1], re.MULTILINE)
    assert len(names) == 5
    assert set(names) <= set(fastdeploy.__all__)


def test_calls_exist() -> None:
    """Each call that the page shows is a method of a batch or a function of the module."""
    ours = {*dir(fastdeploy.InputBatch), *dir(fastdeploy.ProposerInputBatch), *dir(fastdeploy)}
    columns = [line.split("|")[2] for line in TEXT.splitlines() if line.startswith("| ")]
    called = set(re.findall(r"(?:share_inputs\.|`)(\w+)\(", " ".join(columns)))
    assert {"add", "remove", "process_mm_features", "process_reorder", "positions"} <= called
    assert called <= ours
