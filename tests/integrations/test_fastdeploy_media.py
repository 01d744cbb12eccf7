"""Features reach the tokens of their own request on every path, fresh or cached.

Feature row ``i`` of content "x-3" holds ``300 + i``; the expected values are worked out by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from fault_batches import (
    HIDDEN,
    Encoder,
    decode,
    delivered,
    features_of,
    hosted,
    insert,
    make_batch,
    make_config,
    make_proposer,
    media,
    run,
    schedule,
)

from vlbatch import NumpyBackend
from vlbatch.errors import (
    CacheFull,
    InvalidField,
    StaleOrder,
    UnknownRequest,
)
from vlbatch.features import EncodeTask
from vlbatch.integrations.fastdeploy import InputBatch, items_of, process_reorder
from vlbatch.integrations.fastdeploy import reorder_split_prefill_and_decode as reorder


def step(batch: InputBatch, encoder: Any) -> None:
    """What a runner does between inserting requests and the forward."""
    batch.process_mm_features(encoder)
    reorder(batch)
    batch.check()


def columns(features: Any) -> list[int]:
    """First column of feature rows of any library."""
    return [int(row[0]) for row in np.asarray(features)]


def assert_step(batch: InputBatch, expected: dict[int, list[tuple[int, int]]]) -> None:
    """Every view of the step's features says ``expected``: id -> (token of its prompt, value)."""
    assert delivered(batch) == expected
    starts, computed = hosted(batch, "cu_seqlens_q"), hosted(batch, "seq_lens_decoder")
    whole: list[int] = []
    listed: list[object] = [-1] * batch.sizes.max_num_seqs
    for row, batch_id in batch.index_to_batch_id.items():
        found = batch.features_of(batch_id)
        pairs = expected.get(batch_id, [])
        assert (found is None) == (not pairs)
        if found is not None:
            places = [int(starts[row]) + token - int(computed[row]) for token, _ in pairs]
            assert found.places.tolist() == places
            listed[row] = [value for _, value in pairs]
            whole += [value for _, value in pairs]
    got = batch.image_features_list
    assert [x if isinstance(x, int) else columns(x) for x in got] == listed
    assert (None if batch.image_features is None else columns(batch.image_features)) == (
        whole or None
    )


def test_fresh_encode(backend: Any) -> None:
    """What is encoded in this step is at its tokens."""
    batch, encoder = make_batch(backend), Encoder()
    insert(batch, 3, media=media(("a-1", 2, 4)))
    step(batch, encoder)
    assert_step(batch, {3: [(2, 100), (3, 101), (4, 102), (5, 103)]})
    assert encoder.seen == ["a-1"]


def test_hit(backend: Any) -> None:
    """Another request with that content encodes nothing, and has it at tokens of its own."""
    batch, encoder = make_batch(backend), Encoder()
    insert(batch, 3, media=media(("a-1", 2, 4)))
    step(batch, encoder)
    decode(batch, 3, 10)
    insert(batch, 8, media=media(("a-1", 5, 4)))
    step(batch, encoder)
    assert_step(batch, {8: [(5, 100), (6, 101), (7, 102), (8, 103)]})
    assert encoder.seen == ["a-1"]


def test_hits_and_misses_in_one_request(backend: Any) -> None:
    """Each item has its own rows, whichever of them were cached; misses get their own patches."""
    batch, seen = make_batch(backend), {}

    def encode(tasks: Sequence[EncodeTask]) -> list[tuple[Any, ...]]:
        for task in tasks:
            patches: Any = task.placed.item.payload
            seen[task.key.content] = patches[:, 0].tolist()
        return [(features_of(t.key.content, t.placed.num_rows),) for t in tasks]

    # a patch holds the number of its content; an item of n rows has 4 * n patches
    sizes = {"a-1": 1, "b-2": 2, "c-3": 3, "d-4": 1}
    patches = [np.full((4 * n, 5), int(key[-1])) for key, n in sizes.items()]
    both = {**media(("a-1", 0, 1), ("c-3", 4, 3)), "images": np.concatenate(patches[::2])}
    insert(batch, 1, media=both)
    step(batch, encode)
    assert seen == {"a-1": [1] * 4, "c-3": [3] * 12}

    batch.remove(1)
    seen.clear()
    spans = [("a-1", 1, 1), ("b-2", 2, 2), ("c-3", 5, 3), ("d-4", 9, 1)]
    insert(batch, 2, 12, media={**media(*spans), "images": np.concatenate(patches)})
    step(batch, encode)
    assert seen == {"b-2": [2] * 8, "d-4": [4] * 4}
    assert_step(
        batch,
        {2: [(1, 100), (2, 200), (3, 201), (5, 300), (6, 301), (7, 302), (9, 400)]},
    )


