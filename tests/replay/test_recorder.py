"""Recorder: five calls of any runner become a scenario file that says what it did."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vlbatch import Item
from vlbatch.errors import (
    DuplicateRequest,
    FeatureRowsMismatch,
    InvalidField,
    InvalidSchedule,
    UnknownRequest,
)
from vlbatch.replay import replay_file
from vlbatch.replay.recorder import ANY_RUNNER, Recorder

CAT, DOG = (np.random.default_rng(n).standard_normal((6, 4)) for n in range(2))


def image(key: str, offset: int, **more: Any) -> Item:
    """An image of 2 x 3 places."""
    return Item(key=key, modality="image", offset=offset, length=6, grid=(1, 2, 3), **more)


def lines_of(path: Path) -> list[dict[str, Any]]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


def expectations(path: Path) -> list[dict[str, Any]]:
    return [line["expect"] for line in lines_of(path) if "expect" in line]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture
def recorder(path: Path) -> Any:
    """A recorder with two requests whose images are encoded in the step under way."""
    with Recorder(path) as made:
        made.admit("a", prompt_len=10, items=[image("cat", 2)])
        made.admit("b", prompt_len=10, items=[image("dog", 2)])
        made.step({"a": 10, "b": 10})
        made.encoded("cat", CAT)
        made.encoded("dog", DOG)
        yield made


PLACES = [*range(2, 8), *range(12, 18)]
"""Token numbers of both images, a's rows before b's."""


class TestFeatures:
    def test_rows_by_index(self, recorder: Recorder, path: Path) -> None:
        """Feature rows are written by request, as runs from a token index on."""
        recorder.gathered(["a", "b"], tokens=PLACES, features=[CAT, DOG])

        assert expectations(path) == [
            {"features": {"a": [[2, "cat", 0, 6]], "b": [[2, "dog", 0, 6]]}}
        ]

    def test_swapped_rows_are_what_they_are(self, recorder: Recorder, path: Path) -> None:
        """If two requests get each other's rows, the file says so, whatever the runner thinks."""
        recorder.gathered(["a", "b"], tokens=PLACES, features=[DOG, CAT])

        assert expectations(path)[0]["features"] == {
            "a": [[2, "dog", 0, 6]],
            "b": [[2, "cat", 0, 6]],
        }
        divergence = replay_file(path).divergence
        assert divergence is not None
        assert (divergence.step, divergence.req_id) == (1, "a")
        assert str(divergence).endswith(
            "features at token 2 of request 'a': expected (cat, 0), got (dog, 0)"
        )
        assert [(row.expected, row.got) for row in divergence.table] == [
            (f"(cat, {n})", f"(dog, {n})") for n in range(6)
        ]

    def test_shifted_rows(self, recorder: Recorder, path: Path) -> None:
        """Rows that land one token late are written at the tokens that got them."""
        recorder.gathered(["a", "b"], tokens=PLACES, features=[np.roll(CAT, 1, axis=0), DOG])

        assert expectations(path)[0]["features"]["a"] == [[2, "cat", 5, 6], [3, "cat", 0, 5]]

    def test_unknown_row(self, recorder: Recorder, path: Path) -> None:
        """A row that no item has is named as unknown, and the replay finds its token."""
        broken = CAT.copy()
        broken[3] *= 2
        recorder.gathered(["a", "b"], tokens=PLACES, features=[broken, DOG])

        assert expectations(path)[0]["features"]["a"] == [
            [2, "cat", 0, 3], [5, "(unknown row)", 3, 4], [6, "cat", 4, 6]
        ]  # fmt: skip
        divergence = replay_file(path).divergence
        assert divergence is not None
        assert (divergence.req_id, divergence.what) == ("a", "features at token 5")

    def test_missing_rows(self, recorder: Recorder, path: Path) -> None:
        """A request whose image gets no rows at all is named with none."""
        recorder.gathered(["a", "b"], tokens=PLACES[:6], features=[CAT])

        assert expectations(path)[0]["features"]["b"] == []
        divergence = replay_file(path).divergence
        assert divergence is not None
        assert divergence.req_id == "b"

    def test_rows_at_a_text_token(self, path: Path) -> None:
        """A feature row at a token past all media is written too."""
        with Recorder(path) as recorder:
            recorder.admit("a", prompt_len=4)
            recorder.encoded("cat", CAT)
            recorder.step({"a": 4})
            recorder.gathered(["a"], tokens=[1], features=CAT[4:5])

        assert expectations(path) == [{"features": {"a": [[1, "cat", 4, 5]]}}]

    def test_equal_rows_are_taken_as_right(self, path: Path) -> None:
        """Of rows that two items have in common, the one that belongs there is written."""
        with Recorder(path) as recorder:
            recorder.admit("a", prompt_len=9, items=[image("white", 1)])
            recorder.encoded("other white", np.ones((6, 4)))
            recorder.encoded("white", np.ones((6, 4)))
            recorder.step({"a": 9})
            recorder.gathered(["a"], tokens=range(1, 7), features=np.ones((6, 4)))

        assert expectations(path)[0]["features"] == {"a": [[1, "white", 0, 6]]}

    def test_never_announced_is_taken_at_its_word(self, path: Path) -> None:
        """Rows of an item never announced as encoded count as right, unless they are another's."""
        with Recorder(path) as recorder:
            recorder.encoded("dog", DOG)
            recorder.admit("a", prompt_len=9, items=[image("cat", 1)])
            recorder.step({"a": 9})
            mixed = np.concatenate([CAT[:3], DOG[3:]])
            recorder.gathered(["a"], tokens=range(1, 7), features=mixed)

        assert expectations(path)[0]["features"] == {"a": [[1, "cat", 0, 3], [4, "dog", 3, 6]]}

    def test_mask(self, path: Path) -> None:
        """With a mask, row j belongs to the j-th true place; other tokens are named as wrong."""
        mask = np.array([1, 0, 1, 1, 0, 1], dtype=bool)
        item = Item("cat", "image", offset=2, length=6, grid=(1, 2, 2), embed_mask=mask)
        with Recorder(path) as recorder:
            recorder.admit("a", prompt_len=10, items=[item])
            recorder.step({"a": 10})
            recorder.encoded("cat", CAT[:4])
            recorder.gathered(["a"], tokens=[2, 4, 5, 6], features=CAT[:4])

        runs = expectations(path)[0]["features"]["a"]
        wrong = "cat (at a token that is not a place)"
        assert runs == [[2, "cat", 0, 1], [4, "cat", 1, 3], [6, wrong, 3, 4]]
        divergence = replay_file(path).divergence
        assert divergence is not None
        assert divergence.what == "features at token 6"

    def test_mask_of_an_item_that_was_never_announced(self, path: Path) -> None:
        """What belongs at a place counts true places, not tokens of the span."""
        mask = np.array([1, 0, 1, 1], dtype=bool)
        item = Item("cat", "image", offset=2, length=4, grid=(1, 1, 3), embed_mask=mask)
        with Recorder(path) as recorder:
            recorder.admit("a", prompt_len=8, items=[item])
            recorder.step({"a": 8})
            recorder.gathered(["a"], tokens=[2, 4, 5], features=CAT[:3])

        assert expectations(path)[0]["features"]["a"] == [[2, "cat", 0, 1], [4, "cat", 1, 3]]

    def test_deeper_levels_count(self, path: Path) -> None:
        """With several levels a row is right only if it is right on all of them."""
        with Recorder(path) as recorder:
            recorder.admit("a", prompt_len=9, items=[image("cat", 1)])
            recorder.step({"a": 9})
            recorder.encoded("cat", (CAT, DOG))
            recorder.gathered(["a"], tokens=range(1, 7), features=[(CAT, DOG[::-1])])

        assert expectations(path)[0]["features"]["a"] == [[1, "(unknown row)", 0, 6]]


