"""Capture and replay of step graphs over buffers that never move.

Rules
- All sizes are captured before the first replay, the largest first: later captures reuse its
  memory.
- Addresses of the buffers are recorded at capture and compared before replays (each one, or every
  n-th): a graph that reads a moved buffer would compute on stale memory.
- The output of a replay belongs to the graph and is valid until the next replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Generic, Protocol, TypeVar

from vlbatch.errors import InvalidSetting, InvariantBroken
from vlbatch.graphs.config import GraphConfig, GraphKind

T = TypeVar("T")  # a framework's tensor


class CapturedGraph(Protocol):
    """A graph of one framework."""

    def replay(self) -> None:
        """Run the captured work again."""
        ...


class GraphBackend(Protocol[T]):
    """How one framework captures; see ``vlbatch.graphs.torch_graphs`` and ``paddle_graphs``."""

    def capture(self, work: Callable[[], T]) -> tuple[CapturedGraph, T]:
        """Run ``work`` once while recording; return the graph and its (static) output."""
        ...

    def synchronize(self) -> None:
        """Wait until everything queued has run."""
        ...

    def address(self, buffer: T) -> int:
        """First byte of a buffer."""
        ...

    def reserved_bytes(self) -> int:
        """Device memory that the framework holds; 0 on a host."""
        ...


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """One captured graph.

    Attributes:
        kind: of the graph.
        num_tokens: its size.
        seconds: wall time, warm-ups included.
        num_bytes: device memory that was newly taken for it, warm-ups included.
    """

    kind: GraphKind
    num_tokens: int
    seconds: float
    num_bytes: int


class GraphPool(Generic[T]):
    """The graphs of one engine.

    Args:
        config: which graphs.
        backend: the framework.
        buffers: returns name -> buffer, as they are now, of all that graphs read and write.
        run: computes the output of the first ``n`` tokens of the buffers.
        check_every: compare addresses before every n-th replay; 1 for each.
    """

    def __init__(
        self,
        config: GraphConfig,
        backend: GraphBackend[T],
        buffers: Callable[[], Mapping[str, T]],
        run: Callable[[int], T],
        *,
        check_every: int = 64,
    ) -> None:
        if check_every < 1:
            raise InvalidSetting(f"got {check_every}; expected >= 1", setting="check_every")
        self._config = config
        self._backend = backend
        self._buffers = buffers
        self._run = run
        self._check_every = check_every
        self._addresses: dict[str, int] = {}
        self._graphs: dict[tuple[GraphKind, int], tuple[CapturedGraph, T]] = {}
        self._num_replays = 0

    def capture_all(self) -> list[CaptureReport]:
        """Capture every size of every kind, the largest first.

        The caller has filled the buffers with something that can be computed on.
        """
        self._addresses = self._current_addresses()
        kinds: tuple[GraphKind, ...] = ("decode", "prefill")
        wanted = [(size, kind) for kind in kinds for size in self._config.sizes(kind)]
        return [self._capture(kind, size) for size, kind in sorted(wanted, reverse=True)]

    def _capture(self, kind: GraphKind, num_tokens: int) -> CaptureReport:
        start, held = perf_counter(), self._backend.reserved_bytes()
        for _ in range(self._config.num_of_warmups):
            self._run(num_tokens)
        self._backend.synchronize()
        self._graphs[kind, num_tokens] = self._backend.capture(lambda: self._run(num_tokens))
        self._backend.synchronize()
        return CaptureReport(
            kind, num_tokens, perf_counter() - start, self._backend.reserved_bytes() - held
        )

    def replay(self, kind: GraphKind, num_tokens: int) -> T:
        """Run a captured graph over the buffers' content.

        Args:
            kind: of the graph.
            num_tokens: its size, pads included.

        Returns:
            The graph's output, valid until the next replay.

        Raises:
            InvariantBroken: no such graph, or a buffer moved since capture.
        """
        if (kind, num_tokens) not in self._graphs:
            raise InvariantBroken(f"no {kind} graph of {num_tokens} tokens was captured")
        if self._num_replays % self._check_every == 0:
            self.check()
        self._num_replays += 1
        graph, output = self._graphs[kind, num_tokens]
        graph.replay()
        return output

    def check(self) -> None:
        """Verify that no buffer moved since capture.

        Raises:
            InvariantBroken: naming the buffers.
        """
        now = self._current_addresses()
        moved = sorted(name for name, old in self._addresses.items() if now[name] != old)
        if moved:
            raise InvariantBroken(f"buffers {moved} moved since the graphs were captured")

    def _current_addresses(self) -> dict[str, int]:
        return {name: self._backend.address(buffer) for name, buffer in self._buffers().items()}
