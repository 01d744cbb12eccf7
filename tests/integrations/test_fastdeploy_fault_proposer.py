"""Faults M1-M10 of FastDeploy's draft batch: each test fails on what the upstream does."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from exposed import address_of
from fault_batches import (
    AnyBackend,
    CountingBackend,
    Encoder,
    decode,
    hosted,
    insert,
    make_batch,
    make_proposer,
    media,
    read,
    rows_by_id,
    schedule,
    tagged,
    write,
)

from vlbatch.errors import StaleOrder
from vlbatch.integrations import fastdeploy
from vlbatch.integrations.fastdeploy import (
    InputBatch,
    ProposerInputBatch,
    process_reorder,
    recover_batch_index_for_output,
    recover_batch_index_for_sampler_output,
    reorder_split_prefill_and_decode,
    reorder_split_prefill_and_decode_form_index_to_batch_id,
)

FORGOTTEN_UPSTREAM = (
    "stop_flags", "is_block_step", "batch_drop", "draft_tokens", "last_seq_lens_this_time",
    "used_list_len", "first_token_hidden_states", "decode_states", "token_ids_all",
    "fake_prompt_lens", "batch_token_num", "next_token_num",
)  # fmt: skip


class AttentionBackend:
    enable_ids_reorder = True


def ring(backend: AnyBackend) -> tuple[InputBatch, ProposerInputBatch]:
    """Requests 4, 5, 6 in rows 0, 1, 2, of which the next reorder makes 5, 6, 4."""
    batch = make_batch(backend)
    proposer = make_proposer(batch)
    for batch_id in (4, 5, 6):
        insert(batch, batch_id)
    schedule(batch, 4, 0, 0)
    decode(batch, 5, 10)
    schedule(batch, 6, 3, 7)
    return batch, proposer


def test_a_ring_of_three_rows(backend: AnyBackend) -> None:
    """M1: three rows that change places in a ring end as in the target, however often told."""
    batch, proposer = ring(backend)
    for batch_id, row in rows_by_id(batch).items():
        write(proposer, "pre_ids", row, batch_id)
    reorder_split_prefill_and_decode(batch)
    for _ in range(3):
        reorder_split_prefill_and_decode_form_index_to_batch_id(proposer, batch)
        process_reorder(batch, [AttentionBackend], proposer)

    assert dict(batch.index_to_batch_id) == {0: 5, 1: 6, 2: 4}
    assert dict(proposer.index_to_batch_id) == {0: 5, 1: 6, 2: 4}
    assert [read(proposer, "pre_ids", row) for row in range(4)] == [5, 6, 4, -1]


def test_a_proposer_of_a_batch_that_runs(backend: AnyBackend) -> None:
    """M2: made late, it has each row of the target; who left is cleared, not just unnamed."""
    batch = make_batch(backend)
    for batch_id in (4, 7, 2):
        insert(batch, batch_id)
    batch.remove(7)
    proposer = make_proposer(batch)
    for row in (0, 2):
        write(proposer, "draft_tokens", row, 40 + row)
    process_reorder(batch, [AttentionBackend], proposer)
    batch.remove(4)
    insert(batch, 3)

    assert rows_by_id(proposer) == rows_by_id(batch) == {3: 0, 2: 1}
    assert [read(proposer, "draft_tokens", row) for row in range(3)] == [-1, 42, -1]
    proposer.check()


def test_sampler_outputs_need_no_switch() -> None:
    """M3: the draft's sampler output is recovered without the enable argument, and with it."""
    for arguments in ((), (True,), (False,)):
        output = SimpleNamespace(sampled_token_ids=np.array([31, 30]))
        recover_batch_index_for_sampler_output(output, {0: 1, 1: 0}, *arguments)

        assert output.sampled_token_ids.tolist() == [30, 31]


def test_the_switch_is_the_targets(backend: AnyBackend) -> None:
    """M4: made before the first reorder, the proposer knows of it; first tokens are recovered."""
    batch, proposer = ring(backend)
    before = proposer.enable_pd_reorder
    process_reorder(batch, [AttentionBackend], proposer)
    first = [[100 + batch_id] for batch_id in proposer.index_to_batch_id.values()]
    got = recover_batch_index_for_output(
        {"tokens": np.array(first)},
        proposer.index_to_batch_id,
        proposer.enable_pd_reorder,
        ["tokens"],
    )

    assert (before, proposer.enable_pd_reorder) == (False, True)
    assert np.asarray(got["tokens"])[4:, 0].tolist() == [104, 105, 106]


@pytest.mark.parametrize("name", FORGOTTEN_UPSTREAM)
def test_every_field_of_the_draft_follows(backend: AnyBackend, name: str) -> None:
    """M5: no field of the draft model stays behind, in a swap or in a reorder."""
    batch, proposer = ring(backend)
    for batch_id, row in rows_by_id(batch).items():
        write(proposer, name, row, batch_id)
    batch.swap_states(0, 2)
    reorder_split_prefill_and_decode(batch)

    assert list(batch.index_to_batch_id.values()) != [4, 5, 6]
    for batch_id, row in rows_by_id(batch).items():
        assert read(proposer, name, row) == tagged(proposer, name, batch_id)


