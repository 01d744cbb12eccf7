"""Faults V1-V20 of FastDeploy's features and rope: each test fails on what the upstream does."""

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
    insert,
    make_batch,
    media,
    run,
    schedule,
    value_of,
)

from vlbatch import make_backend
from vlbatch.errors import (
    CacheFull,
    EncodeFailed,
    FeatureRowsMismatch,
    InvalidItem,
    InvalidSchedule,
    ItemTooLarge,
    PromptTooLong,
    StaleOrder,
)
from vlbatch.features import EncodeTask, FeatureSpec
from vlbatch.integrations.fastdeploy import (
    InputBatch,
    items_of,
    recover_batch_index_for_output,
    reorder_split_prefill_and_decode,
)
from vlbatch.positions import build_runs

Delivered = dict[int, list[tuple[int, int]]]


def host_batch(max_num_seqs: int = 8, **settings: Any) -> InputBatch:
    """A batch of the host: its features are arrays of the encoder, whatever the fields are."""
    return make_batch(make_backend("numpy"), max_num_seqs, **settings)


def step(batch: InputBatch, encoder: Any) -> Delivered:
    """Encode, reorder, and look at what each request got, in all three views."""
    batch.process_mm_features(encoder)
    reorder_split_prefill_and_decode(batch)
    batch.check()
    got = delivered(batch)
    rows = [batch.get_index_by_batch_id(batch_id) for batch_id in got]
    assert rows == sorted(rows)
    by_row = batch.image_features_list
    whole: list[int] = []
    for batch_id, row in zip(got, rows, strict=True):
        values = np.asarray(by_row[row])[:, 0].astype(int).tolist()
        assert values == [value for _, value in got[batch_id]]
        whole += values
    assert [row for row, each in enumerate(by_row) if not isinstance(each, int)] == rows
    if whole:
        assert np.asarray(batch.image_features)[:, 0].astype(int).tolist() == whole
    else:
        assert batch.image_features is None
    return got


def cached(*contents: tuple[str, int], rows: int) -> InputBatch:
    """A batch whose cache of so many rows holds these contents, and which has no request."""
    batch = host_batch(encoder_cache_rows=rows)
    for content, num_rows in contents:
        insert(batch, 7, num_rows + 1, media=media((content, 0, num_rows)))
        step(batch, Encoder())
        batch.remove(7)
    return batch


# -- which features reach whom ---------------------------------------------------------------------
def test_every_request_of_a_step_gets_its_features() -> None:
    """V1: three prefills with images in one step have features, not only the last."""
    batch = host_batch()
    for batch_id, content, rows in ((5, "a-1", 4), (0, "b-2", 2), (3, "c-3", 3)):
        insert(batch, batch_id, media=media((content, 2, rows)))

    assert step(batch, Encoder()) == {
        5: run("a-1", 2, 4), 0: run("b-2", 2, 2), 3: run("c-3", 2, 3)
    }  # fmt: skip


def test_a_hit_moves_no_offset_of_a_miss() -> None:
    """V2: after a cache hit and between texts each miss is encoded from its own patches."""
    batch = cached(("a-1", 2), rows=64)
    contents = (("b-2", 0, 1), ("a-1", 2, 2), ("c-3", 5, 3), ("a-1", 9, 2), ("d-4", 12, 2))
    inputs = media(*contents)
    inputs["images"] = np.repeat([value_of(c) for c, _, _ in contents], [4, 8, 12, 8, 8])
    insert(batch, 3, 16, media=inputs)
    patches: dict[str, list[int]] = {}

    def extract(tasks: Sequence[EncodeTask]) -> list[tuple[Any, ...]]:
        for task in tasks:
            patches[task.key.content] = np.asarray(task.placed.item.payload).tolist()
        return Encoder()(tasks)

    got = step(batch, extract)

    assert patches == {"b-2": [200] * 4, "c-3": [300] * 12, "d-4": [400] * 8}
    assert got == {3: [each for c, offset, rows in contents for each in run(c, offset, rows)]}


