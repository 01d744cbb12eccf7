"""What is done to arrays of any library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from exposed import dtype_of, to_host

from vlbatch.backends.arrays import array_like, copy_array, host_values, join_arrays

MAKERS = {"numpy": "asarray", "paddle": "to_tensor", "torch": "from_numpy"}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Any:
    """Numpy array -> array of one library; skips where it is not installed."""
    return getattr(pytest.importorskip(request.param), MAKERS[request.param])


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
def test_join(make: Any, dtype: str) -> None:
    """Arrays follow each other along the first axis, in their library and dtype."""
    parts = [np.arange(6).reshape(3, 2), np.arange(2).reshape(1, 2), np.zeros((0, 2))]
    arrays = [make(part.astype(dtype)) for part in parts]
    got = join_arrays(arrays)
    assert type(got) is type(arrays[0])
    assert dtype_of(got) == dtype
    np.testing.assert_array_equal(to_host(got), np.concatenate(parts).astype(dtype))


def test_a_single_array_is_given_as_it_is(make: Any) -> None:
    """One array is not copied."""
    array = make(np.ones((2, 3)))
    assert join_arrays([array]) is array


def test_the_result_is_new(make: Any) -> None:
    """Several arrays are copied, and stay as they were."""
    arrays = [make(np.zeros((1, 2))), make(np.ones((1, 2)))]
    got = join_arrays(arrays)
    got[0] = 7
    assert to_host(arrays[0]).tolist() == [[0, 0]]


def test_values_of_a_device(make: Any) -> None:
    """Values come to host memory from wherever they are, in their dtype."""
    array = make(np.array([3, 1], dtype=np.int32))
    for each in (array, *([array.to("cuda")] if _has_cuda(array) else [])):
        got = host_values(each)
        assert type(got) is np.ndarray
        assert (got.dtype, got.tolist()) == (np.dtype("int32"), [3, 1])
    assert host_values([3, 1]).tolist() == [3, 1]


def _has_cuda(array: Any) -> bool:
    if type(array).__module__ != "torch":
        return False
    import torch

    return torch.cuda.is_available()


def test_values_like_an_array(make: Any) -> None:
    """Host values become an array of the other's library and dtype."""
    like = make(np.zeros(2, dtype=np.int32))
    got = array_like(like, np.array([[5, 6]]))

    assert type(got) is type(like)
    assert dtype_of(got) == "int32"
    assert to_host(got).tolist() == [[5, 6]]


def test_a_copy_is_apart(make: Any) -> None:
    """A copy keeps its values when the original is written."""
    array = make(np.ones((2, 2), dtype=np.float32))
    copy = copy_array(array)
    array[0] = 7

    assert type(copy) is type(array)
    assert to_host(copy).tolist() == [[1, 1], [1, 1]]
