"""Outputs by row -> outputs by batch_id, for every container that FastDeploy hands out."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from exposed import dtype_of, to_host
from fault_batches import insert, make_batch, make_proposer

from vlbatch import NumpyBackend
from vlbatch.errors import InvalidField, StaleOrder
from vlbatch.integrations.fastdeploy import (
    recover_batch_index_for_output,
    recover_batch_index_for_sampler_output,
    reorder_split_prefill_and_decode,
)

ROWS = {0: 5, 1: 0, 2: 3}  # row -> batch_id; 1, 2 and 4 are not in the batch


class LogprobsTensors(NamedTuple):
    """As the upstream has it."""

    logprob_token_ids: Any
    logprobs: Any
    selected_token_ranks: Any


def array_of(values: Any) -> Any:
    return np.array(values)


def paddle_of(values: Any) -> Any:
    return pytest.importorskip("paddle").to_tensor(values)


def torch_of(values: Any) -> Any:
    return pytest.importorskip("torch").tensor(values)


arrays = pytest.mark.parametrize("make", [array_of, paddle_of, torch_of])


@arrays
def test_arrays(make: Callable[[Any], Any]) -> None:
    """Entry ``j`` is that of batch_id ``j``; ids that are not there have no value of their type."""
    output = {
        "tokens": make([[50], [0], [30]]),
        "scores": make([0.5, 0.0, 0.3]),
        "flags": make([True, True, True]),
        "ids": [["a"], ["b"], ["c"]],
    }
    got = recover_batch_index_for_output(output, ROWS, True, list(output))
    assert to_host(got["tokens"]).tolist() == [[0], [-1], [-1], [30], [-1], [50]]
    scores = to_host(got["scores"])
    assert np.isnan(scores[[1, 2, 4]]).all()
    np.testing.assert_allclose(scores[[0, 3, 5]], [0.0, 0.3, 0.5])
    assert to_host(got["flags"]).tolist() == [True, False, False, True, False, True]
    assert got["ids"] == [["b"], None, None, ["c"], None, ["a"]]
    for name in ("tokens", "scores", "flags"):
        assert type(got[name]) is type(output[name])
        assert dtype_of(got[name]) == dtype_of(output[name])


@arrays
def test_the_source_stays(make: Callable[[Any], Any]) -> None:
    """Recovered outputs are new; the source can be read again, and gives the same."""
    source = SimpleNamespace(tokens=make([[1], [2], [3]]), names=["a", "b", "c"])
    first = recover_batch_index_for_output(source, ROWS, True, ["tokens", "names"])
    assert to_host(source.tokens).tolist() == [[1], [2], [3]]
    assert source.names == ["a", "b", "c"]
    second = recover_batch_index_for_output(source, ROWS, True, ["tokens", "names"])
    assert to_host(first["tokens"]).tolist() == to_host(second["tokens"]).tolist()
    assert first.keys() == {"tokens", "names"}


def test_fields_of_the_batch(backend: Any) -> None:
    """Whole buffers of a batch are recovered by the rows in use, with the map of their step."""
    batch = make_batch(backend)
    for batch_id in (5, 0, 3):
        insert(batch, batch_id)
    reorder_split_prefill_and_decode(batch)
    for row, batch_id in batch.index_to_batch_id.items():
        batch["sampled_token_ids"][row] = batch_id
        batch["accept_tokens"][row] = 10 + batch_id
        batch["req_ids"][row] = f"r{batch_id}"
    rows = batch.index_to_batch_id
    names = ["sampled_token_ids", "accept_tokens", "req_ids", "prompt_lens", "cu_seqlens_q"]
    got = recover_batch_index_for_output(batch, rows, True, names)
    assert to_host(got["sampled_token_ids"])[:, 0].tolist() == [0, -1, -1, 3, -1, 5]
    assert to_host(got["accept_tokens"])[:, 2].tolist() == [10, -1, -1, 13, -1, 15]
    assert got["req_ids"] == ["r0", None, None, "r3", None, "r5"]
    assert to_host(got["prompt_lens"])[:, 0].tolist() == [10, -1, -1, 10, -1, 10]
    assert to_host(got["cu_seqlens_q"]).tolist() == [0, 10, 10, 10, 20, 20, 30]

    for name in ("draft_logits", "ids_remove_padding", "not_need_stop", "free_list"):
        with pytest.raises(InvalidField, match=f"'{name}' has no entry a row"):
            recover_batch_index_for_output(batch, rows, True, [name])


def test_the_flag_has_no_effect() -> None:
    """The map alone decides: without a reorder rows may differ from ids too."""
    for flag in (True, False):
        got = recover_batch_index_for_output({"t": [7, 8]}, {0: 1, 1: 0}, flag, ["t"])
        assert got == {"t": [8, 7]}
    assert recover_batch_index_for_output({"t": []}, {}, True, ["t"]) == {"t": []}


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        (None, InvalidField, "no 't' to recover"),
        (5, InvalidField, "is a int"),
        ("abc", InvalidField, "is a str"),
        (np.array(5), InvalidField, "without axes"),
        ([1, 2], StaleOrder, "has 2 entries; the rows of this order have 3"),
        ((1, 2, 3, 4), StaleOrder, "has 4 entries"),
    ],
)
def test_what_cannot_be_recovered(value: object, error: type[Exception], says: str) -> None:
    """A missing or unsuitable output is an error at once, not a name that lacks later."""
    with pytest.raises(error, match=says):
        recover_batch_index_for_output({"t": value}, ROWS, True, ["t"])


@pytest.mark.parametrize("rows", [{0: 5, 2: 3}, {1: 4}])
def test_a_map_with_holes(rows: dict[int, int]) -> None:
    """A map with holes is none of a step, and is refused."""
    with pytest.raises(InvalidField, match="not dense: condense"):
        recover_batch_index_for_output({"t": [1, 2, 3]}, rows, True, ["t"])


def sampler_output(make: Callable[[Any], Any], **changes: Any) -> Any:
    """Of rows 5, 0 and 3 with 2, 1 and 3 accepted tokens."""
    members = {
        "sampled_token_ids": make([[50, 51, -1], [1, -1, -1], [30, 31, 32]]),
        "token_num_per_batch": make([2, 1, 3]),
        "cu_batch_token_offset": make([0, 2, 3, 6]),
        "logits": make([[50.0], [51.0], [1.0], [30.0], [31.0], [32.0]]),
        "logprobs_tensors": LogprobsTensors(
            make([[50], [51], [1], [30], [31], [32]]),
            make([[5.0], [5.1], [0.1], [3.0], [3.1], [3.2]]),
            make([50, 51, 1, 30, 31, 32]),
        ),
        "sampling_mask": ["m50", "m51", "m1", "m30", "m31", "m32"],
        "logz_per_batch": None,
    }
    return SimpleNamespace(**{**members, **changes})


@arrays
def test_sampler_output_of_drafts(make: Callable[[Any], Any]) -> None:
    """Members with several entries a row move as groups; offsets are summed again."""
    output = sampler_output(make)
    recover_batch_index_for_sampler_output(output, ROWS)
    ids = to_host(output.sampled_token_ids)
    assert ids[[0, 3, 5]].tolist() == [[1, -1, -1], [30, 31, 32], [50, 51, -1]]
    assert (ids[[1, 2, 4]] == -1).all()
    assert to_host(output.token_num_per_batch).tolist() == [1, 0, 0, 3, 0, 2]
    assert to_host(output.cu_batch_token_offset).tolist() == [0, 1, 1, 1, 4, 4, 6]
    order = [1, 30, 31, 32, 50, 51]
    assert to_host(output.logits)[:, 0].tolist() == order
    assert to_host(output.logprobs_tensors.logprob_token_ids)[:, 0].tolist() == order
    assert to_host(output.logprobs_tensors.selected_token_ranks).tolist() == order
    assert isinstance(output.logprobs_tensors, LogprobsTensors)
    assert output.sampling_mask == [f"m{token}" for token in order]
    assert output.logz_per_batch is None


@arrays
def test_sampler_output_of_one_token(make: Callable[[Any], Any]) -> None:
    """Without counts every member has one entry a row."""
    output = sampler_output(
        make, token_num_per_batch=None, cu_batch_token_offset=None, logprobs_tensors=None,
        sampled_token_ids=make([[50], [1], [30]]), logits=make([[50.0], [1.0], [30.0]]),
        sampling_mask=["m50", "m1", "m30"], logz_per_batch=make([5, 1, 3]),
    )  # fmt: skip
    recover_batch_index_for_sampler_output(output, ROWS)
    assert to_host(output.sampled_token_ids)[:, 0].tolist() == [1, -1, -1, 30, -1, 50]
    logits = to_host(output.logits)[:, 0]
    assert logits[[0, 3, 5]].tolist() == [1, 30, 50]
    assert np.isnan(logits[[1, 2, 4]]).all()
    assert to_host(output.logz_per_batch).tolist() == [1, -1, -1, 3, -1, 5]
    assert output.sampling_mask == ["m1", None, None, "m30", None, "m50"]


def test_counts_longer_than_the_rows() -> None:
    """Counts and tokens may be whole buffers of the batch."""
    output = sampler_output(
        array_of,
        token_num_per_batch=np.array([2, 1, 3, 9, 9]),
        sampled_token_ids=np.arange(5)[:, None],
        cu_batch_token_offset=np.array([[0], [2], [3], [6], [6], [6]]),
    )
    recover_batch_index_for_sampler_output(output, ROWS)
    assert output.sampled_token_ids[:, 0].tolist() == [1, -1, -1, 2, -1, 0]
    assert output.cu_batch_token_offset[:, 0].tolist() == [0, 1, 1, 1, 4, 4, 6]


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"hidden_states": np.zeros(3)}, InvalidField, r"no rule to recover \['hidden_states'\]"),
        ({"logits": np.zeros((5, 1))}, StaleOrder, "outputs has 5 entries"),
        ({"sampling_mask": ["m"] * 3}, StaleOrder, "has 3 entries"),
        (
            {"token_num_per_batch": np.array([2, 1])},
            StaleOrder,
            "has 2 entries; the rows of this order have 3",
        ),
    ],
)
def test_a_refused_sampler_output(
    changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    """A sampler's output is recovered whole, or stays as it was."""
    output = sampler_output(array_of, **changes)
    before = dict(vars(output))
    with pytest.raises(error, match=says):
        recover_batch_index_for_sampler_output(output, ROWS)
    assert all(vars(output)[name] is value for name, value in before.items())


