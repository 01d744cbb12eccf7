"""The second reference engine: transformers' Qwen2.5-VL on torch, CPU or CUDA.

Rules
- The model is not changed: its text layers name our attention function in transformers' registry,
  and the step travels to them as a keyword argument.
- Every tensor that a text forward reads lies in ``StepBuffers``, allocated once: a captured graph
  finds it again. Pad tokens write to, and read from, one KV slot that nothing else uses.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vlbatch.errors import MissingDependency, VlbatchError
from vlbatch.runner._checks import check_feature_rows, check_inputs, count_feature_rows
from vlbatch.runner._quiet import quiet_libraries
from vlbatch.runner.inputs import Features, MediaPatches, StepInputs
from vlbatch.runner.paged import plan_tokens

if TYPE_CHECKING:
    from vlbatch.runner.mtp_transformers import TransformersMtpHead


@contextmanager
def _without_torchcodec() -> Iterator[None]:
    """Hide a package of that name: PaddleFormers' video codec poses as it and breaks the import."""
    known = sys.modules.get("torchcodec")
    sys.modules["torchcodec"] = None  # type: ignore[assignment]  # Python's way to forbid an import
    try:
        yield
    finally:
        if known is None:
            del sys.modules["torchcodec"]
        else:
            sys.modules["torchcodec"] = known


try:
    with quiet_libraries(), _without_torchcodec():
        import torch
        from torch import Tensor
        from transformers import Qwen2_5_VLForConditionalGeneration
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        from vlbatch.runner._transformers_attention import PagedStep, StepBuffers, paged_attention
except ModuleNotFoundError as error:
    raise MissingDependency(
        f"the transformers engine needs {error.name}: pip install 'vlbatch[torch]'"
    ) from error

_ATTENTION_NAME = "vlbatch_paged"


