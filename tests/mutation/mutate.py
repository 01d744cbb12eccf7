"""Break a copy of the library in one place at a time and see whether the replay kit notices.

``python tests/mutation/mutate.py`` prints one line a mutation, and exits 1 if more are missed than
``README.md`` lists. The working tree is never changed. ``--only TEXT`` runs those whose file or
meaning contains the text; ``--jobs N`` runs N at once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
SCENARIOS = ROOT / "fixtures" / "scenarios"
NUM_EVENTS, SEED = 6000, 1
_TIMEOUT_SECONDS = 240


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a mutation was caught, and by what."""

    mutation: Mutation
    caught: bool
    find: str
    seconds: float


def judge(mutation: Mutation | None, *, num_events: int = NUM_EVENTS) -> tuple[bool, str]:
    """Run the kit on a mutated copy, or on a plain one; returns whether it was caught, and how."""
    with tempfile.TemporaryDirectory(prefix="vlbatch-mutation-") as folder:
        package = Path(folder) / "vlbatch"
        shutil.copytree(ROOT / "vlbatch", package, ignore=shutil.ignore_patterns("__pycache__"))
        if mutation is not None:
            mutation.apply(package)
        command = [sys.executable, str(Path(__file__).with_name("kit.py"))]
        command += [str(SCENARIOS), str(num_events), str(SEED)]
        environment = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command,
                env=environment,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return True, f"did not end within {_TIMEOUT_SECONDS} s"
    if done.returncode not in (0, 1):
        raise RuntimeError(f"the kit ended with {done.returncode}: {done.stderr}")
    return done.returncode == 1, done.stdout.strip()


def _timed(mutation: Mutation) -> Verdict:
    start = time.monotonic()
    caught, find = judge(mutation)
    return Verdict(mutation, caught, find, time.monotonic() - start)


def main() -> None:
    """Run all and print what was caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    chosen = [m for m in MUTATIONS if arguments.only in f"{m.file} {m.meaning}"]
    plain_fails, find = judge(None)
    if plain_fails:
        sys.exit(f"the library diverges without any mutation: {find}")
    with ThreadPoolExecutor(arguments.jobs) as pool:
        verdicts = []
        for verdict in pool.map(_timed, chosen):
            verdicts.append(verdict)
            word = "caught" if verdict.caught else "MISSED"
            line = f"{word} {verdict.seconds:5.1f} s  {verdict.mutation.file}: "
            print(f"{line}{verdict.mutation.meaning}  [{verdict.find[:110]}]", flush=True)  # noqa: T201 (a script)
    missed = sum(not verdict.caught for verdict in verdicts)
    print(f"{len(verdicts) - missed} of {len(verdicts)} caught")  # noqa: T201 (a script)
    listed = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    unlisted = [v for v in verdicts if not v.caught and v.mutation.meaning not in listed]
    for verdict in unlisted:
        print(f"missed and not in README.md: {verdict.mutation.meaning}")  # noqa: T201 (a script)
    sys.exit(bool(unlisted))


if __name__ == "__main__":
    main()
