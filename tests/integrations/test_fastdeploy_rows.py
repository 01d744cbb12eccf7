"""Requests and rows by FastDeploy's calls, in the order in which its runner makes them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from exposed import to_host
from fault_batches import (
    decode,
    hosted,
    insert,
    make_batch,
    make_config,
    make_proposer,
    rows_by_id,
)

from vlbatch import NumpyBackend
from vlbatch.errors import (
    BatchFull,
    DuplicateRequest,
    InvalidSchedule,
    InvalidSetting,
    PromptTooLong,
    StaleOrder,
    UnknownRequest,
)
from vlbatch.integrations.fastdeploy import (
    InputBatch,
    ProposerInputBatch,
    ids_reorder_enabled,
    process_reorder,
    reorder_split_prefill_and_decode,
    reorder_split_prefill_and_decode_form_index_to_batch_id,
)


class Reordering:
    """An attention backend that wants decodes first."""

    enable_ids_reorder = True


class Plain:
    """An attention backend that says nothing."""


class Refusing:
    """An attention backend that wants no other order."""

    enable_ids_reorder = False


def filled(backend: Any, *ids: int) -> tuple[InputBatch, ProposerInputBatch]:
    """Requests of 10 tokens to prefill, each with its id as temperature and as first draft."""
    batch = make_batch(backend)
    proposer = make_proposer(batch)
    for batch_id in ids:
        row = insert(batch, batch_id)
        batch["temperature"][row] = batch_id
        proposer["draft_tokens"][row, 0] = batch_id
        batch["req_ids"][row] = f"r{batch_id}"
    return batch, proposer


def assert_rows(batch: InputBatch, proposer: ProposerInputBatch, *ids: int) -> None:
    """Rows are those of ``ids``, in every table."""
    num = len(ids)
    assert list(batch.index_to_batch_id.items()) == list(enumerate(ids))
    assert hosted(batch, "temperature")[:num, 0].tolist() == list(ids)
    assert hosted(proposer, "draft_tokens")[:num, 0].tolist() == list(ids)
    assert batch["req_ids"][:num] == [f"r{batch_id}" for batch_id in ids]
    assert (hosted(proposer, "draft_tokens")[num:] == -1).all()
    batch.check()
    proposer.check()


def test_add_and_look_up() -> None:
    """``add`` gives the next row; a look-up finds it, adds nothing, and names who is unknown."""
    batch = make_batch(NumpyBackend())
    assert [batch.add(batch_id, prompt_len=6, computed=2) for batch_id in (9, 0, 4)] == [0, 1, 2]
    assert [batch.get_index_by_batch_id(batch_id) for batch_id in (4, 9, 0)] == [2, 0, 1]
    assert hosted(batch, "prompt_lens")[:3, 0].tolist() == [6, 6, 6]
    assert hosted(batch, "seq_lens_decoder")[:3].tolist() == [2, 2, 2]
    with pytest.raises(UnknownRequest, match="request '5'"):
        batch.get_index_by_batch_id(5)
    assert (batch.has(4), batch.has(5)) == (True, False)
    assert batch.num_running_requests == 3


def test_refused_add() -> None:
    """A request that does not fit is refused, and nothing has changed."""
    batch = make_batch(NumpyBackend(), 1)
    with pytest.raises(PromptTooLong):
        batch.add(1, prompt_len=65)
    batch.add(1, prompt_len=5)
    with pytest.raises(DuplicateRequest):
        batch.add(1, prompt_len=5)
    with pytest.raises(BatchFull):
        batch.add(2, prompt_len=5)
    assert dict(batch.index_to_batch_id) == {0: 1}


def test_fields_are_allocated_once() -> None:
    """A second allocation would leave followers and graphs with the old arrays: it is refused."""
    batch, _ = filled(NumpyBackend(), 3)
    with pytest.raises(StaleOrder, match=r"use reset_share_inputs\(\)"):
        batch.init_share_inputs()
    assert batch.has(3)


def test_fields_of_a_proposer_are_allocated_once() -> None:
    """The proposer too: a second set would be filled beside the first."""
    batch, proposer = filled(NumpyBackend(), 3)
    drafts = proposer["draft_tokens"]
    with pytest.raises(StaleOrder, match=r"use reset_share_inputs\(\)"):
        proposer.init_share_inputs()
    assert proposer["draft_tokens"] is drafts
    batch.check()


def test_a_proposer_needs_drafts() -> None:
    """Without a speculative method there is nothing to propose, and the setting is named."""
    config = make_config()
    config.speculative_config.method = None
    batch = InputBatch(config, backend="numpy")
    batch.init_share_inputs()
    with pytest.raises(InvalidSetting, match=r"speculative_config\.method"):
        ProposerInputBatch(config, batch).init_share_inputs()


def test_swap_states(backend: Any) -> None:
    """A swap exchanges two rows in the batch, its map and the proposer; the step is over."""
    batch, proposer = filled(backend, 3, 1, 7)
    batch.condense()
    batch.swap_states(0, 2)
    assert_rows(batch, proposer, 7, 1, 3)
    with pytest.raises(StaleOrder, match="condense or reorder first"):
        batch.image_features  # noqa: B018 (reading is the test)
    with pytest.raises(StaleOrder, match="are the target's"):
        proposer.swap_states(0, 1)
    assert_rows(batch, proposer, 7, 1, 3)


def test_condense(backend: Any) -> None:
    """Holes are closed; the others stay in order of arrival."""
    batch, proposer = filled(backend, 3, 1, 7, 5)
    batch.remove(1)
    assert dict(batch.index_to_batch_id) == {0: 3, 2: 7, 3: 5}
    assert (batch.num_running_requests, batch.running_requests_ids) == (4, range(4))
    batch.condense()
    assert_rows(batch, proposer, 3, 7, 5)
    assert batch.num_running_requests == 3


def test_reorder(backend: Any) -> None:
    """Decodes come before prefills, rows without tokens last; one call does it all."""
    batch, proposer = filled(backend, 3, 1, 7, 5, 2)
    decode(batch, 7, 10)
    decode(batch, 2, 12, tokens=3)
    decode(batch, 3, 4, tokens=0)  # waits in its prompt
    batch.remove(1)
    reorder_split_prefill_and_decode(batch)

    assert_rows(batch, proposer, 7, 2, 5, 3)
    assert hosted(batch, "cu_seqlens_q")[:5].tolist() == [0, 1, 4, 14, 14]
    assert hosted(batch, "cu_seqlens_k")[:5].tolist() == [0, 11, 26, 36, 36]
    assert hosted(batch, "cu_seqlens_q_output")[:5, 0].tolist() == [0, 1, 4, 5, 5]
    assert hosted(batch, "cu_batch_token_offset")[:5].tolist() == [0, 1, 4, 5, 5]
    rows = hosted(batch, "batch_id_per_token")[:15, 0].tolist()
    assert rows == [0] + [1] * 3 + [2] * 10 + [-1]
    assert hosted(batch, "seq_lens_this_time").tolist() == [1, 3, 10, 0]
    assert batch.order.req_ids == ("7", "2", "5")


def test_condense_then_reorder(backend: Any) -> None:
    """The upstream's two calls, one after the other, end as the one call does."""
    batch, proposer = filled(backend, 3, 1, 7, 5, 2)
    for batch_id in (7, 2):
        decode(batch, batch_id, 10)
    batch.remove(1)
    batch.condense()
    reorder_split_prefill_and_decode(batch)
    reorder_split_prefill_and_decode_form_index_to_batch_id(proposer, batch.index_to_batch_id)
    proposer.reorder_inputs(batch)
    proposer.reorder_inputs(dict(batch.index_to_batch_id))
    assert {*list(batch.index_to_batch_id.values())[:2]} == {7, 2}
    assert_rows(batch, proposer, *batch.index_to_batch_id.values())
    for other in (make_batch(NumpyBackend()), {0: 3, 1: 7}):
        with pytest.raises(StaleOrder, match="another target"):
            proposer.reorder_inputs(other)