def test_the_same_content_twice() -> None:
    """One content at two places, in one request and in two, is encoded once."""
    batch, encoder = make_batch(NumpyBackend()), Encoder()
    insert(batch, 1, media=media(("a-1", 0, 2), ("a-1", 5, 2)))
    insert(batch, 2, media=media(("a-1", 3, 2)))
    step(batch, encoder)
    assert encoder.seen == ["a-1"]
    assert_step(batch, {1: [(0, 100), (1, 101), (5, 100), (6, 101)], 2: [(3, 100), (4, 101)]})


@pytest.mark.parametrize("is_cached", [False, True])
def test_prefix_hit_inside_an_image(backend: Any, is_cached: bool) -> None:
    """Of an image that the prefix cache has in part, only the rest is delivered."""
    batch, encoder = make_batch(backend), Encoder()
    if is_cached:
        insert(batch, 1, media=media(("a-1", 0, 5)))
        step(batch, encoder)
        batch.remove(1)
    insert(batch, 2, 12, computed=4, media=media(("a-1", 2, 5), ("b-2", 8, 2)))
    step(batch, encoder)
    assert encoder.seen == ["a-1", "b-2"]
    assert_step(batch, {2: [(4, 102), (5, 103), (6, 104), (8, 200), (9, 201)]})


def test_prefix_hit_behind_an_image() -> None:
    """An image that the prefix cache has whole is neither encoded nor delivered."""
    batch, encoder = make_batch(NumpyBackend()), Encoder()
    insert(batch, 2, 12, computed=7, media=media(("a-1", 2, 5), ("b-2", 8, 2)))
    step(batch, encoder)
    assert encoder.seen == ["b-2"]
    assert_step(batch, {2: [(8, 200), (9, 201)]})


def test_chunks_through_an_image(backend: Any) -> None:
    """An image over several chunks is encoded once, each chunk takes its own rows."""
    batch, encoder = make_batch(backend), Encoder()
    insert(batch, 5, 10, 3, media=media(("a-1", 1, 6)))
    step(batch, encoder)
    assert_step(batch, {5: [(1, 100), (2, 101)]})
    schedule(batch, 5, 3, 2)
    step(batch, encoder)
    assert_step(batch, {5: [(3, 102), (4, 103)]})
    schedule(batch, 5, 5, 5)
    step(batch, encoder)
    assert_step(batch, {5: [(5, 104), (6, 105)]})
    assert encoder.seen == ["a-1"]


@pytest.mark.parametrize("wants_reorder", [False, True])
def test_several_prefills_with_images(backend: Any, wants_reorder: bool) -> None:
    """Prefills of one step, with and without media and around a decode, each get their own."""
    batch, encoder = make_batch(backend), Encoder()
    insert(batch, 6, media=media(("z-9", 0, 3)))
    step(batch, encoder)
    insert(batch, 0, 8, media=media(("a-1", 1, 2)))
    insert(batch, 4, 5)
    insert(batch, 2, 10, 6, media=media(("z-9", 2, 3), ("b-2", 7, 2)))
    insert(batch, 7, 7, computed=2, media=media(("c-3", 0, 4), ("a-1", 5, 2)))
    decode(batch, 6, 10)
    batch.process_mm_features(encoder)
    batch.enable_pd_reorder = wants_reorder
    process_reorder(batch)

    assert encoder.seen == ["z-9", "a-1", "c-3"]
    assert_step(
        batch,
        {
            0: run("a-1", 1, 2),
            2: run("z-9", 2, 3),
            7: [*run("c-3", 2, 2, first=2), *run("a-1", 5, 2)],
        },
    )
    # b-2 is in the next chunk
    schedule(batch, 2, 6, 4)
    for batch_id, length in ((0, 8), (4, 5), (7, 7), (6, 11)):
        decode(batch, batch_id, length)
    step(batch, encoder)
    assert encoder.seen == ["z-9", "a-1", "c-3", "b-2"]
    assert_step(batch, {2: run("b-2", 7, 2)})