class TestSteps:
    def test_chunks_follow_progress(self, path: Path) -> None:
        """Token indices count on from a prefix hit and from what earlier steps computed."""
        with Recorder(path) as recorder:
            recorder.admit("a", prompt_len=10, items=[image("cat", 2)], computed=1)
            recorder.step({"a": 4})
            recorder.encoded("cat", CAT)
            recorder.gathered(["a"], tokens=[1, 2, 3], features=CAT[:3])
            recorder.step({"a": 5})
            recorder.gathered(["a"], tokens=[0, 1, 2], features=CAT[3:])

        assert [e["features"]["a"] for e in expectations(path)] == [
            [[2, "cat", 0, 3]],
            [[5, "cat", 3, 6]],
        ]
        assert replay_file(path).status == "ok"

    def test_parts_of_a_step(self, path: Path) -> None:
        """A runner may gather request by request; the file has one expectation for the step."""
        with Recorder(path) as recorder:
            for req_id, key in (("a", "cat"), ("b", "dog")):
                recorder.admit(req_id, prompt_len=10, items=[image(key, 2)])
            recorder.step({"a": 10, "b": 10})
            for req_id, key, rows in (("b", "dog", DOG), ("a", "cat", CAT)):
                recorder.encoded(key, rows)
                recorder.gathered([req_id], tokens=range(2, 8), features=rows)

        assert expectations(path) == [
            {"features": {"b": [[2, "dog", 0, 6]], "a": [[2, "cat", 0, 6]]}}
        ]

    def test_positions_and_kv_index(self, path: Path) -> None:
        """Positions and KV indices are written as given; a wrong one diverges in its step."""
        with Recorder(path) as recorder:
            recorder.admit("a", prompt_len=3)
            recorder.step({"a": 3})
            recorder.gathered(["a"], positions=[[0, 1, 2]] * 3, kv_index={"a": range(3)})
            recorder.step({"a": 1})
            recorder.gathered(["a"], positions=[[3]] * 3, kv_index={"a": [4]})

        assert expectations(path)[0] == {
            "positions": {"a": [[0, 1, 2]] * 3},
            "kv_index": {"a": [0, 1, 2]},
        }
        divergence = replay_file(path).divergence
        assert divergence is not None
        assert (divergence.step, divergence.what, divergence.req_id) == (2, "kv_index", "a")
        assert (divergence.expected, divergence.got) == ([3], [4])

    def test_accepted_drafts(self, path: Path) -> None:
        """Progress grows by what was accepted; where nothing is said, by all drafts."""
        with Recorder(path) as recorder:
            recorder.admit("a", prompt_len=2)
            recorder.step({"a": 2})
            recorder.gathered(["a"], kv_index={"a": [0, 1]})
            recorder.step({"a": 4})
            recorder.gathered(["a"], kv_index={"a": [2, 3, 4, 5]})
            recorder.accepted({"a": 1})
            recorder.step({"a": 3})
            recorder.gathered(["a"], kv_index={"a": [4, 5, 6]})
            recorder.step({"a": 1})
            recorder.gathered(["a"], kv_index={"a": [7]})

        steps = [line for line in lines_of(path) if "step" in line]
        assert steps[1] == {"step": {"a": 4}, "accept": {"a": 1}}
        assert replay_file(path).status == "ok"

    def test_roll_back(self, path: Path) -> None:
        """Confirming less than was counted rolls progress back, here and in the replay."""
        header = replace(ANY_RUNNER, confirm="manual")
        with Recorder(path, header=header) as recorder:
            recorder.admit("a", prompt_len=8)
            recorder.step({"a": 6})
            recorder.gathered(["a"], kv_index={"a": range(6)})
            recorder.confirmed("a", 4)
            recorder.step({"a": 4})
            recorder.gathered(["a"], kv_index={"a": [4, 5, 6, 7]})

        assert {"confirm": {"a": 4}} in lines_of(path)
        assert replay_file(path).status == "ok"

    def test_failed_encode(self, path: Path) -> None:
        """A request lost to a failing encode stays in its step and is listed as failed."""
        with Recorder(path) as recorder:
            recorder.admit("a", prompt_len=10, items=[image("cat", 2)])
            recorder.admit("b", prompt_len=3)
            recorder.step({"a": 10, "b": 3})
            recorder.encoded("cat", RuntimeError("out of memory"))
            recorder.left("a", "fail")
            recorder.gathered(["b"], positions=[[0, 1, 2]] * 3)

        assert lines_of(path)[4:7] == [
            {"fail_encode": ["cat"]},
            {"step": {"a": 10, "b": 3}},
            {"expect": {"positions": {"b": [[0, 1, 2]] * 3}, "failed": ["a"]}},
        ]
        assert replay_file(path).status == "ok"

    def test_given_up(self, path: Path) -> None:
        """A step that is given up stands in the file with what was encoded or failed by then."""
        with Recorder(path) as recorder:
            for req_id, key in (("a", "cat"), ("b", "dog"), ("c", "owl")):
                recorder.admit(req_id, prompt_len=10, items=[image(key, 2)])
            recorder.step({"a": 10, "b": 10, "c": 10})
            recorder.encoded("cat", CAT)
            recorder.encoded("dog", RuntimeError("out of memory"))
            recorder.left("b", "fail")
            recorder.given_up()
            recorder.step({"a": 10})
            recorder.gathered(["a"], tokens=range(2, 8), features=CAT)

        assert lines_of(path)[5:8] == [
            {"fail_encode": ["dog"]},
            {"step": {"a": 10, "b": 10, "c": 10}, "abandon": ["cat", "dog"]},
            {"expect": {"failed": ["b"]}},
        ]
        assert replay_file(path).status == "ok"

    def test_refused_by_the_rules(self, path: Path) -> None:
        """What a runner did though it is to be refused is got; the refusal is expected."""
        with Recorder(path) as recorder:
            recorder.admit("a", prompt_len=3)
            recorder.step({"a": 4})

        divergence = replay_file(path).divergence
        assert divergence is not None
        assert (divergence.what, divergence.got) == ("event", "no refusal")
        assert str(divergence.expected).startswith("InvalidSchedule")

    def test_left_before_the_forward(self, path: Path) -> None:
        """A request that is aborted before the forward is no part of the step."""
        with Recorder(path) as recorder:
            recorder.admit("a", prompt_len=3)
            recorder.admit("b", prompt_len=3)
            recorder.step({"a": 3, "b": 3})
            recorder.left("a", "abort")
            recorder.gathered(["b"])

        assert lines_of(path)[4:6] == [{"abort": "a"}, {"step": {"b": 3}}]
        assert replay_file(path).status == "ok"


