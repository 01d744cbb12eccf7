"""Faults on purpose: each breaks one thing in a running batch, once, to prove it is noticed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from vlbatch.backends.dtypes import HostArray
from vlbatch.batch import BatchPlan
from vlbatch.errors import InvalidSetting
from vlbatch.features import FeatureInputs
from vlbatch.fields import Kind
from vlbatch.order import DECODE, BatchOrder, IntArray
from vlbatch.runner.settings import RunSettings
from vlbatch.runner.state import HostBatch, moving_fields

_DROP_FIELD = "drop-field:"

FAULTS = {
    "swap-features": "two requests of a step get each other's feature rows",
    "shift-features": "the feature rows of an item land one token late",
    "shift-positions": "the rotary positions of a prompt chunk are one token late",
    "stale-row": "a moved row keeps the numbers of the request that was there",
    **{_DROP_FIELD + name: f"a move forgets {name}" for name in moving_fields(RunSettings())},
}
"""Name of each fault that can be made -> what it does."""


class Faults:
    """No fault: the honest base class."""

    happened = False

    def apply(self, vl: HostBatch, plan: BatchPlan) -> BatchOrder:
        """Apply a plan."""
        return vl.batch.apply(plan)

    def features(self, inputs: FeatureInputs) -> FeatureInputs:
        """Pass a step's features on."""
        return inputs

    def positions(self, order: BatchOrder, positions: IntArray) -> IntArray:  # noqa: ARG002
        """Pass a step's positions on."""
        return positions

    def after_forward(self, vl: HostBatch) -> None:
        """Called before tokens are sampled."""


def make_faults(name: str | None, settings: RunSettings) -> Faults:
    """Make the fault of this name for one run; ``None`` for no fault.

    Raises:
        InvalidSetting: no such fault.
    """
    if name is None:
        return Faults()
    if name not in FAULTS:
        raise InvalidSetting(
            f"no fault {name!r}; expected one of {', '.join(FAULTS)}", setting="inject"
        )
    if name.startswith(_DROP_FIELD):
        return _Unmoved([name.removeprefix(_DROP_FIELD)], settings.block_size)
    if name == "stale-row":
        # Not its block table: an engine refuses a step in which two rows write to one KV block.
        fields = moving_fields(settings).values()
        fixed = [field.name for field in fields if field.kind is Kind.ROW]
        return _Unmoved(fixed, settings.block_size)
    kinds: dict[str, type[Faults]] = {
        "swap-features": _SwapFeatures,
        "shift-features": _ShiftFeatures,
        "shift-positions": _ShiftPositions,
    }
    return kinds[name]()


class _SwapFeatures(Faults):
    """Two requests of one step get each other's feature rows."""

    def features(self, inputs: FeatureInputs) -> FeatureInputs:
        segments = list(inputs.segments)
        for i, j in combinations(range(len(segments)), 2):
            one, other = segments[i], segments[j]
            same_size = one.rows[1] - one.rows[0] == other.rows[1] - other.rows[0]
            strangers = one.req_id != other.req_id and one.content != other.content
            if not self.happened and same_size and strangers:
                segments[i], segments[j] = other, one
                self.happened = True
        return replace(inputs, segments=tuple(segments))


class _ShiftFeatures(Faults):
    """The feature rows of one item land one token late; the last one comes first."""

    def features(self, inputs: FeatureInputs) -> FeatureInputs:
        start = 0
        for segment in inputs.segments:
            stop = start + segment.rows[1] - segment.rows[0]
            if not self.happened and stop - start > 1:
                tokens = inputs.tokens.copy()
                tokens[start:stop] = np.roll(tokens[start:stop], -1)
                self.happened = True
                return replace(inputs, tokens=tokens)
            start = stop
        return inputs


class _ShiftPositions(Faults):
    """The rotary positions of one prompt chunk with media are one token late."""

    def positions(self, order: BatchOrder, positions: IntArray) -> IntArray:
        for row in np.flatnonzero(order.classes != DECODE).tolist():
            start, stop = order.query_start[row], order.query_start[row + 1]
            chunk = positions[:, start:stop]
            shifted = np.roll(chunk, 1, axis=1)
            has_media = bool((chunk != chunk[0]).any())
            if not self.happened and has_media and not np.array_equal(chunk, shifted):
                positions = positions.copy()
                positions[:, start:stop] = shifted
                self.happened = True
        return positions


class _Unmoved(Faults):
    """One moved decode finds in some fields what was in its new row before.

    Args:
        names: the fields.
        block_size: tokens a KV block.
    """

    def __init__(self, names: Sequence[str], block_size: int) -> None:
        self._names = names
        self._block_size = block_size
        self._mend: tuple[str, int, HostArray] | None = None

    def apply(self, vl: HostBatch, plan: BatchPlan) -> BatchOrder:
        row = None if self.happened else self._victim(vl, plan)
        if row is None:
            return vl.batch.apply(plan)
        stale = {name: vl.batch[name][row].copy() for name in self._names}
        order = vl.batch.apply(plan)
        for name, value in stale.items():
            if vl.batch.registry[name].kind is Kind.RAGGED:
                self._mend = (name, row, vl.batch[name][row].copy())
            vl.batch[name][row] = value
        self.happened = True
        return order

    def after_forward(self, vl: HostBatch) -> None:
        """Mend a block table after one step: later on an engine would refuse shared blocks."""
        if self._mend is not None:
            name, row, value = self._mend
            vl.batch[name][row] = value
            self._mend = None

    def _victim(self, vl: HostBatch, plan: BatchPlan) -> int | None:
        """New row of a moved decode whose stale fields differ from what it should get."""
        moves = plan.moves
        pairs: list[tuple[int, int]] = np.stack([moves.sources, moves.destinations], 1).tolist()
        for source, row in pairs:
            if row >= plan.order.num_reqs or plan.order.classes[row] != DECODE:
                continue
            differs = any(
                not np.array_equal(vl.batch[n][source], vl.batch[n][row]) for n in self._names
            )
            if differs and ("block_table" not in self._names or self._runs_on(vl, plan, row)):
                return row
        return None

    def _runs_on(self, vl: HostBatch, plan: BatchPlan, row: int) -> bool:
        """Whether an engine runs the step with a stale block table.

        It does if the table is long enough and no token of another row is written to the same
        place.
        """
        order, tables = plan.order, vl.batch["block_table"]
        old_row = np.arange(len(tables))
        old_row[plan.moves.destinations] = plan.moves.sources
        old_row[row] = row  # the fault
        blocks = tables[old_row[order.row_of_token], order.token_indices // self._block_size]
        offsets = order.token_indices % self._block_size
        places = blocks.astype(np.int64) * self._block_size + offsets
        last = int(order.computed[row] + order.scheduled[row]) - 1
        needed = last // self._block_size + 1
        return bool((tables[row, :needed] >= 0).all()) and len(np.unique(places)) == len(places)
