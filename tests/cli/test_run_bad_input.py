"""Bad input, end to end: a clear reason for one request, and the others go on and are verified."""

from __future__ import annotations

import re

import pytest
from bad_media import write_bad_clips, write_bad_pictures
from made_runs import assert_nothing_left

ALL_GOOD = ["text", "one", "mixed", "late"]
PICTURES = [
    "missing.png", "truncated.png", "text.png", "empty.png", "long-side.png", "giant.png",
    "folder.png", "flat.png",
]  # fmt: skip
CLIPS = ["none.gif", "no-frame", "stray", "sizes", "clip.txt", "cut.mp4"]


@pytest.fixture
def refused(files, good, answer):
    """Put a bad request between good ones; it alone is refused, for this reason."""

    def check(bad, reason, *options):
        path = files.requests(*good[:2], {"req_id": "bad", **bad}, *good[2:])

        outcome = answer(path, *options)

        assert outcome.code == 0, outcome.err
        row = outcome.by_id["bad"]
        assert (row["status"], row["tokens"]) == ("refused", [])
        assert row["reason"].startswith("request 'bad': ")
        assert re.search(reason, row["reason"]), row["reason"]
        shown = next(line for line in outcome.out.splitlines() if line.startswith("bad "))
        assert row["reason"].removeprefix("request 'bad': ").split()[0][:20] in shown
        assert shown.endswith("refused")
        assert outcome.json["verified_requests"] == ALL_GOOD
        assert outcome.json["verified"] is True
        assert_nothing_left(outcome.runners[0])

        assert answer(path, "--strict", *options).code == 1

    return check


@pytest.mark.parametrize("name", PICTURES)
def test_bad_picture(files, refused, name):
    """A picture that cannot be used names its file, and the limit where there is one."""
    reasons = write_bad_pictures(files.folder)

    refused({"prompt": "<image> ?", "images": [name]}, reasons[name])


@pytest.mark.parametrize("name", CLIPS)
def test_bad_clip(files, refused, name):
    """A clip that cannot be used names its file."""
    reasons = write_bad_clips(files.folder)

    refused({"prompt": "<video> ?", "videos": [name]}, reasons[name])


def test_no_bad_file_is_forgotten(tmp_path):
    """The lists above are those of the files that are written."""
    assert list(write_bad_pictures(tmp_path)) == PICTURES
    assert list(write_bad_clips(tmp_path)) == CLIPS


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("<image> <image> ?", "the prompt has 2 <image> marks for 1 files"),
        ("no mark ?", "the prompt has 0 <image> marks for 1 files"),
        ("<image> <video> ?", "the prompt has 1 <video> marks for 0 files"),
        ("<image> <|image_pad|> ?", "text holds the placeholder token 4"),
    ],
)
def test_placeholders_and_media_disagree(refused, prompt, reason):
    """As many marks as files of each kind are expected."""
    refused({"prompt": prompt, "images": ["good-1.png"]}, reason)


def test_prompt_longer_than_max_model_len(refused):
    """A prompt that is too long names the setting."""
    reason = r"has 51 prompt tokens; expected 1\.\.50 \(setting: max_model_len\)"

    refused({"prompt": "list " * 51}, reason, "--max-model-len", 50)


def test_empty_prompt(refused):
    """A prompt of spaces has no token."""
    refused({"prompt": "  "}, r"has 0 prompt tokens; expected 1\.\.160")


def test_item_larger_than_the_cache(files, refused):
    """An item that the cache can never hold names the cache's setting; rows have 16 bytes here."""
    files.picture("large.png", 4, 4)

    refused(
        {"prompt": "<image> ?", "images": ["large.png"]},
        r"has 16 feature rows; the encoder cache holds 8, .*\(setting: cache_bytes\)",
        "--cache-mb", 8 * 16 / 1e6,
    )  # fmt: skip


def test_item_larger_than_the_encode_budget(files, refused):
    """An item that a step can never encode names the budget's setting."""
    files.picture("large.png", 4, 4)

    refused(
        {"prompt": "<image> ?", "images": ["large.png"]},
        r"has 16 feature rows; the encode budget of a step holds 8, .*\(setting: encode_rows\)",
        "--encode-rows", 8,
    )  # fmt: skip


def test_out_of_kv_blocks(refused):
    """A request that needs more KV blocks than there are names the setting."""
    refused(
        {"prompt": "?", "max_tokens": 80},
        r"needs up to 10 KV blocks of 8 tokens; there are 5 \(setting: kv_blocks\)",
        "--kv-blocks", 5,
    )  # fmt: skip


def test_more_tokens_than_a_field_holds(refused):
    """A number that its field cannot hold names the field."""
    refused({"prompt": "?", "max_tokens": 2**40}, "field 'max_tokens' got")


def test_duplicate_id(files, good, answer):
    """The first request of an id is answered; the second has a row with the reason."""
    path = files.requests(*good, {"req_id": "one", "prompt": "which ?"})

    outcome = answer(path)

    rows = [row for row in outcome.json["requests"] if row["req_id"] == "one"]
    assert [row["status"] for row in rows] == ["finished", "refused"]
    assert rows[1]["reason"] == "request 'one': is there twice; expected unique ids"
    assert (outcome.code, outcome.json["verified_requests"]) == (0, ALL_GOOD)
    assert answer(path, "--strict").code == 1