class TransformersEngine:
    """A Qwen2.5-VL of transformers with a paged KV cache, in float32.

    Args:
        model_dir: folder in the Hugging Face layout.
        num_blocks: KV blocks of the cache.
        block_size: tokens a block.
        max_tokens: most tokens of one forward.
        max_context: longest request, tokens.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.

    Attributes:
        hidden_size: width of a feature row.
        vocab_size: width of a row of logits.
        buffers: what a text forward reads.
        text_config: transformers' configuration of the text layers.

    Raises:
        VlbatchError: the folder holds no Qwen2.5-VL, or the device is not there.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        num_blocks: int,
        block_size: int,
        max_tokens: int,
        max_context: int,
        device: str = "cpu",
    ) -> None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:  # the latter from a build without CUDA
            raise VlbatchError(f"torch has no device {device!r}", setting="device") from error
        ALL_ATTENTION_FUNCTIONS.register(_ATTENTION_NAME, paged_attention)
        try:
            with quiet_libraries():
                model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
                    model_dir, dtype=torch.float32
                )
        except (OSError, ValueError) as error:
            raise VlbatchError(f"cannot load {model_dir}: {error}", setting="model") from error
        model.eval().requires_grad_(requires_grad=False).to(device)
        text = model.config.text_config
        language_model = model.model.language_model
        language_model.config._attn_implementation = _ATTENTION_NAME  # noqa: SLF001 (public knob)
        self.device = torch.device(device)
        self.text_config = language_model.config
        self.hidden_size: int = text.hidden_size
        self.vocab_size: int = text.vocab_size
        self._visual = model.model.visual
        self._language_model = language_model
        self._embed_weight: Tensor = language_model.embed_tokens.weight.detach()
        self._lm_head = model.lm_head
        vision = model.config.vision_config
        self._merge: int = vision.spatial_merge_size
        self._patch_dim: int = (
            vision.in_channels * vision.temporal_patch_size * (vision.patch_size**2)
        )
        self._num_blocks, self._block_size = num_blocks, block_size
        self.pad_slot = num_blocks * block_size
        self._keys, self._values = self.make_cache(text.num_hidden_layers)
        self.buffers = StepBuffers.zeros(max_tokens, max_context, self.hidden_size, self.device)

    def make_cache(self, num_layers: int) -> tuple[Tensor, Tensor]:
        """Allocate keys and values of more layers of this shape, for the same block tables."""
        text = self.text_config
        head_dim = text.hidden_size // text.num_attention_heads
        shape = (num_layers, self.pad_slot + 1, text.num_key_value_heads, head_dim)
        return torch.zeros(shape, device=self.device), torch.zeros(shape, device=self.device)

    # -- the engine's contract -----------------------------------------------------------------
    def encode(self, items: Sequence[MediaPatches]) -> list[Features]:
        """Run the vision tower once over all items; one ``[t*h*w / merge**2, hidden]`` an item.

        Raises:
            InvalidItem: patches and grid of an item disagree.
        """
        rows = count_feature_rows(items, merge=self._merge, patch_dim=self._patch_dim)
        if not items:
            return []
        patches = torch.from_numpy(np.concatenate([item.patches for item in items]))
        grid_thw = torch.tensor([item.grid_thw for item in items], device=self.device)
        out = self._visual(patches.to(self.device), grid_thw=grid_thw)
        features = getattr(out, "pooler_output", out)  # transformers 5 wraps it
        return [part.clone() for part in torch.split(features, rows)]

    def forward(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """Write the step's KV into the paged cache and return logits ``[num_logits, vocab]``.

        Raises:
            InvalidField: an index or shape of ``inputs`` is wrong; nothing was written.
            FeatureRowsMismatch: features do not fill ``feature_tokens``; nothing was written.
        """
        return self.forward_hidden(inputs)[0]

    def forward_hidden(self, inputs: StepInputs) -> tuple[npt.NDArray[np.float32], Tensor]:
        """Do what ``forward`` does; also return the last hidden states of all tokens."""
        num_tokens = self.load(inputs)
        hidden = self.run_text(num_tokens)
        return self.logits(hidden, inputs.logit_tokens), hidden

    def make_draft_head(self, model_dir: Path) -> TransformersMtpHead:
        """Load the draft head of a model folder, normally the engine's own."""
        from vlbatch.runner.mtp_transformers import TransformersMtpHead

        return TransformersMtpHead(self, model_dir)

    # -- in parts, for captured graphs ---------------------------------------------------------
    def load(self, inputs: StepInputs, *, padded_tokens: int = 0, poison: bool = False) -> int:
        """Write a step into the buffers, pads included; returns its number of tokens.

        Args:
            inputs: the step.
            padded_tokens: tokens that the forward will read; at least those of the step.
            poison: embeddings of pads are NaN, to prove that nothing real reads them.
        """
        check_inputs(inputs, vocab_size=self.vocab_size)
        features = [self._as_tensor(rows) for rows in inputs.features]
        shapes = [tuple(rows.shape) for rows in features]
        check_feature_rows(inputs, shapes, hidden_size=self.hidden_size)
        num, buffers = inputs.token_ids.size, self.buffers
        plan = plan_tokens(
            inputs,
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            width=buffers.context.shape[1],
        )
        ids = torch.tensor(inputs.token_ids, device=self.device)
        buffers.embeddings[:num] = self._embed_weight[ids]
        if features:
            places = torch.tensor(inputs.feature_tokens, device=self.device)
            buffers.embeddings[places] = torch.cat(features)
        buffers.positions[:, :num] = torch.tensor(inputs.positions, device=self.device)
        buffers.kv_slots[:num] = torch.from_numpy(plan.kv_slots)
        buffers.context[:num] = torch.from_numpy(plan.context)
        buffers.visible[:num] = torch.from_numpy(plan.visible)
        self._write_pads(num, padded_tokens, poison)
        return num

    def load_pads(self, num_tokens: int) -> None:
        """Fill the buffers with so many pad tokens: something that can be computed on."""
        self._write_pads(0, num_tokens, poison=False)

    def static_tensors(self) -> dict[str, Tensor]:
        """Name -> tensor whose address a captured text forward keeps."""
        return {**self.buffers.named(), "keys": self._keys, "values": self._values}

    def clone(self, hidden: Tensor) -> Tensor:
        """Copy hidden states into memory of their own."""
        return hidden.clone()

    def _write_pads(self, num: int, padded_tokens: int, poison: bool) -> None:
        pads, buffers = slice(num, max(num, padded_tokens)), self.buffers
        buffers.embeddings[pads] = float("nan") if poison else 0.0
        buffers.positions[:, pads] = 0
        buffers.kv_slots[pads] = self.pad_slot
        buffers.context[pads] = self.pad_slot
        buffers.visible[pads] = False
        buffers.visible[pads, 0] = True

    def run_text(self, num_tokens: int) -> Tensor:
        """Text layers over the first ``num_tokens`` of the buffers; ``[num_tokens, hidden]``."""
        step = PagedStep.of(self._keys, self._values, self.buffers, num_tokens)
        hidden = self.buffers.embeddings[:num_tokens].unsqueeze(0)
        rotary = self.rotary(num_tokens)
        for layer in self._language_model.layers:
            out = layer(hidden, attention_mask=None, position_embeddings=rotary, paged_step=step)
            hidden = out[0] if isinstance(out, tuple) else out
        normed: Tensor = self._language_model.norm(hidden).squeeze(0)
        return normed

    def rotary(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Cos and sin of the positions of the first ``num_tokens`` of the buffers."""
        positions = self.buffers.positions[:, :num_tokens].unsqueeze(1)
        cos, sin = self._language_model.rotary_emb(self.buffers.embeddings, positions)
        return cos, sin

    def logits(self, hidden: Tensor, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Logits of some tokens, on the host."""
        picked = hidden[torch.tensor(tokens, device=self.device)]
        array: npt.NDArray[np.float32] = self._lm_head(picked).detach().cpu().numpy()
        return array

    def _as_tensor(self, rows: Features) -> Tensor:
        if isinstance(rows, Tensor):
            return rows
        return torch.as_tensor(np.asarray(rows), dtype=torch.float32, device=self.device)
