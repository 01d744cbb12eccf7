"""Compiling ``kernels.cu``, launching its kernels, and the memory that they read records from."""

from __future__ import annotations

import ctypes
import weakref
from importlib import import_module, resources
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from vlbatch.backends.cuda.records import RECORD_WORDS, SHORT_WORDS
from vlbatch.backends.dtypes import HostArray
from vlbatch.errors import InvariantBroken, MissingDependency

_THREADS = 256


def is_available() -> bool:
    """Whether the packages that compile and launch kernels are installed."""
    return find_spec("cuda") is not None and all(
        find_spec(name) is not None for name in ("cuda.core", "cuda.bindings")
    )


class Kernels:
    """The kernels, compiled for the current device and loaded into the current context.

    Args:
        source: CUDA C++ of other kernels than those of ``kernels.cu``.

    Attributes:
        max_shared_bytes: most shared memory of a block.

    Raises:
        MissingDependency: a package is not installed.
        InvariantBroken: a call of the driver failed.
    """

    def __init__(self, source: str | None = None) -> None:
        try:
            self._driver = import_module("cuda.bindings.driver")
            core = import_module("cuda.core")
        except ModuleNotFoundError as error:
            raise MissingDependency(
                f"CUDA kernels need {error.name!r}; install vlbatch[cuda]"
            ) from error
        attribute = self._driver.CUdevice_attribute
        major, minor, self.max_shared_bytes = (
            self.call("cuDeviceGetAttribute", wanted, self.call("cuCtxGetDevice"))
            for wanted in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )
        )
        if source is None:
            source = resources.files(__package__).joinpath("kernels.cu").read_text()
        options = core.ProgramOptions(
            std="c++17",
            arch=f"sm_{major}{minor}",
            define_macro=[("ARGUMENT_WORDS", str(RECORD_WORDS)), ("SHORT_WORDS", str(SHORT_WORDS))],
        )
        code = core.Program(source, "c++", options).compile("cubin").code
        self._module = self.call("cuModuleLoadData", code)

    def call(self, name: str, *arguments: object) -> Any:  # Any: cuda.bindings carries no types
        """Call a function of the driver and return its result, if it has one.

        Raises:
            InvariantBroken: it failed; an earlier launch may be the cause.
        """
        status, *results = getattr(self._driver, name)(*arguments)
        if status:
            raise InvariantBroken(f"{name} failed with {status!r}")
        return results[0] if results else None

    def launch(self, name: str, *arguments: HostArray) -> Launch:
        """Prepare launches of a kernel; ``arguments`` hold the bytes of one argument each.

        Raises:
            InvariantBroken: a call of the driver failed.
        """
        function = self.call("cuModuleGetFunction", self._module, name.encode())
        most_shared = self._driver.CUfunction_attribute
        self.call(
            "cuFuncSetAttribute",
            function,
            most_shared.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            self.max_shared_bytes,
        )
        return Launch(self._driver.cuLaunchKernel, function, arguments)

    def allocate(self, num_bytes: int) -> DeviceMemory:
        """Allocate device memory.

        Raises:
            InvariantBroken: a call of the driver failed.
        """
        return DeviceMemory(self, num_bytes)

    def ring(self, num_bytes: int, depth: int) -> PinnedRing:
        """Allocate pinned memory for ``depth`` uploads in flight of at most ``num_bytes`` each.

        Raises:
            InvariantBroken: a call of the driver failed.
        """
        return PinnedRing(self, num_bytes, depth)


class Launch:
    """Launches of one kernel; what ``arguments`` hold is copied at each call."""

    # Any: cuda.bindings carries no types
    def __init__(self, cu_launch_kernel: Any, function: Any, arguments: tuple[HostArray, ...]):
        self._cu_launch_kernel = cu_launch_kernel
        self._function = function
        self._arguments = arguments
        self._pointers = np.array([a.ctypes.data for a in arguments], dtype=np.uint64)
        self._address = int(self._pointers.ctypes.data) if arguments else 0

    def __call__(self, num_blocks: int, shared_bytes: int, stream: int) -> None:
        """Launch on a stream; returns before the kernel ends.

        Raises:
            InvariantBroken: the launch failed; an earlier one may be the cause.
        """
        (status,) = self._cu_launch_kernel(
            self._function, num_blocks, 1, 1, _THREADS, 1, 1, shared_bytes, stream,
            self._address, 0,
        )  # fmt: skip
        if status:
            raise InvariantBroken(f"cuLaunchKernel failed with {status!r}")


class DeviceMemory:
    """Zeroed device memory, freed with this object; ``address`` is its first byte."""

    def __init__(self, kernels: Kernels, num_bytes: int) -> None:
        pointer = kernels.call("cuMemAlloc", max(num_bytes, 1))
        kernels.call("cuMemsetD8", pointer, 0, max(num_bytes, 1))
        self.address = int(pointer)
        self._kernels = kernels
        weakref.finalize(self, kernels.call, "cuMemFree", pointer).atexit = False

    def fill(self, values: HostArray) -> None:
        """Copy host values to its start and wait for it."""
        self._kernels.call("cuMemcpyHtoD", self.address, values.ctypes.data, values.nbytes)


class PinnedRing:
    """Pinned memory from which records are uploaded without waiting for them to arrive.

    Each upload takes the next of ``depth`` slots; a slot is rewritten only after its last upload
    has been done (an event a slot), so up to ``depth`` steps can be in flight.
    """

    def __init__(self, kernels: Kernels, num_bytes: int, depth: int) -> None:
        self._kernels = kernels
        self._slots: list[npt.NDArray[np.int32]] = []
        self._events = []
        self._is_in_flight = [False] * depth
        self._next = 0
        for _ in range(depth):
            pointer = kernels.call("cuMemHostAlloc", num_bytes, 0)
            weakref.finalize(self, kernels.call, "cuMemFreeHost", pointer).atexit = False
            memory = (ctypes.c_int32 * (num_bytes // 4)).from_address(int(pointer))
            self._slots.append(np.frombuffer(memoryview(memory), dtype=np.int32))
            event = kernels.call("cuEventCreate", 2)  # CU_EVENT_DISABLE_TIMING
            weakref.finalize(self, kernels.call, "cuEventDestroy", event).atexit = False
            self._events.append(event)

    def slot(self) -> npt.NDArray[np.int32]:
        """Int32 words of the slot that the next ``upload`` sends."""
        if self._is_in_flight[self._next]:
            self._kernels.call("cuEventSynchronize", self._events[self._next])
            self._is_in_flight[self._next] = False
        return self._slots[self._next]

    def upload(self, address: int, num_words: int, stream: int) -> None:
        """Copy the slot's first words to the device, in stream order."""
        source = self._slots[self._next].ctypes.data
        self._kernels.call("cuMemcpyHtoDAsync", address, source, 4 * num_words, stream)
        self._kernels.call("cuEventRecord", self._events[self._next], stream)
        self._is_in_flight[self._next] = True
        self._next = (self._next + 1) % len(self._slots)
