"""What is done to arrays of a library that is known only when they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vlbatch.backends.dtypes import HostArray


# Any: arrays of a library that is known when they arrive
def join_arrays(arrays: Sequence[Any]) -> Any:
    """Concatenate arrays of one library along axis 0, on their device; a single one as it is.

    Args:
        arrays: at least one; numpy arrays, Paddle or torch tensors.
    """
    if len(arrays) == 1:
        return arrays[0]
    library = type(arrays[0]).__module__.partition(".")[0]
    if library == "paddle":
        import paddle

        return paddle.concat(list(arrays))
    if library == "torch":
        import torch

        return torch.cat(list(arrays))
    return np.concatenate(arrays)


# Any: see join_arrays
def copy_array(array: Any) -> Any:
    """Copy an array or tensor where it is."""
    return array.clone() if hasattr(array, "clone") else array.copy()


# Any: see join_arrays
def array_like(like: Any, values: HostArray) -> Any:
    """Host values as an array of another's library, dtype and device."""
    library = type(like).__module__.partition(".")[0]
    if library == "paddle":
        import paddle

        return paddle.to_tensor(values, dtype=like.dtype, place=like.place)
    if library == "torch":
        import torch

        return torch.as_tensor(values, dtype=like.dtype, device=like.device)
    return values.astype(getattr(like, "dtype", values.dtype))


# Any: see join_arrays
def host_values(array: Any) -> HostArray:
    """Values in host memory: of an array, a list, or a tensor of a device, which is waited for."""
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array)
