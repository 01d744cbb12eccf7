"""What moves with the rows of a batch, and is told of its requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from vlbatch.order import BatchOrder, Follower, RowMoves


@runtime_checkable
class RequestFollower(Follower, Protocol):
    """A follower with values of its own for each request.

    Only ``derive`` may refuse; it is asked before anything moves. The other calls report what is
    decided, and must not raise.
    """

    def derive(self, order: BatchOrder) -> object:
        """Compute what depends on the order of a step; changes nothing."""
        ...

    def write_derived(self, values: object) -> None:
        """Write what ``derive`` computed; the rows have moved."""
        ...

    def on_add(self, req_id: str, values: Mapping[str, object]) -> None:
        """Say that a request has got a slot and a row, new or resumed.

        Args:
            req_id: the request.
            values: what the batch wrote to its fields; those not given hold their default.
        """
        ...

    def on_preempt(self, req_id: str) -> None:
        """Say that a live request is about to lose its slot and row, and may come back."""
        ...

    def on_remove(self, req_id: str) -> None:
        """Say that a request, live or preempted, is about to go for good."""
        ...

    def on_reset(self) -> None:
        """Say that all requests are gone; rows were vacated."""
        ...

    def check(self) -> None:
        """Verify every invariant; raises ``InvariantBroken``."""
        ...


class Followers:
    """The followers of one batch; each call reaches all of them, in order of registration."""

    def __init__(self) -> None:
        self._all: list[Follower] = []
        self._of_requests: list[RequestFollower] = []

    def register(self, follower: Follower) -> None:
        """Add a follower."""
        self._all.append(follower)
        if isinstance(follower, RequestFollower):
            self._of_requests.append(follower)

    def derive(self, order: BatchOrder) -> list[object]:
        """Ask each for its derived values; raises what they raise, changes nothing."""
        return [follower.derive(order) for follower in self._of_requests]

    def follow(self, moves: RowMoves, derived: list[object] | None = None) -> None:
        """Move all rows; then write derived values, where there are new ones."""
        for follower in self._all:
            follower.follow(moves)
        if derived is not None:
            for table, values in zip(self._of_requests, derived, strict=True):
                table.write_derived(values)

    def on_add(self, req_id: str, values: Mapping[str, object]) -> None:
        """See ``RequestFollower``."""
        for follower in self._of_requests:
            follower.on_add(req_id, values)

    def on_preempt(self, req_id: str) -> None:
        """See ``RequestFollower``."""
        for follower in self._of_requests:
            follower.on_preempt(req_id)

    def on_remove(self, req_id: str) -> None:
        """See ``RequestFollower``."""
        for follower in self._of_requests:
            follower.on_remove(req_id)

    def on_reset(self) -> None:
        """See ``RequestFollower``."""
        for follower in self._of_requests:
            follower.on_reset()

    def check(self) -> None:
        """See ``RequestFollower``."""
        for follower in self._of_requests:
            follower.check()
