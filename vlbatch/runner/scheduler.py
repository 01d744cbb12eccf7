"""First come, first served, with budgets of tokens, rows, encoder work and KV blocks.

Rules
- Running requests go first, in order of arrival; then waiting ones are admitted, in order of
  arrival, while there is room.
- When KV blocks run out, the latest arrival among the running is preempted (recompute); nobody is
  admitted in such a step. What it computed in steps that are not read yet is given up. Nobody is
  preempted for a draft.
- The earliest arrival goes on in every step in which it does not wait for its outputs, so every
  request comes to its end: no one takes its blocks, and what it is first to ask of the encoder
  cache, later arrivals make room for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np

from vlbatch.errors import InvariantBroken, OutOfBlocks, PromptTooLong, VlbatchError
from vlbatch.runner.blocks import BlockPool
from vlbatch.runner.gate import PrefillGate
from vlbatch.runner.prompt import Prompt
from vlbatch.runner.requests import Request
from vlbatch.runner.settings import RunSettings
from vlbatch.runner.state import DraftBatch, HostBatch


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A request with its prompt."""

    request: Request
    prompt: Prompt

    @property
    def req_id(self) -> str:
        """Id of the request."""
        return self.request.req_id


class Scheduler:
    """Queues of a run.

    Args:
        settings: limits.
        vl: the batch.
        draft: the drafts of its requests; ``None`` for none.
        num_ahead: KV places that a drafter writes past a step's tokens.
        gate: holds fresh prompts back for company; ``None`` for no gate.

    Attributes:
        gated: arrived and held at the gate, by id. In order of arrival.
        waiting: past the gate, not in the batch; preempted ones in front. In order of arrival.
        running: in the batch, by id. In order of arrival; all of them arrived before the waiting.
        pool: free KV blocks.
        num_preemptions: so far.
    """

    def __init__(
        self,
        settings: RunSettings,
        vl: HostBatch,
        *,
        draft: DraftBatch | None = None,
        num_ahead: int = 0,
        gate: PrefillGate | None = None,
    ) -> None:
        self._settings = settings
        self._vl = vl
        self._draft = draft
        self._num_ahead = num_ahead
        self.gate = gate
        self.pool = BlockPool(settings.kv_blocks, settings.block_size)
        vl.before_leave = self.pool.give_back
        self.gated: dict[str, Job] = {}
        self.waiting: deque[Job] = deque()
        self.running: dict[str, Job] = {}
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether a request is at the gate, waiting or running."""
        return bool(self.gated or self.waiting or self.running)

    def submit(self, job: Job) -> None:
        """Let a request wait for its turn, or refuse one that could never run.

        Raises:
            PromptTooLong: longer than ``max_model_len``, or empty.
            OutOfBlocks: it needs more KV blocks than there are.
        """
        num_tokens, most = len(job.prompt.token_ids), self._settings.max_model_len
        if not 0 < num_tokens <= most:
            raise PromptTooLong(
                f"has {num_tokens} prompt tokens; expected 1..{most}",
                req_id=job.req_id,
                setting="max_model_len",
            )
        needed = self.pool.blocks_for(self._most_computed(job, job.request.max_tokens))
        if needed > self.pool.num_blocks:
            raise OutOfBlocks(
                f"needs up to {needed} KV blocks of {self.pool.block_size} tokens; there are"
                f" {self.pool.num_blocks}",
                req_id=job.req_id,
                setting="kv_blocks",
            )
        if self.gate is None:
            self.waiting.append(job)
        else:
            self.gate.arrive(job.req_id)
            self.gated[job.req_id] = job

    def finish(self, req_id: str) -> None:
        """Let a running request go: its blocks, its row, its references."""
        self._vl.remove(req_id)
        self.forget(req_id)

    def forget(self, req_id: str) -> None:
        """Drop a request that has left the batch."""
        del self.running[req_id]

    # -- a step ------------------------------------------------------------------------------
    def schedule(self, held: Container[str] = ()) -> tuple[dict[str, int], dict[str, VlbatchError]]:
        """Decide one step: preempt, give KV blocks, admit.

        Args:
            held: running requests that wait for outputs of an earlier step.

        Returns:
            ``(scheduled, refused)``: req_id -> tokens; req_id -> why it was not admitted.
        """
        if self.gate is not None:
            self.waiting.extend(map(self.gated.pop, self.gate.release()))
        preemptions = self.num_preemptions
        scheduled: dict[str, int] = {}
        refused: dict[str, VlbatchError] = {}
        self._go_on(scheduled, held)
        if self.num_preemptions == preemptions:  # else blocks are short
            self._admit(scheduled, refused)
        self._give_drafters_places(scheduled)
        return scheduled, refused

    def _go_on(self, scheduled: dict[str, int], held: Container[str]) -> None:
        """Schedule the running in order of arrival; the latest may be preempted on the way."""
        going = [job for job in self.running.values() if job.req_id not in held]
        fits = self._ask(going, scheduled)
        budget = self._budget(scheduled)
        for job in going:
            if job.req_id not in self.running:  # preempted, and so is every later one
                break
            tokens = min(fits[job.req_id], budget)
            tokens = self._without_drafts_that_lack_blocks(job, tokens)
            if tokens and self._make_room(job, tokens):
                scheduled[job.req_id] = tokens
                budget -= tokens

    def _budget(self, scheduled: dict[str, int]) -> int:
        return self._settings.token_budget - sum(scheduled.values())

    def _ask(self, jobs: Sequence[Job], scheduled: dict[str, int]) -> dict[str, int]:
        """Tokens of the next chunks of these jobs, in order, that fit after what is scheduled.

        Leaves out KV blocks and the token budget: a chunk may be cut to them, and where the budget
        cuts one the later jobs get nothing.
        """
        return self._vl.ask({**scheduled, **{job.req_id: self._wish(job) for job in jobs}})

    def _wish(self, job: Job) -> int:
        most = 1 + self._num_drafts(job) if self._is_decode(job) else self._settings.chunk
        return min(most, self._vl.batch.remaining_of(job.req_id), self._left(job))

    def _is_decode(self, job: Job) -> bool:
        prompt_len, computed, _ = self._counts(job)
        return computed >= prompt_len

    def _counts(self, job: Job) -> tuple[int, int, int]:
        """Tokens to prefill, computed, and computed for certain."""
        batch = self._vl.batch
        return batch.progress.counts(batch.slot_of(job.req_id))

    def _num_drafts(self, job: Job) -> int:
        if self._draft is None:
            return 0
        return int(self._draft["num_drafts"][self._vl.batch.row_of(job.req_id)])

    def left_of(self, req_id: str) -> int:
        """Tokens that a running request has to compute until its end; 0 if it only has to wait."""
        return self._left(self.running[req_id])

    def _left(self, job: Job) -> int:
        batch = self._vl.batch
        _, computed, confirmed = self._counts(job)
        max_tokens = int(batch["max_tokens"][batch.row_of(job.req_id)])
        left = self._most_computed(job, max_tokens) - computed
        return left if confirmed < computed else max(1, left)

    def _most_computed(self, job: Job, max_tokens: int) -> int:
        """Tokens that are ever computed for a request: the last one that it generates is not."""
        return min(len(job.prompt.token_ids) + max_tokens - 1, self._settings.max_model_len)

    def _without_drafts_that_lack_blocks(self, job: Job, tokens: int) -> int:
        """Tokens of a decode for which there are blocks, but one at least; else all."""
        if not self._is_decode(job):
            return tokens
        blocks = len(self.pool.blocks_of(job.req_id)) + self.pool.num_free
        places = blocks * self.pool.block_size - self._vl.batch.computed_of(job.req_id)
        return min(tokens, max(1, places))

    def _give_drafters_places(self, scheduled: dict[str, int]) -> None:
        """Use blocks that are left for what a drafter writes past the step's tokens."""
        if self._num_ahead:
            for req_id, tokens in scheduled.items():
                job = self.running[req_id]
                self._give_blocks(job, min(tokens + self._num_ahead, self._left(job)))

    def _make_room(self, job: Job, tokens: int) -> bool:
        """Give KV blocks, preempting the latest arrivals for them; False if that is the job."""
        while not self._give_blocks(job, tokens):
            victim = self.running[next(reversed(self.running))]
            self._preempt(victim)
            if victim is job:
                return False
        return True

    def _give_blocks(self, job: Job, tokens: int) -> bool:
        """Extend a request's block table to hold its next chunk; False if too few are free."""
        batch = self._vl.batch
        needed = self.pool.blocks_for(batch.computed_of(job.req_id) + tokens)
        missing = needed - len(self.pool.blocks_of(job.req_id))
        if not self.pool.can_take(missing):
            return False
        if missing > 0:
            batch.append(job.req_id, "block_table", self.pool.take(job.req_id, missing))
        return True

    def _preempt(self, job: Job) -> None:
        *_, confirmed = self._counts(job)
        self._vl.confirm(job.req_id, confirmed)
        self._vl.preempt(job.req_id)
        del self.running[job.req_id]
        self.waiting.appendleft(job)
        self.num_preemptions += 1

    # -- admission ---------------------------------------------------------------------------
    def _admit(self, scheduled: dict[str, int], refused: dict[str, VlbatchError]) -> None:
        """Admit waiting requests in order, as far as rows, tokens and blocks go.

        Tokens that the encoder or the cache denies to some of them are left for another round.
        """
        budget = self._budget(scheduled)
        while newcomers := self._enter_waiting(budget, refused):
            fits = self._ask(newcomers, scheduled)
            for job in newcomers:
                tokens = min(fits[job.req_id], budget)
                if tokens and self._give_blocks(job, tokens):
                    scheduled[job.req_id] = tokens
                    budget -= tokens

    def _enter_waiting(self, budget: int, refused: dict[str, VlbatchError]) -> list[Job]:
        """Let requests in whose first chunks there are tokens and blocks for; gives them none."""
        newcomers: list[Job] = []
        blocks = 0
        while self.waiting and budget > 0 and len(self.running) < self._settings.max_num_seqs:
            job = self.waiting[0]
            first = min(self._num_tokens(job), self._settings.chunk, budget)
            needed = self.pool.blocks_for(first)
            if not self.pool.can_take(blocks + needed):
                break
            self.waiting.popleft()
            try:
                self._enter(job)
            except VlbatchError as error:
                refused[job.req_id] = error
                continue
            self.running[job.req_id] = job
            newcomers.append(job)
            budget -= first
            blocks += needed
        return newcomers

    def _num_tokens(self, job: Job) -> int:
        """Tokens that the request would start with."""
        if job.req_id in self._vl.batch.preempted:
            return self._vl.batch.known_tokens_of(job.req_id)
        return len(job.prompt.token_ids)

    def _enter(self, job: Job) -> None:
        if job.req_id in self._vl.batch.preempted:
            self._vl.resume(job.req_id)
            return
        token_ids = job.prompt.token_ids
        self._vl.add(
            job.req_id,
            prompt_len=len(token_ids),
            items=job.prompt.items,
            fields={
                "token_ids": token_ids,
                "max_tokens": job.request.max_tokens,
            },
        )

    def check(self) -> None:
        """Verify that queues, pool and batch agree.

        Raises:
            InvariantBroken: naming the requests, or the request and its blocks.
        """
        self.pool.check()
        batch = self._vl.batch
        running = self.running.keys()
        if running != set(batch.req_ids):
            raise InvariantBroken(f"running {sorted(running)}; the batch has {batch.req_ids}")
        waiting = {job.req_id for job in self.waiting}
        if not waiting.issuperset(batch.preempted) or waiting & running:
            raise InvariantBroken(
                f"waiting {sorted(waiting)}, running {sorted(running)}; preempted {batch.preempted}"
            )
        taken = self.pool.num_blocks - self.pool.num_free
        tables = {req_id: self.pool.blocks_of(req_id) for req_id in running}
        if sum(map(len, tables.values())) != taken:
            raise InvariantBroken(f"{taken} KV blocks are taken; the running have {tables}")
        for req_id, blocks in tables.items():
            table = batch.read(req_id, "block_table")
            if not np.array_equal(np.asarray(table), blocks):
                raise InvariantBroken(f"block table {table}; expected {blocks}", req_id=req_id)
