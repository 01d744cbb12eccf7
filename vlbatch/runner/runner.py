"""The reference runner: one step after another until every request is answered or refused.

It orchestrates. What a request is and where it is lives in ``VLBatch``; who is next, in
``Scheduler``; what it computed, in the engine's KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vlbatch.batch import BatchPlan
from vlbatch.cache import Features
from vlbatch.errors import VlbatchError
from vlbatch.features import EncodeTask
from vlbatch.order import BatchOrder
from vlbatch.runner.faults import Faults
from vlbatch.runner.inputs import Engine, MediaPatches
from vlbatch.runner.prompt import Prompt, PromptBuilder
from vlbatch.runner.requests import Request
from vlbatch.runner.scheduler import Job, Scheduler
from vlbatch.runner.settings import RunSettings
from vlbatch.runner.state import HostBatch, make_batch, sampling_rows, step_inputs

Logits = npt.NDArray[np.float32]


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
        error: why it was refused or failed.
    """

    request: Request
    prompt: Prompt | None = None
    tokens: list[int] = field(default_factory=list)
    logits: list[Logits] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    final: dict[str, object] = field(default_factory=dict)
    error: VlbatchError | None = None

    @property
    def status(self) -> str:
        """``"finished"``, ``"refused"`` (never computed) or ``"failed"``."""
        if self.error is None:
            return "finished"
        return "failed" if self.steps else "refused"


@dataclass(slots=True)
class RunCounters:
    """Events of a run; see the CLI's JSON."""

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
        on_step: called after each step.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: PromptBuilder,
        settings: RunSettings,
        *,
        faults: Faults | None = None,
        on_step: Callable[[Runner], None] | None = None,
    ) -> None:
        self._engine = engine
        self.prompts = prompts
        self._settings = settings
        self._faults = faults or Faults()
        self._on_step = on_step
        self.vl: HostBatch = make_batch(settings, engine.hidden_size, prompts.tokens_per_second)
        self.scheduler = Scheduler(settings, self.vl)
        self.counters = RunCounters()
        self.results: dict[str, Result] = {}
        self.num_done = 0

    def run(self, requests: Iterable[Request]) -> list[Result]:
        """Run until nothing is left; results in the order of ``requests``."""
        arrivals = sorted(self._register(requests), key=lambda result: result.request.arrival)
        clock = 0
        while arrivals or self.scheduler.waiting or self.scheduler.running:
            while arrivals and arrivals[0].request.arrival <= clock:
                self._arrive(arrivals.pop(0))
            if self.scheduler.waiting or self.scheduler.running:
                self.step()
            clock += 1
        return list(self.results.values())

    def _register(self, requests: Iterable[Request]) -> list[Result]:
        """A result for each request; a second one with an id that is taken is refused at once."""
        fresh = []
        for number, request in enumerate(requests):
            result = Result(request)
            if request.req_id in self.results:
                result.error = duplicate_in_file(request.req_id)
                self.results[f"{request.req_id}#{number}"] = result
                self.num_done += 1
            else:
                self.results[request.req_id] = result
                fresh.append(result)
        return fresh

    def _arrive(self, result: Result) -> None:
        """Build the prompt of a request and let it wait."""
        try:
            result.prompt = self.prompts.build(result.request)
        except VlbatchError as error:
            self._refuse(result.request.req_id, error)
            return
        self.scheduler.waiting.append(Job(result.request, result.prompt))

    def _refuse(self, req_id: str, error: VlbatchError) -> None:
        self.results[req_id].error = error
        self.num_done += 1

    def step(self) -> None:
        """Schedule, encode, move rows, run the model, sample."""
        vl = self.vl
        scheduled, refused = self.scheduler.schedule()
        for req_id, error in refused.items():
            self._refuse(req_id, error)
        if not scheduled:
            return
        step = vl.begin(scheduled)
        vl.encode(step, self._encode, max_rows=self._settings.encode_rows)
        for req_id, error in step.failed.items():
            self.scheduler.forget(req_id)
            self._refuse(req_id, error)
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
        if self._on_step is not None:
            self._on_step(self)

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
        batch, result = self.vl.batch, self.results[req_id]
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
            self.num_done += 1
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


def duplicate_in_file(req_id: str) -> VlbatchError:
    """The refusal of a second request with an id of the same file."""
    from vlbatch.errors import DuplicateRequest

    return DuplicateRequest("is in the file twice; expected unique ids", req_id=req_id)
