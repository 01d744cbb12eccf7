"""The draft model's fields, on the slots, rows and orders of the target batch.

Rules
- Where a field comes from is said once, in its declaration: ``own``, ``shared`` or ``copied``.
- Rows are never decided here: the target's moves arrive, and are applied once.
- Rotary positions are the target's (``VLBatch.positions_of``); there is no field for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from vlbatch.backends.base import Backend
from vlbatch.backends.dtypes import HostArray
from vlbatch.batch.access import FieldAccess
from vlbatch.batch.input_batch import InputBatch
from vlbatch.errors import DuplicateRequest, InvalidField, InvariantBroken, UnknownRequest
from vlbatch.fields import Field, FieldRegistry, FieldStorage
from vlbatch.order import BatchOrder, RowMoves

E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class _Own:
    field: Field


@dataclass(frozen=True, slots=True)
class _Shared:
    name: str


@dataclass(frozen=True, slots=True)
class _Copied:
    name: str


DraftField: TypeAlias = "_Own | _Shared | _Copied"
"""What ``own``, ``shared`` and ``copied`` return."""


def own(field: Field) -> DraftField:
    """Declare a field of the draft model alone."""
    return _Own(field)


def shared(name: str) -> DraftField:
    """Declare the target's very array under its name: what either writes, both see."""
    return _Shared(name)


def copied(name: str) -> DraftField:
    """Declare an array of its own like the target's per-request field of this name.

    It is filled from the target's value whenever a request gets a row (added, resumed, joined)
    and goes its own way from there. Objects of host fields are copied by reference.
    """
    return _Copied(name)


