"""Write patches.json: patch rows of transformers' own processors, for test_media_patches.py.

Made with transformers 5.24.0, torch 2.13.0 (CPU), torchvision 0.29.1 and Pillow 13.0.0. Where
torchvision lacks compiled operators that fit the torch beside it, declare them first:

    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

The input of every case is ``pattern(frames, height, width)``. Videos have sizes that need no
resize: torchvision's filter is not Pillow's.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3
from PIL import Image
from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import (
    Ernie4_5_VLMoeImageProcessorPil,
)
from transformers.models.ernie4_5_vl_moe.video_processing_ernie4_5_vl_moe import (
    Ernie4_5_VLMoeVideoProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
IMAGES = [
    ("qwen2_5_vl", Qwen2VLImageProcessorPil, 56, 84, {}),
    ("qwen2_5_vl", Qwen2VLImageProcessorPil, 61, 75, {}),
    ("qwen2_5_vl", Qwen2VLImageProcessorPil, 190, 120, {"max_pixels": 6272}),
    ("qwen2_5_vl", Qwen2VLImageProcessorPil, 30, 170, {"resample": 2}),
    (
        "qwen3_vl",
        Qwen2VLImageProcessorPil,
        70,
        100,
        {"patch_size": 16, "min_pixels": 4096, "max_pixels": 16384, **HALF},
    ),
    ("ernie4_5_vl_moe", Ernie4_5_VLMoeImageProcessorPil, 90, 60, {}),
]
VIDEOS = [
    ("qwen2_5_vl", Qwen2VLVideoProcessor, 3, 56, 84, {"min_pixels": 3136, "max_pixels": 12544}),
    (
        "qwen3_vl",
        Qwen3VLVideoProcessor,
        4,
        64,
        96,
        {"size": {"shortest_edge": 4096, "longest_edge": 65536}},
    ),
    (
        "ernie4_5_vl_moe",
        Ernie4_5_VLMoeVideoProcessor,
        3,
        56,
        84,
        {"size": {"shortest_edge": 3136, "longest_edge": 12544}},
    ),
]


def pattern(num_frames: int, height: int, width: int) -> np.ndarray:
    t, y, x, c = np.ogrid[:num_frames, :height, :width, :3]
    return ((31 * t + 13 * y + 7 * x + 29 * c + x * y) % 256).astype(np.uint8)


def case(modality: str, family: str, config: dict, shape: tuple, patches, grid) -> dict:
    patches = np.ascontiguousarray(patches, np.float32)
    rng = np.random.default_rng(0)
    rows, columns = rng.integers(0, patches.shape[0], 40), rng.integers(0, patches.shape[1], 40)
    return {
        "modality": modality,
        "family": family,
        "config": config,
        "num_frames_height_width": list(shape),
        "grid_thw": [int(value) for value in grid],
        "shape": list(patches.shape),
        "samples": [
            [int(row), int(column), float(patches[row, column])]
            for row, column in zip(rows, columns, strict=True)
        ],
        "blake3": blake3(patches.tobytes()).hexdigest(),
    }


def main() -> None:
    cases = []
    for family, processor, height, width, config in IMAGES:
        image = Image.fromarray(pattern(1, height, width)[0])
        out = processor(**json.loads(json.dumps(config)))(images=[image], return_tensors="np")
        cases.append(
            case(
                "image",
                family,
                config,
                (1, height, width),
                out["pixel_values"],
                out["image_grid_thw"][0],
            )
        )
    for family, processor, num_frames, height, width, config in VIDEOS:
        video = torch.from_numpy(pattern(num_frames, height, width)).permute(0, 3, 1, 2)
        options = {"draw_on_frames": False} if family.startswith("ernie") else {}
        out = processor(**json.loads(json.dumps(config)))(
            videos=[video], return_tensors="np", do_sample_frames=False, **options
        )
        cases.append(
            case(
                "video",
                family,
                config,
                (num_frames, height, width),
                out["pixel_values_videos"],
                out["video_grid_thw"][0],
            )
        )
    path = Path(__file__).with_name("patches.json")
    lines = ",\n".join(json.dumps(one) for one in cases)
    path.write_text(f'{{"transformers": "5.24.0", "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
