"""Faults I1-I27 of FastDeploy's batch: each test fails on what the upstream does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from exposed import to_host
from fault_batches import (
    FORGOTTEN_UPSTREAM,
    NUM_DRAFTS,
    SWAPPED_UPSTREAM,
    AnyBackend,
    CountingBackend,
    decode,
    hosted,
    insert,
    make_batch,
    make_proposer,
    read,
    rows_by_id,
    schedule,
    tagged,
    write,
)

from vlbatch import fields
from vlbatch.batch import ProposerInputBatch, own
from vlbatch.errors import InvalidField, StaleOrder, UnknownRequest
from vlbatch.integrations.fastdeploy import (
    InputBatch,
    recover_batch_index_for_output,
    recover_batch_index_for_sampler_output,
    reorder_split_prefill_and_decode,
)

PER_REQUEST = (*SWAPPED_UPSTREAM, *FORGOTTEN_UPSTREAM, "draft_logits")


def mixed(backend: AnyBackend) -> InputBatch:
    """Requests 3, 1, 7, 0 in rows 0 to 3, of which the next reorder makes 0, 1, 7, 3."""
    batch = make_batch(backend)
    for batch_id in (3, 1, 7, 0):
        insert(batch, batch_id)
    decode(batch, 1, 10)
    decode(batch, 0, 10)
    return batch


# -- moves -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PER_REQUEST)
def test_swap_exchanges_every_field(backend: AnyBackend, name: str) -> None:
    """I1: a swap of a multimodal batch exchanges each field, and a second one undoes it."""
    batch = make_batch(backend)
    for batch_id in (4, 5):
        write(batch, name, insert(batch, batch_id), batch_id)
    batch.swap_states(0, 1)

    assert dict(batch.index_to_batch_id) == {0: 5, 1: 4}
    assert [read(batch, name, row) for row in (0, 1)] == [tagged(batch, name, t) for t in (5, 4)]
    batch.swap_states(1, 0)
    assert [read(batch, name, row) for row in (0, 1)] == [tagged(batch, name, t) for t in (4, 5)]


def test_a_refused_swap_moves_nothing(backend: AnyBackend) -> None:
    """I1: a swap that is refused leaves every field and the map as they were."""
    batch = make_batch(backend)
    insert(batch, 4)
    for name in PER_REQUEST:
        write(batch, name, 0, 9)
    with pytest.raises(UnknownRequest, match="row 1 is not in use"):
        batch.swap_states(0, 1)

    assert dict(batch.index_to_batch_id) == {0: 4}
    assert [read(batch, n, 0) for n in PER_REQUEST] == [tagged(batch, n, 9) for n in PER_REQUEST]


def test_stop_flags_are_swapped_once(backend: AnyBackend) -> None:
    """I2: with drafts too, a live request never gets the flag of a stopped one."""
    batch = make_batch(backend)
    for batch_id, stopped in ((4, False), (5, True)):
        batch["stop_flags"][insert(batch, batch_id)] = stopped
    batch.swap_states(0, 1)

    assert hosted(batch, "stop_flags")[:2, 0].tolist() == [True, False]


@pytest.mark.parametrize("name", FORGOTTEN_UPSTREAM)
def test_state_beside_the_tensors_follows(backend: AnyBackend, name: str) -> None:
    """I3: logits arguments, entropies, reply limits and ids stay with their request."""
    batch = mixed(backend)
    for batch_id, row in rows_by_id(batch).items():
        write(batch, name, row, batch_id)
    reorder_split_prefill_and_decode(batch)
    batch.remove(1)
    batch.condense()

    for batch_id, row in rows_by_id(batch).items():
        assert read(batch, name, row) == tagged(batch, name, batch_id)


def test_side_tables_follow(backend: AnyBackend) -> None:
    """I3: a table that the runner keeps by row is registered once, and gets the same moves."""
    batch = mixed(backend)
    table: list[object] = [f"session of {batch.index_to_batch_id[row]}" for row in range(4)]

    def follow(moves: Any) -> None:
        before = list(table)
        for destination, source in zip(moves.destinations, moves.sources, strict=True):
            table[destination] = before[source]

    batch.core.register_follower(SimpleNamespace(follow=follow))
    reorder_split_prefill_and_decode(batch)

    assert dict(batch.index_to_batch_id) == {0: 0, 1: 1, 2: 7, 3: 3}
    assert table == [f"session of {batch.index_to_batch_id[row]}" for row in range(4)]


def test_offsets_are_rebuilt_and_draft_rows_move_as_groups(backend: AnyBackend) -> None:
    """I4: running sums come from the lengths of the new order; k + 1 logits rows go together."""
    batch = make_batch(backend)
    for batch_id, chunk in ((6, 9), (2, 3)):
        row = insert(batch, batch_id, chunk=chunk)
        for draft in range(NUM_DRAFTS + 1):
            batch["draft_logits"][(NUM_DRAFTS + 1) * row + draft] = 10 * batch_id + draft
    decode(batch, 2, 10, tokens=2)
    reorder_split_prefill_and_decode(batch)

    assert dict(batch.index_to_batch_id) == {0: 2, 1: 6}
    assert hosted(batch, "cu_seqlens_q").tolist() == [0, 2, *[11] * 7]
    for name in ("cu_seqlens_q_output", "cu_batch_token_offset"):
        assert np.ravel(hosted(batch, name)).tolist() == [0, 2, *[3] * 7]  # a prompt has one
    assert hosted(batch, "draft_logits")[:7, 0].tolist() == [20, 21, 22, 60, 61, 62, -1]


# -- rows and ids ----------------------------------------------------------------------------------
def test_a_new_request_gets_a_row_of_its_own(backend: AnyBackend) -> None:
    """I5: with ids 0, 1, 12 in rows 0, 1, 2 request 2 writes nobody else's row."""
    batch = make_batch(backend, 16)
    for batch_id in (0, 1, 12):
        batch["temperature"][insert(batch, batch_id)] = batch_id
    row = insert(batch, 2)
    batch["temperature"][row] = 2

    assert row == batch.get_index_by_batch_id(2) == 3
    assert dict(batch.index_to_batch_id) == {0: 0, 1: 1, 2: 12, 3: 2}
    assert hosted(batch, "temperature")[:4, 0].tolist() == [0, 1, 12, 2]


