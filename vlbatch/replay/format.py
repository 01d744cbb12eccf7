"""Reading scenario files: strict about keys and types, with file, line and key in every refusal."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from vlbatch.replay.format_expect import read_expectation
from vlbatch.replay.json_node import Node, ScenarioError, TornLine
from vlbatch.replay.oracle import FAMILIES
from vlbatch.replay.scenario import (
    Add,
    Ask,
    Confirm,
    Drop,
    Event,
    EventLine,
    Expectation,
    FailEncode,
    Header,
    ItemSpec,
    Leave,
    Preempt,
    Resume,
    Scenario,
    Step,
    Weights,
)

T = TypeVar("T")

VERSION = 1
TRACE_NOTE = "a recorded trace"
"""What a recorder notes in its file."""


def read_scenario(path: str | Path) -> Scenario:
    """Read one file, through gzip if its name ends in ``.gz``.

    A recorded trace may end in the middle of a line: the rest of it counts.

    Raises:
        ScenarioError: with file, line and key.

    """
    file = str(path)
    reading = _Reading(file)
    torn = None
    try:
        for number, text in _lines(path, file):
            reading.take(Node.parse(file, number, text))
    except TornLine as error:
        if not reading.is_trace:
            raise
        torn = str(error)
    return reading.scenario(torn)


class _Reading:
    """What is read of a file so far."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._header: Header | None = None
        self._opening: list[Expectation] = []
        self._events: list[tuple[int, Event, list[Expectation]]] = []
        self.is_trace = False

    def take(self, node: Node) -> None:
        """Take in one line."""
        if self._header is None:
            self._header = _read_header(node)
        elif "expect" in cast("dict[str, object]", node.value):
            expectation = read_expectation(node.record(("expect", "note"))["expect"])
            (self._events[-1][2] if self._events else self._opening).append(expectation)
        elif node.value == {"note": TRACE_NOTE}:
            self.is_trace = True
        else:
            event = _read_event(node)
            if event is not None:
                self._events.append((node.line, event, []))

    def scenario(self, torn: str | None) -> Scenario:
        """Return all of it."""
        if self._header is None:
            reason = "the file is empty; expected a header"
            raise ScenarioError(self._file, 1, "vlbatch_scenario", reason)
        lines = tuple(EventLine(line, event, tuple(about)) for line, event, about in self._events)
        return Scenario(self._file, self._header, tuple(self._opening), lines, self.is_trace, torn)


def _lines(path: str | Path, file: str) -> Iterator[tuple[int, str]]:
    """Yield the number and text of each line that is not blank."""
    number = 0
    try:
        with gzip.open(path, "rb") if file.endswith(".gz") else Path(path).open("rb") as stream:
            for number, raw in enumerate(stream, start=1):
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield number, text
    except UnicodeDecodeError as error:
        raise ScenarioError(file, number, "", f"not UTF-8: {error.reason}") from error
    except EOFError as error:
        raise TornLine(file, number + 1, "", f"not gzip to its end: {error}") from error
    except (zlib.error, gzip.BadGzipFile) as error:
        raise ScenarioError(file, number + 1, "", f"not gzip: {error}") from error
    except OSError as error:
        raise ScenarioError(file, None, "", error.strerror or str(error)) from error


# -- header --------------------------------------------------------------------------------------
def _rate(node: Node) -> float:
    rate = node.number()
    if rate <= 0:
        node.fail(f"got {rate}; expected more than 0")
    return rate


_HEADER: dict[str, Callable[[Node], object]] = {
    "capacity": lambda node: node.integer(least=1),
    "max_model_len": lambda node: node.integer(least=1),
    "cache_rows": lambda node: node.integer(least=1),
    "encode_rows": lambda node: None if node.value is None else node.integer(least=1),
    "lookahead": lambda node: node.integer(least=0),
    "draft_tokens": lambda node: node.integer(least=0),
    "positions": lambda node: node.choice(FAMILIES),
    "tokens_per_second": _rate,
    "order": lambda node: node.choice(("split", "two", "arrival")),
    "stable": Node.flag,
    "chunking": lambda node: node.choice(("through", "whole")),
    "confirm": lambda node: node.choice(("auto", "manual")),
}


def _read_header(node: Node) -> Header:
    if "vlbatch_scenario" not in cast("dict[str, object]", node.value):
        node.fail('expected a header first: {"vlbatch_scenario": 1, ...}')
    given = node.record(("vlbatch_scenario", *_HEADER, "note"))
    version = given["vlbatch_scenario"].integer()
    if version != VERSION:
        given["vlbatch_scenario"].fail(f"got version {version}; expected {VERSION}")
    # Any: each value has the type of its field, because its reader returns it
    values: dict[str, Any] = {
        key: read(given[key]) for key, read in _HEADER.items() if key in given
    }
    return Header(**values)