def test_everything_bad_at_once(files, good, answer):
    """Each bad request is refused for its own reason; the good ones do not notice."""
    reasons = {**write_bad_pictures(files.folder), **write_bad_clips(files.folder)}
    bad = []
    for name in reasons:
        kind = "image" if name in PICTURES else "video"
        bad.append({"req_id": name, "prompt": f"<{kind}> ?", f"{kind}s": [name]})
    mixed = [*bad[::2], *good, *bad[1::2]]

    outcome = answer(files.requests(*mixed))

    for name, reason in reasons.items():
        assert re.search(reason, outcome.by_id[name]["reason"])
    assert outcome.json["verified_requests"] == ALL_GOOD
    assert outcome.code == 0
    assert_nothing_left(outcome.runners[0])


def test_only_bad_requests(files, answer):
    """A run in which nothing can be answered ends all the same."""
    outcome = answer(files.requests({"req_id": "a", "prompt": "<image>"}))

    assert (outcome.code, outcome.json["steps"], outcome.json["verified"]) == (0, 0, True)
    assert "0 of 1 requests answered" in outcome.out


class TestFile:
    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("{bad", "not JSON"),
            ('{"req_id": "x", "prompt": "?", "image": []}', "unknown keys ['image']"),
            ('["x"]', "got list; expected a JSON object"),
            ('{"prompt": "?"}', "req_id is None"),
            ('{"req_id": "x", "prompt": "?", "max_tokens": 0}', "max_tokens is 0"),
        ],
    )
    def test_a_bad_line_stops_it_before_the_run(self, files, good, answer, line, reason):
        """A line that is no request is exit 2 with its number; nothing was run or written."""
        path = files.requests(*good)
        path.write_text(path.read_text() + line + "\n")

        outcome = answer(path)

        assert (outcome.code, outcome.runners, outcome.json) == (2, [], {})
        assert outcome.err.startswith(f"vlbatch: {path}:5: {reason}")
        assert outcome.out == ""

    def test_missing(self, files, answer):
        """A request file that is not there is exit 2 with its name."""
        outcome = answer(files.folder / "none.jsonl")

        assert outcome.code == 2
        assert "none.jsonl' does not exist" in outcome.err

    def test_a_folder(self, files, answer):
        """A folder is no request file."""
        outcome = answer(files.folder)

        assert outcome.code == 2
        assert "is a directory" in outcome.err

    @pytest.mark.parametrize("text", ["", "\n\r\n  \n"])
    def test_empty(self, files, answer, text):
        """A file without requests is answered at once."""
        path = files.requests()
        path.write_text(text)

        outcome = answer(path)

        assert (outcome.code, outcome.json["requests"], outcome.json["steps"]) == (0, [], 0)
        assert "0 of 0 requests answered" in outcome.out

    def test_windows(self, files, good, answer):
        """Windows line endings and a byte order mark change nothing."""
        path = files.requests(*good)
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))

        assert answer(path).json["verified_requests"] == ALL_GOOD

    def test_from_another_folder(self, files, good, answer, tmp_path, monkeypatch):
        """Media paths are relative to the file, wherever the command is called."""
        files.requests(*good)
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        monkeypatch.chdir(elsewhere)

        assert answer("../requests.jsonl").json["verified_requests"] == ALL_GOOD

    def test_unicode(self, files, good, answer):
        """Ids, prompts and answers may be in any letters."""
        request = {
            "req_id": "\u7b2c\u4e00",
            "prompt": "\u00bfqu\u00e9 \U0001f600 ?",
            "answer": "\u00f1",
        }

        outcome = answer(files.requests(*good, request))

        assert outcome.json["verified_requests"] == [*ALL_GOOD, "\u7b2c\u4e00"]
        assert "\u7b2c\u4e00" in outcome.out


class TestHarmless:
    def test_one_token_and_repeated_images(self, files, good, answer):
        """One token, nothing but media, and one image three times in a prompt."""
        requests = [
            {"req_id": "1", "prompt": "<image>", "images": ["good-1.png"], "max_tokens": 1},
            {"req_id": "3", "prompt": "<image> <image> <image>", "images": ["good-1.png"] * 3},
        ]

        outcome = answer(files.requests(*good, *requests))

        assert outcome.json["verified_requests"] == [*ALL_GOOD, "1", "3"]
        assert len(outcome.by_id["1"]["tokens"]) == 1

    def test_a_prompt_that_fills_max_model_len(self, files, answer):
        """It gets one token."""
        request = {"req_id": "full", "prompt": "list " * 50, "max_tokens": 9}

        outcome = answer(files.requests(request), "--max-model-len", 50)

        assert (outcome.code, len(outcome.by_id["full"]["tokens"])) == (0, 1)
        assert outcome.json["verified_requests"] == ["full"]

    def test_a_far_arrival(self, files, good, answer):
        """Nobody waits for a step in which there is nothing to do."""
        request = {"req_id": "far", "prompt": "?", "arrival": 10**18}

        outcome = answer(files.requests(request, *good))

        assert outcome.json["verified_requests"] == ["far", *ALL_GOOD]
        assert outcome.json["steps"] < 100
