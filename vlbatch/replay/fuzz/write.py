"""Writing header and events as the lines of a scenario file."""

from __future__ import annotations

import json
from dataclasses import asdict

from vlbatch.replay.fuzz.walks import Failure
from vlbatch.replay.scenario import (
    Add,
    Ask,
    Confirm,
    Drop,
    Event,
    FailEncode,
    Header,
    ItemSpec,
    Leave,
    Preempt,
    Resume,
    Step,
    Weights,
)


def as_lines(failure: Failure, note: str) -> list[str]:
    """Lines of a scenario file that diverges as the failure did.

    Args:
        failure: to write.
        note: says in the file where it comes from.

    """
    lines: list[dict[str, object]] = [_header(failure.header), {"note": note}]
    for number, event in enumerate(failure.events):
        lines.append(_event(event))
        if number in failure.refused:
            lines.append({"expect": {"error": {}}})
    return [json.dumps(line, ensure_ascii=False) for line in lines]


def _header(header: Header) -> dict[str, object]:
    """All settings but those that the format gives anyway."""
    defaults = asdict(Header())
    changed = {name: value for name, value in asdict(header).items() if value != defaults[name]}
    return {"vlbatch_scenario": 1, **changed}


def _event(event: Event) -> dict[str, object]:
    match event:
        case Add():
            return {"add": _add(event)}
        case Step():
            step: dict[str, object] = {"step": dict(event.scheduled)}
            if event.abandon is not None:
                step["abandon"] = list(event.abandon)
            return step | ({"accept": dict(event.accept)} if event.accept else {})
        case Ask():
            return {"ask": dict(event.wanted)}
        case Confirm():
            confirm: dict[str, object] = {"confirm": dict(event.computed)}
            return confirm | ({"in_flight": dict(event.in_flight)} if event.in_flight else {})
        case Leave():
            return {"finish": event.req_id}
        case Preempt():
            return {"preempt": event.req_id}
        case Resume():
            return {"resume": {"req_id": event.req_id, "computed": event.computed}}
        case Drop():
            return {"drop": event.key}
        case Weights():
            return {"weights": event.epoch}
        case FailEncode():
            return {"fail_encode": list(event.keys)}


def _add(event: Add) -> dict[str, object]:
    add: dict[str, object] = {"req_id": event.req_id, "prompt_len": event.prompt_len}
    if event.items:
        add["items"] = [_item(item) for item in event.items]
    if event.computed:
        add["computed"] = event.computed
    if event.fields:
        add["fields"] = dict(event.fields)
    return add


def _item(item: ItemSpec) -> dict[str, object]:
    given = {name: value for name, value in asdict(item).items() if value is not None}
    if item.embeds is not None:
        given["embeds"] = "".join("01"[place] for place in item.embeds)
    if item.grid is not None:
        given["grid"] = list(item.grid)
    return given
