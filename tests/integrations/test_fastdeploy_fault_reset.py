"""Faults R1-R9 of FastDeploy's reset and names: each test fails on what the upstream does."""

from __future__ import annotations

import numpy as np
import pytest
from exposed import address_of, to_host
from fault_batches import (
    AnyBackend,
    Encoder,
    decode,
    hosted,
    insert,
    make_batch,
    make_proposer,
    media,
    read,
    rows_by_id,
    run,
    schedule,
    write,
)

from vlbatch.errors import DuplicateRequest, InvalidField, StaleOrder, UnknownField, UnknownRequest
from vlbatch.integrations.fastdeploy import (
    InputBatch,
    ProposerInputBatch,
    process_reorder,
    reorder_split_prefill_and_decode,
)

REALLOCATED = (
    "rope_emb", "free_list", "free_list_len", "reasoning_allowed_tokens", "sampled_token_ids",
    "seq_lens_this_time_cpu", "accept_tokens_cpu", "accept_num_cpu",
)  # fmt: skip
MISSED = (
    "max_reply_lens", "generated_modality", "seq_lens_this_time_cpu", "is_block_step_cpu",
    "last_preempted_idx", "seq_lens_kv", "cu_seqlens_q_output", "batch_id_per_token_output",
    "not_need_stop",
)  # fmt: skip


def names(part: InputBatch | ProposerInputBatch) -> list[str]:
    """Every declared field."""
    return [name for each in part._parts for name in each.registry]


def state(part: InputBatch | ProposerInputBatch) -> dict[str, object]:
    """Every declared field as plain data."""
    return {
        name: part[name] if isinstance(part[name], list) else to_host(part[name]).tolist()
        for name in names(part)
    }


def dirty(part: InputBatch | ProposerInputBatch) -> None:
    """Write something else into every array, all rows of it."""
    for name in names(part):
        array = part[name]
        for row in range(len(array)):
            array[row] = f"dirt {row}" if isinstance(array, list) else 1


def used(backend: AnyBackend) -> tuple[InputBatch, ProposerInputBatch]:
    """A target and its proposer with two requests, an image, a step and dirt everywhere."""
    batch = make_batch(backend)
    proposer = make_proposer(batch)
    insert(batch, 3, media=media(("a-1", 2, 4)))
    insert(batch, 1)
    decode(batch, 1, 10)
    batch.process_mm_features(Encoder())
    process_reorder(batch, (), proposer)
    dirty(batch)
    dirty(proposer)
    return batch, proposer


@pytest.mark.parametrize("name", REALLOCATED)
def test_reset_keeps_every_address(backend: AnyBackend, name: str) -> None:
    """R1: what a captured graph or an alias holds is what the batch writes after a reset too."""
    batch, proposer = used(backend)
    old = batch[name]
    addresses = [part.addresses() for each in (batch, proposer) for part in each._parts]
    batch.reset_share_inputs()
    proposer.reset_share_inputs()
    insert(batch, 2)
    write(batch, name, 0, 5)

    assert [p.addresses() for each in (batch, proposer) for p in each._parts] == addresses
    assert address_of(batch[name]) == address_of(old)
    np.testing.assert_array_equal(to_host(old), hosted(batch, name))


def test_a_kept_buffer_is_not_replaced_by_chance(backend: AnyBackend) -> None:
    """R1: an attention buffer stays through a reset; another needs an explicit ``pop``."""
    batch = make_batch(backend)
    buffer = np.zeros(4)
    batch["decoder_batch_ids"] = buffer
    batch.reset_share_inputs()

    assert batch["decoder_batch_ids"] is buffer
    with pytest.raises(InvalidField, match="pop it first"):
        batch["decoder_batch_ids"] = np.zeros(4)


@pytest.mark.parametrize("name", MISSED)
def test_reset_misses_no_field(backend: AnyBackend, name: str) -> None:
    """R2: a reset field holds what a fresh batch holds."""
    batch, _ = used(backend)
    batch.reset_share_inputs()

    np.testing.assert_array_equal(hosted(batch, name), hosted(make_batch(backend), name))


def test_reset_leaves_no_request(backend: AnyBackend) -> None:
    """R2: map, counts and ids of running rows are empty after a reset."""
    batch, proposer = used(backend)
    batch.reset_share_inputs()

    for part in (batch, proposer):
        assert dict(part.index_to_batch_id) == {}
        assert part.num_running_requests == len(part.running_requests_ids) == 0
        assert not part.enable_pd_reorder


def test_init_and_reset_agree(backend: AnyBackend) -> None:
    """R3: drafts and every other field are after a reset as they were at the start."""
    batch, proposer = used(backend)
    batch.reset_share_inputs()
    proposer.reset_share_inputs()
    fresh = make_batch(backend)

    assert state(batch) == state(fresh)
    assert state(proposer) == state(make_proposer(fresh))
    for name in ("draft_tokens", "step_draft_tokens"):
        assert (hosted(batch, name) == -1).all()


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("no_such_field", 0, UnknownField),
        ("temperature", "warm", InvalidField),
        ("top_k", [[1], [2]], InvalidField),
        ("req_ids", "one", InvalidField),
        ("index_to_batch_id", {}, InvalidField),
    ],
)
def test_nothing_is_filled_in_part(
    backend: AnyBackend, name: str, value: object, error: type[Exception]
) -> None:
    """R4: an unknown name or a wrong value is an error, and no other value of the call is kept."""
    batch = make_batch(backend)
    insert(batch, 3)
    before = state(batch)
    with pytest.raises(error, match=name):
        batch.update({"top_p": 0.25, name: value, "min_p": 0.5})
    with pytest.raises(error, match=name):
        batch[name] = value

    assert state(batch) == before


