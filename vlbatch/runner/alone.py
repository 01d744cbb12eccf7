"""Each request by itself, as plainly as can be: the witness for a batched run.

Uses the engine and nothing of the batch state: token list, positions token by token, features by
item, KV blocks in order. The whole prompt is one step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlbatch.items import Item
from vlbatch.runner.inputs import Engine, Features, MediaPatches, StepInputs
from vlbatch.runner.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Answer:
    """Generated tokens and the logits ``[vocab]`` of each."""

    tokens: list[int]
    logits: list[npt.NDArray[np.float32]]


def answer_alone(
    engine: Engine,
    prompt: Prompt,
    *,
    max_tokens: int,
    eos_token_id: int,
    max_model_len: int,
    tokens_per_second: float,
    kv_blocks: int,
) -> Answer:
    """Generate greedily for one prompt.

    Args:
        engine: its KV cache is overwritten.
        prompt: token ids and items with patches.
        max_tokens: most tokens to generate.
        eos_token_id: stops.
        max_model_len: stops.
        tokens_per_second: of video positions.
        kv_blocks: blocks of the engine; the request takes them in order.
    """
    positions = rotary_positions(prompt, tokens_per_second)
    offset = max(max(p) for p in positions) + 1 - len(positions)
    features: list[Features] = []
    places: list[int] = []
    for item in prompt.items:
        assert isinstance(item.payload, MediaPatches)  # noqa: S101 (PromptBuilder put it there)
        features += engine.encode([item.payload])
        places += range(item.offset, item.stop)
    token_ids = [int(token) for token in prompt.token_ids]
    tokens: list[int] = []
    logits: list[npt.NDArray[np.float32]] = []
    computed = 0
    while True:
        scores = engine.forward(
            StepInputs(
                token_ids=np.array(token_ids[computed:], dtype=np.int64),
                positions=np.array(positions[computed:], dtype=np.int64).T.copy(),
                query_start=np.array([0, len(token_ids) - computed], dtype=np.int32),
                computed=np.array([computed], dtype=np.int32),
                block_tables=np.arange(kv_blocks, dtype=np.int32)[np.newaxis],
                feature_tokens=np.array(places, dtype=np.int64),
                features=features,
                logit_tokens=np.array([len(token_ids) - computed - 1], dtype=np.int64),
            )
        )[0]
        computed = len(token_ids)
        features, places = [], []
        tokens.append(int(scores.argmax()))
        logits.append(scores)
        full = len(tokens) >= max_tokens or len(token_ids) + 1 > max_model_len
        if tokens[-1] == eos_token_id or full:
            return Answer(tokens, logits)
        positions.append((computed + offset,) * 3)
        token_ids.append(tokens[-1])


def rotary_positions(prompt: Prompt, tokens_per_second: float) -> list[tuple[int, int, int]]:
    """Qwen2.5-VL positions (t, h, w), one token after the other.

    Text goes one on from the largest coordinate so far; a grid starts there, and its cells add
    frame (in seconds times ``tokens_per_second`` for a video), row and column.
    """
    owner: dict[int, Item] = {}
    for item in prompt.items:
        owner.update(dict.fromkeys(range(item.offset, item.stop), item))
    positions: list[tuple[int, int, int]] = []
    base = following = 0
    for index in range(len(prompt.token_ids)):
        if index not in owner:
            positions.append((following,) * 3)
        else:
            item = owner[index]
            assert item.grid is not None  # noqa: S101 (PromptBuilder gave one)
            if index == item.offset:
                base = following
            _, height, width = item.grid
            frame, cell = divmod(index - item.offset, height * width)
            seconds = 1.0 if item.seconds_per_grid is None else item.seconds_per_grid
            pace = seconds * tokens_per_second if item.modality == "video" else 0.0
            row, column = divmod(cell, width)
            positions.append((base + int(frame * pace), base + row, base + column))
        following = max(following, max(positions[-1]) + 1)
    return positions
