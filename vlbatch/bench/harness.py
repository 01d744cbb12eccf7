"""Interleaved timing: every method once a round, so that noise meets all of them alike."""

from __future__ import annotations

import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

_SLOW_SECONDS = 0.02
_QUICK_SECONDS = 0.001
_QUICK_CALLS = 10


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall time of one method, seconds."""

    median: float
    minimum: float
    num_calls: int

    def as_json(self) -> dict[str, float]:
        """Microseconds, for tables and files."""
        return {
            "median_us": self.median * 1e6,
            "min_us": self.minimum * 1e6,
            "calls": self.num_calls,
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one bench found.

    Attributes:
        timings: method -> its wall time.
        facts: the rest, plain data: ratios, sizes, whether results are equal.
    """

    timings: dict[str, Timing]
    facts: dict[str, object]

    def as_json(self) -> dict[str, object]:
        """Plain data: the facts, and ``timings`` in microseconds."""
        timings = {name: timing.as_json() for name, timing in self.timings.items()}
        return {**self.facts, "timings": timings}


def measure(
    methods: Mapping[str, Callable[[int], object]], *, rounds: int = 60, warmup: int = 5
) -> dict[str, Timing]:
    """Time methods in interleaved rounds.

    In a round each method is called once untimed, since it finds the processor's caches full of
    what the methods before it left, and then timed: a quick one several times.

    Args:
        methods: name -> function of the number of its call; a method that never took less than
            20 ms runs in a fifth of the rounds and without the untimed call.
        rounds: timed ones, after ``warmup``.
        warmup: untimed rounds.
    """
    samples: dict[str, list[float]] = {name: [] for name in methods}
    best: dict[str, float] = {}
    numbers = {name: itertools.count() for name in methods}
    for number in range(-warmup, rounds):
        for name, method in methods.items():
            slow = best.get(name, 0.0) > _SLOW_SECONDS
            if slow and number % 5:
                continue
            if not slow:
                method(next(numbers[name]))
            for _ in range(1 if best.get(name, 1.0) > _QUICK_SECONDS else _QUICK_CALLS):
                begin = time.perf_counter()
                method(next(numbers[name]))
                elapsed = time.perf_counter() - begin
                best[name] = min(elapsed, best.get(name, elapsed))
                if number >= 0:
                    samples[name].append(elapsed)
    return {
        name: Timing(statistics.median(taken), min(taken), len(taken))
        for name, taken in samples.items()
    }


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "numpy": np.__version__,
        **{
            name: found
            for name in ("vlbatch", "paddlepaddle", "torch", "transformers", "vllm")
            if (found := _version(name))
        },
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
