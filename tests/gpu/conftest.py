"""The contract suite for these tests, and kernels to run: on the host and on a device."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest
from host_kernels import HostKernels, compile_for_host

from vlbatch.backends.cuda import Kernels, is_available

sys.path.append(str(Path(__file__).parents[1] / "backends"))  # contract.py


@pytest.fixture(scope="session")
def host_kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """Kernels compiled for the host."""
    return HostKernels(compile_for_host(tmp_path_factory.mktemp("kernels")))


@pytest.fixture(scope="session")
def device_kernels() -> Kernels:
    """Kernels for the first device, in the context that array libraries use too."""
    if not is_available():
        pytest.skip("cuda-core is not installed")
    driver = import_module("cuda.bindings.driver")
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:
        pytest.skip(f"no CUDA driver: {error}")
    if status:
        pytest.skip(f"no CUDA device: {status!r}")
    _, context = driver.cuDevicePrimaryCtxRetain(0)
    driver.cuCtxSetCurrent(context)
    return Kernels()


@pytest.fixture(params=["host", pytest.param("device", marks=pytest.mark.gpu)])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The same source, compiled for each."""
    made: Kernels = request.getfixturevalue(f"{request.param}_kernels")
    return made
