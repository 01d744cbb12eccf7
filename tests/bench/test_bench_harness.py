"""Rounds of the harness, on a clock that only the methods move."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vlbatch.bench.harness import Outcome, Timing, measure


@pytest.fixture
def taking(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[[int], None]]:
    """Methods that take the given seconds, one after the other, the last one from then on."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def make(*seconds: float) -> Callable[[int], None]:
        calls = iter(seconds)

        def method(_: int) -> None:
            now[0] += next(calls, seconds[-1])

        return method

    return make


def test_cold_calls_are_not_in_the_samples(taking: Callable[..., Callable[[int], None]]) -> None:
    """Warm-up rounds, and the first call of every round, count for nothing."""
    cold = taking(1 / 64, 1 / 64, 1 / 64, 1 / 256, 1 / 64, 1 / 512, 1 / 64, 1 / 128)
    timing = measure({"cold": cold}, rounds=3, warmup=1)["cold"]

    assert timing == Timing(median=1 / 256, minimum=1 / 512, num_calls=3)


def test_a_quick_method_is_timed_several_times_a_round(
    taking: Callable[..., Callable[[int], None]],
) -> None:
    """A method below a millisecond gives ten samples a round."""
    assert measure({"quick": taking(1 / 2048)}, rounds=2, warmup=1)["quick"].num_calls == 20


def test_a_slow_method_runs_in_a_fifth_of_the_rounds(
    taking: Callable[..., Callable[[int], None]],
) -> None:
    """A method above 20 ms runs once in five rounds, one that was only cold in all of them."""
    methods = {"slow": taking(0.125), "cold": taking(0.125, 0.001), "fast": taking(0.001)}
    timings = measure(methods, rounds=10, warmup=5)

    assert {name: t.num_calls for name, t in timings.items()} == {"slow": 2, "cold": 10, "fast": 10}


def test_a_slow_method_has_a_sample_in_one_round(
    taking: Callable[..., Callable[[int], None]],
) -> None:
    """However few the rounds, every method is timed."""
    assert measure({"slow": taking(1)}, rounds=1, warmup=3)["slow"].num_calls == 1


def test_outcome_in_plain_data() -> None:
    """Times are in microseconds, facts beside them."""
    outcome = Outcome({"a": Timing(0.5, 0.25, 3)}, {"ratios": {"v1": 2.0}})

    assert outcome.as_json() == {
        "timings": {"a": {"median_us": 500_000, "min_us": 250_000, "calls": 3}},
        "ratios": {"v1": 2.0},
    }