def test_a_chunk_is_no_decode(backend: Any) -> None:
    """A continued chunk, a prefix hit and a tail of one token are prefills (computed < prompt)."""
    batch, _ = filled(backend)
    insert(batch, 0, 10, 1, computed=9)
    insert(batch, 1, 10, 4, computed=4)
    insert(batch, 2, 10)
    decode(batch, 2, 10)
    reorder_split_prefill_and_decode(batch)
    assert batch.get_index_by_batch_id(2) == 0
    assert batch.order.regions.decode == 1


@pytest.mark.parametrize(
    ("backends", "wanted"),
    [
        ([], False),
        ([Plain()], False),
        ([Reordering()], True),
        ([Reordering], True),
        ([Plain(), Reordering()], False),
        ([Refusing, Reordering], False),
        ([Reordering, Refusing], True),
    ],
)
def test_the_first_attention_backend_decides(backends: list[object], wanted: bool) -> None:
    """``enable_ids_reorder`` is read from the first one, a class or an object; default off."""
    assert ids_reorder_enabled(backends) is wanted
    batch, proposer = filled(NumpyBackend(), 3, 1, 7)
    decode(batch, 7, 10)
    process_reorder(batch, backends, proposer)
    assert batch.enable_pd_reorder is wanted
    assert proposer.enable_pd_reorder is wanted
    assert_rows(batch, proposer, *((7, 1, 3) if wanted else (3, 1, 7)))


