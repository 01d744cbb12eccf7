"""``vlbatch bench``: what a step of bookkeeping costs on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import click

NAMES = ("reorder", "step", "sizes", "features", "positions", "identity", "cache")


@click.command("bench")
@click.argument("name", type=click.Choice([*NAMES, "all"]), default="all")
@click.option("--num-reqs", type=click.IntRange(1), default=256, show_default=True)
@click.option("--device", is_flag=True, help="Measure the CUDA device instead of the host.")
@click.option("--json", "json_out", type=click.Path(dir_okay=False, path_type=Path))
def bench_command(name: str, num_reqs: int, device: bool, json_out: Path | None) -> None:
    """Time the batch state, and the methods of other engines beside it, in interleaved rounds.

    NAME: reorder (plan and apply against pairwise swaps, cycle swaps, sort and gather,
    index_select), step (parts of a decode step), sizes (64 to 4,096 requests), features,
    positions (against transformers), identity (hashing of pixels), cache, or all.
    """
    from rich.console import Console

    from vlbatch.bench.harness import machine

    if device:
        from vlbatch.bench.device import main as device_main

        device_main("cuda", json_out)
        return
    console = Console()
    outcome: dict[str, object] = {"machine": machine()}
    console.print("  ".join(f"{k} {v}" for k, v in machine().items()), highlight=False)
    runs = _runs(num_reqs)
    wanted = NAMES if name == "all" else (name,)
    for each in wanted:
        result = runs[each]()
        outcome[each] = result
        _print_table(console, each, result)
    if json_out is not None:
        data = outcome if name == "all" else {**_mapping(outcome[name]), "machine": machine()}
        json_out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _runs(num_reqs: int) -> dict[str, Callable[[], Mapping[str, object]]]:
    from vlbatch.bench import media, step
    from vlbatch.bench.reorder import run_reorder

    return {
        "reorder": lambda: run_reorder(num_reqs),
        "step": lambda: step.run_step(num_reqs),
        "sizes": step.run_sizes,
        "features": media.run_features,
        "positions": media.run_positions,
        "identity": media.run_identity,
        "cache": media.run_cache,
    }


def _print_table(console: object, name: str, result: Mapping[str, object]) -> None:
    from rich.console import Console
    from rich.table import Table

    assert isinstance(console, Console)  # noqa: S101 (imported lazily)
    table = Table(title=name, title_justify="left", box=None, header_style="bold")
    table.add_column("what")
    for column in ("median", "minimum", "rounds"):
        table.add_column(column, justify="right")
    for what, timing in _mapping(result["timings"]).items():
        values = _mapping(timing)
        table.add_row(
            what, _time(values["median_us"]), _time(values["min_us"]), f"{values['rounds']}"
        )
    console.print(table)
    for key, value in result.items():
        if key == "timings":
            continue
        console.print(f"{key}: {_plain(value)}", highlight=False)


def _mapping(value: object) -> Mapping[str, object]:
    assert isinstance(value, Mapping)  # noqa: S101 (this module's own data)
    return value


def _time(value: object) -> str:
    micros = float(str(value))
    return f"{micros / 1000:.2f} ms" if micros >= 1000 else f"{micros:.1f} us"


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)
