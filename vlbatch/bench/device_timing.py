"""Timing on a CUDA device: until it is done, until the call returns, between events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from vlbatch.bench.harness import Timing, measure

Launches = Callable[[], object]

_HOLD_CYCLES = 250_000
"""Clock cycles of the device in which the host issues a launch, with room to spare."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes a second, read and written, and their share of a plain copy's in the same rounds."""

    name: str
    num_bytes: int
    seconds: float
    best_seconds: float
    bytes_per_second: float
    share_of_copy: float


def raise_clocks(device: torch.device, seconds: float = 1.0) -> None:
    """Keep the device busy until its clocks are up."""
    matrix = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop:
        for _ in range(20):
            matrix @ matrix
        torch.cuda.synchronize()


def wall_times(methods: Mapping[str, Launches], rounds: int) -> dict[str, Timing]:
    """Interleaved wall times, each until the device is done."""

    def timed(method: Launches) -> Callable[[int], object]:
        def run(_: int) -> None:
            method()
            torch.cuda.synchronize()

        return run

    return measure({name: timed(method) for name, method in methods.items()}, rounds=rounds)


def issue_times(methods: Mapping[str, Launches], rounds: int) -> dict[str, Timing]:
    """Interleaved times until each call returned, the device idle before it."""
    samples: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name, method in methods.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            method()
            samples[name].append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return {n: Timing(statistics.median(s), min(s), len(s)) for n, s in samples.items()}


def bandwidths(
    methods: Mapping[str, tuple[int, Launches]], copy: str, *, rounds: int = 7, launches: int = 10
) -> list[Bandwidth]:
    """Time ``launches`` of each method between two events, in interleaved rounds.

    The device is held back until they are all issued, so that the host's time is not in it.

    Args:
        methods: name -> bytes read and written by a launch, and the launch.
        copy: name of the plain copy among them.
        rounds: of which the median counts.
        launches: between two events.
    """
    samples: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(rounds + 1):
        for name, (_, method) in methods.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_HOLD_CYCLES * launches)  # noqa: SLF001 (there is no public one)
            start.record()
            for _ in range(launches):
                method()
            stop.record()
            stop.synchronize()
            if number:
                samples[name].append(start.elapsed_time(stop) / 1000 / launches)
    speed = {n: methods[n][0] / statistics.median(s) for n, s in samples.items()}
    return [
        Bandwidth(
            name, methods[name][0], statistics.median(s), min(s), speed[name],
            speed[name] / speed[copy],
        )
        for name, s in samples.items()
    ]  # fmt: skip
