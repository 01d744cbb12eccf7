"""The pytest plugin: ``alignment`` watches a runner of your own, ``scenario`` gives it work.

It is found by pytest where vlbatch is installed. ``docs/alignment.md`` has a complete example.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from vlbatch.replay.alignment import Alignment
    from vlbatch.replay.scenario import Scenario

_FAILED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--vlbatch-scenarios``."""
    parser.getgroup("vlbatch").addoption(
        "--vlbatch-scenarios",
        metavar="DIR",
        type=Path,
        help="run tests with the fixture `scenario` once for each *.jsonl and *.jsonl.gz in DIR",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Add the marker."""
    config.addinivalue_line(
        "markers",
        "vlbatch(family='qwen2_vl', tokens_per_second=2.0): settings of the fixture `alignment`",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with the fixture ``scenario`` once for each file."""
    folder: Path | None = metafunc.config.getoption("--vlbatch-scenarios")
    if folder is None or "scenario" not in metafunc.fixturenames:
        return
    files = sorted((*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")))
    if not files:
        raise pytest.UsageError(f"--vlbatch-scenarios: no *.jsonl and no *.jsonl.gz in {folder}")
    metafunc.parametrize("scenario", files, indirect=True, ids=[file.name for file in files])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember that a test failed, so that its ``alignment`` does not fail once more."""
    report = yield
    if call.when == "call":
        item.stash[_FAILED] = report.failed
    return report


@pytest.fixture
def scenario(request: pytest.FixtureRequest) -> Scenario:
    """A scenario file, read; the test is skipped without ``--vlbatch-scenarios``."""
    from vlbatch.replay.format import read_scenario

    if not hasattr(request, "param"):
        pytest.skip("no scenario files; pass --vlbatch-scenarios DIR")
    return read_scenario(request.param)


@pytest.fixture
def alignment(request: pytest.FixtureRequest) -> Iterator[Alignment]:
    """An oracle to feed from the runner under test; it raises at the first wrong row."""
    from vlbatch.replay.alignment import Alignment

    marker = request.node.get_closest_marker("vlbatch")
    made = Alignment(**(marker.kwargs if marker else {}))
    yield made
    if not request.node.stash.get(_FAILED, False):
        made.finish()
