"""The MTP draft head on the transformers engine: one decoder layer over a KV cache of its own.

Importing this module imports torch and transformers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from vlbatch.runner._checks import check_hidden_rows
from vlbatch.runner._quiet import quiet_libraries
from vlbatch.runner.inputs import Logits, StepInputs
from vlbatch.runner.mtp import misfit, read_mtp_weights
from vlbatch.runner.transformers_engine import TransformersEngine

with quiet_libraries():
    import torch
    from torch import Tensor, nn
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLDecoderLayer

    from vlbatch.runner._transformers_attention import PagedStep


class TransformersMtpHead:
    """The draft head of a model folder; see ``vlbatch.runner.mtp`` and ``PaddleMtpHead``.

    Args:
        engine: the main model.
        model_dir: its folder.

    Raises:
        VlbatchError: no head is there, or not one for this model.
    """

    def __init__(self, engine: TransformersEngine, model_dir: Path) -> None:
        text = engine.text_config
        weights = read_mtp_weights(model_dir, text)
        self._engine = engine
        self._keys, self._values = engine.make_cache(1)
        norms = {
            name: nn.RMSNorm(text.hidden_size, eps=text.rms_norm_eps)
            for name in ("embed_norm", "hidden_norm", "norm")
        }
        self._modules = nn.ModuleDict(
            {
                **norms,
                "proj": nn.Linear(2 * text.hidden_size, text.hidden_size, bias=False),
                "layer": Qwen2_5_VLDecoderLayer(text, layer_idx=0),
            }
        )
        try:
            tensors = {name: torch.from_numpy(value) for name, value in weights.items()}
            self._modules.load_state_dict(tensors)
        except RuntimeError as error:
            raise misfit(model_dir, error) from error
        self._modules.eval().to(engine.device)

    def forward(self, inputs: StepInputs, hidden: Tensor) -> tuple[Logits, Tensor]:
        """Write the rows' keys and values and return what they predict; see ``PaddleMtpHead``.

        Raises:
            InvalidField, FeatureRowsMismatch: see ``TransformersEngine.forward``; or another number
                of hidden states than tokens.
        """
        check_hidden_rows(inputs, len(hidden))
        engine, head = self._engine, self._modules
        num = engine.load(inputs)
        with torch.no_grad():
            embeddings = head["embed_norm"](engine.buffers.embeddings[:num])
            joined = head["proj"](torch.cat([embeddings, head["hidden_norm"](hidden)], dim=-1))
            out = head["layer"](
                joined.unsqueeze(0),
                attention_mask=None,
                position_embeddings=engine.rotary(num),
                paged_step=PagedStep.of(self._keys, self._values, engine.buffers, num),
            )
            states = head["norm"]((out[0] if isinstance(out, tuple) else out).squeeze(0))
            logits = engine.logits(states, inputs.logit_tokens)
            return logits, self.take(states, inputs.logit_tokens)

    def take(self, hidden: Tensor, rows: npt.NDArray[np.int64]) -> Tensor:
        """Return some rows of hidden states, in memory of their own."""
        return hidden[torch.from_numpy(rows).to(self._engine.device)]
