"""Small FastDeploy batches whose rows tell whose they are, for the tests of its faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from exposed import to_host

from vlbatch import Backend, NumpyBackend
from vlbatch.features import EncodeTask
from vlbatch.integrations.fastdeploy import InputBatch, ProposerInputBatch, items_of

AnyBackend = Backend[Any, Any]
HIDDEN = 4
NUM_DRAFTS = 2

# fields of one value a request, and those of num_drafts + 1 rows a request
SWAPPED_UPSTREAM = (
    "token_ids_all", "input_ids", "top_p", "top_k", "top_k_list", "min_p", "min_p_list",
    "temperature", "penalty_score", "frequency_score", "presence_score", "temp_scaled_logprobs",
    "top_p_normalized_logprobs", "min_dec_len", "max_dec_len", "step_seq_lens_encoder",
    "step_seq_lens_decoder", "step_idx", "stop_flags", "bad_tokens", "bad_tokens_len",
    "next_tokens", "is_block_step", "is_chunk_step", "encoder_block_lens", "used_list_len",
    "infer_seed", "first_token_ids", "ori_seq_lens_encoder", "system_lens", "system_ids",
    "enable_thinking", "max_think_lens", "limit_think_status", "reasoning_status", "rope_emb",
    "block_tables", "stop_seqs_len", "stop_seqs", "mask_rollback", "preempted_idx",
    "last_preempted_idx", "input_ids_cpu", "accept_tokens", "accept_num", "draft_tokens",
    "actual_draft_token_num", "step_draft_tokens", "step_seq_lens_this_time",
)  # fmt: skip
FORGOTTEN_UPSTREAM = (
    "req_ids", "entropy_list", "logits_processors_args", "max_reply_lens", "generated_modality"
)  # fmt: skip


class CountedArray(np.ndarray[Any, Any]):
    """An array that its user reads through; each look at an element is noted.

    Attributes:
        looks: what was asked for so far; ``None`` where nobody counts.
    """

    looks: list[object] | None = None

    def __array_finalize__(self, origin: object) -> None:
        """Views count for the same backend."""
        self.looks = getattr(origin, "looks", None)

    def _note(self, what: object) -> None:
        if self.looks is not None:
            self.looks.append(what)

    def __getitem__(self, index: Any) -> Any:
        """Note, and read."""
        self._note(index)
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        """Note, and iterate."""
        self._note("iter")
        return super().__iter__()

    def __bool__(self) -> bool:
        """Note, and decide."""
        self._note("bool")
        return super().__bool__()

    def item(self, *index: Any) -> Any:
        """Note, and read."""
        self._note("item")
        return super().item(*index)

    def tolist(self) -> Any:
        """Note, and read."""
        self._note("tolist")
        return super().tolist()

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Note, and compute with the plain values."""
        self._note(ufunc.__name__)
        plain = [np.asarray(x) if isinstance(x, CountedArray) else x for x in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)


class CountingBackend(NumpyBackend):
    """Counts what is read back from arrays, by the library and through those that it hands out.

    Attributes:
        num_reads: whole or partial reads of the library so far.
        looks: looks at elements through exposed arrays so far.
    """

    def __init__(self) -> None:
        self.num_reads = 0
        self.looks: list[object] = []

    def read(self, array: Any, start: int, stop: int) -> Any:
        """Count, and read."""
        self.num_reads += 1
        return super().read(array, start, stop)

    def expose(self, array: Any, dtype: str) -> Any:
        """Hand out an array that counts."""
        exposed = super().expose(array, dtype).view(CountedArray)
        exposed.looks = self.looks
        return exposed

    def forget(self) -> None:
        """Start counting anew."""
        self.num_reads = 0
        self.looks.clear()


def make_config(max_num_seqs: int = 8, *, multimodal: bool = True, **model: object) -> Any:
    """A configuration with FastDeploy's names; ``model`` of its model section."""
    settings = {
        "max_model_len": 64, "vocab_size": 50, "hidden_size": HIDDEN, "head_dim": 8,
        "enable_mm": multimodal, "model_type": "qwen2_5_vl",
    }  # fmt: skip
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=64),
        model_config=SimpleNamespace(**{**settings, **model}),
        cache_config=SimpleNamespace(block_size=16, total_block_num=64),
        speculative_config=SimpleNamespace(method="mtp", num_speculative_tokens=NUM_DRAFTS),
    )


def make_batch(
    backend: AnyBackend, max_num_seqs: int = 8, *, model: Mapping[str, Any] | None = None,
    **settings: Any,
) -> InputBatch:  # fmt: skip
    """A multimodal batch with drafts; ``settings`` of ``InputBatch``."""
    batch = InputBatch(make_config(max_num_seqs, **(model or {})), backend=backend, **settings)
    batch.init_share_inputs()
    return batch


def make_proposer(target: InputBatch) -> ProposerInputBatch:
    """A proposer that follows."""
    proposer = ProposerInputBatch(target.fd_config, target)
    proposer.init_share_inputs()
    return proposer


