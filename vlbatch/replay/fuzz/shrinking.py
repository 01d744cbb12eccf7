"""Shrinking a walk that diverged: fewer requests and events, then smaller ones.

Whole requests are taken out of all events, then events are dropped in ever smaller pieces (delta
debugging; Zeller and Hildebrandt, 2002), then one part of an event at a time is made smaller, as
long as the last event still diverges in the same thing. All is repeated until nothing gives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from vlbatch.replay.fuzz.walks import Failure, play_events
from vlbatch.replay.scenario import (
    Add,
    Ask,
    Confirm,
    Event,
    FailEncode,
    Header,
    ItemSpec,
    Leave,
    Preempt,
    Resume,
    Step,
)

Try = Callable[[Header, Sequence[Event]], bool]

_PLAIN = Header(capacity=6, max_model_len=64, cache_rows=24, draft_tokens=0)


def shrink(failure: Failure, *, backend: str = "numpy", max_plays: int = 1000) -> Failure:
    """Find a small failure of the same kind.

    Args:
        failure: of a walk.
        backend: where arrays live.
        max_plays: most lists of events to try.

    """
    best = failure
    kind = _kind(failure)
    plays = 0

    def attempt(header: Header, events: Sequence[Event]) -> bool:
        nonlocal best, plays
        if plays >= max_plays:
            return False
        plays += 1
        found = play_events(header, events, backend=backend)
        if found is None or _kind(found) != kind:
            return False
        best = found
        return True

    before = None
    while before is not best:
        before = best
        _drop_requests(lambda: best, attempt)
        _drop_events(lambda: best, attempt)
        _simplify(lambda: best, attempt)
    return best


def _kind(failure: Failure) -> str:
    """What differs, without the names and numbers in it."""
    return re.sub(r"\d+", "#", failure.divergence.what.partition("(")[0])


def _drop_requests(best: Callable[[], Failure], attempt: Try) -> None:
    """Take requests out of every event, those that came last first."""
    added = [event.req_id for event in best().events if isinstance(event, Add)]
    for req_id in dict.fromkeys(reversed(added)):
        without = [_without(event, req_id) for event in best().events]
        attempt(best().header, [event for event in without if event is not None])


def _without(event: Event, req_id: str) -> Event | None:
    """Take a request out of an event; ``None`` if the event is about it alone."""
    match event:
        case Add() | Leave() | Preempt() | Resume():
            return None if event.req_id == req_id else event
        case Step():
            scheduled, accept = _less(event.scheduled, req_id), _less(event.accept, req_id)
            return replace(event, scheduled=scheduled, accept=accept)
        case Ask():
            return Ask(_less(event.wanted, req_id))
        case Confirm():
            return Confirm(_less(event.computed, req_id))
        case _:
            return event


def _less(counts: Mapping[str, int], req_id: str) -> dict[str, int]:
    return {other: count for other, count in counts.items() if other != req_id}


def _drop_events(best: Callable[[], Failure], attempt: Try) -> None:
    """Drop runs of events, long ones first; the last event stays."""
    size = max(1, (len(best().events) - 1) // 2)
    while True:
        start = 0
        while start < len(best().events) - 1:
            header, events = best().header, best().events
            stop = min(start + size, len(events) - 1)
            if not attempt(header, events[:start] + events[stop:]):
                start += size
        if size == 1:
            return
        size //= 2


def _simplify(best: Callable[[], Failure], attempt: Try) -> None:
    """Make the settings and one event after the other smaller, each as far as it goes."""
    for name in (
        "order", "stable", "chunking", "confirm", "lookahead", "encode_rows", "positions",
        "draft_tokens", "tokens_per_second", "capacity", "cache_rows",
    ):  # fmt: skip
        plain = getattr(_PLAIN, name)
        if getattr(best().header, name) != plain:
            attempt(replace(best().header, **{name: plain}), best().events)
    number = 0
    while number < len(best().events):
        events = best().events
        for smaller in _smaller(events[number]):
            if attempt(best().header, (*events[:number], smaller, *events[number + 1 :])):
                break
        else:
            number += 1


# -- smaller events ------------------------------------------------------------------------------
def _smaller(event: Event) -> Iterator[Event]:
    """Yield simpler events of the same type, the simplest first."""
    match event:
        case Add():
            yield from _smaller_adds(event)
        case Step():
            for scheduled in _smaller_counts(event.scheduled):
                accept = {r: n for r, n in event.accept.items() if r in scheduled}
                yield replace(event, scheduled=scheduled, accept=accept)
            for accept in _smaller_counts(event.accept):
                yield replace(event, accept=accept)
            if event.abandon:
                yield replace(event, abandon=event.abandon[1:])
        case Ask():
            yield from map(Ask, _smaller_counts(event.wanted))
        case Confirm():
            yield from map(Confirm, _smaller_counts(event.computed))
        case Resume():
            for computed in _smaller_numbers(event.computed):
                yield replace(event, computed=computed)
        case FailEncode():
            for key in event.keys if len(event.keys) > 1 else ():
                yield FailEncode((key,))
        case _:
            return


def _smaller_adds(event: Add) -> Iterator[Add]:
    if event.fields:
        yield replace(event, fields={})
    for n in range(len(event.items)):
        yield replace(event, items=event.items[:n] + event.items[n + 1 :])
    for computed in _smaller_numbers(event.computed):
        yield replace(event, computed=computed)
    for prompt_len in _smaller_numbers(event.prompt_len):
        yield replace(event, prompt_len=prompt_len)
    for n, item in enumerate(event.items):
        for smaller in _smaller_items(item):
            yield replace(event, items=(*event.items[:n], smaller, *event.items[n + 1 :]))


def _smaller_items(item: ItemSpec) -> Iterator[ItemSpec]:
    if item.embeds is not None and all(item.embeds):
        yield replace(item, embeds=None)
    if item.rows is not None:
        yield replace(item, rows=None)
    if item.seconds_per_grid is not None:
        yield replace(item, seconds_per_grid=None)
    if item.modality != "image" and item.grid is not None:
        yield replace(item, modality="image")
    for offset in _smaller_numbers(item.offset):
        yield replace(item, offset=offset)
    if item.embeds is None and item.grid is not None:
        for length in _smaller_numbers(item.length):
            if length:
                yield replace(item, length=length, grid=(1, 1, length))


def _smaller_counts(counts: Mapping[str, int]) -> Iterator[dict[str, int]]:
    for name in counts:
        yield _less(counts, name)
    for name, count in counts.items():
        for smaller in _smaller_numbers(count):
            yield {**counts, name: smaller}


def _smaller_numbers(number: int) -> Iterator[int]:
    """Yield 0, half of it, one less."""
    if number > 0:
        yield from sorted({0, number // 2, number - 1})
