"""Positions of long prompts, identity of pixels, and the encoder cache."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np

from vlbatch.backends import NumpyBackend
from vlbatch.batch import InputBatch
from vlbatch.bench.harness import Outcome, measure
from vlbatch.cache import EncoderCache
from vlbatch.features import FeatureStore
from vlbatch.items import Item
from vlbatch.media import family_options, identity_key
from vlbatch.positions import build_runs

PROMPT_LEN = 32_768
NUM_IMAGES = 64
GRID = (1, 16, 16)
SPACING = PROMPT_LEN // NUM_IMAGES


def long_prompt() -> list[Item]:
    """Images at equal distances."""
    rows = GRID[1] * GRID[2]
    return [Item(f"i{n}", "image", n * SPACING + 4, rows, GRID) for n in range(NUM_IMAGES)]


def run_positions(*, rounds: int = 60) -> Outcome:
    """Build and expand the positions of a 32k prompt with 64 images; also by transformers."""
    items = long_prompt()
    methods = {
        "build runs": lambda _: build_runs("qwen2_vl", items),
        "build runs, expand all": lambda _: build_runs("qwen2_vl", items).positions(0, PROMPT_LEN),
    }
    reference = None
    if find_spec("torch") and find_spec("transformers"):
        from vlbatch.bench.reference import RopeIndex

        reference = RopeIndex(items, PROMPT_LEN)
        methods["transformers get_rope_index"] = lambda _: reference.positions()
    timings = measure(methods, rounds=rounds)
    runs = build_runs("qwen2_vl", items)
    facts: dict[str, object] = {"run_bytes": runs.nbytes}
    if reference is not None:
        facts["equal"] = bool(np.array_equal(reference.positions(), runs.positions(0, PROMPT_LEN)))
        theirs = timings["transformers get_rope_index"].median
        facts["ratio"] = theirs / timings["build runs, expand all"].median
    return Outcome(timings, facts)


def run_identity(*, rounds: int = 20) -> Outcome:
    """Bytes of pixels a second on one core."""
    pixels = np.random.default_rng(0).integers(0, 256, (4096, 4096, 3), dtype=np.uint8)
    options = family_options("qwen2_vl", "image")

    def key(_: int) -> None:
        identity_key(pixels, modality="image", options=options, model="bench")

    timings = measure({"48 MiB of pixels": key}, rounds=rounds)
    per_second = pixels.nbytes / timings["48 MiB of pixels"].median
    return Outcome(timings, {"bytes_per_second": per_second})


def run_features(*, rounds: int = 60) -> Outcome:
    """Gather a prefill step with 64 images into an embedding buffer on the host."""
    hidden, rows = 1024, 256
    store = FeatureStore(EncoderCache(max_rows=NUM_IMAGES * rows))
    items = [Item(f"i{n}", "image", n * rows, rows) for n in range(NUM_IMAGES)]
    batch = InputBatch((), backend=NumpyBackend(), capacity=1, max_model_len=NUM_IMAGES * rows)
    batch.add("r", prompt_len=NUM_IMAGES * rows)
    store.add("r", items, NUM_IMAGES * rows)
    work = store.reserve(store.plan({"r": (0, NUM_IMAGES * rows)}))
    features = np.ones((rows, hidden), dtype=np.float32)
    store.commit({task.key: (features.copy(),) for task in work.tasks})
    order = batch.apply(batch.plan({"r": NUM_IMAGES * rows}))
    embeddings = np.zeros((NUM_IMAGES * rows, hidden), dtype=np.float32)
    copied = np.ones_like(embeddings)

    def scatter(_: int) -> None:
        inputs = store.gather(order)
        start = 0
        for array in inputs.arrays():
            assert isinstance(array, np.ndarray)  # noqa: S101 (committed above)
            embeddings[inputs.tokens[start : start + len(array)]] = array
            start += len(array)

    timings = measure(
        {
            "gather: tokens and views": lambda _: store.gather(order),
            "gather and scatter 64 MiB": scatter,
            "plain copy of 64 MiB": lambda _: np.copyto(embeddings, copied),
        },
        rounds=rounds,
    )
    return Outcome(timings, {})


def run_cache(*, rounds: int = 60) -> Outcome:
    """Plan, reserve, commit and release: 64 hits, and 64 encodes that evict."""
    features = (np.zeros((16, 8), dtype=np.float32),)

    def step(store: FeatureStore, prefix: str, number: int) -> None:
        req_id = f"r{number}"
        items = [Item(f"{prefix}{n}", "image", n * 16, 16) for n in range(NUM_IMAGES)]
        store.add(req_id, items, NUM_IMAGES * 16)
        work = store.reserve(store.plan({req_id: (0, NUM_IMAGES * 16)}))
        store.commit({task.key: features for task in work.tasks})
        store.remove(req_id)

    hits = FeatureStore(EncoderCache(max_rows=NUM_IMAGES * 16))
    misses = FeatureStore(EncoderCache(max_rows=NUM_IMAGES * 16))
    timings = measure(
        {
            "64 hits": lambda number: step(hits, "same", number),
            "64 encodes, 64 evictions": lambda number: step(misses, f"{number}-", number),
        },
        rounds=rounds,
    )
    return Outcome(timings, {})
