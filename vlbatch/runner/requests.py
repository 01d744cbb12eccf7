"""Request files: one JSON object a line."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from vlbatch.errors import RequestFileError

_KNOWN = {"req_id", "prompt", "images", "videos", "max_tokens", "arrival", "answer"}


@dataclass(frozen=True, slots=True)
class Request:
    """One question.

    Attributes:
        req_id: unique in its file (checked at admission).
        prompt: text with ``<image>`` and ``<video>`` marks, in the order of the media.
        images: paths of pictures.
        videos: paths of clips: animations, video files or folders of frames.
        max_tokens: most tokens to generate.
        arrival: step before which it is unknown to the runner.
        answer: expected text, or ``None``.
    """

    req_id: str
    prompt: str
    images: tuple[Path, ...] = ()
    videos: tuple[Path, ...] = ()
    max_tokens: int = 8
    arrival: int = 0
    answer: str | None = None


def load_requests(path: Path) -> list[Request]:
    """Read a request file; media paths are relative to it and not opened here.

    Raises:
        RequestFileError: the file cannot be read, or a line is not a request; names the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestFileError(f"cannot read {path}: {error}") from error
    # Not splitlines(): it also cuts at separators that JSON allows inside a string.
    return [
        _parse(line, path, f"{path}:{number}")
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]


def _parse(line: str, path: Path, where: str) -> Request:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestFileError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise RequestFileError(f"{where}: got {type(record).__name__}; expected a JSON object")
    unknown = record.keys() - _KNOWN
    if unknown:
        raise RequestFileError(f"{where}: unknown keys {sorted(unknown)}; known: {sorted(_KNOWN)}")
    return Request(
        req_id=_text(record, "req_id", where),
        prompt=_text(record, "prompt", where),
        images=_paths(record, "images", path.parent, where),
        videos=_paths(record, "videos", path.parent, where),
        max_tokens=_count(record, "max_tokens", 8, 1, where),
        arrival=_count(record, "arrival", 0, 0, where),
        answer=None if record.get("answer") is None else _text(record, "answer", where),
    )


def _text(record: dict[str, object], key: str, where: str) -> str:
    value = record.get(key)
    if not _is_text(value):
        raise RequestFileError(f"{where}: {key} is {value!r}; expected a non-empty string")
    return str(value)


def _count(record: dict[str, object], key: str, default: int, least: int, where: str) -> int:
    value = record.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise RequestFileError(f"{where}: {key} is {value!r}; expected an integer >= {least}")
    return value


def _paths(record: dict[str, object], key: str, folder: Path, where: str) -> tuple[Path, ...]:
    value = record.get(key, [])
    if not isinstance(value, list) or not all(map(_is_text, value)):
        raise RequestFileError(f"{where}: {key} is {value!r}; expected a list of paths")
    return tuple(folder / p for p in value)


def _is_text(value: object) -> bool:
    """Whether this is a non-empty string without half of a surrogate pair, which JSON can spell."""
    return isinstance(value, str) and value != "" and not re.search("[\ud800-\udfff]", value)
