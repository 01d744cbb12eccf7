"""What ``vlbatch run`` shows and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from vlbatch.runner import Mismatch, Result, Runner


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
    console = Console()
    wrong = {m.req_id for m in mismatches}
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("request", "media", "answer", "expected", ""):
        table.add_column(name, overflow="fold")
    for result in results:
        request = result.request
        media = f"{len(request.images)} img {len(request.videos)} clip"
        text = answer_text(result, runner)
        note, style = "", ""
        if result.error is not None:
            text, note, style = str(result.error), result.status, "red"
        elif request.req_id in wrong:
            note, style = "MISMATCH", "red"
        elif request.answer is not None:
            note = "ok" if text == request.answer else "wrong"
            style = "green" if note == "ok" else "yellow"
        expected = request.answer or ""
        table.add_row(
            Text(request.req_id), media, Text(text), Text(expected), Text(note, style=style)
        )
    console.print(table)
    counters, cache = runner.counters, runner.vl.features.cache.counters
    console.print(
        f"{counters.steps} steps, {counters.tokens} tokens; {counters.reorders} reorders,"
        f" {counters.condenses} condenses, {counters.rows_moved} rows moved;"
        f" {runner.scheduler.num_preemptions} preemptions;"
        f" {len(counters.cut_items)} items cut by chunks; encoder: {cache.encoded} encoded,"
        f" {cache.hits} hits, {cache.evicted} evicted",
        highlight=False,
    )
    if verified is None:
        return
    for m in mismatches:
        where = f"{m.req_id}, step {m.step}, token {m.token}: {m.what}"
        console.print(Text(f"MISMATCH {where}", style="red"))
    total = len(verified) + len(mismatches)
    console.print(
        f"verified: {len(verified)} of {total} requests got exactly what they get alone"
        " (same tokens, logits within 1e-3)",
        highlight=False,
    )


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
    counters = runner.counters
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
        "correct": None if expected is None else result.error is None and text == expected,
        "status": result.status,
        "reason": None if result.error is None else str(result.error),
    }