def test_a_hit_of_the_step_is_not_evicted_in_it() -> None:
    """V3: a later request's miss evicts what nobody in the step needs, not an earlier hit."""
    batch = cached(("a-1", 4), ("b-2", 4), rows=8)
    insert(batch, 3, media=media(("a-1", 2, 4)))
    insert(batch, 1, media=media(("c-3", 2, 4)))
    encoder = Encoder()

    assert step(batch, encoder) == {3: run("a-1", 2, 4), 1: run("c-3", 2, 4)}
    assert encoder.seen == ["c-3"]


def test_a_hit_of_a_later_request_is_not_evicted_by_an_earlier_one() -> None:
    """V3: the same with the hit behind the miss, and the hit the older entry."""
    batch = cached(("a-1", 4), ("b-2", 4), rows=8)
    insert(batch, 1, media=media(("c-3", 2, 4)))
    insert(batch, 3, media=media(("a-1", 2, 4)))
    encoder = Encoder()

    assert step(batch, encoder) == {3: run("a-1", 2, 4), 1: run("c-3", 2, 4)}
    assert encoder.seen == ["c-3"]


def test_an_item_outside_the_chunk_shifts_no_other() -> None:
    """V4: with two items before the chunk and one behind it only the third's features come."""
    batch = host_batch()
    items = (("a-1", 0, 2), ("b-2", 4, 2), ("c-3", 8, 4), ("d-4", 14, 3))
    insert(batch, 3, 20, 6, computed=7, media=media(*items))
    encoder = Encoder()

    assert step(batch, encoder) == {3: run("c-3", 8, 4)}
    assert encoder.seen == ["c-3"]


def test_a_prefix_hit_inside_an_image() -> None:
    """V5: features are cut to the tokens that are not cached: rows are as many as placeholders."""
    batch = host_batch()
    insert(batch, 3, 20, computed=9, media=media(("a-1", 4, 8)))

    assert step(batch, Encoder()) == {3: run("a-1", 9, 3, 5)}


def test_a_prefix_hit_behind_an_image() -> None:
    """V5: an image that is cached whole is neither encoded nor delivered."""
    batch = host_batch()
    insert(batch, 3, 20, computed=12, media=media(("a-1", 4, 8)))
    encoder = Encoder()

    assert step(batch, encoder) == {}
    assert encoder.seen == []


def test_prefix_hits_of_two_requests_in_a_step() -> None:
    """V6: each request is cut by its own hit, and by its own chunk."""
    batch = host_batch()
    insert(batch, 5, 20, computed=6, media=media(("a-1", 4, 8)))
    insert(batch, 1, 20, 3, computed=3, media=media(("b-2", 1, 6)))
    insert(batch, 2, 20, 8, media=media(("c-3", 2, 4)))

    assert step(batch, Encoder()) == {
        5: run("a-1", 6, 6, 2), 1: run("b-2", 3, 3, 2), 2: run("c-3", 2, 4)
    }  # fmt: skip


def test_a_decode_step_has_no_features() -> None:
    """V7: features of a prefill are gone in the next step, in which nobody is inserted."""
    batch = host_batch()
    insert(batch, 3, media=media(("a-1", 2, 4)))
    assert step(batch, Encoder())
    decode(batch, 3, 10)
    reorder_split_prefill_and_decode(batch)

    assert batch.image_features is None
    assert batch.image_features_list == [-1] * 8
    assert batch.features_of(3) is None


@pytest.mark.parametrize("how", ["take", "image_features", "image_features_list"])
def test_consumed_features_are_gone(how: str) -> None:
    """V7: once the forward has taken them, no view shows them again."""
    batch = host_batch()
    insert(batch, 3, media=media(("a-1", 2, 4)))
    step(batch, Encoder())
    if how == "take":
        assert len(batch.take_image_features()) == 4
    else:
        batch[how] = None

    assert batch.image_features is None
    assert batch.image_features_list == [-1] * 8
    assert batch.features_of(3) is None


