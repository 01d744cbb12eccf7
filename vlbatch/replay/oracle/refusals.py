"""What is to be refused, by the names of the scenario format. Nothing here changes anything."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from vlbatch.replay.oracle.requests import DECODE, OracleRequest
from vlbatch.replay.oracle.values import OracleItem, OracleSettings


def of_add(
    settings: OracleSettings,
    requests: Mapping[str, OracleRequest],
    req_id: str,
    prompt_len: int,
    items: list[OracleItem],
    computed: int,
    unknown_fields: Collection[str],
) -> set[str]:
    """Every reason to refuse a new request; the library may give any of them."""
    reasons = of_start(settings, requests, prompt_len, computed)
    if req_id in requests:
        reasons.add("DuplicateRequest")
    if unknown_fields:
        reasons.add("UnknownField")
    taken: set[int] = set()
    for item in items:
        reasons |= _of_item(settings, item, prompt_len)
        places = item.places()
        if taken & set(places):
            reasons.add("InvalidItem")
        taken |= set(places)
    if settings.whole_items and _rows_at_once(items) > _budget(settings):
        reasons.add("ItemTooLarge")
    return reasons


def of_start(
    settings: OracleSettings,
    requests: Mapping[str, OracleRequest],
    prompt_len: int,
    computed: int,
) -> set[str]:
    """Reasons to refuse a request, new or resumed, whatever its items."""
    reasons = set()
    if sum(request.live for request in requests.values()) >= settings.capacity:
        reasons.add("BatchFull")
    if not 0 < prompt_len <= settings.max_model_len:
        reasons.add("PromptTooLong")
    if not 0 <= computed < prompt_len:
        reasons.add("InvalidSchedule")
    return reasons


def _of_item(settings: OracleSettings, item: OracleItem, prompt_len: int) -> set[str]:
    reasons = set()
    places = len(item.places())
    if not item.key or item.length <= 0 or item.offset < 0 or item.stop > prompt_len:
        reasons.add("InvalidItem")
    if places == 0 or (item.mask is not None and len(item.mask) != item.length):
        reasons.add("InvalidItem")
    if item.grid is not None:
        t, h, w = item.grid
        if (
            min(t, h, w) < 1
            or t * h * w != places
            or (max(h, w) > 65535 and settings.family != "1d")
        ):
            reasons.add("InvalidItem")
    elif settings.family != "1d" and item.modality != "audio":
        reasons.add("InvalidItem")
    timed = settings.family == "qwen2_5_vl" and item.modality == "video"
    if timed and item.seconds_per_grid is not None and item.seconds_per_grid <= 0:
        reasons.add("InvalidItem")
    if item.rows is not None and item.rows != places:
        reasons.add("PlaceholderMismatch")
    if places > _budget(settings):
        reasons.add("ItemTooLarge")
    return reasons


def _budget(settings: OracleSettings) -> int:
    """Most feature rows that can be encoded and kept at once."""
    limits = (settings.cache_rows, settings.encode_rows)
    return min(limit for limit in limits if limit is not None)


def _rows_at_once(items: list[OracleItem]) -> int:
    """Most feature rows of items whose spans overlap, which a chunk that cuts none has to hold."""
    most = 0
    group: dict[str, int] = {}
    reach = 0
    for item in sorted(items, key=lambda item: (item.offset, item.stop)):
        if item.offset >= reach:
            group = {}
        group[item.key] = len(item.places())
        reach = max(reach, item.stop)
        most = max(most, sum(group.values()))
    return most


def of_resume(
    settings: OracleSettings, requests: Mapping[str, OracleRequest], req_id: str, computed: int
) -> set[str]:
    """Reasons to refuse a resume."""
    request = requests.get(req_id)
    if request is None or request.live:
        return {"UnknownRequest"}
    return of_start(settings, requests, request.known_tokens, computed)


def of_schedule(
    settings: OracleSettings, requests: Mapping[str, OracleRequest], scheduled: Mapping[str, int]
) -> set[str]:
    """Reasons to refuse a step, but for what does not fit the cache."""
    for req_id, tokens in scheduled.items():
        request = requests.get(req_id)
        if request is None or not request.live:
            return {"InvalidSchedule"}
        if not 1 <= tokens <= request.most_tokens(settings.num_drafts, settings.max_model_len):
            return {"InvalidSchedule"}
    return set()


def of_accept(
    requests: Mapping[str, OracleRequest], scheduled: Mapping[str, int], accepted: Mapping[str, int]
) -> set[str]:
    """Reasons to refuse a number of accepted drafts."""
    for req_id, count in accepted.items():
        drafts = scheduled.get(req_id, 0) - 1
        request = requests.get(req_id)
        if request is None or request.region != DECODE or not 0 <= count <= drafts:
            return {"InvalidSchedule"}
    return set()


def of_confirm(
    requests: Mapping[str, OracleRequest], req_id: str, computed: int, in_flight: int
) -> set[str]:
    """Reasons to refuse a confirmation."""
    request = requests.get(req_id)
    if request is None or not request.live:
        return {"UnknownRequest"}
    if not request.confirmed <= computed <= request.computed - in_flight:
        return {"InvalidSchedule"}
    return set()
