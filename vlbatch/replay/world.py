"""The real objects of one replay, and the oracle beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from vlbatch import BatchOrder, EncoderCache, FeatureStore, InputBatch, VLBatch, make_backend
from vlbatch.backends import Backend
from vlbatch.batch import ProposerInputBatch
from vlbatch.features import FeatureSpec
from vlbatch.fields import Field
from vlbatch.order import OrderPolicy
from vlbatch.replay.declared import DRAFT, declare, declare_draft, rules_of
from vlbatch.replay.observe import Witness, observe_state
from vlbatch.replay.oracle import ObservedState, Oracle, OracleSettings
from vlbatch.replay.oracle.values import Key
from vlbatch.replay.scenario import (
    Add,
    Confirm,
    EventLine,
    ItemSpec,
    Preempt,
    Resume,
    Scenario,
    Step,
)
from vlbatch.replay.synthetic import SPEC, SyntheticEncoder

E = TypeVar("E")


class World:
    """Everything that one scenario runs on.

    Args:
        scenario: its header says what to build.
        backend: where arrays live; see ``vlbatch.backends.BACKENDS``.

    Attributes:
        vl: the library.
        draft: the draft model's batch, which follows.
        oracle: the model.
        encoder: makes features on the backend.
        fields: declared fields.
        num_drafts: k of the per-draft fields.
        witness: a list that follows the rows.
        mirror: keys of a second feature store, which learns only what was encoded and freed.
        items: req_id -> its items by offset; of requests that left too.
        delivers: (request, item number) -> feature rows that the encoder delivers instead of as
            many as places.
        fail_next: contents whose next encode raises.
        num_admissions: requests admitted so far.
        num_steps: steps so far.
        last: order of the latest step.

    """

    def __init__(self, scenario: Scenario, backend: str) -> None:
        header = scenario.header
        arrays = make_backend(backend)
        steps = [line.event for line in scenario.events if isinstance(line.event, Step)]
        self.fields = declare(
            max_step_tokens=max([1, *(sum(step.scheduled.values()) for step in steps)]),
            max_token_ids=max(64, _longest_token_ids(scenario.events)),
        )
        self.vl: VLBatch[object] = make_batch(scenario, self.fields, arrays, SPEC)
        self.num_drafts = self.vl.batch.num_drafts
        self.draft = ProposerInputBatch(self.vl.batch, declare_draft(), backend=arrays)
        self.oracle = Oracle(
            OracleSettings(
                capacity=header.capacity,
                max_model_len=header.max_model_len,
                cache_rows=header.cache_rows,
                encode_rows=header.encode_rows,
                lookahead=header.lookahead,
                num_drafts=self.num_drafts,
                family=header.positions,
                tokens_per_second=header.tokens_per_second,
                policy=header.order,
                stable=header.stable,
                whole_items=header.chunking == "whole",
                auto_confirm=header.confirm == "auto",
            ),
            [
                *rules_of(self.fields, self.num_drafts),
                *rules_of(self.draft.registry.values(), self.num_drafts, DRAFT),
            ],
        )
        self.encoder = SyntheticEncoder(arrays)
        self.witness = Witness(header.capacity)
        self.vl.batch.register_follower(self.witness)
        self.mirror: set[Key] = set()
        self.items: dict[str, list[ItemSpec]] = {}
        self.delivers: dict[tuple[str, int], int] = {}
        self.fail_next: set[str] = set()
        self.num_admissions = 0
        self.num_steps = 0
        self.last: BatchOrder | None = None

    def observe(self) -> ObservedState:
        """The state of the library; drops from the mirror what was freed."""
        for key in self.vl.features.cache.take_freed():
            self.mirror.discard((key.content, key.epoch))
        return observe_state(self.vl, self.draft, self.witness, self.mirror)


# Any: the stored array type is the backend's own business
def make_batch(
    scenario: Scenario,
    fields: Sequence[Field],
    backend: Backend[Any, E],
    spec: FeatureSpec | None = None,
) -> VLBatch[E]:
    """An empty batch as the header of a scenario says.

    Args:
        scenario: its header, and its events where that leaves the number of drafts open.
        fields: to declare.
        backend: where arrays live.
        spec: what features look like.

    """
    header, drafts = scenario.header, scenario.header.draft_tokens
    batch = InputBatch(
        fields,
        backend=backend,
        capacity=header.capacity,
        max_model_len=header.max_model_len,
        num_drafts=_drafts_scheduled(scenario.events) if drafts is None else drafts,
        policy=cast("OrderPolicy", header.order),
        stable=header.stable,
    )
    features = FeatureStore(
        EncoderCache(max_rows=header.cache_rows),
        encode_rows=header.encode_rows,
        lookahead=header.lookahead,
        whole_items=header.chunking == "whole",
        spec=spec,
    )
    return VLBatch(
        batch,
        features,
        family=header.positions,
        tokens_per_second=header.tokens_per_second,
        auto_confirm=header.confirm == "auto",
    )


def _longest_token_ids(lines: Sequence[EventLine]) -> int:
    """Longest ``token_ids`` that the file gives a request."""
    given = [
        line.event.fields.get("token_ids", ()) for line in lines if isinstance(line.event, Add)
    ]
    return max((len(ids) for ids in given if isinstance(ids, list)), default=0)


def _drafts_scheduled(lines: Sequence[EventLine]) -> int:
    """Most drafts that a decode of the file computes, where no refusal is expected."""
    prompts: dict[str, int] = {}
    computed: dict[str, int] = {}
    most = 0
    for line in lines:
        event = line.event
        if line.expects_refusal:
            continue
        if isinstance(event, Add):
            prompts[event.req_id], computed[event.req_id] = event.prompt_len, event.computed
        elif isinstance(event, Resume):
            computed[event.req_id] = event.computed
        elif isinstance(event, Confirm):
            computed.update({r: n + event.in_flight.get(r, 0) for r, n in event.computed.items()})
        elif isinstance(event, Preempt) and event.req_id in prompts:
            prompts[event.req_id] = max(prompts[event.req_id], computed[event.req_id] + 1)
        elif isinstance(event, Step):
            most = max(most, _most_drafts(event, prompts, computed))
    return most


def _most_drafts(event: Step, prompts: Mapping[str, int], computed: dict[str, int]) -> int:
    """Most drafts of one step; counts its tokens as computed, if they are."""
    drafts = [0]
    for req_id, tokens in event.scheduled.items():
        if computed.get(req_id, 0) >= prompts.get(req_id, 0) and req_id in prompts:
            drafts.append(tokens - 1)
        grown = 1 + event.accept[req_id] if req_id in event.accept else tokens
        if event.abandon is None:
            computed[req_id] = computed.get(req_id, 0) + grown
    return max(drafts)