def test_a_new_request_takes_no_used_row(backend: AnyBackend) -> None:
    """I6: with rows 0 and 2 in use a new request takes the hole, and 5 stays where it is."""
    batch = make_batch(backend)
    for batch_id in (0, 1, 5):
        insert(batch, batch_id)
    batch.remove(1)
    assert dict(batch.index_to_batch_id) == {0: 0, 2: 5}
    row = insert(batch, 2)

    assert row == 1
    assert dict(batch.index_to_batch_id) == {0: 0, 1: 2, 2: 5}


@pytest.mark.parametrize("batch_id", [0, 2, 7])
def test_a_look_up_never_adds(backend: AnyBackend, batch_id: int) -> None:
    """I7: asking for a request that is not there raises, and makes no ghost row."""
    batch = make_batch(backend)
    insert(batch, 5)
    for call in (batch.get_index_by_batch_id, batch.remove, batch.preempt):
        with pytest.raises(UnknownRequest) as caught:
            call(batch_id)
        assert caught.value.req_id == str(batch_id)

    assert dict(batch.index_to_batch_id) == {0: 5}
    assert batch.num_running_requests == 1


@pytest.mark.parametrize("batch_id", [-1, 5.5, "5", None])
def test_what_is_no_id_names_no_request(backend: AnyBackend, batch_id: Any) -> None:
    """I7: a negative, fractional or textual id is refused everywhere, never rounded to another."""
    batch = make_batch(backend)
    insert(batch, 5)
    for call in (batch.get_index_by_batch_id, batch.remove, batch.has):
        with pytest.raises(InvalidField, match="batch_id"):
            call(batch_id)
    with pytest.raises(InvalidField, match="batch_id"):
        batch.add(batch_id, prompt_len=3)

    assert dict(batch.index_to_batch_id) == {0: 5}


