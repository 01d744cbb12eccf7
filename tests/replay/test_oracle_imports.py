"""The oracle shares nothing with what it checks."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import vlbatch.replay.oracle

FOLDER = Path(vlbatch.replay.oracle.__file__).parent
FILES = sorted(FOLDER.glob("*.py"))
ALLOWED = {"__future__", "collections.abc", "dataclasses", "typing"}


def imported(tree: ast.AST) -> set[str]:
    """Modules that a file imports, wherever it does."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return names


def foreign(source: str) -> set[str]:
    """Modules outside the oracle and the few allowed ones that some source imports."""
    return {
        name
        for name in imported(ast.parse(source))
        if name not in ALLOWED and not name.startswith("vlbatch.replay.oracle.")
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_imports_nothing_of_the_library(path: Path) -> None:
    """A file of the oracle imports the oracle and plain parts of the standard library."""
    own = {f"vlbatch.replay.oracle.{file.stem}" for file in FILES} | {"vlbatch.replay.oracle"}

    assert foreign(path.read_text()) <= own
    assert "import_module" not in path.read_text()
    assert "__import__" not in path.read_text()


@pytest.mark.parametrize(
    "line", ["import numpy", "from vlbatch import Item", "from vlbatch.replay.items import x"]
)
def test_the_test_sees_an_import(line: str) -> None:
    """An import of the library or of numpy would be found, also inside a function."""
    assert foreign(f"def f():\n    {line}\n") != set()


PROGRAM = """
import importlib.util, sys, types

sys.modules["numpy"] = None  # an import of it raises
for name in ("vlbatch", "vlbatch.replay"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
spec = importlib.util.spec_from_file_location(
    "vlbatch.replay.oracle", FOLDER + "/__init__.py", submodule_search_locations=[FOLDER]
)
oracle = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(oracle)

item = oracle.OracleItem("X", "image", 2, 4, (1, 2, 2))
model = oracle.Oracle(oracle.OracleSettings())
model.add("A", 7, [item])
seen = oracle.ObservedStep(order=["A"], regions=(0, 0, 1), encoded=[("X", 0)])
print([finding.what for finding in model.step({"A": 7}, seen)][0])
"""


def test_runs_without_the_library() -> None:
    """The oracle works where neither the library nor numpy can be imported."""
    program = f"FOLDER = {str(FOLDER)!r}\n{PROGRAM}"

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert done.stdout == "number of positions\n", done.stderr
