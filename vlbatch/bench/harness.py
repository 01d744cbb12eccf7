"""Interleaved timing: every method once a round, so that noise meets all of them alike."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import numpy as np


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall time of one method, seconds."""

    median: float
    minimum: float
    rounds: int


def measure(
    methods: Mapping[str, Callable[[int], object]],
    *,
    rounds: int = 60,
    warmup: int = 5,
    min_seconds: float = 0.0,
) -> dict[str, Timing]:
    """Time methods in interleaved rounds.

    Args:
        methods: name -> function of the round number; a method slower than 20 ms runs in a fifth
            of the rounds.
        rounds: at least this many, after ``warmup``.
        warmup: untimed rounds.
        min_seconds: go on until this much wall time has passed.
    """
    samples: dict[str, list[float]] = {name: [] for name in methods}
    start = time.perf_counter()
    number = 0
    while number < warmup + rounds or time.perf_counter() - start < min_seconds:
        for name, method in methods.items():
            slow = samples[name] and statistics.median(samples[name]) > 0.02
            if slow and number % 5:
                continue
            begin = time.perf_counter()
            method(number)
            elapsed = time.perf_counter() - begin
            if number >= warmup or not samples[name]:
                samples[name].append(elapsed)
        number += 1
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
            for name in ("vlbatch", "paddlepaddle", "torch", "transformers")
            if (found := _version(name))
        },
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        return platform.processor()
    return platform.processor()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