class TestRequests:
    def test_item_has_all_that_the_format_knows(self, path: Path) -> None:
        """An item is written with its grid, mask and seconds, and reads back as it was."""
        mask = np.array([1, 1, 0], dtype=bool)
        clip = Item("clip", "video", 1, 3, grid=(2, 1, 1), embed_mask=mask, seconds_per_grid=0.5)
        with Recorder(path) as recorder:
            recorder.admit("a", prompt_len=5, items=[clip], computed=2)

        assert lines_of(path)[2] == {
            "add": {
                "req_id": "a",
                "prompt_len": 5,
                "items": [
                    {
                        "key": "clip", "modality": "video", "offset": 1, "length": 3,
                        "grid": [2, 1, 1], "embeds": "110", "seconds_per_grid": 0.5,
                    }
                ],
                "computed": 2,
            }
        }  # fmt: skip

    def test_resume_with_outputs(self, path: Path) -> None:
        """A request that comes back with its outputs as prompt is resumed."""
        with Recorder(path) as recorder:
            recorder.admit("a", prompt_len=10, items=[image("cat", 2)])
            recorder.step({"a": 10})
            recorder.encoded("cat", CAT)
            recorder.gathered(["a"], tokens=range(2, 8), features=CAT)
            recorder.left("a", "preempt")
            recorder.admit("a", prompt_len=11)
            recorder.step({"a": 11})
            recorder.encoded("cat", CAT)
            recorder.gathered(["a"], tokens=range(2, 8), features=CAT)

        events = [line for line in lines_of(path) if not line.keys() & {"expect", "note"}][2:]
        assert events == [
            {"step": {"a": 10}}, {"preempt": "a"}, {"resume": "a"}, {"step": {"a": 11}}
        ]  # fmt: skip
        assert replay_file(path).status == "ok"

    def test_restart_without_outputs(self, path: Path) -> None:
        """A request that comes back without its outputs is a new one with the same items."""
        with Recorder(path) as recorder:
            recorder.admit("a", prompt_len=10, items=[image("cat", 2)])
            recorder.step({"a": 10})
            recorder.encoded("cat", CAT)
            recorder.gathered(["a"], tokens=range(2, 8), features=CAT)
            recorder.left("a", "preempt")
            recorder.admit("a", prompt_len=10)
            recorder.step({"a": 8})
            recorder.gathered(["a"], tokens=range(2, 8), features=CAT)

        adds = [line["add"] for line in lines_of(path) if "add" in line]
        assert adds[0] == adds[1]
        assert replay_file(path).status == "ok"


