"""Keeps third-party noise off the screen while a model library is imported or loads weights."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class _MutedStream(io.TextIOBase):
    """Drops text until it is released, then forwards it to the ``sys.stderr`` of that moment.

    A log handler created while muted keeps this stream for good, hence the forwarding.
    """

    def __init__(self) -> None:
        self._muted = True

    def release(self) -> None:
        self._muted = False

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text) if self._muted else sys.stderr.write(text)

    def flush(self) -> None:
        if not self._muted:
            sys.stderr.flush()


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Drop what libraries print, log below ERROR or warn about inside the block.

    Exceptions pass through. Afterwards streams, warning filters, the log threshold and the root
    logger's handlers and level (Paddle's import changes both) are what they were before. Streams
    and filters belong to the process, so other threads are quiet for as long as the block lasts.
    """
    root = logging.getLogger()
    handlers, level, threshold = list(root.handlers), root.level, logging.root.manager.disable
    stream = _MutedStream()
    logging.disable(max(threshold, logging.WARNING))
    try:
        with redirect_stdout(stream), redirect_stderr(stream), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        stream.release()
        logging.disable(threshold)
        root.handlers[:] = handlers
        root.setLevel(level)
