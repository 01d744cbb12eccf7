"""What ``vlbatch run`` shows and writes."""

from __future__ import annotations

import io
import re
import sys

import pytest
from cli_cases import MODEL

KEYS = {
    "requests", "steps", "tokens", "reorders", "condenses", "rows_moved", "preemptions",
    "chunked_items", "encoder", "speculative", "verified", "verified_requests",
    "mismatches", "graphs", "prefill_gate",
}  # fmt: skip


class TestJson:
    def test_keys(self, files, good, answer):
        """The outcome has every documented key, and a row for each request in file order."""
        outcome = answer(files.requests(*good))

        assert outcome.json.keys() == KEYS
        assert outcome.json["encoder"].keys() == {"encoded", "hits", "evicted", "peak_bytes"}
        assert [r["req_id"] for r in outcome.json["requests"]] == [r["req_id"] for r in good]
        for row in outcome.json["requests"]:
            assert row.keys() == {
                "req_id", "text", "tokens", "answer", "correct", "status", "reason",
            }  # fmt: skip

    def test_values(self, files, good, answer):
        """Counters are those of the run; text is what the tokenizer makes of the tokens."""
        outcome = answer(files.requests(*good))

        (runner,) = outcome.runners
        assert outcome.json["steps"] == runner.counters.steps > 0
        assert outcome.json["tokens"] == runner.counters.tokens
        assert outcome.json["preemptions"] == runner.scheduler.num_preemptions
        # 3 contents of 6, 6 and 4 rows of 16 bytes
        assert outcome.json["encoder"]["encoded"] == 3
        assert 10 * 16 <= outcome.json["encoder"]["peak_bytes"] <= 16 * 16
        for row in outcome.json["requests"]:
            assert row["text"] == runner.prompts.decode(row["tokens"])

    def test_correct(self, files, answer):
        """An answer is correct if its text is the expected one; without one it is neither."""
        ask = {"prompt": "repeat 1 2 ?", "max_tokens": 3}
        text = answer(files.requests({"req_id": "a", **ask})).by_id["a"]["text"]

        outcome = answer(
            files.requests(
                {"req_id": "right", **ask, "answer": text},
                {"req_id": "wrong", **ask, "answer": text + " 7"},
                {"req_id": "none", **ask},
                {"req_id": "refused", "prompt": "<image>", "answer": "x"},
            )
        )

        correct = {r: row["correct"] for r, row in outcome.by_id.items()}
        assert correct == {"right": True, "wrong": False, "none": None, "refused": False}
        assert "3 of 4 requests answered, 1 of 2 as expected" in outcome.out

    def test_without_verify(self, files, good, vlbatch, tmp_path):
        """Without ``--verify`` nothing is compared, and the outcome says so."""
        path, plain = files.requests(*good), tmp_path / "plain.json"

        outcome = vlbatch("run", path, "--model", MODEL, "--json", plain)

        assert outcome.code == 0
        assert "verified" not in outcome.out
        assert '"verified": null' in plain.read_text()


class TestScreen:
    @pytest.fixture
    def shown(self, files, good, answer, monkeypatch):
        """Lines of stdout at a width, with a refused request and a long id among them."""

        def show(columns: int) -> list[str]:
            monkeypatch.setenv("COLUMNS", str(columns))
            bad = [
                {"req_id": "no-such-picture", "prompt": "<image>", "images": ["gone.png"]},
                {"req_id": "0b0f5a3c-9d1e-4d5b-8f3c-2a7e6d1c4b5a", "prompt": "?", "answer": "7"},
            ]
            outcome = answer(files.requests(*good, *bad))
            assert outcome.code == 0
            return outcome.out.splitlines()

        return show

    @pytest.mark.parametrize("columns", [80, 120])
    def test_width(self, shown, columns):
        """The table keeps to the width, sentences are one line each, and nothing is cut off."""
        lines = shown(columns)

        start = next(n for n, line in enumerate(lines) if "requests answered" in line)
        table, sentences = lines[:start], lines[start:]
        assert max(map(len, table)) <= columns
        assert len(sentences) == 4
        assert re.fullmatch(r"5 of 6 requests answered, [01] of 1 as expected", sentences[0])
        assert re.fullmatch(r"\d+ steps, .* \d+ items cut by chunks", sentences[1])
        assert re.fullmatch(r"verified: 5 of 5 .*, logits within 0\.001\)", sentences[3])
        assert "\u2026" not in "".join(table)  # nothing is cut off
        assert "check the path" in " ".join(" ".join(table).split()) or columns == 80

    def test_a_row_has_its_status(self, shown):
        """Refused requests are marked, right and wrong answers too."""
        lines = shown(120)

        assert any(line.startswith("no-such-picture") and "refused" in line for line in lines)
        assert any(line.startswith("0b0f5a3c") and re.search("wrong|ok", line) for line in lines)

    def test_no_colour_codes_in_a_pipe(self, files, good, answer):
        """Output that is not a terminal has no control codes."""
        outcome = answer(files.requests(*good))

        assert "\x1b" not in outcome.out + outcome.err

    def test_the_bar_is_all_of_stderr(self, files, good, answer):
        """Besides the progress bar nothing is written to stderr; at the end it is full."""
        outcome = answer(files.requests(*good))

        (line,) = outcome.err.splitlines()
        assert line.startswith("answering ")
        assert "4/4" in line

    def test_a_stream_that_cannot_show_a_letter(self, files, good, answer, monkeypatch):
        """Letters that the screen's encoding lacks are replaced; the run is not lost."""
        stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
        monkeypatch.setattr(sys, "stdout", stream)

        outcome = answer(files.requests(*good, {"req_id": "\u00fc", "prompt": "?"}))

        stream.flush()
        assert outcome.code == 0
        assert b"\n? " in stream.buffer.getvalue()

    def test_markup_in_a_request_is_text(self, files, good, answer):
        """What a request says is shown as it is, not read as instructions for the screen."""
        outcome = answer(files.requests({"req_id": "[red]a[/]", "prompt": "?", "answer": "[b]"}))

        assert "[red]a[/]" in outcome.out
        assert "[b]" in outcome.out
