"""The core imports no tensor framework, and no other optional package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

OPTIONAL = "paddle torch paddleformers transformers av tokenizers safetensors jax tensorflow"

IMPORT_ALL = """
import importlib, pkgutil, sys

package, apart, adapters, optional = (arg.split() for arg in sys.argv[1:])

def import_core(name):
    if name in apart or name.rpartition(".")[2].startswith(tuple(adapters)):
        return
    module = importlib.import_module(name)
    print("imported", name)
    for info in pkgutil.iter_modules(getattr(module, "__path__", [])):
        import_core(f"{name}.{info.name}")

import_core(*package)
print("found", *(name for name in optional if name in sys.modules))
"""

APART = "vlbatch.runner vlbatch.bench vlbatch.__main__"
"""What is not core, with all below it."""

ADAPTERS = "paddle_ torch_"
"""How the modules of other packages begin that need one framework, and are imported on demand."""


def import_core(package: str, path: Path, optional: str = OPTIONAL) -> tuple[list[str], list[str]]:
    """Import every core module in a fresh process; returns them, and which optional ones came."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, package, APART, ADAPTERS, optional],
        env={"PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    *imported, found = done.stdout.splitlines()
    return [line.split()[1] for line in imported], found.split()[1:]


def test_core_imports_no_framework() -> None:
    """Importing vlbatch and every core module loads no optional package."""
    imported, found = import_core("vlbatch", ROOT)

    assert found == []
    assert {"vlbatch", "vlbatch.backends.host", "vlbatch.batch.input_batch"} <= set(imported)
    assert {"vlbatch.order.moves", "vlbatch.fields.storage", "vlbatch.step"} <= set(imported)


def test_importing_vlbatch_alone() -> None:
    """``import vlbatch`` by itself loads no optional package, and not the runner."""
    code = "import sys, vlbatch; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    loaded = set(done.stdout.split())

    assert "vlbatch" in loaded
    assert not loaded & {*OPTIONAL.split(), "vlbatch.runner"}


def test_the_check_can_fail(tmp_path: Path) -> None:
    """A package whose core imports a framework, deep inside a function's module, is found out."""
    (tmp_path / "fakeframework.py").write_text("")
    package = tmp_path / "culprit"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "core.py").write_text("from fakeframework import *\n")

    imported, found = import_core("culprit", tmp_path, "fakeframework torch")
    assert imported == ["culprit", "culprit.core"]
    assert found == ["fakeframework"]
