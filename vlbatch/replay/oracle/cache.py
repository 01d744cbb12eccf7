"""Feature rows in the encoder cache: who refers to what, what may go, and when it was last used."""

from __future__ import annotations

from dataclasses import dataclass, field

from vlbatch.replay.oracle.values import Key, Occurrence


@dataclass(slots=True)
class OracleEntry:
    """Features of one key: ``references`` has one entry an occurrence."""

    rows: int
    ready: bool = False
    references: set[Occurrence] = field(default_factory=set)


class OracleCache:
    """A budget of feature rows.

    Attributes:
        budget: feature rows.
        epoch: of the present weights.
        clock: counts events.
        entries: what is there.
        unused: ready entries without reference, in the order in which they became so -> clock.

    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.epoch = 0
        self.clock = 0
        self.entries: dict[Key, OracleEntry] = {}
        self.unused: dict[Key, int] = {}

    @property
    def used(self) -> int:
        """Feature rows of all entries."""
        return sum(entry.rows for entry in self.entries.values())

    @property
    def free(self) -> int:
        """Feature rows of no entry."""
        return self.budget - self.used

    @property
    def reclaimable(self) -> int:
        """Feature rows of no entry, or of one that nobody refers to."""
        return self.free + sum(self.entries[key].rows for key in self.unused)

    def refer(self, key: Key, occurrence: Occurrence) -> None:
        """Add a reference."""
        self.entries[key].references.add(occurrence)
        self.unused.pop(key, None)

    def release(self, key: Key, occurrence: Occurrence) -> None:
        """Take a reference away; released twice is released once."""
        entry = self.entries.get(key)
        if entry is not None and occurrence in entry.references:
            entry.references.remove(occurrence)
            self.settle(key)

    def settle(self, key: Key) -> None:
        """Without references an entry of old weights is gone, one of the present weights waits."""
        entry = self.entries[key]
        if entry.references or not entry.ready:
            return
        if key[1] == self.epoch:
            self.unused[key] = self.clock
        else:
            self.remove(key)

    def remove(self, key: Key) -> None:
        """Lose an entry."""
        del self.entries[key]
        self.unused.pop(key, None)

    def set_epoch(self, epoch: int) -> None:
        """Change weights."""
        self.epoch = epoch
        for key in [key for key in self.unused if key[1] != epoch]:
            self.remove(key)

    def drop(self, content: str) -> None:
        """Lose the unreferenced entries of a content."""
        for key in [key for key in self.unused if key[0] == content]:
            self.remove(key)
