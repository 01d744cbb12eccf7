"""docs/alignment.md: its code runs, and does what the text says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from vlbatch.replay import replay_file

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "alignment.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python(?: title=(\S+))?\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
FILES = {name: code for name, code in BLOCKS if name}
SNIPPETS = [code for name, code in BLOCKS if not name]


@pytest.fixture
def written(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with the files of the page, and no plugin but ours."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name, code in FILES.items():
        (pytester.path / name).write_text(code, encoding="utf-8")
        # other tests of this run may have a module of that name
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    return pytester


def run(pytester: pytest.Pytester, *arguments: object) -> pytest.RunResult:
    return pytester.runpytest_inprocess("-p", "vlbatch.replay.plugin", *map(str, arguments))


def test_the_runner_is_the_one_in_the_tests() -> None:
    """The page shows the runner that the tests use, word for word."""
    assert FILES["example_runner.py"] == (Path(__file__).parent / "example_runner.py").read_text()


def test_right_runner_passes(written: pytest.Pytester) -> None:
    """The runner of the page passes its test."""
    run(written, "test_runner.py").assert_outcomes(passed=1)


def test_forgetful_runner_is_caught(written: pytest.Pytester) -> None:
    """The runner with the bug fails, with the message that the page shows."""
    result = run(written, "test_forgetful.py", "-k", "test_alignment")

    (shown,) = re.findall(r"^```text\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    result.assert_outcomes(failed=1)
    printed = [" ".join(line.split()) for line in result.outlines]
    first = printed.index(" ".join(shown.splitlines()[0].split()))
    expected = [" ".join(line.split()) for line in shown.splitlines()]
    assert printed[first : first + len(expected)] == expected


def test_scenarios_as_tests(written: pytest.Pytester) -> None:
    """The toy passes the scenarios that the page picks, but for those with events it lacks."""
    folder = ROOT / "fixtures" / "scenarios"
    result = run(written, "test_scenarios.py", "--vlbatch-scenarios", folder, "-k", "b4")

    outcomes = result.parseoutcomes()
    assert outcomes["passed"] >= 5
    assert not outcomes.keys() & {"failed", "errors"}


def test_snippets_run_in_order(
    written: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other pieces run one after the other, and their traces replay."""
    monkeypatch.syspath_prepend(written.path)
    space: dict[str, object] = {}
    for code in SNIPPETS:
        exec(code, space)  # noqa: S102 (code of our own page)

    assert "AuditReport(num_requests=1" in capsys.readouterr().out
    for trace in ("trace.jsonl.gz", "trace.jsonl"):
        assert replay_file(written.path / trace).status == "ok"
