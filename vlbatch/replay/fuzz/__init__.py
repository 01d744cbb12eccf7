"""Random walks over the scenario events, each event compared with the oracle.

Owns: random settings and events, the walk, the shrinking of a walk that diverged, and writing it as
a scenario file. Never: judges the library itself; the player and the oracle do.
"""

from vlbatch.replay.fuzz.shrinking import shrink
from vlbatch.replay.fuzz.walks import Failure, play_events, walk, walk_lengths
from vlbatch.replay.fuzz.write import as_lines

__all__ = ["Failure", "as_lines", "play_events", "shrink", "walk", "walk_lengths"]
