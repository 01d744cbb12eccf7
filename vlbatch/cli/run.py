"""``vlbatch run``: the main job."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from vlbatch.errors import InvalidSetting
from vlbatch.runner import (
    ENGINES,
    FAULTS,
    GRAPH_MODES,
    Mismatch,
    PromptBuilder,
    Runner,
    RunSettings,
    compare,
    load_requests,
    make_answerer,
    make_drafter,
    make_engine,
    make_faults,
)

_DEFAULTS = RunSettings()

_EPILOG = "\n".join([
    "\b",  # keeps the lines of a paragraph
    "Exit codes:",
    "  0  every request was answered or refused, and --verify found no difference",
    "  1  --verify found a difference, or --strict and a request was refused or failed",
    "  2  the file, the model or an option is wrong and nothing was run; or the fault",
    "     of --inject had no occasion in this run, or left no trace",
    "",
    "\b",
    "Faults of --inject:",
    *(f"  {name:<24}{what}" for name, what in FAULTS.items()),
])  # fmt: skip


def _setting(name: str, help_text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An option for the setting of this name, with its default."""
    flag, default = f"--{name.replace('_', '-')}", getattr(_DEFAULTS, name)
    return click.option(flag, type=int, default=default, show_default=True, help=help_text)


def _writable(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    """Refuse before the run what could not be written after it."""
    if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise click.BadParameter(f"{path.parent} is not a folder that can be written to.")
    return path


def _gate(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, float] | None:
    """Read N:SECONDS."""
    if value is None:
        return None
    count, _colon, seconds = value.partition(":")
    try:
        return int(count), float(seconds)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not N:SECONDS, such as 4:0.05.") from None


@click.command("run", epilog=_EPILOG)
@click.argument("requests", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    show_default="tiny-vl beside REQUESTS",
    help="Model folder: Qwen2.5-VL in the Hugging Face layout.",
)
@_setting("max_num_seqs", "Most requests in the batch.")
@_setting("chunk", "Most prompt tokens of a request in one step.")
@_setting("token_budget", "Most tokens of a step.")
@_setting("kv_blocks", "KV blocks of the engine.")
@_setting("block_size", "Tokens a KV block.")
@_setting("max_model_len", "Longest request, prompt and outputs, in tokens.")
@click.option(
    "--cache-mb",
    type=float,
    default=_DEFAULTS.cache_bytes / 1e6,
    show_default=True,
    help="Encoder cache (cache_bytes), in MB of a million bytes.",
)
@_setting("encode_rows", "Most feature rows encoded in a step.")
@click.option(
    "--order",
    type=click.Choice(["split", "two", "arrival"]),
    default=_DEFAULTS.order,
    show_default=True,
    help="Rows in regions decode, extend, prefill; in two, decode and the rest; or in none.",
)
@click.option(
    "--speculative",
    type=click.Choice(["none", "ngram", "mtp"]),
    default=_DEFAULTS.speculative,
    show_default=True,
    help="Draft tokens from the request's own words, or by the model's draft head.",
)
@_setting("draft_tokens", "Most tokens drafted for a decode.")
@_setting("overlap", "Steps under way before the outputs of a step are read, 0 to 2.")
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default=ENGINES[0],
    show_default=True,
    help="Library that runs the model.",
)
@click.option(
    "--device",
    default=_DEFAULTS.device,
    show_default=True,
    help="Where the engine runs: cpu, cuda or cuda:N.",
)
@click.option(
    "--graph",
    type=click.Choice(GRAPH_MODES),
    default=_DEFAULTS.graph,
    show_default=True,
    help="Steps that run from captured CUDA graphs.",
)
@click.option("--poison", is_flag=True, help="Fill the pad tokens of captured steps with NaN.")
@click.option(
    "--prefill-gate",
    metavar="N:SECONDS",
    callback=_gate,
    help="Hold fresh prompts until N have come or the oldest has waited so long.",
)
@click.option(
    "--verify",
    is_flag=True,
    help="Compare every request with itself alone: same tokens, logits within 1e-3.",
)
@click.option(
    "--inject",
    metavar="FAULT",
    help="Break one thing in the running batch, once; see below.",
)
@click.option("--strict", is_flag=True, help="Exit 1 if a request was refused or failed.")
@click.option(
    "--json",
    "json_out",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=_writable,
    help="Write the outcome to this file.",
)
@click.option(
    "--record",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=_writable,
    help="Record the run for `vlbatch replay` and `timeline`; gzip if the name ends in .gz.",
)
def run_command(
    requests: Path,
    model: Path | None,
    cache_mb: float,
    engine: str,
    verify: bool,
    inject: str | None,
    strict: bool,
    json_out: Path | None,
    record: Path | None,
    **limits: Any,  # Any: names and types are those of the options above
) -> None:
    """Answer the questions in REQUESTS, continuously batched.

    REQUESTS has one JSON object a line: req_id, prompt (with an <image> or <video> mark for each
    medium), images, videos, max_tokens, arrival (a step), answer. Paths are relative to it.
    """
    from vlbatch.cli.run_report import print_report, progress_bar, to_json

    settings = RunSettings(cache_bytes=_to_bytes(cache_mb), **limits)
    faults = make_faults(inject, settings)
    jobs = load_requests(requests)
    folder = model or requests.parent / "tiny-vl"
    prompts = PromptBuilder(folder)
    model_engine = make_engine(engine, folder, settings)
    drafter = make_drafter(settings, model_engine, prompts, folder)
    runner = Runner(model_engine, prompts, settings, drafter=drafter, faults=faults, trace=record)
    with progress_bar(len(jobs)) as on_step:
        results = runner.run(jobs, on_step=on_step)
    if inject is not None and not faults.happened:
        raise InvalidSetting(f"fault {inject} had no occasion in this run", setting="inject")
    verified: list[str] | None = None
    mismatches: list[Mismatch] = []
    if verify:
        verified, mismatches = compare(results, make_answerer(model_engine, prompts, settings))
        if inject is not None and not mismatches:
            raise InvalidSetting(
                f"fault {inject} left no trace: what it broke was computed anew",
                setting="inject",
            )
    print_report(results, runner, verified, mismatches)
    if json_out is not None:
        outcome = to_json(results, runner, verified, mismatches)
        json_out.write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")
    refused = any(result.error is not None for result in results)
    sys.exit(1 if mismatches or (strict and refused) else 0)


def _to_bytes(megabytes: float) -> int:
    if not math.isfinite(megabytes):
        raise InvalidSetting(f"got {megabytes} MB; expected a number", setting="cache_mb")
    return int(megabytes * 1e6)
