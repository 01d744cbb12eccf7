"""Plays a scenario on the real objects, with the oracle beside them.

After every event the oracle compares the step and the state, ``check()`` of every object runs, and
then the file's own expectations are compared. The first difference ends the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NoReturn

from vlbatch import VlbatchError
from vlbatch.errors import InvalidSchedule, InvariantBroken
from vlbatch.replay import scenario as sc
from vlbatch.replay.declared import CONSTANT, DRAFT, spread, tags_of
from vlbatch.replay.divergence import Divergence, FileResult
from vlbatch.replay.expect import Outcome, compare_expectation
from vlbatch.replay.format import read_scenario
from vlbatch.replay.items import by_offset, library_items, num_places, oracle_items, relax
from vlbatch.replay.json_node import ScenarioError
from vlbatch.replay.observe import first_difference
from vlbatch.replay.step_run import StepRun, run_step, write_outputs
from vlbatch.replay.world import World


def replay_file(path: str | Path, *, backend: str = "numpy") -> FileResult:
    """Replay one file; nothing about the file or the library raises.

    Raises:
        MissingDependency, InvalidField: for the backend.

    """
    try:
        scenario = read_scenario(path)
    except ScenarioError as error:
        return FileResult(str(path), error=str(error), error_line=error.line)
    return FileResult(
        str(path),
        divergence=replay(scenario, backend=backend),
        num_events=len(scenario.events),
        torn=scenario.torn,
    )


def replay(scenario: sc.Scenario, *, backend: str = "numpy") -> Divergence | None:
    """Replay a scenario; returns the first divergence, if there is one.

    Raises:
        MissingDependency, InvalidField: for the backend.

    """
    player = _Player(World(scenario, backend))
    try:
        player.play(scenario)
    except Divergence as divergence:
        return divergence
    return None


class _Player:
    """Plays one scenario."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._vl = world.vl
        self._oracle = world.oracle
        self._state = world.observe()
        self._line = 1

    def play(self, scenario: sc.Scenario) -> None:
        """Play all events; raises the first ``Divergence``."""
        for expectation in scenario.opening:
            compare_expectation(expectation, Outcome(), self._world, self._state)
        for line in scenario.events:
            self._line = line.line
            outcome = self._play_event(line)
            refused = outcome.refused
            if refused is not None and not line.expects_refusal and not outcome.no_op:
                self._diverge("event", "no refusal", _describe(refused), refused.req_id)
            for expectation in line.expectations:
                compare_expectation(expectation, outcome, self._world, self._state)

    def _play_event(self, line: sc.EventLine) -> Outcome:
        """Play one event and compare everything with the oracle."""
        try:
            outcome = self._dispatch(line)
            if outcome.refused is None:
                self._compare_state()
        except Divergence:
            raise
        except Exception as fault:  # noqa: BLE001 (a fault of the library is a finding)
            req_id = fault.req_id if isinstance(fault, VlbatchError) else None
            self._diverge("event", "no error", _describe(fault), req_id, cause=fault)
        return outcome

    def _diverge(
        self,
        what: str,
        expected: object,
        got: object,
        req_id: str | None = None,
        *,
        cause: Exception | None = None,
    ) -> NoReturn:
        raise Divergence(
            self._line, what, expected, got, req_id=req_id, step=self._world.num_steps
        ) from cause

    def _compare_state(self) -> None:
        """Compare everything between events, and let every object check itself."""
        vl = self._vl
        self._state = self._world.observe()
        for finding in self._oracle.compare(self._state):
            raise Divergence.of(finding, self._line, self._world.num_steps)
        if self._state.whole["constant"] != [CONSTANT]:
            self._diverge("global field", [CONSTANT], self._state.whole["constant"])
        addresses = self._world.addresses_now()
        if addresses != self._world.addresses:
            self._diverge("addresses of fields", self._world.addresses, addresses)
        for part in (vl.batch, self._world.draft, vl.features, vl.features.cache, vl.positions, vl):
            part.check()

    def _attempt(
        self, act: Callable[[], object], reasons: Collection[str], *, lenient: Collection[str] = ()
    ) -> VlbatchError | None:
        """Do something that is to be refused for one of ``reasons``, or done if there is none.

        Args:
            act: calls the library.
            reasons: names of refusals by the oracle.
            lenient: names of further refusals that the oracle cannot foresee.

        """
        try:
            act()
        except InvariantBroken:
            raise
        except VlbatchError as error:
            names = {cls.__name__ for cls in type(error).__mro__}
            if not names & {*reasons, *lenient}:
                expected = f"a refusal: {' or '.join(sorted(reasons))}" if reasons else "no refusal"
                self._diverge("event", expected, _describe(error), error.req_id)
            changed = first_difference(self._state, self._world.observe())
            if changed:
                self._diverge(f"state after {type(error).__name__}", "unchanged", changed)
            return error
        if reasons:
            self._diverge("event", f"a refusal: {' or '.join(sorted(reasons))}", "was accepted")
        return None

    # -- events ------------------------------------------------------------------------------
    def _dispatch(self, line: sc.EventLine) -> Outcome:
        event = line.event
        match event:
            case sc.Add():
                return self._add(event, expects_refusal=line.expects_refusal)
            case sc.Step():
                return self._step(event)
            case sc.Ask():
                return self._ask(event)
            case sc.Confirm():
                return self._confirm(event)
            case sc.Leave():
                return self._leave(event.req_id)
            case sc.Preempt():
                return self._preempt(event.req_id)
            case sc.Resume():
                return self._resume(event)
            case sc.Drop():
                return self._drop(event.key)
            case sc.Weights():
                self._vl.features.cache.set_epoch(event.epoch)
                self._oracle.set_weights(event.epoch)
            case sc.FailEncode():
                self._world.fail_next.update(event.keys)
        return Outcome()

    def _add(self, event: sc.Add, *, expects_refusal: bool) -> Outcome:
        world, vl = self._world, self._vl
        specs = by_offset(event.items)
        given = specs
        if not expects_refusal:
            specs = [relax(spec) for spec in given]
        unknown = [name for name in event.fields if name not in vl.batch.registry]
        number = world.num_admissions + 1
        values = tags_of(world.fields, number, world.num_drafts) | dict(event.fields)
        reasons = self._oracle.refusals_of_add(
            event.req_id, event.prompt_len, oracle_items(specs), event.computed, unknown
        )
        refused = self._attempt(
            lambda: vl.add(
                event.req_id,
                prompt_len=event.prompt_len,
                items=library_items(specs),
                computed=event.computed,
                fields=values,
            ),
            reasons,
            lenient={"InvalidField"} if event.fields else (),
        )
        if refused is not None:
            return Outcome(refused=refused)
        world.num_admissions = number
        world.items[event.req_id] = specs
        for n, spec in enumerate(given):
            world.delivers.pop((event.req_id, n), None)
            if spec.rows is not None and spec.rows != num_places(spec):
                world.delivers[event.req_id, n] = spec.rows
        held = self._values_held(event.req_id, number, values)
        self._oracle.add(event.req_id, event.prompt_len, oracle_items(specs), event.computed, held)
        world.witness[vl.batch.row_of(event.req_id)] = event.req_id
        return Outcome()

    def _values_held(
        self, req_id: str, number: int, values: Mapping[str, object]
    ) -> dict[str, object]:
        """Values as the fields hold them; writes those of the draft model's own fields."""
        registry, draft = self._vl.batch.registry, self._world.draft
        held = {n: spread(registry[n], v, self._world.num_drafts) for n, v in values.items()}
        own = {
            name: field
            for name, field in draft.registry.items()
            if name not in draft.copied | draft.shared
        }
        for name, value in tags_of(own.values(), number, self._world.num_drafts).items():
            draft.write(req_id, name, value)
            held[DRAFT + name] = value
        return held | {DRAFT + name: held[name] for name in draft.copied | draft.shared}

    def _step(self, event: sc.Step) -> Outcome:
        bad_accept = self._oracle.refusals_of_accept(event.scheduled, event.accept)
        reasons = self._oracle.refusals_of_step(event.scheduled) or bad_accept
        runs: list[StepRun] = []

        def act() -> None:
            if bad_accept:
                raise InvalidSchedule(f"accepted {dict(event.accept)} of {dict(event.scheduled)}")
            step = self._vl.begin(event.scheduled)
            if not reasons:
                runs.append(run_step(self._world, step, event.accept))

        refused = self._attempt(act, reasons)
        if refused is not None:
            return Outcome(refused=refused)
        run = runs[0]
        findings = self._oracle.step(
            event.scheduled, run.seen, accepted=event.accept, failing=run.failing
        )
        for finding in findings:
            raise Divergence.of(finding, self._line, self._world.num_steps)
        self._compare_state()  # before new values hide what moved wrongly
        if self._world.last is not None:
            write_outputs(self._world, self._world.last)
        return Outcome(run=run)

    def _ask(self, event: sc.Ask) -> Outcome:
        answers: list[dict[str, int]] = []
        refused = self._attempt(
            lambda: answers.append(self._vl.ask(event.wanted)),
            self._oracle.refusals_of_ask(event.wanted),
            lenient={"InvalidSchedule"},
        )
        if refused is not None:
            return Outcome(refused=refused, also_named="InvalidSchedule")
        changed = first_difference(self._state, self._world.observe())
        if changed:
            self._diverge("state after a question", "unchanged", changed)
        fit = self._oracle.fit(event.wanted)
        if answers[0] != fit:
            self._diverge("tokens that fit", fit, answers[0])
        return Outcome(fit=answers[0])

    def _confirm(self, event: sc.Confirm) -> Outcome:
        # What is to be refused goes first, so that a refused event changes nothing.
        reasons = {r: self._oracle.refusals_of_confirm(r, n) for r, n in event.computed.items()}
        for req_id in sorted(event.computed, key=lambda r: not reasons[r]):
            count = event.computed[req_id]
            refused = self._attempt(
                lambda r=req_id, n=count: self._vl.confirm(r, n),  # type: ignore[misc]
                reasons[req_id],
            )
            if refused is not None:
                return Outcome(refused=refused)
            self._oracle.confirm(req_id, count)
        return Outcome()

    def _leave(self, req_id: str) -> Outcome:
        departed = req_id in self._oracle.departed
        refused = self._attempt(
            lambda: self._vl.remove(req_id), self._oracle.refusals_of_leave(req_id)
        )
        if refused is not None:
            return Outcome(refused=refused, no_op=departed)
        self._oracle.leave(req_id)
        return Outcome()

    def _preempt(self, req_id: str) -> Outcome:
        refused = self._attempt(
            lambda: self._vl.preempt(req_id), self._oracle.refusals_of_preempt(req_id)
        )
        if refused is None:
            self._oracle.preempt(req_id)
        return Outcome(refused=refused)

    def _resume(self, event: sc.Resume) -> Outcome:
        req_id = event.req_id
        refused = self._attempt(
            lambda: self._vl.resume(req_id, computed=event.computed),
            self._oracle.refusals_of_resume(req_id, event.computed),
        )
        if refused is None:
            self._oracle.resume(req_id, event.computed)
            self._world.witness[self._vl.batch.row_of(req_id)] = req_id
        return Outcome(refused=refused)

    def _drop(self, key: str) -> Outcome:
        refused = self._attempt(
            lambda: self._vl.features.cache.drop(key), self._oracle.refusals_of_drop(key)
        )
        if refused is None:
            self._oracle.drop(key)
        return Outcome(refused=refused)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