def test_images_and_videos_each_in_their_places() -> None:
    """V8: whatever the encoder groups, a request's images and videos go to their own spans.

    ``image_features`` joins both in the order of their places, which ``features_of`` tells.
    """
    batch = host_batch()
    first = media(("v-1", 1, 3), ("i-2", 6, 2), kinds=(1, 0))
    insert(batch, 3, media=first)
    insert(batch, 0, media=media(("i-3", 0, 2), ("v-4", 4, 3), kinds=(0, 1)))

    def by_modality(tasks: Sequence[EncodeTask]) -> list[tuple[Any, ...]]:
        kinds = {task.key.content: task.placed.item.modality for task in tasks}
        assert kinds == {"v-1": "video", "i-2": "image", "i-3": "image", "v-4": "video"}
        ordered = sorted(tasks, key=lambda task: task.placed.item.modality)
        encoded = dict(zip([t.key for t in ordered], Encoder()(ordered), strict=True))
        return [encoded[task.key] for task in tasks]

    assert step(batch, by_modality) == {
        3: run("v-1", 1, 3) + run("i-2", 6, 2), 0: run("i-3", 0, 2) + run("v-4", 4, 3)
    }  # fmt: skip


# -- positions -------------------------------------------------------------------------------------
def image(content: str, offset: int, height: int, width: int) -> dict[str, object]:
    """``multimodal_inputs`` of one image with so many feature rows a side."""
    return {
        "mm_positions": [(offset, height * width)],
        "mm_hashes": [content],
        "grid_thw": [(1, 2 * height, 2 * width)],
    }


def test_two_prefills_have_their_own_positions() -> None:
    """V9: images of two grids in one step: neither request has the other's positions."""
    batch = host_batch()
    insert(batch, 3, 8, media=image("a-1", 1, 2, 2))
    insert(batch, 0, 9, media=image("b-2", 1, 1, 6))
    step(batch, Encoder())

    assert list(batch.index_to_batch_id.values()) == [3, 0]
    assert batch.positions().tolist() == [
        [0, 1, 1, 1, 1, 3, 4, 5, 0, 1, 1, 1, 1, 1, 1, 7, 8],
        [0, 1, 1, 2, 2, 3, 4, 5, 0, 1, 1, 1, 1, 1, 1, 7, 8],
        [0, 1, 2, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 6, 7, 8],
    ]


@pytest.mark.parametrize("rope_scaling", ["absent", None])
def test_positions_need_no_rope_scaling(rope_scaling: str | None) -> None:
    """V10: the family alone decides; decodes go on from the largest position of all axes."""
    model = {} if rope_scaling == "absent" else {"rope_scaling": None}
    batch = host_batch(model=model)
    insert(batch, 3, 8, media=image("a-1", 1, 1, 6))
    step(batch, Encoder())
    assert batch.positions().dtype == np.int64
    assert batch.positions()[:, 7].tolist() == [7, 7, 7]
    decode(batch, 3, 8)
    batch.condense()

    assert batch.positions().tolist() == [[8], [8], [8]]


def test_a_prompt_beyond_the_model_is_refused() -> None:
    """V10: what does not fit ``max_model_len`` is refused at the door, and names the setting."""
    batch = host_batch()
    with pytest.raises(PromptTooLong) as caught:
        insert(batch, 3, 65)

    assert (caught.value.req_id, caught.value.setting) == ("3", "max_model_len")
    assert batch.num_running_requests == 0


