"""The immutable snapshot of one step's batch order, which travels with the step's outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import blake3
import numpy as np
import numpy.typing as npt

from vlbatch.errors import UnknownRequest
from vlbatch.order.moves import EXTEND, IntArray, OrderPolicy
from vlbatch.order.restore import restore_outputs


class Regions(NamedTuple):
    """Number of requests of each class in a step."""

    decode: int
    extend: int
    prefill: int


_LASTING = (
    "batch_id", "policy", "req_ids", "idle", "slots", "prompt_lens", "scheduled", "classes",
    "num_tokens", "regions", "query_start", "row_of_token", "_rows",
)  # fmt: skip
"""What an order has in common with a later one of the same rows and tokens, cached or not."""


@dataclass(frozen=True, eq=False)
class BatchOrder:
    """Which request is in which row of one step, and what it computes there.

    Arrays are indexed by row, ``[num_reqs]``, int64 but for ``classes``; they are read-only and
    never change afterwards.

    Attributes:
        batch_id: the batch that made it.
        step: counts the orders of that batch.
        policy: how its rows are grouped.
        req_ids: row -> request.
        idle: requests of the batch without tokens in this step, in row order; their rows come
            after ``num_reqs``.
        slots: row -> slot.
        prompt_lens: tokens of the prompt (after a resume: prompt and outputs so far).
        computed: tokens already computed before this step.
        scheduled: tokens to compute in this step: the chunk is
            ``[computed, computed + scheduled)``.
        classes: int8, ``DECODE``, ``EXTEND`` or ``PREFILL``.
    """

    batch_id: str
    step: int
    policy: OrderPolicy
    req_ids: tuple[str, ...]
    idle: tuple[str, ...]
    slots: IntArray
    prompt_lens: IntArray
    computed: IntArray
    scheduled: IntArray
    classes: npt.NDArray[np.int8]

    def __post_init__(self) -> None:
        """Freeze the arrays."""
        for array in (self.slots, self.prompt_lens, self.computed, self.scheduled, self.classes):
            array.flags.writeable = False

    def further(self, step: int, computed: IntArray) -> BatchOrder:
        """Return the order of a later step: all is the same but what was computed before."""
        order = object.__new__(BatchOrder)
        computed.flags.writeable = False
        known = self.__dict__
        order.__dict__.update({name: known[name] for name in _LASTING if name in known})
        order.__dict__.update(step=step, computed=computed)
        return order

    @property
    def num_reqs(self) -> int:
        """Rows with tokens in this step."""
        return len(self.req_ids)

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return int(self.scheduled.sum())

    @cached_property
    def regions(self) -> Regions:
        """Requests per class; with ``policy="split"`` also the bounds of the regions."""
        in_prompt = int(np.count_nonzero(self.classes))  # DECODE is 0
        extend = int(np.count_nonzero(self.classes == EXTEND)) if in_prompt else 0
        return Regions(self.num_reqs - in_prompt, extend, in_prompt - extend)

    @property
    def num_leading_decodes(self) -> int:
        """Rows ``[0, n)`` known to be decodes: all of them where decodes have a region."""
        if self.policy == "arrival" and self.regions.decode < self.num_reqs:
            return 0
        return self.regions.decode

    @cached_property
    def query_start(self) -> npt.NDArray[np.int32]:
        """Row -> its first token in the flattened step, int32 ``[num_reqs + 1]``."""
        starts = np.zeros(self.num_reqs + 1, dtype=np.int32)
        np.cumsum(self.scheduled, out=starts[1:])
        starts.flags.writeable = False
        return starts

    @cached_property
    def row_of_token(self) -> npt.NDArray[np.int32]:
        """Token of the flattened step -> row, int32 ``[num_tokens]``."""
        rows = np.repeat(np.arange(self.num_reqs, dtype=np.int32), self.scheduled)
        rows.flags.writeable = False
        return rows

    @cached_property
    def token_indices(self) -> IntArray:
        """Token of the flattened step -> index in its request, int64 ``[num_tokens]``.

        KV slots come from these, never from rotary coordinates.
        """
        shift: IntArray = self.computed - self.query_start[:-1]
        indices: IntArray = np.arange(self.num_tokens) + np.repeat(shift, self.scheduled)
        indices.flags.writeable = False
        return indices

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {req_id: row for row, req_id in enumerate(self.req_ids)}

    def row_of(self, req_id: str) -> int:
        """Row of a request.

        Raises:
            UnknownRequest: it has no tokens in this step.
        """
        try:
            return self._rows[req_id]
        except KeyError:
            raise UnknownRequest("has no row in this step", req_id=req_id) from None

    def restore(
        self, outputs: object, *, counts: Sequence[int] | IntArray | None = None
    ) -> dict[str, object]:
        """Give each request its part of the step's outputs.

        Args:
            outputs: an array or tensor, a Python list or tuple, a mapping or a named tuple of
                these; ``None`` members stay ``None``.
            counts: without it each leaf has one entry a row; with it a leaf has ``counts[row]``
                consecutive entries for each row (per-draft groups, ragged logits) and a request
                gets a slice.

        Returns:
            req_id -> entry or slice, in the container type of ``outputs``. Slices of arrays are
            views.

        Raises:
            StaleOrder: a leaf has another number of entries than this order has rows.
            InvalidField: a leaf has no length.
        """
        return dict(zip(self.req_ids, restore_outputs(outputs, self.num_reqs, counts), strict=True))

    def digest(self) -> str:
        """Hex digest over everything that ranks must agree on (not ``batch_id``)."""
        hasher = blake3.blake3()
        for req_id in (*self.req_ids, "", *self.idle):
            name = req_id.encode()
            hasher.update(len(name).to_bytes(4, "little") + name)
        for array in (self.slots, self.prompt_lens, self.computed, self.scheduled):
            hasher.update(array.astype("<i8").tobytes())
        return hasher.hexdigest()


Scheduled = Mapping[str, int]
"""req_id -> tokens to compute in the coming step."""