def test_off_is_the_order_of_arrival(backend: Any) -> None:
    """Without the switch only holes are closed; everything a request has is the same."""
    values = {}
    for backends in ([], [Reordering]):
        batch, proposer = filled(backend, 6, 2, 4, 0)
        batch.remove(2)
        decode(batch, 0, 10)
        process_reorder(batch, backends, proposer)
        row_of = rows_by_id(batch)
        values[len(backends)] = {
            (batch_id, name): np.array(hosted(each, name)[row]).tolist()
            for each in (batch, proposer)
            for name in ("temperature", "seq_lens_this_time_buffer", "draft_tokens", "prompt_lens")
            for batch_id, row in row_of.items()
        }
        assert list(row_of) == ([0, 6, 4] if backends else [6, 4, 0])
    assert values[0] == values[1]


def test_the_flag_alone_is_enough() -> None:
    """A runner that sets ``enable_pd_reorder`` itself gets the reorder; a reset takes it back."""
    batch, proposer = filled(NumpyBackend(), 3, 1, 7)
    decode(batch, 7, 10)
    batch.enable_pd_reorder = True
    process_reorder(batch)
    assert_rows(batch, proposer, 7, 1, 3)
    batch.reset_share_inputs()
    assert batch.enable_pd_reorder is False


def test_snapshots_of_the_map() -> None:
    """A map that was read stays as it was, whatever happens after, and cannot be written."""
    batch, _ = filled(NumpyBackend(), 3, 1, 7)
    first = batch.index_to_batch_id
    batch.remove(3)
    batch.condense()
    second = batch.index_to_batch_id
    batch.reset_share_inputs()
    assert dict(first) == {0: 3, 1: 1, 2: 7}
    assert dict(second) == {0: 1, 1: 7}
    assert dict(batch.index_to_batch_id) == {}
    with pytest.raises(TypeError):
        first[0] = 9  # type: ignore[index]  # refusing this is the test


def fresh_state(each: InputBatch | ProposerInputBatch) -> dict[str, object]:
    """Every field and the kept scratch as plain data."""
    names = [name for part in each._parts for name in part.registry]
    found: dict[str, object] = {
        name: each[name] if isinstance(each[name], list) else to_host(each[name]).tolist()
        for name in names
    }
    return {**found, "substep": each.get("substep")}


@pytest.mark.parametrize("idle", [True, False])
@pytest.mark.parametrize("calls", ["target", "vl", "target, proposer", "proposer, target"])
def test_reset(backend: Any, idle: bool, calls: str) -> None:
    """A reset leaves what ``init_share_inputs`` made, in target and proposer, in any order.

    Only a proposer whose target still has requests is not reset before it.
    """
    batch, proposer = filled(backend, 3, 1, 7)
    batch.condense()
    if idle:
        for batch_id in (3, 1, 7):
            batch.remove(batch_id)
    for each in (batch, proposer):
        each["free_list"][0] = -5
        each["not_need_stop"][0] = True
    batch["seq_lens_kv"][3] = 4
    batch["inject_token_ids"][0] = 77
    batch.enable_pd_reorder = True
    proposer["substep"] = 3
    proposer["cu_next_token_offset"][2] = 9
    for call in calls.split(", "):
        if call == "proposer" and batch.core.num_reqs:
            with pytest.raises(StaleOrder, match="reset it first"):
                proposer.reset_model_inputs()
        else:
            {
                "target": batch.reset_share_inputs,
                "vl": batch.vl.reset,
                "proposer": proposer.reset_model_inputs,
            }[call]()

    fresh, fresh_proposer = filled(backend)
    for each, new in ((batch, fresh), (proposer, fresh_proposer)):
        assert fresh_state(each) == fresh_state(new)
        assert not each.enable_pd_reorder
    assert batch.num_running_requests == 0
    insert(batch, 7)
    batch.condense()
    assert dict(batch.index_to_batch_id) == {0: 7}


