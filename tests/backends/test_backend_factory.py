"""Backends by name."""

from __future__ import annotations

import sys

import pytest

from vlbatch import make_backend
from vlbatch.backends import BACKENDS
from vlbatch.errors import InvalidSetting, MissingDependency


@pytest.mark.parametrize("name", BACKENDS)
def test_each_name_makes_its_backend(name: str) -> None:
    """A backend says by which name it was made; skipped, with all its tests, where it cannot be."""
    try:
        assert make_backend(name).name == name
    except MissingDependency as error:
        pytest.skip(f"no test of this backend is run: {error}")


def test_unknown_name() -> None:
    """A name that is not declared is refused, naming those that are."""
    with pytest.raises(InvalidSetting, match=r"no backend 'jax'; expected one of .*'numpy'"):
        make_backend("jax")


@pytest.mark.parametrize("name", [n for n, (_, _, extra) in BACKENDS.items() if extra])
def test_missing_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is not installed is named, with the extra that brings it."""
    module, _, extra = BACKENDS[name]
    library = "torch" if extra == "torch" else "paddle"
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        MissingDependency, match=rf"needs '{library}'.*; install vlbatch\[{extra}\]"
    ):
        make_backend(name)


def test_a_broken_install_is_not_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the library's own that is missing is reported as it is."""
    monkeypatch.setitem(BACKENDS, "broken", ("vlbatch.backends.no_such", "X", "paddle"))
    with pytest.raises(ModuleNotFoundError, match="no_such"):
        make_backend("broken")