@pytest.mark.parametrize("name", ["image_grid_thws", "video_grid_thws", "video_infinity_scales"])
def test_media_fields_are_reset(backend: AnyBackend, name: str) -> None:
    """R5: fields that a model adds for media are reset as the others, and features are gone."""
    batch, _ = used(backend)
    batch[name][0] = ["old"]
    batch.reset_share_inputs()
    assert batch[name] == make_batch(backend)[name]
    insert(batch, 2)
    reorder_split_prefill_and_decode(batch)

    assert batch[name][0] == []
    assert batch.image_features is None
    assert batch.image_features_list == [-1] * 8


def test_a_proposer_is_not_reset_before_its_target(backend: AnyBackend) -> None:
    """R6: a proposer takes no stale values of its target: the other order is refused."""
    batch, proposer = used(backend)
    before = state(proposer)
    with pytest.raises(StaleOrder, match="reset it first"):
        proposer.reset_share_inputs()
    assert state(proposer) == before
    batch.reset_share_inputs()
    proposer.reset_share_inputs()
    insert(batch, 2, 6)

    assert read(proposer, "seq_lens_decoder", 0) == 0
    assert hosted(proposer, "prompt_lens")[:2, 0].tolist() == [6, 0]
    proposer.check()


@pytest.mark.parametrize("order", ["proposer, target", "target, proposer", "target"])
def test_an_idle_pair_is_reset_in_any_order(backend: AnyBackend, order: str) -> None:
    """R6: without requests the upstream's order, too, ends with both as they were at the start."""
    batch, proposer = used(backend)
    for batch_id in (3, 1):
        batch.remove(batch_id)
    dirty(batch)
    dirty(proposer)
    for name in order.split(", "):
        {"target": batch, "proposer": proposer}[name].reset_share_inputs()
    fresh = make_batch(backend)

    assert state(batch) == state(fresh)
    assert state(proposer) == state(make_proposer(fresh))
    proposer.check()


def test_reset_drops_requests_with_all_they_hold(backend: AnyBackend) -> None:
    """R7: no row, map entry, feature or reference of a request is left; ids can come again."""
    batch, _ = used(backend)
    cache = batch.vl.features.cache
    assert any(cache.references(key) for key in cache.present())
    batch.reset_share_inputs()

    assert not any(cache.references(key) for key in cache.present())
    assert not batch.has(3)
    assert batch.vl.features.req_ids == batch.vl.positions.req_ids == ()
    insert(batch, 3)
    batch.check()


def test_names_are_fields_or_errors(backend: AnyBackend) -> None:
    """R8: unknown names raise, methods and absent buffers are not ``in``, ``pop`` has a default."""
    batch = make_batch(backend)
    with pytest.raises(UnknownField, match="no 'temprature' here"):
        batch["temprature"] = 1
    with pytest.raises(UnknownField):
        batch["temprature"]
    with pytest.raises(AttributeError, match="no 'temprature' here"):
        _ = batch.temprature

    assert "temperature" in batch
    assert not any(name in batch for name in ("swap_states", "decoder_batch_ids", "temprature"))
    assert batch["decoder_batch_ids"] is None
    assert batch.pop("decoder_batch_ids", None) is None
    with pytest.raises(UnknownField):
        batch.pop("decoder_batch_ids")


def test_an_aborted_request_is_not_a_preempted_one(backend: AnyBackend) -> None:
    """R9: preempted comes back with its fields, aborted is gone, and neither is taken twice."""
    batch = make_batch(backend)
    for batch_id in (1, 2):
        write(batch, "top_k", insert(batch, batch_id), 10 + batch_id)
    batch.preempt(1)
    batch.remove(2)

    assert not batch.has(1)
    with pytest.raises(DuplicateRequest):
        insert(batch, 1)
    with pytest.raises(UnknownRequest):
        batch.resume(2)
    assert read(batch, "top_k", batch.resume(1)) == 11
    assert read(batch, "top_k", insert(batch, 2)) == 0
    with pytest.raises(UnknownRequest):
        batch.resume(1)


def test_an_extended_request_keeps_its_row(backend: AnyBackend) -> None:
    """R9: a request that goes on with its prompt is none that lost its row."""
    batch = make_batch(backend)
    insert(batch, 1, 20, 5, media=media(("a-1", 3, 4)))
    write(batch, "top_k", 0, 11)
    batch.process_mm_features(Encoder())
    batch.condense()
    schedule(batch, 1, 5, 15)
    batch.process_mm_features(Encoder())
    batch.condense()

    assert rows_by_id(batch) == {1: 0}
    assert read(batch, "top_k", 0) == 11
    assert np.asarray(batch.image_features)[:, 0].tolist() == [v for _, v in run("a-1", 5, 2, 2)]