def insert(
    batch: InputBatch,
    batch_id: int,
    prompt_len: int = 10,
    chunk: int | None = None,
    *,
    computed: int = 0,
    media: Mapping[str, object] | None = None,
) -> int:
    """Add a request that computes a chunk (all the rest, where not given); returns its row."""
    row = batch.add(batch_id, prompt_len=prompt_len, computed=computed, items=items_of(media))
    schedule(batch, batch_id, computed, prompt_len - computed if chunk is None else chunk)
    return row


def schedule(batch: InputBatch, batch_id: int, computed: int, chunk: int) -> None:
    """Write progress and a chunk of the prompt, as a worker does for a prefill task."""
    row = batch.get_index_by_batch_id(batch_id)
    batch["seq_lens_decoder"][row] = computed
    batch["seq_lens_encoder"][row] = chunk
    batch["seq_lens_this_time_buffer"][row] = chunk


def decode(batch: InputBatch, batch_id: int, computed: int, tokens: int = 1) -> None:
    """Write progress and the tokens of a decode, as the post-processing of a step does."""
    row = batch.get_index_by_batch_id(batch_id)
    batch["seq_lens_decoder"][row] = computed
    batch["seq_lens_encoder"][row] = 0
    batch["seq_lens_this_time_buffer"][row] = tokens


def rows_by_id(batch: InputBatch | ProposerInputBatch) -> dict[int, int]:
    """batch_id -> row."""
    return {batch_id: row for row, batch_id in batch.index_to_batch_id.items()}


def entries(name: str, row: int) -> int | slice:
    """Where the entries of a row are along the first axis of a field."""
    group = NUM_DRAFTS + 1
    return slice(row * group, (row + 1) * group) if name == "draft_logits" else row


def write(batch: InputBatch | ProposerInputBatch, name: str, row: int, tag: int) -> None:
    """Write a value by row that tells whose it is."""
    array = batch[name]
    if isinstance(array, list):
        array[row] = {"of": tag}
    else:
        array[entries(name, row)] = bool(tag % 2) if "bool" in str(array.dtype) else tag


def read(batch: InputBatch | ProposerInputBatch, name: str, row: int) -> object:
    """The first element of what a row holds, after a look at the others."""
    array = batch[name]
    if isinstance(array, list):
        return array[row]
    held = np.ravel(to_host(array)[entries(name, row)])
    assert (held == held[0]).all(), f"{name} of row {row} is torn: {held}"
    return held[0].item()


def tagged(batch: InputBatch | ProposerInputBatch, name: str, tag: int) -> object:
    """What ``read`` gives for ``write``."""
    array = batch[name]
    if isinstance(array, list):
        return {"of": tag}
    return bool(tag % 2) if "bool" in str(array.dtype) else tag


def hosted(batch: InputBatch | ProposerInputBatch, name: str) -> npt.NDArray[Any]:
    """A field on the host."""
    return to_host(batch[name])


def media(*items: tuple[str, int, int], kinds: Sequence[int] | None = None) -> dict[str, object]:
    """``multimodal_inputs`` of items ``(content, offset, rows)``, each one row of a grid high."""
    inputs: dict[str, object] = {
        "mm_positions": [(offset, rows) for _, offset, rows in items],
        "mm_hashes": [content for content, _, _ in items],
        "grid_thw": [(1, 2, 2 * rows) for _, _, rows in items],
    }
    return inputs if kinds is None else {**inputs, "image_type_ids": list(kinds)}


def value_of(content: str) -> int:
    """What the features of a content start with."""
    return 100 * int(content.strip("abcdefghijklmnopqrstuvwxyz-"))


class Encoder:
    """A vision encoder whose feature row ``i`` of content "x-3" holds ``300 + i``.

    Attributes:
        seen: contents in order of encoding.
    """

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, tasks: Sequence[EncodeTask]) -> list[tuple[Any, ...]]:
        """Encode."""
        self.seen += [task.key.content for task in tasks]
        return [(features_of(t.key.content, t.placed.num_rows),) for t in tasks]


def features_of(content: str, rows: int) -> npt.NDArray[np.float32]:
    """The right features of a content."""
    column = np.arange(rows, dtype=np.float32)[:, None] + value_of(content)
    features: npt.NDArray[np.float32] = np.repeat(column, HIDDEN, axis=1)
    return features


def delivered(batch: InputBatch) -> dict[int, list[tuple[int, int]]]:
    """batch_id -> (token of its prompt, feature value) of the step, from the per-request view."""
    got: dict[int, list[tuple[int, int]]] = {}
    for batch_id in batch.index_to_batch_id.values():
        found = batch.features_of(batch_id)
        if found is not None:
            values = np.asarray(found.features)[:, 0].astype(int).tolist()
            got[batch_id] = list(zip(found.positions.tolist(), values, strict=True))
    return got


def run(content: str, token: int, count: int, first: int = 0) -> list[tuple[int, int]]:
    """``count`` tokens from ``token`` on with the feature rows of a content from ``first`` on."""
    return [(token + i, value_of(content) + first + i) for i in range(count)]
