"""Scenario files, played on the real objects with a naive model beside them.

Owns: the file format, the synthetic encoder, the driver, the comparison with a file's expectations,
and the oracle. Never: shares code between the oracle and what it checks, or changes the library's
objects other than through their public verbs.
"""

from vlbatch.replay.divergence import Divergence, FileResult
from vlbatch.replay.driver import replay, replay_file
from vlbatch.replay.format import read_scenario
from vlbatch.replay.json_node import ScenarioError
from vlbatch.replay.scenario import Scenario

__all__ = [
    "Divergence",
    "FileResult",
    "Scenario",
    "ScenarioError",
    "read_scenario",
    "replay",
    "replay_file",
]
