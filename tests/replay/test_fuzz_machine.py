"""A Hypothesis state machine over the public API, compared with the oracle after each rule."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from vlbatch.replay.fuzz.walks import Walker
from vlbatch.replay.oracle.requests import OracleRequest
from vlbatch.replay.scenario import (
    Add,
    Ask,
    Confirm,
    Drop,
    Event,
    FailEncode,
    Header,
    ItemSpec,
    Leave,
    Preempt,
    Resume,
    Step,
    Weights,
)

KEYS = {"x": (1, 1, 1), "y": (1, 2, 2), "z": (2, 1, 3)}

headers = st.builds(
    Header,
    capacity=st.integers(1, 4),
    max_model_len=st.just(40),
    cache_rows=st.sampled_from((6, 8, 14)),
    encode_rows=st.sampled_from((None, 6, 8)),
    lookahead=st.integers(0, 2),
    draft_tokens=st.integers(0, 2),
    positions=st.sampled_from(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "1d")),
    order=st.sampled_from(("split", "two", "arrival")),
    stable=st.booleans(),
    chunking=st.sampled_from(("through", "whole")),
    confirm=st.sampled_from(("auto", "manual")),
)
items = st.lists(
    st.tuples(st.sampled_from(sorted(KEYS)), st.integers(0, 2), st.booleans()), max_size=3
)


def item_at(offset: int, key: str, *, masked: bool) -> ItemSpec:
    """Place an item; a masked one has a separator behind its first place."""
    t, h, w = KEYS[key]
    places = t * h * w
    mask = (True, False, *[True] * (places - 1)) if masked else None
    modality = "video" if t > 1 else "image"
    return ItemSpec(key, modality, offset, places + masked, (t, h, w), mask, None, None)


class VLBatchMachine(RuleBasedStateMachine):
    """Each rule is one event for library and oracle; ``Walker.play`` compares everything."""

    walker: Walker
    num_added: int

    @initialize(header=headers)
    def start(self, header: Header) -> None:
        """Build an empty batch."""
        self.walker = Walker(header, "numpy")
        self.num_added = 0

    def play(self, event: Event) -> None:
        """Play an event; a divergence fails the test."""
        failure = self.walker.play(event)

        assert failure is None, failure

    def requests(self, *, live: bool) -> list[OracleRequest]:
        """Live or preempted requests, as the oracle knows them."""
        return [r for r in self.walker.oracle.requests.values() if r.live is live]

    def pick(self, data: st.DataObject, *, live: bool) -> OracleRequest:
        """Choose one of them."""
        return data.draw(st.sampled_from(self.requests(live=live)), label="request")

    def tokens(self, data: st.DataObject) -> dict[str, int]:
        """Choose tokens for some live requests."""
        header, wanted = self.walker.header, {}
        for request in self.requests(live=True):
            most = request.most_tokens(header.draft_tokens or 0, header.max_model_len)
            count = data.draw(st.integers(0, min(most, 12)), label=f"tokens of {request.req_id}")
            if count:
                wanted[request.req_id] = count
        return wanted

    @rule(items=items, text=st.integers(0, 5), hit=st.integers(0, 9))
    def add(self, items: list[tuple[str, int, bool]], text: int, hit: int) -> None:
        """Admit, with a prefix hit at times; refused when the batch is full."""
        placed, cursor = [], 0
        for key, gap, masked in items:
            placed.append(item_at(cursor + gap, key, masked=masked))
            cursor = placed[-1].offset + placed[-1].length
        self.num_added += 1
        prompt_len = max(1, cursor + text)
        computed = min(hit, prompt_len - 1) if hit > 4 else 0
        self.play(Add(f"r{self.num_added}", prompt_len, tuple(placed), computed))

    @precondition(lambda self: self.requests(live=True))
    @rule()
    def advance(self) -> None:
        """Compute all that fits of every prompt, and one token of every decode."""
        wanted = {
            r.req_id: max(1, r.prompt_len - r.computed)
            for r in self.requests(live=True)
            if r.computed < self.walker.header.max_model_len
        }
        self.play(Step({r: n for r, n in self.walker.oracle.fit(wanted).items() if n}))

    @precondition(lambda self: self.requests(live=True))
    @rule(data=st.data(), fit=st.booleans())
    def step(self, data: st.DataObject, *, fit: bool) -> None:
        """Compute what fits, or what may not; accept some drafts."""
        scheduled = self.tokens(data)
        if fit:
            scheduled = {r: n for r, n in self.walker.oracle.fit(scheduled).items() if n}
        decodes = {r for r in scheduled if self.walker.oracle.requests[r].region == 0}
        accept = {
            r: data.draw(st.integers(0, n - 1), label=f"accepted of {r}")
            for r, n in scheduled.items()
            if r in decodes
        }
        self.play(Step(scheduled, accept))

    @precondition(lambda self: self.requests(live=True))
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        """Ask what fits; changes nothing."""
        self.play(Ask(self.tokens(data)))

    @precondition(lambda self: self.requests(live=True))
    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        """Confirm or roll back, at times to less than is final, which is refused."""
        request = self.pick(data, live=True)
        computed = st.integers(max(0, request.confirmed - 1), request.computed)
        self.play(Confirm({request.req_id: data.draw(computed, label="computed")}))

    @precondition(lambda self: self.requests(live=False))
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        """Admit it again, behind any prefix."""
        request = self.pick(data, live=False)
        computed = data.draw(st.integers(0, request.known_tokens - 1), label="computed")
        self.play(Resume(request.req_id, computed))

    @precondition(lambda self: self.requests(live=True))
    @rule(data=st.data(), how=st.sampled_from((Leave, Preempt, Preempt)))
    def depart(self, data: st.DataObject, how: type[Leave | Preempt]) -> None:
        """Finish, abort or preempt, in any state."""
        self.play(how(self.pick(data, live=True).req_id))

    @precondition(lambda self: self.requests(live=False))
    @rule(data=st.data())
    def abort_preempted(self, data: st.DataObject) -> None:
        """Abort a request that is waiting to come back."""
        self.play(Leave(self.pick(data, live=False).req_id))

    @rule(
        event=st.one_of(
            st.sampled_from(sorted(KEYS)).map(Drop),
            st.integers(0, 2).map(Weights),
            st.sampled_from(sorted(KEYS)).map(lambda key: FailEncode((key,))),
        )
    )
    def disturb(self, event: Event) -> None:
        """Lose an entry (refused while it is referred to), change weights, let an encode fail."""
        self.play(event)

    @precondition(lambda self: self.requests(live=True) and self.requests(live=False))
    @rule()
    def reset(self) -> None:
        """Drop everything but ready cache entries."""
        world = self.walker.player.world
        world.vl.reset()
        for req_id in list(world.oracle.requests):
            world.oracle.leave(req_id)
        world.oracle.rows.rows.clear()
        self.walker.player.compare_state()


TestVLBatchMachine = VLBatchMachine.TestCase
TestVLBatchMachine.settings = settings(
    max_examples=50,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
