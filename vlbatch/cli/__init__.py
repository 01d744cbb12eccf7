"""The ``vlbatch`` command.

Owns: argument parsing, what the screen shows, exit codes. Never: does the work itself; heavy
libraries are imported by the command that needs them.
"""

from __future__ import annotations

import sys
import warnings

import click

from vlbatch import __version__
from vlbatch.bench.cli import bench_command
from vlbatch.cli.graphs import graphs_command
from vlbatch.cli.run import run_command
from vlbatch.errors import VlbatchError
from vlbatch.replay.cli import replay_command
from vlbatch.replay.fuzz.cli import fuzz_command
from vlbatch.replay.timeline_cli import timeline_command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="vlbatch")
def cli() -> None:
    """Batch state for vision-language model runners."""


for command in (
    run_command,
    replay_command,
    fuzz_command,
    timeline_command,
    bench_command,
    graphs_command,
):
    cli.add_command(command)


def main() -> None:
    """Run the command line; an error of ours is one line on stderr and exit code 2."""
    if not sys.warnoptions:  # python -W asks to see what libraries warn about
        warnings.simplefilter("ignore")
    try:
        cli(prog_name="vlbatch")
    except VlbatchError as error:
        click.echo(f"vlbatch: {error}", err=True)
        sys.exit(2)
    except MemoryError as error:
        reason = str(error).partition("\n")[0]
        click.echo(
            f"vlbatch: out of memory: {reason} (setting: max_num_seqs, max_model_len, kv_blocks)",
            err=True,
        )
        sys.exit(2)
