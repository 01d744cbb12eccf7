"""JSON values that know where they stand in a file, so that every refusal names line and key."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from vlbatch.errors import VlbatchError

T = TypeVar("T")


class ScenarioError(VlbatchError):
    """A scenario file cannot be read.

    Attributes:
        file: as given.
        line: number of the line, ``None`` if the file has none.
        key: where in the line, ``""`` for the line as a whole.
        reason: what was got and what was expected.

    """

    def __init__(self, file: str, line: int | None, key: str, reason: str) -> None:
        where = f"{file}: line {line}" if line is not None else file
        super().__init__(f"{where}: {key}: {reason}" if key else f"{where}: {reason}")
        self.file = file
        self.line = line
        self.key = key
        self.reason = reason


class TornLine(ScenarioError):
    """The last line ends in the middle: whoever wrote the file was stopped there."""


@dataclass(frozen=True, slots=True)
class Node:
    """One JSON value; the methods check its type and return it, or raise ``ScenarioError``.

    Attributes:
        file: as given.
        line: number of the line.
        key: path from the top of the line, such as ``add.items[0].grid``.
        value: what ``json`` read.

    """

    file: str
    line: int
    key: str
    value: object

    @classmethod
    def parse(cls, file: str, line: int, text: str) -> Node:
        """Read one line, which must be a JSON object without repeated keys.

        Raises:
            TornLine: it has no line end, and what is there is no JSON.

        """
        here = cls(file, line, "", None)
        try:
            value = json.loads(text, object_pairs_hook=here._unique, parse_constant=here._constant)
        except json.JSONDecodeError as error:
            reason = f"not JSON: {error.msg} at column {error.colno}"
            if not text.endswith("\n"):
                raise TornLine(file, line, "", reason) from error
            here.fail(reason)
        except RecursionError:
            here.fail("not JSON that can be read: nested too deeply")
        if not isinstance(value, dict):
            here.fail(f"got {_kind(value)}; expected an object")
        return cls(file, line, "", value)

    def _unique(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        members = dict(pairs)
        if len(members) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            self.fail(f"key {twice!r} is given twice in one object")
        return members

    def _constant(self, name: str) -> NoReturn:
        self.fail(f"got {name}; expected a finite number")

    def fail(self, reason: str) -> NoReturn:
        """Raise ``ScenarioError`` about this value."""
        raise ScenarioError(self.file, self.line, self.key, reason)

    def _expect(self, what: str) -> NoReturn:
        self.fail(f"got {_kind(self.value)}; expected {what}")

    # -- values ------------------------------------------------------------------------------
    def text(self) -> str:
        """Return a string."""
        if not isinstance(self.value, str):
            self._expect("a string")
        return self.value

    def integer(self, *, least: int | None = None) -> int:
        """Return an integer, of at least ``least``."""
        if not isinstance(self.value, int) or isinstance(self.value, bool):
            self._expect("an integer")
        if least is not None and self.value < least:
            self.fail(f"got {self.value}; expected at least {least}")
        return self.value

    def number(self) -> float:
        """Return an integer or a float, as a float."""
        if not isinstance(self.value, int | float) or isinstance(self.value, bool):
            self._expect("a number")
        return float(self.value)

    def flag(self) -> bool:
        """Return true or false."""
        if not isinstance(self.value, bool):
            self._expect("true or false")
        return self.value

    def choice(self, options: Iterable[str]) -> str:
        """Return one of some strings."""
        options = tuple(options)
        if self.value not in options:
            self.fail(f"got {self.value!r}; expected one of {', '.join(options)}")
        return str(self.value)

    def array(self, read: Callable[[Node], T]) -> tuple[T, ...]:
        """Return the elements of an array, each read by ``read``."""
        if not isinstance(self.value, list):
            self._expect("an array")
        return tuple(
            read(Node(self.file, self.line, f"{self.key}[{i}]", element))
            for i, element in enumerate(self.value)
        )

    def members(self, read: Callable[[Node], T]) -> dict[str, T]:
        """Return the members of an object with free keys, each read by ``read``."""
        return {name: read(member) for name, member in self._members().items()}

    def record(self, known: Iterable[str], required: Iterable[str] = ()) -> dict[str, Node]:
        """Return the members of an object whose keys are all known."""
        known = tuple(known)
        members = self._members()
        for name, member in members.items():
            if name not in known:
                member.fail(f"unknown key; known are {', '.join(known)}")
        for name in required:
            if name not in members:
                Node(self.file, self.line, self._path(name), None).fail("missing")
        return members

    def _members(self) -> dict[str, Node]:
        if not isinstance(self.value, dict):
            self._expect("an object")
        return {
            name: Node(self.file, self.line, self._path(name), member)
            for name, member in self.value.items()
        }

    def _path(self, name: str) -> str:
        return f"{self.key}.{name}" if self.key else name


def _kind(value: object) -> str:
    """Name a value's JSON type."""
    if value is None:
        return "null"
    names: dict[type[object], str] = {
        bool: "a boolean",
        int: "an integer",
        float: "a float",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return names[type(value)]