def test_images_and_videos(backend: Any) -> None:
    """A video of several frames is one item with all of its rows, between images."""
    batch, encoder = make_batch(backend), Encoder()
    mixed = {
        "mm_positions": [(1, 2), (4, 12), (17, 1)],
        "mm_hashes": ["a-1", "v-2", "b-3"],
        "grid_thw": [(1, 2, 4), (3, 4, 4), (1, 2, 2)],
        "image_type_ids": [0, 1, 1, 1, 0],  # by frame
    }
    items = items_of(mixed)
    assert [item.modality for item in items] == ["image", "video", "image"]
    assert [item.grid for item in items] == [(1, 1, 2), (3, 2, 2), (1, 1, 1)]
    insert(batch, 3, 20, media=mixed)
    step(batch, encoder)
    assert_step(batch, {3: [*run("a-1", 1, 2), *run("v-2", 4, 12), *run("b-3", 17, 1)]})
    assert encoder.seen == ["a-1", "v-2", "b-3"]

    # the video again, cut by a chunk in its second frame
    batch.remove(3)
    insert(batch, 4, 20, 10, media=mixed)
    step(batch, encoder)
    assert_step(batch, {4: [*run("a-1", 1, 2), *run("v-2", 4, 6)]})
    assert encoder.seen == ["a-1", "v-2", "b-3"]


def test_positions_of_a_video() -> None:
    """Frames, rows and columns of a video have their own positions; text goes on behind them."""
    video = {
        "mm_positions": [(2, 8)], "mm_hashes": ["v-2"], "grid_thw": [(2, 4, 4)],
        "image_type_ids": [1, 1],
    }  # fmt: skip
    batch = make_batch(NumpyBackend())
    batch.add(3, prompt_len=12, items=items_of(video, seconds_per_grid=[1.5]))
    schedule(batch, 3, 0, 12)
    step(batch, Encoder())
    # text 0, 1; t advances by 1.5 s times 2 tokens a second
    assert batch.positions().tolist() == [
        [0, 1, 2, 2, 2, 2, 5, 5, 5, 5, 6, 7],
        [0, 1, 2, 2, 3, 3, 2, 2, 3, 3, 6, 7],
        [0, 1, 2, 3, 2, 3, 2, 3, 2, 3, 6, 7],
    ]
    decode(batch, 3, 12)
    reorder(batch)
    assert batch.positions().tolist() == [[8]] * 3


@pytest.mark.parametrize("library", ["paddle", "torch"])
def test_features_of_the_encoders_library(library: str) -> None:
    """Views are of the encoder's library, in one request and over several."""
    tensors = pytest.importorskip(library)
    to_tensor = getattr(tensors, {"paddle": "to_tensor", "torch": "from_numpy"}[library])
    encoder = Encoder()
    batch = make_batch(NumpyBackend())
    insert(batch, 1, media=media(("a-1", 0, 1), ("b-2", 3, 2)))
    insert(batch, 2, media=media(("b-2", 1, 2)))
    step(batch, lambda tasks: [(to_tensor(out[0]),) for out in encoder(tasks)])
    assert isinstance(batch.image_features, type(to_tensor(np.zeros(1))))
    assert_step(batch, {1: [(0, 100), (3, 200), (4, 201)], 2: [(1, 200), (2, 201)]})
    assert tuple(batch.image_features.shape) == (5, HIDDEN)


def test_views_are_cleared_when_consumed(backend: Any) -> None:
    """Taking the features, or assigning ``None``, empties every view for the rest of the step."""
    batch = make_batch(backend)
    insert(batch, 1, media=media(("a-1", 0, 2)))
    for clear in ("take", "image_features", "image_features_list"):
        step(batch, Encoder())
        assert_step(batch, {1: run("a-1", 0, 2)})
        if clear == "take":
            assert columns(batch.take_image_features()) == [100, 101]
        else:
            batch[clear] = None
        assert_step(batch, {})
        assert batch.take_image_features() is None


def test_steps_without_features_have_none(backend: Any) -> None:
    """A decode, or a chunk without media, does not see the features of the step before."""
    batch, encoder = make_batch(backend), Encoder()
    insert(batch, 1, media=media(("a-1", 0, 2)))
    step(batch, encoder)
    decode(batch, 1, 10)
    insert(batch, 2)
    reorder(batch)  # nothing to encode: no other call is needed
    assert_step(batch, {})
    decode(batch, 2, 10)
    decode(batch, 1, 11)
    step(batch, encoder)
    assert_step(batch, {})
    assert encoder.seen == ["a-1"]


