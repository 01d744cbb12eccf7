"""Playing events: each on the library, then on the oracle."""

from __future__ import annotations

from collections.abc import Mapping

from vlbatch.errors import InvalidSchedule, VlbatchError
from vlbatch.replay import scenario as sc
from vlbatch.replay.declared import DRAFT, spread, tags_of
from vlbatch.replay.divergence import Divergence
from vlbatch.replay.expect import compare_expectation
from vlbatch.replay.items import by_offset, library_items, num_places, oracle_items, relax
from vlbatch.replay.judge import Judge, describe_error
from vlbatch.replay.observe import first_difference
from vlbatch.replay.outcome import Outcome
from vlbatch.replay.step_run import StepRun, run_step, write_outputs


class Player(Judge):
    """Plays the events of a scenario on a world."""

    def play(self, scenario: sc.Scenario) -> None:
        """Play all events; raises the first ``Divergence``."""
        for expectation in scenario.opening:
            compare_expectation(expectation, Outcome(), self.world, self.state)
        for line in scenario.events:
            self.line = line.line
            outcome = self.play_event(line)
            try:
                self._compare_file(line, outcome)
            except Divergence as divergence:
                raise divergence.turned() if scenario.is_trace else divergence from None

    def _compare_file(self, line: sc.EventLine, outcome: Outcome) -> None:
        """Compare what the file says of an event with what became of it."""
        refused = outcome.refused
        if refused is not None and not line.expects_refusal and not outcome.no_op:
            self.diverge("event", "no refusal", describe_error(refused), refused.req_id)
        for expectation in line.expectations:
            compare_expectation(expectation, outcome, self.world, self.state)

    def play_event(self, line: sc.EventLine) -> Outcome:
        """Play one event and compare everything with the oracle."""
        try:
            outcome = self._dispatch(line)
            if outcome.refused is None:
                self.compare_state()
        except Divergence:
            raise
        except Exception as fault:  # noqa: BLE001 (a fault of the library is a finding)
            req_id = fault.req_id if isinstance(fault, VlbatchError) else None
            self.diverge("event", "no error", describe_error(fault), req_id, cause=fault)
        return outcome

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
                self.world.vl.features.cache.set_epoch(event.epoch)
                self.world.oracle.set_weights(event.epoch)
            case sc.FailEncode():
                self.world.fail_next.update(event.keys)
        return Outcome()

    def _add(self, event: sc.Add, *, expects_refusal: bool) -> Outcome:
        world, vl = self.world, self.world.vl
        specs = by_offset(event.items)
        given = specs
        if not expects_refusal:
            specs = [relax(spec) for spec in given]
        unknown = [name for name in event.fields if name not in vl.batch.registry]
        number = world.num_admissions + 1
        values = tags_of(world.fields, number, world.num_drafts) | dict(event.fields)
        reasons = self.world.oracle.refusals_of_add(
            event.req_id, event.prompt_len, oracle_items(specs), event.computed, unknown
        )
        refused = self.attempt(
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
        self.world.oracle.add(
            event.req_id, event.prompt_len, oracle_items(specs), event.computed, held
        )
        world.witness[vl.batch.row_of(event.req_id)] = event.req_id
        return Outcome()

    def _values_held(
        self, req_id: str, number: int, values: Mapping[str, object]
    ) -> dict[str, object]:
        """Values as the fields hold them; writes those of the draft model's own fields."""
        registry, draft = self.world.vl.batch.registry, self.world.draft
        held = {n: spread(registry[n], v, self.world.num_drafts) for n, v in values.items()}
        own = {
            name: field
            for name, field in draft.registry.items()
            if name not in draft.copied | draft.shared
        }
        for name, value in tags_of(own.values(), number, self.world.num_drafts).items():
            draft.write(req_id, name, value)
            held[DRAFT + name] = value
        others = (draft.copied | draft.shared) & held.keys()
        return held | {DRAFT + name: held[name] for name in others}

    def _step(self, event: sc.Step) -> Outcome:
        bad_accept = self.world.oracle.refusals_of_accept(event.scheduled, event.accept)
        reasons = self.world.oracle.refusals_of_step(event.scheduled) or bad_accept
        runs: list[StepRun] = []

        def act() -> None:
            if bad_accept:
                raise InvalidSchedule(f"accepted {dict(event.accept)} of {dict(event.scheduled)}")
            step = self.world.vl.begin(event.scheduled)
            if not reasons:
                runs.append(run_step(self.world, step, event))

        refused = self.attempt(act, reasons)
        if refused is not None:
            return Outcome(refused=refused)
        run = runs[0]
        findings = self.world.oracle.step(
            event.scheduled,
            run.seen,
            accepted=event.accept,
            failing=run.failing,
            abandoned=event.abandon,
        )
        for finding in findings:
            raise Divergence.of(finding, self.line, self.world.num_steps)
        if event.abandon is not None:
            return Outcome(run=run)
        self.compare_state()  # before new values hide what moved wrongly
        if self.world.last is not None:
            write_outputs(self.world, self.world.last)
        return Outcome(run=run)

    def _ask(self, event: sc.Ask) -> Outcome:
        answers: list[dict[str, int]] = []
        refused = self.attempt(
            lambda: answers.append(self.world.vl.ask(event.wanted)),
            self.world.oracle.refusals_of_ask(event.wanted),
            lenient={"InvalidSchedule"},
        )
        if refused is not None:
            return Outcome(refused=refused, also_named="InvalidSchedule")
        changed = first_difference(self.state, self.world.observe())
        if changed:
            self.diverge("state after a question", "unchanged", changed)
        fit = self.world.oracle.fit(event.wanted)
        if answers[0] != fit:
            self.diverge("tokens that fit", fit, answers[0])
        return Outcome(fit=answers[0])

    def _confirm(self, event: sc.Confirm) -> Outcome:
        # What is to be refused goes first, so that a refused event changes nothing.
        ahead = {r: event.in_flight.get(r, 0) for r in event.computed}
        reasons = {
            r: self.world.oracle.refusals_of_confirm(r, n, ahead[r])
            for r, n in event.computed.items()
        }
        for req_id in sorted(event.computed, key=lambda r: not reasons[r]):
            count = event.computed[req_id]
            refused = self.attempt(
                lambda r=req_id, n=count: self.world.vl.confirm(  # type: ignore[misc]
                    r, n, in_flight=ahead[r]
                ),
                reasons[req_id],
            )
            if refused is not None:
                return Outcome(refused=refused)
            self.world.oracle.confirm(req_id, count, ahead[req_id])
        return Outcome()

    def _leave(self, req_id: str) -> Outcome:
        departed = req_id in self.world.oracle.departed
        refused = self.attempt(
            lambda: self.world.vl.remove(req_id), self.world.oracle.refusals_of_leave(req_id)
        )
        if refused is not None:
            return Outcome(refused=refused, no_op=departed)
        self.world.oracle.leave(req_id)
        return Outcome()

    def _preempt(self, req_id: str) -> Outcome:
        refused = self.attempt(
            lambda: self.world.vl.preempt(req_id), self.world.oracle.refusals_of_preempt(req_id)
        )
        if refused is None:
            self.world.oracle.preempt(req_id)
        return Outcome(refused=refused)

    def _resume(self, event: sc.Resume) -> Outcome:
        req_id = event.req_id
        refused = self.attempt(
            lambda: self.world.vl.resume(req_id, computed=event.computed),
            self.world.oracle.refusals_of_resume(req_id, event.computed),
        )
        if refused is None:
            self.world.oracle.resume(req_id, event.computed)
            self.world.witness[self.world.vl.batch.row_of(req_id)] = req_id
        return Outcome(refused=refused)

    def _drop(self, key: str) -> Outcome:
        refused = self.attempt(
            lambda: self.world.vl.features.cache.drop(key), self.world.oracle.refusals_of_drop(key)
        )
        if refused is None:
            self.world.oracle.drop(key)
        return Outcome(refused=refused)