def test_reset_of_an_idle_proposer(backend: Any) -> None:
    """Alone, it restores its own fields; those of the target, shared ones too, stay."""
    batch, proposer = filled(backend, 3)
    batch.preempt(3)
    with pytest.raises(StaleOrder, match="reset it first"):
        proposer.reset_model_inputs()
    batch.remove(3)
    proposer["free_list"][0] = -5
    proposer["draft_tokens"][5] = 4
    batch["eos_token_id"] = 9
    proposer.reset_model_inputs()

    assert hosted(proposer, "free_list").tolist() == hosted(batch, "free_list").tolist()
    assert (hosted(proposer, "draft_tokens") == -1).all()
    assert hosted(batch, "eos_token_id").tolist() == [[9]]
    proposer.check()


def test_preempt_and_resume(backend: Any) -> None:
    """A preempted request loses its row and blocks, and finds its other fields again."""
    batch, proposer = filled(backend, 3, 1, 7)
    row = batch.get_index_by_batch_id(1)
    batch["block_tables"][row, 0] = 5
    decode(batch, 1, 12)
    batch.condense()
    batch.preempt(1)
    with pytest.raises(UnknownRequest):
        batch.get_index_by_batch_id(1)
    batch.condense()
    assert_rows(batch, proposer, 3, 7)

    row = batch.resume(1, computed=4)
    assert row == batch.get_index_by_batch_id(1)
    assert hosted(batch, "prompt_lens")[row] == 13, "the prompt and the 3 outputs so far"
    assert hosted(batch, "seq_lens_decoder")[row] == 4
    assert (hosted(batch, "block_tables")[row] == -1).all()
    batch["seq_lens_encoder"][row] = 9
    batch["seq_lens_this_time_buffer"][row] = 9
    process_reorder(batch, [Reordering], proposer)
    assert_rows(batch, proposer, 3, 7, 1)
    with pytest.raises(UnknownRequest):
        batch.resume(1)
    with pytest.raises(UnknownRequest):
        batch.preempt(8)


@pytest.mark.parametrize("computed", [10, 11, 13])
def test_preempt_after_the_forward(backend: Any, computed: int) -> None:
    """What the last step computed counts: prompt and outputs so far are known when it resumes."""
    batch, _ = filled(backend, 3, 1)
    if computed > 10:
        decode(batch, 1, computed - 1)
    batch.condense()
    batch["seq_lens_decoder"][batch.get_index_by_batch_id(1)] = computed  # the forward is done
    batch.preempt(1)
    row = batch.resume(1)

    assert hosted(batch, "prompt_lens")[row] == computed + 1, "the sampled token is known too"
    assert hosted(batch, "seq_lens_decoder")[row] == 0
    assert hosted(batch, "prompt_lens")[batch.get_index_by_batch_id(3)] == 10


@pytest.mark.parametrize("computed", [0, 3])
def test_a_resumed_request_waits_for_its_tokens(backend: Any, computed: int) -> None:
    """What the last step was to compute is gone, and the proposer knows what is computed too."""
    batch, proposer = filled(backend, 3, 1)
    batch.condense()
    batch["seq_lens_decoder"][batch.get_index_by_batch_id(1)] = 10
    proposer["seq_lens_decoder"][batch.get_index_by_batch_id(1)] = 10
    batch.preempt(1)
    row = batch.resume(1, computed=computed)
    for each in (batch, proposer):
        assert hosted(each, "seq_lens_decoder")[row] == computed
        assert hosted(each, "seq_lens_encoder")[row] == 0
        assert hosted(each, "seq_lens_this_time_buffer")[row] == 0
    batch.condense()
    assert batch.order.idle == ("1",)


@pytest.mark.parametrize(("encoder", "this_time"), [(0, 3), (3, 0), (3, 2)])
def test_a_prefill_says_its_tokens_twice(encoder: int, this_time: int) -> None:
    """Both lengths of a row within its prompt are the chunk."""
    batch, _ = filled(NumpyBackend(), 3)
    batch["seq_lens_encoder"][0] = encoder
    batch["seq_lens_this_time_buffer"][0] = this_time
    with pytest.raises(InvalidSchedule, match=f"encoder {encoder} and .*this_time {this_time};"):
        batch.condense()


def test_a_decode_has_no_prefill_tokens() -> None:
    """A row behind its prompt computes no prompt tokens."""
    batch, _ = filled(NumpyBackend(), 3)
    decode(batch, 3, 10)
    batch["seq_lens_encoder"][0] = 1
    with pytest.raises(InvalidSchedule, match=r"'3': has seq_lens_encoder 1 and .*this_time 1;"):
        batch.condense()


