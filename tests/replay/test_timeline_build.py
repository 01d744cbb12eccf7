"""From a file to a timeline: rows, regions, chunks through images, events, and what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_runner import ToyRunner

from vlbatch import Item
from vlbatch.replay import read_scenario, replay_file
from vlbatch.replay.recorder import Recorder
from vlbatch.replay.timeline import Piece, Timeline, build_timeline, read_orders

SCENARIOS = sorted((Path(__file__).parents[2] / "fixtures" / "scenarios").glob("*.jsonl"))

CAT = {"key": "cat", "offset": 2, "length": 6, "grid": [1, 2, 3]}


def write(path: Path, lines: Iterable[dict[str, Any]], **header: Any) -> Path:
    text = [json.dumps(line) for line in ({"vlbatch_scenario": 1, **header}, *lines)]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


def build(path: Path) -> Timeline:
    return build_timeline(read_scenario(path), read_orders(path))


def rows_of(timeline: Timeline, step: int) -> list[str]:
    return [timeline.requests[cell.request] for cell in timeline.columns[step - 1].cells]


def faults_of(timeline: Timeline) -> dict[int, list[str]]:
    """Step -> its faults."""
    return {c.number: timeline.faults(c) for c in timeline.columns if c.num_faults}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


class TestRows:
    EVENTS = (
        {"add": {"req_id": "a", "prompt_len": 4}},
        {"add": {"req_id": "b", "prompt_len": 9, "items": [CAT]}},
        {"step": {"a": 4, "b": 4}},
        {"add": {"req_id": "c", "prompt_len": 3}},
        {"step": {"a": 1, "b": 3, "c": 3}},
        {"finish": "a"},
        {"step": {"b": 2, "c": 1}},
        {"preempt": "b"},
        {"step": {"c": 1}},
        {"resume": "b"},
        {"step": {"b": 9}},
    )

    def test_rows_regions_and_moves(self, path: Path) -> None:
        """Each step has its requests by row, with region, chunk and the row they came from."""
        timeline = build(write(path, self.EVENTS))

        assert [rows_of(timeline, n) for n in (1, 2, 3)] == [
            ["a", "b"],
            ["a", "b", "c"],
            ["c", "b"],
        ]
        second, third = timeline.columns[1], timeline.columns[2]
        assert [cell.region for cell in second.cells] == ["decode", "extend", "prefill"]
        assert second.region_bounds() == [1, 2, 3]
        assert [cell.chunk for cell in second.cells] == [(4, 5), (4, 7), (0, 3)]
        assert [cell.came_from for cell in third.cells] == [2, None]
        assert (second.moved, third.moved) == (0, 1)

    def test_idle_rows_come_last(self, path: Path) -> None:
        """A request without tokens in a step has a row behind the others, as idle."""
        timeline = build(write(path, self.EVENTS))

        cells = timeline.columns[4].cells
        assert [(timeline.requests[c.request], c.region) for c in cells] == [
            ("b", "prefill"),
            ("c", "idle"),
        ]

    def test_comings_and_goings(self, path: Path) -> None:
        """Requests are listed with the step before or after which they came or went."""
        timeline = build(write(path, self.EVENTS))

        names = [
            {
                what: [timeline.requests[r] for r in getattr(column, what)]
                for what in ("admitted", "resumed", "finished", "preempted")
                if getattr(column, what)
            }
            for column in timeline.columns
        ]
        assert names == [
            {"admitted": ["a", "b"]},
            {"admitted": ["c"], "finished": ["a"]},
            {"preempted": ["b"]},
            {},
            {"resumed": ["b"]},
        ]

    def test_back_in_another_row_is_no_move(self, path: Path) -> None:
        """A request that was preempted and resumed between two steps was not moved."""
        events = [
            *({"add": {"req_id": r, "prompt_len": 9}} for r in "abc"),
            {"step": {"a": 2, "b": 2, "c": 2}},
            {"finish": "a"}, {"preempt": "c"}, {"resume": "c"},
            {"step": {"b": 2, "c": 2}},
        ]  # fmt: skip
        cells = build(write(path, events)).columns[1].cells

        assert [cell.came_from for cell in cells] == [1, None]

    def test_name_used_again(self, path: Path) -> None:
        """A request that takes the name of an earlier one is another request."""
        once = [{"add": {"req_id": "a", "prompt_len": 2}}, {"step": {"a": 2}}, {"finish": "a"}]
        timeline = build(write(path, [*once, *once]))

        assert timeline.requests == ["a", "a"]
        assert [column.cells[0].request for column in timeline.columns] == [0, 1]


class TestMedia:
    def test_chunks_through_an_image(self, path: Path) -> None:
        """A chunk has the part of the image that lies in it, and says where it is cut."""
        timeline = build(write(path, TestRows.EVENTS))

        pieces = [column.cells[1].pieces for column in timeline.columns[:3]]
        assert pieces == [
            (Piece("cat", "image", (2, 4), (0, 2), 6, is_cut_before=False, is_cut_after=True),),
            (Piece("cat", "image", (4, 7), (2, 5), 6, is_cut_before=True, is_cut_after=True),),
            (Piece("cat", "image", (7, 8), (5, 6), 6, is_cut_before=True, is_cut_after=False),),
        ]

    def test_rows_under_a_mask(self, path: Path) -> None:
        """Feature rows of a masked item count its true places only."""
        item = CAT | {"embeds": "101011", "grid": [1, 2, 2]}
        add = {"add": {"req_id": "a", "prompt_len": 9, "items": [item]}}
        timeline = build(write(path, [add, {"step": {"a": 5}}, {"step": {"a": 4}}]))

        assert [column.cells[0].pieces[0].rows for column in timeline.columns] == [(0, 2), (2, 4)]

    def test_step_given_up(self, path: Path) -> None:
        """A step that is given up has a column without rows, and what was encoded in it."""
        dog = {**CAT, "key": "dog", "offset": 8}
        lines = [
            {"add": {"req_id": "a", "prompt_len": 15, "items": [CAT, dog]}},
            {"step": {"a": 15}, "abandon": ["dog"]},
            {"expect": {"encoded": ["dog"]}},
            {"step": {"a": 15}},
            {"expect": {"encoded": ["cat"]}},
        ]
        timeline = build(write(path, lines))

        assert [(c.number, len(c.cells), c.encoded) for c in timeline.columns] == [
            (1, 0, {"dog": 6}), (2, 1, {"cat": 6})
        ]  # fmt: skip
        assert not faults_of(timeline)

    def test_encodes_hits_and_evictions(self, path: Path) -> None:
        """A step lists what it encoded, found and evicted; failures are among the requests."""

        def add(req_id: str, key: str) -> dict[str, Any]:
            return {"add": {"req_id": req_id, "prompt_len": 9, "items": [CAT | {"key": key}]}}

        timeline = build(
            write(
                path,
                [
                    add("a", "cat"), {"step": {"a": 9}}, {"finish": "a"},
                    add("b", "cat"), {"step": {"b": 9}}, {"finish": "b"},
                    add("c", "dog"), {"step": {"c": 9}},
                    {"fail_encode": ["owl"]}, add("d", "owl"), {"step": {"d": 9, "c": 1}},
                ],
                cache_rows=6,
            )
        )  # fmt: skip

        columns = timeline.columns
        assert [column.encoded for column in columns[:3]] == [{"cat": 6}, {}, {"dog": 6}]
        assert [column.hits for column in columns[:3]] == [[], ["cat"], []]
        assert [column.evicted for column in columns] == [[], [], ["cat"], ["dog"]]
        assert [timeline.requests[r] for r in columns[3].failed] == ["d"]
        assert rows_of(timeline, 4) == ["c"]


class TestFaults:
    def record(
        self, path: Path, *, delivered: tuple[str, str] = ("cat", "dog"), positions: object = None
    ) -> Timeline:
        """A trace of one step of two requests, of which a has a cat and b has a dog."""
        rows = {
            key: np.random.default_rng(n).standard_normal((6, 4))
            for n, key in enumerate(("cat", "dog"))
        }
        if positions is None:
            positions = [
                [0, 1, 2, 2, 2, 2, 2, 2, 5] * 2,
                [0, 1, 2, 2, 2, 3, 3, 3, 5] * 2,
                [0, 1, 2, 3, 4, 2, 3, 4, 5] * 2,
            ]
        with Recorder(path) as recorder:
            for req_id, key in (("a", "cat"), ("b", "dog")):
                item = Item(key, "image", offset=2, length=6, grid=(1, 2, 3))
                recorder.admit(req_id, prompt_len=9, items=[item])
            recorder.step({"a": 9, "b": 9})
            for key, features in rows.items():
                recorder.encoded(key, features)
            recorder.gathered(
                ["a", "b"],
                tokens=[*range(2, 8), *range(11, 17)],
                features=[rows[key] for key in delivered],
                positions=positions,
            )
        return build(path)

    def test_honest_trace_has_none(self, path: Path) -> None:
        """A trace of what is right has no fault."""
        assert self.record(path).first_fault() is None

    def test_wrong_features(self, path: Path) -> None:
        """The request whose tokens got other rows is marked, with the first of them."""
        timeline = self.record(path, delivered=("cat", "cat"))

        assert faults_of(timeline) == {
            1: ["b in row 1: token 2 got cat row 0; right is dog row 0 (and 5 tokens more)"]
        }

    def test_wrong_positions(self, path: Path) -> None:
        """The request with other positions is marked, with its first such token."""
        positions = np.arange(18) % 9 * np.ones((3, 1), dtype=int)
        timeline = self.record(path, positions=positions)

        assert faults_of(timeline)[1][1] == (
            "b in row 1: token 3 is at (3, 3, 3); right is (2, 2, 3)"
        )

    def test_wrong_row(self, path: Path) -> None:
        """A row that holds what belongs to another request is marked."""
        events = [*TestRows.EVENTS[:5], {"expect": {"order": ["b", "b", "c"]}}]
        timeline = build(write(path, events))

        assert timeline.first_fault() == (2, "a in row 0: holds what belongs to b")

    def test_wrong_encodes(self, path: Path) -> None:
        """A step that encoded something else is marked as a whole."""
        events = [*TestRows.EVENTS[1:2], {"step": {"b": 9}}, {"expect": {"encoded": ["dog"]}}]

        assert build(write(path, events)).first_fault() == (1, "encoded dog; right is cat")

    def test_refused_event(self, path: Path) -> None:
        """An event that the library refuses is a fault; the picture goes on behind it."""
        events = [
            {"add": {"req_id": "a", "prompt_len": 4}},
            {"step": {"a": 5}},
            {"step": {"a": 4}},
        ]
        timeline = build(write(path, events))

        assert [len(column.cells) for column in timeline.columns] == [0, 1]
        number, fault = timeline.first_fault() or (0, "")
        assert number == 1
        assert fault.startswith("line 3: refused: request 'a': got 5 tokens")

    def test_expected_refusal_is_none(self, path: Path) -> None:
        """An event that the file expects to be refused is no fault, and no step."""
        events = [
            {"add": {"req_id": "a", "prompt_len": 4}},
            {"step": {"a": 5}},
            {"expect": {"error": {"type": "InvalidSchedule"}}},
            {"step": {"a": 4}},
        ]
        timeline = build(write(path, events))

        assert timeline.first_fault() is None
        assert len(timeline.columns) == 1

    @pytest.mark.parametrize("file", SCENARIOS, ids=lambda file: file.stem)
    def test_agrees_with_the_replay(self, file: Path) -> None:
        """A file has a fault in its picture exactly if it diverges when it is replayed."""
        assert (build(file).first_fault() is None) == (replay_file(file).status == "ok")


class TestOwnOrder:
    def test_rows_of_the_runner(self, path: Path) -> None:
        """A trace of a runner with its own order is drawn in that order."""
        with Recorder(path) as recorder:
            runner = ToyRunner(recorder)
            for req_id in "abc":
                runner.add(req_id, 4, [])
            runner.step({"a": 4, "b": 4, "c": 4})
            runner.finish("a")
            runner.step({"b": 1, "c": 1})

        timeline = build(path)

        assert [rows_of(timeline, n) for n in (1, 2)] == [["a", "b", "c"], ["c", "b"]]
        assert [cell.came_from for cell in timeline.columns[1].cells] == [2, None]
        assert timeline.first_fault() is None
