"""``vlbatch replay``: arguments, screen, exit codes."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vlbatch.replay.readings import READINGS

if TYPE_CHECKING:
    from vlbatch.replay.divergence import FileResult


@click.command("replay", epilog=READINGS)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--backend",
    default="numpy",
    show_default=True,
    metavar="NAME",
    help="Where the arrays live: numpy, paddle, torch.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the results to this file too.",
)
def replay_command(files: tuple[str, ...], backend: str, json_path: Path | None) -> None:
    """Play scenario files on the real objects, checked by a naive model.

    Prints one line a file: "ok", or the first divergence with its line number, what was expected
    and what happened. Exit code 0 when all pass, 1 when one diverges, 2 when a file cannot be read.
    """
    from vlbatch.backends import make_backend
    from vlbatch.replay.driver import replay_file

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a framework says of itself when imported
        make_backend(backend)
    results = []
    for file in files:
        result = replay_file(file, backend=backend)
        results.append(result)
        click.echo(_line(result))
        if result.divergence is not None and result.divergence.table:
            _print_table(result)
    if json_path is not None:
        data = {"backend": backend, "files": [result.as_data() for result in results]}
        json_path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    statuses = {result.status for result in results}
    sys.exit(2 if "unreadable" in statuses else 1 if "diverged" in statuses else 0)


def _line(result: FileResult) -> str:
    if result.error is not None:
        return result.error
    torn = f" (up to a torn last line: {result.torn})" if result.torn else ""
    return f"{result.path}: {result.divergence or 'ok'}{torn}"


def _print_table(result: FileResult) -> None:
    """Show on stderr which tokens got which rows, the first twenty."""
    from rich.console import Console
    from rich.table import Table

    assert result.divergence is not None  # noqa: S101 (the caller looked)
    rows = result.divergence.table
    table = Table("req_id", "token", "expected (key, row)", "got")
    for row in rows[:20]:
        table.add_row(row.req_id, str(row.token), row.expected, row.got)
    console = Console(stderr=True, markup=False)
    console.print(table)
    if len(rows) > 20:
        console.print(f"and {len(rows) - 20} tokens more")