# -- the cache -------------------------------------------------------------------------------------
def test_a_step_that_is_refused_costs_nothing() -> None:
    """V11: cache, references and counters of a step that cannot be are as before, and go on."""
    batch = cached(("a-1", 4), rows=8)
    insert(batch, 3, media=media(("b-2", 2, 4)))
    insert(batch, 1, media=media(("c-3", 2, 8)))
    cache = batch.vl.features.cache
    before = cache.digest(), cache.usage, repr(cache.counters)
    with pytest.raises(CacheFull) as caught:
        batch.process_mm_features(Encoder())
    assert caught.value.req_id == "1"
    schedule(batch, 1, 0, 30)
    with pytest.raises(InvalidSchedule, match="'1': got 30 tokens"):
        batch.process_mm_features(Encoder())

    assert (cache.digest(), cache.usage, repr(cache.counters)) == before
    schedule(batch, 1, 0, 1)  # the drafter looks one token ahead
    assert step(batch, Encoder()) == {3: run("b-2", 2, 4)}


def test_a_request_that_fails_gives_back_what_it_took() -> None:
    """V11: an item that cannot be encoded leaves neither a reservation nor a reference."""
    batch = host_batch(encoder_cache_rows=8)
    insert(batch, 3, media=media(("a-1", 0, 4), ("b-2", 5, 4)))

    def extract(tasks: Sequence[EncodeTask]) -> list[tuple[Any, ...]]:
        if any(task.key.content == "b-2" for task in tasks):
            raise RuntimeError("no such image")
        return Encoder()(tasks)

    assert step(batch, extract) == {}
    assert type(batch.failed[3]) is EncodeFailed
    cache = batch.vl.features.cache
    assert not any(cache.references(key) for key in cache.present())
    insert(batch, 3, media=media(("c-3", 1, 8)))
    assert step(batch, Encoder()) == {3: run("c-3", 1, 8)}


def test_an_interrupted_encoder_leaves_no_reservation() -> None:
    """V11: an interrupt while encoding gives everything back; the next call encodes as usual."""
    batch = host_batch()
    insert(batch, 3, media=media(("a-1", 2, 4)))

    def interrupt(tasks: Sequence[EncodeTask]) -> list[tuple[Any, ...]]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        batch.process_mm_features(interrupt)
    assert batch.vl.features.cache.present() == ()

    assert step(batch, Encoder()) == {3: run("a-1", 2, 4)}


def test_features_that_are_missing_are_no_silence() -> None:
    """V11: a request whose image was not encoded stops the step, and nothing has moved."""
    batch = host_batch()
    insert(batch, 3, media=media(("a-1", 2, 4)))
    with pytest.raises(StaleOrder, match="'3'"):
        batch.condense()

    assert step(batch, Encoder()) == {3: run("a-1", 2, 4)}


def test_the_whole_budget_can_be_used() -> None:
    """V12: an item as large as the cache fits, one row more is refused and evicts nobody."""
    batch = cached(("a-1", 6), rows=8)
    with pytest.raises(ItemTooLarge) as caught:
        insert(batch, 3, 20, media=media(("b-2", 2, 9)))
    assert (caught.value.req_id, caught.value.setting) == ("3", "max_rows")
    assert [key.content for key in batch.vl.features.cache.present()] == ["a-1"]
    insert(batch, 3, 20, media=media(("c-3", 2, 8)))

    assert step(batch, Encoder()) == {3: run("c-3", 2, 8)}


def test_a_request_does_not_evict_its_own_hits() -> None:
    """V12: the oldest entry, hit by the same request, outlives a younger one."""
    batch = cached(("a-1", 4), ("b-2", 4), rows=8)
    insert(batch, 3, 12, media=media(("c-3", 1, 4), ("a-1", 6, 4)))
    encoder = Encoder()

    assert step(batch, encoder) == {3: run("c-3", 1, 4) + run("a-1", 6, 4)}
    assert encoder.seen == ["c-3"]


