"""The table of FastDeploy's faults is complete, and what it names exists."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "fastdeploy-faults.md"
SERIES = {"I": 27, "R": 9, "M": 10, "V": 20}
IDS = [f"{letter}{number + 1}" for letter, count in SERIES.items() for number in range(count)]


def lines() -> list[tuple[str, str, str]]:
    """Id, description and test or reason of each line of the table."""
    found = []
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if re.fullmatch(r"[A-Z]+\d+", cells[0]):
            assert len(cells) == 3, line
            found.append((cells[0], cells[1], cells[2]))
    return found


@cache
def functions_of(path: Path) -> dict[str, str]:
    """Test functions of a file, and of its classes, with their docstrings."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        functions = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        for each in functions:
            if isinstance(each, ast.FunctionDef) and each.name.startswith("test_"):
                found[prefix + each.name] = ast.get_docstring(each) or ""
    return found


def references(cell: str) -> list[tuple[Path, str]]:
    """File and name of each test of a line."""
    return [
        (ROOT / path, name)
        for path, name in re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", cell)
    ]  # fmt: skip


def test_every_fault_is_there_once() -> None:
    """The table has one line for each fault of the four series, and no other line."""
    assert Counter(fault for fault, _, _ in lines()) == Counter(IDS)


@pytest.mark.parametrize(("fault", "what", "cell"), lines(), ids=[fault for fault, _, _ in lines()])
def test_every_line_has_a_test_or_a_reason(fault: str, what: str, cell: str) -> None:
    """A line says what happens, and names tests that exist and cite it, or says why none can."""
    assert len(what.split()) > 3
    found = references(cell)
    assert "::" not in re.sub(r"`tests/[\w/]+\.py::[\w:]+`", "", cell), "an unreadable reference"
    if not found:
        assert len(cell.split()) > 5, f"{fault} has neither a test nor a reason"
    for path, name in found:
        assert path.is_file(), path
        assert name in functions_of(path), f"{path.name} has no {name}"
        assert re.search(rf"\b{fault}\b", functions_of(path)[name]), f"{name} does not cite {fault}"


def test_every_fault_test_is_in_the_table() -> None:
    """A test of a fault that the table does not name is not shown to readers."""
    named = {(path.name, name) for _, _, cell in lines() for path, name in references(cell)}
    written = {
        (path.name, name)
        for series in ("batch", "reset", "proposer", "features")
        for path in [Path(__file__).with_name(f"test_fastdeploy_fault_{series}.py")]
        for name in functions_of(path)
    }

    assert written == named
