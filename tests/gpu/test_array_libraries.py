"""Tensors of torch and Paddle moved by our kernels: compiled for the host, their CPU tensors."""

from __future__ import annotations

from typing import Any

import pytest
from contract import FieldContract

from vlbatch.backends import Backend, make_backend
from vlbatch.backends.cuda import CudaMover, Kernels
from vlbatch.errors import InvalidSetting, MissingDependency


def on_host(name: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A backend for tensors that believes that the host is a device."""
    pytest.importorskip(name.partition("-")[0])
    backend: Any = make_backend(name)
    backend.fused = True
    if name == "torch-tensor":
        backend.device = type(backend.device)("cpu")
        backend._kernels = kernels
        backend.stream = lambda: 0
    else:
        monkeypatch.setattr("vlbatch.backends.paddle_backend.Kernels", lambda: kernels)
        backend._stream = lambda: 0
    return backend


@pytest.fixture(params=["torch-tensor", "paddle-tensor"])
def backend(
    request: pytest.FixtureRequest, host_kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> Backend[Any, Any]:
    made: Backend[Any, Any] = on_host(request.param, host_kernels, monkeypatch)
    return made


class TestFields(FieldContract):
    """Fields of every kind, moved by one launch."""

    def test_rows_move_by_our_kernels(self, all_fields: Any) -> None:
        """The batch did take the fused move."""
        assert isinstance(all_fields.batch._storage._mover, CudaMover)


def test_fused_needs_a_cuda_device() -> None:
    """A fused move on the CPU is refused; without asking for it, torch moves the rows."""
    torch_backend = pytest.importorskip("vlbatch.backends.torch_backend")

    assert not torch_backend.TorchTensorBackend("cpu").fused
    with pytest.raises(InvalidSetting, match=r"got device cpu; expected a CUDA one .*fused"):
        torch_backend.TorchTensorBackend("cpu", fused=True)


def test_kernels_need_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without cuda-bindings the error names the extra that brings it."""
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings.driver", None)
    with pytest.raises(MissingDependency, match=r"install vlbatch\[cuda\]"):
        Kernels()