class TestFile:
    def test_own_order_is_a_note(self, recorder: Recorder, path: Path) -> None:
        """The rows of a runner with an order of its own are noted, not expected."""
        recorder.gathered(["b", "a"], tokens=PLACES, features=[DOG, CAT])

        assert {"note": {"order": ["b", "a"]}} in lines_of(path)
        assert replay_file(path).status == "ok"

    def test_encoded_items_have_fingerprints(self, recorder: Recorder, path: Path) -> None:
        """The file has a digest of the fingerprints of every item encoded in the step."""
        recorder.gathered(["a", "b"], tokens=PLACES, features=[CAT, DOG])

        (encoded,) = [
            line["note"]["encoded"] for line in lines_of(path) if "encoded" in line.get("note", ())
        ]
        assert encoded.keys() == {"cat", "dog"}
        assert all(len(print_) == 16 and int(print_, 16) >= 0 for print_ in encoded.values())
        assert encoded["cat"] != encoded["dog"]

    @pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
    def test_step_is_in_the_file_before_the_forward(self, tmp_path: Path, name: str) -> None:
        """What is gathered can be read at once, without closing the file: a crash loses nothing."""
        path = tmp_path / name
        recorder = Recorder(path)
        recorder.admit("a", prompt_len=3)
        recorder.step({"a": 3})
        recorder.gathered(["a"], positions=[[0, 1, 2]] * 3)

        copy = tmp_path / f"copy-{name}"
        copy.write_bytes(path.read_bytes())
        recorder.close()

        result = replay_file(copy)
        assert (result.status, result.num_events) == ("ok", 2)

    @pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
    def test_torn_end(self, tmp_path: Path, name: str) -> None:
        """A file that ends in the middle of a line is reported, and the rest replays."""
        path = tmp_path / name
        with Recorder(path) as recorder:
            recorder.admit("a", prompt_len=50)
            for n in range(20):
                recorder.step({"a": 1})
                recorder.gathered(["a"], positions=[[n]] * 3)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) * 2 // 3])

        result = replay_file(path)

        assert result.status == "ok"
        assert result.torn is not None
        assert 5 < result.num_events < 21

    def test_any_name(self, path: Path) -> None:
        """Names of requests and items may hold any letter, also half of one."""
        name = 'a"\n\x00\u2028\u00e9\ud800'
        with Recorder(path) as recorder:
            recorder.admit(name, prompt_len=8, items=[image(name, 1)])
            recorder.step({name: 8})
            recorder.encoded(name, CAT)
            recorder.gathered([name], tokens=range(1, 7), features=CAT)

        assert replay_file(path).status == "ok"
        assert lines_of(path)[2]["add"]["req_id"] == name

    def test_close_is_idempotent(self, path: Path) -> None:
        """Closing twice changes nothing."""
        recorder = Recorder(path)
        recorder.close()
        before = path.read_bytes()
        recorder.close()

        assert path.read_bytes() == before


