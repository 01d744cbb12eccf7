"""The contract suite, on every backend that is installed (see the fixture ``backend``)."""

from __future__ import annotations

from contract import ArrayContract, FieldContract


class TestArrays(ArrayContract):
    """Array operations of each backend."""


class TestFields(FieldContract):
    """Fields of every kind on each backend."""
