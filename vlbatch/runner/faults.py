"""Faults on purpose: each breaks one thing in a running batch, once, to prove it is noticed."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from vlbatch.backends.dtypes import HostArray
from vlbatch.batch import BatchPlan
from vlbatch.errors import InvalidField
from vlbatch.features import FeatureInputs
from vlbatch.fields import Kind
from vlbatch.order import DECODE, BatchOrder
from vlbatch.runner.state import HostBatch

IntArray = npt.NDArray[np.int64]

SIMPLE = ("swap-features", "shift-features", "shift-positions", "stale-row")
DROP_FIELD = "drop-field:"


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


def make_faults(name: str | None) -> Faults:
    """Make the fault of this name; ``None`` for no fault.

    Raises:
        InvalidField: no such fault.
    """
    if name is None:
        return Faults()
    if name.startswith(DROP_FIELD):
        return _DropField(name.removeprefix(DROP_FIELD))
    kinds: dict[str, type[Faults]] = {
        "swap-features": _SwapFeatures,
        "shift-features": _ShiftFeatures,
        "shift-positions": _ShiftPositions,
        "stale-row": _StaleRow,
    }
    if name not in kinds:
        raise InvalidField(
            f"no fault {name!r}; expected one of {', '.join(SIMPLE)}, {DROP_FIELD}NAME",
            setting="inject",
        )
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
    """The rotary positions of one prompt chunk are one token late."""

    def positions(self, order: BatchOrder, positions: IntArray) -> IntArray:
        for row in np.flatnonzero(order.classes != DECODE).tolist():
            start, stop = order.query_start[row], order.query_start[row + 1]
            chunk = positions[:, start:stop]
            shifted = np.roll(chunk, 1, axis=1)
            if not self.happened and np.ptp(chunk - chunk[:1]) > 0:
                positions = positions.copy()
                positions[:, start:stop] = shifted
                self.happened = True
        return positions


class _Unmoved(Faults):
    """Some rows of some fields are left behind by a move."""

    def __init__(self) -> None:
        self._mend: tuple[str, int, HostArray] | None = None

    def apply(self, vl: HostBatch, plan: BatchPlan) -> BatchOrder:
        row = None if self.happened else self._victim(vl, plan)
        if row is None:
            return vl.batch.apply(plan)
        stale = {name: vl.batch[name][row].copy() for name in self._names(vl)}
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

    def _names(self, vl: HostBatch) -> list[str]:
        raise NotImplementedError

    def _victim(self, vl: HostBatch, plan: BatchPlan) -> int | None:
        """New row of a moved decode whose stale fields differ from what it should get."""
        moves = plan.moves
        pairs: list[tuple[int, int]] = np.stack([moves.sources, moves.destinations], 1).tolist()
        for source, row in pairs:
            if row < plan.order.num_reqs and plan.order.classes[row] == DECODE:
                names = self._names(vl)
                differs = any(
                    not np.array_equal(vl.batch[n][source], vl.batch[n][row]) for n in names
                )
                if differs and ("block_table" not in names or _runs_on(vl, plan, row)):
                    return row
        return None


def _runs_on(vl: HostBatch, plan: BatchPlan, row: int) -> bool:
    """Whether an engine runs the step with a stale block table.

    It does if the table is long enough and no token of another row is written to the same place.
    """
    order, tables = plan.order, vl.batch["block_table"]
    block_size = -(-vl.batch.max_model_len // tables.shape[1])
    old_row = np.arange(len(tables))
    old_row[plan.moves.destinations] = plan.moves.sources
    old_row[row] = row  # the fault
    blocks = tables[old_row[order.row_of_token], order.token_indices // block_size]
    places = blocks.astype(np.int64) * block_size + order.token_indices % block_size
    needed = int(order.computed[row]) // block_size + 1
    return bool((tables[row, :needed] >= 0).all()) and len(np.unique(places)) == len(places)


class _StaleRow(_Unmoved):
    """One moved decode keeps what was in its new row, in all fields of fixed shape.

    Not its block table: an engine refuses a step in which two rows write to one KV block.
    """

    def _names(self, vl: HostBatch) -> list[str]:
        fields = vl.batch.registry.values()
        return [
            f.name for f in fields
            if f.residency == "rows" and f.is_per_request and f.kind is Kind.ROW
        ]  # fmt: skip


class _DropField(_Unmoved):
    """One field is forgotten by one move."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def _names(self, vl: HostBatch) -> list[str]:
        field = vl.batch.registry[self._name]
        if field.residency != "rows" or not field.is_per_request:
            movable = [
                f.name for f in vl.batch.registry.values()
                if f.residency == "rows" and f.is_per_request
            ]  # fmt: skip
            raise InvalidField(
                f"field {self._name!r} never moves; expected one of {movable}", setting="inject"
            )
        return [self._name]
