"""Holds fresh prompts back for a moment, so that several prefill together.

Without it prompts that arrive together run one by one beside decodes, and no step is
prefill-only. It never holds a decode, a later chunk or a resumed request, and never longer than
its deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from time import monotonic, sleep

from vlbatch.errors import DuplicateRequest, InvalidSetting


@dataclass(slots=True)
class GateCounters:
    """What the gate did."""

    released: int = 0
    by_count: int = 0
    by_deadline: int = 0
    total_wait_seconds: float = 0.0
    longest_wait_seconds: float = 0.0


class PrefillGate:
    """Prompts waiting for company.

    Args:
        num_prompts: release as soon as so many wait.
        max_wait: release when the oldest has waited so long, seconds.
        clock: returns seconds.
        sleep: waits so many seconds.

    Attributes:
        counters: events so far.

    Raises:
        InvalidSetting: fewer than one prompt, or a negative or endless wait.
    """

    def __init__(
        self,
        num_prompts: int,
        max_wait: float,
        clock: Callable[[], float] = monotonic,
        sleep: Callable[[float], None] = sleep,
    ) -> None:
        if num_prompts < 1 or not 0 <= max_wait < inf:
            raise InvalidSetting(
                f"got {num_prompts} prompts, {max_wait} seconds; expected >= 1 and 0 or more",
                setting="prefill_gate",
            )
        self.num_prompts = num_prompts
        self.max_wait = max_wait
        self.counters = GateCounters()
        self._clock = clock
        self._sleep = sleep
        self._since: dict[str, float] = {}  # req_id -> arrival, oldest first

    @property
    def waiting(self) -> tuple[str, ...]:
        """Prompts held back, oldest first."""
        return tuple(self._since)

    def arrive(self, req_id: str) -> None:
        """Hold a fresh prompt.

        Raises:
            DuplicateRequest: it waits already.
        """
        if req_id in self._since:
            raise DuplicateRequest("waits at the gate already", req_id=req_id)
        self._since[req_id] = self._clock()

    def leave(self, req_id: str) -> None:
        """Forget a prompt that was aborted; one that is not here is ignored."""
        self._since.pop(req_id, None)

    def wait(self) -> None:
        """Wait until the oldest has waited long enough; for a runner with nothing else to do."""
        if self._since:
            oldest = next(iter(self._since.values()))
            self._sleep(max(0.0, oldest + self.max_wait - self._clock()))

    def release(self) -> tuple[str, ...]:
        """Let all go if enough wait or the oldest has waited long enough; else nobody."""
        if not self._since:
            return ()
        now = self._clock()
        waits = [now - since for since in self._since.values()]
        enough = len(waits) >= self.num_prompts
        if not enough and waits[0] < self.max_wait:
            return ()
        counters = self.counters
        counters.by_count += enough
        counters.by_deadline += not enough
        counters.released += len(waits)
        counters.total_wait_seconds += sum(waits)
        counters.longest_wait_seconds = max(counters.longest_wait_seconds, *waits)
        gone = self.waiting
        self._since.clear()
        return gone
