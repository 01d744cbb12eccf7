"""The prefill gate: company, deadline, no starvation."""

from __future__ import annotations

import random

import pytest

from vlbatch.errors import DuplicateRequest, InvalidSetting
from vlbatch.runner.gate import PrefillGate


class Clock:
    """Seconds that pass by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_release_by_count() -> None:
    """Nobody passes before enough prompts wait; then all do, oldest first."""
    clock = Clock()
    gate = PrefillGate(3, 10.0, clock)
    gate.arrive("a")
    gate.arrive("b")
    assert gate.release() == ()
    clock.now = 2.0
    gate.arrive("c")

    assert gate.release() == ("a", "b", "c")
    assert gate.waiting == ()
    assert (gate.counters.by_count, gate.counters.by_deadline) == (1, 0)
    assert (gate.counters.total_wait_seconds, gate.counters.longest_wait_seconds) == (4.0, 2.0)


def test_release_by_deadline() -> None:
    """The oldest prompt never waits longer than the deadline, and takes the others along."""
    clock = Clock()
    gate = PrefillGate(8, 0.5, clock)
    gate.arrive("a")
    clock.now = 0.4
    gate.arrive("b")
    assert gate.release() == ()
    clock.now = 0.5

    assert gate.release() == ("a", "b")
    assert gate.counters.by_deadline == 1


def test_abort_at_the_gate() -> None:
    """A prompt that left is not released; leaving twice changes nothing."""
    gate = PrefillGate(2, 1.0, Clock())
    gate.arrive("a")
    gate.leave("a")
    gate.leave("a")
    gate.arrive("b")

    assert gate.release() == ()
    assert gate.waiting == ("b",)


def test_refusals() -> None:
    """A prompt waits once; the settings must make sense."""
    gate = PrefillGate(2, 1.0, Clock())
    gate.arrive("a")
    with pytest.raises(DuplicateRequest, match="a"):
        gate.arrive("a")
    for count, wait in ((0, 1.0), (1, -1.0), (1, float("nan"))):
        with pytest.raises(InvalidSetting, match="prefill_gate"):
            PrefillGate(count, wait)


@pytest.mark.parametrize("seed", range(20))
def test_never_starves(seed: int) -> None:
    """However prompts arrive, each passes no later than the first look past its deadline."""
    rng, clock = random.Random(seed), Clock()
    gate = PrefillGate(rng.randint(1, 6), 1.0, clock)
    arrived: dict[str, float] = {}
    for number in range(300):
        clock.now += rng.random() * 0.5
        if rng.random() < 0.5:
            gate.arrive(f"r{number}")
            arrived[f"r{number}"] = clock.now
        for req_id in gate.release():
            del arrived[req_id]
        assert all(clock.now - since < 1.0 for since in arrived.values()), (seed, number)
        assert set(gate.waiting) == set(arrived)
