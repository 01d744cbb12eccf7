"""The first place where a file, the oracle and the library do not agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from vlbatch.replay.oracle import FeatureRow, Finding


class Divergence(Exception):
    """What was expected and what happened.

    Attributes:
        line: number of the event, or of the expectation that is not met.
        what: the thing compared.
        expected: by the file or the oracle; of a trace, what is right.
        got: from the library; of a trace, what the runner did.
        req_id: the request concerned, where it is one.
        step: number of steps up to there, the diverging one included.
        table: tokens with wrong features.

    """

    def __init__(
        self,
        line: int,
        what: str,
        expected: object,
        got: object,
        *,
        req_id: str | None = None,
        step: int = 0,
        table: tuple[FeatureRow, ...] = (),
    ) -> None:
        self.line = line
        self.what = what
        self.expected = expected
        self.got = got
        self.req_id = req_id
        self.step = step
        self.table = table
        whose = f" of request {req_id!r}" if req_id is not None else ""
        super().__init__(
            f"line {line}, step {step}: {what}{whose}: expected {show(expected)}, got {show(got)}"
        )

    @classmethod
    def of(cls, finding: Finding, line: int, step: int) -> Divergence:
        """A difference between oracle and library after the event of a line."""
        return cls(
            line,
            finding.what,
            finding.expected,
            finding.got,
            req_id=finding.req_id,
            step=step,
            table=finding.table,
        )

    def turned(self) -> Divergence:
        """The same of a trace: what the library did is right, what the file has was done."""
        table = tuple(replace(row, expected=row.got, got=row.expected) for row in self.table)
        return Divergence(
            self.line,
            self.what,
            self.got,
            self.expected,
            req_id=self.req_id,
            step=self.step,
            table=table,
        )


@dataclass(frozen=True, slots=True)
class FileResult:
    """Outcome of one file: ``ok``, a divergence, or why it cannot be read.

    Attributes:
        path: as given.
        divergence: the first, if there is one.
        error: why the file cannot be read.
        error_line: its line, where it is one line.
        num_events: events of the file.
        torn: what is wrong with the last line of a trace that was cut off.

    """

    path: str
    divergence: Divergence | None = None
    error: str | None = None
    error_line: int | None = None
    num_events: int = 0
    torn: str | None = None

    @property
    def status(self) -> str:
        """``"ok"``, ``"diverged"`` or ``"unreadable"``."""
        if self.error is not None:
            return "unreadable"
        return "ok" if self.divergence is None else "diverged"

    def as_data(self) -> dict[str, object]:
        """What ``--json`` writes."""
        data: dict[str, object] = {
            "file": self.path,
            "ok": self.status == "ok",
            "status": self.status,
            "events": self.num_events,
        }
        found = self.divergence
        if found is not None:
            data |= {
                "line": found.line,
                "step": found.step,
                "req_id": found.req_id,
                "what": found.what,
                "expected": as_json(found.expected),
                "got": as_json(found.got),
                "message": str(found),
                "table": [
                    {"req_id": r.req_id, "token": r.token, "expected": r.expected, "got": r.got}
                    for r in found.table
                ],
            }
        if self.torn is not None:
            data["torn"] = self.torn
        if self.error is not None:
            data |= {"line": self.error_line, "message": self.error}
        return data


def show(value: object) -> str:
    """A value on one line; text as it is."""
    return value if isinstance(value, str) else repr(as_json(value))


def as_json(value: object) -> object:
    """Tuples as lists, sets sorted, keys as text: what JSON can hold."""
    if isinstance(value, Mapping):
        return {str(key): as_json(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(element) for element in value]
    if isinstance(value, set | frozenset):
        return sorted((as_json(element) for element in value), key=repr)
    return value if isinstance(value, str | int | float | None) else repr(value)
