"""vlbatch timeline: the kinds of picture, and what is said when there is none."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from vlbatch.replay.timeline_cli import timeline_command

TRACE = (
    '{"vlbatch_scenario": 1}\n'
    '{"note": "a recorded trace"}\n'
    '{"add": {"req_id": "a", "prompt_len": 3}}\n'
    '{"step": {"a": 3}}\n'
    '{"step": {"a": 1}}\n'
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE)
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(timeline_command, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("ending", "start"),
    [(".svg", b"<svg"), (".png", b"\x89PNG"), (".html", b"<!doctype html>"), (".SVG", b"<svg")],
)
def test_ending_says_the_kind(trace: Path, ending: str, start: bytes) -> None:
    """The ending of the output says what is written."""
    out = trace.with_name(f"out{ending}")
    result = run(trace, "-o", out)

    assert (result.exit_code, result.output) == (0, "")
    assert out.read_bytes().startswith(start)


def test_compressed_trace(trace: Path) -> None:
    """A trace through gzip makes the same picture, but for its name."""
    packed = trace.with_name("trace.jsonl.gz")
    packed.write_bytes(gzip.compress(TRACE.encode()))
    for source in (trace, packed):
        assert run(source, "-o", source.with_suffix(".svg")).exit_code == 0

    one = trace.with_suffix(".svg").read_text()
    assert packed.with_suffix(".svg").read_text() == one.replace("trace.jsonl<", "trace.jsonl.gz<")


def test_theme(trace: Path) -> None:
    """Pictures differ by theme."""
    pictures = set()
    for theme in ("light", "dark"):
        out = trace.with_name(f"{theme}.png")
        assert run(trace, "-o", out, "--theme", theme).exit_code == 0
        pictures.add(out.read_bytes())

    assert len(pictures) == 2


def test_unknown_ending(trace: Path) -> None:
    """Another ending is refused with the endings that there are."""
    result = run(trace, "-o", trace.with_name("out.gif"))

    assert result.exit_code == 2
    assert ".svg, .png, .html" in result.output


def test_unreadable_trace(trace: Path) -> None:
    """A file that is no scenario is refused with its line, and no picture is written."""
    trace.write_text('{"vlbatch_scenario": 1}\n{"stop": 1}\n')
    out = trace.with_name("out.svg")
    result = run(trace, "-o", out)

    assert result.exit_code == 2
    assert "line 2" in result.output
    assert not out.exists()


def test_no_such_folder(trace: Path) -> None:
    """An output that cannot be written is told on one line."""
    result = run(trace, "-o", trace.with_name("nowhere") / "out.svg")

    assert result.exit_code == 2
    assert len(result.output.splitlines()) == 1


def test_torn_trace(trace: Path) -> None:
    """A trace that ends in the middle of a line is drawn up to there, and that is said."""
    trace.write_text(TRACE + '{"step": {"a"')
    out = trace.with_name("out.svg")
    result = run(trace, "-o", out)

    assert result.exit_code == 0
    assert "drawn up to a torn last line" in result.output
    assert "2 steps" in out.read_text()
