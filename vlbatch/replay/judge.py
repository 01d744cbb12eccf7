"""Judging one event: what the library did, against what the oracle says."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import NoReturn

from vlbatch.errors import InvariantBroken, VlbatchError
from vlbatch.replay.declared import CONSTANT
from vlbatch.replay.divergence import Divergence
from vlbatch.replay.observe import first_difference, observe_reads
from vlbatch.replay.outcome import names_of
from vlbatch.replay.world import World


class Judge:
    """Compares a world's library with its oracle.

    Attributes:
        world: both of them.
        state: of the library after the latest event that was not refused.
        line: of the event under way.

    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.state = world.observe()
        self.line = 1

    def diverge(
        self,
        what: str,
        expected: object,
        got: object,
        req_id: str | None = None,
        *,
        cause: Exception | None = None,
    ) -> NoReturn:
        """Raise ``Divergence`` about the event under way."""
        raise Divergence(
            self.line, what, expected, got, req_id=req_id, step=self.world.num_steps
        ) from cause

    def compare_state(self) -> None:
        """Compare everything between events, and let every object check itself.

        Fields of requests that came or changed row are read through the library too.
        """
        known = {r: row for row, r in enumerate(self.state.rows)}
        self.state = self.world.observe()
        rows = enumerate(self.state.rows)
        placed = [r for row, r in rows if r is not None and known.get(r) != row]
        reads = observe_reads(self.world.vl, self.world.draft, placed)
        for finding in self.world.oracle.compare(replace(self.state, values=reads)):
            raise Divergence.of(finding, self.line, self.world.num_steps)
        if self.state.whole["constant"] != [CONSTANT]:
            self.diverge("global field", [CONSTANT], self.state.whole["constant"])
        self.world.vl.check()  # every part, followers and addresses included

    def attempt(
        self, act: Callable[[], object], reasons: Collection[str], *, lenient: Collection[str] = ()
    ) -> VlbatchError | None:
        """Do something that is to be refused for one of ``reasons``, or done if there is none.

        Args:
            act: calls the library.
            reasons: names of refusals by the oracle.
            lenient: names of further refusals that the oracle cannot foresee.

        """
        try:
            act()
        except InvariantBroken:
            raise
        except VlbatchError as error:
            if not names_of(error) & {*reasons, *lenient}:
                expected = f"a refusal: {' or '.join(sorted(reasons))}" if reasons else "no refusal"
                self.diverge("event", expected, describe_error(error), error.req_id)
            changed = first_difference(self.state, self.world.observe())
            if changed:
                self.diverge(f"state after {type(error).__name__}", "unchanged", changed)
            return error
        if reasons:
            self.diverge("event", f"a refusal: {' or '.join(sorted(reasons))}", "was accepted")
        return None


def describe_error(error: Exception) -> str:
    """Class and message."""
    return f"{type(error).__name__}: {error}"
