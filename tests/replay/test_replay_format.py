"""Reading scenario files: what is accepted, and where every refusal points."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from replay_builders import add, expect, image, replay_lines, step, write_file

from vlbatch.replay import ScenarioError, read_scenario
from vlbatch.replay.scenario import Add, FailEncode, FeatureRun, Header, Resume, Step

ITEM = {"key": "X", "offset": 1, "length": 4, "grid": [1, 2, 2]}


def adding(**changes: Any) -> dict[str, Any]:
    """An ``add`` of one item with other members."""
    return {"add": {"req_id": "A", "prompt_len": 8, "items": [{**ITEM, **changes}]}}


class TestRefusals:
    @pytest.mark.parametrize(
        ("line", "key", "said"),
        [
            ({"jump": 1}, "jump", "unknown key; known are add, step, ask"),
            ({"add": {"req_id": "A"}}, "add.prompt_len", "missing"),
            ({"add": {"prompt_len": 4}}, "add.req_id", "missing"),
            ({"add": {"req_id": 7, "prompt_len": 4}}, "add.req_id", "an integer; expected a str"),
            ({"add": {"req_id": "A", "prompt_len": True}}, "add.prompt_len", "a boolean"),
            ({"add": {"req_id": "A", "prompt_len": 4.0}}, "add.prompt_len", "a float"),
            ({"add": {"req_id": "A", "prompt_len": 4, "x": 1}}, "add.x", "known are req_id, pro"),
            ({"add": {"req_id": "A", "prompt_len": 4, "items": {}}}, "add.items", "an array"),
            (adding(size=4), "add.items[0].size", "known are key, modality, offset"),
            (adding(grid=[1, 2]), "add.items[0].grid", "got 2 numbers; expected [t, h, w]"),
            (adding(grid=[1, 2, "2"]), "add.items[0].grid[2]", "a string; expected an integer"),
            (adding(embeds="11x1"), "add.items[0].embeds", "a string of 0 and 1"),
            (adding(embeds=5), "add.items[0].embeds", "a string of 0 and 1"),
            (adding(key=None), "add.items[0].key", "null; expected a string"),
            ({"step": []}, "step", "an array; expected an object"),
            ({"step": {"A": "1"}}, "step.A", "a string; expected an integer"),
            ({"step": {"A": 1}, "accept": {"A": 0.5}}, "accept.A", "a float"),
            ({"finish": "A", "accept": {}}, "accept", "belongs to a step"),
            ({"confirm": {}, "abandon": []}, "abandon", "belongs to a step"),
            ({"step": {"A": 1}, "abandon": "X"}, "abandon", "a string; expected an array"),
            ({"step": {"A": 1}, "in_flight": {}}, "in_flight", "belongs to a confirm"),
            ({"finish": "A", "abort": "B"}, "", "expected one of add, step"),
            ({"finish": ["A"]}, "finish", "an array; expected a string"),
            ({"accept": {"A": 1}}, "", "got ['accept']; expected one of"),
            ({"resume": {"computed": 3}}, "resume.req_id", "missing"),
            ({"resume": {"req_id": "A", "at": 3}}, "resume.at", "known are req_id, computed"),
            ({"weights": "1"}, "weights", "expected an integer"),
            ({"fail_encode": [1]}, "fail_encode[0]", "expected a string"),
            (expect(row=1), "expect.row", "known are order, regions, moved, encoded"),
            (expect(order="A"), "expect.order", "a string; expected an array"),
            (expect(regions={"decode": 1, "rest": 2}), "expect.regions.rest", "known are decode"),
            (expect(features={"A": [[1, "X", 0]]}), "expect.features.A[0]", "got 3 elements"),
            (expect(features={"A": [[1, 2, 0, 1]]}), "expect.features.A[0][1]", "a string"),
            (expect(positions={"A": [[1, 2], [1]]}), "expect.positions.A", "as many each"),
            (expect(cache={"rows": 4}), "expect.cache.rows", "known are used, free"),
            (expect(error={"kind": "BatchFull"}), "expect.error.kind", "known are type, req_id"),
            ({"expect": {}, "step": {}}, "step", "unknown key; known are expect, note"),
            ("{", "", "not JSON"),
            ('["add"]', "", "an array; expected an object"),
            ('{"step": {"A": 1, "A": 2}}', "", "key 'A' is given twice"),
            ('{"weights": NaN}', "", "got NaN"),
        ],
    )
    def test_event_or_expectation(
        self, tmp_path: Path, line: dict[str, Any] | str, key: str, said: str
    ) -> None:
        """A line that cannot be read is refused with its file, number and key."""
        result = replay_lines(tmp_path, [add("B", 4), "", line])

        assert result.status == "unreadable"
        assert result.error_line == 4
        assert result.error is not None
        assert result.error.startswith(f"{result.path}: line 4: {key}: " if key else result.path)
        assert said in result.error

    @pytest.mark.parametrize(
        ("header", "key", "said"),
        [
            ({"rows": 4}, "rows", "known are vlbatch_scenario, capacity"),
            ({"capacity": 0}, "capacity", "got 0; expected at least 1"),
            ({"lookahead": -1}, "lookahead", "at least 0"),
            ({"encode_rows": 0}, "encode_rows", "at least 1"),
            ({"positions": "3d"}, "positions", "expected one of 1d, qwen2_vl"),
            ({"order": "fifo"}, "order", "expected one of split, two, arrival"),
            ({"stable": 1}, "stable", "expected true or false"),
            ({"chunking": "never"}, "chunking", "through, whole"),
            ({"confirm": "later"}, "confirm", "auto, manual"),
            ({"tokens_per_second": 0}, "tokens_per_second", "more than 0"),
            ({"vlbatch_scenario": 2}, "vlbatch_scenario", "got version 2; expected 1"),
        ],
    )
    def test_header(self, tmp_path: Path, header: dict[str, Any], key: str, said: str) -> None:
        """A header that cannot be is refused at line 1 with the key and what it may be."""
        path = write_file(tmp_path / "x.jsonl", [], **header)

        with pytest.raises(ScenarioError) as caught:
            read_scenario(path)

        assert (caught.value.file, caught.value.line, caught.value.key) == (str(path), 1, key)
        assert said in caught.value.reason

    def test_no_header(self, tmp_path: Path) -> None:
        """An event in place of the header, and an empty file, are refused as such."""
        path = tmp_path / "x.jsonl"
        path.write_text('\n{"step": {"A": 1}}\n')
        with pytest.raises(ScenarioError, match="line 2: expected a header first"):
            read_scenario(path)

        path.write_text("\n")
        with pytest.raises(ScenarioError, match="line 1: vlbatch_scenario: the file is empty"):
            read_scenario(path)

    def test_no_file(self, tmp_path: Path) -> None:
        """A missing file has no line; the reason is the system's."""
        with pytest.raises(ScenarioError, match="No such file") as caught:
            read_scenario(tmp_path / "missing.jsonl")

        assert caught.value.line is None

    def test_not_text(self, tmp_path: Path) -> None:
        """Bytes that are no UTF-8 are refused with their line."""
        path = write_file(tmp_path / "x.jsonl", [])
        path.write_bytes(path.read_bytes() + b'{"finish": "\xff"}\n')

        with pytest.raises(ScenarioError, match="line 2: not UTF-8"):
            read_scenario(path)

    @pytest.mark.parametrize("data", [b"no gzip", gzip.compress(b'{"vlbatch_scenario": 1}\n')[:-9]])
    def test_not_gzip(self, tmp_path: Path, data: bytes) -> None:
        """A file that is no gzip, or was cut off, is refused."""
        path = tmp_path / "x.jsonl.gz"
        path.write_bytes(data)

        with pytest.raises(ScenarioError, match=r"line [12]: not gzip"):
            read_scenario(path)


