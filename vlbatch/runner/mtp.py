"""The MTP draft head in a model folder: what it says of itself, and its weights; no framework.

``mtp.json`` describes it, its weights lie beside it in safetensors under these names: two norms and
``proj``, which join the embedding of token ``i + 1`` with the hidden state of token ``i``; one
decoder ``layer`` of the text model's shape; ``norm``. Embeddings and ``lm_head`` are the model's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from vlbatch.errors import VlbatchError

Weights: TypeAlias = Mapping[str, npt.NDArray[np.float32]]

_SAME_AS_TEXT = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
)  # fmt: skip


def read_mtp_weights(model_dir: Path, text_config: object) -> Weights:
    """Read a draft head's weights after a look at what it says of itself.

    Args:
        model_dir: the main model's folder.
        text_config: configuration of the main model's text layers.

    Raises:
        VlbatchError: there is none that can be read, or it is for another model.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = model_dir / "mtp.json"
    try:
        head = json.loads(path.read_text(encoding="utf-8"))
        weights: Weights = load_file(model_dir / head["weights"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise VlbatchError(
            f"{model_dir} has no draft head that can be read: {error}", setting="speculative"
        ) from error
    expected = {name: getattr(text_config, name) for name in _SAME_AS_TEXT}
    expected |= {"num_hidden_layers": 1, "hidden_state": "after_final_norm"}
    wrong = {name: head.get(name) for name, value in expected.items() if head.get(name) != value}
    if wrong:
        raise VlbatchError(
            f"{path} has {wrong}; expected { ({name: expected[name] for name in wrong}) }",
            setting="speculative",
        )
    return weights


def misfit(model_dir: Path, error: Exception) -> VlbatchError:
    """The refusal of weights that lack a name or have another shape."""
    return VlbatchError(
        f"the draft head in {model_dir} does not fit the model: {error}", setting="speculative"
    )
