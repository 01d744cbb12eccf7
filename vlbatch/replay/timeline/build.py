"""From a scenario to a timeline: the events are played on the library, and the file compared."""

from __future__ import annotations

import gzip
import json
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vlbatch import EntryKey, NumpyBackend, VLBatch, VlbatchError
from vlbatch.cache import Features
from vlbatch.replay import scenario as sc
from vlbatch.replay.items import by_offset, library_items, num_places, relax
from vlbatch.replay.timeline.cells import CellMaker
from vlbatch.replay.timeline.faults import wrong_encodes
from vlbatch.replay.timeline.model import Column, Timeline
from vlbatch.replay.world import make_batch
from vlbatch.step import Step

Orders = Mapping[int, Sequence[str]]
"""Line -> requests by row, of a runner with an order of its own."""


def build_timeline(scenario: sc.Scenario, orders: Orders | None = None) -> Timeline:
    """Play a scenario and take down what belongs into the picture.

    What the library refuses, or has otherwise than the file, becomes a fault of its step.

    Args:
        scenario: of a file.
        orders: of a trace whose runner has an order of its own, by the line of the note; see
            ``read_orders``.

    """
    lines = [line.line for line in scenario.events]
    by_event = {lines[bisect(lines, n) - 1]: order for n, order in (orders or {}).items()}
    builder = _Builder(scenario, by_event)
    for line in scenario.events:
        builder.play(line)
    return builder.finish()


def read_orders(path: str | Path) -> dict[int, list[str]]:
    """Orders that a recorder noted: line -> requests by row. What cannot be read is left out."""
    return {
        number: list(note["order"])
        for number, note in _notes(path)
        if isinstance(note, dict) and isinstance(note.get("order"), list)
    }


def _notes(path: str | Path) -> Iterator[tuple[int, object]]:
    opener = gzip.open if str(path).endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, text in enumerate(lines, start=1):
                if text.startswith('{"note"'):
                    yield number, json.loads(text).get("note")
    except (EOFError, ValueError):  # a torn end, of which the reader of the file has told already
        return


class _Builder:
    """Plays events on a batch without fields, whose features are zeros."""

    def __init__(self, scenario: sc.Scenario, orders: Orders) -> None:
        backend = NumpyBackend()
        self._vl: VLBatch[npt.NDArray[np.int64]] = make_batch(scenario, [], backend)
        self._orders = orders
        self._cells = CellMaker(self._vl)
        self._numbers = self._cells.numbers
        self._delivers: dict[tuple[str, int], int] = {}
        self._fail_next: set[str] = set()
        self._ahead = Column(0, 0)  # what happened since the last step
        self.timeline = Timeline(Path(scenario.path).name)

    def play(self, line: sc.EventLine) -> None:
        """Play one event."""
        if line.expects_refusal and isinstance(line.event, sc.Add) and line.event.fields:
            return  # here are no fields that could be refused
        try:
            self._dispatch(line)
        except VlbatchError as error:
            gone = isinstance(line.event, sc.Leave)
            if not line.expects_refusal and not gone:
                self._ahead.faults.append(f"line {line.line}: refused: {error}")
                if isinstance(line.event, sc.Step):
                    self._close(line.line)
        else:
            if line.expects_refusal and not isinstance(line.event, sc.Step):
                self._ahead.faults.append(f"line {line.line}: to be refused, but was accepted")

    def finish(self) -> Timeline:
        """The timeline; a fault after the last step gets a column of its own."""
        if self._ahead.faults:
            self._close(self._ahead.line)
        return self.timeline

    def _close(self, line: int) -> None:
        """The column under way is complete."""
        self._ahead.number, self._ahead.line = len(self.timeline.columns) + 1, line
        self.timeline.columns.append(self._ahead)
        self._ahead = Column(0, 0)

    def _dispatch(self, line: sc.EventLine) -> None:
        event = line.event
        match event:
            case sc.Add():
                self._add(event, expects_refusal=line.expects_refusal)
            case sc.Step():
                self._step(event, line)
            case sc.Leave():
                self._vl.remove(event.req_id)
                self._leave(event.req_id).finished.append(self._numbers[event.req_id])
            case sc.Preempt():
                self._vl.preempt(event.req_id)
                self._leave(event.req_id).preempted.append(self._numbers[event.req_id])
            case sc.Resume():
                self._vl.resume(event.req_id, computed=event.computed)
                self._ahead.resumed.append(self._numbers[event.req_id])
            case sc.Confirm():
                for req_id, computed in event.computed.items():
                    self._vl.confirm(req_id, computed, in_flight=event.in_flight.get(req_id, 0))
            case sc.Drop():
                self._vl.features.cache.drop(event.key)
            case sc.Weights():
                self._vl.features.cache.set_epoch(event.epoch)
            case sc.FailEncode():
                self._fail_next.update(event.keys)
            case sc.Ask():
                self._vl.ask(event.wanted)

    def _add(self, event: sc.Add, *, expects_refusal: bool) -> None:
        given = by_offset(event.items)
        specs = given if expects_refusal else [relax(spec) for spec in given]
        self._vl.add(
            event.req_id,
            prompt_len=event.prompt_len,
            items=library_items(specs),
            computed=event.computed,
        )
        self._cells.items[event.req_id] = specs
        for number, spec in enumerate(given):
            rows = num_places(spec) if spec.rows is None else spec.rows
            self._delivers[event.req_id, number] = rows
        self._numbers[event.req_id] = len(self.timeline.requests)
        self.timeline.requests.append(event.req_id)
        self._ahead.admitted.append(self._numbers[event.req_id])

    def _leave(self, req_id: str) -> Column:
        """The column after which a request leaves."""
        self._cells.last_rows.pop(req_id, None)
        return self.timeline.columns[-1] if self.timeline.columns else self._ahead

    # -- a step ------------------------------------------------------------------------------
    def _step(self, event: sc.Step, line: sc.EventLine) -> None:
        column = self._ahead
        step = self._vl.begin(event.scheduled)
        lost = self._encode(step, column, event.abandon)
        column.failed = [self._numbers[req_id] for req_id in step.failed]
        column.hits = [key.content for key in step.work.hits]
        column.evicted = [key.content for key in step.work.evicted]
        for expectation in line.expectations:
            column.faults += wrong_encodes(expectation, column.encoded, column.hits, lost)
        if event.abandon is not None:
            self._vl.abandon(step)
        else:
            order = self._vl.arrange(step)
            self._cells.fill(column, order, line.expectations, self._orders.get(line.line))
            self._vl.complete(order, {r: n for r, n in event.accept.items() if r in order.req_ids})
        self._close(line.line)

    def _encode(self, step: Step, column: Column, only: tuple[str, ...] | None) -> set[str]:
        """Encode with zeros, all or some; returns the keys that failed."""
        outputs: dict[EntryKey, Features] = {}
        errors: dict[EntryKey, Exception] = {}
        for task in step.tasks:
            key = task.key.content
            if only is not None and key not in only:
                continue
            if key in self._fail_next:
                self._fail_next.discard(key)
                errors[task.key] = RuntimeError("told to fail")
                continue
            rows = self._delivers[task.reference.req_id, task.reference.item]
            outputs[task.key] = (np.zeros((rows, 1), dtype=np.int8),)
            if rows == task.placed.num_rows:
                column.encoded[key] = rows
        self._vl.commit(step, outputs, errors)
        return {task.key.content for task in step.tasks} - column.encoded.keys()
