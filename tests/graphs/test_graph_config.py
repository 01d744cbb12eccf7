"""Which graphs are captured, and which one a step gets."""

from __future__ import annotations

import pytest

from vlbatch import InputBatch, NumpyBackend
from vlbatch.errors import InvalidSetting
from vlbatch.graphs import GraphConfig, GraphDispatcher, automatic_sizes, padded_size
from vlbatch.order import BatchOrder


@pytest.mark.parametrize(
    ("max_num_seqs", "count"), [(8, 4), (64, 11), (100, 16), (256, 27), (512, 35)]
)
def test_automatic_counts(max_num_seqs: int, count: int) -> None:
    """The automatic list has as many sizes as FastDeploy's worked counts say."""
    sizes = GraphConfig(max_num_seqs=max_num_seqs).sizes("decode")

    assert len(sizes) == count
    assert sizes == tuple(sorted(set(sizes), reverse=True))
    assert sizes[0] == max_num_seqs


def test_automatic_sizes_by_hand() -> None:
    """Sizes are 1, 2, 4, then steps of 8, 16 and 32, and the largest itself."""
    assert automatic_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert automatic_sizes(160)[-4:] == [120, 128, 144, 160]
    assert automatic_sizes(300)[-3:] == [256, 288, 300]


def test_drafts_are_the_unit() -> None:
    """With k drafts every size holds whole requests of k + 1 tokens."""
    sizes = GraphConfig(max_num_seqs=6, num_draft_tokens=2).sizes("decode")

    assert sizes == (18, 12, 6, 3)


def test_both_kinds_side_by_side() -> None:
    """Decode and prefill sizes are separate lists; only-prefill captures no decodes."""
    both = GraphConfig(max_num_seqs=4, prefill_graphs=True, max_capture_shape_prefill=16)
    only = GraphConfig(cudagraph_only_prefill=True, capture_sizes_prefill=[8, 8, 32])

    assert (both.sizes("decode"), both.sizes("prefill")) == ((4, 2, 1), (16, 8, 4, 2, 1))
    assert (only.sizes("decode"), only.sizes("prefill")) == ((), (32, 8))


def test_tensor_parallel_filter() -> None:
    """Sizes that ranks cannot split evenly are left out."""
    assert GraphConfig(max_num_seqs=16, tensor_parallel=4).sizes("decode") == (16, 8, 4)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"use_cudagraph": False, "cudagraph_only_prefill": True}, "only_prefill, use_cudagraph"),
        ({"cudagraph_only_prefill": True, "capture_sizes": [1]}, "only_prefill, capture_sizes"),
        ({"capture_sizes_prefill": [1]}, "capture_sizes_prefill, prefill_graphs"),
        ({"capture_sizes": []}, "capture_sizes"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
    ],
)
def test_contradictions(settings: dict[str, object], names: str) -> None:
    """A contradiction is refused and both settings are named."""
    with pytest.raises(InvalidSetting, match=names):
        GraphConfig(**settings)  # type: ignore[arg-type]


def test_padded_size() -> None:
    """The smallest size that holds the tokens; none for 0 tokens or beyond the largest."""
    sizes = GraphConfig(max_num_seqs=256).sizes("decode")

    expected = {3: 4, 5: 8, 8: 8, 129: 144, 256: 256, 0: None, 257: None}
    assert {n: padded_size(n, sizes) for n in expected} == expected


def order_of(*requests: tuple[int, int, int], drafts: int = 0) -> BatchOrder:
    """Order of requests given as (prompt_len, computed, scheduled)."""
    batch = InputBatch(
        (), backend=NumpyBackend(), capacity=16, max_model_len=1000, num_drafts=drafts
    )
    for number, (prompt_len, computed, _) in enumerate(requests):
        batch.add(f"r{number}", prompt_len=prompt_len)
        batch.progress.computed[number] = computed
    return batch.apply(batch.plan({f"r{n}": r[2] for n, r in enumerate(requests)}))


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ([(5, 5, 1)] * 3, ("decode", 4, None)),
        ([(80, 0, 80), (9, 4, 5)], ("prefill", 88, None)),
        ([(5, 5, 1), (80, 0, 20)], (None, 21, "mixed batch")),
        ([(1, 0, 1)], ("prefill", 1, None)),
        ([(200, 0, 129)], (None, 129, "too many tokens")),
        ([], (None, 0, "no tokens")),
    ],
)
def test_dispatch(requests: list[tuple[int, int, int]], expected: tuple[object, ...]) -> None:
    """The kind comes from progress; what does not fit runs eagerly for a counted reason."""
    config = GraphConfig(max_num_seqs=8, prefill_graphs=True, max_capture_shape_prefill=128)
    dispatcher = GraphDispatcher(config)

    got = dispatcher.choose(order_of(*requests))

    assert (got.kind, got.padded_tokens, got.reason) == expected
    assert dispatcher.counts == {expected[2] or expected[0]: 1}


def test_prefill_chunk_of_draft_length_is_prefill() -> None:
    """A prompt chunk of exactly k + 1 tokens is no decode graph's work."""
    config = GraphConfig(max_num_seqs=4, num_draft_tokens=3)
    chunk = order_of((10, 2, 4), drafts=3)
    decode = order_of((10, 10, 4), drafts=3)

    assert GraphDispatcher(config).choose(chunk).reason == "kind not captured"
    assert GraphDispatcher(config).choose(decode).kind == "decode"


def test_uneven_decodes_run_eagerly() -> None:
    """Decodes with different draft counts do not fit a graph of whole groups."""
    config = GraphConfig(max_num_seqs=4, num_draft_tokens=3)
    uneven = order_of((10, 10, 4), (10, 10, 2), drafts=3)

    assert GraphDispatcher(config).choose(uneven).reason == "uneven decodes"


def test_more_tiles_than_captured_run_eagerly() -> None:
    """A tile count above the captured one does not run from the graph."""
    dispatcher = GraphDispatcher(GraphConfig())

    assert dispatcher.choose(order_of((5, 5, 1)), num_tiles=5, max_tiles=4).kind is None
    assert dispatcher.choose(order_of((5, 5, 1)), num_tiles=4, max_tiles=4).kind == "decode"
    assert dispatcher.counts == {"too many tiles": 1, "decode": 1}


def test_digest_tells_decisions_apart() -> None:
    """Ranks with equal orders have equal digests, with other decisions other ones."""
    config = GraphConfig()
    decisions = [GraphDispatcher(config).choose(order_of(*[(5, 5, 1)] * n)) for n in (1, 1, 2)]

    digests = [decision.digest() for decision in decisions]
    assert digests[0] == digests[1] != digests[2]
