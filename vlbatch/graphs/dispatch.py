"""Whether a step runs from a graph, and from which one: decided on the host, from the order.

Rules
- The kind comes from the regions of ``BatchOrder`` (progress), never from decoder lengths.
- A step that does not fit runs eagerly, for a reason that is counted.
- Ranks with equal orders decide alike; ``digest`` lets them prove it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal, TypeAlias

import blake3

from vlbatch.graphs.config import GraphConfig, GraphKind, padded_size
from vlbatch.order import BatchOrder

Reason: TypeAlias = Literal[
    "graphs off", "no tokens", "mixed batch", "kind not captured", "uneven decodes",
    "too many tokens", "too many requests", "too many tiles",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dispatch:
    """How one step runs.

    Attributes:
        kind: of the graph, ``None`` for eager.
        num_tokens: real tokens.
        padded_tokens: size of the graph; ``num_tokens`` when eager.
        reason: why it is eager, else ``None``.
    """

    kind: GraphKind | None
    num_tokens: int
    padded_tokens: int
    reason: Reason | None = None

    def digest(self) -> str:
        """Hex digest for ranks to compare."""
        text = f"{self.kind} {self.num_tokens} {self.padded_tokens} {self.reason}"
        return blake3.blake3(text.encode()).hexdigest()


class GraphDispatcher:
    """Chooses the graph of each step.

    Attributes:
        counts: reason or kind -> steps so far.
    """

    def __init__(self, config: GraphConfig) -> None:
        self.config = config
        self.counts: Counter[str] = Counter()
        self._sizes = {kind: config.sizes(kind) for kind in ("decode", "prefill")}

    def choose(
        self, order: BatchOrder, *, num_tiles: int = 0, max_tiles: int | None = None
    ) -> Dispatch:
        """Decide how a step runs, and count it.

        Args:
            order: the step.
            num_tiles: attention tiles of the step.
            max_tiles: tiles that the graph was captured with; ``None`` for no limit.
        """
        dispatch = self._decide(order, num_tiles, max_tiles)
        self.counts[dispatch.reason or str(dispatch.kind)] += 1
        return dispatch

    def _decide(self, order: BatchOrder, num_tiles: int, max_tiles: int | None) -> Dispatch:
        num_tokens = order.num_tokens
        kind = _kind(order)
        reason = self._obstacle(order, kind)
        if reason is None and kind is not None:
            padded = padded_size(num_tokens, self._sizes[kind])
            if padded is None:
                reason = "too many tokens"
            elif max_tiles is not None and num_tiles > max_tiles:
                reason = "too many tiles"
            else:
                return Dispatch(kind, num_tokens, padded)
        return Dispatch(None, num_tokens, num_tokens, reason)

    def _obstacle(self, order: BatchOrder, kind: GraphKind | None) -> Reason | None:
        if not self.config.use_cudagraph:
            return "graphs off"
        if not order.num_tokens:
            return "no tokens"
        if kind is None:
            return "mixed batch"
        if not self._sizes[kind]:
            return "kind not captured"
        if order.num_reqs > self.config.max_num_seqs:
            return "too many requests"
        if kind == "decode" and (order.scheduled != self.config.decode_tokens).any():
            return "uneven decodes"
        return None


def _kind(order: BatchOrder) -> GraphKind | None:
    if order.regions.decode == order.num_reqs:
        return "decode"
    return "prefill" if order.regions.decode == 0 else None
