"""A stand-in for a model, without a framework: every logit is a hash of all that it may depend on.

A token's key hashes its embedding (token id or feature row) and its three rotary positions; what
the token sees is hashed over two layers of keys, read through the block table. One wrong feature
row, position, token, block or length anywhere in a request's context changes every later logit
beyond recognition, and in a batch or alone the same context gives the same logits bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from vlbatch.runner import MediaPatches, StepInputs

_U64 = npt.NDArray[np.uint64]
_SALT = np.uint64(0x9E3779B97F4A7C15)


class HashEngine:
    """Implements ``vlbatch.runner.Engine``.

    Args:
        num_blocks: KV blocks; they hold noise at first.
        block_size: tokens a block.
        eos_one_in: one token in so many ends the answer.

    Attributes:
        broken: bytes of patches -> what ``encode`` raises for them.
        encode_calls: feature rows of each item of each call so far.
        num_forwards: calls so far.

    """

    hidden_size = 4
    vocab_size = 40
    eos_token_id = 1

    def __init__(self, num_blocks: int, block_size: int, eos_one_in: int = 6) -> None:
        self._block_size = block_size
        noise = np.random.default_rng(0).integers(0, 2**63, (2, num_blocks * block_size))
        self._keys = noise.astype(np.uint64)  # [layers, slots]
        self._eos_one_in = eos_one_in
        self.broken: dict[bytes, Exception] = {}
        self.encode_calls: list[list[int]] = []
        self.num_forwards = 0

    def encode(self, items: Sequence[MediaPatches]) -> list[object]:
        for item in items:
            if item.patches.tobytes() in self.broken:
                raise self.broken[item.patches.tobytes()]
        features = [encode_item(item, self.hidden_size) for item in items]
        self.encode_calls.append([len(rows) for rows in features])
        return list(features)

    def forward(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        self.num_forwards += 1
        keys = self._embed(inputs)
        for axis in inputs.positions.astype(np.uint64):
            keys = _mix(keys * _SALT + axis)
        rows = self._slots_by_row(inputs)
        written = np.concatenate([slots[done:] for slots, done in rows])
        assert len(np.unique(written)) == len(written) == len(keys), "two tokens in one KV slot"
        for layer in self._keys:
            layer[written] = keys
            seen = [_running_hash(layer[slots])[done:] for slots, done in rows]
            keys = _mix(keys ^ np.concatenate(seen))
        return self._logits(keys[inputs.logit_tokens])

    def _embed(self, inputs: StepInputs) -> _U64:
        assert inputs.token_ids.min() >= 0
        assert inputs.token_ids.max() < self.vocab_size
        embeddings = _mix(inputs.token_ids.astype(np.uint64))
        if len(inputs.feature_tokens):
            rows = np.concatenate([np.asarray(rows) for rows in inputs.features])
            assert rows.shape == (len(inputs.feature_tokens), self.hidden_size)
            hashed = np.zeros(len(rows), dtype=np.uint64)
            for column in rows.view(np.uint32).T:
                hashed = _mix(hashed * _SALT + column)
            embeddings[inputs.feature_tokens] = hashed
        return embeddings

    def _slots_by_row(self, inputs: StepInputs) -> list[tuple[npt.NDArray[np.int64], int]]:
        """KV slots of each row's context ``[0, computed + scheduled)``, and its computed tokens."""
        rows = []
        for row, done in enumerate(inputs.computed.tolist()):
            token = np.arange(done + inputs.query_start[row + 1] - inputs.query_start[row])
            blocks = inputs.block_tables[row].astype(np.int64)[token // self._block_size]
            assert blocks.min() >= 0, f"row {row} reads past its block table"
            rows.append((blocks * self._block_size + token % self._block_size, done))
        return rows

    def _logits(self, hidden: _U64) -> npt.NDArray[np.float32]:
        wide = _mix(hidden[:, None] + np.arange(self.vocab_size, dtype=np.uint64) * _SALT)
        logits = (wide >> np.uint64(40)).astype(np.float32) / 2**24
        logits[hidden % np.uint64(self._eos_one_in) == 0, self.eos_token_id] = 2.0
        return logits


def encode_item(item: MediaPatches, hidden_size: int) -> npt.NDArray[np.float32]:
    """Feature rows ``[t * h * w / 4, hidden]`` that depend on every patch of the item."""
    t, h, w = item.grid_thw
    seed = int.from_bytes(blake3(item.patches.tobytes()).digest()[:8], "little")
    rng = np.random.default_rng(seed)
    return rng.standard_normal((t * h * w // 4, hidden_size)).astype(np.float32)


def _running_hash(keys: _U64) -> _U64:
    """``[n]``: entry i hashes ``keys[:i + 1]`` in order."""
    return np.cumsum(_mix(keys + np.arange(len(keys), dtype=np.uint64) * _SALT), dtype=np.uint64)


def _mix(x: _U64) -> _U64:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    x = x + _SALT
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