class TestReadings:
    def test_defaults(self, tmp_path: Path) -> None:
        """A bare header has the defaults of the format."""
        scenario = read_scenario(write_file(tmp_path / "x.jsonl", []))

        assert scenario.header == Header(
            capacity=8,
            max_model_len=512,
            cache_rows=1024,
            encode_rows=None,
            lookahead=0,
            draft_tokens=None,
            positions="qwen2_vl",
            tokens_per_second=2.0,
            order="split",
            stable=True,
            chunking="through",
            confirm="auto",
        )
        assert scenario.events == scenario.opening == ()

    def test_every_header_key(self, tmp_path: Path) -> None:
        """Every key of the header is read."""
        header = {
            "capacity": 3,
            "max_model_len": 64,
            "cache_rows": 32,
            "encode_rows": 16,
            "lookahead": 2,
            "draft_tokens": 4,
            "positions": "qwen2_5_vl",
            "tokens_per_second": 1.5,
            "order": "two",
            "stable": False,
            "chunking": "whole",
            "confirm": "manual",
        }
        scenario = read_scenario(write_file(tmp_path / "x.jsonl", [], **header, note="kept out"))

        assert scenario.header == Header(**header)

    def test_lines_and_expectations(self, tmp_path: Path) -> None:
        """Expectations belong to the event before them; notes and blank lines do not count."""
        lines = [
            expect(order=[]),
            add("A", 8, {**ITEM, "embeds": [1, 0, True, False]}),
            "",
            {"step": {"A": 4}, "accept": {"A": 0}, "note": "beside an event"},
            {"note": {"anything": [1]}},
            expect(features={"A": [[1, "X", 0, 2]]}, positions={"A": [1, 2]}, failed=["B"]),
            {"expect": {"moved": 1}, "note": "beside an expectation"},
            {"resume": {"req_id": "A", "computed": 3}},
            {"resume": "A"},
            {"fail_encode": "X"},
        ]
        scenario = read_scenario(write_file(tmp_path / "x.jsonl", lines))

        assert [line.line for line in scenario.events] == [3, 5, 9, 10, 11]
        assert [e.line for e in scenario.opening] == [2]
        added, stepped, resumed, again, failing = (line.event for line in scenario.events)
        assert isinstance(added, Add)
        assert added.items[0].embeds == (True, False, True, False)
        assert added.items[0].modality == "image"
        assert stepped == Step({"A": 4}, {"A": 0})
        assert (resumed, again) == (Resume("A", 3), Resume("A", 0))
        assert failing == FailEncode(("X",))
        first, second = scenario.events[1].expectations
        assert first.features == {"A": (FeatureRun(1, "X", 0, 2),)}
        assert first.positions == {"A": ((1, 2),)}
        assert first.failed == {"B": None}
        assert (first.line, second.line, second.moved) == (7, 8, 1)

    def test_gzip(self, tmp_path: Path) -> None:
        """A name that ends in .gz is read through gzip."""
        plain = write_file(tmp_path / "x.jsonl", [add("A", 4), step(A=4)])
        path = tmp_path / "x.jsonl.gz"
        path.write_bytes(gzip.compress(plain.read_bytes()))

        assert read_scenario(path).events == read_scenario(plain).events

    def test_byte_order_mark(self, tmp_path: Path) -> None:
        """A byte order mark is no part of the header."""
        path = write_file(tmp_path / "x.jsonl", [])
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())

        assert read_scenario(path).header == Header()


