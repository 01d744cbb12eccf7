"""transformers' positions, to compare with. Importing this module imports torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vlbatch.items import IntArray, Item
from vlbatch.runner._quiet import quiet_libraries
from vlbatch.runner.transformers_engine import _without_torchcodec

with quiet_libraries(), _without_torchcodec():
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

_MERGE = 2


class RopeIndex:
    """``get_rope_index`` of Qwen2-VL for one prompt, on one thread."""

    def __init__(self, items: Sequence[Item], prompt_len: int) -> None:
        torch.set_num_threads(1)
        self._model = object.__new__(Qwen2VLModel)  # the method needs nothing but a config
        torch.nn.Module.__init__(self._model)
        self._model.config = Qwen2VLConfig()
        types = torch.zeros(1, prompt_len, dtype=torch.int64)
        for item in items:
            types[0, item.offset : item.stop] = 1
        image_token = self._model.config.image_token_id
        ids = torch.where(types == 1, image_token, 100)
        for item in items:
            ids[0, item.offset - 1] = self._model.config.vision_start_token_id
        grids = [item.grid for item in items if item.grid is not None]
        self._arguments = {
            "input_ids": ids,
            "mm_token_type_ids": types,
            "image_grid_thw": torch.tensor([(t, h * _MERGE, w * _MERGE) for t, h, w in grids]),
        }

    def positions(self) -> IntArray:
        """Positions ``[3, prompt_len]``."""
        positions, _ = self._model.get_rope_index(**self._arguments)
        array: IntArray = positions[:, 0].numpy()
        return array
