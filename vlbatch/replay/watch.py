"""Following a live runner through five calls: what it schedules, encodes and gives to its model.

``RunnerWatch`` keeps each request's progress and finds out which row of which item every token
really got. What to do with that is left to subclasses: the recorder writes it down, the alignment
oracle compares it.

A step, from the runner's side::

    watch.step({"a": 40, "b": 1})               # when it is decided
    watch.encoded("key of an image", features)  # once for each item that is encoded
    watch.gathered(["b", "a"], tokens=..., features=..., positions=...)  # before the forward
    watch.left("b")                             # when a request is done
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, get_args

from vlbatch.errors import DuplicateRequest, InvalidField, InvalidSchedule, UnknownRequest
from vlbatch.items import Item
from vlbatch.replay.delivered import Gathered, Layout, Watched, find_sources, split_positions
from vlbatch.replay.fingerprints import FingerprintBook, Fingerprints, row_fingerprints

How: TypeAlias = Literal["finish", "abort", "preempt", "fail"]
"""On which path a request leaves; ``fail``: the step could not encode one of its items."""


class RunnerWatch:
    """Takes a runner's five calls (and ``accepted`` or ``confirmed``, if it speculates).

    Args:
        max_rows: feature rows whose fingerprints are remembered beyond those of live requests.

    """

    def __init__(self, *, max_rows: int = 1 << 20) -> None:
        self._requests: dict[str, Watched] = {}
        self._book = FingerprintBook(max_rows)
        self._scheduled: dict[str, int] = {}
        self._in_step = False
        self._is_gathered = False

    @property
    def req_ids(self) -> tuple[str, ...]:
        """Requests that were admitted and have not left for good."""
        return tuple(self._requests)

    # -- the calls ---------------------------------------------------------------------------
    def admit(
        self, req_id: str, *, prompt_len: int, items: Sequence[Item] = (), computed: int = 0
    ) -> None:
        """A request has entered the batch, for the first time or after a preemption.

        Args:
            req_id: unique among those that have not left.
            prompt_len: tokens of the prompt; after a preemption with or without its outputs.
            items: media of the prompt; after a preemption they may be left out.
            computed: tokens whose KV is there already.

        Raises:
            DuplicateRequest: it is in the batch.

        """
        known = self._requests.get(req_id)
        if known is not None and known.live:
            raise DuplicateRequest("was admitted before and has not left", req_id=req_id)
        if self._is_gathered or not self._scheduled:
            self._settle()
        if known is not None and prompt_len == known.known_tokens:
            known.computed, known.live = computed, True
            self._on_resume(known)
            return
        if known is not None:  # it starts afresh, without its outputs
            items = items or known.items
            self.left(req_id)
        request = Watched(req_id, prompt_len, tuple(items), computed)
        self._on_admit(request)
        self._requests[req_id] = request
        for item in items:
            self._book.pin(item.key)

    def step(self, scheduled: Mapping[str, int]) -> None:
        """A step was decided: so many tokens of each request.

        Raises:
            UnknownRequest: a request was not admitted, or has left.
            InvalidSchedule: less than one token.

        """
        self._settle()
        for req_id, tokens in scheduled.items():
            self._live(req_id)
            if tokens < 1:
                raise InvalidSchedule(f"got {tokens} tokens; expected at least 1", req_id=req_id)
        self._scheduled = {req_id: int(tokens) for req_id, tokens in scheduled.items()}
        self._in_step = True
        self._on_step()

    def encoded(self, key: str, features: object) -> None:
        """An item was encoded, or its encode raised.

        Args:
            key: of the item.
            features: array or tensor ``[rows, hidden]``, a tuple of one a level, or the exception.

        Raises:
            InvalidField: features of another form.

        """
        if isinstance(features, Exception):
            self._on_encode_failed(key)
            return
        prints = row_fingerprints(features)
        self._book.learn(key, prints)
        self._on_encoded(key, prints)

    def gathered(
        self,
        order: Sequence[str],
        *,
        tokens: object = (),
        features: object = None,
        positions: object = None,
        kv_index: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """What the model is about to read, for all requests of the step or for some of them.

        Call it in every step, also where no token takes a feature. Token numbers count the tokens
        of the requests of this call, one request after the other.

        Args:
            order: requests; in row order if it is the whole step.
            tokens: integers ``[n]``, token numbers that take a feature row.
            features: their rows: an array or tensor ``[n, hidden]``, or a list of blocks one
                behind the other, each an array, a tensor, or a tuple of one a level.
            positions: integers ``[axes, num_tokens]``, or ``[num_tokens]`` for one axis.
            kv_index: request -> token indices whose KV is written.

        Raises:
            InvalidSchedule: no step is under way, or a request has no tokens in it.
            FeatureRowsMismatch: another number of rows than of tokens.
            InvalidField: a token outside the step, or positions of another shape.

        """
        if not self._in_step:
            raise InvalidSchedule("gathered outside a step; expected step() before it")
        for req_id in order:
            if req_id not in self._scheduled:
                raise InvalidSchedule("was gathered but has no tokens in the step", req_id=req_id)
        layout = Layout.of(
            [self._requests[r] for r in order], [self._scheduled[r] for r in order]
        )  # fmt: skip
        seen = Gathered(find_sources(layout, tokens, features, self._book))
        if positions is not None:
            seen.positions = split_positions(layout, positions)
        if kv_index is not None:
            seen.kv_index = {r: [int(i) for i in indices] for r, indices in kv_index.items()}
        self._is_gathered = True
        self._on_gathered(list(order), seen)

    def left(self, req_id: str, how: How = "finish") -> None:
        """A request has left the batch.

        Args:
            req_id: in the batch, or preempted before.
            how: ``preempt`` if it may come back; see ``How``.

        Raises:
            UnknownRequest: it was not admitted, or has left for good.
            InvalidField: no such path.

        """
        if how not in get_args(How):
            raise InvalidField(f"got {how!r}; expected one of {get_args(How)}", req_id=req_id)
        request = self._requests.get(req_id)
        if request is None or (how == "preempt" and not request.live):
            raise UnknownRequest("is not in the batch", req_id=req_id)
        if self._is_gathered or how == "finish" or not self._scheduled:
            self._settle()
        self._on_left(request, how)
        self._scheduled.pop(req_id, None)
        if how == "preempt":
            request.prompt_len, request.live = request.known_tokens, False
            return
        del self._requests[req_id]
        for item in request.items:
            self._book.unpin(item.key)

    def accepted(self, drafts: Mapping[str, int]) -> None:
        """How many drafts of the step's decodes were accepted; where it is not called, all were.

        Raises:
            InvalidSchedule: no step is under way, or a request has no tokens in it.

        """
        for req_id in drafts:
            if req_id not in self._scheduled:
                raise InvalidSchedule("accepted drafts outside a step", req_id=req_id)
        counts = {req_id: int(count) for req_id, count in drafts.items()}
        self._on_accepted(counts)
        self._settle({req_id: 1 + count for req_id, count in counts.items()})

    def given_up(self) -> None:
        """The step under way was abandoned before its forward."""
        self._on_given_up()
        self._scheduled = {}
        self._in_step = self._is_gathered = False

    def confirmed(self, req_id: str, computed: int, *, in_flight: int = 0) -> None:
        """So many computed tokens are final; fewer than counted so far is a roll back.

        A recorder's header has to say ``confirm="manual"`` for it.

        Args:
            req_id: in the batch.
            computed: tokens.
            in_flight: tokens of later steps whose outputs are still to come; not rolled back.

        Raises:
            UnknownRequest: not in the batch.

        """
        request = self._live(req_id)
        self._settle()
        request.computed = computed + in_flight
        self._on_confirmed(req_id, computed, in_flight)

    # -- state -------------------------------------------------------------------------------
    def _live(self, req_id: str) -> Watched:
        request = self._requests.get(req_id)
        if request is None or not request.live:
            raise UnknownRequest("was not admitted, or has left", req_id=req_id)
        return request

    def _settle(self, grown: Mapping[str, int] | None = None) -> None:
        """The step under way, if there is one, is over: count its tokens."""
        if not self._in_step:
            return
        self._on_step_over()
        for req_id, tokens in self._scheduled.items():
            self._requests[req_id].computed += (grown or {}).get(req_id, tokens)
        self._scheduled = {}
        self._in_step = self._is_gathered = False

    def _has_drafts(self) -> bool:
        """Whether a decode of the step computes more than one token."""
        return any(
            tokens > 1 and self._requests[r].computed >= self._requests[r].prompt_len
            for r, tokens in self._scheduled.items()
        )

    # -- what subclasses do ------------------------------------------------------------------
    def _on_admit(self, request: Watched) -> None:
        """A new request; it is not known yet."""

    def _on_resume(self, request: Watched) -> None:
        """A preempted request is back."""

    def _on_step(self) -> None:
        """A step begins; ``_scheduled`` says which."""

    def _on_encoded(self, key: str, prints: Fingerprints) -> None:
        """An item was encoded, in a step or outside of one."""

    def _on_encode_failed(self, key: str) -> None:
        """The encode of an item raised."""

    def _on_gathered(self, order: list[str], seen: Gathered) -> None:
        """Some or all requests of the step were gathered."""

    def _on_accepted(self, drafts: dict[str, int]) -> None:
        """The drafts that count are known."""

    def _on_given_up(self) -> None:
        """The step under way will not be computed."""

    def _on_confirmed(self, req_id: str, computed: int, in_flight: int) -> None:
        """Progress is final, or was rolled back."""

    def _on_step_over(self) -> None:
        """Nothing more will be said of the step; progress is as before it."""

    def _on_left(self, request: Watched, how: How) -> None:
        """A request leaves; it is still known and still in ``_scheduled``."""
