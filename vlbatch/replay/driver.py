"""Plays a scenario on the real objects, with the oracle beside them.

After every event the oracle compares the step and the state, ``check()`` of every object runs, and
then the file's own expectations are compared. The first difference ends the replay.
"""

from __future__ import annotations

from pathlib import Path

from vlbatch.replay.divergence import Divergence, FileResult
from vlbatch.replay.format import read_scenario
from vlbatch.replay.json_node import ScenarioError
from vlbatch.replay.player import Player
from vlbatch.replay.scenario import Scenario
from vlbatch.replay.world import World


def replay_file(path: str | Path, *, backend: str = "numpy") -> FileResult:
    """Replay one file; nothing about the file or the library raises.

    Raises:
        MissingDependency, InvalidField: for the backend.

    """
    try:
        scenario = read_scenario(path)
    except ScenarioError as error:
        return FileResult(str(path), error=str(error), error_line=error.line)
    return FileResult(
        str(path),
        divergence=replay(scenario, backend=backend),
        num_events=len(scenario.events),
        torn=scenario.torn,
    )


def replay(scenario: Scenario, *, backend: str = "numpy") -> Divergence | None:
    """Replay a scenario; returns the first divergence, if there is one.

    Raises:
        MissingDependency, InvalidField: for the backend.

    """
    player = Player(World(scenario, backend))
    try:
        player.play(scenario)
    except Divergence as divergence:
        return divergence
    return None
