"""Who is in which row, and how many had to move.

The rules. A newcomer takes the lowest hole, or the row behind the last, until the next step. A
step puts its requests in front, by region, and those without tokens behind them; no hole is left.
Stable: inside a region requests keep their relative order and newcomers follow by arrival.
Otherwise any order by region is right in which those whose row lies in their region keep it.
"""

from __future__ import annotations

from collections.abc import Mapping

from vlbatch.replay.oracle.requests import DECODE, EXTEND, PREFILL
from vlbatch.replay.oracle.values import Finding

_GROUPS = {
    "split": {DECODE: 0, EXTEND: 1, PREFILL: 2},
    "two": {DECODE: 0, EXTEND: 1, PREFILL: 1},
    "arrival": {DECODE: 0, EXTEND: 0, PREFILL: 0},
}
_IDLE = 3


class OracleRows:
    """Row -> request.

    Attributes:
        rows: ``None`` for a hole.
        newcomers: requests that entered since the last step, by arrival.
        moved: requests that changed row in the last step and were there before it.
        moved_busy: those of them that had tokens in it.

    """

    def __init__(self, policy: str, *, stable: bool) -> None:
        self._groups = _GROUPS[policy]
        self._stable = stable
        self.rows: list[str | None] = []
        self.newcomers: list[str] = []
        self.moved = 0
        self.moved_busy = 0

    def enter(self, req_id: str) -> None:
        """Place a newcomer."""
        if None in self.rows:
            self.rows[self.rows.index(None)] = req_id
        else:
            self.rows.append(req_id)
        self.newcomers.append(req_id)

    def leave(self, req_id: str) -> None:
        """Leave a hole."""
        self.rows[self.rows.index(req_id)] = None
        if req_id in self.newcomers:
            self.newcomers.remove(req_id)

    def arrange(
        self, regions: Mapping[str, int], order: list[str], idle: list[str]
    ) -> list[Finding]:
        """Check the order of a step, and take it over.

        Args:
            regions: request -> region, of those with tokens.
            order: row -> request as seen, of those with tokens.
            idle: the others as seen, in row order.

        """
        present = [req_id for req_id in self.rows if req_id is not None]
        group = {r: self._groups[regions[r]] if r in regions else _IDLE for r in present}
        stable = sorted(
            present,
            key=lambda r: (
                group[r],
                r in self.newcomers,
                self.newcomers.index(r) if r in self.newcomers else self.rows.index(r),
            ),
        )
        seen = [*order, *idle]
        findings = []
        if self._stable and seen != stable:
            findings.append(Finding("order of rows", stable, seen))
        elif sorted(seen) != sorted(present) or [group[r] for r in seen] != sorted(group.values()):
            findings.append(Finding("order of rows, in any order by region", stable, seen))
        elif not self._stable:
            findings = self._needless_moves(group, seen)
        if sorted(seen) != sorted(present):
            seen = stable
        moved = [
            r for row, r in enumerate(seen) if r not in self.newcomers and self.rows.index(r) != row
        ]
        self.moved = len(moved)
        self.moved_busy = sum(r in regions for r in moved)
        self.rows = list(seen)
        self.newcomers = []
        return findings

    def _needless_moves(self, group: Mapping[str, int], seen: list[str]) -> list[Finding]:
        """Requests that moved though their old row lies in their region of the new order."""
        bounds = [group[r] for r in seen]
        findings = []
        for req_id in seen:
            row = self.rows.index(req_id)
            stays = row < len(seen) and bounds[row] == group[req_id]
            if stays and seen[row] != req_id and req_id not in self.newcomers:
                findings.append(Finding("row", row, seen.index(req_id), req_id))
        return findings
