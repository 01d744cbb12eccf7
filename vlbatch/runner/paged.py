"""Index arithmetic of one step over a paged KV cache, in numpy, for engines of any framework.

Owns which KV slot each token is written to and which slots each row attends to. Holds no tensor.

Rules
- A KV slot is ``block id * block_size + offset`` in a cache of ``num_blocks * block_size``. It
  comes from a token's index in its request, never from its rotary position.
- Every index is checked here, on the host: frameworks index without bounds checks on some paths.
- A slot outside a row's own context is never read, not even under a mask: a masked NaN is a NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from vlbatch.runner._checks import refuse

if TYPE_CHECKING:
    from vlbatch.runner.inputs import StepInputs

_Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Rows with the same number of query tokens, attended in one batch.

    Attributes:
        tokens: int64 ``[rows, query_len]`` places in the step's flattened tokens.
        context: int64 ``[rows, max_context]`` KV slots of each row's tokens ``[0, context)``,
            this step's included; entries past the end repeat the row's last slot.
        visible: bool ``[rows, query_len, max_context]`` what each query may attend to: all that is
            computed, and this chunk up to the query itself.
    """

    tokens: _Ints
    context: _Ints
    visible: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """Where a step's keys and values are written and what its queries read.

    Attributes:
        kv_slots: int64 ``[num_tokens]`` slot of each token's key and value, all different.
        groups: every token is a query of exactly one group. Decode rows form one group.
    """

    kv_slots: _Ints
    groups: tuple[QueryGroup, ...]


@dataclass(frozen=True, slots=True)
class TokenPlan:
    """The same, token by token: shapes that depend on the number of tokens only, for graphs.

    Attributes:
        kv_slots: int64 ``[num_tokens]`` slot of each token's key and value, all different.
        context: int64 ``[num_tokens, width]`` KV slots of the tokens before each token and its own;
            entries past the end repeat its own.
        visible: bool ``[num_tokens, width]`` which entries are no repeats.
    """

    kv_slots: _Ints
    context: _Ints
    visible: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Places:
    """A step's checked rows, and the place of each token.

    Attributes:
        start: int64 ``[num_reqs + 1]`` row -> first token.
        context: int64 ``[num_reqs]`` tokens of each row after this step; 0 for a row without any.
        tables: int64 ``[num_reqs, max_blocks]``.
        row: int64 ``[num_tokens]`` row of each token.
        index: int64 ``[num_tokens]`` index of each token in its request.
        kv_slots: int64 ``[num_tokens]``.
    """

    start: _Ints
    context: _Ints
    tables: _Ints
    row: _Ints
    index: _Ints
    kv_slots: _Ints


def plan_attention(inputs: StepInputs, *, num_blocks: int, block_size: int) -> PagedPlan:
    """Turn block tables into the KV slots that a step writes and reads.

    Rows may come in any order and a row of no tokens is skipped. Rows may share blocks that they
    only read (a common prefix).

    Raises:
        InvalidField: lengths or block tables contradict each other, a block id is outside the pool,
            or two tokens would be written to one slot.
    """
    places = _places(inputs, num_blocks=num_blocks, block_size=block_size)
    lengths = np.diff(places.start)
    groups = tuple(
        _group(np.flatnonzero(lengths == length), int(length), places, block_size)
        for length in np.unique(lengths[lengths > 0])
    )
    return PagedPlan(kv_slots=places.kv_slots, groups=groups)


def plan_tokens(inputs: StepInputs, *, num_blocks: int, block_size: int, width: int) -> TokenPlan:
    """Do what ``plan_attention`` does, token by token.

    Args:
        inputs: the step.
        num_blocks: of the cache.
        block_size: tokens a block.
        width: most tokens of a request.

    Raises:
        InvalidField: see ``plan_attention``; or a request is longer than ``width``.
    """
    places = _places(inputs, num_blocks=num_blocks, block_size=block_size)
    if places.context.max(initial=0) > width:
        refuse("computed", f"a row of {places.context.max()} tokens", f"at most {width}")
    own = places.index[:, None]
    reach = np.minimum(np.arange(width), own)
    context = _slots(places.tables, places.row[:, None], reach, block_size)
    return TokenPlan(places.kv_slots, context, np.arange(width) <= own)


def _places(inputs: StepInputs, *, num_blocks: int, block_size: int) -> _Places:
    start, computed = inputs.query_start.astype(np.int64), inputs.computed.astype(np.int64)
    tables = inputs.block_tables.astype(np.int64)
    _check_rows(start, computed, tables, num_tokens=inputs.token_ids.size)
    lengths = np.diff(start)
    context = np.where(lengths > 0, computed + lengths, 0)
    _check_blocks(tables, context, num_blocks=num_blocks, block_size=block_size)

    row = np.repeat(np.arange(lengths.size), lengths)
    index = np.arange(start[-1]) - start[row] + computed[row]
    kv_slots = _slots(tables, row, index, block_size)
    if np.unique(kv_slots).size < kv_slots.size:
        refuse("block_tables", "two tokens of the step share a KV slot", "a block of its own each")
    return _Places(start, context, tables, row, index, kv_slots)


def _group(rows: _Ints, length: int, places: _Places, block_size: int) -> QueryGroup:
    queries = np.arange(length)
    index = np.arange(places.context[rows].max())
    last = places.context[rows, None] - 1
    own = np.minimum(index, last)
    first_query = last - (length - 1)
    return QueryGroup(
        tokens=places.start[rows, None] + queries,
        context=_slots(places.tables, rows[:, None], own, block_size),
        visible=index <= (first_query + queries)[:, :, None],
    )


def _slots(tables: _Ints, row: _Ints, index: _Ints, block_size: int) -> _Ints:
    slots: _Ints = tables[row, index // block_size] * block_size + index % block_size
    return slots


def _check_rows(start: _Ints, computed: _Ints, tables: _Ints, *, num_tokens: int) -> None:
    if start.ndim != 1 or start.size == 0 or start[0] != 0 or start[-1] != num_tokens:
        refuse("query_start", str(start.tolist()), f"row bounds from 0 to {num_tokens} tokens")
    if (np.diff(start) < 0).any():
        refuse("query_start", str(start.tolist()), "bounds that never fall")
    num_reqs = start.size - 1
    if computed.shape != (num_reqs,) or (computed < 0).any():
        refuse("computed", str(computed.tolist()), f"{num_reqs} lengths of at least 0")
    if tables.ndim != 2 or tables.shape[0] != num_reqs:
        refuse("block_tables", f"shape {tables.shape}", f"({num_reqs}, max_blocks)")


def _check_blocks(tables: _Ints, context: _Ints, *, num_blocks: int, block_size: int) -> None:
    needed = -(-context // block_size)
    if (needed > tables.shape[1]).any():
        row = int(np.argmax(needed))
        got = f"row {row} needs {needed[row]} blocks for {context[row]} tokens"
        refuse("block_tables", got, f"at most {tables.shape[1]}, the width of the table")
    used = np.arange(tables.shape[1]) < needed[:, None]
    bad = used & ((tables < 0) | (tables >= num_blocks))
    if bad.any():
        row, column = np.argwhere(bad)[0]
        got = f"row {row}, column {column} is block {tables[row, column]}"
        refuse("block_tables", got, f"a block in [0, {num_blocks})")
