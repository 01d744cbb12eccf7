"""What a batch must do, in plain lists and dicts; shares no code with the library.

Row numbers are kept as the ids of the requests they name, so nothing here is ever remapped, and
nothing is moved: where a request is follows from one list of ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

REGIONS = {
    "split": {"decode": 0, "extend": 1, "prefill": 2, "idle": 3},
    "two": {"decode": 0, "extend": 1, "prefill": 1, "idle": 3},
    "arrival": {"decode": 0, "extend": 0, "prefill": 0, "idle": 3},
}


@dataclass
class NaiveRequest:
    """One request: its progress, its values by field, and whom its row numbers name."""

    prompt_len: int
    computed: int
    confirmed: int
    values: dict[str, Any]
    names: list[str | None] = field(default_factory=lambda: [None, None])
    entry: str | None = None
    is_new: bool = True
    life: int = 0  # another number after each admission


@dataclass
class NaiveBatch:
    """Live and preempted requests, and the list of ids by row."""

    capacity: int
    max_model_len: int
    num_drafts: int
    policy: str
    stable: bool
    live: dict[str, NaiveRequest] = field(default_factory=dict)
    preempted: dict[str, NaiveRequest] = field(default_factory=dict)
    rows: list[str | None] = field(default_factory=list)
    slots: dict[str, int] = field(default_factory=dict)
    waiting: list[str | None] = field(default_factory=lambda: [None] * 3)
    lives: int = 0

    # -- requests ------------------------------------------------------------------------------
    def add(self, req_id: str, request: NaiveRequest) -> None:
        self.lives += 1
        request.life, request.is_new = self.lives, True
        self.live[req_id] = request
        free = [s for s in range(self.capacity) if s not in self.slots.values()]
        self.slots[req_id] = free[0]
        if None in self.rows:
            self.rows[self.rows.index(None)] = req_id
        else:
            self.rows.append(req_id)

    def leave(self, req_id: str) -> NaiveRequest:
        request = self.live.pop(req_id)
        del self.slots[req_id]
        self.rows[self.rows.index(req_id)] = None
        request.entry, request.names = None, [None, None]
        for names in (self.waiting, *(r.names for r in self.live.values())):
            names[:] = [None if name == req_id else name for name in names]
        return request

    def preempt(self, req_id: str) -> None:
        self.preempted[req_id] = request = self.leave(req_id)
        request.prompt_len = self.known_tokens(request)
        request.values["reset"] = 1

    def resume(self, req_id: str, computed: int) -> None:
        request = self.preempted.pop(req_id)
        request.computed = request.confirmed = computed
        self.add(req_id, request)

    def reset(self) -> None:
        self.live.clear()
        self.preempted.clear()
        self.rows.clear()
        self.slots.clear()
        self.waiting = [None] * 3

    # -- progress ------------------------------------------------------------------------------
    def known_tokens(self, request: NaiveRequest) -> int:
        in_prompt = request.computed < request.prompt_len
        return request.prompt_len if in_prompt else request.computed + 1

    def limit(self, req_id: str) -> int:
        request = self.live[req_id]
        rest = request.prompt_len - request.computed
        return min(rest if rest > 0 else self.num_drafts + 1, self.max_model_len - request.computed)

    def class_of(self, req_id: str, scheduled: dict[str, int]) -> str:
        request = self.live[req_id]
        if req_id not in scheduled:
            return "idle"
        if request.computed >= request.prompt_len:
            return "decode"
        return "extend" if request.computed else "prefill"

    # -- order ---------------------------------------------------------------------------------
    def region_of(self, req_id: str, scheduled: dict[str, int]) -> int:
        return REGIONS[self.policy][self.class_of(req_id, scheduled)]

    def stable_order(self, scheduled: dict[str, int]) -> list[str]:
        """The one order that keeps old requests by row and newcomers by admission."""

        def key(req_id: str) -> tuple[int, bool, int]:
            request = self.live[req_id]
            rank = request.life if request.is_new else self.rows.index(req_id)
            return self.region_of(req_id, scheduled), request.is_new, rank

        return sorted(self.live, key=key)

    def must_move(self, scheduled: dict[str, int]) -> set[str]:
        """Requests that no correct order leaves in their row: it lies in another region."""
        regions = sorted(self.region_of(r, scheduled) for r in self.live)
        return {
            r for r in self.live
            if (row := self.rows.index(r)) >= len(regions)
            or regions[row] != self.region_of(r, scheduled)
        }  # fmt: skip

    def take_order(self, rows: list[str]) -> None:
        self.rows = list(rows)
        for request in self.live.values():
            request.is_new = False

    def row_of(self, req_id: str | None) -> int:
        return -1 if req_id is None else self.rows.index(req_id)
