"""Comparing a file's expectations with what the library did."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from vlbatch.replay.divergence import Divergence
from vlbatch.replay.expect_features import Placed, expand, table_of
from vlbatch.replay.format_expect import REGION_NAMES
from vlbatch.replay.oracle import FeatureRow, ObservedState
from vlbatch.replay.outcome import Outcome, names_of
from vlbatch.replay.scenario import Expectation
from vlbatch.replay.world import World

__all__ = ["compare_expectation", "expand"]


def compare_expectation(
    expectation: Expectation, outcome: Outcome, world: World, state: ObservedState
) -> None:
    """Compare every key that is given.

    Raises:
        Divergence: at the line of the expectation.

    """
    _Comparison(expectation, outcome, world, state).run()


class _Comparison:
    def __init__(
        self, expectation: Expectation, outcome: Outcome, world: World, state: ObservedState
    ) -> None:
        self._given = expectation
        self._outcome = outcome
        self._seen = outcome.seen
        self._world = world
        self._state = state
        starts = self._seen.derived.get("query_start", [])
        bounds = zip(self._seen.order, starts, starts[1:], strict=False)
        self._chunks = {r: slice(start, stop) for r, start, stop in bounds}  # tokens of the step

    def run(self) -> None:
        """Compare each key; the cause of a failure comes before its consequences."""
        comparisons: dict[str, Callable[[], None]] = {
            "error": self._error,
            "failed": self._failed,
            "fit": self._fit,
            "order": self._order,
            "regions": self._regions,
            "moved": self._moved,
            "encoded": self._encoded,
            "hits": self._hits,
            "features": self._features,
            "positions": self._positions,
            "kv_index": self._kv_index,
            "next_position": self._next_position,
            "delta": self._delta,
            "cache": self._cache,
        }
        for key, compare in comparisons.items():
            if getattr(self._given, key) is not None:
                compare()

    def _diverge(
        self,
        key: str,
        expected: object,
        got: object,
        req_id: str | None = None,
        table: tuple[FeatureRow, ...] = (),
    ) -> NoReturn:
        raise Divergence(
            self._given.line,
            key,
            expected,
            got,
            req_id=req_id,
            step=self._world.num_steps,
            table=table,
        )

    def _equal(self, key: str, expected: object, got: object, req_id: str | None = None) -> None:
        if expected != got:
            self._diverge(key, expected, got, req_id)

    # -- refusals ----------------------------------------------------------------------------
    def _error(self) -> None:
        """The event was refused; or, in a step, this request failed."""
        expected = self._given.error
        if expected is None:
            return
        refused = self._outcome.refused
        failed = [] if self._outcome.run is None else list(self._outcome.run.failed.values())
        candidates = failed if refused is None else [refused]
        if not candidates:
            self._diverge("error", expected.type or "a refusal", "was accepted")
        for error in candidates:
            names = {None, self._outcome.also_named, *names_of(error)}
            if expected.type in names and expected.req_id in (None, error.req_id):
                return
        wanted = f"{expected.type or 'a refusal'} (req_id {expected.req_id})"
        error = candidates[0]
        got = f"{type(error).__name__} (req_id {error.req_id}): {error}"
        self._diverge("error", wanted, got, expected.req_id)

    def _failed(self) -> None:
        expected = self._given.failed or {}
        run = self._outcome.run
        failed = {} if run is None else run.failed
        self._equal("failed", sorted(expected), sorted(failed))
        for req_id, reason in expected.items():
            if reason is not None and reason not in names_of(failed[req_id]):
                self._diverge("failed", reason, type(failed[req_id]).__name__, req_id)

    def _fit(self) -> None:
        fit = self._outcome.fit
        if fit is None:
            self._diverge("fit", self._given.fit, "the event was no question, or was refused")
        for req_id, tokens in (self._given.fit or {}).items():
            self._equal("fit", tokens, (fit or {}).get(req_id, "not asked for"), req_id)

    # -- rows --------------------------------------------------------------------------------
    def _order(self) -> None:
        """Requests with tokens, or these and the idle ones behind them."""
        expected = list(self._given.order or ())
        rows = [req_id for req_id in self._state.rows if req_id is not None]
        busy = rows if self._outcome.run is None else self._seen.order
        if expected not in (busy, rows):
            pairs = zip(expected, busy, strict=False)
            first = next((right for said, right in pairs if said != right), None)
            self._diverge("order", expected, busy, first)

    def _regions(self) -> None:
        """Requests by class; with two regions the rest may be counted as one."""
        decode, extend, prefill = self._seen.regions
        if self._outcome.run is None:
            classes = [_region(*progress) for progress in self._state.progress.values()]
            decode, extend, prefill = (classes.count(name) for name in REGION_NAMES)
        readings = [(decode, extend, prefill)]
        if self._world.vl.batch.policy == "two":
            readings += [(decode, 0, extend + prefill), (decode, extend + prefill, 0)]
        given = self._given.regions or {}
        named = [dict(zip(REGION_NAMES, counts, strict=True)) for counts in readings]
        if not any(given.items() <= counts.items() for counts in named):
            self._diverge("regions", given, named[0])

    def _moved(self) -> None:
        """Requests that changed row, with or without the idle ones."""
        run = self._outcome.run
        got = {0} if run is None else {run.seen.moved, self._world.oracle.rows.moved_busy}
        if self._given.moved not in got:
            self._diverge("moved", self._given.moved, self._seen.moved)

    # -- features ----------------------------------------------------------------------------
    def _encoded(self) -> None:
        """By schedule or by row; what failed may be listed or left out."""
        expected = list(self._given.encoded or ())
        run = self._outcome.run
        if run is None:
            self._equal("encoded", expected, [])
            return
        delivered = [content for content, _ in run.seen.encoded]
        order, needed_by = run.seen.order, run.needed_by
        by_row = dict.fromkeys(c for r in order for c in delivered if r in needed_by[c])
        if expected not in (delivered, list(needed_by), list(by_row)):
            self._diverge("encoded", expected, delivered)

    def _hits(self) -> None:
        """Newly found keys must be named; keys in use already, or shared in this step, may be."""
        expected = set(self._given.hits or ())
        found = {content for content, _ in self._seen.hits}
        also = {content for content, _ in self._seen.held}
        if self._outcome.run is not None:
            needed_by = self._outcome.run.needed_by
            also |= {content for content, users in needed_by.items() if len(users) > 1}
        if not found <= expected <= found | also:
            self._diverge("hits", sorted(expected), sorted(found))

    def _features(self) -> None:
        delivered = self._delivered()
        for req_id, runs in (self._given.features or {}).items():
            items = self._world.items.get(req_id, [])
            expected = {place for run in runs for place in expand(run, items)}
            got = delivered.get(req_id, set())
            if expected != got:
                table = table_of(req_id, expected, got)
                what = f"features at token {table[0].token}"
                self._diverge(what, table[0].expected, table[0].got, req_id, table)

    def _delivered(self) -> dict[str, set[Placed]]:
        """Request -> what its tokens got in the step."""
        owner_of = [r for r, chunk in self._chunks.items() for _ in range(chunk.start, chunk.stop)]
        delivered: dict[str, set[Placed]] = {}
        for token, (content, row, _) in self._seen.features[0] if self._seen.features else ():
            place = (self._seen.token_indices[token], content, row)
            delivered.setdefault(owner_of[token], set()).add(place)
        return delivered

    # -- positions ---------------------------------------------------------------------------
    def _positions(self) -> None:
        """One list an axis; one list alone stands for every axis."""
        for req_id, expected in (self._given.positions or {}).items():
            chunk = self._chunks.get(req_id)
            got = [axis[chunk] for axis in self._seen.positions] if chunk else []
            axes = [list(axis) for axis in expected]
            if len(axes) == 1:
                axes *= max(len(got), 1)
            self._equal("positions", axes, got, req_id)

    def _kv_index(self) -> None:
        for req_id, expected in (self._given.kv_index or {}).items():
            indices = self._seen.token_indices[self._chunks.get(req_id, slice(0))]
            self._equal("kv_index", list(expected), indices, req_id)

    def _next_position(self) -> None:
        """Position of the next token to compute; inside the prompt also of the first generated."""
        for req_id, expected in (self._given.next_position or {}).items():
            if req_id not in self._state.deltas:
                self._diverge("next_position", list(expected), "no such request", req_id)
            runs = self._world.vl.positions.runs_of(req_id)
            known = self._state.known_tokens[req_id]
            if req_id in self._state.progress:
                prompt, computed, _ = self._state.progress[req_id]
                candidates = [computed, prompt] if computed < prompt else [computed]
            else:
                candidates = [known - 1, known]
            got = [runs.position_at(index) for index in candidates]
            wanted = expected * len(got[0]) if len(expected) == 1 else expected
            if wanted not in got:
                self._diverge("next_position", list(expected), list(got[0]), req_id)

    def _delta(self) -> None:
        for req_id, expected in (self._given.delta or {}).items():
            got = self._state.deltas.get(req_id, "no such request")
            self._equal("delta", expected, got, req_id)

    # -- cache -------------------------------------------------------------------------------
    def _cache(self) -> None:
        given = self._given.cache
        if given is None:
            return
        used, free, reclaimable = self._state.usage
        for key, wanted, rows in (
            ("used", given.used, used),
            ("free", given.free, free),
            ("reclaimable", given.reclaimable, reclaimable),
        ):
            if wanted is not None:
                self._equal(f"cache.{key}", wanted, rows)
        entries = self._state.entries
        if given.referenced is not None:
            got = {key[0] for key, (_, _, references) in entries.items() if references}
            self._equal("cache.referenced", sorted(set(given.referenced)), sorted(got))
        if given.present is not None:
            got = {key[0] for key in entries}
            self._equal("cache.present", sorted(set(given.present)), sorted(got))


def _region(prompt_len: int, computed: int, _confirmed: int) -> str:
    if computed >= prompt_len:
        return "decode"
    return "extend" if computed > 0 else "prefill"
