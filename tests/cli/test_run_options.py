"""Options of ``vlbatch run``: defaults, refusals before anything runs, faults on purpose."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from cli_cases import MODEL

import vlbatch as package
from vlbatch.cli import run
from vlbatch.cli.run import run_command
from vlbatch.runner import FAULTS, Faults, RunSettings


def call_python(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


class TestHelp:
    def test_every_default_is_shown(self, vlbatch, monkeypatch):
        """Each option that has a default shows it, and it is the one of the settings."""
        monkeypatch.setenv("COLUMNS", "80")

        shown = " ".join(vlbatch("run", "--help").out.split())

        settings = asdict(RunSettings())
        settings["cache_mb"] = settings.pop("cache_bytes") / 1e6
        del settings["poison"], settings["prefill_gate"]  # off unless given
        shown_settings = 0
        for option in run_command.params:
            if option.name in settings:
                shown_settings += 1
                assert option.default == settings[option.name], option.name
                after = shown.partition(f"{option.opts[0]} ")[2].partition(" --")[0]
                assert f"[default: {option.default}]" in after, option.name
        assert shown_settings >= 9
        assert "[default: (tiny-vl beside REQUESTS)]" in shown

    def test_exit_codes_and_faults(self, vlbatch):
        """Exit codes are explained, and every fault that can be injected is listed."""
        shown = vlbatch("run", "--help").out

        assert re.search(r"Exit codes:\n +0 .*\n +1 .*--strict.*\n +2 ", shown)
        for name, what in FAULTS.items():
            assert re.search(rf"^ +{name} +{re.escape(what)}$", shown, re.MULTILINE)

    def test_version(self, vlbatch):
        """``--version`` needs no installed package and says what ``__version__`` says."""
        assert vlbatch("--version").out == f"vlbatch, version {package.__version__}\n"

    def test_as_a_module(self):
        """``python -m vlbatch`` is the same command."""
        result = call_python("-m", "vlbatch", "--version")

        assert result.stdout == f"vlbatch, version {package.__version__}\n"
        assert (result.returncode, result.stderr) == (0, "")


class TestRefusedBeforeTheRun:
    @pytest.fixture
    def stopped(self, files, good, answer, monkeypatch):
        """Options are refused with exit 2 and no result, before an engine is made."""
        path = files.requests(*good)

        def check(message, *options):
            def no_engine(*_):
                raise AssertionError("an engine was made")

            monkeypatch.setattr(run, "make_engine", no_engine)
            outcome = answer(path, *options)
            assert (outcome.code, outcome.out, outcome.json) == (2, "", {})
            assert re.search(message, outcome.err), outcome.err
            return outcome

        return check

    @pytest.mark.parametrize(
        ("option", "value", "message"),
        [
            ("--chunk", 0, r"got 0; expected 1\.\..*\(setting: chunk\)"),
            ("--kv-blocks", -1, r"\(setting: kv_blocks\)"),
            ("--kv-blocks", 10**12, r"\(setting: kv_blocks\)"),
            (
                "--max-num-seqs",
                RunSettings().token_budget + 1,
                r"\(setting: token_budget, max_num_seqs\)",
            ),
            (
                "--token-budget",
                RunSettings().max_num_seqs - 1,
                r"\(setting: token_budget, max_num_seqs\)",
            ),
            ("--cache-mb", 0, r"got 0; expected >= 1 \(setting: cache_bytes\)"),
            ("--cache-mb", -1.5, r"\(setting: cache_bytes\)"),
            ("--cache-mb", "nan", r"got nan MB; .*\(setting: cache_mb\)"),
            ("--cache-mb", "inf", r"got inf MB"),
            ("--chunk", "many", "'many' is not a valid integer"),
            ("--order", "random", "'split', 'two', 'arrival'"),
            ("--inject", "swap", r"no fault 'swap'; expected one of swap-features, .*inject"),
            ("--inject", "drop-field:token_ids", "no fault 'drop-field:token_ids'"),
            ("--model", "/none", "'/none' does not exist"),
            ("--bogus", "1", "No such option"),
        ],
    )
    def test_impossible_options(self, stopped, option, value, message):
        """A setting out of range or unknown is named."""
        stopped(message, option, value)

    def test_json_into_a_folder_that_is_not_there(self, stopped, tmp_path):
        """What could not be written after the run is refused before it."""
        where = tmp_path / "none" / "out.json"

        stopped(r"none is not a folder that can be written to", "--json", where)

    def test_json_into_a_folder_that_is_read_only(self, stopped, tmp_path, monkeypatch):
        """So is a folder without the right to write (asked of the system: root always may)."""
        monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)

        stopped("is not a folder that can be written to", "--json", tmp_path / "new.json")

    def test_json_over_a_folder(self, stopped, tmp_path):
        """The file to write may not be a folder."""
        stopped("is a directory", "--json", tmp_path)

    def test_model_folder_without_a_model(self, stopped, tmp_path):
        """A folder that holds no model is named."""
        empty = tmp_path / "empty"
        empty.mkdir()

        stopped(r"cannot read .*empty/config.json: .*\(setting: model\)", "--model", empty)

    def test_no_model_beside_the_file(self, files, good, vlbatch):
        """Without ``--model`` the model is expected beside the request file."""
        outcome = vlbatch("run", files.requests(*good))

        assert outcome.code == 2
        assert re.match(r"vlbatch: cannot read .*/tiny-vl/config.json", outcome.err)

    def test_a_cache_without_a_row(self, files, good, answer):
        """A cache that holds no feature row of this model is refused before the progress bar."""
        outcome = answer(files.requests(*good), "--cache-mb", 15 / 1e6)

        assert (outcome.code, outcome.json) == (2, {})
        assert outcome.err == (
            "vlbatch: got 15 bytes; a feature row of this model has 16 (setting: cache_bytes)\n"
        )

    def test_more_memory_than_there_is(self, files, good, answer, monkeypatch):
        """A model or a batch that does not fit memory is one line that names the settings."""

        def no_memory(*_):
            raise MemoryError("Unable to allocate 2 TiB\n[Hint: buy more]")

        monkeypatch.setattr(run, "make_engine", no_memory)

        outcome = answer(files.requests(*good))

        assert outcome.code == 2
        assert outcome.err == (
            "vlbatch: out of memory: Unable to allocate 2 TiB"
            " (setting: max_num_seqs, max_model_len, kv_blocks)\n"
        )

    @pytest.mark.parametrize("package", ["paddle", "paddleformers", "tokenizers"])
    def test_missing_package(self, files, good, package):
        """Without a package that the run needs the message names the extra that brings it."""
        path = files.requests(*good)
        code = (
            f"import sys; sys.modules[{package!r}] = None\n"
            "from vlbatch.cli import main\n"
            f"sys.argv = ['vlbatch', 'run', {str(path)!r}, '--model', {str(MODEL)!r}]\n"
            "main()\n"
        )

        result = call_python("-c", code)

        assert (result.returncode, result.stdout) == (2, "")
        assert re.fullmatch(
            rf"vlbatch: .*need.* {package}[.a-z]*: pip install 'vlbatch\[run\]'\n", result.stderr
        )


class TestInject:
    @pytest.fixture
    def busy(self, files):
        """Enough requests for every fault: images of one size, decodes that move."""
        requests = []
        for n in range(12):
            files.picture(f"{n}.png", 2, 2, n)
            requests.append(
                {
                    "req_id": f"r{n}", "prompt": "<image> which digit ?", "images": [f"{n}.png"],
                    "max_tokens": 2 + n % 5, "arrival": n // 2,
                }
            )  # fmt: skip
        return files.requests(*requests)

    @pytest.mark.parametrize("name", sorted(FAULTS))
    def test_every_fault_is_exit_1(self, busy, answer, name):
        """With ``--verify`` each fault is exit 1; the JSON names request, step and difference."""
        options = ("--chunk", 5, "--max-num-seqs", 4, "--block-size", 16)
        assert answer(busy, *options).code == 0

        outcome = answer(busy, *options, "--inject", name)

        assert (outcome.code, outcome.json["verified"]) == (1, False)
        first = outcome.json["mismatches"][0]
        assert first["req_id"] in outcome.by_id
        assert 0 <= first["step"] < outcome.json["steps"]
        assert re.search("logits differ|field max_tokens is|alone it", first["what"])
        assert f"MISMATCH {first['req_id']}, step {first['step']}, token" in outcome.out

    def test_without_an_occasion(self, files, answer):
        """A fault that could not happen is exit 2 and says so; nothing is written."""
        path = files.requests({"req_id": "a", "prompt": "repeat 1 ?"})

        outcome = answer(path, "--inject", "swap-features")

        assert (outcome.code, outcome.json, outcome.out) == (2, {}, "")
        assert (
            "vlbatch: fault swap-features had no occasion in this run (setting: inject)\n"
            in outcome.err
        )

    def test_without_a_trace(self, files, good, answer, monkeypatch):
        """A fault that happened but was undone is no proof of anything: exit 2."""
        undone = Faults()
        undone.happened = True
        monkeypatch.setattr(run, "make_faults", lambda *_: undone)

        outcome = answer(files.requests(*good), "--inject", "stale-row")

        assert (outcome.code, outcome.json) == (2, {})
        assert "fault stale-row left no trace" in outcome.err


@pytest.mark.parametrize("order", ["split", "two", "arrival"])
def test_order(files, good, answer, order):
    """Every row policy gives the same answers."""
    outcome = answer(files.requests(*good), "--order", order)

    assert outcome.json["verified_requests"] == [r["req_id"] for r in good]
    assert outcome.runners[0].vl.batch.policy == order


def test_settings_reach_the_run(files, good, answer):
    """Each option sets the setting of its name."""
    outcome = answer(
        files.requests(*good), "--max-num-seqs", 3, "--chunk", 7, "--token-budget", 11,
        "--kv-blocks", 31, "--block-size", 5, "--max-model-len", 90, "--cache-mb", 0.0004,
        "--encode-rows", 17,
    )  # fmt: skip

    (runner,) = outcome.runners
    assert runner._settings == RunSettings(
        max_num_seqs=3, chunk=7, token_budget=11, kv_blocks=31, block_size=5, max_model_len=90,
        cache_bytes=400, encode_rows=17,
    )  # fmt: skip
    assert outcome.code == 0


def test_the_default_model_is_beside_the_file(files, good, vlbatch, tmp_path):
    """``tiny-vl`` in the folder of the requests is used without ``--model``."""
    (tmp_path / "tiny-vl").symlink_to(Path(MODEL))

    assert vlbatch("run", files.requests(*good)).code == 0
