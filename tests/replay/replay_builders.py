"""Small scenario files for the tests of this folder."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vlbatch.replay import FileResult, replay_file

Line = dict[str, Any]

SCENARIOS = Path(__file__).parents[2] / "fixtures" / "scenarios"


def write_file(path: Path, lines: Iterable[Line | str], **header: Any) -> Path:
    """Write a header and lines; a string is written as it is."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    texts.insert(0, json.dumps({"vlbatch_scenario": 1, **header}))
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def replay_lines(tmp_path: Path, lines: Iterable[Line | str], **header: Any) -> FileResult:
    """Replay some lines behind a header; line 2 is the first of them."""
    return replay_file(write_file(tmp_path / "scenario.jsonl", lines, **header))


def image(key: str, offset: int, grid: tuple[int, int, int], **more: Any) -> Line:
    """An item whose span is as long as its grid has cells."""
    t, h, w = grid
    return {"key": key, "offset": offset, "length": t * h * w, "grid": list(grid), **more}


def add(req_id: str, prompt_len: int, *items: Line, **more: Any) -> Line:
    """An ``add`` line."""
    return {"add": {"req_id": req_id, "prompt_len": prompt_len, "items": list(items), **more}}


def step(**scheduled: int) -> Line:
    """A ``step`` line."""
    return {"step": scheduled}


def expect(**expected: Any) -> Line:
    """An ``expect`` line."""
    return {"expect": expected}
