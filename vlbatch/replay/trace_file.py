"""Writing a trace in whole lines, so that a crash loses at most what is being written."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final


class TraceFile:
    """A file of JSON lines, through gzip if its name ends in ``.gz``.

    Args:
        path: replaced if it exists.

    """

    def __init__(self, path: str | Path) -> None:
        self._raw = Path(path).open("wb")  # noqa: SIM115 (open as long as this object)
        zipped = str(path).endswith(".gz")
        self._zip = gzip.GzipFile(fileobj=self._raw, mode="wb", compresslevel=4) if zipped else None
        self._waiting: list[bytes] = []

    def write(self, lines: Iterable[Mapping[str, object]]) -> None:
        """Append one line for each object; it is in the file after ``flush``."""
        self._waiting += map(_encode, lines)

    def flush(self) -> None:
        """Hand everything to the operating system, so that it can be read however we end."""
        data = b"".join(self._waiting)
        self._waiting.clear()
        if self._zip is None:
            self._raw.write(data)
        else:
            self._zip.write(data)
            self._zip.flush()
        self._raw.flush()

    def close(self) -> None:
        """End the file; closing twice changes nothing."""
        if self._raw.closed:
            return
        self.flush()
        if self._zip is not None:
            self._zip.close()
        self._raw.close()


_JSON: Final = json.JSONEncoder(separators=(",", ":"))


def _encode(line: Mapping[str, object]) -> bytes:
    return _JSON.encode(line).encode() + b"\n"
