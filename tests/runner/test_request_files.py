"""Request files: what a line may say, and refusals that name the line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlbatch.errors import RequestFileError
from vlbatch.runner import Request, load_requests


@pytest.fixture
def write(tmp_path):
    """Write a request file; returns its path."""

    def write(content: str | bytes) -> Path:
        path = tmp_path / "requests.jsonl"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def line(**keys: object) -> str:
    return json.dumps({"req_id": "a", "prompt": "hello", **keys})


def test_a_full_line(write, tmp_path):
    """Every key is read; media paths are relative to the file."""
    path = write(
        line(images=["x.png", "/y.png"], videos=["f/"], max_tokens=3, arrival=7, answer="1 2")
    )

    assert load_requests(path) == [
        Request("a", "hello", (tmp_path / "x.png", Path("/y.png")), (tmp_path / "f",), 3, 7, "1 2")
    ]


def test_only_id_and_prompt_are_needed(write):
    """Everything else has a default; a null answer is no answer."""
    (request,) = load_requests(write(line(answer=None)))

    assert request == Request("a", "hello")


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_line_endings(write, ending):
    """Unix, Windows and old Macintosh endings, with and without a last one, are the same."""
    lines = [line(), "", line(req_id="b"), "  "]

    for text in (ending.join(lines), ending.join([*lines, ""])):
        assert [r.req_id for r in load_requests(write(text))] == ["a", "b"]


def test_a_byte_order_mark_is_no_part_of_the_file(write):
    """Editors on Windows put one in front of UTF-8."""
    assert load_requests(write(b"\xef\xbb\xbf" + line().encode()))[0].req_id == "a"


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_separators_inside_a_string(write, separator):
    """Only line feeds end a line: JSON allows other separators inside a string as they are."""
    text = json.dumps({"req_id": "a", "prompt": f"x{separator}y"}, ensure_ascii=False)

    assert load_requests(write(text))[0].prompt == f"x{separator}y"


@pytest.mark.parametrize("text", ["", "\n\n", " \r\n"])
def test_an_empty_file_has_no_requests(write, text):
    """Blank lines are skipped."""
    assert load_requests(write(text)) == []


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"max_tokens": ' + "9" * 5000 + "}", "not JSON"),
        ("[]", "got list; expected a JSON object"),
        ("null", "got NoneType"),
        (line(image=["x.png"]), r"unknown keys \['image'\]; known: .*'images'"),
        (json.dumps({"prompt": "x"}), "req_id is None; expected a non-empty string"),
        (line(req_id=""), "req_id is ''"),
        (line(req_id=7), "req_id is 7"),
        (line(req_id="\ud800"), "req_id is '.ud800'"),
        (line(prompt=None), "prompt is None"),
        (line(images="x.png"), "images is 'x.png'; expected a list of paths"),
        (line(images=None), "images is None"),
        (line(images=[""]), r"images is \[''\]"),
        (line(videos=[3]), r"videos is \[3\]"),
        (line(max_tokens=0), "max_tokens is 0; expected an integer >= 1"),
        (line(max_tokens=True), "max_tokens is True"),
        (line(max_tokens=2.0), "max_tokens is 2.0"),
        (line(arrival=-1), "arrival is -1; expected an integer >= 0"),
        (line(answer=5), "answer is 5"),
    ],
)
def test_a_bad_line_is_named(write, bad, message):
    """A line that is no request is refused with file, line number, what was got and expected."""
    path = write(f"{line()}\r\n\r\n{bad}\r\n{line(req_id='b')}")

    with pytest.raises(RequestFileError, match=message) as caught:
        load_requests(path)
    assert str(caught.value).startswith(f"{path}:3: ")


def test_what_is_not_text_is_refused(write):
    """Bytes that are not UTF-8 are refused with the file's name."""
    path = write(b'{"req_id": "\xff"}')

    with pytest.raises(RequestFileError, match=r"requests\.jsonl: 'utf-8' codec"):
        load_requests(path)


def test_a_file_that_is_not_there(tmp_path):
    """A missing file is a typed error too."""
    with pytest.raises(RequestFileError, match="cannot read"):
        load_requests(tmp_path / "none.jsonl")
