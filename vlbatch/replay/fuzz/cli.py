"""``vlbatch fuzz``: arguments, progress, the file of a failure, exit codes."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from vlbatch.replay.fuzz.walks import Failure

_WALKS_A_JOB = 8


@click.command("fuzz")
@click.option(
    "--steps",
    "num_steps",
    type=click.IntRange(min=1),
    default=10_000,
    show_default=True,
    help="Events to play, in walks of 50 to 200.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all chance.")
@click.option(
    "--backend",
    default="numpy",
    show_default=True,
    metavar="NAME",
    help="Where the arrays live: numpy, paddle, torch.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=None,
    help="Processes; the result is the same for any number.  [default: one a core, at most 8]",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("fuzz-failure.jsonl"),
    show_default=True,
    help="Scenario file to write when a walk diverges.",
)
def fuzz_command(
    num_steps: int, seed: int, backend: str, workers: int | None, output: Path
) -> None:
    """Play random events on the real objects, checked by a naive model after each.

    Requests come and go with items, masks, shared keys and prefix hits, are scheduled in chunks,
    accept drafts, are rolled back, preempted and resumed; encodes fail, weights change, entries are
    lost; some events are impossible and have to be refused. Every walk has other settings. The
    first walk that diverges is shrunk, printed and written as a scenario file for vlbatch replay.

    \b
    Exit codes:
      0  nothing diverged
      1  a walk diverged
      2  bad arguments, or the file cannot be written
    """  # noqa: D301 (click wants the character)
    from vlbatch.backends import make_backend
    from vlbatch.replay.fuzz.shrinking import shrink
    from vlbatch.replay.fuzz.walks import walk_lengths
    from vlbatch.replay.fuzz.write import as_lines

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a framework says of itself when imported
        make_backend(backend)
    lengths = list(walk_lengths(seed, num_steps))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    failure = _first_failure(seed, lengths, backend, workers or min(8, cores or 1))
    if failure is None:
        click.echo(f"ok: {num_steps} events in {len(lengths)} walks, seed {seed}")
        return
    number = len(failure.events)
    click.echo(f"shrinking a walk that diverged at its event {number} ...", err=True)
    small = shrink(failure, backend=backend)
    lines = as_lines(small, f"vlbatch fuzz --seed {seed} on {backend}: {small.divergence.what}")
    try:
        output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        click.echo(f"vlbatch: {output}: {error.strerror}", err=True)
        sys.exit(2)
    click.echo("\n".join(lines))
    click.echo(f"{output}: {len(small.events)} events: {small.divergence}")
    sys.exit(1)


def _first_failure(seed: int, lengths: list[int], backend: str, num_workers: int) -> Failure | None:
    """Play all walks, with a progress bar on stderr; the first failure in order of the walks."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from vlbatch.replay.fuzz.walks import walk

    jobs = [
        (seed, first, lengths[first : first + _WALKS_A_JOB], backend)
        for first in range(0, len(lengths), _WALKS_A_JOB)
    ]
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("events", total=sum(lengths))
        for job, number in zip(jobs, _played(jobs, num_workers), strict=False):
            if number is not None:
                return walk((seed, number), lengths[number], backend=backend)
            bar.advance(task, sum(job[2]))
    return None


_Job = tuple[int, int, list[int], str]


def _played(jobs: list[_Job], num_workers: int) -> Iterator[int | None]:
    """Yield the number of each job's first walk that diverges, in order."""
    if num_workers == 1 or len(jobs) == 1:
        yield from map(_play, jobs)
        return
    from multiprocessing import get_context

    with get_context("spawn").Pool(min(num_workers, len(jobs))) as pool:
        yield from pool.imap(_play, jobs)


def _play(job: _Job) -> int | None:
    """Play some walks; returns the number of the first that diverges."""
    from vlbatch.replay.fuzz.walks import walk

    seed, first, lengths, backend = job
    for number, length in enumerate(lengths, start=first):
        if walk((seed, number), length, backend=backend) is not None:
            return number
    return None
