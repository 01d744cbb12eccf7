"""Random settings and random events: most of them possible now, some deliberately not."""

from __future__ import annotations

import random
from collections.abc import Callable

from vlbatch.replay.fuzz.media import random_items, random_media, spoil
from vlbatch.replay.oracle import FAMILIES, Oracle
from vlbatch.replay.oracle.requests import DECODE, OracleRequest
from vlbatch.replay.scenario import (
    Add,
    Ask,
    Confirm,
    Drop,
    Event,
    FailEncode,
    Header,
    Leave,
    Preempt,
    Resume,
    Step,
    Weights,
)

MAX_STEP_TOKENS = 64
"""Most tokens of one random step."""


def random_header(rng: random.Random) -> Header:
    """Settings of one walk: a small batch and a tight cache."""
    cache_rows = rng.choice((4, 8, 8, 12, 16, 24))
    return Header(
        capacity=rng.choice((1, 2, 3, 3, 4, 4, 5, 6)),
        max_model_len=rng.choice((24, 40, 64)),
        cache_rows=cache_rows,
        encode_rows=rng.choice((None, None, 4, 8, cache_rows)),
        lookahead=rng.choice((0, 0, 1, 1, 2, 3)),
        draft_tokens=rng.randint(0, 3),
        positions=rng.choice(FAMILIES),
        tokens_per_second=rng.choice((1.0, 2.0, 2.5)),
        order=rng.choice(("split", "split", "two", "arrival")),
        stable=rng.random() < 0.5,
        chunking=rng.choice(("through", "through", "whole")),
        confirm=rng.choice(("auto", "auto", "manual")),
    )


