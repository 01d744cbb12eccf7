"""``kernels.cu`` compiled for the host, behind the interface of ``Kernels``.

The same source and the same Python run without a device: memory of the host stands for the
device's, threads for threads, and uploads arrive at once.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vlbatch.backends.cuda
from vlbatch.backends.cuda import Kernels

HERE = Path(__file__).parent
SOURCE = Path(vlbatch.backends.cuda.__file__).parent


def compile_for_host(folder: Path) -> Path:
    """Compile with checks of alignment; skips the test without a C++20 compiler."""
    library = folder / "kernels.so"
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    flags = "-std=c++20 -O1 -shared -fPIC -pthread -fno-strict-aliasing -Wno-unknown-pragmas"
    checks = "-fsanitize=alignment,shift,signed-integer-overflow -fno-sanitize-recover=all"
    command = [compiler, *flags.split(), *checks.split(), "-I", str(SOURCE)]
    done = subprocess.run(
        [*command, str(HERE / "host_device.cpp"), "-o", str(library)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode and "<barrier>" in done.stderr:
        pytest.skip("g++ knows no C++20")
    assert done.returncode == 0, done.stderr
    return library


class HostKernels(Kernels):
    """Kernels of the host."""

    def __init__(self, library: Path) -> None:
        self.max_shared_bytes = 227 * 1024
        self._library = ctypes.CDLL(str(library))
        self._memory: dict[int, Any] = {}
        self._numbers = itertools.count()

    def call(self, name: str, *arguments: Any) -> Any:
        if name in ("cuMemAlloc", "cuMemHostAlloc"):
            num_bytes = arguments[0]
            block = np.full(num_bytes + 256, 0xA5, dtype=np.uint8)
            address = -(-block.ctypes.data // 256) * 256
            self._memory[address] = block
            return address
        if name in ("cuMemFree", "cuMemFreeHost"):
            del self._memory[arguments[0]]
        elif name == "cuMemsetD8":
            ctypes.memset(*arguments)
        elif name.startswith("cuMemcpy"):
            ctypes.memmove(*arguments[:3])
        elif name == "cuEventCreate":
            return next(self._numbers)
        else:
            assert name.startswith("cuEvent"), name
        return None

    def launch(self, name: str, *arguments: np.ndarray[Any, Any]) -> Callable[..., None]:  # type: ignore[override]  # what is used of a Launch
        pointers = (ctypes.c_void_p * len(arguments))(*[a.ctypes.data for a in arguments])

        def run(num_blocks: int, shared_bytes: int, stream: int) -> None:
            assert arguments
            done = self._library.launch(name.encode(), num_blocks, shared_bytes, pointers)
            assert done == 0, (name, done)

        return run
