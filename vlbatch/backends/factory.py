"""Backends by name, declared once."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from vlbatch.backends.base import Backend
from vlbatch.errors import InvalidSetting, MissingDependency

# name -> (module, class, extra that brings the library)
BACKENDS: dict[str, tuple[str, str, str]] = {
    "numpy": ("vlbatch.backends.host", "NumpyBackend", ""),
    "paddle": ("vlbatch.backends.paddle_backend", "PaddleBackend", "paddle"),
    "paddle-tensor": ("vlbatch.backends.paddle_backend", "PaddleTensorBackend", "paddle"),
    "torch": ("vlbatch.backends.torch_backend", "TorchBackend", "torch"),
    "torch-tensor": ("vlbatch.backends.torch_backend", "TorchTensorBackend", "torch"),
}


# Any: the array types depend on the name, which only the caller knows.
def make_backend(name: str) -> Backend[Any, Any]:
    """Make the backend of this name with its default place.

    Raises:
        InvalidSetting: no such backend.
        MissingDependency: its library is not installed.
    """
    if name not in BACKENDS:
        raise InvalidSetting(f"no backend {name!r}; expected one of {sorted(BACKENDS)}")
    module, cls, extra = BACKENDS[name]
    try:
        backend: Backend[Any, Any] = getattr(import_module(module), cls)()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("vlbatch"):
            raise
        raise MissingDependency(
            f"backend {name!r} needs {error.name!r}; install vlbatch[{extra}]"
        ) from error
    return backend
