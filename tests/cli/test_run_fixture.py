"""The main job with the real model: ``vlbatch run fixtures/requests.jsonl --verify``."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bad_media import write_bad_clips, write_bad_pictures
from cli_cases import FIXTURES, MODEL

from vlbatch.cli import main
from vlbatch.runner import FAULTS

REQUESTS = FIXTURES / "requests.jsonl"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("paddle", "paddleformers")),
        reason="needs the extra vlbatch[run]",
    ),
]


def call(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    """The command as a user calls it."""
    return subprocess.run(
        [sys.executable, "-m", "vlbatch", *map(str, arguments)],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture(scope="module")
def main_job(tmp_path_factory) -> tuple[subprocess.CompletedProcess[str], dict]:
    """The process and its JSON."""
    out = tmp_path_factory.mktemp("run") / "out.json"
    process = call("run", REQUESTS, "--verify", "--json", out, COLUMNS="80")
    return process, json.loads(out.read_text()) if out.exists() else {}


class TestMainJob:
    def test_exit_code(self, main_job):
        """All went well."""
        assert main_job[0].returncode == 0, main_job[0].stderr

    def test_every_request_is_verified(self, main_job):
        """Each request got the tokens and logits that it gets alone."""
        outcome = main_job[1]

        expected = [json.loads(line)["req_id"] for line in REQUESTS.read_text().splitlines()]
        assert [row["req_id"] for row in outcome["requests"]] == expected
        assert len(expected) >= 24
        assert all(row["status"] == "finished" for row in outcome["requests"])
        assert outcome["verified"] is True
        assert (outcome["verified_requests"], outcome["mismatches"]) == (expected, [])

    def test_answers(self, main_job):
        """At least 95 % of the answers are right."""
        correct = [row["correct"] for row in main_job[1]["requests"]]

        assert None not in correct
        assert sum(correct) >= 0.95 * len(correct)

    def test_every_event_happens(self, main_job):
        """The requests together cause every event that the batch state is there for."""
        outcome = main_job[1]

        events = {key: value for key, value in outcome.items() if isinstance(value, int)}
        events |= outcome["encoder"]
        assert [name for name, count in events.items() if not count] == []
        assert events.keys() >= {
            "steps", "reorders", "condenses", "rows_moved", "preemptions", "chunked_items",
            "encoded", "hits", "evicted", "peak_bytes",
        }  # fmt: skip

    def test_screen(self, main_job):
        """No library says anything: a table and four sentences, and the progress bar on stderr."""
        process = main_job[0]

        lines = process.stdout.splitlines()
        assert [line.split()[0] for line in lines[1:25]] == [
            row["req_id"] for row in main_job[1]["requests"]
        ]
        assert max(map(len, lines[:25])) <= 80
        assert re.fullmatch(r"24 of 24 requests answered, \d\d of 24 as expected", lines[25])
        assert lines[28].startswith("verified: 24 of 24 answered requests got exactly")
        assert len(lines) == 29
        (bar,) = process.stderr.splitlines()
        assert re.match(r"answering .* 24/24 step \d+, 0 running", bar)


@pytest.fixture
def in_process(tmp_path, monkeypatch, capfd):
    """The same command without the imports of a new process: exit code, JSON, stdout, stderr."""

    def call_main(*arguments: object) -> tuple[int, dict, str, str]:
        out = tmp_path / "out.json"
        argv = ["vlbatch", "run", *map(str, arguments), "--verify", "--json", str(out)]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as stopped:
            main()
        return stopped.value.code, json.loads(out.read_text()), *capfd.readouterr()

    return call_main


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_every_fault_is_noticed(in_process, name):
    """Each fault is exit 1, and the first mismatch names a request, a step and what differs."""
    code, outcome, _, _ = in_process(REQUESTS, "--inject", name)

    assert (code, outcome["verified"]) == (1, False)
    first = outcome["mismatches"][0]
    assert first["req_id"] in {row["req_id"] for row in outcome["requests"]}
    assert 0 <= first["step"] < outcome["steps"]
    if name == "drop-field:max_tokens":
        assert re.search("field max_tokens is|alone it", first["what"])
    else:
        gap = re.match(r"logits differ by ([\d.e+-]+) \(tolerance 0.001\)", first["what"])
        assert float(gap[1]) > 0.01  # batching itself makes 1e-5


@pytest.mark.parametrize("options", [("--order", "two"), ("--order", "arrival"), ("--chunk", 3)])
def test_other_settings_same_answers(in_process, main_job, options):
    """Row policy and chunk size change the steps and nothing of the answers."""
    code, outcome, _, _ = in_process(REQUESTS, *options)

    assert code == 0
    assert [r["tokens"] for r in outcome["requests"]] == [
        r["tokens"] for r in main_job[1]["requests"]
    ]
    assert outcome["steps"] != main_job[1]["steps"] or options[0] == "--order"


def test_bad_requests_among_good_ones(tmp_path):
    """With the real model too: bad requests are refused, the others verified, no noise."""
    reasons = {**write_bad_pictures(tmp_path), **write_bad_clips(tmp_path)}
    lines = [
        {"req_id": f"{name} as {kind}", "prompt": f"<{kind}> ?", f"{kind}s": [name]}
        for name in reasons
        for kind in ("image", "video")
    ]
    good = {
        "prompt": "<image> which digit is in image 1 ?", "answer": "6",
        "images": [str((FIXTURES / "media" / "6-large.png").resolve())],
    }  # fmt: skip
    lines = [
        {"req_id": "first", **good}, *lines, {"req_id": "long", "prompt": "list " * 500},
        {"req_id": "first", "prompt": "?"}, {"req_id": "many", "prompt": "?", "max_tokens": 10**6},
        {"req_id": "marks", "prompt": "<image> <image>"}, {"req_id": "last", **good},
    ]  # fmt: skip
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    process = call(
        "run", path, "--model", MODEL, "--verify", "--strict", "--json", tmp_path / "out.json",
        "--max-model-len", 400,
    )  # fmt: skip

    outcome = json.loads((tmp_path / "out.json").read_text())
    assert process.returncode == 1  # strict
    assert outcome["verified_requests"] == ["first", "last"]
    assert [r["correct"] for r in outcome["requests"] if r["answer"]] == [True, True]
    refused = [r for r in outcome["requests"] if r["status"] == "refused"]
    assert len(refused) == len(lines) - 2
    assert all(r["reason"].startswith(f"request {r['req_id']!r}: ") for r in refused)
    (bar,) = process.stderr.splitlines()
    assert bar.startswith("answering ")


def test_nothing_is_written_beside_the_model(in_process):
    """A run leaves the folders that it reads as they were."""
    before = {path: path.stat().st_mtime_ns for path in FIXTURES.rglob("*") if _is_data(path)}

    in_process(REQUESTS)

    after = {path: path.stat().st_mtime_ns for path in FIXTURES.rglob("*") if _is_data(path)}
    assert after == before


def _is_data(path: Path) -> bool:
    return path.suffix not in (".pyc", ".py") and "__pycache__" not in path.parts
