"""The naive model of a VL batch: told every event, it says what the library must hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from vlbatch.replay.oracle import refusals
from vlbatch.replay.oracle.cache import OracleCache, OracleEntry
from vlbatch.replay.oracle.fields import FieldRule, OracleFields
from vlbatch.replay.oracle.positions import prompt_positions
from vlbatch.replay.oracle.requests import OracleRequest
from vlbatch.replay.oracle.rows import OracleRows
from vlbatch.replay.oracle.state import compare_state
from vlbatch.replay.oracle.step import ExpectedStep, compare_step
from vlbatch.replay.oracle.values import (
    Finding,
    Key,
    ObservedState,
    ObservedStep,
    OracleItem,
    OracleSettings,
)
from vlbatch.replay.oracle.walk import Walk


class Oracle:
    """Rows, progress, features, positions and cache of one batch in plain dicts and lists.

    Feed it the events that the library accepted, in order, and after each the library's state
    (``compare``). The ``refusals_of_*`` queries change nothing.

    Args:
        settings: of the scenario.
        rules: the declared fields with one value a request.

    """

    def __init__(self, settings: OracleSettings, rules: list[FieldRule] | None = None) -> None:
        self.settings = settings
        self.requests: dict[str, OracleRequest] = {}
        self.departed: set[str] = set()
        self.cache = OracleCache(settings.cache_rows)
        self.rows = OracleRows(settings.policy, stable=settings.stable)
        self.fields = OracleFields(rules or [], settings.capacity)
        self._last_order: list[str] = []

    # -- refusals ----------------------------------------------------------------------------
    def refusals_of_add(
        self,
        req_id: str,
        prompt_len: int,
        items: list[OracleItem],
        computed: int,
        unknown_fields: Collection[str] = (),
    ) -> set[str]:
        """Names of the reasons to refuse a new request, empty if it is to be admitted."""
        return refusals.of_add(
            self.settings, self.requests, req_id, prompt_len, items, computed, unknown_fields
        )

    def refusals_of_resume(self, req_id: str, computed: int) -> set[str]:
        """Names of the reasons to refuse a resume."""
        return refusals.of_resume(self.settings, self.requests, req_id, computed)

    def refusals_of_leave(self, req_id: str) -> set[str]:
        """Names of the reasons to refuse a finish or an abort."""
        return set() if req_id in self.requests else {"UnknownRequest"}

    def refusals_of_preempt(self, req_id: str) -> set[str]:
        """Names of the reasons to refuse a preemption."""
        return set() if self._is_live(req_id) else {"UnknownRequest"}

    def refusals_of_confirm(self, req_id: str, computed: int, in_flight: int = 0) -> set[str]:
        """Names of the reasons to refuse a confirmation."""
        return refusals.of_confirm(self.requests, req_id, computed, in_flight)

    def refusals_of_ask(self, wanted: Mapping[str, int]) -> set[str]:
        """Names of the reasons to refuse a question."""
        return set() if all(map(self._is_live, wanted)) else {"UnknownRequest"}

    def refusals_of_drop(self, content: str) -> set[str]:
        """Names of the reasons to refuse the loss of an entry."""
        entries = self.cache.entries.items()
        used = any(entry.references for key, entry in entries if key[0] == content)
        return {"EntryInUse"} if used else set()

    def refusals_of_accept(
        self, scheduled: Mapping[str, int], accepted: Mapping[str, int]
    ) -> set[str]:
        """Names of the reasons to refuse a number of accepted drafts."""
        return refusals.of_accept(self.requests, scheduled, accepted)

    def refusals_of_step(self, scheduled: Mapping[str, int]) -> set[str]:
        """Names of the reasons to refuse a step."""
        reasons = refusals.of_schedule(self.settings, self.requests, scheduled)
        if reasons:
            return reasons
        rest = dict(scheduled)
        while True:
            walk = self._walk(rest)
            short = [r for r in rest if walk.fit[r] < rest[r] and r not in walk.mismatched]
            if short:
                return {"InvalidSchedule"}
            if not walk.mismatched:
                return set()
            rest = {r: n for r, n in rest.items() if r not in walk.mismatched}

    def fit(self, wanted: Mapping[str, int]) -> dict[str, int]:
        """How many of these tokens fit now, taken in this order."""
        most = {
            r: min(n, self.requests[r].most_tokens(self.settings.num_drafts, self._max_len))
            for r, n in wanted.items()
        }
        return self._walk(most).fit

    @property
    def _max_len(self) -> int:
        return self.settings.max_model_len

    def _is_live(self, req_id: str) -> bool:
        return req_id in self.requests and self.requests[req_id].live

    def _walk(self, scheduled: Mapping[str, int], victims: list[Key] | None = None) -> Walk:
        return Walk(
            self.cache,
            self.requests,
            scheduled,
            encode_rows=self.settings.encode_rows,
            lookahead=self.settings.lookahead,
            whole_items=self.settings.whole_items,
            victims=victims,
        )

    # -- requests ----------------------------------------------------------------------------
    def add(
        self,
        req_id: str,
        prompt_len: int,
        items: list[OracleItem],
        computed: int = 0,
        values: Mapping[str, object] | None = None,
    ) -> None:
        """Admit a request."""
        ordered = sorted(items, key=lambda item: (item.offset, item.stop))
        settings = self.settings
        positions = prompt_positions(
            settings.family, prompt_len, ordered, settings.tokens_per_second
        )
        self.requests[req_id] = OracleRequest(
            req_id, prompt_len, ordered, positions, computed, computed
        )
        self.rows.enter(req_id)
        self.fields.enter(req_id, values or {})

    def leave(self, req_id: str) -> None:
        """Finish, abort or fail: nothing of the request is left."""
        request = self.requests[req_id]
        self.cache.clock += 1
        self._release_all(request)
        if request.live:
            self.rows.leave(req_id)
        self.fields.leave(req_id)
        del self.requests[req_id]
        self.departed.add(req_id)

    def preempt(self, req_id: str) -> None:
        """Free slot, row and references; prompt and outputs so far are the prompt from now on."""
        request = self.requests[req_id]
        self.cache.clock += 1
        self._release_all(request)
        self.rows.leave(req_id)
        self.fields.preempt(req_id)
        request.prompt_len = request.known_tokens
        request.computed = request.confirmed = 0
        request.live, request.slot = False, None

    def resume(self, req_id: str, computed: int = 0) -> None:
        """Admit a preempted request again."""
        request = self.requests[req_id]
        request.computed = request.confirmed = computed
        request.live = True
        self.rows.enter(req_id)

    def confirm(self, req_id: str, computed: int, in_flight: int = 0) -> None:
        """Take tokens as final, or roll back to them; those in flight count on, if they do."""
        request = self.requests[req_id]
        self.cache.clock += 1
        if computed + in_flight < request.computed:
            in_flight = 0
        request.computed = computed + in_flight
        request.confirmed = computed
        self._release_passed(request)

    def _release_all(self, request: OracleRequest) -> None:
        for number, key in request.held.items():
            self.cache.release(key, (request.req_id, number))
        request.held.clear()

    def _release_passed(self, request: OracleRequest) -> None:
        for number, key in list(request.held.items()):
            if request.confirmed >= request.items[number].stop + self.settings.lookahead:
                del request.held[number]
                self.cache.release(key, (request.req_id, number))

    # -- cache -------------------------------------------------------------------------------
    def drop(self, content: str) -> None:
        """Lose an unreferenced entry."""
        self.cache.drop(content)

    def set_weights(self, epoch: int) -> None:
        """Change weights: what is referred to stays until it is released."""
        self.cache.set_epoch(epoch)

    # -- a step ------------------------------------------------------------------------------
    def step(
        self,
        scheduled: Mapping[str, int],
        seen: ObservedStep,
        *,
        accepted: Mapping[str, int] | None = None,
        failing: Mapping[str, str] | None = None,
        abandoned: Collection[str] | None = None,
    ) -> list[Finding]:
        """Compute a step and compare it.

        Args:
            scheduled: req_id -> tokens.
            seen: what the library did.
            accepted: req_id -> accepted drafts.
            failing: content -> name of the reason why its encode fails.
            abandoned: the step is given up once these contents are encoded; ``None`` if it is not.

        """
        self.cache.clock += 1
        step = ExpectedStep(dict(scheduled))
        findings = self._provide(step, list(seen.evicted), failing or {}, abandoned)
        if abandoned is not None:
            self.rows.moved = self.rows.moved_busy = 0
            return findings + compare_step(step, self.requests, self.settings.lookahead, seen)
        regions = {r: self.requests[r].region for r in step.scheduled}
        findings += self.rows.arrange(regions, seen.order, seen.idle)
        if seen.moved != self.rows.moved:
            findings.append(Finding("requests that moved", self.rows.moved, seen.moved))
        self.fields.arranged()
        step.order = [r for r in self.rows.rows if r is not None and r in step.scheduled]
        findings += compare_step(step, self.requests, self.settings.lookahead, seen)
        late = {r: r for r in self._last_order}
        if seen.restored_late != late:
            findings.append(Finding("late outputs of the step before", late, seen.restored_late))
        self._last_order = step.order
        self._advance(step, accepted or {})
        return findings

    def _provide(
        self,
        step: ExpectedStep,
        victims: list[Key],
        failing: Mapping[str, str],
        only: Collection[str] | None,
    ) -> list[Finding]:
        """Find, make room for and encode what the chunks need."""
        while mismatched := self._walk(step.scheduled).mismatched:
            for req_id in mismatched:
                step.failed[req_id] = "FeatureRowsMismatch"
                del step.scheduled[req_id]
        walk = self._walk(step.scheduled, victims)
        step.hits, step.held = walk.scratch.hits, walk.scratch.held
        for (req_id, number), key in walk.scratch.give_up.items():
            del self.requests[req_id].held[number]
            self.cache.release(key, (req_id, number))
        for key in walk.scratch.evicted:
            if key in self.cache.entries:  # one of old weights went with its last reference
                self.cache.remove(key)
        for key in walk.scratch.encode:
            self.cache.entries[key] = OracleEntry(walk.scratch.rows[key])
        for (req_id, number), key in walk.scratch.refer.items():
            self.cache.refer(key, (req_id, number))
            self.requests[req_id].held[number] = key
        for req_id in step.failed:
            self.leave(req_id)
        self._encode(step, walk.scratch.encode, failing, only)
        return walk.findings

    def _encode(
        self,
        step: ExpectedStep,
        keys: list[Key],
        failing: Mapping[str, str],
        only: Collection[str] | None,
    ) -> None:
        lost: dict[str, str] = {}
        for key in keys:
            entry = self.cache.entries[key]
            is_reached = only is None or key[0] in only
            if is_reached and key[0] not in failing:
                entry.ready = True
                step.encoded.append(key)
                continue
            for req_id, number in entry.references:
                if is_reached:
                    lost[req_id] = failing[key[0]]
                del self.requests[req_id].held[number]
            self.cache.remove(key)
        for req_id, reason in lost.items():
            step.failed[req_id] = reason
            del step.scheduled[req_id]
            self.leave(req_id)

    def _advance(self, step: ExpectedStep, accepted: Mapping[str, int]) -> None:
        for req_id, tokens in step.scheduled.items():
            grown = 1 + accepted[req_id] if req_id in accepted else tokens
            self.requests[req_id].computed += grown
        if self.settings.auto_confirm:
            for request in self.requests.values():
                if request.live:
                    request.confirmed = request.computed
                    self._release_passed(request)

    # -- state -------------------------------------------------------------------------------
    def compare(self, seen: ObservedState) -> list[Finding]:
        """All differences between what the library holds and what it should hold."""
        return compare_state(self.requests, self.rows, self.fields, self.cache, seen)
