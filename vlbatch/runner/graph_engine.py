"""An engine whose steps run from captured graphs where they can, and eagerly where they cannot.

Rules
- All graphs are captured when the engine is made, before anything is in its KV cache.
- The graph of a step is chosen from its ``BatchOrder``. A forward without one (a request alone) is
  no step of the batch: it runs eagerly and is not counted.
- Encoder, embeddings and logits stay outside the graphs; features are merged before a replay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from vlbatch.graphs import GraphConfig, GraphDispatcher
from vlbatch.graphs.capture import GraphBackend, GraphPool
from vlbatch.graphs.config import MAX_PREFILL_TOKENS
from vlbatch.runner.inputs import (
    DraftHead,
    DraftingEngine,
    Features,
    Hidden,
    Logits,
    MediaPatches,
    StepInputs,
)
from vlbatch.runner.settings import RunSettings

T = TypeVar("T")  # a framework's tensor


class CapturableEngine(DraftingEngine, Protocol):
    """An engine whose text forward reads only memory that never moves."""

    def static_tensors(self) -> Mapping[str, Any]:  # Any: each engine's own tensors
        """Name -> tensor whose address a captured text forward keeps."""
        ...

    def load_pads(self, num_tokens: int) -> None:
        """Fill the static tensors with so many pad tokens."""
        ...

    def load(self, inputs: StepInputs, *, padded_tokens: int = 0, poison: bool = False) -> int:
        """Write a step and its pads into the static tensors; returns its number of tokens."""
        ...

    def run_text(self, num_tokens: int) -> Hidden:
        """Text layers over the first tokens of the static tensors; ``[num_tokens, hidden]``."""
        ...

    def logits(self, hidden: Hidden, tokens: npt.NDArray[np.int64]) -> Logits:
        """Logits of some tokens, on the host."""
        ...

    def clone(self, hidden: Hidden) -> Hidden:
        """Copy hidden states into memory of their own."""
        ...


class GraphEngine:
    """Implements ``DraftingEngine`` over another one.

    Args:
        engine: does the work; its static tensors hold the largest graph.
        config: which graphs.
        backend: captures.
        poison: pad tokens are NaN, to prove that nothing reads them.
        check_every: compare addresses before every n-th replay; 1 for each.

    Attributes:
        hidden_size: width of a feature row.
        vocab_size: width of a row of logits.
        eager: the engine inside.
        dispatcher: its ``counts`` say how many steps ran from a graph, and why others did not.
        pool: the graphs.
        captured: one report a graph, in order of capture.
    """

    def __init__(
        self,
        engine: CapturableEngine,
        config: GraphConfig,
        backend: GraphBackend[Any],  # Any: the engine's own tensors
        *,
        poison: bool = False,
        check_every: int = 64,
    ) -> None:
        self.hidden_size, self.vocab_size = engine.hidden_size, engine.vocab_size
        self.eager = engine
        self.dispatcher = GraphDispatcher(config)
        self._poison = poison
        self.pool: GraphPool[Any] = GraphPool(
            config, backend, engine.static_tensors, engine.run_text, check_every=check_every
        )
        engine.load_pads(max((*config.sizes("decode"), *config.sizes("prefill")), default=0))
        self.captured = self.pool.capture_all()

    def encode(self, items: Sequence[MediaPatches]) -> list[Features]:
        """Run the vision tower; never captured, as no two pictures need have one size."""
        return self.eager.encode(items)

    def forward(self, inputs: StepInputs) -> Logits:
        """Do what the engine inside does.

        Raises:
            InvariantBroken: a buffer moved since capture.
        """
        return self.eager.logits(self._hidden(inputs), inputs.logit_tokens)

    def forward_hidden(self, inputs: StepInputs) -> tuple[Logits, Hidden]:
        """Do what ``forward`` does; also return the last hidden states of all tokens."""
        hidden = self.eager.clone(self._hidden(inputs))  # a replay would overwrite them
        return self.eager.logits(hidden, inputs.logit_tokens), hidden

    def make_draft_head(self, model_dir: Path) -> DraftHead:
        """Load the draft head of a model folder; it runs eagerly."""
        return self.eager.make_draft_head(model_dir)

    def _hidden(self, inputs: StepInputs) -> Hidden:
        """Hidden states of the step's tokens, valid until the next replay."""
        engine = self.eager
        if inputs.order is None:
            return engine.run_text(engine.load(inputs))
        dispatch = self.dispatcher.choose(inputs.order)
        if dispatch.kind is None:
            return engine.run_text(engine.load(inputs))
        padded = dispatch.padded_tokens
        num_tokens = engine.load(inputs, padded_tokens=padded, poison=self._poison)
        return self.pool.replay(dispatch.kind, padded)[:num_tokens]

    def report(self) -> dict[str, object]:
        """What was captured, and how the steps so far ran, as plain data."""
        config = self.dispatcher.config
        return {
            "sizes": {"decode": config.sizes("decode"), "prefill": config.sizes("prefill")},
            "capture_seconds": sum(report.seconds for report in self.captured),
            "capture_bytes": sum(report.num_bytes for report in self.captured),
            "steps": dict(self.dispatcher.counts),
            "poisoned": self._poison,
        }


def graph_config(settings: RunSettings) -> GraphConfig:
    """Graphs that a run with these settings can use."""
    return GraphConfig(
        use_cudagraph=settings.graph != "none",
        cudagraph_only_prefill=settings.graph == "prefill",
        prefill_graphs=settings.graph == "both",
        max_num_seqs=settings.max_num_seqs,
        num_draft_tokens=settings.num_drafts,
        max_capture_shape_prefill=min(MAX_PREFILL_TOKENS, settings.token_budget),
    )
