"""Who is in which row, and how many rows there are: views that target and proposer share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import index
from typing import Any

import numpy as np

from vlbatch.backends.dtypes import HostArray, convert
from vlbatch.batch import InputBatch as CoreBatch
from vlbatch.errors import InvalidField
from vlbatch.integrations.fastdeploy.access import SharedInputs
from vlbatch.items import IntArray

LENGTHS = "seq_lens_this_time_buffer"


class RowMap(Mapping[int, int]):
    """Row -> batch_id at one moment; read-only.

    Attributes:
        admissions: int64 ``[num_rows]`` row -> rank of admission of who is in it, -1 for a hole.
            It tells a request from a later one of the same id.
    """

    __slots__ = ("_ids", "admissions")

    def __init__(self, rows: Sequence[str | None], admissions: IntArray) -> None:
        self._ids = {row: int(name) for row, name in enumerate(rows) if name is not None}
        self.admissions = admissions
        self.admissions.flags.writeable = False

    def matches(self, other: Mapping[int, int]) -> bool:
        """Whether another map has the same requests in the same rows; of a plain dict, the ids."""
        same_ids = self == other
        if not isinstance(other, RowMap):
            return same_ids
        return same_ids and np.array_equal(self.admissions, other.admissions)

    def __getitem__(self, row: int) -> int:
        return self._ids[row]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._ids})"


class RowViews(SharedInputs):
    """Names that follow from the rows in use."""

    _views: tuple[str, ...] = (
        "seq_lens_this_time", "index_to_batch_id", "num_running_requests", "running_requests_ids",
        "enable_pd_reorder",
    )  # fmt: skip

    # Any: the array type is the backend's own business
    @property
    def core(self) -> CoreBatch[Any]:
        """The batch whose rows these are.

        Raises:
            StaleOrder: before ``init_share_inputs``.
        """
        raise NotImplementedError

    @property
    def index_to_batch_id(self) -> RowMap:
        """Row -> batch_id as of now: a snapshot that later moves do not change."""
        return RowMap(self.core.rows, self.core.row_admissions)

    @property
    def num_running_requests(self) -> int:
        """Rows in use: requests, and holes until the next ``condense``."""
        return self.core.num_rows

    @property
    def running_requests_ids(self) -> range:
        """Rows in use."""
        return range(self.num_running_requests)

    # Any: an array of the backend
    @property
    def seq_lens_this_time(self) -> Any:
        """The first ``num_running_requests`` entries of ``seq_lens_this_time_buffer``."""
        return self[LENGTHS][: self.num_running_requests]

    @seq_lens_this_time.setter
    def seq_lens_this_time(self, value: object) -> None:
        lengths, whole = self._lengths(value)
        whole[: len(lengths)] = lengths
        self[LENGTHS] = whole

    def _lengths(self, value: object) -> tuple[HostArray, HostArray]:
        """Lengths to assign, and a host copy of the buffer.

        Raises:
            InvalidField: another dtype or number of axes, or longer than the buffer.
        """
        part = self._part_of(LENGTHS)
        if part is None:
            raise self._unknown(LENGTHS)
        whole = part.to_host(LENGTHS)
        on_host = value.cpu() if hasattr(value, "cpu") else value
        lengths = convert(on_host, str(whole.dtype), what="field 'seq_lens_this_time'")
        if lengths.ndim != 1 or len(lengths) > len(whole):
            raise InvalidField(
                f"field 'seq_lens_this_time' got shape {lengths.shape}; expected one axis of at"
                f" most {len(whole)}"
            )
        return lengths, whole

    def _check_view(self, name: str, value: object) -> None:
        if name == "seq_lens_this_time":
            self._lengths(value)


def name_of(batch_id: int) -> str:
    """Name a request for the core.

    Raises:
        InvalidField: no integer of at least 0.
    """
    try:
        number = index(batch_id)
    except TypeError:
        number = -1
    if number < 0:
        raise InvalidField(f"got batch_id {batch_id!r}; expected an integer of at least 0")
    return str(number)
