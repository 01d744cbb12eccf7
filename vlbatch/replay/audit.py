"""Auditing live objects: every invariant, and samples of the features in the encoder cache.

A feature row that changes after it was encoded (an engine that scales its inputs in place, a buffer
that is used twice) breaks no count and no reference; only its bytes tell.
"""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from vlbatch.cache import EntryKey, Features
from vlbatch.errors import InvalidSetting, InvariantBroken
from vlbatch.replay.fingerprints import Fingerprints, row_fingerprints
from vlbatch.step import VLBatch

E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit that found nothing has looked at.

    Attributes:
        num_requests: live and preempted requests whose invariants hold.
        num_entries: cache entries of which rows were compared.
        num_rows: feature rows compared.
        seconds: time that it took.

    """

    num_requests: int
    num_entries: int
    num_rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Sample:
    """Some rows of one entry, as they were when it was first seen.

    Attributes:
        features: of which array; dead or another one if the entry was encoded again since.
        rows: feature rows.
        prints: their fingerprints.

    """

    features: Callable[[], object]
    rows: list[int]
    prints: Fingerprints


class Auditor(Generic[E]):
    """Audits a batch every so many steps.

    Call ``step`` once a step, when its encodes are committed: it takes fingerprints of some rows
    of every new entry, and every ``every``-th time it audits. A step without a change in the cache
    costs next to nothing. Features may be numpy arrays, or torch or Paddle tensors; rows on a
    device are copied to the host.

    Args:
        vl: to watch; only read.
        every: steps from one audit to the next; 0 for audits by hand only.
        sample_rows: rows of each entry, spread over it.
        sample_entries: entries compared in one audit, drawn at random.
        seed: of that draw.

    Raises:
        InvalidSetting: a setting is out of range.

    """

    def __init__(
        self,
        vl: VLBatch[E],
        *,
        every: int = 100,
        sample_rows: int = 4,
        sample_entries: int = 32,
        seed: int = 0,
    ) -> None:
        for setting, got, least in (
            ("every", every, 0),
            ("sample_rows", sample_rows, 1),
            ("sample_entries", sample_entries, 1),
        ):
            if got < least:
                raise InvalidSetting(f"got {got}; expected >= {least}", setting=setting)
        self._vl = vl
        self._every = every
        self._sample_rows = sample_rows
        self._sample_entries = sample_entries
        self._draw = random.Random(seed)  # noqa: S311 (a sample, not a secret)
        self._samples: dict[EntryKey, _Sample] = {}
        self._seen_version = -1
        self._addresses = vl.batch.addresses()
        self.num_steps = 0

    def step(self) -> AuditReport | None:
        """Take fingerprints of what is new; audit if it is time to.

        Raises:
            InvariantBroken: see ``audit``.

        """
        self._take_samples()
        self.num_steps += 1
        if self._every and self.num_steps % self._every == 0:
            return self.audit()
        return None

    def audit(self) -> AuditReport:
        """Verify every invariant and compare sampled feature rows; changes nothing.

        Raises:
            InvariantBroken: naming the request, slot, field or key.

        """
        start = time.perf_counter()
        vl = self._vl
        vl.check()
        moved = [n for n, at in vl.batch.addresses().items() if at != self._addresses.get(n)]
        if moved:
            raise InvariantBroken(f"arrays of fields were reallocated: {moved}")
        entries = [key for key in self._samples if self._is_current(key)]
        drawn = self._draw.sample(entries, min(len(entries), self._sample_entries))
        num_rows = sum(self._compare(key) for key in drawn)
        num_requests = len(vl.batch.req_ids) + len(vl.batch.preempted)
        return AuditReport(num_requests, len(drawn), num_rows, time.perf_counter() - start)

    # -- samples -----------------------------------------------------------------------------
    def _take_samples(self) -> None:
        cache = self._vl.features.cache
        if cache.version == self._seen_version:
            return
        self._seen_version = cache.version
        ready = [key for key in cache.present() if cache.is_ready(key)]
        known, self._samples = self._samples, {}
        for key in ready:
            features = self._features(key)
            sample = known.get(key)
            if sample is None or sample.features() is not features[0]:
                rows = self._choose_rows(key)
                prints = _prints(features, rows)
                sample = _Sample(weakref.ref(features[0]), rows, prints)
            self._samples[key] = sample

    def _choose_rows(self, key: EntryKey) -> list[int]:
        num_rows = self._vl.features.cache.rows_of(key) or 0
        spread = np.linspace(0, num_rows - 1, min(self._sample_rows, num_rows))
        return [int(row) for row in spread.round()]

    def _features(self, key: EntryKey) -> Features:
        return self._vl.features.cache.features(key, req_id="(audit)")

    def _is_current(self, key: EntryKey) -> bool:
        """Whether the entry is still the one that was sampled."""
        cache = self._vl.features.cache
        return cache.is_ready(key) and self._samples[key].features() is self._features(key)[0]

    def _compare(self, key: EntryKey) -> int:
        """Compare one entry with its sample; returns the number of rows."""
        sample = self._samples[key]
        changed = np.flatnonzero(_prints(self._features(key), sample.rows) != sample.prints)
        if len(changed):
            users = sorted(self._vl.features.cache.references(key))
            rows = [sample.rows[n] for n in changed.tolist()]
            raise InvariantBroken(
                f"feature rows {rows} of {key} changed after they were encoded ({len(sample.rows)}"
                f" rows compared); referred to by {[reference.req_id for reference in users]}",
                req_id=users[0].req_id if users else None,
            )
        return len(sample.rows)


def _prints(features: Features, rows: Iterable[int]) -> Fingerprints:
    """Fingerprints of some rows over all levels, each read as a slice: views are cheap."""
    levels: tuple[Any, ...] = features  # Any: the array type is the engine's
    each = [row_fingerprints(tuple(level[row : row + 1] for level in levels)) for row in rows]
    return np.concatenate(each)
