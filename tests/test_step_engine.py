"""VLBatch of an engine that keeps progress itself and chooses the grouping of rows by step."""

from __future__ import annotations

import numpy as np
import pytest
from naive_media import item
from vl_batches import Batch, begun, delivered, make_batch, refused, run

from vlbatch.errors import InvalidSchedule
from vlbatch.order import BatchOrder

FIRST, SECOND = item(2, 4, "X", grid=(1, 2, 2)), item(8, 3, "Y", grid=(1, 1, 3))


def set_progress(vl: Batch, **counts: tuple[int, int]) -> None:
    """Hand over prompt length and computed tokens of each request, by row."""
    rows = [counts.get(req_id or "", (0, 0)) for req_id in vl.batch.rows]
    prompt_lens, computed = np.array(rows, dtype=np.int64).T
    vl.set_progress(prompt_lens, computed)


def step(vl: Batch, **scheduled: int) -> BatchOrder:
    """A step that is not completed: the engine counts it."""
    return vl.arrange(begun(vl, **scheduled))


def num_held(vl: Batch) -> int:
    """References to entries of the cache."""
    cache = vl.features.cache
    return sum(len(cache.references(key)) for key in cache.present())


def test_items_behind_progress_are_released() -> None:
    """Progress that the engine reports releases the items behind it, and no others."""
    vl = make_batch()
    vl.add("a", prompt_len=16, items=[FIRST, SECOND])
    step(vl, a=16)
    assert vl.features.holding() == ("a",)
    for computed, references in ((5, 2), (6, 1), (10, 1), (11, 0)):
        set_progress(vl, a=(16, computed))
        assert num_held(vl) == references
        vl.check()
    assert vl.features.holding() == ()
    assert vl.batch.computed_of("a") == 11
    assert vl.features.cache.counters.encoded == 2


def test_progress_of_one_request_leaves_the_others() -> None:
    """Requests that share an item each hold it until their own progress passes it."""
    vl = make_batch()
    for req_id in "ab":
        vl.add(req_id, prompt_len=16, items=[FIRST])
    step(vl, a=16, b=16)
    set_progress(vl, a=(16, 16), b=(16, 3))
    assert vl.features.holding() == ("b",)
    vl.remove("a")
    set_progress(vl, b=(16, 6))  # the hole is skipped
    assert vl.features.holding() == ()
    vl.check()


def test_going_back_encodes_again() -> None:
    """After a roll back behind a released and evicted item it is encoded and delivered again."""
    vl = make_batch(max_rows=7)
    vl.add("a", prompt_len=16, items=[FIRST, SECOND])
    step(vl, a=16)
    set_progress(vl, a=(16, 16))
    vl.features.cache.drop("X")
    set_progress(vl, a=(16, 3))
    order = step(vl, a=13)
    assert vl.features.cache.counters.encoded == 3
    assert delivered(order, vl.gather(order)) == {"a": run("X", 3, 1, 3) + run("Y", 8, 0, 3)}
    assert order.computed.tolist() == [3]
    set_progress(vl, a=(16, 16))
    assert vl.features.holding() == ()
    vl.check()


def test_going_back_to_what_is_cached() -> None:
    """A roll back behind an item that is still cached encodes nothing."""
    vl = make_batch()
    vl.add("a", prompt_len=16, items=[FIRST])
    step(vl, a=16)
    set_progress(vl, a=(16, 16))
    set_progress(vl, a=(16, 0))
    order = step(vl, a=16)
    assert vl.features.cache.counters.encoded == 1
    assert delivered(order, vl.gather(order)) == {"a": run("X", 2, 0, 4)}


def test_a_longer_prompt_is_prefill_again() -> None:
    """A prompt that the engine lengthened by its outputs is classified by the new length."""
    vl = make_batch()
    vl.add("a", prompt_len=8)
    step(vl, a=8)
    set_progress(vl, a=(8, 8))
    assert step(vl, a=1).regions.decode == 1
    set_progress(vl, a=(12, 4))
    order = step(vl, a=8)
    assert order.regions == (0, 1, 0)
    assert vl.positions_of(order)[0].tolist() == list(range(4, 12))


def test_refused_progress() -> None:
    """Counts out of range are refused by name, and nothing was changed or released."""
    vl = make_batch()
    for req_id in "ab":
        vl.add(req_id, prompt_len=16, items=[FIRST])
    step(vl, a=16, b=16)
    for bad in ((16, 65), (0, 0), (16, -1), (65, 0)):
        with refused(vl, InvalidSchedule, req_id="b"):
            set_progress(vl, a=(16, 16), b=bad)


@pytest.mark.parametrize(
    ("policy", "rows"),
    [
        (None, ("d", "e", "p")),  # that of the batch: split
        ("split", ("d", "e", "p")),
        ("two", ("d", "p", "e")),
        ("arrival", ("p", "d", "e")),
    ],
)
def test_the_policy_of_a_step(policy: object, rows: tuple[str, ...]) -> None:
    """A step may be grouped otherwise than the batch; the next one is not affected."""
    vl = make_batch(policy="split")
    for req_id in "pde":  # prefill, extend, decode
        vl.add(req_id, prompt_len=8)
    set_progress(vl, p=(8, 0), e=(8, 4), d=(8, 8))
    order = vl.arrange(begun(vl, p=8, e=4, d=1), policy=policy)  # type: ignore[arg-type]
    assert order.req_ids == rows
    assert order.policy == (policy or "split")
    assert vl.batch.rows == rows
    assert vl.batch.policy == "split"
    assert step(vl, p=8, e=4, d=1).req_ids == ("d", "e", "p")
    vl.check()
