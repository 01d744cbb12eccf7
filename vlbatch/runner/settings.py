"""Settings of a run, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from vlbatch.errors import InvalidSetting
from vlbatch.order import OrderPolicy
from vlbatch.runner.gate import PrefillGate

Method: TypeAlias = Literal["none", "ngram", "mtp"]
METHODS: tuple[Method, ...] = get_args(Method)
GraphMode: TypeAlias = Literal["none", "decode", "prefill", "both"]
GRAPH_MODES: tuple[GraphMode, ...] = get_args(GraphMode)

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
        device: where the engine runs: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        graph: which steps run from captured graphs.
        poison: fill the pad tokens of captured steps with NaN, to prove that nothing reads them.
        prefill_gate: prompts and seconds: hold fresh prompts until so many have come or the oldest
            has waited so long; ``None`` for no gate.
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
    device: str = "cpu"
    graph: GraphMode = "none"
    poison: bool = False
    prefill_gate: tuple[int, float] | None = None

    @property
    def num_drafts(self) -> int:
        """Tokens drafted for a decode at most: k."""
        return 0 if self.speculative == "none" else self.draft_tokens

    def __post_init__(self) -> None:
        """Refuse settings with which no step can be made."""
        if self.cache_bytes < 1:
            raise InvalidSetting(f"got {self.cache_bytes}; expected >= 1", setting="cache_bytes")
        for name in (
            "max_num_seqs", "chunk", "token_budget", "kv_blocks", "block_size", "max_model_len",
            "encode_rows", "draft_tokens",
        ):  # fmt: skip
            if not 1 <= getattr(self, name) <= _INT32_MAX:  # as kernels count them
                raise InvalidSetting(
                    f"got {getattr(self, name)}; expected 1..{_INT32_MAX}", setting=name
                )
        if not 0 <= self.overlap <= MAX_OVERLAP:
            raise InvalidSetting(
                f"got {self.overlap}; expected 0..{MAX_OVERLAP}", setting="overlap"
            )
        if self.speculative not in METHODS:
            raise InvalidSetting(
                f"got {self.speculative!r}; expected one of {METHODS}", setting="speculative"
            )
        if self.graph not in GRAPH_MODES:
            raise InvalidSetting(
                f"got {self.graph!r}; expected one of {GRAPH_MODES}", setting="graph"
            )
        if self.graph != "none" and not self.device.startswith("cuda"):
            raise InvalidSetting(
                f"graphs are captured on a CUDA device, but the engine runs on {self.device!r}",
                setting="graph, device",
            )
        if self.poison and self.graph == "none":
            raise InvalidSetting(
                "pads are poisoned, but no step is padded without graphs", setting="poison, graph"
            )
        if self.prefill_gate is not None:
            PrefillGate(*self.prefill_gate)  # refuses what makes no gate
        if self.token_budget < self.max_num_seqs:
            raise InvalidSetting(
                f"a step has room for {self.token_budget} tokens, but up to"
                f" {self.max_num_seqs} requests decode one each",
                setting="token_budget, max_num_seqs",
            )