def test_features_follow_requests_that_come_and_go(backend: Any) -> None:
    """After requests left, rows and features still belong together."""
    batch, encoder = make_batch(backend), Encoder()
    for batch_id, content in ((6, "a-1"), (1, "b-2"), (4, "c-3"), (0, "d-4")):
        insert(batch, batch_id, 10, 4, media=media((content, 2, 5)))
    step(batch, encoder)
    batch.remove(1)
    batch.remove(6)
    decode(batch, 4, 4, tokens=0)  # not in the next step
    schedule(batch, 0, 4, 6)
    insert(batch, 9, 6, media=media(("b-2", 1, 5)))
    step(batch, encoder)
    assert dict(batch.index_to_batch_id) == {0: 9, 1: 0, 2: 4}
    assert_step(batch, {0: run("d-4", 4, 3, first=2), 9: run("b-2", 1, 5)})
    assert encoder.seen == ["a-1", "b-2", "c-3", "d-4"]


def test_encode_comes_before_the_order() -> None:
    """Ordering rows while features are missing is refused, naming who waits; nothing moves."""
    batch = make_batch(NumpyBackend())
    insert(batch, 5)
    insert(batch, 3, media=media(("a-1", 2, 4)))
    schedule(batch, 3, 0, 4)
    with pytest.raises(StaleOrder, match=r"requests \['3'\] are not encoded"):
        reorder(batch)
    assert dict(batch.index_to_batch_id) == {0: 5, 1: 3}
    with pytest.raises(StaleOrder, match="there is no step"):
        batch.image_features_list  # noqa: B018 (reading is the test)
    step(batch, Encoder())
    assert_step(batch, {3: run("a-1", 2, 2)})


def test_a_bad_item_fails_its_request_alone() -> None:
    """Who needs an item that the encoder cannot do leaves the batch with the reason."""
    batch, encoder = make_batch(NumpyBackend()), Encoder()

    def encode(tasks: Sequence[EncodeTask]) -> list[tuple[Any, ...]]:
        if any(task.key.content == "b-2" for task in tasks):
            raise RuntimeError("broken file")
        return encoder(tasks)

    for batch_id, content in ((6, "a-1"), (1, "b-2"), (4, "b-2"), (0, "d-4")):
        insert(batch, batch_id, media=media((content, 2, 5)))
    step(batch, encode)
    assert batch.failed.keys() == {1, 4}
    assert str(batch.failed[1].__cause__) == "broken file"
    assert {*batch.index_to_batch_id.values()} == {6, 0}
    assert_step(batch, {6: run("a-1", 2, 5), 0: run("d-4", 2, 5)})
    batch.process_mm_features(encode)
    assert dict(batch.failed) == {}


@pytest.mark.parametrize("process_first", [True, False])
def test_a_cached_item_of_another_size_fails_its_request_alone(process_first: bool) -> None:
    """Who has another number of placeholders than the cache has rows leaves; the others go on."""
    batch, encoder = make_batch(NumpyBackend()), Encoder()
    insert(batch, 6, media=media(("a-1", 2, 4)))
    step(batch, encoder)
    batch.remove(6)
    insert(batch, 1, media=media(("a-1", 2, 3)))
    insert(batch, 4, media=media(("a-1", 1, 4)))
    if process_first:
        batch.process_mm_features(encoder)
    reorder(batch)
    assert batch.failed.keys() == {1}
    assert dict(batch.index_to_batch_id) == {0: 4}
    assert_step(batch, {4: run("a-1", 1, 4)})


def test_features_as_wide_as_the_configuration_says() -> None:
    """Where no form is given, features must have the ``hidden_size`` of the configuration."""
    batch = make_batch(NumpyBackend())
    insert(batch, 3, media=media(("a-1", 2, 4)))
    batch.process_mm_features(lambda tasks: [(np.ones((4, HIDDEN + 1), "float32"),) for _ in tasks])

    assert "hidden size 5; expected 4" in str(batch.failed[3])


def test_features_of_nobody() -> None:
    """A request that is not in the batch has no features to ask for."""
    batch = make_batch(NumpyBackend())
    insert(batch, 3)
    reorder(batch)
    with pytest.raises(UnknownRequest, match="'4'"):
        batch.features_of(4)


def test_only_none_can_be_assigned() -> None:
    """Features cannot be put in by hand: they would be nobody's."""
    batch = make_batch(NumpyBackend())
    with pytest.raises(InvalidField, match="follows from process_mm_features"):
        batch["image_features"] = np.zeros((3, 4))


def test_the_configured_budget() -> None:
    """``max_encoder_cache`` is the budget in feature rows; what is over it is refused."""
    config = make_config()
    config.cache_config.max_encoder_cache = 6
    batch = InputBatch(config, backend="numpy")
    batch.init_share_inputs()
    insert(batch, 1, media=media(("a-1", 0, 4)))
    insert(batch, 2, media=media(("b-2", 0, 4)))
    with pytest.raises(CacheFull):
        batch.process_mm_features(Encoder())
    assert batch.vl.features.cache.capacity_rows == 6
    decode(batch, 2, 0, tokens=0)
    step(batch, Encoder())
    assert_step(batch, {1: run("a-1", 0, 4)})


