"""Settings of a run, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from vlbatch.errors import InvalidField
from vlbatch.order import OrderPolicy

Method: TypeAlias = Literal["none", "ngram", "mtp"]
METHODS: tuple[Method, ...] = get_args(Method)

MAX_OVERLAP = 2
"""Steps; more would only hold outputs back."""

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
        speculative: who drafts; see ``vlbatch.runner.drafting``.
        draft_tokens: most tokens drafted for a decode, if anybody drafts.
        overlap: steps that may be under way while the outputs of an earlier one are not read yet.
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
    speculative: Method = "none"
    draft_tokens: int = 3
    overlap: int = 0

    @property
    def num_drafts(self) -> int:
        """Tokens drafted for a decode at most: k."""
        return 0 if self.speculative == "none" else self.draft_tokens

    def __post_init__(self) -> None:
        """Refuse settings with which no step can be made."""
        if self.cache_bytes < 1:
            raise InvalidField(f"got {self.cache_bytes}; expected >= 1", setting="cache_bytes")
        for name in (
            "max_num_seqs", "chunk", "token_budget", "kv_blocks", "block_size", "max_model_len",
            "encode_rows", "draft_tokens",
        ):  # fmt: skip
            if not 1 <= getattr(self, name) <= _INT32_MAX:  # as kernels count them
                raise InvalidField(
                    f"got {getattr(self, name)}; expected 1..{_INT32_MAX}", setting=name
                )
        if not 0 <= self.overlap <= MAX_OVERLAP:
            raise InvalidField(f"got {self.overlap}; expected 0..{MAX_OVERLAP}", setting="overlap")
        if self.speculative not in METHODS:
            raise InvalidField(
                f"got {self.speculative!r}; expected one of {METHODS}", setting="speculative"
            )
        if self.token_budget < self.max_num_seqs:
            raise InvalidField(
                f"a step has room for {self.token_budget} tokens, but up to"
                f" {self.max_num_seqs} requests decode one each",
                setting="token_budget, max_num_seqs",
            )
