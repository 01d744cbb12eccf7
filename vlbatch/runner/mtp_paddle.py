"""The MTP draft head on the Paddle engine: one decoder layer over a KV cache of its own.

Row ``i`` joins the embedding of token ``i + 1`` with the hidden state of token ``i`` and predicts
token ``i + 2``; embeddings and ``lm_head`` are the main model's. Its keys and values lie at the
same KV slots as the main model's, in one more layer, so drafts attend to the whole request.

Importing this module imports Paddle and PaddleFormers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from vlbatch.runner._checks import check_hidden_rows
from vlbatch.runner._quiet import quiet_libraries
from vlbatch.runner.mtp import Weights, misfit, read_mtp_weights
from vlbatch.runner.paddle_engine import PaddleEngine

with quiet_libraries():
    import paddle
    from paddleformers.nn.norm import Norm
    from paddleformers.transformers.qwen2_5_vl.modeling import Qwen2_5_VLDecoderLayer

    from vlbatch.runner._paddle_attention import PagedStep

if TYPE_CHECKING:
    from vlbatch.runner.inputs import StepInputs

Tensor: TypeAlias = "paddle.Tensor"


class PaddleMtpHead:
    """The draft head of a model folder; see ``vlbatch.runner.mtp``.

    Args:
        engine: the main model.
        model_dir: its folder.

    Raises:
        VlbatchError: no head is there, or not one for this model.
    """

    def __init__(self, engine: PaddleEngine, model_dir: Path) -> None:
        text = engine.text_config
        weights = read_mtp_weights(model_dir, text)
        self._engine = engine
        self._cache = engine.make_cache(1)
        try:
            self._embed_norm = _norm(engine, weights["embed_norm.weight"])
            self._hidden_norm = _norm(engine, weights["hidden_norm.weight"])
            self._norm = _norm(engine, weights["norm.weight"])
            self._proj = paddle.to_tensor(weights["proj.weight"].T.copy())
            self._layer = Qwen2_5_VLDecoderLayer(text, layer_idx=0)
            _set_layer(self._layer, weights, num_kv_heads=text.num_key_value_heads)
        except (KeyError, ValueError) as error:
            raise misfit(model_dir, error) from error
        self._layer.eval()

    def forward(self, inputs: StepInputs, hidden: Tensor) -> tuple[npt.NDArray[np.float32], Tensor]:
        """Write the rows' keys and values and return what they predict.

        Args:
            inputs: token ``i + 1`` of each row (``token_ids``, features), and the position, KV slot
                and context of token ``i`` (``positions``, ``computed``, ``block_tables``).
            hidden: ``[num_tokens, hidden]`` of token ``i``: the main model's, or the head's own
                where a draft goes on.

        Returns:
            Logits ``[num_logits, vocab]`` and hidden states ``[num_logits, hidden]`` at
            ``inputs.logit_tokens``.

        Raises:
            InvalidField, FeatureRowsMismatch: see ``PaddleEngine.forward``; or another number of
                hidden states than tokens.
        """
        check_hidden_rows(inputs, hidden.shape[0])
        embeddings, plan = self._engine.prepare(inputs)
        with paddle.no_grad():
            both = [self._embed_norm(embeddings), self._hidden_norm(hidden)]
            joined = paddle.matmul(paddle.concat(both, axis=-1), self._proj)
            states = self._layer(
                joined.unsqueeze(0),
                position_embeddings=self._engine.rotary(inputs.positions),
                paged_step=PagedStep.create(self._cache, plan),
            )[0]
            states = self._norm(states.squeeze(0))
            logits = self._engine.logits(states, inputs.logit_tokens)
            return logits, self.take(states, inputs.logit_tokens)

    def take(self, hidden: Tensor, rows: npt.NDArray[np.int64]) -> Tensor:
        """Return some rows of hidden states, in memory of their own."""
        return paddle.gather(hidden, paddle.to_tensor(rows))


def _norm(engine: PaddleEngine, weight: npt.NDArray[np.float32]) -> paddle.nn.Layer:
    text = engine.text_config
    norm = Norm.create(
        config=text,
        norm_type="rms_norm",
        hidden_size=text.hidden_size,
        norm_eps=text.rms_norm_eps,
        input_is_parallel=False,
    )
    norm.weight.set_value(weight)
    return norm


def _set_layer(layer: paddle.nn.Layer, weights: Weights, *, num_kv_heads: int) -> None:
    """Fill a decoder layer; PaddleFormers fuses q, k, v by KV head and gate with up, transposed."""

    def get(name: str) -> npt.NDArray[np.float32]:
        return weights[f"layer.{name}"]

    attention = layer.self_attn
    for part in ("weight", "bias"):
        by_head = [
            get(f"self_attn.{which}_proj.{part}") for which in ("q", "k", "v")
        ]  # fmt: skip
        by_head = [value.reshape(num_kv_heads, -1, *value.shape[1:]) for value in by_head]
        fused = np.concatenate(by_head, axis=1).reshape(-1, *by_head[0].shape[2:])
        getattr(attention.qkv_proj, part).set_value(fused.T.copy())
    gate_up = np.concatenate([get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")])
    layer.mlp.up_gate_proj.weight.set_value(gate_up.T.copy())
    for module, name in (
        (attention.o_proj, "self_attn.o_proj"),
        (layer.mlp.down_proj, "mlp.down_proj"),
    ):
        module.weight.set_value(get(f"{name}.weight").T.copy())
    for name in ("input_layernorm", "post_attention_layernorm"):
        getattr(layer, name).weight.set_value(get(f"{name}.weight"))
