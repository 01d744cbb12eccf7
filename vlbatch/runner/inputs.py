"""What one step hands to an engine, and what an engine must offer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from vlbatch.order import BatchOrder

Features: TypeAlias = object
"""An engine's array ``[rows, hidden]``; opaque to everything but the engine."""

Hidden: TypeAlias = Any  # each engine's own array
"""An engine's hidden states ``[tokens, hidden]``; opaque to everything but the engine."""

Logits: TypeAlias = npt.NDArray[np.float32]
"""``[num_logits, vocab]``, or ``[vocab]`` of one token."""


@dataclass(frozen=True, slots=True)
class MediaPatches:
    """Encoder input of one item.

    Attributes:
        patches: float32 ``[num_patches, channels * temporal_patch * patch * patch]``.
        grid_thw: frames, rows, columns in patches *before* the spatial merge.
        modality: ``"image"`` or ``"video"``.
    """

    patches: npt.NDArray[np.float32]
    grid_thw: tuple[int, int, int]
    modality: str


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of one forward over the flattened tokens of a mixed decode/prefill step.

    Attributes:
        token_ids: int64 ``[num_tokens]``, rows in batch order; placeholder tokens hold any valid
            id, their embedding is replaced.
        positions: int64 ``[3, num_tokens]`` rotary positions (t, h, w).
        query_start: int32 ``[num_reqs + 1]`` row -> first token (cumulative).
        computed: int32 ``[num_reqs]`` tokens of each row already in the KV cache.
        block_tables: int32 ``[num_reqs, max_blocks]`` row -> KV block ids, -1 past the end.
        feature_tokens: int64 ``[num_features]`` token places (indices into ``token_ids``).
        features: arrays ``[rows_i, hidden]`` whose rows in order belong to ``feature_tokens``.
        logit_tokens: int64 ``[num_logits]`` tokens whose logits are wanted.
        order: the batch order of the step, from which a graph is chosen; ``None`` for a forward
            that is no step of a batch.
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    query_start: npt.NDArray[np.int32]
    computed: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    feature_tokens: npt.NDArray[np.int64]
    features: Sequence[Features]
    logit_tokens: npt.NDArray[np.int64]
    order: BatchOrder | None = None


class Engine(Protocol):
    """A vision-language model with a paged KV cache of ``num_blocks`` blocks."""

    hidden_size: int
    vocab_size: int

    def encode(self, items: Sequence[MediaPatches]) -> list[Features]:
        """Run the vision tower once over all items; one ``[rows, hidden]`` array an item."""
        ...

    def forward(self, inputs: StepInputs) -> Logits:
        """Write the step's KV into the paged cache and return logits ``[num_logits, vocab]``."""
        ...


class DraftHead(Protocol):
    """A draft head with a KV cache of its own, at the block ids of its engine."""

    def forward(self, inputs: StepInputs, hidden: Hidden) -> tuple[Logits, Hidden]:
        """Write the rows' KV; return logits and hidden states at ``inputs.logit_tokens``."""
        ...

    def take(self, hidden: Hidden, rows: npt.NDArray[np.int64]) -> Hidden:
        """Return some rows of hidden states."""
        ...


@runtime_checkable
class DraftingEngine(Engine, Protocol):
    """An engine that can have a draft head."""

    def forward_hidden(self, inputs: StepInputs) -> tuple[Logits, Hidden]:
        """Do what ``forward`` does; also return the last hidden states of all tokens."""
        ...

    def make_draft_head(self, model_dir: Path) -> DraftHead:
        """Load the draft head of a model folder."""
        ...
