"""Fingerprints of feature rows: which row of which item did a token really get?

A fingerprint is the first eight bytes of the blake3 hash of a row's bytes over all levels. It is
taken of what lies in memory, so a row that was cast on its way has another one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from vlbatch.errors import InvalidField

Fingerprints: TypeAlias = npt.NDArray[np.uint64]
"""One a feature row, uint64 ``[rows]``."""

# Any: the element type is known at run time only
HostRows: TypeAlias = npt.NDArray[Any]

Source: TypeAlias = "tuple[str, int]"
"""Key and feature row."""


def row_fingerprints(features: object) -> Fingerprints:
    """Fingerprint each row of one item's features.

    Args:
        features: an array or tensor ``[rows, hidden]``, or a tuple of one a level with as many
            rows. What lies on a device is copied to the host.

    Raises:
        InvalidField: another number of axes, or levels of different lengths.

    """
    levels = [host_rows(level) for level in _levels(features)]
    if len({len(level) for level in levels}) > 1:
        raise InvalidField(f"levels have {[len(level) for level in levels]} rows; expected as many")
    rows = levels[0] if len(levels) == 1 else np.concatenate([_bytes(x) for x in levels], axis=1)
    hashes = b"".join([blake3(row).digest(length=8) for row in _bytes(rows)])
    return np.frombuffer(hashes, dtype="<u8").astype(np.uint64, copy=False)


def _levels(features: object) -> tuple[object, ...]:
    return features if isinstance(features, tuple) else (features,)


def _bytes(rows: HostRows) -> npt.NDArray[np.uint8]:
    """The same memory as uint8 ``[rows, bytes of a row]``."""
    contiguous = np.ascontiguousarray(rows)
    return contiguous.view(np.uint8).reshape(len(rows), rows.shape[1] * rows.itemsize)


def host_rows(array: object) -> HostRows:
    """Bring an array or tensor ``[rows, hidden]`` to the host, without a copy where it is there.

    Raises:
        InvalidField: another number of axes.

    """
    rows = to_host(array)
    if rows.ndim != 2 or rows.shape[1] == 0:
        raise InvalidField(
            f"features are a {type(array).__name__} of shape {rows.shape}; expected [rows, hidden]"
        )
    return rows


def to_host(array: object) -> HostRows:
    """An array, a tensor or nested lists as a numpy array; floats that numpy lacks are widened."""
    if isinstance(array, np.ndarray):
        return array
    tensor: Any = array  # Any: a torch or Paddle tensor; neither library is imported here
    library = type(array).__module__.partition(".")[0]
    if library not in ("torch", "paddle"):
        return np.asarray(array)
    if library == "torch":
        tensor = tensor.detach().cpu()
    if _LACKING.search(str(tensor.dtype)):
        tensor = tensor.float() if library == "torch" else tensor.astype("float32")
    return np.asarray(tensor.numpy())


_LACKING = re.compile("bfloat16|float8")


class FingerprintBook:
    """Fingerprints by key, with a bound on the rows that are remembered.

    Keys of live requests are pinned and stay; of the others the longest unused goes first. A key
    that is encoded again with other values (new weights, or an encoder that is not deterministic)
    keeps its older rows too: a request may still hold them.

    Args:
        max_rows: rows to remember; exceeded only by what is pinned.

    """

    def __init__(self, max_rows: int = 1 << 20) -> None:
        self._max_rows = max_rows
        self._num_rows = 0
        self._known: dict[str, list[Fingerprints]] = {}  # longest unused first; newest version last
        self._pins: Counter[str] = Counter()

    @property
    def num_rows(self) -> int:
        """Rows remembered."""
        return self._num_rows

    def pin(self, key: str) -> None:
        """A live request has an item of this key."""
        self._pins[key] += 1

    def unpin(self, key: str) -> None:
        """That request has left."""
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]
            self._shrink()

    def learn(self, key: str, prints: Fingerprints) -> None:
        """Remember the rows of a key."""
        versions = self._known.pop(key, [])
        if not any(np.array_equal(prints, version) for version in versions):
            versions.append(prints)
            self._num_rows += len(prints)
        self._known[key] = versions
        self._shrink()

    def _shrink(self) -> None:
        if self._num_rows <= self._max_rows:
            return
        for key in [key for key in self._known if key not in self._pins]:
            self._num_rows -= sum(len(version) for version in self._known.pop(key))
            if self._num_rows <= self._max_rows:
                return

    def knows(self, key: str) -> bool:
        """Whether any rows of a key are remembered."""
        return key in self._known

    def agrees(
        self, key: str, rows: npt.NDArray[np.int64], prints: Fingerprints
    ) -> npt.NDArray[np.bool_]:
        """Whether each print is that of the row of the key, in any version of it; bool ``[n]``."""
        agrees = np.zeros(len(rows), dtype=np.bool_)
        for version in self._known.get(key, ()):
            inside = rows < len(version)
            agrees[inside] |= version[rows[inside]] == prints[inside]
        return agrees

    def find(self, prints: Fingerprints, preferred: Sequence[str] = ()) -> list[Source | None]:
        """Where each print comes from; ``None`` where it is that of no row remembered.

        Args:
            prints: uint64 ``[n]``.
            preferred: keys to look at first, for rows that several items have in common.

        """
        found: list[Source | None] = [None] * len(prints)
        order = np.argsort(prints, kind="stable")
        ordered = prints[order]
        for key in dict.fromkeys((*preferred, *self._known)):
            for version in self._known.get(key, ()):
                first = np.searchsorted(ordered, version, side="left")
                last = np.searchsorted(ordered, version, side="right")
                for row in np.flatnonzero(last > first).tolist():
                    for n in order[first[row] : last[row]].tolist():
                        found[n] = found[n] or (key, row)
        return found


def digest(prints: Fingerprints) -> str:
    """One hex digest of all rows of an item, to compare two traces by."""
    return blake3(prints.astype("<u8").tobytes()).hexdigest(length=8)
