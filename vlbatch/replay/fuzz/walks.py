"""One random walk, and playing a list of events as a walk does."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vlbatch.replay.divergence import Divergence
from vlbatch.replay.fuzz.events import MAX_STEP_TOKENS, EventSource, random_header
from vlbatch.replay.items import oracle_items
from vlbatch.replay.oracle import Oracle
from vlbatch.replay.player import Player
from vlbatch.replay.scenario import (
    Add,
    ErrorExpectation,
    Event,
    EventLine,
    Expectation,
    Header,
    Scenario,
    Step,
)
from vlbatch.replay.world import World

_SHORTEST, _LONGEST = 50, 200


@dataclass(frozen=True, slots=True)
class Failure:
    """Events of which the last one shows a difference between library and oracle.

    Attributes:
        header: settings.
        events: up to the divergence.
        refused: numbers of the events that the library refused, as it should.
        divergence: what the last event showed.

    """

    header: Header
    events: tuple[Event, ...]
    refused: frozenset[int]
    divergence: Divergence


class Walker:
    """A player that takes any event and knows by the oracle whether it is to be refused.

    Args:
        header: settings.
        backend: where arrays live.

    Attributes:
        player: plays the events.
        events: so far.
        refused: numbers of those that were refused.

    """

    def __init__(self, header: Header, backend: str) -> None:
        # The world sizes its fields by the largest step of the scenario.
        largest = Step({f"r{n}": MAX_STEP_TOKENS for n in range(2)})
        opening = EventLine(1, largest, ())
        self.header = header
        self.player = Player(World(Scenario("walk", header, (), (opening,)), backend))
        self.events: list[Event] = []
        self.refused: set[int] = set()

    @property
    def oracle(self) -> Oracle:
        """The oracle of the walk."""
        return self.player.world.oracle

    def play(self, event: Event) -> Failure | None:
        """Play one event; returns the failure that ends the walk."""
        number = len(self.events)
        self.events.append(event)
        expectations: tuple[Expectation, ...] = ()
        if isinstance(event, Add) and self._refuses(event):
            expectations = (Expectation(0, error=ErrorExpectation()),)
            self.refused.add(number)
        self.player.line = number + 2
        try:
            outcome = self.player.play_event(EventLine(number + 2, event, expectations))
        except Divergence as divergence:
            events, refused = tuple(self.events), frozenset(self.refused)
            return Failure(self.header, events, refused, divergence)
        if outcome.refused is not None:
            self.refused.add(number)
        return None

    def _refuses(self, event: Add) -> bool:
        world = self.player.world
        unknown = [name for name in event.fields if name not in world.vl.batch.registry]
        reasons = world.oracle.refusals_of_add(
            event.req_id, event.prompt_len, oracle_items(event.items), event.computed, unknown
        )
        # A wrong number of rows may also be left to the encoder, which then delivers it.
        return bool(reasons - {"PlaceholderMismatch"})


def walk(seed: object, num_events: int, *, backend: str = "numpy") -> Failure | None:
    """Play random events with random settings; the same seed gives the same walk."""
    rng = random.Random(repr(seed))  # noqa: S311 (no secret)
    header = random_header(rng)
    walking = Walker(header, backend)
    source = EventSource(rng, header, walking.oracle)
    for _ in range(num_events):
        failure = walking.play(source.next())
        if failure is not None:
            return failure
    return None


def walk_lengths(seed: int, num_events: int) -> Iterator[int]:
    """Lengths of the walks that make up this many events."""
    rng = random.Random(seed)  # noqa: S311 (no secret)
    while num_events > 0:
        length = min(rng.randint(_SHORTEST, _LONGEST), num_events)
        yield length
        num_events -= length


def play_events(
    header: Header, events: Sequence[Event], *, backend: str = "numpy"
) -> Failure | None:
    """Play given events; returns the failure at the first that diverges."""
    walking = Walker(header, backend)
    for event in events:
        failure = walking.play(event)
        if failure is not None:
            return failure
    return None