@pytest.mark.parametrize("value", [None, 0, -1])
def test_no_budget(value: int | None) -> None:
    """Without a budget there is room for a step of the longest chunks; at 0 nothing is kept on."""
    config = make_config()
    config.cache_config.max_encoder_cache = value
    batch, encoder = InputBatch(config, backend="numpy"), Encoder()
    batch.init_share_inputs()
    cache = batch.vl.features.cache
    assert cache.capacity_rows == 8 * 64
    insert(batch, 1, 10, 6, media=media(("a-1", 2, 6)))
    step(batch, encoder)
    schedule(batch, 1, 6, 4)
    step(batch, encoder)
    assert_step(batch, {1: run("a-1", 6, 2, first=4)})
    assert encoder.seen == ["a-1"], "it has a reader until its last row"
    decode(batch, 1, 10)
    insert(batch, 2, media=media(("a-1", 2, 6)))
    step(batch, encoder)
    assert_step(batch, {2: run("a-1", 2, 6)})
    batch.remove(2)
    assert len(cache.present()) == (value is None)
    insert(batch, 3, media=media(("a-1", 2, 6)))
    step(batch, encoder)
    assert_step(batch, {3: run("a-1", 2, 6)})
    assert len(encoder.seen) == (1 if value is None else 3)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_drafter_reads_past_the_chunk(steps: int) -> None:
    """An image that starts where a chunk ends is encoded for the drafter, and stays until it read.

    Module ``s`` of the draft model takes token ``i + s`` where the target takes token ``i``.
    """
    config = make_config()
    config.speculative_config.num_model_steps = steps
    batch, encoder = InputBatch(config, backend="numpy"), Encoder()
    batch.init_share_inputs()
    proposer = make_proposer(batch)
    insert(batch, 3, 12, 4, media=media(("a-1", 4, 3)))
    insert(batch, 1, 8, media=media(("b-2", 2, 6)))
    step(batch, encoder)
    assert encoder.seen == ["a-1", "b-2"]
    assert_step(batch, {1: run("b-2", 2, 6)})

    def drafted(shift: int) -> dict[int, list[tuple[int, int, int]]]:
        found = proposer.draft_features(shift)
        return {
            batch_id: list(zip(f.places, f.positions, columns(f.features), strict=True))
            for batch_id, f in found.items()
        }

    # tokens 0..3 are of 3, 4..11 of 1: place, token of the prompt, feature
    assert drafted(1) == {
        3: [(3, 4, 100)],
        1: [(5, 2, 200), (6, 3, 201), (7, 4, 202), (8, 5, 203), (9, 6, 204), (10, 7, 205)],
    }
    if steps == 2:
        assert drafted(2)[3] == [(2, 4, 100), (3, 5, 101)]
    with pytest.raises(InvalidField, match=f"shift {steps + 1}; expected 0..{steps}"):
        proposer.draft_features(steps + 1)
    np.testing.assert_array_equal(proposer.positions(), batch.positions())

    # chunk [4, 8) ends behind the image; the drafter still reads token 7 and before
    schedule(batch, 3, 4, 4)
    decode(batch, 1, 8)
    step(batch, encoder)
    assert_step(batch, {3: run("a-1", 4, 3)})
    assert [token for _, token, _ in drafted(1)[3]] == [5, 6]
    batch.remove(1)
    with pytest.raises(StaleOrder, match="there is no step"):
        proposer.draft_features()


def test_without_drafts_nothing_is_read_ahead() -> None:
    """A model without drafts encodes an image in the step that reaches it, not one before."""
    config = make_config()
    config.speculative_config.method = None
    batch, encoder = InputBatch(config, backend="numpy"), Encoder()
    batch.init_share_inputs()
    insert(batch, 3, 12, 4, media=media(("a-1", 4, 3)))
    step(batch, encoder)
    assert encoder.seen == []


def test_new_weights() -> None:
    """After an update of the weights the same content is encoded again."""
    batch, encoder = make_batch(NumpyBackend()), Encoder()
    for batch_id in (1, 2):
        insert(batch, batch_id, media=media(("a-1", 0, 4)))
        step(batch, encoder)
        batch.remove(batch_id)
        batch.update_weights(1)
    assert encoder.seen == ["a-1", "a-1"]
