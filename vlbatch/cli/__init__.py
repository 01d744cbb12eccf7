"""The ``vlbatch`` command.

Owns: argument parsing, what the screen shows, exit codes. Never: does the work itself; heavy
libraries are imported by the command that needs them.
"""

from __future__ import annotations

import sys

import click

from vlbatch.cli.run import run_command
from vlbatch.errors import VlbatchError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="vlbatch")
def cli() -> None:
    """Batch state for vision-language model runners."""


cli.add_command(run_command)


def main() -> None:
    """Run the command line; an error of ours is one line on stderr and exit code 2."""
    try:
        cli()
    except VlbatchError as error:
        click.echo(f"vlbatch: {error}", err=True)
        sys.exit(2)
