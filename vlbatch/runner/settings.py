"""Settings of a run, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from vlbatch.errors import InvalidField
from vlbatch.order import OrderPolicy

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Limits and policies of a run.

    Attributes:
        max_num_seqs: most requests in the batch.
        chunk: most prompt tokens of one request in one step.
        token_budget: most tokens of a step.
        kv_blocks: KV blocks of the engine.
        block_size: tokens a KV block.
        max_model_len: longest request, prompt and outputs.
        cache_bytes: encoder cache, bytes.
        encode_rows: most feature rows encoded in a step and in one encoder call.
        order: row policy.
        stable: keep relative order in a region.
    """

    max_num_seqs: int = 8
    chunk: int = 16
    token_budget: int = 64
    kv_blocks: int = 20
    block_size: int = 8
    max_model_len: int = 160
    cache_bytes: int = 1 << 16
    encode_rows: int = 64
    order: OrderPolicy = "split"
    stable: bool = False

    def __post_init__(self) -> None:
        """Refuse settings with which no step can be made."""
        if self.cache_bytes < 1:
            raise InvalidField(f"got {self.cache_bytes}; expected >= 1", setting="cache_bytes")
        for name in (
            "max_num_seqs", "chunk", "token_budget", "kv_blocks", "block_size", "max_model_len",
            "encode_rows",
        ):  # fmt: skip
            if not 1 <= getattr(self, name) <= _INT32_MAX:  # as kernels count them
                raise InvalidField(
                    f"got {getattr(self, name)}; expected 1..{_INT32_MAX}", setting=name
                )
        if self.token_budget < self.max_num_seqs:
            raise InvalidField(
                f"a step has room for {self.token_budget} tokens, but up to"
                f" {self.max_num_seqs} requests decode one each",
                setting="token_budget, max_num_seqs",
            )