class EventSource:
    """Makes the events of one walk, looking at the oracle to know what is possible.

    Args:
        rng: the only source of chance.
        header: settings of the walk.
        oracle: of the walk; only read.

    """

    def __init__(self, rng: random.Random, header: Header, oracle: Oracle) -> None:
        self._rng = rng
        self._header = header
        self._oracle = oracle
        most_rows = min(header.cache_rows, header.encode_rows or header.cache_rows)
        self._media = random_media(rng, rng.randint(2, 7), most_rows)
        self._num_requests = 0
        self._asked: Step | None = None  # what was just found to fit

    def next(self) -> Event:
        """Return the next event."""
        if self._asked is not None and self._rng.random() < 0.9:
            step, self._asked = self._asked, None
            return step
        self._asked = None
        live, preempted = self._live(), self._preempted()
        room = self._header.capacity - len(live)
        num_decodes = sum(request.region == DECODE for request in live)
        makers: list[tuple[float, Callable[[], Event]]] = [
            (0.1 + 0.8 * room, self.add),
            (4.0 if live else 0.05, self.step),
            (1.2 if live else 0.02, self.ask),
            (1.5 if self._header.confirm == "manual" and live else 0.1, self.confirm),
            (0.12 * len(live) + 0.02, self.preempt),
            (1.0 if preempted and room else 0.05, self.resume),
            (0.04 * len(live) + 0.35 * num_decodes + 0.02, self.leave),
            (0.1, self.drop),
            (0.05, self.weights),
            (0.12, self.fail_encode),
        ]
        weights = [weight for weight, _ in makers]
        return self._rng.choices([make for _, make in makers], weights)[0]()

    def _live(self) -> list[OracleRequest]:
        return [r for r in self._oracle.requests.values() if r.live]

    def _preempted(self) -> list[OracleRequest]:
        return [r for r in self._oracle.requests.values() if not r.live]

    def _chance(self, odds: float) -> bool:
        return self._rng.random() < odds

    # -- requests ----------------------------------------------------------------------------
    def add(self) -> Add:
        """Admit a new request, one under an old name, or an impossible one."""
        rng, most = self._rng, self._header.max_model_len
        items, stop = random_items(rng, self._media, most - 1)
        prompt_len = max(1, stop + rng.choice((0, 0, 1, 1, 3, 6)))
        if not self._chance(0.05):
            prompt_len = min(prompt_len, most)
        if items and self._chance(0.1):
            items = spoil(rng, items)
        computed = rng.randrange(prompt_len) if self._chance(0.15) else 0
        if self._chance(0.02):
            computed = rng.choice((-1, prompt_len))
        rng.shuffle(items)
        return Add(self._new_name(), prompt_len, tuple(items), computed, self._field_values())

    def _new_name(self) -> str:
        known = [*self._oracle.requests] if self._chance(0.03) else [*self._oracle.departed]
        if known and self._chance(0.1):
            return self._rng.choice(sorted(known))
        self._num_requests += 1
        return f"r{self._num_requests}"

    def _field_values(self) -> dict[str, object]:
        if not self._chance(0.15):
            return {}
        rng = self._rng
        choices: list[tuple[str, object]] = [
            ("tag", rng.randrange(1000)),
            ("temperature", 0.5),
            ("greedy", self._chance(0.5)),
            ("token_ids", [rng.randrange(100) for _ in range(rng.randint(0, 5))]),
            ("stop_token_ids", [rng.randrange(100)]),
            ("params", {"n": rng.randrange(9)}),
            ("logit_bias", 0.25),
            ("nonesuch", 1),
        ]
        return dict(rng.sample(choices, rng.randint(1, 3)))

    def _some(self, requests: list[OracleRequest]) -> str:
        """Name one of these requests; now and then one of the others, or nobody."""
        if requests and not self._chance(0.04):
            return self._rng.choice(requests).req_id
        return self._rng.choice([*sorted(self._oracle.requests), "nobody"])

    def leave(self) -> Leave:
        """Let a request go, most often one that has come far."""
        live = self._live()
        return Leave(
            self._some([r for r in live if r.region == DECODE] or live or self._preempted())
        )

    def preempt(self) -> Preempt:
        """Preempt a request."""
        return Preempt(self._some(self._live()))

    def resume(self) -> Resume:
        """Resume a preempted request, at times behind a cached prefix."""
        req_id = self._some(self._preempted())
        request = self._oracle.requests.get(req_id)
        computed = 0
        if request is not None and self._chance(0.35):
            computed = self._rng.randrange(request.known_tokens + self._chance(0.1))
        return Resume(req_id, computed)

    def confirm(self) -> Confirm:
        """Confirm or roll back some requests."""
        rng, computed = self._rng, {}
        live = self._live()
        for request in rng.sample(live, rng.randint(min(1, len(live)), len(live))):
            low, high = request.confirmed, request.computed
            count = high if self._chance(0.6) else rng.randint(low, high)
            if self._chance(0.03):
                count = rng.choice((low - 1, high + 1))
            computed[request.req_id] = count
        return Confirm(computed or {"nobody": 0})

    # -- cache -------------------------------------------------------------------------------
    def drop(self) -> Drop:
        """Lose an entry."""
        return Drop(self._rng.choice(self._media).key)

    def weights(self) -> Weights:
        """Change weights, at times back to earlier ones."""
        epoch = self._oracle.cache.epoch
        return Weights(self._rng.choice((epoch + 1, epoch + 1, epoch, max(0, epoch - 1))))

    def fail_encode(self) -> FailEncode:
        """Let an encode fail."""
        return FailEncode((self._rng.choice(self._media).key,))

    # -- steps -------------------------------------------------------------------------------
    def ask(self) -> Ask:
        """Ask for some tokens; most often what fits is scheduled next."""
        wanted = self._wanted()
        if all(r in self._oracle.requests for r in wanted):
            self._asked = self._with_accepts(self._fitting(wanted))
        if self._chance(0.2):  # a question may ask for more than there is
            wanted = {r: n + self._rng.randint(0, 9) for r, n in wanted.items()}
        return Ask({"nobody": 1} if self._chance(0.01) else wanted)

    def step(self) -> Event:
        """Compute some tokens: what fits, or what may not; where nothing can go on, make room."""
        wanted = self._wanted()
        if not any(self._oracle.fit(wanted).values()) and not self._chance(0.15):
            return self.leave() if self._chance(0.4) else self.preempt()
        if not self._chance(0.08):
            wanted = self._fitting(wanted)
        if self._chance(0.03):
            wanted |= {self._some(self._live()): self._rng.choice((0, 1, -1, 5, 50))}
        if self._chance(0.04):
            keys = [medium.key for medium in self._media]
            return Step(wanted, abandon=tuple(self._rng.sample(keys, self._rng.randrange(3))))
        return self._with_accepts(wanted)

    def _wanted(self) -> dict[str, int]:
        """Tokens for some live requests, in any order."""
        rng, live = self._rng, self._live()
        rng.shuffle(live)
        if self._chance(0.4):
            live = live[: rng.randint(min(1, len(live)), len(live))]
        wanted: dict[str, int] = {}
        left = MAX_STEP_TOKENS
        for request in live:
            most = request.most_tokens(self._header.draft_tokens or 0, self._header.max_model_len)
            if most < 1:
                continue
            tokens = min(self._chunk_length(request, most), left)
            if tokens:
                wanted[request.req_id] = tokens
                left -= tokens
        return wanted

    def _chunk_length(self, request: OracleRequest, most: int) -> int:
        """All that is left, some, or up to the border of an item."""
        rng, start = self._rng, request.computed
        borders = [
            edge - start
            for item in request.items
            for edge in (item.offset, item.offset + 1, item.stop - 1, item.stop)
            if 1 <= edge - start <= most
        ]
        if borders and self._chance(0.35):
            return rng.choice(borders)
        return most if self._chance(0.2) else rng.randint(1, min(most, 7))

    def _fitting(self, wanted: dict[str, int]) -> dict[str, int]:
        return {r: n for r, n in self._oracle.fit(wanted).items() if n > 0}

    def _with_accepts(self, scheduled: dict[str, int]) -> Step:
        accept = {}
        for req_id, tokens in scheduled.items():
            request = self._oracle.requests.get(req_id)
            is_decode = request is not None and request.region == DECODE
            if is_decode and tokens > 0 and self._chance(0.7):
                accept[req_id] = self._rng.randrange(tokens)
            elif self._chance(0.004):
                accept[req_id] = self._rng.randint(-1, tokens + 1)
        return Step(scheduled, accept)