def test_evictions_add_up_until_they_are_taken() -> None:
    """V13: two steps that evict are both told of; an empty cache has nothing to evict."""
    batch = cached(("a-1", 4), ("b-2", 4), rows=8)
    cache = batch.vl.features.cache
    cache.take_freed()
    for content in ("c-3", "d-4"):
        insert(batch, 3, media=media((content, 2, 4)))
        step(batch, Encoder())
        batch.remove(3)

    assert [key.content for key in cache.take_freed()] == ["a-1", "b-2"]
    cache.clear()
    assert cache.present() == ()
    assert [key.content for key in cache.take_freed()] == ["c-3", "d-4"]
    insert(batch, 3, media=media(("e-5", 2, 8)))
    assert step(batch, Encoder()) == {3: run("e-5", 2, 8)}


def test_an_empty_cache_is_filled() -> None:
    """V14: the first image is kept: the same content of a later request is not encoded again."""
    batch = host_batch()
    encoder = Encoder()
    for batch_id in (3, 5):
        insert(batch, batch_id, media=media(("a-1", batch_id - 1, 4)))
        assert step(batch, encoder) == {batch_id: run("a-1", batch_id - 1, 4)}
        batch.remove(batch_id)

    assert encoder.seen == ["a-1"]


def test_new_weights_are_new_features() -> None:
    """V15: after a weight update a cached image is encoded again."""
    batch = cached(("a-1", 4), rows=8)
    batch.update_weights(1)
    insert(batch, 3, media=media(("a-1", 2, 4)))
    encoder = Encoder()

    assert step(batch, encoder) == {3: run("a-1", 2, 4)}
    assert encoder.seen == ["a-1"]


def test_one_content_is_encoded_once_a_step() -> None:
    """V16: the same image twice in a request and in another one is one task of one call."""
    batch = host_batch()
    insert(batch, 3, 12, media=media(("a-1", 1, 4), ("a-1", 6, 4)))
    insert(batch, 0, media=media(("a-1", 0, 4)))
    encoder = Encoder()

    assert step(batch, encoder) == {3: run("a-1", 1, 4) + run("a-1", 6, 4), 0: run("a-1", 0, 4)}
    assert encoder.seen == ["a-1"]


@pytest.mark.parametrize("key", [None, "", 7])
def test_items_without_a_hash_share_nothing(key: object) -> None:
    """V16: equal hashes share features, so what is no hash is refused, and not made into one."""
    with pytest.raises(InvalidItem, match="mm_hashes"):
        items_of({**media(("a-1", 2, 4)), "mm_hashes": [key]})


def test_a_buffer_that_the_encoder_uses_again() -> None:
    """V17: an encoder whose output is a graph's static buffer changes no feature kept before."""
    batch = host_batch()
    static = np.zeros((8, HIDDEN), dtype=np.float32)

    def replay(tasks: Sequence[EncodeTask]) -> list[tuple[Any, ...]]:
        (task,) = tasks
        rows = task.placed.num_rows
        static[:rows] = features_of(task.key.content, rows)
        return [(static[:rows],)]

    insert(batch, 3, media=media(("a-1", 2, 4)))
    step(batch, replay)
    decode(batch, 3, 10)
    insert(batch, 0, media=media(("b-2", 2, 6)))
    step(batch, replay)
    insert(batch, 5, media=media(("a-1", 1, 4)))

    assert step(batch, replay) == {0: run("b-2", 2, 6), 5: run("a-1", 1, 4)}


def test_rotary_state_is_made_once_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """V18: however many chunks a prompt has, its positions are derived at admission only.

    No table is made of them; ``rope_emb`` is written by the runner alone.
    """
    made: list[str] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(kwargs["req_id"])
        return build_runs(*args, **kwargs)

    monkeypatch.setattr("vlbatch.step.build_runs", counted)
    batch = host_batch()
    insert(batch, 3, 12, 4, media=image("a-1", 2, 2, 3))
    batch["rope_emb"][0] = 7
    seen = []
    for computed in (0, 4, 8):
        schedule(batch, 3, computed, 4)
        step(batch, Encoder())
        seen += batch.positions()[2].tolist()

    assert made == ["3"]
    assert seen == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8]
    assert (np.asarray(batch["rope_emb"])[0] == 7).all()


