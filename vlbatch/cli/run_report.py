"""What ``vlbatch run`` shows and writes."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from vlbatch.runner import LOGIT_TOLERANCE, GraphEngine, Mismatch, Result, Runner


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[Runner], None]]:
    """A bar on stderr; yields what the runner calls after each step."""
    columns = (
        TextColumn("answering"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[detail]}"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total, detail="")

        def on_step(runner: Runner) -> None:
            detail = f"step {runner.counters.steps}, {runner.vl.batch.num_reqs} running"
            progress.update(task, completed=runner.num_done, detail=detail)

        yield on_step


def print_report(
    results: Sequence[Result],
    runner: Runner,
    verified: Sequence[str] | None,
    mismatches: Sequence[Mismatch],
) -> None:
    """Print the table of answers, the events of the run and the verdict."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer may hold any letter
    console = Console(highlight=False)
    console.print(_table(results, runner, {m.req_id for m in mismatches}))
    for sentence in _events(results, runner):
        console.print(sentence, soft_wrap=True)
    if verified is None:
        return
    for m in mismatches:
        line = f"MISMATCH {m.req_id}, step {m.step}, token {m.token}: {m.what}"
        console.print(Text(line, style="red"), soft_wrap=True)
    console.print(
        f"verified: {len(verified)} of {len(verified) + len(mismatches)} answered requests got"
        f" exactly what they get alone (same tokens, logits within {LOGIT_TOLERANCE:g})",
        soft_wrap=True,
    )


def _table(results: Sequence[Result], runner: Runner, wrong: Container[str]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("request", "media", "answer", "expected", ""):
        table.add_column(name, overflow="fold")
    for result in results:
        request = result.request
        media = f"{len(request.images)} img {len(request.videos)} clip"
        answer = answer_text(result, runner)
        note, style = "", ""
        if result.error is not None:
            answer = str(result.error).removeprefix(f"request {request.req_id!r}: ")
            note, style = result.status, "red"
        elif request.req_id in wrong:
            note, style = "MISMATCH", "red"
        elif request.answer is not None:
            note = "ok" if answer == request.answer else "wrong"
            style = "green" if note == "ok" else "yellow"
        table.add_row(
            Text(request.req_id), media, Text(answer), Text(request.answer or ""),
            Text(note, style=style),
        )  # fmt: skip
    return table


def _events(results: Sequence[Result], runner: Runner) -> Iterator[str]:
    """What happened in the run, a sentence a line."""
    counters, cache = runner.counters, runner.vl.features.cache.counters
    answered = [result for result in results if result.status == "finished"]
    asked = [result for result in answered if result.request.answer is not None]
    correct = sum(answer_text(result, runner) == result.request.answer for result in asked)
    right = f", {correct} of {len(asked)} as expected" if asked else ""
    yield f"{len(answered)} of {len(results)} requests answered{right}"
    yield (
        f"{counters.steps} steps, {counters.tokens} tokens; {counters.reorders} reorders,"
        f" {counters.condenses} condenses, {counters.rows_moved} rows moved;"
        f" {runner.scheduler.num_preemptions} preemptions;"
        f" {len(counters.cut_items)} items cut by chunks"
    )
    yield f"encoder: {cache.encoded} encoded, {cache.hits} hits, {cache.evicted} evicted"
    if isinstance(runner.engine, GraphEngine):
        steps = runner.engine.dispatcher.counts
        yield "graphs: " + ", ".join(f"{count} steps {how}" for how, count in steps.items())
    if counters.drafted:
        yield (
            f"drafts: {counters.accepted} of {counters.drafted} tokens accepted;"
            f" {steps_saved(results)} tokens needed no step of their own"
        )


def steps_saved(results: Sequence[Result]) -> int:
    """Tokens that came with another token of their request: its steps saved, over all requests."""
    return sum(len(result.steps) - len(set(result.steps)) for result in results)


def answer_text(result: Result, runner: Runner) -> str:
    """Decoded answer."""
    return runner.prompts.decode(result.tokens)


def to_json(
    results: Sequence[Result],
    runner: Runner,
    verified: Sequence[str] | None,
    mismatches: Sequence[Mismatch],
) -> dict[str, object]:
    """The outcome as plain data."""
    cache = runner.vl.features.cache
    counters, gate = runner.counters, runner.scheduler.gate
    return {
        "requests": [_request_json(result, runner) for result in results],
        "steps": counters.steps,
        "tokens": counters.tokens,
        "reorders": counters.reorders,
        "condenses": counters.condenses,
        "rows_moved": counters.rows_moved,
        "preemptions": runner.scheduler.num_preemptions,
        "chunked_items": len(counters.cut_items),
        "encoder": {
            "encoded": cache.counters.encoded,
            "hits": cache.counters.hits,
            "evicted": cache.counters.evicted,
            "peak_bytes": cache.counters.peak_rows * cache.row_bytes,
        },
        "graphs": runner.engine.report() if isinstance(runner.engine, GraphEngine) else None,
        "prefill_gate": None if gate is None else asdict(gate.counters),
        "speculative": {
            "drafted": counters.drafted,
            "accepted": counters.accepted,
            "steps_saved": steps_saved(results),
        },
        "verified": None if verified is None else not mismatches,
        "verified_requests": None if verified is None else list(verified),
        "mismatches": [
            {"req_id": m.req_id, "step": m.step, "token": m.token, "what": m.what}
            for m in mismatches
        ],
    }


def _request_json(result: Result, runner: Runner) -> dict[str, object]:
    text = answer_text(result, runner)
    expected = result.request.answer
    return {
        "req_id": result.request.req_id,
        "text": text,
        "tokens": result.tokens,
        "answer": expected,
        "correct": None if expected is None else result.status == "finished" and text == expected,
        "status": result.status,
        "reason": None if result.error is None else str(result.error),
    }
