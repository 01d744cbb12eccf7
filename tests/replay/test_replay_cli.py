"""``vlbatch replay``: lines, table, data and exit codes."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from replay_builders import add, expect, image, step, write_file

from vlbatch.backends import BACKENDS
from vlbatch.errors import InvalidSetting
from vlbatch.replay.cli import replay_command
from vlbatch.replay.declared import declare

X = image("X", 2, (1, 2, 2))


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A file that passes."""
    return write_file(tmp_path / "good.jsonl", [add("A", 8, X), step(A=8), expect(encoded=["X"])])


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    """A file whose fourth line is not met."""
    lines = [add("A", 8, X), step(A=8), expect(features={"A": [[3, "X", 0, 4]]})]
    return write_file(tmp_path / "wrong.jsonl", lines)


@pytest.fixture
def unreadable(tmp_path: Path) -> Path:
    """A file whose second line has an unknown key."""
    return write_file(tmp_path / "unreadable.jsonl", [{"leap": 1}])


def run(*arguments: str | Path) -> Result:
    """Run the command, stdout and stderr apart (before click 8.2 that had to be asked for)."""
    separate = {"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}
    runner = CliRunner(**separate)
    return runner.invoke(replay_command, [str(argument) for argument in arguments])


def test_all_pass(good: Path) -> None:
    """Files that pass are ``ok``, one line each, exit code 0."""
    result = run(good, good)

    assert result.exit_code == 0
    assert result.stdout.splitlines() == [f"{good}: ok"] * 2


def test_divergence(good: Path, wrong: Path) -> None:
    """A divergence is one line with its number, what was expected and got; exit code 1."""
    result = run(wrong, good)

    assert result.exit_code == 1
    line, other = result.stdout.splitlines()
    assert line == (
        f"{wrong}: line 4, step 1: features at token 2 of request 'A': expected -, got (X, 0)"
    )
    assert other == f"{good}: ok"


def test_table(wrong: Path) -> None:
    """Wrong features are listed beside it: request, token, expected and got."""
    cells = [line.split("│") for line in run(wrong).stderr.splitlines() if "│" in line]

    assert [[cell.strip() for cell in line[1:5]] for line in cells] == [
        ["A", "2", "-", "(X, 0)"],
        ["A", "3", "(X, 0)", "(X, 1)"],
        ["A", "4", "(X, 1)", "(X, 2)"],
        ["A", "5", "(X, 2)", "(X, 3)"],
        ["A", "6", "(X, 3)", "-"],
    ]


def test_long_table_is_cut(tmp_path: Path) -> None:
    """A long table shows twenty tokens and says how many more there are."""
    lines = [add("A", 40, image("X", 2, (1, 5, 5))), step(A=40), expect(features={"A": []})]

    assert "and 5 tokens more" in run(write_file(tmp_path / "long.jsonl", lines)).stderr


def test_unreadable(good: Path, wrong: Path, unreadable: Path, tmp_path: Path) -> None:
    """A file that cannot be read makes it exit code 2; the others are replayed all the same."""
    result = run(unreadable, wrong, tmp_path / "missing.jsonl", good)

    assert result.exit_code == 2
    first, second, third, last = result.stdout.splitlines()
    assert first.startswith(f"{unreadable}: line 2: leap: unknown key; known are add, step")
    assert "line 4" in second
    assert third == f"{tmp_path / 'missing.jsonl'}: No such file or directory"
    assert last == f"{good}: ok"


def test_json(good: Path, wrong: Path, unreadable: Path, tmp_path: Path) -> None:
    """``--json`` writes the same as data."""
    out = tmp_path / "out.json"
    result = run(good, wrong, unreadable, "--json", out)

    assert result.exit_code == 2
    data = json.loads(out.read_text())
    assert data["backend"] == "numpy"
    passed, diverged, failed = data["files"]
    assert passed == {"file": str(good), "ok": True, "status": "ok", "events": 2}
    assert {key: diverged[key] for key in ("status", "line", "step", "req_id", "got")} == {
        "status": "diverged",
        "line": 4,
        "step": 1,
        "req_id": "A",
        "got": "(X, 0)",
    }
    assert diverged["table"][1] == {
        "req_id": "A",
        "token": 3,
        "expected": "(X, 0)",
        "got": "(X, 1)",
    }
    assert (failed["status"], failed["line"]) == ("unreadable", 2)


def test_torn_trace(tmp_path: Path) -> None:
    """A trace that was cut off is replayed up to there, and the line says so."""
    path = write_file(tmp_path / "trace.jsonl", [{"note": "a recorded trace"}, add("A", 4)])
    path.write_text(path.read_text() + '{"step": {"A"')

    result = run(path)

    assert result.exit_code == 0
    assert result.stdout.startswith(f"{path}: ok (up to a torn last line: {path}: line 4: not JSON")


def test_unknown_backend(good: Path) -> None:
    """An unknown backend is refused with the names there are."""
    result = run(good, "--backend", "abacus")

    assert isinstance(result.exception, InvalidSetting)
    assert all(name in str(result.exception) for name in BACKENDS)


def test_help_says_how_it_reads() -> None:
    """``--help`` says what is done where the format leaves room, and names the fields."""
    text = " ".join(run("--help").output.split())

    assert "a request that fails has no row in that step" in text
    for field in declare(max_step_tokens=1, max_token_ids=1):
        if field.is_per_request and field.name not in ("peer", "num_steps"):
            assert f" {field.name}" in text, field.name