class ProposerInputBatch(FieldAccess[E], Generic[E]):
    """State of the draft model for the requests of a target batch, or for some of them.

    Reads and writes like the target: ``draft["name"]``, ``read``, ``write``, ``append``. Row ``r``
    here is row ``r`` there, at any time; rows of requests that are no members hold defaults.

    Args:
        target: the batch to follow; requests that it has already are taken over.
        fields: declarations; a name occurs once.
        backend: where own and copied arrays live.
        auto_join: every request of the target is a member from its admission on; else call
            ``join``.

    Raises:
        InvalidField: a name occurs twice; or a field to copy has no value per request.
        UnknownField: a field to share or to copy is not one of the target's.
    """

    # Any: the stored array type is the backend's own business
    def __init__(
        self,
        target: InputBatch[E],
        fields: Sequence[DraftField],
        *,
        backend: Backend[Any, E],
        auto_join: bool = True,
    ) -> None:
        self._target = target
        self.auto_join = auto_join
        self.shared = frozenset(f.name for f in fields if isinstance(f, _Shared))
        self.copied = frozenset(f.name for f in fields if isinstance(f, _Copied))
        declared = [f.field if isinstance(f, _Own) else target.registry[f.name] for f in fields]
        self._registry = FieldRegistry(declared)
        for name in self.copied:
            if not self._registry[name].is_per_request:
                raise InvalidField(
                    f"field {name!r} is {self._registry[name].kind.value}; expected a per-request"
                    " one: share it, or declare an own one",
                    setting="copied",
                )
        held = FieldRegistry([f for f in declared if f.name not in self.shared])
        storage: FieldStorage[Any, E] = FieldStorage(
            held, target.capacity, target.num_drafts, backend
        )
        super().__init__(target._table, storage)  # noqa: SLF001 (the same rows, not equal ones)
        self._members: dict[str, None] = {}
        self._kept: dict[str, dict[str, object]] = {}  # preempted members -> values of own fields
        self._declined: set[str] = set()  # left here, still in the target
        target.register_follower(self)
        if auto_join:
            for req_id in target.req_ids:
                self.join(req_id)

    # -- fields ------------------------------------------------------------------------------
    @property
    def registry(self) -> FieldRegistry:
        """The declared fields, the target's shared ones among them."""
        return self._registry

    # Any: the stored array type is the backend's own business
    def _home(self, name: str) -> FieldStorage[Any, E]:
        if name in self.shared:
            return self._target._home(name)  # noqa: SLF001 (a FieldAccess too)
        return self._storage

    def _index(self, req_id: str, name: str, *, ragged: bool = False) -> int:
        index = super()._index(req_id, name, ragged=ragged)
        self._check_member(req_id)
        return index

    # -- members -----------------------------------------------------------------------------
    @property
    def req_ids(self) -> tuple[str, ...]:
        """Live members, in the order in which they joined."""
        return tuple(self._members)

    def is_member(self, req_id: str) -> bool:
        """Whether the request is live and the draft model works on it."""
        return req_id in self._members

    def member_rows(self, order: BatchOrder) -> npt.NDArray[np.bool_]:
        """Row of an order -> whether its request is a member, bool ``[num_reqs]``."""
        members = (req_id in self._members for req_id in order.req_ids)
        return np.fromiter(members, np.bool_, order.num_reqs)

    def _check_member(self, req_id: str) -> None:
        if req_id not in self._members:
            raise UnknownRequest(
                "is in the target but no member of the proposer batch",
                req_id=req_id,
                setting="auto_join",
            )

    def join(self, req_id: str) -> None:
        """Make a live request of the target a member; copied fields get the target's values.

        Raises:
            UnknownRequest: not in the target.
            DuplicateRequest: a member already.
        """
        self._table.slot_of(req_id)
        if req_id in self._members:
            raise DuplicateRequest("is a member already", req_id=req_id)
        self._enter(req_id, {name: self._target.read(req_id, name) for name in self.copied})

    def leave(self, req_id: str) -> None:
        """End a membership; the request's row and slot here hold defaults again.

        Raises:
            UnknownRequest: no member.
        """
        row, slot = self._table.row_of(req_id), self._table.slot_of(req_id)
        self._check_member(req_id)
        self._storage.initialise(row, slot, dict.fromkeys(self._storage.objects))
        del self._members[req_id]
        self._declined.add(req_id)

    def _enter(self, req_id: str, values: Mapping[str, object]) -> None:
        """Write a member's fields: kept, copied, default."""
        given = {**self._kept.pop(req_id, {}), **values}
        fresh = self._storage.fresh_objects(given)
        row, slot = self._table.row_of(req_id), self._table.slot_of(req_id)
        self._storage.initialise(row, slot, {**fresh, **given})
        self._members[req_id] = None
        self._declined.discard(req_id)

    # -- what the target tells ---------------------------------------------------------------
    def derive(self, order: BatchOrder) -> list[HostArray]:
        """Compute the derived fields of the target's next order; see ``DerivedFields``."""
        return self._storage.derived.derive(order)

    def follow(self, moves: RowMoves) -> None:
        """Apply the target's moves."""
        self._storage.move(moves)

    def write_derived(self, values: object) -> None:
        """Write what ``derive`` computed."""
        self._storage.derived.write(cast("list[HostArray]", values))

    def on_add(self, req_id: str, values: Mapping[str, object]) -> None:
        """Take a new or resumed request in, unless it is not to be a member."""
        if req_id in self._kept or (self.auto_join and req_id not in self._declined):
            self._enter(req_id, {name: values[name] for name in self.copied & values.keys()})

    def on_preempt(self, req_id: str) -> None:
        """Remember a member's own ``on_preempt="keep"`` fields; the others are copied again."""
        if req_id in self._members:
            self._kept[req_id] = {
                name: self.read(req_id, name)
                for name, field in self._storage.registry.items()
                if field.is_per_request and field.on_preempt == "keep" and name not in self.copied
            }
            self._vacate(req_id)

    def on_remove(self, req_id: str) -> None:
        """Forget a request."""
        self._kept.pop(req_id, None)
        self._declined.discard(req_id)
        if req_id in self._members:
            self._vacate(req_id)

    def _vacate(self, req_id: str) -> None:
        """Drop a member that is about to lose its row, which is then cleared by ``follow``."""
        self._storage.release(self._table.slot_of(req_id))
        del self._members[req_id]

    def on_reset(self) -> None:
        """Forget every request; addresses stay valid."""
        self._members.clear()
        self._kept.clear()
        self._declined.clear()
        self._storage.reset()

    def check(self) -> None:
        """Verify that members are requests of the target, and the arrays.

        Raises:
            InvariantBroken: naming the requests, or the field.
        """
        live, preempted = self._table.slots.keys(), set(self._target.preempted)
        lost = self._members.keys() - live
        if lost:
            raise InvariantBroken(f"members that the target does not have: {sorted(lost)}")
        unsaid = live - self._members.keys() - self._declined
        if self.auto_join and unsaid:
            raise InvariantBroken(f"requests that never joined: {sorted(unsaid)}")
        known = live | preempted
        stale = {*self._kept.keys() - preempted, *self._declined - known}
        if stale:
            raise InvariantBroken(f"remembers requests that are gone: {sorted(stale)}")
        self._storage.check()
