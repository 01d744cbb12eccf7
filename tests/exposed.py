"""Reading the arrays that a backend hands out, whichever library they are of."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def to_host(handle: Any) -> npt.NDArray[Any]:
    """Copy an exposed array to the host; bfloat16 comes as its uint16 bits."""
    if isinstance(handle, np.ndarray):
        return handle.copy()
    if type(handle).__module__.startswith("torch"):
        import torch

        bits = handle.detach().cpu().clone()
        if bits.dtype == torch.bfloat16:
            return np.asarray(bits.view(torch.int16).numpy().view(np.uint16))
        return np.asarray(bits.numpy())
    return np.asarray(handle.clone().numpy())


def address_of(handle: Any) -> int:
    """First byte of an exposed array."""
    if isinstance(handle, np.ndarray):
        return int(handle.__array_interface__["data"][0])
    return int(handle.data_ptr())


def dtype_of(handle: Any) -> str:
    """Name of an exposed array's element type, without the library's prefix."""
    return str(handle.dtype).rsplit(".", maxsplit=1)[-1]
