"""``vlbatch graphs``: what would be captured, and how much memory its inputs take."""

from __future__ import annotations

import json
from pathlib import Path

import click

from vlbatch.errors import InvalidSetting


@click.command("graphs")
@click.option("--max-num-seqs", type=int, required=True, help="Most requests in the batch.")
@click.option("--only-prefill", is_flag=True, help="No decode graphs.")
@click.option("--draft-tokens", type=int, default=0, show_default=True, help="Drafts a decode.")
@click.option("--group", type=int, default=4, show_default=True, help="Query heads a KV head.")
@click.option("--max-model-len", type=int, default=4096, show_default=True, help="Tokens.")
@click.option(
    "--hidden", type=click.IntRange(1), default=2048, show_default=True, help="Of an embedding."
)
@click.option(
    "--lengths",
    default="uniform",
    show_default=True,
    help="Tokens of the steps whose padding is counted: a file of integers, or uniform.",
)
@click.option("--json", "json_out", type=click.Path(dir_okay=False, path_type=Path))
def graphs_command(
    max_num_seqs: int,
    only_prefill: bool,
    draft_tokens: int,
    group: int,
    max_model_len: int,
    hidden: int,
    lengths: str,
    json_out: Path | None,
) -> None:
    """Show the graphs that would be captured: sizes, padding, tile bounds and buffers.

    Captures nothing and needs no device. The file of --lengths has the tokens of one step after
    the other, between blanks or lines.
    """
    from rich.console import Console
    from rich.table import Table

    from vlbatch.cli.graphs_report import captured_kinds, padding_of, step_buffers, tile_bounds
    from vlbatch.graphs.config import GraphConfig
    from vlbatch.graphs.tiles import TileShape

    config = GraphConfig(
        max_num_seqs=max_num_seqs,
        cudagraph_only_prefill=only_prefill,
        prefill_graphs=True,
        num_draft_tokens=draft_tokens,
    )
    shape = TileShape(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        group=group,
        decode_tokens=config.decode_tokens,
    )
    given = None if lengths == "uniform" else _read_lengths(Path(lengths))
    console = Console(highlight=False)
    kinds: dict[str, dict[str, object]] = {}
    for kind in captured_kinds(config):
        sizes, bounds = config.sizes(kind), tile_bounds(config, shape, kind)
        unit = config.decode_tokens if kind == "decode" else 1
        steps = list(range(unit, sizes[0] + 1, unit)) if given is None else given
        padding = padding_of(steps, sizes)
        kinds[kind] = {
            "sizes": list(sizes),
            "padding_waste": padding.waste,
            "eager_steps": padding.eager,
            "tile_bounds": bounds,
        }
        console.print(
            f"{kind}: {len(sizes)} graphs of {', '.join(map(str, sizes))} tokens", soft_wrap=True
        )
        console.print(
            f"  padding ({lengths}): {padding.waste:.1%} of the tokens that are computed;"
            f" {padding.eager:.1%} of the steps fit no graph",
            soft_wrap=True,
        )
        console.print(f"  query tiles of the largest: at most {bounds[sizes[0]]}")
    buffers = step_buffers(config, shape, hidden)
    table = Table("buffer", "shape", "dtype", box=None, header_style="bold", pad_edge=False)
    table.add_column("bytes", justify="right")
    for buffer in buffers:
        sides = " x ".join(map(str, buffer.shape))
        table.add_row(buffer.name, sides, buffer.dtype, f"{buffer.num_bytes:,}")
    console.print(table)
    total = sum(buffer.num_bytes for buffer in buffers)
    console.print(f"{total:,} bytes of static inputs, allocated once")
    if json_out is not None:
        outcome = {
            "sizes": kinds["prefill" if only_prefill else "decode"]["sizes"],
            "kinds": kinds,
            "buffers": [
                {"name": b.name, "shape": b.shape, "dtype": b.dtype, "bytes": b.num_bytes}
                for b in buffers
            ],
            "total_bytes": total,
        }
        json_out.write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")


def _read_lengths(path: Path) -> list[int]:
    try:
        steps = [int(word) for word in path.read_text(encoding="utf-8").split()]
    except (OSError, ValueError) as error:
        raise InvalidSetting(
            f"{path}: {error}; expected a file of integers, or uniform", setting="lengths"
        ) from error
    if not steps or min(steps) < 0:
        raise InvalidSetting(f"{path} has no steps, or one of < 0 tokens", setting="lengths")
    return steps
