"""Attribute and key access of FastDeploy's batches: the same names, and no others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from exposed import address_of
from fault_batches import decode, hosted, insert, make_batch, make_config, make_proposer

from vlbatch import NumpyBackend
from vlbatch.errors import InvalidField, InvalidSetting, StaleOrder, UnknownField
from vlbatch.integrations.fastdeploy import InputBatch, ProposerInputBatch

VIEWS = (
    "seq_lens_this_time", "image_features", "image_features_list", "index_to_batch_id",
    "num_running_requests", "running_requests_ids",
)  # fmt: skip


def test_assignment_copies(backend: Any) -> None:
    """Assigning by key or attribute copies into the array, which stays where it is."""
    batch = make_batch(backend)
    array = batch["top_k"]
    address = address_of(array)
    batch["top_k"] = np.arange(8).reshape(8, 1)
    assert hosted(batch, "top_k")[:, 0].tolist() == list(range(8))
    batch.top_k = 3
    assert hosted(batch, "top_k").tolist() == [[3]] * 8
    assert batch["top_k"] is array
    assert address_of(array) == address


def test_writes_through_the_array(backend: Any) -> None:
    """What is written into an array by row is what the batch holds, as a runner does it."""
    batch = make_batch(backend)
    row = insert(batch, 5)
    batch["temperature"][row] = 0.5
    batch["stop_flags"][row : row + 1] = False
    batch.req_ids[row] = "chat-5"

    assert batch.core.read("5", "temperature") == [0.5]
    assert batch.core.read("5", "stop_flags") == [False]
    assert batch.req_ids == ["chat-5", *[None] * 7]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("top_k", np.zeros((7, 1), np.int64), r"got shape \(7, 1\); expected \(8, 1\)"),
        ("top_k", 0.5, "expected int64"),
        ("req_ids", ["a"], "expected a list of 8"),
        ("req_ids", "abcdefgh", "got a str; expected a list of 8"),
        ("index_to_batch_id", {}, "follows from the requests"),
        ("num_running_requests", 3, "follows from the requests"),
        ("running_requests_ids", range(3), "follows from the requests"),
        ("image_features", np.zeros((2, 4)), "expected None"),
        ("image_features_list", [-1] * 8, "expected None"),
        ("seq_lens_this_time", np.zeros(9, np.int32), "one axis of at most 8"),
        ("seq_lens_this_time", [0.5, 2.0], "dtype float64; expected int32"),
        ("seq_lens_this_time", [1 << 40], "expected int32 values"),
    ],
)
@pytest.mark.parametrize("set_value", [InputBatch.__setitem__, setattr])
def test_refused_assignments(
    backend: Any, name: str, value: object, says: str, set_value: Callable[..., None]
) -> None:
    """What does not fit, or follows from the requests, is refused by key and by attribute."""
    with pytest.raises(InvalidField, match=says):
        set_value(make_batch(backend), name, value)


def test_lists_are_written_in_place() -> None:
    """A list that is assigned whole is copied into the one that is there."""
    batch = make_batch(NumpyBackend())
    held = batch["top_k_list"]
    batch.top_k_list = list(range(8))
    assert batch["top_k_list"] is held
    assert held == list(range(8))


@pytest.mark.parametrize(
    "bad",
    [
        {"nonsense": 1},
        {"top_k": np.zeros(3, np.int64)},
        {"image_features": [1]},
        {"seq_lens_this_time": np.zeros(99, np.int32)},
    ],
)
def test_update_is_all_or_nothing(bad: dict[str, object]) -> None:
    """``update`` writes everything, or nothing if one name is refused."""
    batch = make_batch(NumpyBackend(), kept=["pooling_params"])
    insert(batch, 1)
    lengths = {"seq_lens_this_time": np.array([6], np.int32)}
    batch.update({"top_k": 4, "pooling_params": "p", **lengths})
    assert hosted(batch, "top_k").tolist() == [[4]] * 8
    assert batch["pooling_params"] == "p"
    assert hosted(batch, "seq_lens_this_time_buffer")[0] == 6

    with pytest.raises((UnknownField, InvalidField)):
        batch.update({"top_k": 5, "pooling_params": "q", **bad})
    assert hosted(batch, "top_k").tolist() == [[4]] * 8
    assert batch["pooling_params"] == "p"
    assert hosted(batch, "seq_lens_this_time_buffer")[0] == 6


def test_unknown_names() -> None:
    """Another name is an error by key and by attribute, for reading and for writing."""
    batch = make_batch(NumpyBackend())
    with pytest.raises(UnknownField, match=r"no 'top_q' here; there are .*'top_k'"):
        batch["top_q"]
    with pytest.raises(AttributeError, match="no 'top_q' here"):
        batch.top_q  # noqa: B018 (reading is the test)
    with pytest.raises(UnknownField, match="setting: kept"):
        batch["top_q"] = 1
    with pytest.raises(UnknownField):
        batch.top_q = 1
    with pytest.raises(UnknownField):
        batch.pop("top_q")
    with pytest.raises(UnknownField):
        del batch["top_q"]
    assert "top_q" not in batch
    assert 3 not in batch
    assert not hasattr(batch, "top_q")
    assert batch.get("top_q") is None
    assert batch.get("top_q", 7) == 7


def test_in_and_get() -> None:
    """``in`` and ``get`` find fields, views that hold something and objects once assigned."""
    batch = make_batch(NumpyBackend())
    for name in ("top_k", "req_ids", "index_to_batch_id", "enable_pd_reorder"):
        assert name in batch
        assert np.array_equal(batch.get(name), getattr(batch, name))
    assert "image_features" not in batch
    for name in ("swap_states", "condense", "_kept", "core"):
        assert name not in batch
    assert "caches" not in batch
    batch["caches"] = [object()]
    assert "caches" in batch
    assert batch.get("caches") is batch.caches


def test_kept_objects() -> None:
    """What captured graphs hold is assigned once and given up by ``pop``; scratch at any time."""
    batch = make_batch(NumpyBackend(), kept=["batch_token_num"])
    tiles = np.zeros(4, np.int32)
    batch["decoder_batch_ids"] = tiles
    batch["decoder_batch_ids"] = tiles
    with pytest.raises(InvalidField, match="captured graph may hold it"):
        batch.decoder_batch_ids = np.zeros(4, np.int32)
    assert batch["decoder_batch_ids"] is tiles
    assert batch.pop("decoder_batch_ids") is tiles
    assert batch.pop("decoder_batch_ids", None) is None
    with pytest.raises(UnknownField):
        batch.pop("decoder_batch_ids")
    batch.decoder_batch_ids = np.zeros(2, np.int32)
    del batch["decoder_batch_ids"]
    assert "decoder_batch_ids" not in batch

    for value in ([1], [2]):
        batch["batch_token_num"] = value
        assert batch["batch_token_num"] is value


@pytest.mark.parametrize("name", ["top_k", "req_ids", "image_features", "index_to_batch_id"])
def test_fields_and_views_stay(name: str) -> None:
    """What belongs to the batch cannot be popped."""
    with pytest.raises(InvalidField, match="stays as long as the batch"):
        make_batch(NumpyBackend()).pop(name)


@pytest.mark.parametrize("name", [*VIEWS, "top_k", "vl"])
def test_before_init(name: str) -> None:
    """Before ``init_share_inputs`` there is nothing, and the message says what to call."""
    batch = InputBatch(make_config(), backend="numpy")
    with pytest.raises(UnknownField, match="call init_share_inputs"):
        batch[name]
    with pytest.raises((AttributeError, UnknownField, StaleOrder), match="call init_share_inputs"):
        getattr(batch, name)
    assert name not in batch
    with pytest.raises((UnknownField, InvalidField)):
        batch[name] = None


@pytest.mark.parametrize(
    "call",
    [
        lambda batch: batch.add(1, prompt_len=3),
        lambda batch: batch.remove(1),
        lambda batch: batch.preempt(1),
        lambda batch: batch.has(1),
        lambda batch: batch.get_index_by_batch_id(1),
        lambda batch: batch.condense(),
        lambda batch: batch.swap_states(0, 1),
        lambda batch: batch.reset_share_inputs(),
        lambda batch: batch.process_mm_features(lambda tasks: []),
        lambda batch: batch.positions(),
        lambda batch: batch.update_weights(1),
        lambda batch: batch.check(),
        lambda batch: batch.backend,
        lambda batch: ProposerInputBatch(batch.fd_config, batch).init_share_inputs(),
        lambda batch: ProposerInputBatch(batch.fd_config, batch).reset_model_inputs(),
    ],
)
def test_calls_before_init(call: Callable[[InputBatch], object]) -> None:
    """Before ``init_share_inputs`` each call is refused by a typed error that says what to do."""
    with pytest.raises(StaleOrder, match=r"call init_share_inputs\(\) first"):
        call(InputBatch(make_config(), backend="numpy"))


@pytest.mark.parametrize("name", ["image_features", "image_features_list"])
def test_in_and_get_between_steps(name: str) -> None:
    """A view that has nothing to show is not ``in``, and ``get`` gives the default: no error."""
    batch = make_batch(NumpyBackend())
    insert(batch, 3)
    assert name not in batch
    assert batch.get(name) is None
    assert batch.get(name, 7) == 7
    with pytest.raises(StaleOrder, match="there is no step"):
        batch[name]


@pytest.mark.parametrize(
    "name", ["top_k", "req_ids", "image_features", "caches", "add", "vl", "_kept", "a b", 3]
)
def test_names_that_are_taken(name: Any) -> None:
    """A name to keep that is a field, a view or a method already is refused: it would hide it."""
    with pytest.raises(InvalidSetting, match="no field, view or method") as caught:
        make_batch(NumpyBackend(), kept=["pooling_params", name])
    assert caught.value.setting == "kept"
    target = make_batch(NumpyBackend())
    for taken in ("pre_ids", "top_k", "base_model_draft_tokens", "reorder_inputs"):
        with pytest.raises(InvalidSetting, match=taken):
            ProposerInputBatch(target.fd_config, target, kept=[taken])


def test_copying_does_not_recurse() -> None:
    """Private names are no fields, so that ``copy`` and the like can look for theirs."""
    assert copy.copy(make_batch(NumpyBackend()))["top_k"].shape == (8, 1)


def test_seq_lens_this_time_is_a_view(backend: Any) -> None:
    """It is the buffer's first rows: each write is seen in both, and its length follows."""
    batch = make_batch(backend)
    for batch_id in (3, 1, 2):
        insert(batch, batch_id)
    view = batch.seq_lens_this_time
    assert tuple(view.shape) == (3,)
    assert address_of(view) == address_of(batch["seq_lens_this_time_buffer"])
    view[1] = 9
    assert hosted(batch, "seq_lens_this_time_buffer")[:4].tolist() == [10, 9, 10, 0]
    batch["seq_lens_this_time_buffer"][0] = 4
    assert hosted(batch, "seq_lens_this_time").tolist() == [4, 9, 10]
    # as runners rebind it, and as they fill it
    batch["seq_lens_this_time"] = batch["seq_lens_this_time_buffer"][:3]
    batch.seq_lens_this_time = batch["bad_tokens_len"][:2]
    assert hosted(batch, "seq_lens_this_time_buffer")[:4].tolist() == [1, 1, 10, 0]
    batch.seq_lens_this_time = [5, 6]
    assert hosted(batch, "seq_lens_this_time_buffer")[:4].tolist() == [5, 6, 10, 0]
    with pytest.raises(InvalidField, match="expected int32"):
        batch["seq_lens_this_time"] = batch["temperature"][:, 0]
    assert hosted(batch, "seq_lens_this_time_buffer")[:4].tolist() == [5, 6, 10, 0]


def test_proposer_access(backend: Any) -> None:
    """The draft model's batch has the same access, and its own buffer behind its view."""
    target = make_batch(backend)
    proposer = make_proposer(target)
    insert(target, 4)
    insert(target, 2)
    decode(target, 4, 10)
    proposer.seq_lens_this_time = target["bad_tokens_len"][:2]
    assert hosted(proposer, "seq_lens_this_time").tolist() == [1, 1]
    assert hosted(target, "seq_lens_this_time").tolist() == [1, 10]
    assert dict(proposer.index_to_batch_id) == {0: 4, 1: 2}
    assert (proposer.num_running_requests, proposer.running_requests_ids) == (2, range(2))
    with pytest.raises(InvalidField, match="follows from the requests"):
        proposer["index_to_batch_id"] = {}
    with pytest.raises(InvalidField, match="at most 8"):
        proposer["seq_lens_this_time"] = [1] * 9
    with pytest.raises(InvalidField, match="expected int32"):
        proposer["seq_lens_this_time"] = [0.5]
    with pytest.raises(UnknownField):
        proposer["top_q"]
    with pytest.raises(AttributeError, match="call init_share_inputs"):
        ProposerInputBatch(target.fd_config, target).draft_tokens  # noqa: B018
