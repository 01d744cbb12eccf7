"""``vlbatch bench``: what it writes and what it refuses. Nothing here is timed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from vlbatch.bench.cli import bench_command
from vlbatch.cli import main


@pytest.mark.parametrize(
    ("name", "fact", "shown"), [("step", "num_reqs", "whole step"), ("reorder", "ratios", "v2")]
)
def test_json_and_table(tmp_path: Path, name: str, fact: str, shown: str) -> None:
    """--json writes machine, timings and facts side by side; the screen has a table."""
    out = tmp_path / "out.json"
    result = CliRunner().invoke(bench_command, [name, "--num-reqs", "8", "--json", str(out)])

    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text(encoding="utf-8"))
    assert {"machine", "timings", fact} <= written.keys()
    assert "vllm" not in written.get("ratios", {})
    assert shown in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "--num-reqs", "8"], "--device measures 256 requests"),
        (["--device", "--peer", "vllm"], "--device measures 256 requests"),
        (["step", "--peer", "vllm"], "--peer is for reorder or all"),
        (["cache", "--num-reqs", "8"], "--num-reqs is for reorder, step or all"),
        (["step", "--json", "no/such/folder/out.json"], "no/such/folder is not a folder"),
    ],
)
def test_options_that_do_not_go_together(arguments: list[str], message: str) -> None:
    """An option that would be ignored, or fail after the run, is refused before it."""
    result = CliRunner().invoke(bench_command, arguments)

    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("arguments", "package", "install"),
    [
        (["reorder", "--num-reqs", "8", "--peer", "vllm"], "vllm", "pip install 'vllm==0.33.*'"),
        (["--device"], "torch", "install vlbatch[torch,cuda]"),
    ],
)
def test_missing_package(
    arguments: list[str],
    package: str,
    install: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without its package an option ends with exit code 2 and says what to install."""
    for name in ("peer_vllm", "device"):
        monkeypatch.delitem(sys.modules, f"vlbatch.bench.{name}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)  # Python's way to forbid an import
    monkeypatch.setattr(sys, "argv", ["vlbatch", "bench", *arguments])
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")

    with pytest.raises(SystemExit) as stopped:
        main()

    assert stopped.value.code == 2
    assert install in capsys.readouterr().err
