"""``vlbatch timeline``: arguments, what is written, exit codes."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from vlbatch.replay.json_node import ScenarioError

_FORMATS = (".svg", ".png", ".html")


def _format(_: click.Context, __: click.Parameter, path: Path) -> Path:
    if path.suffix.lower() not in _FORMATS:
        raise click.BadParameter(f"{path.name} ends in none of {', '.join(_FORMATS)}.")
    return path


@click.command("timeline")
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_format,
    help="Picture to write; its ending says which kind: .svg, .png or .html.",
)
@click.option(
    "--theme",
    type=click.Choice(["auto", "light", "dark"]),
    default="auto",
    show_default=True,
    help="Colours; auto follows the viewer's setting, and is light in a .png.",
)
def timeline_command(trace: Path, output: Path, theme: str) -> None:
    """Draw TRACE, a scenario file or a recorded trace: rows over steps.

    One colour a request, stronger the more of its prompt it computes; the ends of the decode and
    extend regions; rows that move; image and video tokens in a chunk, and items that the chunk
    cuts; encodes, cache hits, evictions, preemptions below. What the file has otherwise than is
    right is marked in red. Large traces are drawn denser, and then several steps or rows as one.
    The .html shows details under the pointer and needs no server and no other file.

    \b
    Exit codes:
      0  the picture was written
      2  TRACE cannot be read, or the picture cannot be written
    """  # noqa: D301 (click wants the character)
    from vlbatch.replay.format import read_scenario
    from vlbatch.replay.timeline import build_timeline, read_orders
    from vlbatch.replay.timeline.render import render

    try:
        scenario = read_scenario(trace)
        timeline = build_timeline(scenario, read_orders(trace))
        output.write_bytes(render(timeline, output.suffix.lower(), theme))
    except (ScenarioError, OSError) as error:
        click.echo(f"vlbatch: {error}", err=True)
        sys.exit(2)
    if scenario.torn is not None:
        click.echo(f"drawn up to a torn last line: {scenario.torn}", err=True)
