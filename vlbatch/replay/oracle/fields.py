"""Which value each request's fields hold, wherever its rows went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class FieldRule:
    """What the oracle has to know of a declared field of one value a request.

    Attributes:
        name: of the field.
        default: value of a request that was given none.
        kept: whether a preempted request finds its value again.
        holds: ``"value"``, or ``"request"`` for a field that holds the row of another request.

    """

    name: str
    default: object = 0
    kept: bool = True
    holds: Literal["value", "request"] = "value"


UNCHECKED = object()
"""Stands for a value about which nothing is said until the next step."""


class OracleFields:
    """Values by request and field; a field that holds a row is kept as the request in that row.

    Attributes:
        ring: a list of rows for the whole batch, kept likewise.

    """

    def __init__(self, rules: list[FieldRule], capacity: int) -> None:
        self._rules = rules
        self._values: dict[str, dict[str, object]] = {}
        self._pointers: dict[str, dict[str, str | None]] = {}  # None: to nobody
        self._loose: set[tuple[str, str]] = set()  # pointers to someone who just left
        self.ring: list[str | None] = [None] * capacity
        self._loose_ring: set[int] = set()

    def enter(self, req_id: str, values: Mapping[str, object]) -> None:
        """Give a new request its values."""
        plain = [rule for rule in self._rules if rule.holds == "value"]
        self._values[req_id] = {rule.name: values.get(rule.name, rule.default) for rule in plain}
        self._pointers[req_id] = {r.name: None for r in self._rules if r.holds == "request"}

    def preempt(self, req_id: str) -> None:
        """Set what a preempted request does not keep to its default."""
        for rule in self._rules:
            if rule.holds == "value" and not rule.kept:
                self._values[req_id][rule.name] = rule.default
        self._detach(req_id)

    def leave(self, req_id: str) -> None:
        """Forget a request."""
        self._detach(req_id)
        del self._values[req_id]
        del self._pointers[req_id]

    def _detach(self, req_id: str) -> None:
        """Its row is nobody's: what pointed there will point to nobody."""
        self._pointers[req_id] = dict.fromkeys(self._pointers[req_id])
        for owner, pointers in self._pointers.items():
            for name, target in pointers.items():
                if target == req_id:
                    pointers[name] = None
                    self._loose.add((owner, name))
        for index, target in enumerate(self.ring):
            if target == req_id:
                self.ring[index] = None
                self._loose_ring.add(index)

    def arranged(self) -> None:
        """A step moved rows: pointers to those who left must be gone."""
        self._loose.clear()
        self._loose_ring.clear()

    def write(self, req_id: str, name: str, value: object) -> None:
        """Take over a value written by the caller."""
        self._values[req_id][name] = value

    def append(self, req_id: str, name: str, value: object) -> None:
        """Take over a value appended to a list."""
        old = self._values[req_id][name]
        self._values[req_id][name] = [*old, value] if isinstance(old, list) else [value]

    def point(self, req_id: str, name: str, target: str) -> None:
        """Take over that a field now holds the row of ``target``."""
        self._pointers[req_id][name] = target
        self._loose.discard((req_id, name))

    def write_ring(self, targets: list[str | None]) -> None:
        """Take over that entry ``i`` of the ring now holds the row of ``targets[i]``."""
        self.ring = list(targets)
        self._loose_ring.clear()

    def expected_ring(self, row_of: Mapping[str, int]) -> list[object]:
        """Values of the ring, with requests in these rows."""
        return [
            UNCHECKED if i in self._loose_ring else -1 if target is None else row_of[target]
            for i, target in enumerate(self.ring)
        ]

    def expected(self, req_id: str, row_of: Mapping[str, int]) -> dict[str, object]:
        """Field -> value of a live request, with requests in these rows."""
        values = dict(self._values[req_id])
        for name, target in self._pointers[req_id].items():
            if (req_id, name) in self._loose:
                values[name] = UNCHECKED
            else:
                values[name] = -1 if target is None else row_of[target]
        return values


def same_value(expected: object, got: object) -> bool:
    """Equality of numbers (floats as float32 would keep them), lists and objects."""
    if expected is UNCHECKED or expected == got:
        return True
    if isinstance(expected, (list, tuple)) and isinstance(got, (list, tuple)):
        return len(expected) == len(got) and all(map(same_value, expected, got))
    if isinstance(expected, float) and isinstance(got, (int, float)):
        return abs(expected - got) <= 1e-6 * max(1.0, abs(expected))
    return False
