"""What the kernels read: a table of slices, built once, and a record of int32 words a step.

``kernels.cu`` says what each means. Nothing here needs CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from vlbatch.backends.base import Indices
from vlbatch.backends.dtypes import HostArray
from vlbatch.backends.mover import RaggedRows, RowArrays
from vlbatch.errors import InvalidField

if TYPE_CHECKING:
    from vlbatch.fields.layout import Group
    from vlbatch.order.moves import RowMoves

S = TypeVar("S")

Words = npt.NDArray[np.int32]

RECORD_WORDS = 1000
"""Longest record that is passed by value: all arguments of a launch together fit 4 KB."""

SHORT_WORDS = 300
"""Longest record of a launch that is given less: each kilobyte of arguments costs it time."""

HEADER_WORDS = 4
SLICE_BYTES = 256
"""Widest slice."""

_NARROW_BYTES = 16
_MANY_BLOCKS = 256
"""Slices of the narrow width that are spread over the device, not more."""

SLICE = np.dtype(
    [
        ("base", "<u8"), ("stride", "<i8"), ("bytes", "<i4"), ("column", "<i4"),
        ("ragged", "<i4"), ("log2_word", "<i4"), ("num_remapped_rows", "<i4"),
        ("remapped_bytes", "<i4"), ("is_moved", "<i4"), ("unused", "<i4"), ("fill", "u1", (16,)),
    ]
)  # fmt: skip
"""``struct Slice`` of the kernels."""


# Any: dtypes differ from field to field
def build_slices(rows: RowArrays[S], address: Callable[[S], int]) -> npt.NDArray[Any]:
    """Cut the columns of all row-resident arrays into slices, one a block.

    Slices are as wide as bandwidth wants; where all rows are short, narrow ones spread the little
    that there is over more blocks.

    Args:
        rows: groups are ``[fields, rows, ...]``, everything contiguous.
        address: first byte of an array.

    Returns:
        ``SLICE`` records.

    Raises:
        InvalidField: a row of 2 GiB or more.
    """
    remapped = {address(array): dtype for array, dtype in rows.row_valued}
    sizes = [_row_bytes(group) for group in rows.groups for _ in range(group.default.size)]
    sizes += [ragged.width * ragged.default.itemsize for ragged in rows.ragged]
    num_narrow = sum(-(-size // _NARROW_BYTES) for size in sizes)
    width = _NARROW_BYTES if num_narrow <= _MANY_BLOCKS else SLICE_BYTES
    tables = []
    for group in rows.groups:
        num_rows, row_bytes = _shape(group.array)[1], _row_bytes(group)
        for i, default in enumerate(np.ravel(group.default)):
            first = address(group.array) + i * num_rows * row_bytes
            table = _field_slices(first, row_bytes, np.asarray(default), width)
            if first in remapped:
                table["num_remapped_rows"] = num_rows
                table["remapped_bytes"] = remapped.pop(first).itemsize
            tables.append(table)
    for i, ragged in enumerate(rows.ragged):
        row_bytes = ragged.width * ragged.default.itemsize
        table = _field_slices(address(ragged.array), row_bytes, ragged.default, width)
        table["ragged"] = i
        tables.append(table)
    for array, dtype in rows.row_valued:  # those of the whole batch: entries stay in place
        if address(array) in remapped:
            num_bytes = int(np.prod(_shape(array))) * dtype.itemsize
            table = _field_slices(address(array), num_bytes, np.zeros((), dtype), SLICE_BYTES)
            table["is_moved"] = 0
            table["num_remapped_rows"] = 1
            table["remapped_bytes"] = dtype.itemsize
            tables.append(table)
    return np.concatenate([*tables, np.zeros(0, SLICE)])


def _shape(array: object) -> tuple[int, ...]:
    return tuple(array.shape)  # type: ignore[attr-defined]  # every array library has it


# Any: see RowArrays
def _row_bytes(group: Group[Any]) -> int:
    """Bytes of one row of one field."""
    return int(np.prod(_shape(group.array)[2:])) * group.default.itemsize


# Any: a structured dtype
def _field_slices(first: int, row_bytes: int, default: HostArray, width: int) -> npt.NDArray[Any]:
    if row_bytes >= 2**31:
        raise InvalidField(f"a field has {row_bytes} bytes a row; expected less than 2 GiB")
    columns = np.arange(0, row_bytes, width)
    table = np.zeros(len(columns), SLICE)
    table["base"] = first + columns
    table["stride"] = row_bytes
    table["bytes"] = np.minimum(row_bytes - columns, width)
    table["column"] = columns
    table["ragged"] = -1
    table["log2_word"] = _log2_word(first | row_bytes)
    table["is_moved"] = 1
    table["fill"] = np.full(16 // default.itemsize, default).view(np.uint8)
    return table


def _log2_word(multiple: int) -> int:
    """Widest load, up to 16 bytes, of which the number is a multiple."""
    multiple |= 16
    return (multiple & -multiple).bit_length() - 1


def write_moves(record: Words, moves: RowMoves, ragged: Sequence[RaggedRows[S]]) -> int:
    """Write the record of some moves, and bring the ragged lengths to their new rows.

    Returns:
        Words of the record.
    """
    num_moves, num_vacated = len(moves.sources), len(moves.vacated)
    num_ops = num_moves + num_vacated
    record[0] = num_ops
    record[1] = len(moves.new_row_of)
    at = HEADER_WORDS
    record[at : at + num_moves] = moves.destinations
    record[at + num_ops : at + num_ops + num_moves] = moves.sources
    if num_vacated:
        record[at + num_moves : at + num_ops] = moves.vacated
        record[at + num_ops + num_moves : at + 2 * num_ops] = -1
    at += 2 * num_ops
    for rows in ragged:
        lengths = rows.lengths
        moved = lengths.take(moves.sources)
        # as far as the source is valid, and over all that the destination held
        widths = np.maximum(moved, lengths.take(moves.destinations))
        record[at : at + num_moves] = widths * rows.default.itemsize
        if num_vacated:
            stale = lengths.take(moves.vacated)
            record[at + num_moves : at + num_ops] = stale * rows.default.itemsize
            lengths[moves.vacated] = 0
        lengths[moves.destinations] = moved
        at += num_ops
    return at


class FeatureRuns(NamedTuple):
    """Feature rows that lie one after the other and go to consecutive tokens.

    Attributes:
        addresses: int64 ``[num_runs]``, first byte of each run.
        first_rows: int64 ``[num_runs]``, number of its first row among all of the step.
        first_tokens: int64 ``[num_runs]``, token of its first row.
        num_rows: of the step.
    """

    addresses: Indices
    first_rows: Indices
    first_tokens: Indices
    num_rows: int

    def token_bounds(self) -> tuple[int, int]:
        """Half-open range of tokens that get a feature row; at least one run."""
        lengths = np.diff(self.first_rows, append=self.num_rows)
        return int(self.first_tokens.min()), int((self.first_tokens + lengths).max())


def feature_runs(
    addresses: Sequence[int], num_rows: Sequence[int], tokens: Indices, row_bytes: int
) -> FeatureRuns:
    """Join feature rows into as few runs as possible.

    Args:
        addresses: first byte of each segment of feature rows.
        num_rows: rows of each segment; those without any are left out.
        tokens: token of every feature row, segment after segment.
        row_bytes: bytes of a feature row.
    """
    counts = np.array(num_rows, dtype=np.int64)
    starts = np.cumsum(counts) - counts
    is_first = np.empty(len(tokens) + 1, dtype=np.bool_)
    np.not_equal(np.diff(tokens), 1, out=is_first[1:-1])
    is_first[starts] = True  # an empty last segment starts past the tokens
    first_rows = np.flatnonzero(is_first[:-1])
    segments = np.searchsorted(starts, first_rows, side="right") - 1
    offsets = (first_rows - starts[segments]) * row_bytes
    of_segments = np.array(addresses, dtype=np.int64)
    return FeatureRuns(of_segments[segments] + offsets, first_rows, tokens[first_rows], len(tokens))


def num_feature_words(num_runs: int) -> int:
    """Length of the record of some runs of features."""
    return HEADER_WORDS + 4 * num_runs


def write_features(record: Words, runs: FeatureRuns, multiple: int) -> int:
    """Write the record of a step's features.

    Args:
        record: words to write to.
        runs: what is copied.
        multiple: the buffer's address and the bytes of a row, joined by or.

    Returns:
        Words of the record.
    """
    num_runs = len(runs.addresses)
    multiple |= int(np.bitwise_or.reduce(runs.addresses))
    record[:HEADER_WORDS] = (num_runs, runs.num_rows, _log2_word(multiple), 0)
    lists = record[HEADER_WORDS : num_feature_words(num_runs)]
    lists[: 2 * num_runs] = runs.addresses.view(np.int32)
    lists[2 * num_runs : 3 * num_runs] = runs.first_rows
    lists[3 * num_runs :] = runs.first_tokens
    return num_feature_words(num_runs)
