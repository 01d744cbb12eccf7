"""The ring of pinned slots that records are uploaded from, with a driver that only takes notes."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from vlbatch.backends.cuda.program import PinnedRing


class Notes:
    """Stands for ``Kernels``: calls of the driver, and host memory for pinned memory."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.memory: list[Any] = []

    def call(self, name: str, *arguments: Any) -> Any:
        self.calls.append((name, *arguments))
        if name == "cuMemHostAlloc":
            self.memory.append(ctypes.create_string_buffer(arguments[0]))
            return ctypes.addressof(self.memory[-1])
        if name == "cuEventCreate":
            return f"event {sum(call[0] == name for call in self.calls) - 1}"
        return None


def test_slots_are_not_rewritten_in_flight() -> None:
    """A slot is given again only after the event behind its last upload was waited for."""
    notes = Notes()
    ring = PinnedRing(notes, 16, 2)  # type: ignore[arg-type]  # a stand-in
    del notes.calls[:]
    for step in range(3):
        ring.slot()[:] = step
        ring.upload(4096, 4, 7)
    waits = [call for call in notes.calls if call[0] == "cuEventSynchronize"]

    assert waits == [("cuEventSynchronize", "event 0")]
    assert notes.calls.index(waits[0]) == 4, "before the third upload, not before the second"
    assert [m.raw[:4] for m in notes.memory] == [b"\2\0\0\0", b"\1\0\0\0"]


def test_upload_sends_the_first_words() -> None:
    """Only the words that are asked for travel, and their event follows on the same stream."""
    notes = Notes()
    ring = PinnedRing(notes, 64, 1)  # type: ignore[arg-type]  # a stand-in
    ring.slot()[:3] = np.arange(3)
    ring.upload(4096, 3, 7)
    address = ctypes.addressof(notes.memory[0])

    assert notes.calls[-2:] == [
        ("cuMemcpyHtoDAsync", 4096, address, 12, 7),
        ("cuEventRecord", "event 0", 7),
    ]
