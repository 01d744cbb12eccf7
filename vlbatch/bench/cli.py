"""``vlbatch bench``: what a step of bookkeeping costs on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vlbatch.errors import MissingDependency

if TYPE_CHECKING:
    from rich.console import Console

    from vlbatch.bench.harness import Outcome

NAMES = ("reorder", "step", "sizes", "features", "positions", "identity", "cache")


@click.command("bench")
@click.argument("name", type=click.Choice([*NAMES, "all"]), default="all")
@click.option(
    "--num-reqs",
    type=click.IntRange(1),
    help="Of reorder and step; 256 unless given.",
)
@click.option("--peer", type=click.Choice(["vllm"]), help="Time its own batch too, in reorder.")
@click.option("--device", is_flag=True, help="Measure the CUDA device instead of the host.")
@click.option("--json", "json_out", type=click.Path(dir_okay=False, path_type=Path))
def bench_command(
    name: str, num_reqs: int | None, peer: str | None, device: bool, json_out: Path | None
) -> None:
    """Time the batch state, and the methods of other engines beside it, in interleaved rounds.

    NAME: reorder (plan and apply against pairwise swaps, cycle swaps, sort and gather,
    index_select), step (parts of a decode step), sizes (64 to 4,096 requests), features,
    positions (against transformers), identity (hashing of pixels), cache, or all. With --device:
    reorder, features, positions, or all.
    """
    from rich.console import Console

    from vlbatch.bench.harness import machine

    if json_out is not None and not json_out.parent.is_dir():
        raise click.BadParameter(f"{json_out.parent} is not a folder.", param_hint="--json")
    if json_out is not None and not os.access(json_out.parent, os.W_OK):
        raise click.BadParameter(f"{json_out.parent} cannot be written to.", param_hint="--json")
    if peer is not None and name not in ("reorder", "all"):
        raise click.UsageError(f"--peer is for reorder or all, not {name}.")
    if device and (num_reqs or peer):
        raise click.UsageError("--device measures 256 requests and has no --peer.")
    if num_reqs is not None and name not in ("reorder", "step", "all"):
        raise click.UsageError(f"--num-reqs is for reorder, step or all, not {name}.")
    runs = _device_runs() if device else _runs(num_reqs or 256, peer)
    if name != "all" and name not in runs:
        raise click.UsageError(f"--device is for {', '.join(runs)} or all, not {name}.")
    console = Console(highlight=False)
    about = machine()
    console.print("  ".join(f"{key} {value}" for key, value in about.items()))
    outcomes: dict[str, dict[str, object]] = {}
    for each in runs if name == "all" else (name,):
        outcome = runs[each]()
        outcomes[each] = outcome.as_json()
        _print(console, each, outcome)
    if json_out is not None:
        found = outcomes if name == "all" else outcomes[name]
        json_out.write_text(
            json.dumps({"machine": about, **found}, indent=1) + "\n", encoding="utf-8"
        )


def _device_runs() -> dict[str, Callable[[], Outcome]]:
    try:
        from vlbatch.bench.device import device_runs
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("vlbatch"):
            raise
        raise MissingDependency(
            f"--device needs {error.name!r}; install vlbatch[torch,cuda]"
        ) from error
    return device_runs()


def _runs(num_reqs: int, peer: str | None) -> dict[str, Callable[[], Outcome]]:
    from vlbatch.bench import media, step
    from vlbatch.bench.reorder import run_reorder

    return {
        "reorder": lambda: run_reorder(num_reqs, peer=peer),
        "step": lambda: step.run_step(num_reqs),
        "sizes": step.run_sizes,
        "features": media.run_features,
        "positions": media.run_positions,
        "identity": media.run_identity,
        "cache": media.run_cache,
    }


def _print(console: Console, name: str, outcome: Outcome) -> None:
    """A table of times, then a line a fact."""
    from rich.table import Table

    table = Table(title=name, title_justify="left", box=None, header_style="bold")
    table.add_column("what")
    for column in ("median", "minimum", "calls"):
        table.add_column(column, justify="right")
    for what, timing in outcome.timings.items():
        table.add_row(what, _time(timing.median), _time(timing.minimum), str(timing.num_calls))
    console.print(table)
    for key, value in outcome.facts.items():
        if isinstance(value, Mapping) and any(isinstance(v, Mapping) for v in value.values()):
            for what, found in value.items():
                console.print(f"{key}, {what}: {_plain(found)}")
        else:
            console.print(f"{key}: {_plain(value)}")


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(found)}" for key, found in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)
