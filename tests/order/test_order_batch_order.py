"""The snapshot of one step: regions, tokens, digest, immutability."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from order_factories import make_order

from vlbatch import InputBatch, NumpyBackend
from vlbatch.errors import UnknownRequest
from vlbatch.order import DECODE, EXTEND, PREFILL, OrderPolicy


def batch_of(
    prompt_lens: dict[str, int], *, num_drafts: int = 0, **settings: Any
) -> InputBatch[Any]:
    batch = InputBatch(
        [], backend=NumpyBackend(), capacity=8, max_model_len=64, num_drafts=num_drafts, **settings
    )
    for req_id, prompt_len in prompt_lens.items():
        batch.add(req_id, prompt_len=prompt_len)
    return batch


def step(batch: InputBatch[Any], **scheduled: int) -> dict[str, int]:
    """Run a step; returns req_id -> class."""
    order = batch.apply(batch.plan(scheduled))
    batch.advance(order)
    return dict(zip(order.req_ids, order.classes.tolist(), strict=True))


# -- class from progress -------------------------------------------------------------------------
def test_one_token_prompt_is_prefill() -> None:
    """A prompt of one token is prefill work although it is one token (peers O)."""
    assert step(batch_of({"a": 1}), a=1) == {"a": PREFILL}


def test_one_token_tail_is_extend() -> None:
    """The last token of a prompt is prompt work although it is one token (peers O)."""
    batch = batch_of({"a": 5})
    step(batch, a=4)

    assert step(batch, a=1) == {"a": EXTEND}
    assert step(batch, a=1) == {"a": DECODE}


def test_prompt_chunk_as_long_as_a_speculating_decode() -> None:
    """K + 1 tokens of a prompt are extend, k + 1 tokens of a decode are decode (peers O)."""
    batch = batch_of({"prompt": 12, "decode": 1}, num_drafts=2)
    step(batch, prompt=3, decode=1)

    assert step(batch, prompt=3, decode=3) == {"decode": DECODE, "prompt": EXTEND}


def test_prefix_hit_is_extend() -> None:
    """A first chunk behind a cached prefix has context: it is an extend (FastDeploy 3.5)."""
    batch = batch_of({})
    batch.add("a", prompt_len=8, computed=4)

    assert step(batch, a=1) == {"a": EXTEND}


def test_stopped_and_empty_rows_are_no_decodes() -> None:
    """Requests without tokens come after all others and count in no region (FastDeploy I12)."""
    batch = batch_of({"idle": 1, "gone": 1, "a": 1, "new": 3})
    step(batch, idle=1, gone=1, a=1)
    batch.remove("gone")
    order = batch.apply(batch.plan({"new": 1, "a": 1}))

    assert (order.req_ids, order.idle) == (("a", "new"), ("idle",))
    assert order.regions == (1, 0, 1)


@pytest.mark.parametrize(
    ("policy", "regions", "leading"),
    [("split", (2, 1, 1), 2), ("two", (2, 1, 1), 2), ("arrival", (2, 1, 1), 0)],
)
def test_regions_count_requests(
    policy: OrderPolicy, regions: tuple[int, ...], leading: int
) -> None:
    """Regions count each class; rows lead with decodes where a policy gives them a region."""
    batch = batch_of({"p": 4, "e": 4, "d1": 1, "d2": 1}, policy=policy)
    step(batch, e=1, d1=1, d2=1)
    order = batch.apply(batch.plan({"p": 1, "e": 1, "d1": 1, "d2": 1}))

    assert order.regions == regions
    assert order.num_leading_decodes == leading
    assert set(order.req_ids[:leading]) <= {"d1", "d2"}


def test_arrival_order_of_decodes_only() -> None:
    """Without regions all rows are known to be decodes only if every one of them is."""
    assert make_order("ab", classes=[DECODE, DECODE], policy="arrival").num_leading_decodes == 2
    assert make_order("ab", classes=[DECODE, EXTEND], policy="arrival").num_leading_decodes == 0


# -- tokens --------------------------------------------------------------------------------------
def test_flattened_tokens() -> None:
    """Tokens of a step lie row by row; each has the index in its own request."""
    order = make_order("abc", computed=[4, 0, 7], scheduled=[2, 3, 1])

    assert order.num_tokens == 6
    assert order.query_start.tolist() == [0, 2, 5, 6]
    assert order.row_of_token.tolist() == [0, 0, 1, 1, 1, 2]
    assert order.token_indices.tolist() == [4, 5, 0, 1, 2, 7]


def test_empty_step() -> None:
    """A step without tokens has every view, each empty."""
    order = make_order("", idle="ab")

    assert (order.num_reqs, order.num_tokens, order.regions) == (0, 0, (0, 0, 0))
    assert order.query_start.tolist() == [0]
    assert order.row_of_token.tolist() == order.token_indices.tolist() == []
    assert order.num_leading_decodes == 0
    assert order.restore([]) == {}


def test_row_of() -> None:
    """A request has one row; idle or unknown it has none, and gets none (FastDeploy I7)."""
    order = make_order("ab", idle="c")

    assert [order.row_of(r) for r in "ab"] == [0, 1]
    for req_id in ("c", "nobody"):
        for _ in range(2):
            with pytest.raises(UnknownRequest, match="no row in this step") as caught:
                order.row_of(req_id)
            assert caught.value.req_id == req_id


# -- immutability --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name",
    [
        "slots",
        "prompt_lens",
        "computed",
        "scheduled",
        "classes",
        "query_start",
        "row_of_token",
        "token_indices",
    ],
)
def test_arrays_cannot_be_written(name: str) -> None:
    """No array of an order can be changed after it was made (FastDeploy I21)."""
    array = getattr(make_order(), name)

    with pytest.raises(ValueError, match="read-only"):
        array[0] = 9


def test_attributes_cannot_be_set() -> None:
    """No attribute of an order can be set."""
    with pytest.raises(FrozenInstanceError):
        make_order().req_ids = ()  # type: ignore[misc]  # that it is frozen is what is tested


def test_later_steps_do_not_change_an_order() -> None:
    """An order is the same after the batch moved on (FastDeploy I21, I22)."""
    batch = batch_of({"a": 4, "b": 1, "c": 1})
    order = batch.apply(batch.plan({"a": 1, "b": 1, "c": 1}))
    names = ("slots", "prompt_lens", "computed", "scheduled", "classes")
    before = [getattr(order, name).tolist() for name in names]
    batch.advance(order)
    batch.remove("b")
    batch.add("d", prompt_len=9)
    step(batch, d=1, c=1, a=1)

    assert [getattr(order, name).tolist() for name in names] == before
    assert order.req_ids == ("a", "b", "c")


# -- digest --------------------------------------------------------------------------------------
def test_ranks_with_equal_inputs_agree() -> None:
    """Two batches that saw the same calls have the same digests, whatever their ids (peers P)."""
    digests = []
    for _ in range(2):
        batch = batch_of({"a": 4, "b": 1, "c": 3})
        orders = [batch.apply(batch.plan({"c": 2, "a": 1}))]
        batch.advance(orders[0])
        batch.remove("a")
        orders.append(batch.apply(batch.plan({"c": 1, "b": 1})))
        digests.append([order.digest() for order in orders])

    assert digests[0] == digests[1]
    assert digests[0][0] != digests[0][1]


@pytest.mark.parametrize(
    "change",
    [
        {"req_ids": ("a", "b", "d")},
        {"req_ids": ("a", "c", "b")},
        {"req_ids": ("a", "b")},
        {"idle": ("d",)},
        {"slots": (0, 1, 3)},
        {"slots": (0, 2, 1)},
        {"prompt_lens": (8, 8, 9)},
        {"computed": (0, 0, 1)},
        {"scheduled": (1, 2, 1)},
    ],
    ids=str,
)
def test_any_difference_shows(change: dict[str, Any]) -> None:
    """A digest differs as soon as ranks disagree about any part of the order."""
    assert make_order(**change).digest() != make_order().digest()


def test_names_cannot_run_together() -> None:
    """Names of other lengths, and a name on the other side of the idle mark, do not collide."""
    digests = {
        make_order(("ab", "c")).digest(),
        make_order(("a", "bc")).digest(),
        make_order(("a",), idle=("b", "c")).digest(),
        make_order(("a",), idle=("bc",)).digest(),
        make_order(("a", "b"), idle=("c",)).digest(),
    }

    assert len(digests) == 5


def test_batch_id_is_left_out() -> None:
    """Each rank has a batch id of its own."""
    assert make_order(batch_id="x").digest() == make_order(batch_id="y").digest()
