"""The pytest plugin: its fixtures and its option, in test runs of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., pytest.RunResult]

pytest_plugins = ["pytester"]

RUNNER = """
import numpy as np
from vlbatch import Item

CAT = np.arange(24.0).reshape(6, 4)

def serve(watch, features=CAT, positions=None):
    image = Item(key="cat", modality="image", offset=1, length=6, grid=(1, 2, 3))
    watch.admit("a", prompt_len=8, items=[image])
    watch.step({"a": 8})
    watch.encoded("cat", CAT)
    watch.gathered(["a"], tokens=range(1, 7), features=features, positions=positions)
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the tests in a piece of code, with this plugin and no other."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(code: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(runner=RUNNER)
        pytester.makepyfile(test_it=code)
        return pytester.runpytest_inprocess("-p", "vlbatch.replay.plugin", *options)

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two scenario files."""
    made = tmp_path / "scenarios"
    made.mkdir()
    for name, tokens in (("one", 3), ("two", 4)):
        (made / f"{name}.jsonl").write_text(
            '{"vlbatch_scenario": 1}\n'
            '{"add": {"req_id": "a", "prompt_len": 3}}\n'
            f'{{"step": {{"a": {tokens}}}}}\n'
        )
    return made


class TestAlignment:
    def test_right_runner_passes(self, run: Run) -> None:
        """A runner that delivers the right rows passes."""
        result = run("""
            from runner import serve
            def test_runner(alignment):
                serve(alignment)
        """)  # fmt: skip
        result.assert_outcomes(passed=1)

    def test_wrong_runner_fails_with_a_table(self, run: Run) -> None:
        """A wrong row fails the test with a table, at the line of the runner that gathers."""
        result = run("""
            from runner import CAT, serve
            def test_runner(alignment):
                serve(alignment, features=CAT[::-1])
        """)  # fmt: skip
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            [
                "*watch.gathered(*",
                "E * step 1: request 'a': 6 of the feature rows in its tokens [[]0, 8) are wrong",
                "E * token  expected   got",
                "E * 1      cat row 0  cat row 5",
            ]
        )
        result.stdout.no_fnmatch_line("*alignment.py*")

    def test_marker_sets_the_family(self, run: Run) -> None:
        """The marker's settings are those of the oracle."""
        result = run("""
            import pytest
            from runner import serve
            @pytest.mark.vlbatch(family="1d")
            def test_one_axis(alignment):
                serve(alignment, positions=range(8))
            def test_three_axes(alignment):
                serve(alignment, positions=range(8))
        """, "--strict-markers")  # fmt: skip
        result.assert_outcomes(passed=1, failed=1)

    def test_last_step_counts(self, run: Run) -> None:
        """A request that is never gathered is missed at the end of the test, too."""
        result = run("""
            from runner import CAT
            from vlbatch import Item
            def test_forgets(alignment):
                image = Item(key="cat", modality="image", offset=1, length=6, grid=(1, 2, 3))
                alignment.admit("a", prompt_len=8, items=[image])
                alignment.step({"a": 8})
        """)  # fmt: skip
        result.assert_outcomes(passed=1, errors=1)
        result.stdout.fnmatch_lines(["E *'a' was never gathered*"])

    def test_failed_test_fails_once(self, run: Run) -> None:
        """A test that has failed is not blamed again for the step that it left open."""
        result = run("""
            from vlbatch import Item
            def test_fails(alignment):
                image = Item(key="cat", modality="image", offset=1, length=6, grid=(1, 2, 3))
                alignment.admit("a", prompt_len=8, items=[image])
                alignment.step({"a": 8})
                assert False
        """)  # fmt: skip
        result.assert_outcomes(failed=1)


class TestScenario:
    CODE = """
        from vlbatch.replay.scenario import Step
        def test_steps(scenario):
            (step,) = [line.event for line in scenario.events if isinstance(line.event, Step)]
            assert step.scheduled == {"a": 3}
    """

    def test_one_test_a_file(self, run: Run, folder: Path) -> None:
        """A test with the fixture runs once for each file of the folder, named by it."""
        result = run(self.CODE, "-v", "--vlbatch-scenarios", str(folder))

        result.assert_outcomes(passed=1, failed=1)
        result.stdout.fnmatch_lines(
            ["*test_steps[[]one.jsonl[]] PASSED*", "*test_steps[[]two.jsonl[]] FAILED*"]
        )

    def test_skipped_without_the_option(self, run: Run) -> None:
        """Without the option the test is skipped, and says which option is missing."""
        result = run(self.CODE, "-rs")

        result.assert_outcomes(skipped=1)
        result.stdout.fnmatch_lines(["*pass --vlbatch-scenarios DIR*"])

    def test_empty_folder(self, run: Run, tmp_path: Path) -> None:
        """A folder without scenario files is a usage error, not a run of nothing."""
        result = run(self.CODE, "--vlbatch-scenarios", str(tmp_path))

        assert result.ret != 0
        result.stdout.fnmatch_lines(["*no [*].jsonl and no [*].jsonl.gz in *"])

    def test_unreadable_file(self, run: Run, folder: Path) -> None:
        """A file that cannot be read fails its own test, with line and key."""
        (folder / "bad.jsonl").write_text('{"vlbatch_scenario": 1, "capacity": 0}\n')
        result = run(self.CODE, "--vlbatch-scenarios", str(folder))

        result.assert_outcomes(passed=1, failed=1, errors=1)
        result.stdout.fnmatch_lines(["E *bad.jsonl: line 1: capacity: *"])

    def test_own_fixture_of_that_name(self, run: Run) -> None:
        """A suite with a fixture ``scenario`` of its own is left alone."""
        result = run("""
            import pytest
            @pytest.fixture
            def scenario():
                return "ours"
            def test_ours(scenario):
                assert scenario == "ours"
        """)  # fmt: skip
        result.assert_outcomes(passed=1)
