"""``vlbatch run``: the main job."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vlbatch.errors import InvalidField

if TYPE_CHECKING:
    from vlbatch.runner import Mismatch

if TYPE_CHECKING:
    pass

DEFAULT_MODEL = Path("fixtures/tiny-vl")


@click.command("run")
@click.argument("requests", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Model folder; default: tiny-vl beside the request file.",
)
@click.option("--max-num-seqs", type=int, help="Most requests in the batch.")
@click.option("--chunk", type=int, help="Most prompt tokens of a request in one step.")
@click.option("--token-budget", type=int, help="Most tokens of a step.")
@click.option("--kv-blocks", type=int, help="KV blocks of the engine.")
@click.option("--block-size", type=int, help="Tokens a KV block.")
@click.option("--max-model-len", type=int, help="Longest request, prompt and outputs.")
@click.option("--cache-mb", type=float, help="Encoder cache, MB.")
@click.option("--encode-rows", type=int, help="Most feature rows encoded in a step.")
@click.option("--order", type=click.Choice(["split", "two", "arrival"]), help="Row policy.")
@click.option("--verify", is_flag=True, help="Compare every request with itself alone.")
@click.option(
    "--inject",
    metavar="FAULT",
    help="Break one thing: swap-features, shift-features, shift-positions, stale-row,"
    " drop-field:NAME.",
)
@click.option("--strict", is_flag=True, help="Exit 1 if a request was refused.")
@click.option(
    "--json",
    "json_out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the outcome as JSON.",
)
def run_command(
    requests: Path,
    model: Path | None,
    verify: bool,
    inject: str | None,
    strict: bool,
    json_out: Path | None,
    cache_mb: float | None,
    **settings: object,
) -> None:
    """Answer the questions in REQUESTS (one JSON object a line), continuously batched.

    Exit codes: 0 all went well; 1 --verify found a difference, or --strict and a request was
    refused; 2 the file or a setting is wrong.
    """
    from vlbatch.cli.run_report import print_report, progress_bar, to_json
    from vlbatch.runner import (
        PromptBuilder,
        Runner,
        RunSettings,
        compare,
        load_requests,
        make_answerer,
        make_engine,
        make_faults,
    )  # fmt: skip

    given = {name: value for name, value in settings.items() if value is not None}
    if cache_mb is not None:
        given["cache_bytes"] = int(cache_mb * 1e6)
    limits = RunSettings(**given)  # type: ignore[arg-type]  # names and types are click's
    faults = make_faults(inject)
    jobs = load_requests(requests)
    folder = model or requests.parent / "tiny-vl"
    prompts = PromptBuilder(folder)
    engine = make_engine("paddle", folder, limits)
    with progress_bar(len(jobs)) as on_step:
        runner = Runner(engine, prompts, limits, faults=faults, on_step=on_step)
        results = runner.run(jobs)
    if inject is not None and not faults.happened:
        raise InvalidField(f"fault {inject} had no occasion in this run", setting="inject")
    verified: list[str] | None = None
    mismatches: list[Mismatch] = []
    if verify:
        verified, mismatches = compare(results, make_answerer(engine, prompts, limits))
    print_report(results, runner, verified, mismatches)
    if json_out is not None:
        outcome = to_json(results, runner, verified, mismatches)
        json_out.write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")
    refused = [r for r in results if r.error is not None]
    sys.exit(1 if mismatches or (strict and refused) else 0)
