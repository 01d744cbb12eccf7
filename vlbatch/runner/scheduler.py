"""First come, first served, with budgets of tokens, rows, encoder work and KV blocks.

Running requests go first, in order of arrival; then waiting ones are admitted while there is
room. When blocks run out, the latest arrival among the running is preempted (recompute).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from vlbatch.errors import OutOfBlocks, VlbatchError
from vlbatch.runner.blocks import BlockPool
from vlbatch.runner.prompt import Prompt
from vlbatch.runner.requests import Request
from vlbatch.runner.settings import RunSettings
from vlbatch.runner.state import HostBatch


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

    Attributes:
        waiting: arrived, not in the batch; preempted ones in front.
        running: in the batch, in order of first admission.
        pool: free KV blocks.
        num_preemptions: so far.
    """

    def __init__(self, settings: RunSettings, vl: HostBatch) -> None:
        self._settings = settings
        self._vl = vl
        self.pool = BlockPool(settings.kv_blocks, settings.block_size)
        vl.before_leave = self.pool.give_back
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.num_preemptions = 0

    def check(self, job: Job) -> None:
        """Refuse a request that could never run.

        Raises:
            OutOfBlocks: it needs more KV blocks than there are.
        """
        longest = min(
            len(job.prompt.token_ids) + job.request.max_tokens, self._settings.max_model_len
        )
        needed = self.pool.blocks_for(longest)
        if needed > self.pool.num_blocks:
            raise OutOfBlocks(
                f"needs up to {needed} KV blocks of {self.pool.block_size} tokens; there are"
                f" {self.pool.num_blocks}",
                req_id=job.req_id,
                setting="kv_blocks",
            )

    def schedule(self) -> tuple[dict[str, int], dict[str, VlbatchError]]:
        """Decide one step: admit, preempt, give KV blocks.

        Returns:
            ``(scheduled, refused)``: req_id -> tokens; req_id -> why it was not admitted.
        """
        scheduled: dict[str, int] = {}
        refused: dict[str, VlbatchError] = {}
        preemptions = self.num_preemptions
        for job in list(self.running):
            if job in self.running:  # not preempted by an earlier one
                self._grant(job, scheduled)
        if self.num_preemptions == preemptions:  # else blocks are short
            self._admit(scheduled, refused)
        return scheduled, refused

    def _budget(self, scheduled: dict[str, int]) -> int:
        return self._settings.token_budget - sum(scheduled.values())

    def _want(self, job: Job, scheduled: dict[str, int]) -> int:
        """Tokens of the next chunk that all budgets but KV blocks allow."""
        remaining = self._vl.batch.remaining_of(job.req_id)
        wanted = min(remaining, self._settings.chunk, self._budget(scheduled))
        if wanted < 1:
            return 0
        return self._vl.ask({**scheduled, job.req_id: wanted})[job.req_id]

    def _grant(self, job: Job, scheduled: dict[str, int]) -> None:
        """Schedule a running request, preempting later arrivals for its KV blocks if needed."""
        tokens = self._want(job, scheduled)
        if tokens < 1:
            return
        while not self._give_blocks(job, tokens):
            victim = self.running[-1]
            self._preempt(victim, scheduled)
            if victim is job:
                return
        scheduled[job.req_id] = tokens

    def _give_blocks(self, job: Job, tokens: int) -> bool:
        """Extend a request's block table to hold its next chunk; False if too few are free."""
        batch = self._vl.batch
        needed = self.pool.blocks_for(batch.computed_of(job.req_id) + tokens)
        missing = needed - self.pool.num_taken(job.req_id)
        if not self.pool.can_take(missing):
            return False
        if missing > 0:
            batch.append(job.req_id, "block_table", self.pool.take(job.req_id, missing))
        return True

    def _preempt(self, job: Job, scheduled: dict[str, int]) -> None:
        self._vl.preempt(job.req_id)
        self.running.remove(job)
        self.waiting.appendleft(job)
        scheduled.pop(job.req_id, None)
        self.num_preemptions += 1

    def _admit(self, scheduled: dict[str, int], refused: dict[str, VlbatchError]) -> None:
        """Admit waiting requests in order, as far as rows, tokens and blocks go."""
        while (
            self.waiting
            and len(self.running) < self._settings.max_num_seqs
            and self._budget(scheduled) > 0
        ):
            job = self.waiting[0]
            first = min(self._num_tokens(job), self._settings.chunk, self._budget(scheduled))
            if not self.pool.can_take(self.pool.blocks_for(first)):
                return
            self.waiting.popleft()
            try:
                self._enter(job)
            except VlbatchError as error:
                refused[job.req_id] = error
                continue
            self.running.append(job)
            tokens = self._want(job, scheduled)
            if tokens and self._give_blocks(job, tokens):
                scheduled[job.req_id] = tokens

    def _num_tokens(self, job: Job) -> int:
        """Tokens that the request would start with."""
        if job.req_id in self._vl.batch.preempted:
            return self._vl.batch.known_tokens_of(job.req_id)
        return len(job.prompt.token_ids)

    def _enter(self, job: Job) -> None:
        if job.req_id in self._vl.batch.preempted:
            self._vl.resume(job.req_id)
            return
        self.check(job)
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

    def finish(self, req_id: str) -> None:
        """Let a running request go: its blocks, its row, its references."""
        self._vl.remove(req_id)
        self.forget(req_id)

    def forget(self, req_id: str) -> None:
        """Drop a request that has left the batch."""
        self.running = [job for job in self.running if job.req_id != req_id]