def test_a_sampler_output_without_members() -> None:
    """What has no members that could be set is refused, not half read."""
    with pytest.raises(InvalidField, match="got a dict; expected an object"):
        recover_batch_index_for_sampler_output({"logits": np.zeros((3, 1))}, ROWS)


def test_outputs_of_an_earlier_step() -> None:
    """Outputs are recovered with the map of their step, after the batch has gone on."""
    batch = make_batch(NumpyBackend())
    for batch_id in (5, 0, 3):
        insert(batch, batch_id)
    reorder_split_prefill_and_decode(batch)
    rows = batch.index_to_batch_id
    tokens = [10 * batch_id for batch_id in rows.values()]
    batch.remove(5)
    insert(batch, 2)
    reorder_split_prefill_and_decode(batch)
    got = recover_batch_index_for_output({"t": tokens}, rows, True, ["t"])
    assert got["t"] == [0, None, None, 30, None, 50]


def test_buffers_of_another_request_of_the_same_id(backend: Any) -> None:
    """A map knows a request from the next one of its id in its row; a plain dict knows ids only."""
    batch = make_batch(backend)
    for batch_id in (3, 1):
        insert(batch, batch_id)
    batch.condense()
    rows = batch.index_to_batch_id
    batch["sampled_token_ids"][0] = 33
    batch.remove(3)
    assert insert(batch, 3) == 0
    assert batch.index_to_batch_id == rows == {0: 3, 1: 1}
    with pytest.raises(StaleOrder, match="another target"):
        make_proposer(batch).reorder_inputs(rows)
    for output in (batch, make_proposer(batch)):
        with pytest.raises(StaleOrder, match="before the next step"):
            recover_batch_index_for_output(output, rows, True, ["prompt_lens"])

    now = recover_batch_index_for_output(batch, batch.index_to_batch_id, True, ["prompt_lens"])
    assert to_host(now["prompt_lens"])[:, 0].tolist() == [-1, 10, -1, 10]
    recover_batch_index_for_output(batch, dict(rows), True, ["prompt_lens"])


def test_a_map_reads_as_a_mapping() -> None:
    """It compares, counts and prints as the dict that it was upstream, and cannot be written."""
    batch = make_batch(NumpyBackend())
    for batch_id in (3, 1, 4):
        insert(batch, batch_id)
    batch.remove(1)
    rows = batch.index_to_batch_id
    assert (dict(rows), len(rows), list(rows), 1 in rows) == ({0: 3, 2: 4}, 2, [0, 2], False)
    assert rows.admissions.tolist() == [0, -1, 2]
    assert repr(rows) == "RowMap({0: 3, 2: 4})"
    with pytest.raises(ValueError, match="read-only"):
        rows.admissions[0] = 5
