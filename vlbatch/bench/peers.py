"""The methods that engines use today, written from their descriptions.

Each holds the same per-request fields and has ``step(decode)``: bring the requests for which
``decode`` is true in front of the others, in every field.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vlbatch.bench.workload import PROMPT_LEN, Workload

Bools = npt.NDArray[np.bool_]


class RowMethod(Protocol):
    """One way to keep rows in order."""

    @property
    def rows(self) -> list[int]:
        """Row -> request."""
        ...

    def step(self, decode: Bools) -> None:
        """Order the rows for a step; ``decode`` is by request."""
        ...


class PairwiseSwaps:
    """FastDeploy: two pointers meet, each pair is swapped in every tensor through clones.

    The class of a row is read off the device, one element at a time.
    """

    # Any: paddle.Tensor or torch.Tensor, which have these operations in common
    def __init__(self, work: Workload, make: Callable[[npt.NDArray[Any]], Any]) -> None:
        self.rows = list(range(work.num_reqs))
        self._tensors = [make(work.array(f)) for f in work.row_fields()]
        self._make = make

    def step(self, decode: Bools) -> None:
        """Swap until decodes are in front."""
        mask = self._make(decode[self.rows])
        left, right = 0, len(self.rows) - 1
        while left < right:
            if bool(mask[left]):
                left += 1
            elif not bool(mask[right]):
                right -= 1
            else:
                self._swap(left, right)
                left += 1
                right -= 1

    def _swap(self, i: int, j: int) -> None:
        for tensor in self._tensors:
            first = tensor[i].clone()
            tensor[i] = tensor[j].clone()
            tensor[j] = first
        self.rows[i], self.rows[j] = self.rows[j], self.rows[i]


class CycleSwaps:
    """vLLM V1: numpy rows; misplaced rows are brought home by cycles of swaps.

    A swap exchanges every number, small rows whole, and of wide rows the active prefix through
    a copy.
    """

    def __init__(self, work: Workload) -> None:
        self.rows = list(range(work.num_reqs))
        fields = work.row_fields()
        small = [work.array(f) for f in fields if not work.is_wide(f)]
        # a row of one number is swapped as a number: as a row it takes three times as long
        self._small = [a.reshape(-1) if a[0].size == 1 else a for a in small]
        self._wide = [work.array(f) for f in fields if work.is_wide(f)]

    def step(self, decode: Bools) -> None:
        """Find misplaced rows, then swap along each cycle."""
        region = np.where(decode[self.rows], 0, 1)
        target = np.sort(region)
        misplaced = np.flatnonzero(region != target)
        order = np.argsort(region[misplaced], kind="stable")
        source_to_place = dict(zip(misplaced[order].tolist(), misplaced.tolist(), strict=True))
        for source in list(source_to_place):
            place = source_to_place[source]
            while source != place:
                self._swap(source, place)
                following = source_to_place.get(place, place)
                source_to_place[place] = place
                place = following
            source_to_place[source] = place

    def _swap(self, i: int, j: int) -> None:
        for array in self._small:
            if array.ndim == 1:
                array[i], array[j] = array[j], array[i]
            else:
                array[[i, j]] = array[[j, i]]
        for array in self._wide:
            first = array[i, :PROMPT_LEN].copy()
            array[i, :PROMPT_LEN] = array[j, :PROMPT_LEN]
            array[j, :PROMPT_LEN] = first
        self.rows[i], self.rows[j] = self.rows[j], self.rows[i]


class SortGather:
    """vLLM V2: state stays in slots; each step sorts the ids and gathers what kernels need.

    Scalars of the step and the used part of block tables go to batch-ordered buffers.
    """

    def __init__(self, work: Workload) -> None:
        self.rows = list(range(work.num_reqs))
        fields = [f for f in work.row_fields() if not work.is_wide(f)]
        self._state = [work.array(f) for f in fields]
        self._ordered = [work.array(f) for f in fields]

    def step(self, decode: Bools) -> None:
        """Sort, build the index, gather."""
        flags = decode.tolist()
        self.rows = sorted(range(len(flags)), key=lambda request: (not flags[request], request))
        index = np.array(self.rows, dtype=np.int64)
        for state, ordered in zip(self._state, self._ordered, strict=True):
            np.take(state, index, axis=0, out=ordered)


class IndexSelect:
    """SGLang: one index_select a field into a new tensor."""

    # Any: see PairwiseSwaps
    def __init__(
        self,
        work: Workload,
        make: Callable[[npt.NDArray[Any]], Any],
        select: Callable[[Any, Any], Any],
    ) -> None:
        self.rows = list(range(work.num_reqs))
        self._tensors = [make(work.array(f)) for f in work.row_fields() if not work.is_wide(f)]
        self._make, self._select = make, select

    def step(self, decode: Bools) -> None:
        """Sort on the host, select on the tensors."""
        order = np.argsort(~decode[self.rows], kind="stable")
        index = self._make(order)
        self._tensors = [self._select(tensor, index) for tensor in self._tensors]
        self.rows = [self.rows[row] for row in order.tolist()]
