"""Settings that cannot work, and invariants that were broken."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
from small_batches import add_all, make_batch, step

from vlbatch import Backend, InputBatch
from vlbatch.errors import InvalidField, InvalidSetting, InvariantBroken
from vlbatch.fields import ragged, row

AnyBackend = Backend[Any, Any]


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("capacity", 0, "got 0; expected >= 1"),
        ("capacity", -3, "got -3; expected >= 1"),
        ("max_model_len", 0, "got 0; expected >= 1"),
        ("num_drafts", -1, "got -1; expected >= 0"),
        ("policy", "decode-first", "got 'decode-first'; expected one of"),
    ],
)
def test_settings_out_of_range(setting: str, value: Any, message: str) -> None:
    """A batch that could never work is refused when it is made, naming the setting."""
    with pytest.raises(InvalidSetting, match=message) as caught:
        make_batch(**{setting: value})
    assert caught.value.setting == setting


def test_slot_of_row_is_taken() -> None:
    """The one field that every batch has cannot be declared again."""
    with pytest.raises(InvalidField, match="'slot_of_row' is declared twice"):
        make_batch(row("slot_of_row"))


Corruption = tuple[Callable[[], object], str]


def corruptions(batch: InputBatch[Any]) -> dict[str, Corruption]:
    """Ways to break a batch behind its back, and what ``check`` has to say."""
    table, progress = batch._table, batch.progress

    def put(array: Any, index: Any, value: object) -> Callable[[], object]:
        return lambda: operator.setitem(array, index, value)

    return {
        "two requests in a slot": (lambda: table.slots.update(b=0), "a slot is shared"),
        "another name": (put(table._req_ids, 0, "b"), "slot 0 says row 0 and request 'b'"),
        "row not in use": (lambda: setattr(table, "num_rows", 1), "rows in use are 1"),
        "row without slot": (put(table.slot_of_row, 0, 3), "row 0 says slot 3"),
        "free but taken": (put(table.admission, 0, -1), "admission rank -1"),
        "lost request": (lambda: table.slots.pop("b"), r"1 requests, but rows \[0, 1\] have"),
        "ghost row": (put(table.slot_of_row, 3, 2), r"rows \[0, 1, 3\] have a slot"),
        "ghost slot": (put(table.row_of_slot, 2, 3), r"slots \[0, 1, 2\] a row"),
        "taken by nobody": (put(table.admission, 3, 9), "2 requests, 2 slots with a name, 3 taken"),
        "confirmed ahead": (put(progress.confirmed, 1, 7), "confirmed 7"),
        "beyond the model": (put(progress.computed, 0, 33), "computed 33"),
        "live and preempted": (put(batch._preempted, "a", 0), r"live and preempted .*'a'"),
        "dirty ragged row": (put(batch["t"], (2, 1), 5), "'t' at index 2 .* length 0"),
    }


@pytest.mark.parametrize("name", list(corruptions(make_batch(ragged("t", 4)))))
def test_check_names_what_is_broken(name: str) -> None:
    """Each invariant that does not hold is reported with the ids and numbers of it."""
    batch = make_batch(ragged("t", 4))
    add_all(batch, a=3, b=3)
    step(batch, a=1, b=1)
    batch.check()
    corrupt, message = corruptions(batch)[name]
    corrupt()
    with pytest.raises(InvariantBroken, match=message):
        batch.check()