def test_an_insert_moves_nobody(backend: AnyBackend) -> None:
    """M6: after a reorder a new request changes neither the map nor the rows of the others."""
    batch, proposer = ring(backend)
    for batch_id, row in rows_by_id(batch).items():
        write(proposer, "draft_tokens", row, batch_id)
    reorder_split_prefill_and_decode(batch)
    before = dict(proposer.index_to_batch_id)
    write(proposer, "draft_tokens", insert(batch, 1), 1)

    assert dict(proposer.index_to_batch_id) == {**before, 3: 1}
    assert [read(proposer, "draft_tokens", row) for row in range(4)] == [5, 6, 4, 1]


def test_the_draft_has_the_targets_rotary_state(backend: AnyBackend) -> None:
    """M7: the draft of a multimodal target reads its request's rope rows, not a text table."""
    batch = make_batch(backend)
    proposer = make_proposer(batch)
    for batch_id in (4, 5):
        row = insert(batch, batch_id, 10, media=media(("a-1", 2, 4)))
        batch["rope_emb"][row] = batch_id
    batch.swap_states(0, 1)

    assert address_of(proposer["rope_emb"]) == address_of(batch["rope_emb"])
    assert [read(proposer, "rope_emb", row) for row in (0, 1)] == [5, 4]


def test_positions_of_a_draft_are_multimodal(backend: AnyBackend) -> None:
    """M7: without a table too, the draft's tokens behind an image go on where it ends."""
    batch = make_batch(backend, rope_table=False)
    proposer = make_proposer(batch)
    insert(batch, 4, 10, media=media(("a-1", 2, 4)))  # one row of four: 2..5 on one axis
    batch.process_mm_features(Encoder())
    batch.condense()
    assert proposer.positions()[:, -4:].tolist() == [[6, 7, 8, 9]] * 3
    assert proposer.positions()[0, 2:6].tolist() == [2, 2, 2, 2]
    decode(batch, 4, 10, tokens=3)
    batch.condense()

    assert proposer.positions().tolist() == [[10, 11, 12]] * 3


def test_batches_share_nothing(backend: AnyBackend) -> None:
    """M8: two pairs of target and draft have neither rows nor arrays in common.

    No function has a default that calls could share; KV caches are what the runner assigns.
    """
    pairs = [(batch, make_proposer(batch)) for batch in (make_batch(backend), make_batch(backend))]
    (batch, proposer), (other, other_proposer) = pairs
    write(proposer, "draft_tokens", insert(batch, 3), 3)
    batch["caches"] = ["kv"]
    proposer["caches"] = ["kv of the draft"]

    assert dict(other.index_to_batch_id) == dict(other_proposer.index_to_batch_id) == {}
    assert (hosted(other_proposer, "draft_tokens") == -1).all()
    assert other["caches"] is other_proposer["caches"] is None
    assert batch["caches"] == ["kv"]
    with pytest.raises(StaleOrder, match="another target"):
        proposer.reorder_inputs(other)

    ours = [getattr(fastdeploy, name) for name in fastdeploy.__all__]
    calls = [each for each in ours if inspect.isfunction(each)]
    calls += [
        each
        for cls in ours
        if inspect.isclass(cls)
        for each in vars(cls).values()
        if inspect.isfunction(each)
    ]
    defaults = [p.default for call in calls for p in inspect.signature(call).parameters.values()]
    assert len(calls) > 40
    assert not [each for each in defaults if isinstance(each, dict | list | set)]


def test_tokens_and_globals_are_no_rows(backend: AnyBackend) -> None:
    """M9: hidden states, one a token, and flags of the batch stay where they are."""
    batch, proposer = ring(backend)
    hidden = np.arange(32, dtype=np.float32).reshape(8, 4)
    proposer["target_hidden_states"][:8] = array_like(proposer, "target_hidden_states", hidden)
    before = hosted(proposer, "target_hidden_states")
    proposer["not_need_stop"] = True
    batch.swap_states(0, 2)
    reorder_split_prefill_and_decode(batch)

    assert before[1].any()
    np.testing.assert_array_equal(hosted(proposer, "target_hidden_states"), before)
    assert hosted(proposer, "not_need_stop").tolist() == [True]


def array_like(proposer: ProposerInputBatch, name: str, values: Any) -> Any:
    """Host values as an array of the field's library and dtype."""
    field = proposer[name]
    if isinstance(field, np.ndarray):
        return values.astype(field.dtype)
    if type(field).__module__.startswith("torch"):
        import torch

        return torch.tensor(values, dtype=field.dtype)
    import paddle

    return paddle.to_tensor(values).astype(field.dtype)


def test_a_new_row_is_filled_without_a_look_at_an_array() -> None:
    """M10: a new request's fields of the draft cost no read, whoever is there; ``pre_ids`` is -1.

    Outputs that a request has already (it was resumed, or is older than the proposer) are the
    runner's to write.
    """
    arrays = CountingBackend()
    batch = make_batch(arrays)
    proposer = make_proposer(batch)
    for batch_id in range(3):
        batch.add(batch_id, prompt_len=9)
    arrays.forget()
    batch.add(7, prompt_len=9)

    assert (arrays.num_reads, arrays.looks) == (0, [])
    assert hosted(proposer, "pre_ids")[3].tolist() == [-1] * 64
    late = make_proposer(batch)
    assert (hosted(late, "pre_ids") == -1).all()
