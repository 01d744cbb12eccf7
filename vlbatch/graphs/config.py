"""Which graphs to capture: settings and sizes.

Sizes follow the rule of FastDeploy's automatic list (facts of its configuration, re-stated).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from vlbatch.errors import InvalidSetting

GraphKind: TypeAlias = Literal["decode", "prefill"]

MAX_PREFILL_TOKENS = 512
"""Default of the largest prefill graph, tokens."""

_LARGEST_AUTOMATIC = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig:
    """Settings of graph capture.

    Attributes:
        use_cudagraph: capture at all.
        cudagraph_only_prefill: no decode graphs.
        prefill_graphs: prefill graphs too (both kinds may live side by side).
        full_cuda_graph: one graph a step; else the step is split around attention.
        max_num_seqs: most requests at once.
        num_draft_tokens: k; a decode computes ``k + 1`` tokens.
        capture_sizes: decode sizes in tokens; ``None`` for automatic.
        capture_sizes_prefill: prefill sizes in tokens; ``None`` for automatic.
        max_capture_shape_prefill: largest prefill size, tokens.
        num_of_warmups: eager runs before a capture.
        tensor_parallel: ranks that split the token axis; sizes are multiples of it.
        use_unique_memory_pool: all graphs share one pool, so the largest is captured first.

    Raises:
        InvalidSetting: a number out of range; or two settings that contradict each other.
    """

    use_cudagraph: bool = True
    cudagraph_only_prefill: bool = False
    prefill_graphs: bool = False
    full_cuda_graph: bool = True
    max_num_seqs: int = 8
    num_draft_tokens: int = 0
    capture_sizes: Sequence[int] | None = None
    capture_sizes_prefill: Sequence[int] | None = None
    max_capture_shape_prefill: int = MAX_PREFILL_TOKENS
    num_of_warmups: int = 2
    tensor_parallel: int = 1
    use_unique_memory_pool: bool = True

    def __post_init__(self) -> None:
        """Refuse numbers out of range, then contradictions."""
        least = {
            "max_num_seqs": 1, "max_capture_shape_prefill": 1, "tensor_parallel": 1,
            "num_draft_tokens": 0, "num_of_warmups": 0,
        }  # fmt: skip
        for name, expected in least.items():
            if getattr(self, name) < expected:
                got = getattr(self, name)
                raise InvalidSetting(f"got {got}; expected >= {expected}", setting=name)
        for name in ("capture_sizes", "capture_sizes_prefill"):
            sizes = getattr(self, name)
            if sizes is not None and (not sizes or min(sizes) < 1):
                raise InvalidSetting(
                    f"got {list(sizes)}; expected at least one size, each >= 1", setting=name
                )
        if self.cudagraph_only_prefill and not self.use_cudagraph:
            raise InvalidSetting(
                "only prefill graphs are asked for, but no graphs",
                setting="cudagraph_only_prefill, use_cudagraph",
            )
        if self.cudagraph_only_prefill and self.capture_sizes is not None:
            raise InvalidSetting(
                "decode sizes are given, but only prefill graphs are captured",
                setting="cudagraph_only_prefill, capture_sizes",
            )
        if self.capture_sizes_prefill is not None and not self.has_prefill:
            raise InvalidSetting(
                "prefill sizes are given, but no prefill graphs are captured",
                setting="capture_sizes_prefill, prefill_graphs",
            )

    @property
    def has_prefill(self) -> bool:
        """Whether prefill graphs are captured."""
        return self.use_cudagraph and (self.cudagraph_only_prefill or self.prefill_graphs)

    @property
    def has_decode(self) -> bool:
        """Whether decode graphs are captured."""
        return self.use_cudagraph and not self.cudagraph_only_prefill

    @property
    def decode_tokens(self) -> int:
        """Tokens that a decoding request computes in one step."""
        return self.num_draft_tokens + 1

    def sizes(self, kind: GraphKind) -> tuple[int, ...]:
        """Sizes in tokens, descending; empty if this kind is not captured."""
        if not (self.has_decode if kind == "decode" else self.has_prefill):
            return ()
        if kind == "prefill":
            given, unit, largest = self.capture_sizes_prefill, 1, self.max_capture_shape_prefill
        else:
            given, unit = self.capture_sizes, self.decode_tokens
            largest = self.max_num_seqs * unit
            if unit == 1:
                largest = min(largest, _LARGEST_AUTOMATIC)
        candidates = automatic_sizes(largest, unit) if given is None else given
        return tuple(sorted({n for n in candidates if n % self.tensor_parallel == 0}, reverse=True))


def automatic_sizes(largest: int, unit: int = 1) -> list[int]:
    """FastDeploy's list: fine steps for small batches, coarse ones for large; plus the largest.

    Args:
        largest: largest size, tokens.
        unit: tokens of one request, so that sizes hold whole requests.
    """
    requests = [1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, 1025, 32)]
    return sorted({n * unit for n in requests if n * unit < largest} | {largest})


def padded_size(num_tokens: int, sizes: Sequence[int]) -> int | None:
    """Smallest size that holds ``num_tokens``; ``None`` for 0 tokens or more than the largest."""
    ascending = sorted(sizes)
    place = bisect_left(ascending, num_tokens)
    return ascending[place] if num_tokens > 0 and place < len(ascending) else None