def test_condense_looks_at_members_not_at_their_number(backend: AnyBackend) -> None:
    """I8: three requests up to slot 2, in rows 0, 1 and 3: the numbers agree, the rows do not."""
    batch = make_batch(backend)
    for batch_id in (0, 1, 5, 2):
        batch["temperature"][insert(batch, batch_id)] = batch_id
    batch.remove(5)
    rows = dict(batch.index_to_batch_id)
    assert rows == {0: 0, 1: 1, 3: 2}
    assert len(rows) == max(rows.values()) + 1  # where the upstream returns
    batch.condense()

    assert dict(batch.index_to_batch_id) == {0: 0, 1: 1, 2: 2}
    assert hosted(batch, "temperature")[:3, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("ids", [(0, 1, 12), (2,), (12, 3, 7), ()])
def test_condense_takes_any_ids(backend: AnyBackend, ids: tuple[int, ...]) -> None:
    """I9: sparse ids are no rows: condensing gives the requests the first rows, in any case."""
    batch = make_batch(backend, 16)
    insert(batch, 15)
    for batch_id in ids:
        batch["temperature"][insert(batch, batch_id)] = batch_id
    batch.remove(15)
    batch.condense()

    assert sorted(batch.index_to_batch_id) == list(range(len(ids)))
    for batch_id in ids:
        assert hosted(batch, "temperature")[batch.get_index_by_batch_id(batch_id), 0] == batch_id


def test_holes_do_not_run(backend: AnyBackend) -> None:
    """I10: requests 0, 1 and 12 are three running rows, not thirteen."""
    batch = make_batch(backend, 16)
    for batch_id in (0, 1, 12):
        insert(batch, batch_id)
    batch.condense()

    assert batch.num_running_requests == 3
    assert list(batch.running_requests_ids) == [0, 1, 2]
    assert batch["seq_lens_this_time"].shape[0] == 3


def test_deciding_an_order_reads_four_arrays() -> None:
    """I11: a reorder reads each length field once, whole, and looks at no element of any array."""
    reads = []
    for num_reqs in (2, 8):
        arrays = CountingBackend()
        batch = make_batch(arrays)
        for batch_id in range(num_reqs):
            insert(batch, batch_id)
        decode(batch, num_reqs - 1, 10)
        arrays.forget()
        reorder_split_prefill_and_decode(batch)
        assert arrays.looks == []
        reads.append(arrays.num_reads)

    assert reads == [4, 4]


def test_rows_of_a_class_keep_their_places(backend: AnyBackend) -> None:
    """I11: who is in its region already stays, and a second reorder moves nobody."""
    batch = make_batch(backend)
    for batch_id in (1, 2, 3, 4, 5):
        insert(batch, batch_id)
    for batch_id in (1, 2, 5):
        decode(batch, batch_id, 10)
    reorder_split_prefill_and_decode(batch)
    first = dict(batch.index_to_batch_id)
    reorder_split_prefill_and_decode(batch)

    assert first == {0: 1, 1: 2, 2: 5, 3: 4, 4: 3}
    assert dict(batch.index_to_batch_id) == first


def test_only_decodes_count_as_decode(backend: AnyBackend) -> None:
    """I12: a stopped row, a waiting one and a later chunk of a prompt are no decodes."""
    batch = make_batch(backend)
    for batch_id in (1, 2, 3, 4, 5):
        insert(batch, batch_id)
    decode(batch, 1, 10, tokens=0)  # stopped
    schedule(batch, 2, 0, 0)  # waits for blocks
    schedule(batch, 3, 4, 6)  # a later chunk
    decode(batch, 5, 10)
    reorder_split_prefill_and_decode(batch)
    ids = list(batch.index_to_batch_id.values())

    assert ids[0] == 5
    assert sorted(ids[1:3]) == [3, 4]
    assert batch.order.req_ids[0] == "5"
    assert (batch.order.regions.decode, batch.order.num_reqs) == (1, 3)


def test_a_table_is_kept_only_if_wanted(backend: AnyBackend) -> None:
    """I13: the default keeps ``rope_emb`` by row; ``rope_table=False`` keeps and moves none.

    What is then kept of a request's rotary state does not grow with ``max_model_len``.
    """
    sizes = []
    for settings in ({}, {"rope_table": False}):
        for longest in (64, 640):
            batch = make_batch(backend, model={"max_model_len": longest}, **settings)
            row_bytes = {f.name: f.bytes_per_request for f in batch.core.memory_report()}
            sizes.append(row_bytes.get("rope_emb", 0))
    assert sizes == [64 * 64, 640 * 64, 0, 0]  # two float32 tables of head_dim 8

    assert "rope_emb" not in batch
    insert(batch, 4, 6)
    insert(batch, 2, 8, computed=5)
    reorder_split_prefill_and_decode(batch)
    assert batch.positions()[0].tolist() in ([0, 1, 2, 3, 4, 5, 5, 6, 7], [5, 6, 7, *range(6)])
    assert batch.vl.positions.runs_of("4").runs.size < 10


# -- outputs ---------------------------------------------------------------------------------------
def on(backend: AnyBackend, values: object) -> Any:
    """An array of the backend's library with these values."""
    host = np.asarray(values)
    array = backend.allocate(host.size, str(host.dtype))
    stored = backend.view(array, 0, host.shape)
    backend.write(stored, 0, host)
    return backend.expose(stored, str(host.dtype))


def test_outputs_are_by_id_not_by_rank(backend: AnyBackend) -> None:
    """I14: the token of slot 3 is at 3, whatever other ids there are; absent ones hold -1."""
    outputs = SimpleNamespace(sampled_token_ids=on(backend, [[33], [30]]))
    got = recover_batch_index_for_output(outputs, {0: 3, 1: 0}, True, ["sampled_token_ids"])

    assert to_host(got["sampled_token_ids"])[:, 0].tolist() == [30, -1, -1, 33]


def test_lists_are_recovered() -> None:
    """I15: a list is recovered as an array is: [a, b, c, d] of ids 1, 2, 3, 0 is [d, a, b, c]."""
    outputs = {"names": ["a", "b", "c", "d"]}
    got = recover_batch_index_for_output(outputs, {0: 1, 1: 2, 2: 3, 3: 0}, True, ["names"])

    assert got["names"] == ["d", "a", "b", "c"]


class LogprobsTensors(NamedTuple):
    logprob_token_ids: Any
    logprobs: Any
    selected_token_ranks: Any


def sampled(backend: AnyBackend) -> Any:
    """Outputs of rows 0, 1, 2 with 2, 1 and 3 tokens; each value tells row and token."""
    tokens = np.array([0, 1, 10, 20, 21, 22])
    return SimpleNamespace(
        sampled_token_ids=on(backend, [[0], [1], [2]]),
        token_num_per_batch=on(backend, [2, 1, 3]),
        cu_batch_token_offset=on(backend, [0, 2, 3, 6]),
        logits=on(backend, tokens[:, None] + 1000),
        logprobs_tensors=LogprobsTensors(
            on(backend, tokens[:, None]), on(backend, tokens[:, None] / 4), on(backend, tokens)
        ),
        sampling_mask=[f"mask {token}" for token in tokens.tolist()],
    )


IDS = {0: 2, 1: 0, 2: 1}
TOKENS = [10, 20, 21, 22, 0, 1]  # of ids 0, 1, 2


@pytest.fixture
def recovered(backend: AnyBackend) -> Any:
    output = sampled(backend)
    recover_batch_index_for_sampler_output(output, IDS, True)
    return output


def test_ranks_go_with_their_tokens(recovered: Any) -> None:
    """I16: ranks are recovered under the name that consumers read, as the ids beside them."""
    logprobs = recovered.logprobs_tensors

    assert to_host(logprobs.selected_token_ranks).tolist() == TOKENS
    assert to_host(logprobs.logprob_token_ids)[:, 0].tolist() == TOKENS


def test_offsets_of_outputs_are_summed_again(recovered: Any) -> None:
    """I17: the offsets are those of the counts by id, the last entry too."""
    assert to_host(recovered.token_num_per_batch).tolist() == [1, 3, 2]
    assert to_host(recovered.cu_batch_token_offset).tolist() == [0, 1, 4, 6]


def test_outputs_of_several_tokens_move_as_groups(recovered: Any) -> None:
    """I18: logits and logprobs of accepted drafts stay with their request."""
    assert to_host(recovered.logits)[:, 0].tolist() == [1000 + token for token in TOKENS]
    assert to_host(recovered.logprobs_tensors.logprobs)[:, 0].tolist() == [t / 4 for t in TOKENS]


def test_masks_are_recovered(recovered: Any) -> None:
    """I19: the sampling mask of a token is at the place of the token."""
    assert recovered.sampling_mask == [f"mask {token}" for token in TOKENS]


def test_what_is_recovered_together_has_one_order(backend: AnyBackend) -> None:
    """I20: all that a call names comes in the order of ids, lists too; the source stays by row.

    What the caller's list leaves out is not in the result, so it cannot be mixed in unseen.
    """
    outputs = SimpleNamespace(
        sampled_token_ids=on(backend, [[12], [10], [11]]),
        logprobs=on(backend, [[1.2], [1.0], [1.1]]),
        prompt_logprobs_list=["two", "zero", "one"],
        left_out=["two", "zero", "one"],
    )
    names = ["sampled_token_ids", "logprobs", "prompt_logprobs_list"]
    got = recover_batch_index_for_output(outputs, IDS, True, names)

    assert list(got) == names
    assert to_host(got["sampled_token_ids"])[:, 0].tolist() == [10, 11, 12]
    assert to_host(got["logprobs"])[:, 0].tolist() == [1.0, 1.1, 1.2]
    assert got["prompt_logprobs_list"] == ["zero", "one", "two"]
    assert to_host(outputs.sampled_token_ids)[:, 0].tolist() == [12, 10, 11]


def test_outputs_are_mapped_with_the_order_of_their_step(backend: AnyBackend) -> None:
    """I21: the map that a step saved is not changed by what later steps do."""
    batch = mixed(backend)
    reorder_split_prefill_and_decode(batch)
    saved, tokens = batch.index_to_batch_id, [[100 + i] for i in batch.index_to_batch_id.values()]
    expected = dict(saved)
    outputs = {"sampled_token_ids": on(backend, tokens)}
    batch.remove(1)
    insert(batch, 2)
    batch.condense()
    batch.swap_states(0, 1)
    now = dict(batch.index_to_batch_id)
    got = recover_batch_index_for_output(outputs, saved, True, ["sampled_token_ids"])

    assert dict(saved) == expected != now
    by_id = to_host(got["sampled_token_ids"])[:, 0].tolist()
    assert by_id == [100, 101, -1, 103, -1, -1, -1, 107]


def test_buffers_that_moved_are_not_read_as_an_earlier_step(backend: AnyBackend) -> None:
    """I22: outputs left in the batch move with its rows: another step's map is refused with them.

    What a step recovered is a copy, which later moves do not touch.
    """
    batch = mixed(backend)
    batch.condense()
    saved = batch.index_to_batch_id
    for row, batch_id in saved.items():
        batch["sampled_token_ids"][row] = 100 + batch_id
        batch["accept_tokens_cpu"][row] = 200 + batch_id
    names = ["sampled_token_ids", "accept_tokens_cpu"]
    got = recover_batch_index_for_output(batch, saved, True, names)
    reorder_split_prefill_and_decode(batch)
    with pytest.raises(StaleOrder, match="before the next step"):
        recover_batch_index_for_output(batch, saved, True, names)

    for base, name in ((100, "sampled_token_ids"), (200, "accept_tokens_cpu")):
        by_id = to_host(got[name])[:, 0].tolist()
        assert by_id == [base, base + 1, -1, base + 3, -1, -1, -1, base + 7]


def test_buffers_are_not_read_as_those_of_an_earlier_request(backend: AnyBackend) -> None:
    """I22: nor with the map of a step before a request of the same id took the row."""
    batch = mixed(backend)
    batch.condense()
    saved = batch.index_to_batch_id
    row = batch.get_index_by_batch_id(7)
    batch["sampled_token_ids"][row] = 107
    batch.remove(7)
    assert insert(batch, 7) == row
    assert dict(batch.index_to_batch_id) == dict(saved)
    with pytest.raises(StaleOrder, match="before the next step"):
        recover_batch_index_for_output(batch, saved, True, ["sampled_token_ids"])


def test_an_unknown_type_of_output_is_an_error() -> None:
    """I23: what cannot be recovered raises at once, and so does a missing name."""
    for output in (7, "abc", {1, 2, 3}, np.array(7)):
        with pytest.raises(InvalidField):
            recover_batch_index_for_output({"x": output}, IDS, True, ["x"])
    with pytest.raises(InvalidField, match="'y'"):
        recover_batch_index_for_output({"x": [1, 2, 3]}, IDS, True, ["y"])
    with pytest.raises(StaleOrder):
        recover_batch_index_for_output({"x": [1, 2]}, IDS, True, ["x"])


@pytest.mark.parametrize("enable_pd_reorder", [False, True])
def test_ids_in_order_are_not_rows(backend: AnyBackend, enable_pd_reorder: bool) -> None:
    """I24: rows in order of sparse ids are brought to their ids too, reorder or not."""
    outputs = {"x": on(backend, [10, 15])}
    got = recover_batch_index_for_output(outputs, {0: 0, 1: 5}, enable_pd_reorder, ["x"])

    assert to_host(got["x"]).tolist() == [10, -1, -1, -1, -1, 15]


# -- buffers ---------------------------------------------------------------------------------------
def test_the_view_of_lengths_is_never_the_buffer(backend: AnyBackend) -> None:
    """I25: assigning the view of the running rows changes no extent, for the proposer neither."""
    batch = make_batch(backend)
    insert(batch, 3, chunk=4)
    old = batch["seq_lens_this_time"]
    batch["seq_lens_this_time"] = batch["seq_lens_this_time_buffer"][:1]
    proposer = make_proposer(batch)
    insert(batch, 5, chunk=6)
    batch.condense()

    for part in (batch, proposer):
        assert part["seq_lens_this_time_buffer"].shape[0] == 8
        assert part["seq_lens_this_time"].shape[0] == 2
    assert to_host(old).tolist() == [4]
    assert to_host(batch["seq_lens_this_time"]).tolist() == [4, 6]
    old[0] = 3
    assert hosted(batch, "seq_lens_this_time_buffer").tolist() == [3, 6, 0, 0, 0, 0, 0, 0]


def test_end_tokens_of_requests_do_not_meet(backend: AnyBackend) -> None:
    """I26: ``eos_token_id`` is of the batch; end tokens by request follow in a field of one's own.

    The library itself never rewrites the model's end tokens.
    """
    batch = make_batch(backend, model={"eos_tokens_lens": 2})
    eos = ProposerInputBatch(
        batch.core, [own(fields.row("eos_by_request", (2,), default=-1))], backend=backend
    )
    batch["eos_token_id"] = [[7], [8]]
    for batch_id in (3, 1):
        eos["eos_by_request"][insert(batch, batch_id)] = batch_id
    decode(batch, 1, 10)
    reorder_split_prefill_and_decode(batch)

    assert to_host(eos["eos_by_request"])[:3].tolist() == [[1, 1], [3, 3], [-1, -1]]
    batch.remove(3)
    assert to_host(eos["eos_by_request"])[:3].tolist() == [[1, 1], [-1, -1], [-1, -1]]
    assert hosted(batch, "eos_token_id").tolist() == [[7], [8]]


@pytest.mark.parametrize("name", ["step_block_list", "recover_block_list", "need_block_list"])
def test_lists_of_rows_name_the_same_requests(backend: AnyBackend, name: str) -> None:
    """I27: what a list of rows says after moves is about the requests of before; gone ones: -1."""
    batch = mixed(backend)  # rows: 3, 1, 7, 0
    batch[name][0], batch[name][1], batch[name][2] = 2, 0, 1
    batch.swap_states(0, 3)
    reorder_split_prefill_and_decode(batch)
    batch.remove(1)
    batch.condense()
    rows = rows_by_id(batch)

    assert hosted(batch, name).tolist() == [rows[7], rows[3], *[-1] * 6]
