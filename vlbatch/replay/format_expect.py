"""Reading ``expect`` lines."""

from __future__ import annotations

from vlbatch.replay.json_node import Node
from vlbatch.replay.scenario import (
    CacheExpectation,
    ErrorExpectation,
    Expectation,
    FeatureRun,
)

REGION_NAMES = ("decode", "extend", "prefill")

_KEYS = (
    "order", "regions", "moved", "encoded", "hits", "features", "positions", "next_position",
    "delta", "kv_index", "cache", "fit", "error", "failed",
)  # fmt: skip


def read_expectation(node: Node) -> Expectation:
    """Read the value of ``expect``."""
    given = node.record(_KEYS)

    def maybe_ids(key: str) -> tuple[str, ...] | None:
        return given[key].array(Node.text) if key in given else None

    def maybe_integers(key: str) -> dict[str, int] | None:
        return given[key].members(Node.integer) if key in given else None

    return Expectation(
        line=node.line,
        order=maybe_ids("order"),
        regions=_read_regions(given["regions"]) if "regions" in given else None,
        moved=given["moved"].integer() if "moved" in given else None,
        encoded=maybe_ids("encoded"),
        hits=maybe_ids("hits"),
        features=given["features"].members(_read_runs) if "features" in given else None,
        positions=given["positions"].members(_read_axes) if "positions" in given else None,
        next_position=(
            given["next_position"].members(_read_position) if "next_position" in given else None
        ),
        delta=maybe_integers("delta"),
        kv_index=given["kv_index"].members(_integers) if "kv_index" in given else None,
        cache=_read_cache(given["cache"]) if "cache" in given else None,
        fit=maybe_integers("fit"),
        error=_read_error(given["error"]) if "error" in given else None,
        failed=_read_failed(given["failed"]) if "failed" in given else None,
    )


def _integers(node: Node) -> tuple[int, ...]:
    return node.array(Node.integer)


def _read_regions(node: Node) -> dict[str, int]:
    return {name: count.integer() for name, count in node.record(REGION_NAMES).items()}


def _read_runs(node: Node) -> tuple[FeatureRun, ...]:
    return node.array(_read_run)


def _read_run(node: Node) -> FeatureRun:
    parts = node.array(lambda part: part)
    if len(parts) != 4:
        node.fail(f"got {len(parts)} elements; expected [index, key, first, stop]")
    index, key, first, stop = parts
    return FeatureRun(index.integer(), key.text(), first.integer(), stop.integer())


def _read_axes(node: Node) -> tuple[tuple[int, ...], ...]:
    """One list an axis, or one list of numbers, which is one axis."""
    if isinstance(node.value, list) and all(isinstance(p, int) for p in node.value):
        return (_integers(node),)
    axes = node.array(_integers)
    if len({len(axis) for axis in axes}) > 1:
        node.fail(f"axes have {[len(axis) for axis in axes]} positions; expected as many each")
    return axes


def _read_position(node: Node) -> tuple[int, ...]:
    return _integers(node) if isinstance(node.value, list) else (node.integer(),)


def _read_cache(node: Node) -> CacheExpectation:
    given = node.record(("used", "free", "reclaimable", "referenced", "present"))

    def rows(key: str) -> int | None:
        return given[key].integer() if key in given else None

    def keys(key: str) -> tuple[str, ...] | None:
        return given[key].array(Node.text) if key in given else None

    return CacheExpectation(
        rows("used"), rows("free"), rows("reclaimable"), keys("referenced"), keys("present")
    )


def _read_error(node: Node) -> ErrorExpectation:
    if isinstance(node.value, str):
        return ErrorExpectation(type=node.value)
    given = node.record(("type", "req_id"))
    return ErrorExpectation(
        type=given["type"].text() if "type" in given else None,
        req_id=given["req_id"].text() if "req_id" in given else None,
    )


def _read_failed(node: Node) -> dict[str, str | None]:
    if isinstance(node.value, dict):
        return dict(node.members(Node.text))
    return dict.fromkeys(node.array(Node.text))
