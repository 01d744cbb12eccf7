"""Faults planted in the library, one at a time: each is found, at the right line and request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest
from replay_builders import SCENARIOS

import vlbatch.batch.planner as planner_module
import vlbatch.fields.storage as storage_module
from vlbatch import EncoderCache, FeatureStore, InputBatch, PositionRuns, PositionStore, VLBatch
from vlbatch.backends import HostOperations
from vlbatch.batch import Progress, ProposerInputBatch
from vlbatch.cache import Ledger
from vlbatch.features import PlacedItem
from vlbatch.fields import FieldStorage
from vlbatch.fields.derived import DerivedFields
from vlbatch.order import DECODE, EXTEND, BatchOrder
from vlbatch.replay import read_scenario, replay

Patch = Callable[[pytest.MonkeyPatch], None]


def wrapped(owner: Any, name: str, change: Callable[..., Any]) -> Patch:
    """Replace a method by ``change(original, self, *arguments)``."""
    original = getattr(owner, name)

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(owner, name, lambda self, *a, **k: change(original, self, *a, **k))

    return patch


def missing(owner: Any, name: str, result: Any = None) -> Patch:
    """Replace a method by one that does nothing."""
    return wrapped(owner, name, lambda original, self, *a, **k: result)


@dataclass(frozen=True)
class Fault:
    """One planted fault, and where a scenario has to show it.

    Attributes:
        name: what is broken.
        scenario: stem of the file.
        patch: breaks it.
        line: of the first event after which something is wrong.
        req_id: the first request concerned, ``None`` where it is none alone.
        what: beginning of the thing that differs.

    """

    name: str
    scenario: str
    patch: Patch
    line: int
    req_id: str | None
    what: str


# -- chunks and features -------------------------------------------------------------------------
def _rows_one_early(original: Any, item: PlacedItem, start: int, stop: int) -> tuple[int, int]:
    first, last = original(item, start, stop)
    return (first - 1, last - 1) if first else (first, last)


def _features_of_the_other(original: Any, store: FeatureStore, order: BatchOrder, **k: Any) -> Any:
    inputs = original(store, order, **k)
    segments = inputs.segments[::-1]
    return type(inputs)(inputs.tokens, segments, inputs.skipped)


# -- positions -----------------------------------------------------------------------------------
def _positions_from_zero(original: Any, runs: PositionRuns, start: int, stop: int) -> Any:
    return original(runs, 0, stop - start)


def _delta_plus_one(original: Any, store: PositionStore, req_id: str, slot: int) -> None:
    original(store, req_id, slot)
    store._delta_of_slot[slot] += 1


def _delta_of_slot_zero(original: Any, store: PositionStore, req_id: str, slot: int) -> None:
    original(store, req_id, slot)
    store._delta_of_slot[0] = store._delta_of_slot[slot]


def _kv_from_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = cached_property(lambda order: np.maximum(BatchOrder.kept.func(order) - 18, 0))
    broken.__set_name__(BatchOrder, "token_indices")
    monkeypatch.setattr(BatchOrder, "kept", BatchOrder.__dict__["token_indices"], raising=False)
    BatchOrder.kept.func = BatchOrder.__dict__["token_indices"].func  # type: ignore[attr-defined]
    monkeypatch.setattr(BatchOrder, "token_indices", broken)


# -- fields --------------------------------------------------------------------------------------
def _skip_float32(original: Any, host: HostOperations, array: Any, *rest: Any) -> None:
    if array.dtype != np.float32:
        original(host, array, *rest)


def _one_short(original: Any, host: HostOperations, array: Any, widths: Any, *rest: Any) -> None:
    original(host, array, np.maximum(widths - 1, 0), *rest)


def _views_swap(
    original: Any, host: HostOperations, array: Any, axis: int, to: Any, of: Any
) -> None:
    for destination, source in zip(to, of, strict=True):  # reads what was just overwritten
        original(host, array, axis, np.array([destination]), np.array([source]))


def _no_defaults(
    original: Any, storage: FieldStorage[Any, Any], row: int, slot: int, values: Any
) -> None:
    for name, value in values.items():
        residency = storage.registry[name].residency
        storage.write(name, row if residency == "rows" else slot, value)


def _restore_sorted(original: Any, order: BatchOrder, outputs: Any, **k: Any) -> dict[str, Any]:
    return dict(zip(sorted(order.req_ids), outputs, strict=True))


# -- cache ---------------------------------------------------------------------------------------
def _one_reference_a_request(original: Any, cache: EncoderCache, key: Any, reference: Any) -> None:
    for other in cache.references(key):
        if other.req_id == reference.req_id:
            original(cache, key, other)


def _confirm_early(original: Any, store: FeatureStore, req_id: str, computed: int) -> None:
    original(store, req_id, computed + 1)


def _release_optimistically(original: Any, vl: VLBatch[Any], order: BatchOrder, *a: Any) -> None:
    original(vl, order, *a)
    for req_id in order.req_ids:
        vl.features.confirm(req_id, vl.batch.computed_of(req_id))


def _evict_last_first(original: Any, ledger: Ledger, key: Any, rows: int) -> None:
    ledger._idle = dict(reversed(ledger._idle.items()))
    original(ledger, key, rows)


def _keep_old_weights(original: Any, cache: EncoderCache, epoch: int) -> None:
    cache.version += 1


# -- rows and progress ---------------------------------------------------------------------------
def _never_decode(original: Any, *a: Any) -> Any:
    classes = original(*a)
    return np.where(classes == DECODE, EXTEND, classes)


def _unstable(monkeypatch: pytest.MonkeyPatch) -> None:
    original = planner_module.place_rows

    def place_rows(*a: Any, **k: Any) -> Any:
        return original(*a, **{**k, "stable": False})

    monkeypatch.setattr(planner_module, "place_rows", place_rows)


def _add_then_check(original: Any, vl: VLBatch[Any], req_id: str, **k: Any) -> Any:
    vl.batch.add(req_id, prompt_len=k["prompt_len"], fields=k["fields"])
    return original(vl, req_id, **k)


def _count_all_drafts(
    original: Any, progress: Progress, order: BatchOrder, alive: Any, _: Any
) -> None:
    original(progress, order, alive, {})


def _resume_from_zero(
    original: Any, batch: InputBatch[Any], req_id: str, *, computed: int, **values: Any
) -> int:
    return int(original(batch, req_id, computed=0 if computed else 1, **values))


FAULTS = [
    Fault(
        "places of a chunk are one token late",
        "b40-part-of-the-image-a-chunk",
        wrapped(PlacedItem, "places_in", lambda f, item, a, b: f(item, a, b) + 1),
        6, "R", "features (level 0) at token 20",
    ),
    Fault(
        "feature rows of a chunk are one row early",
        "b40-part-of-the-image-a-chunk",
        wrapped(PlacedItem, "rows_in", _rows_one_early),
        8, "R", "features (level 0) at token 25",
    ),
    Fault(
        "features reach the rows in reverse order",
        "b44-ragged-images",
        wrapped(FeatureStore, "gather", _features_of_the_other),
        5, "R1", "features (level 0) at token 2",
    ),
    Fault(
        "the target reads ahead",
        "b05-freed-after-the-last-reader",
        wrapped(VLBatch, "gather", lambda f, vl, order, shift=0: f(vl, order, shift=1)),
        4, "R", "features (level 0) at token 7",
    ),
    Fault(
        "the follower does not read ahead",
        "b05-freed-after-the-last-reader",
        wrapped(VLBatch, "gather", lambda f, vl, order, shift=0: f(vl, order, shift=0)),
        4, "R", "features of the follower (level 0) at token 7",
    ),
    Fault(
        "the whole table of positions serves every chunk",
        "b26-chunks-of-sixteen",
        wrapped(PositionRuns, "positions", _positions_from_zero),
        6, "R", "position of token 16",
    ),
    Fault(
        "the delta is one too large",
        "b28-re-prefill-with-outputs",
        wrapped(PositionStore, "bind", _delta_plus_one),
        3, "R", "event",  # check() sees it first
    ),
    Fault(
        "a newer request overwrites another's delta",
        "b30-each-its-own-delta",
        wrapped(PositionStore, "bind", _delta_of_slot_zero),
        10, "A", "event",
    ),
    Fault(
        "KV slots follow rotary positions",
        "b20-slot-is-no-coordinate",
        _kv_from_positions,
        4, None, "token indices",
    ),
    Fault(
        "float32 fields are left out of moves",
        "b48-swap-twice",
        wrapped(HostOperations, "move", _skip_float32),
        7, "A", "field",
    ),
    Fault(
        "swaps read what they have just written",
        "b48-swap-twice",
        wrapped(HostOperations, "move", _views_swap),
        7, "A", "field",
    ),
    Fault(
        "ragged rows move one element too few",
        "b48-swap-twice",
        wrapped(HostOperations, "move_prefixes", _one_short),
        7, "A", "field",
    ),
    Fault(
        "row numbers are not remapped",
        "b48-swap-twice",
        missing(HostOperations, "remap"),
        7, "A", "field 'peer'",
    ),
    Fault(
        "Python objects stay in their row",
        "b48-swap-twice",
        lambda patch: patch.setattr(storage_module, "move_list", lambda *a: None),
        7, "A", "field 'grammar'",
    ),
    Fault(
        "the draft model's fields do not follow",
        "b48-swap-twice",
        missing(ProposerInputBatch, "follow"),
        7, "A", "field 'draft.",
    ),
    Fault(
        "a new request inherits what was in its row",
        "b50-remove-condense-reorder",
        wrapped(FieldStorage, "initialise", _no_defaults),
        13, "E", "field",
    ),
    Fault(
        "derived fields are not rebuilt",
        "b33-nothing-of-the-last-batch",
        missing(DerivedFields, "write"),
        11, None, "derived field 'query_start'",
    ),
    Fault(
        "outputs are restored in another order",
        "b48-swap-twice",
        wrapped(BatchOrder, "restore", _restore_sorted),
        7, None, "restored outputs",
    ),
    Fault(
        "one reference a request",
        "b01-repeated-image",
        wrapped(EncoderCache, "release", _one_reference_a_request),
        4, None, "cache entry ('X', 0)",
    ),
    Fault(
        "released one token early",
        "b05-freed-after-the-last-reader",
        wrapped(FeatureStore, "confirm", _confirm_early),
        8, None, "cache entry ('X', 0)",
    ),
    Fault(
        "released on optimistic progress",
        "b03-roll-back",
        wrapped(VLBatch, "complete", _release_optimistically),
        4, None, "cache entry ('X', 0)",
    ),
    Fault(
        "an abort keeps its references",
        "b06-abort-gives-back",
        missing(FeatureStore, "release_all"),
        6, None, "cache entry ('X0', 0)",
    ),
    Fault(
        "pinned entries are evicted",
        "b79-cannot-fit",
        missing(Ledger, "pin"),
        16, "R", "event",
    ),
    Fault(
        "the most recently used entry goes first",
        "b79-own-items-survive",
        wrapped(Ledger, "take", _evict_last_first),
        17, None, "entry evicted first",
    ),
    Fault(
        "new weights change nothing",
        "b12-new-weights",
        wrapped(EncoderCache, "set_epoch", _keep_old_weights),
        6, None, "cache entry ('X', 0)",
    ),
    Fault(
        "decodes are taken for later chunks",
        "b38-generated-placeholder",
        wrapped(Progress, "classes", _never_decode),
        6, None, "regions",
    ),
    Fault(
        "relative order is not kept",
        "b50-remove-condense-reorder",
        _unstable,
        18, None, "order of rows",
    ),
    Fault(
        "a refused request has a row",
        "b90-counts-at-the-door",
        wrapped(VLBatch, "add", _add_then_check),
        3, "A", "event",
    ),
    Fault(
        "all drafts count as accepted",
        "b20-slot-is-no-coordinate",
        wrapped(Progress, "advance", _count_all_drafts),
        8, "R", "prompt, computed, confirmed tokens",
    ),
    Fault(
        "a resumed request has other progress",
        "b28-resume-behind-the-image",
        wrapped(InputBatch, "resume", _resume_from_zero),
        8, "R", "prompt, computed, confirmed tokens",
    ),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first event after which something is wrong is named, and the request concerned."""
    scenario = read_scenario(SCENARIOS / f"{fault.scenario}.jsonl")
    assert replay(scenario) is None
    fault.patch(monkeypatch)

    found = replay(scenario)

    assert found is not None
    assert (found.line, found.req_id) == (fault.line, fault.req_id), str(found)
    assert found.what.startswith(fault.what), str(found)