class TestTornTraces:
    @pytest.mark.parametrize("compressed", [False, True])
    def test_the_rest_counts(self, tmp_path: Path, compressed: bool) -> None:
        """A trace that was cut off in its last line is read up to there, and says where."""
        lines = [{"note": "a recorded trace"}, add("A", 4), step(A=4), step(A=1)]
        data = write_file(tmp_path / "t.jsonl", lines).read_bytes()[:-6]
        if compressed:
            stream = gzip.compress(data, compresslevel=0)
            data = stream[: len(stream) - 8 - 4]  # no trailer, and less of the last line
        path = tmp_path / ("t.jsonl.gz" if compressed else "t.jsonl")
        path.write_bytes(data)

        scenario = read_scenario(path)

        assert [line.event for line in scenario.events][1:] == [Step({"A": 4})]
        assert scenario.torn is not None
        assert "line 5: not " in scenario.torn

    def test_other_files_are_whole(self, tmp_path: Path) -> None:
        """A scenario that nobody recorded must be whole."""
        path = write_file(tmp_path / "t.jsonl", [add("A", 4), step(A=4)])
        path.write_bytes(path.read_bytes()[:-6])

        with pytest.raises(ScenarioError, match="line 3: not JSON"):
            read_scenario(path)


def test_item_data_reaches_the_library(tmp_path: Path) -> None:
    """Nothing of an item is lost on its way: a video's pace decides its positions."""
    video = {**image("V", 1, (2, 1, 2), modality="video"), "seconds_per_grid": 1.5}
    lines = [
        add("A", 6, video),
        step(A=6),
        expect(positions={"A": [[0, 1, 1, 5, 5, 6], [0, 1, 1, 1, 1, 6], [0, 1, 2, 1, 2, 6]]}),
    ]

    result = replay_lines(tmp_path, lines, positions="qwen2_5_vl", tokens_per_second=3)

    assert json.dumps(result.as_data()["ok"]) == "true", str(result.divergence)
