"""A trace as the picture needs it: plain data, by step and row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Region: TypeAlias = Literal["decode", "extend", "prefill", "idle"]
"""What a request does in a step: compute generated tokens, a later chunk of its prompt, the first
one, or nothing."""

REGIONS: tuple[Region, ...] = ("decode", "extend", "prefill", "idle")


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of an image or video that lies in a chunk.

    Attributes:
        key: identity of the item.
        modality: ``"image"``, ``"video"`` or ``"audio"``.
        span: tokens ``[first, stop)`` of the item that lie in the chunk.
        rows: its feature rows ``[first, stop)`` there.
        num_rows: of the whole item.
        is_cut_before: the item begins in an earlier chunk.
        is_cut_after: it goes on in a later one.

    """

    key: str
    modality: str
    span: tuple[int, int]
    rows: tuple[int, int]
    num_rows: int
    is_cut_before: bool
    is_cut_after: bool


@dataclass(frozen=True, slots=True)
class Cell:
    """A request in a row, in one step.

    Attributes:
        request: number of the request.
        row: its row.
        region: what it does there.
        chunk: tokens ``[first, stop)`` that it computes.
        prompt_len: tokens of its prompt.
        came_from: its row in the step before, if that was another one.
        pieces: media in the chunk.
        faults: what a trace says that is not right, one sentence each.

    """

    request: int
    row: int
    region: Region
    chunk: tuple[int, int]
    prompt_len: int
    came_from: int | None = None
    pieces: tuple[Piece, ...] = ()
    faults: tuple[str, ...] = ()


@dataclass(slots=True)
class Column:
    """One step, with what happened right before and after it.

    Attributes:
        number: of the step, from 1 on.
        line: in the file.
        cells: by row.
        encoded: key -> feature rows encoded.
        hits: keys found ready.
        evicted: keys that went for space.
        moved: requests that changed row.
        admitted: requests that came before this step.
        resumed: requests that came back before it.
        finished: requests that left after it.
        preempted: requests that were preempted after it.
        failed: requests that the step lost.
        faults: what is not right about the step as a whole.

    """

    number: int
    line: int
    cells: list[Cell] = field(default_factory=list)
    encoded: dict[str, int] = field(default_factory=dict)
    hits: list[str] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)
    moved: int = 0
    admitted: list[int] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def region_bounds(self) -> list[int]:
        """Rows where decode, extend and prefill end, if rows are in that order; else empty."""
        order = [REGIONS.index(cell.region) for cell in self.cells]
        if order != sorted(order):
            return []
        return [sum(region <= bound for region in order) for bound in range(3)]

    def has_bound(self, bound: int) -> bool:
        """Whether there are rows on both sides of the end of a region."""
        bounds = self.region_bounds()
        return bool(bounds) and 0 < bounds[bound] < len(self.cells)

    @property
    def num_faults(self) -> int:
        """Faults of the step and of its cells."""
        return len(self.faults) + sum(len(cell.faults) for cell in self.cells)


@dataclass(slots=True)
class Timeline:
    """A whole trace.

    Attributes:
        title: name of the file.
        requests: names by number, in order of admission; a name used again has a number again.
        columns: by step.

    """

    title: str
    requests: list[str] = field(default_factory=list)
    columns: list[Column] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Rows in use at most."""
        return max((cell.row + 1 for c in self.columns for cell in c.cells), default=0)

    def cells(self) -> Iterator[tuple[int, Column, Cell]]:
        """Every cell, with the number of its column from 0 on."""
        for step, column in enumerate(self.columns):
            for cell in column.cells:
                yield step, column, cell

    def faults(self, column: Column) -> list[str]:
        """Faults of a step, with the request and row of those of a cell."""
        of_cells = [
            f"{self.requests[cell.request]} in row {cell.row}: {fault}"
            for cell in column.cells
            for fault in cell.faults
        ]
        return [*of_cells, *column.faults]

    def first_fault(self) -> tuple[int, str] | None:
        """Number of the first step with a fault, and what it is."""
        for column in self.columns:
            for fault in self.faults(column):
                return column.number, fault
        return None