def test_remove_a_preempted_request() -> None:
    """A request may go for good while it is preempted."""
    batch, _ = filled(NumpyBackend(), 3, 1)
    batch.preempt(1)
    batch.remove(1)
    with pytest.raises(UnknownRequest):
        batch.remove(1)
    assert insert(batch, 1) == 1


def test_contradicting_lengths() -> None:
    """Lengths that contradict each other are refused before any row moves, naming the request."""
    batch, proposer = filled(NumpyBackend(), 3, 1)
    decode(batch, 1, 4)
    batch["seq_lens_encoder"][1] = 9
    with pytest.raises(InvalidSchedule, match=r"'1': has seq_lens_encoder 9 and .*this_time 1;"):
        process_reorder(batch, [Reordering], proposer)
    batch["seq_lens_this_time_buffer"][1] = 9  # 4 + 9 > 10
    with pytest.raises(InvalidSchedule, match=r"request '1': got 9 tokens; expected 1\.\.6"):
        process_reorder(batch, [Reordering], proposer)
    batch["seq_lens_encoder"][1] = -6
    with pytest.raises(InvalidSchedule, match="'1': has seq_lens_encoder -6"):
        process_reorder(batch, [Reordering], proposer)
    batch["seq_lens_encoder"][1] = batch["seq_lens_this_time_buffer"][1] = 6
    batch["prompt_lens"][0] = 0
    with pytest.raises(InvalidSchedule, match="request '3'"):
        process_reorder(batch, [Reordering], proposer)
    batch["prompt_lens"][0] = 10
    batch["seq_lens_encoder"][0], batch["seq_lens_this_time_buffer"][0] = 3, 0
    with pytest.raises(InvalidSchedule, match=r"'3': .*_encoder 3 .*_this_time 0;") as caught:
        process_reorder(batch, [Reordering], proposer)
    assert "seq_lens_this_time_buffer[row]" in str(caught.value)
    assert_rows(batch, proposer, 3, 1)


def test_a_refused_order_changes_nothing() -> None:
    """A step that is refused neither turns the switch on, nor takes the counts that it came with.

    The features of the step before are not shown as those of the refused one.
    """
    batch, proposer = filled(NumpyBackend(), 3, 1)
    batch.condense()
    assert batch.image_features is None
    decode(batch, 1, 10)
    batch["seq_lens_decoder"][0] = 4  # with 10 more tokens: beyond the prompt
    with pytest.raises(InvalidSchedule, match="request '3': got 10 tokens"):
        process_reorder(batch, [Reordering], proposer)
    assert batch.get("enable_pd_reorder") is False
    assert [batch.core.computed_of(name) for name in ("3", "1")] == [0, 0]
    assert_rows(batch, proposer, 3, 1)
    for name in ("image_features", "image_features_list", "order"):
        with pytest.raises(StaleOrder, match="there is no step"):
            getattr(batch, name)
    batch["seq_lens_decoder"][0] = 0
    process_reorder(batch, [Reordering], proposer)
    assert batch.get("enable_pd_reorder") is True
    assert_rows(batch, proposer, 1, 3)


def test_the_core_may_be_called_directly() -> None:
    """A step is over for the views, too, when the batch behind the names changes by itself."""
    batch, _ = filled(NumpyBackend(), 3, 1)
    changes: list[Callable[[], object]] = [
        lambda: batch.core.swap_rows(0, 1),
        lambda: batch.vl.remove("3"),
        lambda: batch.vl.add("3", prompt_len=4),
    ]
    for change in changes:
        batch.condense()
        assert batch.image_features is None
        change()
        with pytest.raises(StaleOrder, match="there is no step"):
            batch.image_features  # noqa: B018 (reading is the test)
        for row, batch_id in batch.index_to_batch_id.items():
            batch["prompt_lens"][row] = batch.core.known_tokens_of(str(batch_id))
            batch["seq_lens_encoder"][row] = batch["seq_lens_this_time_buffer"][row] = 1


def test_orders_outlive_their_step() -> None:
    """``order`` is of the latest step; an object that was taken restores outputs later."""
    batch, _ = filled(NumpyBackend(), 3, 1)
    with pytest.raises(StaleOrder, match="there is no step"):
        _ = batch.order
    reorder_split_prefill_and_decode(batch)
    order = batch.order
    batch.remove(3)
    assert order.restore(SimpleNamespace(t=["a", "b"]).t) == {"3": "a", "1": "b"}
    with pytest.raises(StaleOrder, match="there is no step"):
        _ = batch.order
