"""The reference runner: one step after another until every request is answered or refused.

It orchestrates. What a request is and where it is lives in ``VLBatch``; who is next, in
``Scheduler``; what it computed, in the engine's KV cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vlbatch.cache import Features
from vlbatch.errors import DuplicateRequest, InvariantBroken, VlbatchError
from vlbatch.features import EncodeTask
from vlbatch.order import BatchOrder, IntArray
from vlbatch.replay.recording import RecordedBatch
from vlbatch.runner.drafting import Drafter
from vlbatch.runner.faults import Faults
from vlbatch.runner.gate import PrefillGate
from vlbatch.runner.inputs import Engine, Logits, MediaPatches
from vlbatch.runner.outputs import StepOutputs
from vlbatch.runner.prompt import PromptBuilder
from vlbatch.runner.requests import Request
from vlbatch.runner.results import Result, RunCounters, Status
from vlbatch.runner.scheduler import Job, Scheduler
from vlbatch.runner.settings import RunSettings
from vlbatch.runner.state import (
    DraftBatch,
    HostBatch,
    make_batch,
    make_draft_batch,
    step_inputs,
)
from vlbatch.speculative import num_drafts, num_logits


class _Sampled(NamedTuple):
    """Outputs with one entry a logit row."""

    tokens: IntArray
    logits: Logits


class Runner:
    """Answers requests with one engine.

    Args:
        engine: the model.
        prompts: builds prompts for it.
        settings: limits.
        drafter: who drafts, ``settings.num_drafts`` at most; ``None`` for nobody.
        faults: break something on purpose; ``None`` in any honest run.
        gate: holds fresh prompts back; ``None`` for the one of the settings.
        trace: record the run to this file.

    Attributes:
        engine: the model.
        vl: state of the batch.
        draft: the drafts of its requests.
        scheduler: queues and KV blocks.
        counters: events so far.
        results: one a request, in the order of the requests.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: PromptBuilder,
        settings: RunSettings,
        *,
        drafter: Drafter | None = None,
        faults: Faults | None = None,
        gate: PrefillGate | None = None,
        trace: Path | None = None,
    ) -> None:
        self.engine = engine
        self.prompts = prompts
        self._settings = settings
        self._drafter = drafter or Drafter()
        self._faults = faults or Faults()
        self.vl: HostBatch = make_batch(
            settings,
            engine.hidden_size,
            prompts.tokens_per_second,
            lookahead=self._drafter.lookahead,
        )
        # Any: fields differ in dtype
        self._recorded: RecordedBatch[npt.NDArray[Any]] | None = None
        if trace is not None:
            self._recorded = self.vl = RecordedBatch(self.vl, trace)
        self.draft: DraftBatch = make_draft_batch(self.vl)
        if gate is None and settings.prefill_gate is not None:
            gate = PrefillGate(*settings.prefill_gate)
        self.scheduler = Scheduler(
            settings,
            self.vl,
            draft=self.draft,
            num_ahead=self._drafter.num_ahead,
            gate=gate,
        )
        self._in_flight: deque[StepOutputs] = deque()
        self.counters = RunCounters()
        self.results: list[Result] = []
        self._by_id: dict[str, Result] = {}

    @property
    def num_done(self) -> int:
        """Requests that are finished, refused or failed."""
        return sum(result.status != "waiting" for result in self.results)

    def run(
        self, requests: Iterable[Request], *, on_step: Callable[[Runner], None] | None = None
    ) -> list[Result]:
        """Run until nothing is left; results in the order of ``requests``.

        Args:
            requests: at most one an id is answered.
            on_step: called after each step, and where requests were only refused.
        """
        with self._recorded or nullcontext():
            return self._run(requests, on_step)

    def _run(
        self, requests: Iterable[Request], on_step: Callable[[Runner], None] | None
    ) -> list[Result]:
        fresh = [result for result in map(self._register, requests) if result.error is None]
        arrivals = deque(sorted(fresh, key=lambda result: result.request.arrival))
        clock = 0
        while arrivals or self.scheduler.has_work:
            if not self.scheduler.has_work:
                clock = max(clock, arrivals[0].request.arrival)
            while arrivals and arrivals[0].request.arrival <= clock:
                self._arrive(arrivals.popleft())
            if self.scheduler.has_work:
                self.step()
            clock += 1
            if on_step is not None:
                on_step(self)
        self._in_flight.clear()  # of requests that have ended
        return self.results

    def _register(self, request: Request) -> Result:
        """A result for a request; a second one with an id that is taken is refused at once."""
        result = Result(request)
        self.results.append(result)
        if self._by_id.setdefault(request.req_id, result) is not result:
            _end(result, "refused", DuplicateRequest(
                "is there twice; expected unique ids", req_id=request.req_id
            ))  # fmt: skip
        return result

    def _arrive(self, result: Result) -> None:
        """Build the prompt of a request and let it wait."""
        try:
            result.prompt = self.prompts.build(result.request)
            self.scheduler.submit(Job(result.request, result.prompt))
        except VlbatchError as error:
            _end(result, "refused", error)

    def step(self) -> None:
        """Schedule, encode, move rows, run the model; read outputs, perhaps of an earlier step.

        Raises:
            InvariantBroken: no request can go on, and none was refused.
        """
        vl = self.vl
        scheduled, refused = self.scheduler.schedule(self._held())
        for req_id, error in refused.items():
            _end(self._by_id[req_id], "refused", error)
        if not scheduled:
            if self._in_flight:
                self._read(self._in_flight.popleft())
            elif self.scheduler.gate is not None and self.scheduler.gated:
                self.scheduler.gate.wait()
            elif not refused:
                stuck = (*vl.batch.req_ids, *vl.batch.preempted)
                raise InvariantBroken(f"no request can go on: {stuck}")
            return
        step = vl.begin(scheduled)
        vl.encode(step, self._encode, max_rows=self._settings.encode_rows)
        for req_id, error in step.failed.items():
            self.scheduler.forget(req_id)
            _end(self._by_id[req_id], "failed", error)
        if not step.scheduled:
            return
        plan = vl.batch.plan(step.scheduled)
        order = self._faults.apply(vl, plan)
        self.counters.count(plan, vl.features)
        self._in_flight.append(self._forward(order))
        while len(self._in_flight) > self._settings.overlap:
            self._read(self._in_flight.popleft())

    def _forward(self, order: BatchOrder) -> StepOutputs:
        """Gather, run the model, count the step and put newest tokens where the next finds them."""
        vl = self.vl
        features = self._faults.features(vl.gather(order))
        positions = self._faults.positions(order, vl.positions_of(order))
        if self._recorded is not None:
            self._recorded.gathered(order, features, positions)
        inputs = step_inputs(vl, self.draft, order, features, positions)
        logits, hidden = self._drafter.forward(self.engine, inputs)
        self._faults.after_forward(vl)
        lookahead = self._drafter.lookahead
        outputs = StepOutputs(
            number=self.counters.steps - 1,
            order=order,
            admission=vl.batch.admission_of(order),
            token_ids=inputs.token_ids,
            positions=positions,
            logits=logits,
            hidden=hidden,
            ahead=vl.gather(order, shift=lookahead) if lookahead else None,
        )
        vl.complete(order)
        # On a device this takes no host: the outputs may be read later.
        rows = np.flatnonzero(outputs.newest >= 0)
        vl.batch["next_token"][rows] = outputs.newest[rows]
        self.draft["num_drafts"][rows] = 0  # used up
        return outputs

    def _encode(self, tasks: Sequence[EncodeTask]) -> list[Features]:
        patches: list[MediaPatches] = []
        for task in tasks:
            payload = task.placed.item.payload
            assert isinstance(payload, MediaPatches)  # noqa: S101 (PromptBuilder put it there)
            patches.append(payload)
        return [(features,) for features in self.engine.encode(patches)]

    # -- outputs ---------------------------------------------------------------------------------
    def _held(self) -> set[str]:
        """Requests that wait for their outputs.

        With a drafter these are all that have sampled: only when that is read is it known how many
        drafts were right, and what to draft next. Without one nobody waits.
        """
        if not self._settings.num_drafts:
            return set()
        return {
            outputs.order.req_ids[row]
            for outputs in self._in_flight
            for row in np.flatnonzero(outputs.is_there(self.vl) & (outputs.newest >= 0)).tolist()
        }

    def _read(self, outputs: StepOutputs) -> None:
        """Give each request what a step gave it; finish those that are done, draft for others.

        Rows may have moved since. Requests that left since get nothing, also if they are back.
        """
        vl, order = self.vl, outputs.order
        sampled = _Sampled(outputs.sampled, outputs.logits)
        restored = order.restore(sampled, counts=num_logits(order))
        drafts = num_drafts(order)
        drafting: dict[str, int] = {}
        for row in np.flatnonzero(outputs.is_there(vl)).tolist():
            req_id, accepted = order.req_ids[row], int(outputs.accepted[row])
            self.counters.drafted += int(drafts[row])
            self.counters.accepted += accepted
            stop = int(order.computed[row] + order.scheduled[row])
            in_flight = vl.batch.computed_of(req_id) - stop
            vl.confirm(req_id, int(outputs.stops[row]), in_flight=in_flight)
            part = restored[req_id]
            assert isinstance(part, _Sampled)  # noqa: S101 (restored in its own type)
            if len(part.tokens) and not self._extend(req_id, part, 1 + accepted, outputs.number):
                drafting[req_id] = min(
                    self._settings.num_drafts, self.scheduler.left_of(req_id) - 1
                )
        wanted = {req_id: most for req_id, most in drafting.items() if most > 0}
        for req_id, tokens in self._drafter.draft(vl, outputs, wanted).items():
            padded = np.zeros(1 + self._settings.num_drafts, dtype=np.int64)
            padded[1 : 1 + len(tokens)] = tokens
            self.draft.write(req_id, "draft_tokens", padded)
            self.draft.write(req_id, "num_drafts", len(tokens))

    def _extend(self, req_id: str, sampled: _Sampled, count: int, step: int) -> bool:
        """Give a request its first ``count`` sampled tokens; returns whether it is done."""
        tokens = sampled.tokens[:count].tolist()
        return any(
            self._append(req_id, token, scores, step)
            for token, scores in zip(tokens, sampled.logits[:count], strict=True)
        )

    def _append(self, req_id: str, token: int, scores: Logits, step: int) -> bool:
        """Take one more token; returns whether the request is done."""
        batch, result = self.vl.batch, self._by_id[req_id]
        assert result.prompt is not None  # noqa: S101 (it is running)
        result.tokens.append(token)
        result.logits.append(scores)
        result.steps.append(step)
        done = token == self.prompts.eos_token_id
        done |= len(result.tokens) >= int(batch["max_tokens"][batch.row_of(req_id)])
        known = len(result.prompt.token_ids) + len(result.tokens)
        done |= known > self._settings.max_model_len
        if done:
            result.final = {name: batch.read(req_id, name) for name in ("token_ids", "max_tokens")}
            self.scheduler.finish(req_id)
            _end(result, "finished")
        else:
            batch.append(req_id, "token_ids", token)
        return done


def _end(result: Result, status: Status, error: VlbatchError | None = None) -> None:
    result.status, result.error = status, error
