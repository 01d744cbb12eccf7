"""``vlbatch run`` in this process, on request files with made-up pictures."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_cases import MODEL, Files, Outcome
from hash_engine import HashEngine

from vlbatch.cli import main, run
from vlbatch.runner import Runner

if importlib.util.find_spec("tokenizers") is None:
    collect_ignore_glob = ["test_*.py"]  # prompts need the extra vlbatch[run]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
def good(files: Files) -> list[dict[str, Any]]:
    """Requests that nothing is wrong with, which arrive one after the other."""
    files.picture("good-1.png", 2, 3, 1)
    files.picture("good-2.png", 3, 2, 2)
    files.clip("good-clip")
    return [
        {"req_id": "text", "prompt": "repeat 1 2 3 ?", "max_tokens": 6},
        {"req_id": "one", "prompt": "<image> which digit ?", "images": ["good-1.png"]},
        {
            "req_id": "mixed", "prompt": "<image> <video> <image> list all ?", "arrival": 2,
            "images": ["good-1.png", "good-2.png"], "videos": ["good-clip"], "max_tokens": 5,
        },
        {"req_id": "late", "prompt": "<image> ?", "images": ["good-2.png"], "arrival": 5},
    ]  # fmt: skip


@pytest.fixture
def vlbatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Call ``vlbatch`` in this process, with the hash engine in place of a model."""
    runners: list[Runner] = []

    class Kept(Runner):
        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **keywords)
            runners.append(self)

    monkeypatch.setattr(run, "Runner", Kept)
    monkeypatch.setattr(run, "make_engine", lambda _, __, s: HashEngine(s.kv_blocks, s.block_size))

    def call(*arguments: object) -> Outcome:
        runners.clear()
        monkeypatch.setattr(sys, "argv", ["vlbatch", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        code = stopped.value.code
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return Outcome(0 if code is None else int(code), out, err, {}, runners)

    return call


@pytest.fixture
def answer(vlbatch: Callable[..., Outcome], tmp_path: Path) -> Callable[..., Outcome]:
    """``vlbatch run FILE --verify --json`` with the tiny model's folder; reads the JSON."""

    def call(path: Path, *options: object) -> Outcome:
        json_out = tmp_path / "out.json"
        json_out.unlink(missing_ok=True)
        outcome = vlbatch("run", path, "--model", MODEL, "--verify", "--json", json_out, *options)
        if json_out.exists():
            outcome.json = json.loads(json_out.read_text())
        return outcome

    return call