@pytest.mark.parametrize(
    ("shape", "dtype", "said"),
    [((4, HIDDEN + 1), "float32", "hidden size 5"), ((4, HIDDEN), "float64", "dtype float64")],
)
def test_features_of_another_form_are_refused(
    shape: tuple[int, int], dtype: str, said: str
) -> None:
    """V19: a wrong hidden size or dtype of ``spec`` fails the request whose it is, and no other."""
    batch = host_batch(spec=FeatureSpec(hidden_size=HIDDEN, dtype="float32"))
    insert(batch, 3, media=media(("a-1", 2, 4)))
    insert(batch, 0, media=media(("b-2", 2, 4)))

    def extract(tasks: Sequence[EncodeTask]) -> list[tuple[Any, ...]]:
        return [
            (np.ones(shape, dtype),) if task.key.content == "a-1" else encoded
            for task, encoded in zip(tasks, Encoder()(tasks), strict=True)
        ]

    assert step(batch, extract) == {0: run("b-2", 2, 4)}
    assert type(batch.failed[3]) is FeatureRowsMismatch
    assert said in str(batch.failed[3])


def test_the_default_spec_knows_the_hidden_size_only() -> None:
    """V19: without ``spec`` columns are compared with the configuration, and any dtype passes."""
    batch = host_batch()
    insert(batch, 3, media=media(("a-1", 2, 4)))
    insert(batch, 0, media=media(("b-2", 2, 4)))

    def extract(tasks: Sequence[EncodeTask]) -> list[tuple[Any, ...]]:
        wide = np.ones((4, HIDDEN + 1), "float32")
        return [
            (wide,) if task.key.content == "a-1" else (encoded[0].astype("float64"),)
            for task, encoded in zip(tasks, Encoder()(tasks), strict=True)
        ]

    assert step(batch, extract) == {0: run("b-2", 2, 4)}
    assert type(batch.failed[3]) is FeatureRowsMismatch


def test_features_of_another_length_are_refused() -> None:
    """V20: rows that an encoder delivers are compared with the placeholders of the item."""
    batch = host_batch()
    insert(batch, 3, media=media(("a-1", 2, 4)))
    insert(batch, 0, media=media(("b-2", 2, 4)))

    def extract(tasks: Sequence[EncodeTask]) -> list[tuple[Any, ...]]:
        return [(a[1:] if t.key.content == "a-1" else a,)
                for t, (a,) in zip(tasks, Encoder()(tasks), strict=True)]  # fmt: skip

    assert step(batch, extract) == {0: run("b-2", 2, 4)}
    assert type(batch.failed[3]) is FeatureRowsMismatch


def test_a_grid_that_is_not_its_placeholders_is_refused() -> None:
    """V20: placeholders and grid / merge ** 2 are compared at admission, and so are patches."""
    batch = host_batch()
    wrong = {**image("a-1", 2, 2, 2), "mm_positions": [(2, 5)]}
    with pytest.raises(InvalidItem, match="1x2x2 = 4 but 5 places") as caught:
        insert(batch, 3, media=wrong)
    assert caught.value.req_id == "3"
    with pytest.raises(InvalidItem, match="multiples of merge_size 2"):
        items_of({**image("a-1", 2, 2, 2), "grid_thw": [(1, 4, 5)]})
    with pytest.raises(InvalidItem, match="15 patches; the grids have 16"):
        items_of({**image("a-1", 2, 2, 2), "images": np.zeros((15, 3))})

    assert batch.num_running_requests == 0
    assert recover_batch_index_for_output({"x": []}, batch.index_to_batch_id, True, ["x"]) == {
        "x": []
    }
