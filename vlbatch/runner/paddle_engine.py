"""The reference engine: PaddleFormers' Qwen2.5-VL as it is, over a paged KV cache.

Importing this module imports Paddle and PaddleFormers (seconds); import it where an engine is made.

Rules
- The model is not changed: its text layers name our attention function in PaddleFormers' registry,
  and the step travels to it as a keyword argument. No step is kept anywhere.
- ``gather`` and ``scatter_`` only, never ``t[index]`` (unchecked, touches the whole tensor). No
  slice leaves the engine: a slice keeps, and its ``numpy()`` copies, its whole base.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from vlbatch.errors import FeatureRowsMismatch, InvalidSetting, MissingDependency, VlbatchError
from vlbatch.runner._checks import check_feature_rows, check_inputs, count_feature_rows
from vlbatch.runner._quiet import quiet_libraries
from vlbatch.runner.paged import plan_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlbatch.runner.inputs import Features, MediaPatches, StepInputs
    from vlbatch.runner.mtp_paddle import PaddleMtpHead
    from vlbatch.runner.paged import PagedPlan

try:
    with quiet_libraries():
        import paddle
        from paddleformers.nn.attention.interface import ALL_ATTENTION_FUNCTIONS
        from paddleformers.transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
        from safetensors import SafetensorError

        from vlbatch.runner._paddle_attention import KVCache, PagedStep, paged_attention
except ModuleNotFoundError as error:
    raise MissingDependency(
        f"the Paddle engine needs {error.name}: pip install 'vlbatch[run]'"
    ) from error

# Paddle takes over SIGTERM among others, and a process was seen to hang in its handler.
paddle.disable_signal_handler()

Tensor: TypeAlias = "paddle.Tensor"

_ATTENTION_NAME = "vlbatch_paged"


class PaddleEngine:
    """A Qwen2.5-VL of PaddleFormers with a paged KV cache, in float32.

    Args:
        model_dir: folder of ``config.json`` and safetensors in the Hugging Face layout; only read.
        num_blocks: KV blocks of the cache.
        block_size: tokens a block.
        device: Paddle device, for example ``"cpu"`` or ``"gpu:0"``. Paddle has one current device a
            process; it is set to this.

    Attributes:
        hidden_size: width of a feature row.
        vocab_size: width of a row of logits.
        text_config: PaddleFormers' configuration of the text layers.

    Raises:
        VlbatchError: the folder holds no Qwen2.5-VL, or the device is not there.
        InvalidSetting: a cache without a block, or a block without a token.
    """

    def __init__(
        self, model_dir: Path, *, num_blocks: int, block_size: int, device: str = "cpu"
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise InvalidSetting(
                f"got {num_blocks} KV blocks of {block_size} tokens, expected at least one of each",
                setting="kv_blocks, block_size",
            )
        _set_device(device)
        model = load_model(model_dir)
        text = model.config.text_config
        ALL_ATTENTION_FUNCTIONS.register(_ATTENTION_NAME, paged_attention)
        text._attn_implementation = _ATTENTION_NAME  # noqa: SLF001 - PaddleFormers' public knob

        vision = model.config.vision_config
        self.hidden_size: int = text.hidden_size
        self.vocab_size: int = text.vocab_size
        self._visual = model.model.visual
        self._language_model = model.model.language_model
        self._lm_head = model.lm_head
        self._merge: int = vision.spatial_merge_size
        self._patch_dim: int = (
            vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        )
        self.text_config = text
        self._blocks = (num_blocks, block_size)
        self._cache = self.make_cache(text.num_hidden_layers)

    def make_cache(self, num_layers: int) -> KVCache:
        """Allocate keys and values of more layers of this shape, for the same block tables."""
        num_blocks, block_size = self._blocks
        text = self.text_config
        return KVCache.empty(
            num_layers=num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_heads=text.num_attention_heads,
            num_kv_heads=text.num_key_value_heads,
            head_dim=text.hidden_size // text.num_attention_heads,
        )

    def encode(self, items: Sequence[MediaPatches]) -> list[Features]:
        """Run the vision tower once over all items; one ``[t*h*w / merge**2, hidden]`` an item.

        Each array has memory of its own, so that dropping one item frees its rows.

        Raises:
            InvalidItem: patches and grid of an item disagree.
            FeatureRowsMismatch: the tower gave another number of rows than the grids imply.
        """
        rows = count_feature_rows(items, merge=self._merge, patch_dim=self._patch_dim)
        if not items:
            return []
        patches = np.concatenate([item.patches for item in items])
        grid_thw = np.array([item.grid_thw for item in items], dtype=np.int64)
        with paddle.no_grad(), warnings.catch_warnings():
            # Paddle makes an int of a one-element array; numpy's warning, if it were an error, is
            # lost in C++ and leaves -1 as the padding of a window.
            warnings.simplefilter("ignore", DeprecationWarning)
            features = self._visual(paddle.to_tensor(patches), grid_thw=paddle.to_tensor(grid_thw))
        if features.shape[0] != sum(rows):
            raise FeatureRowsMismatch(
                f"the vision tower gave {features.shape[0]} rows, expected {sum(rows)}"
            )
        return list(paddle.split(features, rows))

    def forward(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """Write the step's KV into the paged cache and return logits ``[num_logits, vocab]``.

        Raises:
            InvalidField: an index or shape of ``inputs`` is wrong; nothing was written.
            FeatureRowsMismatch: features do not fill ``feature_tokens``; nothing was written.
        """
        return self.forward_hidden(inputs)[0]

    def forward_hidden(self, inputs: StepInputs) -> tuple[npt.NDArray[np.float32], Tensor]:
        """Do what ``forward`` does; also return what the logits were computed from.

        Returns:
            Logits ``[num_logits, vocab]``, and the last hidden states after the final norm,
            ``[num_tokens, hidden]``, for a draft head.
        """
        embeddings, plan = self.prepare(inputs)
        with paddle.no_grad():
            hidden = self._run_text(embeddings, inputs.positions, plan)
            return self.logits(hidden, inputs.logit_tokens), hidden

    def make_draft_head(self, model_dir: Path) -> PaddleMtpHead:
        """Load the draft head of a model folder, normally the engine's own."""
        from vlbatch.runner.mtp_paddle import PaddleMtpHead

        return PaddleMtpHead(self, model_dir)

    def prepare(self, inputs: StepInputs) -> tuple[Tensor, PagedPlan]:
        """Check the inputs of a step, embed its tokens and plan its attention; writes nothing.

        Raises:
            InvalidField, FeatureRowsMismatch: see ``forward``.
        """
        check_inputs(inputs, vocab_size=self.vocab_size)
        features = [_as_tensor(rows) for rows in inputs.features]
        check_feature_rows(
            inputs, [tuple(rows.shape) for rows in features], hidden_size=self.hidden_size
        )
        cache = self._cache
        plan = plan_attention(inputs, num_blocks=cache.num_blocks, block_size=cache.block_size)
        with paddle.no_grad():
            return self._embed(inputs, features), plan

    def _embed(self, inputs: StepInputs, features: Sequence[Tensor]) -> Tensor:
        """Return ``[num_tokens, hidden]``: token embeddings with the features in their places.

        Rows of the weight, not ``embed_tokens(ids)``: Paddle's embedding layer gives zeros for the
        pad token, while the checkpoint's row is meant (a pad id may double as another token).
        """
        weight = self._language_model.embed_tokens.weight
        embeddings = paddle.gather(weight, paddle.to_tensor(inputs.token_ids))
        if inputs.feature_tokens.size:
            places = paddle.to_tensor(inputs.feature_tokens)
            embeddings.scatter_(places, paddle.concat(list(features)))
        return embeddings

    def _run_text(
        self, embeddings: Tensor, positions: npt.NDArray[np.int64], plan: PagedPlan
    ) -> Tensor:
        """Return the last hidden states ``[num_tokens, hidden]``."""
        return self._language_model(
            inputs_embeds=embeddings.unsqueeze(0),
            position_ids=paddle.to_tensor(positions).unsqueeze(1),
            use_cache=False,
            return_dict=True,
            paged_step=PagedStep.create(self._cache, plan),
        ).last_hidden_state.squeeze(0)

    def rotary(self, positions: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return cos and sin ``[3, 1, num_tokens, head_dim]`` of positions ``[3, num_tokens]``."""
        at = paddle.to_tensor(positions).unsqueeze(1)
        cos, sin = self._language_model.rotary_emb(self._language_model.embed_tokens.weight, at)
        return cos, sin

    def logits(self, hidden: Tensor, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return logits ``[num_logits, vocab]`` of some rows of hidden states."""
        if not tokens.size:
            return np.empty((0, self.vocab_size), dtype=np.float32)
        logits = self._lm_head(paddle.gather(hidden, paddle.to_tensor(tokens)))
        array: npt.NDArray[np.float32] = logits.numpy()
        return array


# -- loading -------------------------------------------------------------------------------------
def load_model(model_dir: Path) -> Qwen2_5_VLForConditionalGeneration:
    """Load PaddleFormers' Qwen2.5-VL in float32 with its own SDPA attention; print nothing.

    PaddleFormers writes a metadata file beside the weights, so it is given a folder of links.

    Raises:
        VlbatchError: the folder holds no whole Qwen2.5-VL, or one with sliding-window text layers.
    """
    _check_model_dir(model_dir)
    try:
        with tempfile.TemporaryDirectory(prefix="vlbatch-") as scratch, quiet_libraries():
            links = Path(scratch) / "model"
            shutil.copytree(model_dir.resolve(), links, copy_function=os.symlink)
            config = Qwen2_5_VLConfig.from_pretrained(links)
            for part in (config, config.text_config, config.vision_config):
                part.fuse_rms_norm = False  # the fused kernel exists on GPUs only
                part._attn_implementation = "sdpa"  # noqa: SLF001 - PaddleFormers' public knob
            model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
                links,
                config=config,
                convert_from_hf=True,
                load_checkpoint_format="flex_checkpoint",
                dtype="float32",
            )
    except (ValueError, SafetensorError) as error:
        raise VlbatchError(f"cannot load {model_dir}: {error}", setting="model") from error
    if "sliding_attention" in config.text_config.layer_types:
        raise VlbatchError(
            f"{model_dir} has sliding-window text layers, expected full attention in every layer",
            setting="model",
        )
    model.eval()
    return model


def _check_model_dir(model_dir: Path) -> None:
    config_file = model_dir / "config.json"
    if not config_file.is_file():
        raise VlbatchError(
            f"{model_dir} has no config.json, expected a model folder", setting="model"
        )
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise VlbatchError(f"{config_file} is not JSON: {error}", setting="model") from error
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if model_type != "qwen2_5_vl":
        raise VlbatchError(
            f"{config_file} has model_type {model_type!r}, expected 'qwen2_5_vl'", setting="model"
        )
    if not any(model_dir.glob("*.safetensors")):
        raise VlbatchError(f"{model_dir} has no *.safetensors file", setting="model")


def _as_tensor(rows: Features) -> Tensor:
    """Return features as they are, or as a float32 tensor where they are a host array."""
    return rows if isinstance(rows, paddle.Tensor) else paddle.to_tensor(rows, dtype="float32")


def _set_device(device: str) -> None:
    try:
        paddle.set_device(device)
    except ValueError as error:
        raise VlbatchError(f"Paddle has no device {device!r}: {error}", setting="device") from error
