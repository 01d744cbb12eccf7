"""Writing a trace line by line, so that a crash loses at most the line being written."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final


class TraceFile:
    """A file of JSON lines, through gzip if its name ends in ``.gz``.

    Every call of ``write`` is handed to the operating system before it returns, also with gzip:
    what was written can be read however the process ends.

    Args:
        path: replaced if it exists.

    """

    def __init__(self, path: str | Path) -> None:
        self._raw = Path(path).open("wb")  # noqa: SIM115 (open as long as this object)
        zipped = str(path).endswith(".gz")
        self._zip = gzip.GzipFile(fileobj=self._raw, mode="wb", compresslevel=4) if zipped else None

    def write(self, lines: Iterable[Mapping[str, object]]) -> None:
        """Append one line for each object."""
        data = b"".join(_encode(line) for line in lines)
        if self._zip is None:
            self._raw.write(data)
        else:
            self._zip.write(data)
            self._zip.flush()
        self._raw.flush()

    def close(self) -> None:
        """End the file; closing twice changes nothing."""
        if self._zip is not None:
            self._zip.close()
        self._raw.close()


_JSON: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def _encode(line: Mapping[str, object]) -> bytes:
    return _JSON.encode(line).encode() + b"\n"