class TestRefusals:
    def test_admitted_twice(self, recorder: Recorder) -> None:
        """A request in the batch cannot be admitted again."""
        with pytest.raises(DuplicateRequest, match="'a'"):
            recorder.admit("a", prompt_len=3)

    def test_unknown_requests(self, recorder: Recorder) -> None:
        """Calls that name a request that is not in the batch are refused."""
        with pytest.raises(UnknownRequest, match="'z'"):
            recorder.step({"z": 1})
        with pytest.raises(UnknownRequest, match="'z'"):
            recorder.left("z")

    def test_gathered_outside_a_step(self, path: Path) -> None:
        """Without a step there is nothing to gather."""
        with Recorder(path) as recorder, pytest.raises(InvalidSchedule, match="outside a step"):
            recorder.gathered([])

    def test_gathered_request_without_tokens(self, recorder: Recorder) -> None:
        """A request that the step does not compute cannot be gathered."""
        recorder.admit("c", prompt_len=3)
        with pytest.raises(InvalidSchedule, match="'c'"):
            recorder.gathered(["c"])

    def test_other_number_of_rows(self, recorder: Recorder) -> None:
        """As many tokens as feature rows."""
        with pytest.raises(FeatureRowsMismatch, match="6 feature rows for 12 tokens"):
            recorder.gathered(["a", "b"], tokens=PLACES, features=[CAT])

    def test_token_outside_the_step(self, recorder: Recorder) -> None:
        """Token numbers lie in the requests that are gathered."""
        with pytest.raises(InvalidField, match=r"\[5, 20\].*\[0, 20\)"):
            recorder.gathered(["a", "b"], tokens=[5, 20], features=CAT[:2])

    def test_positions_of_another_shape(self, recorder: Recorder) -> None:
        """Positions are there for every token."""
        with pytest.raises(InvalidField, match=r"\[axes, 20\]"):
            recorder.gathered(["a", "b"], positions=np.zeros((3, 19), dtype=int))

    def test_unknown_way_out(self, recorder: Recorder) -> None:
        """A request leaves on one of the named paths."""
        with pytest.raises(InvalidField, match="vanish"):
            recorder.left("a", "vanish")  # type: ignore[arg-type]  # the refusal is tested


def test_memory_is_bounded(path: Path) -> None:
    """Fingerprints of items of departed requests are forgotten beyond the bound."""
    with Recorder(path, max_rows=30) as recorder:
        for n in range(20):
            rows = np.random.default_rng(n).standard_normal((6, 4))
            recorder.admit(f"r{n}", prompt_len=8, items=[image(f"image {n}", 1)])
            recorder.step({f"r{n}": 8})
            recorder.encoded(f"image {n}", rows)
            recorder.gathered([f"r{n}"], tokens=range(1, 7), features=rows)
            recorder.left(f"r{n}")

        assert recorder._book.num_rows <= 30
        assert not recorder._requests
    assert replay_file(path).status == "ok"