# -- events --------------------------------------------------------------------------------------
def _read_event(node: Node) -> Event | None:
    """Read an event; a line with nothing but a note is none."""
    given = node.record((*_EVENTS, *_BESIDE, "expect", "note"))
    names = [name for name in given if name in _EVENTS]
    if not names and set(given) == {"note"}:
        return None
    if len(names) != 1:
        node.fail(f"got {list(given)}; expected one of {', '.join((*_EVENTS, 'expect', 'note'))}")
    event = _EVENTS[names[0]](given[names[0]])
    for name in [name for name in given if name in _BESIDE]:
        owner, read = _BESIDE[name]
        if owner != names[0]:
            given[name].fail(f"belongs to a {owner}")
        event = replace(event, **{name: read(given[name])})
    return event


# Any: each value has the type of its field, because its reader returns it
_BESIDE: dict[str, tuple[str, Callable[[Node], Any]]] = {
    "accept": ("step", lambda node: node.members(Node.integer)),
    "abandon": ("step", lambda node: node.array(Node.text)),
    "in_flight": ("confirm", lambda node: node.members(Node.integer)),
}
"""Keys beside an event: of which one, and how they are read."""


def _read_add(node: Node) -> Add:
    keys = ("req_id", "prompt_len", "items", "computed", "fields")
    given = node.record(keys, ("req_id", "prompt_len"))
    return Add(
        req_id=given["req_id"].text(),
        prompt_len=given["prompt_len"].integer(),
        items=given["items"].array(_read_item) if "items" in given else (),
        computed=given["computed"].integer() if "computed" in given else 0,
        fields=given["fields"].members(lambda field: field.value) if "fields" in given else {},
    )


def _read_item(node: Node) -> ItemSpec:
    given = node.record(_ITEM_KEYS, ("key", "offset", "length"))

    def maybe(key: str, read: Callable[[Node], T]) -> T | None:
        return read(given[key]) if key in given and given[key].value is not None else None

    return ItemSpec(
        key=given["key"].text(),
        modality=given["modality"].text() if "modality" in given else "image",
        offset=given["offset"].integer(),
        length=given["length"].integer(),
        grid=maybe("grid", _read_grid),
        embeds=maybe("embeds", _read_mask),
        rows=maybe("rows", Node.integer),
        seconds_per_grid=maybe("seconds_per_grid", Node.number),
    )


_ITEM_KEYS = (
    "key", "modality", "offset", "length", "grid", "embeds", "rows", "seconds_per_grid",
)  # fmt: skip


def _read_grid(node: Node) -> tuple[int, int, int]:
    sides = node.array(Node.integer)
    if len(sides) != 3:
        node.fail(f"got {len(sides)} numbers; expected [t, h, w]")
    return sides[0], sides[1], sides[2]


def _read_mask(node: Node) -> tuple[bool, ...]:
    """Read a string of 0 and 1, or an array of these or of booleans."""
    places = list(node.text()) if isinstance(node.value, str) else node.value
    if not isinstance(places, list) or any(place not in (0, 1, "0", "1") for place in places):
        node.fail("expected a string of 0 and 1, one a token of the span")
    return tuple(place in (1, "1") for place in places)


def _read_resume(node: Node) -> Resume:
    if isinstance(node.value, str):
        return Resume(node.value)
    given = node.record(("req_id", "computed"), ("req_id",))
    computed = given["computed"].integer() if "computed" in given else 0
    return Resume(given["req_id"].text(), computed)


def _read_keys(node: Node) -> FailEncode:
    if isinstance(node.value, str):
        return FailEncode((node.value,))
    return FailEncode(node.array(Node.text))


_EVENTS: dict[str, Callable[[Node], Event]] = {
    "add": _read_add,
    "step": lambda node: Step(node.members(Node.integer)),
    "ask": lambda node: Ask(node.members(Node.integer)),
    "confirm": lambda node: Confirm(node.members(Node.integer)),
    "finish": lambda node: Leave(node.text()),
    "abort": lambda node: Leave(node.text()),
    "preempt": lambda node: Preempt(node.text()),
    "resume": _read_resume,
    "drop": lambda node: Drop(node.text()),
    "weights": lambda node: Weights(node.integer()),
    "fail_encode": _read_keys,
}
