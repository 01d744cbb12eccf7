"""What a mutated library has to pass: every scenario, then random walks. Stops at the first find.

``python kit.py SCENARIOS NUM_EVENTS SEED`` prints what was found and exits 1, or exits 0.
"""

from __future__ import annotations

import sys
from pathlib import Path


def first_find(scenarios: Path, num_events: int, seed: int) -> str | None:
    """Return where something diverges, ``None`` if nothing does."""
    from vlbatch.replay import read_scenario, replay
    from vlbatch.replay.fuzz import walk, walk_lengths

    for path in sorted(scenarios.glob("*.jsonl")):
        divergence = replay(read_scenario(path))
        if divergence is not None:
            return f"{path.stem}: {divergence}"
    for number, length in enumerate(walk_lengths(seed, num_events)):
        failure = walk((seed, number), length)
        if failure is not None:
            return f"fuzz, walk {number}: {failure.divergence}"
    return None


def main() -> None:
    """Run the kit on the ``vlbatch`` that Python finds first."""
    scenarios, num_events, seed = sys.argv[1:]
    try:
        find = first_find(Path(scenarios), int(num_events), int(seed))
    except Exception as error:  # noqa: BLE001 (a library that cannot even start is found out)
        find = f"{type(error).__name__}: {error}"
    if find is not None:
        sys.stdout.write(find + "\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
