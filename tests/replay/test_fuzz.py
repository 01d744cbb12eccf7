"""Random walks: clean on the library, and a planted fault is found and shrunk."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from vlbatch import BatchOrder, FeatureStore
from vlbatch.batch import Progress
from vlbatch.features import PlacedItem
from vlbatch.positions import PositionStore
from vlbatch.replay import read_scenario, replay
from vlbatch.replay.fuzz import as_lines, play_events, shrink, walk, walk_lengths
from vlbatch.replay.fuzz.cli import fuzz_command
from vlbatch.replay.fuzz.events import EventSource
from vlbatch.replay.scenario import Add, Event, Header, ItemSpec, Step

SEED = 5


def first_failure(num_events: int) -> Any:
    """Return the first walk of the seed that diverges."""
    for number, length in enumerate(walk_lengths(SEED, num_events)):
        failure = walk((SEED, number), length)
        if failure is not None:
            return failure
    return None


def test_same_seed_same_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed gives the same events each time, another one others."""
    played: list[Event] = []
    original = EventSource.next

    def remember(source: EventSource) -> Event:
        played.append(original(source))
        return played[-1]

    monkeypatch.setattr(EventSource, "next", remember)
    for seed in (1, 1, 2):
        assert walk(seed, 60) is None

    assert played[:60] == played[60:120] != played[120:]


def test_clean() -> None:
    """Random walks of every kind of settings agree with the oracle."""
    assert first_failure(800) is None, f"seed {SEED}"


def test_lengths_add_up() -> None:
    """The walks of a run have as many events as were asked for, the last one cut off."""
    lengths = list(walk_lengths(SEED, 1234))

    assert sum(lengths) == 1234
    assert all(50 <= length <= 200 for length in lengths[:-1])


def test_own_space_first() -> None:
    """A request that cannot move gives up what it holds for later before others have to."""
    x, y, z = (partial(item, key) for key in "xyz")
    events: list[Event] = [
        Add("A", 7, (x(0), y(2), x(4))),
        Add("B", 6, (z(0), z(3))),
        Step({"A": 2, "B": 2}),  # the cache is full: x and z, each held for its second place
        Step({"A": 1}),
    ]

    assert play_events(Header(cache_rows=4), events) is None


def item(key: str, offset: int) -> ItemSpec:
    """An image of two feature rows."""
    return ItemSpec(key, "image", offset, 2, (1, 1, 2), None, None, None)


# -- planted faults ------------------------------------------------------------------------------
def _row_too_early(original: Any, item: PlacedItem, start: int, stop: int) -> tuple[int, int]:
    first, last = original(item, start, stop)
    return (first - 1, last - 1) if first else (first, last)


def _no_look_ahead(original: Any, store: FeatureStore, req_id: str, computed: int) -> None:
    original(store, req_id, computed + store.lookahead)


def _delta_of_zero(original: Any, store: PositionStore, req_id: str, slot: int) -> None:
    original(store, req_id, slot)
    store._delta_of_slot[slot] = 0


def _all_accepted(original: Any, progress: Progress, order: BatchOrder, alive: Any, _: Any) -> None:
    original(progress, order, alive, {})


def _never_back(
    original: Any, progress: Progress, slot: int, computed: int, req_id: str, in_flight: int = 0
) -> bool:
    counted = int(progress.computed[slot])
    back: bool = original(progress, slot, computed, req_id, in_flight)
    progress.computed[slot] = counted
    return back


FAULTS: list[tuple[Any, str, Callable[..., Any]]] = [
    (PlacedItem, "rows_in", _row_too_early),
    (FeatureStore, "confirm", _no_look_ahead),
    (PositionStore, "bind", _delta_of_zero),
    (Progress, "advance", _all_accepted),
    (Progress, "confirm", _never_back),
]


@pytest.mark.parametrize(("owner", "name", "change"), FAULTS, ids=[n for _, n, _ in FAULTS])
def test_finds_and_shrinks(
    owner: Any,
    name: str,
    change: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A planted fault is found within 2,000 events, shrunk to 8, and its file diverges likewise."""
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda self, *a, **k: change(original, self, *a, **k))

    failure = first_failure(2000)
    assert failure is not None, f"seed {SEED}"
    small = shrink(failure, max_plays=400)
    path = tmp_path / "small.jsonl"
    path.write_text("\n".join(as_lines(small, "a test")) + "\n", encoding="utf-8")
    divergence = replay(read_scenario(path))

    assert len(small.events) <= 8
    assert divergence is not None
    assert divergence.what == small.divergence.what
    monkeypatch.undo()
    assert play_events(small.header, small.events) is None
    assert replay(read_scenario(path)) is None


# -- the command ---------------------------------------------------------------------------------
def test_command_clean(tmp_path: Path) -> None:
    """A clean run exits 0 and writes no file; the number of workers changes nothing."""
    output = tmp_path / "failure.jsonl"
    arguments = ["--steps", "300", "--seed", "3", "-o", str(output)]
    one = CliRunner().invoke(fuzz_command, [*arguments, "--workers", "1"])
    two = CliRunner().invoke(fuzz_command, [*arguments, "--workers", "2"])

    assert one.exit_code == two.exit_code == 0, one.output
    assert "ok: 300 events in" in one.output
    assert not output.exists()


def test_command_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A divergence exits 1, prints the scenario and writes it."""
    original = Progress.advance
    monkeypatch.setattr(Progress, "advance", lambda self, *a: _all_accepted(original, self, *a))
    output = tmp_path / "failure.jsonl"
    arguments = ["--steps", "2000", "--seed", "5", "--workers", "1", "-o", str(output)]
    result = CliRunner().invoke(fuzz_command, arguments)

    assert result.exit_code == 1, result.output
    assert output.read_text(encoding="utf-8") in result.output
    assert replay(read_scenario(output)) is not None
