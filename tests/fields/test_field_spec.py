"""Declarations: what each constructor makes, and the contradictions that are refused."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from vlbatch.errors import InvalidField, UnknownField
from vlbatch.fields import (
    Field,
    FieldRegistry,
    Kind,
    batch_global,
    cumulative,
    host,
    packed,
    per_draft,
    ragged,
    row,
    row_valued,
)


def nothing(_: object) -> list[int]:
    return []


@pytest.mark.parametrize(
    ("field", "kind", "residency", "per_request"),
    [
        (row("f"), Kind.ROW, "rows", True),
        (ragged("f", 4), Kind.RAGGED, "slots", True),
        (per_draft("f"), Kind.PER_DRAFT, "rows", True),
        (host("f"), Kind.HOST, "slots", True),
        (row_valued("f"), Kind.ROW_VALUED, "rows", True),
        (row_valued("f", whole=True), Kind.ROW_VALUED, "rows", False),
        (cumulative("f", nothing), Kind.CUMULATIVE, "rows", False),
        (packed("f", (8,)), Kind.PACKED, "rows", False),
        (batch_global("f"), Kind.GLOBAL, "rows", False),
    ],
    ids=lambda value: getattr(value, "kind", None) and value.kind.value,
)
def test_constructors(field: Field, kind: Kind, residency: str, per_request: bool) -> None:
    """Each constructor declares its kind, with the residency that suits it."""
    assert (field.kind, field.residency, field.is_per_request) == (kind, residency, per_request)


def test_row_shapes() -> None:
    """A request has the declared shape, per-draft fields k + 1 times."""
    assert row("f", (2, 3)).row_shape(4) == (2, 3)
    assert per_draft("f", (2,)).row_shape(4) == (5, 2)
    assert per_draft("f", (2,)).row_elements(4) == 10
    assert per_draft("f").row_shape(0) == (1,)
    assert row("f").row_elements(4) == 1


def test_defaults() -> None:
    """A default is held in the storage dtype; row numbers default to none."""
    assert row("f", dtype="float16", default=0.5).default_value == np.float16(0.5)
    assert row("f", dtype="bfloat16", default=1).default_value == 0x3F80
    assert row("f", dtype="bool", default=1).default_value.dtype == np.bool_
    assert row_valued("f").default_value == -1


@pytest.mark.parametrize("name", ["", "a b", "1x", "a-b", "a.b"])
def test_names_are_identifiers(name: str) -> None:
    """A field's name can be written in code."""
    with pytest.raises(InvalidField, match="is not an identifier"):
        row(name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": Kind.ROW, "dtype": "int128"}, "has dtype 'int128'; expected one of"),
        ({"kind": Kind.ROW, "dtype": "uint16"}, "has dtype 'uint16'"),
        ({"kind": Kind.ROW, "shape": (3, 0)}, r"has shape \(3, 0\); extents must be > 0"),
        ({"kind": Kind.ROW, "shape": (-1,)}, r"has shape \(-1,\)"),
        ({"kind": Kind.RAGGED}, "needs a width"),
        ({"kind": Kind.ROW_VALUED, "dtype": "uint8"}, "expected a signed integer"),
        ({"kind": Kind.ROW_VALUED, "dtype": "float32"}, "expected a signed integer"),
        ({"kind": Kind.ROW, "default": [1, 2]}, "default of field 'f' must be a scalar"),
        ({"kind": Kind.ROW, "default": 0.5}, "default of field 'f' got a value of dtype float64"),
        ({"kind": Kind.ROW, "dtype": "uint8", "default": -1}, "default of field 'f' got integers"),
        ({"kind": Kind.ROW, "default": "x"}, "default of field 'f' got a value of dtype <U1"),
        ({"kind": Kind.ROW, "residency": "row"}, r"got 'row'; expected one of \('rows', 'slots'\)"),
        ({"kind": Kind.ROW, "layout": "dense"}, "got 'dense'; expected one of"),
        ({"kind": Kind.HOST, "on_preempt": "drop"}, "got 'drop'; expected one of"),
        ({"kind": Kind.ROW, "flat": True}, "is row: it has no flat"),
        ({"kind": Kind.PER_DRAFT, "whole": True}, "is per_draft: it has no whole"),
        (
            {"kind": Kind.GLOBAL, "rebuild": lambda order: order.slots},
            "it has no rebuild",
        ),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], message: str) -> None:
    """A declaration that cannot be met is refused where it is made, naming the field."""
    with pytest.raises(InvalidField, match=f"'f'.*{message}|{message}"):
        Field("f", **settings)


def test_declarations_do_not_change() -> None:
    """A declared field cannot be edited."""
    with pytest.raises(FrozenInstanceError):
        row("f").dtype = "int8"  # type: ignore[misc]  # that it is frozen is what is tested


def test_registry_is_an_immutable_mapping() -> None:
    """A registry keeps the order of declaration and can only be read."""
    registry = FieldRegistry([row("b"), host("a")])

    assert list(registry) == ["b", "a"]
    assert len(registry) == 2
    assert "a" in registry
    assert "c" not in registry
    with pytest.raises(TypeError):
        registry["c"] = row("c")  # type: ignore[index]  # that it cannot be written is what is tested


def test_registry_refusals() -> None:
    """One name is declared once; a name that is not declared is refused, listing those that are."""
    with pytest.raises(InvalidField, match="'a' is declared twice"):
        FieldRegistry([row("a"), host("a")])
    registry = FieldRegistry([row("b"), host("a")])
    for look_up in (registry.__getitem__, registry.find, registry.get):
        with pytest.raises(UnknownField, match=r"no field 'c' .* declared are \['a', 'b'\]"):
            look_up("c")
    with pytest.raises(UnknownField) as caught:
        registry.find("c", "req")
    assert (caught.value.req_id, caught.value.setting) == ("req", "fields")
