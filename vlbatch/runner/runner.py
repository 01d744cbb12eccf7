"""The reference runner: one step after another until every request is answered or refused.

It orchestrates. What a request is and where it is lives in ``VLBatch``; who is next, in
``Scheduler``; what it computed, in the engine's KV cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from vlbatch.batch import BatchPlan
from vlbatch.cache import Features
from vlbatch.errors import DuplicateRequest, InvariantBroken, VlbatchError
from vlbatch.features import EncodeTask
from vlbatch.order import BatchOrder
from vlbatch.runner.faults import Faults
from vlbatch.runner.inputs import Engine, MediaPatches
from vlbatch.runner.prompt import Prompt, PromptBuilder
from vlbatch.runner.requests import Request
from vlbatch.runner.scheduler import Job, Scheduler
from vlbatch.runner.settings import RunSettings
from vlbatch.runner.state import HostBatch, make_batch, sampling_rows, step_inputs

Logits: TypeAlias = npt.NDArray[np.float32]

Status: TypeAlias = Literal["waiting", "finished", "refused", "failed"]
"""``refused``: nothing was computed for it; ``failed``: it left the batch before its end."""


@dataclass(slots=True)
class Result:
    """What became of a request.

    Attributes:
        request: as read.
        prompt: ``None`` if it was refused before one could be built.
        tokens: generated, the end token included.
        logits: ``[vocab]`` a generated token.
        steps: step in which each token was generated.
        final: declared fields at the end, name -> value.
        status: ``"waiting"`` until the end.
        error: why it was refused or failed.
    """

    request: Request
    prompt: Prompt | None = None
    tokens: list[int] = field(default_factory=list)
    logits: list[Logits] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    final: dict[str, object] = field(default_factory=dict)
    status: Status = "waiting"
    error: VlbatchError | None = None


@dataclass(slots=True)
class RunCounters:
    """Events of a run.

    Attributes:
        steps: forwards.
        tokens: computed in all steps.
        reorders: steps in which a request changed its row.
        condenses: steps that closed a hole.
        rows_moved: rows of requests that changed, over all steps.
        cut_items: request and number of each item that a chunk ended inside of.
    """

    steps: int = 0
    tokens: int = 0
    reorders: int = 0
    condenses: int = 0
    rows_moved: int = 0
    cut_items: set[tuple[str, int]] = field(default_factory=set)

    def count(self, plan: BatchPlan) -> None:
        """Count one applied plan."""
        moves = plan.moves
        self.steps += 1
        self.tokens += plan.order.num_tokens
        self.reorders += moves.num_moved > 0
        self.condenses += bool((moves.new_row_of < 0).any())
        self.rows_moved += moves.num_moved


class Runner:
    """Answers requests with one engine.

    Args:
        engine: the model.
        prompts: builds prompts for it.
        settings: limits.
        faults: break something on purpose; ``None`` in any honest run.

    Attributes:
        vl: state of the batch.
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
        faults: Faults | None = None,
    ) -> None:
        self._engine = engine
        self.prompts = prompts
        self._settings = settings
        self._faults = faults or Faults()
        self.vl: HostBatch = make_batch(settings, engine.hidden_size, prompts.tokens_per_second)
        self.scheduler = Scheduler(settings, self.vl)
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
        """Schedule, encode, move rows, run the model, sample.

        Raises:
            InvariantBroken: no request can go on, and none was refused.
        """
        vl = self.vl
        scheduled, refused = self.scheduler.schedule()
        for req_id, error in refused.items():
            _end(self._by_id[req_id], "refused", error)
        if not scheduled:
            if not refused:
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
        self.counters.count(plan)
        self._count_cut_items(order)

        features = self._faults.features(vl.gather(order))
        positions = self._faults.positions(order, vl.positions_of(order))
        logits = self._engine.forward(step_inputs(vl, order, features, positions))
        self._faults.after_forward(vl)
        vl.complete(order)
        self._sample(order, logits)

    def _encode(self, tasks: Sequence[EncodeTask]) -> list[Features]:
        patches: list[MediaPatches] = []
        for task in tasks:
            payload = task.placed.item.payload
            assert isinstance(payload, MediaPatches)  # noqa: S101 (PromptBuilder put it there)
            patches.append(payload)
        return [(features,) for features in self._engine.encode(patches)]

    def _sample(self, order: BatchOrder, logits: Logits) -> None:
        """Give each sampling row its most likely token; finish requests that are done."""
        rows = sampling_rows(order)
        counts = np.zeros(order.num_reqs, dtype=np.int64)
        counts[rows] = 1
        restored = order.restore(logits, counts=counts)
        for row in rows.tolist():
            req_id = order.req_ids[row]
            scores = restored[req_id]
            assert isinstance(scores, np.ndarray)  # noqa: S101 (a slice of logits)
            self._append(req_id, scores[0], self.counters.steps - 1)

    def _append(self, req_id: str, scores: Logits, step: int) -> None:
        batch, result = self.vl.batch, self._by_id[req_id]
        token = int(scores.argmax())
        result.tokens.append(token)
        result.logits.append(scores)
        result.steps.append(step)
        done = token == self.prompts.eos_token_id
        done |= len(result.tokens) >= int(batch["max_tokens"][batch.row_of(req_id)])
        done |= batch.known_tokens_of(req_id) > self._settings.max_model_len
        if done:
            result.final = {name: batch.read(req_id, name) for name in ("token_ids", "max_tokens")}
            self.scheduler.finish(req_id)
            _end(result, "finished")
        else:
            batch.append(req_id, "token_ids", token)
            batch.write(req_id, "next_token", token)

    def _count_cut_items(self, order: BatchOrder) -> None:
        stops = order.computed + order.scheduled
        for row in range(order.num_leading_decodes, order.num_reqs):
            req_id, stop = order.req_ids[row], int(stops[row])
            for number, item in enumerate(self.vl.features.items_of(req_id)):
                if item.offset < stop < item.stop:
                    self.counters.cut_items.add((req_id, number))


def _end(result: Result, status: Status, error: VlbatchError | None = None) -> None:
    result.status, result.error = status, error
