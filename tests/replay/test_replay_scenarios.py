"""The scenarios of the repository, on every backend; and their table in the README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from replay_builders import SCENARIOS

from vlbatch import make_backend
from vlbatch.backends import BACKENDS
from vlbatch.errors import MissingDependency
from vlbatch.replay import read_scenario, replay

FILES = sorted(SCENARIOS.glob("*.jsonl"))
README = (SCENARIOS / "README.md").read_text(encoding="utf-8")
ROOT = SCENARIOS.parents[1]


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_all_pass(name: str) -> None:
    """Every scenario passes wherever the arrays live."""
    try:
        make_backend(name)
    except MissingDependency as error:
        pytest.skip(str(error))

    found = {path.name: replay(read_scenario(path), backend=name) for path in FILES}

    assert len(found) > 70
    assert {file: str(divergence) for file, divergence in found.items() if divergence} == {}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_says_enough(path: Path) -> None:
    """A scenario names its record and expects something of the library."""
    scenario = read_scenario(path)
    record = path.name.split("-")[0].upper()

    assert f'{{"note": "{record}' in path.read_text(encoding="utf-8")
    assert any(line.expectations for line in scenario.events)


def test_readme_names_every_file() -> None:
    """Every file is in the table, and every file and test in the table exists."""
    named = set(re.findall(r"`([\w-]+)`", README))

    assert {path.stem for path in FILES} <= named
    for file, test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", README):
        source = (ROOT / file).read_text(encoding="utf-8")
        assert not test or f"def {test}(" in source or f"class {test}" in source, (file, test)
