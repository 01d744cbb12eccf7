"""The MTP head on each engine, beside the same formulas in numpy over whole sequences."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from model_engines import MODEL, make_test_engine, to_tensor

from vlbatch.errors import FeatureRowsMismatch, InvalidField, VlbatchError
from vlbatch.runner import StepInputs

pytest.importorskip("safetensors", reason="needs the run extra")

from safetensors.numpy import load_file

Floats = npt.NDArray[np.float32]
BLOCK = 4
NUM_BLOCKS = 20


@pytest.fixture(scope="module")
def engine() -> Any:
    """The engine of this process; see ``model_engines``."""
    return make_test_engine(NUM_BLOCKS, BLOCK)


@pytest.fixture(scope="module")
def head(engine: Any) -> Any:
    return engine.make_draft_head(MODEL)


def rms(x: Floats, weight: Floats) -> Floats:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def naive_head(embeddings: Floats, hidden: Floats, positions: Any) -> Floats:
    """The README's formulas over one whole sequence: ``m`` of every row."""
    w: dict[str, Any] = load_file(MODEL / "mtp.safetensors")
    both = [rms(embeddings, w["embed_norm.weight"]), rms(hidden, w["hidden_norm.weight"])]
    x = np.concatenate(both, axis=-1) @ w["proj.weight"].T
    num, heads, kv_heads, dim = len(x), 4, 2, 32
    axis = np.repeat([0, 1, 2], [4, 6, 6])
    angles = positions[axis].T / 1000.0 ** (np.arange(16) / 16)
    cos, sin = (np.tile(f(angles), 2)[:, None] for f in (np.cos, np.sin))

    def project(name: str, count: int, *, rotate: bool) -> Any:
        bias = w[f"layer.self_attn.{name}_proj.bias"]
        y = rms(x, w["layer.input_layernorm.weight"]) @ w[f"layer.self_attn.{name}_proj.weight"].T
        y = (y + bias).reshape(num, count, dim)
        if not rotate:
            return y
        return y * cos + np.concatenate([-y[..., 16:], y[..., :16]], -1) * sin

    query = project("q", heads, rotate=True)
    key = np.repeat(project("k", kv_heads, rotate=True), heads // kv_heads, axis=1)
    value = np.repeat(project("v", kv_heads, rotate=False), heads // kv_heads, axis=1)
    scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(dim)
    scores = np.where(np.tri(num, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum("hqk,khd->qhd", weights, value).reshape(num, -1)
    x = x + mixed @ w["layer.self_attn.o_proj.weight"].T
    y = rms(x, w["layer.post_attention_layernorm.weight"])
    gate = y @ w["layer.mlp.gate_proj.weight"].T
    up = y @ w["layer.mlp.up_proj.weight"].T
    x = x + (gate / (1 + np.exp(-gate)) * up) @ w["layer.mlp.down_proj.weight"].T
    return rms(x, w["norm.weight"])


class Sequence:
    """One request of the head: its tokens one ahead, hidden states, positions, block table."""

    def __init__(self, seed: int, num: int, blocks: list[int]) -> None:
        rng = np.random.default_rng(seed)
        self.token_ids = rng.integers(6, 34, num)
        self.hidden = rng.standard_normal((num, 128)).astype(np.float32)
        self.positions = np.cumsum(rng.integers(0, 3, (3, num)), axis=1)
        self.blocks = blocks
        self.features = rng.standard_normal((2, 128)).astype(np.float32)
        self.feature_tokens = [1, 2]

    def expected(self) -> tuple[Floats, Floats]:
        """States and logits of every row."""
        model: dict[str, Any] = load_file(MODEL / "model.safetensors")
        embeddings = model["model.embed_tokens.weight"][self.token_ids]
        embeddings[self.feature_tokens] = self.features
        states = naive_head(embeddings, self.hidden, self.positions)
        return states, states @ model["lm_head.weight"].T


def run(head: Any, chunks: list[tuple[Sequence, int, int]]) -> tuple[Floats, Floats]:
    """One step over chunks ``[start, stop)`` of sequences: states and logits of all rows."""
    tokens, feature_tokens, features = 0, [], []
    starts = [0]
    for sequence, start, stop in chunks:
        for index, row in zip(sequence.feature_tokens, sequence.features, strict=True):
            if start <= index < stop:
                feature_tokens.append(tokens + index - start)
                features.append(row[None])
        tokens += stop - start
        starts.append(tokens)
    tables = np.full((len(chunks), 8), -1, dtype=np.int32)
    for row, (sequence, *_) in enumerate(chunks):
        tables[row, : len(sequence.blocks)] = sequence.blocks
    logits, states = head.forward(
        StepInputs(
            token_ids=np.concatenate([s.token_ids[a:b] for s, a, b in chunks]),
            positions=np.concatenate([s.positions[:, a:b] for s, a, b in chunks], axis=1),
            query_start=np.array(starts, dtype=np.int32),
            computed=np.array([a for _, a, _ in chunks], dtype=np.int32),
            block_tables=tables,
            feature_tokens=np.array(feature_tokens, dtype=np.int64),
            features=features,
            logit_tokens=np.arange(tokens),
        ),
        to_tensor(np.concatenate([s.hidden[a:b] for s, a, b in chunks])),
    )
    return states.numpy(), logits


def test_equals_the_formulas(head: Any) -> None:
    """Chunk by chunk, two requests mixed, the head gives what the formulas give at once."""
    one, other = Sequence(1, 11, [7, 2, 9]), Sequence(2, 7, [4, 19])
    got: dict[int, list[Any]] = {1: [], 2: []}
    for chunks in (
        [(one, 0, 5)],
        [(other, 0, 2), (one, 5, 6)],
        [(one, 6, 11), (other, 2, 7)],
    ):
        states, logits = run(head, chunks)
        at = 0
        for sequence, start, stop in chunks:
            got[1 if sequence is one else 2].append((states[at:][: stop - start],
                                                     logits[at:][: stop - start]))  # fmt: skip
            at += stop - start
    for number, sequence in ((1, one), (2, other)):
        states, logits = sequence.expected()
        assert np.abs(np.concatenate([s for s, _ in got[number]]) - states).max() < 1e-4
        assert np.abs(np.concatenate([x for _, x in got[number]]) - logits).max() < 1e-3


def test_rejected_rows_are_overwritten(head: Any) -> None:
    """Rows of drafts that were rejected leave nothing: the next chunk starts over them."""
    sequence, wrong = Sequence(3, 9, [1, 2, 3]), Sequence(4, 9, [1, 2, 3])
    run(head, [(sequence, 0, 5)])
    run(head, [(wrong, 5, 9)])
    states, _ = run(head, [(sequence, 5, 9)])

    assert np.abs(states - sequence.expected()[0][5:]).max() < 1e-4


def test_the_main_model_is_untouched(engine: Any, head: Any) -> None:
    """The head's keys and values lie in a layer of its own: the model goes on as without it."""

    def step(computed: int, *token_ids: int) -> Floats:
        num = len(token_ids)
        return engine.forward(
            StepInputs(
                token_ids=np.array(token_ids),
                positions=np.arange(computed, computed + num) + np.zeros((3, 1), dtype=np.int64),
                query_start=np.array([0, num], dtype=np.int32),
                computed=np.array([computed], dtype=np.int32),
                block_tables=np.array([[0, 1]], dtype=np.int32),
                feature_tokens=np.zeros(0, dtype=np.int64),
                features=[],
                logit_tokens=np.array([num - 1]),
            )
        )

    step(0, 7, 8, 9)
    expected = step(3, 10)
    step(0, 7, 8, 9)
    run(head, [(Sequence(5, 9, [0, 1, 2]), 0, 9)])

    assert np.array_equal(step(3, 10), expected)


def test_forward_hidden_is_what_logits_come_from(engine: Any) -> None:
    """The engine's hidden states of all tokens give its logits by ``lm_head``."""
    inputs = StepInputs(
        token_ids=np.array([7, 8, 9]),
        positions=np.arange(3) + np.zeros((3, 1), dtype=np.int64),
        query_start=np.array([0, 3], dtype=np.int32),
        computed=np.array([0], dtype=np.int32),
        block_tables=np.array([[3]], dtype=np.int32),
        feature_tokens=np.zeros(0, dtype=np.int64),
        features=[],
        logit_tokens=np.array([1, 2]),
    )
    logits, hidden = engine.forward_hidden(inputs)
    weight = load_file(MODEL / "model.safetensors")["lm_head.weight"]

    assert tuple(hidden.shape) == (3, 128)
    assert np.abs(hidden.numpy()[1:] @ weight.T - logits).max() < 1e-4
    assert np.array_equal(engine.forward(inputs), logits)


def test_bad_inputs(head: Any) -> None:
    """Hidden states and features must be as many as the tokens that take them."""
    sequence = Sequence(6, 5, [1, 2])
    sequence.hidden = sequence.hidden[:4]
    with pytest.raises(InvalidField, match="4 hidden states for 5 tokens"):
        run(head, [(sequence, 0, 5)])
    sequence = Sequence(6, 5, [1, 2])
    sequence.features = np.zeros((2, 64), dtype=np.float32)
    with pytest.raises(FeatureRowsMismatch):
        run(head, [(sequence, 0, 5)])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"hidden_size": 64}, r"hidden_size.*64.*128"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"hidden_state": "before_final_norm"}, "before_final_norm"),
        ({"weights": "nothing.safetensors"}, "no draft head that can be read"),
        ({"weights": "config.json"}, "no draft head that can be read"),
        ({"weights": "model.safetensors"}, "does not fit the model"),
        (None, "no draft head that can be read"),
    ],
)
def test_folders_without_a_head(
    engine: Any, tmp_path: Path, change: dict[str, object] | None, match: str
) -> None:
    """A folder without a head, or with one for another model, is refused by name."""
    for name in ("mtp.safetensors", "model.safetensors", "config.json"):
        shutil.copy(MODEL / name, tmp_path)
    if change is not None:
        described = {**json.loads((MODEL / "mtp.json").read_text()), **change}
        (tmp_path / "mtp.json").write_text(json.dumps(described))
    with pytest.raises(VlbatchError, match=match) as caught:
        engine.make_draft_head(tmp_path)

    assert caught.value.setting == "speculative"
