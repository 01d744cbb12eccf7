"""Who drafts in a run: nobody, the request's own words, or a head of the model.

A drafter is asked when a step's outputs are read. Rows may have moved since, so it finds what it
needs of a request by id, and of the step by the step's own order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from vlbatch.errors import InvalidSetting
from vlbatch.order import IntArray
from vlbatch.runner.inputs import (
    DraftHead,
    DraftingEngine,
    Engine,
    Hidden,
    Logits,
    StepInputs,
)
from vlbatch.runner.ngram import propose_ngram
from vlbatch.runner.outputs import StepOutputs
from vlbatch.runner.prompt import PromptBuilder
from vlbatch.runner.settings import RunSettings
from vlbatch.runner.state import HostBatch
from vlbatch.speculative import (
    DrafterRows,
    clamp_placeholders,
    following_tokens,
    shift_tokens,
)


class Drafter:
    """Drafts nothing: the base class.

    Attributes:
        lookahead: tokens past a chunk that it reads; see ``FeatureStore``.
        num_ahead: KV places past a step's tokens that it writes when it drafts.
    """

    lookahead = 0
    num_ahead = 0

    def forward(self, engine: Engine, inputs: StepInputs) -> tuple[Logits, Hidden | None]:
        """Run the target; keep its hidden states if drafts come from them."""
        return engine.forward(inputs), None

    def draft(
        self,
        vl: HostBatch,  # noqa: ARG002 (this one needs nothing)
        outputs: StepOutputs,  # noqa: ARG002
        most: Mapping[str, int],  # noqa: ARG002
    ) -> dict[str, list[int]]:
        """Draft for requests whose newest token has just been read.

        Args:
            vl: the batch as it is now.
            outputs: the step that was read.
            most: live requests that can use drafts -> how many, at least one.

        Returns:
            req_id -> up to so many tokens. A draft stops before the end token: the target says
            that by itself, and computing it would tell nothing.
        """
        return {}


class NgramDrafter(Drafter):
    """Drafts what followed the request's latest words where they occurred before.

    Args:
        excluded: ids that are never drafted: the end token, placeholders.
    """

    def __init__(self, excluded: Collection[int]) -> None:
        self._excluded = excluded

    def draft(
        self,
        vl: HostBatch,
        outputs: StepOutputs,  # noqa: ARG002 (the tokens are in the batch)
        most: Mapping[str, int],
    ) -> dict[str, list[int]]:
        """See ``Drafter.draft``."""
        drafts: dict[str, list[int]] = {}
        for req_id, count in most.items():
            known = cast("IntArray", vl.batch.read(req_id, "token_ids"))
            found = propose_ngram(known, num_drafts=count, excluded=self._excluded)
            drafts[req_id] = found.tolist()
        return drafts


@dataclass(slots=True)
class _Front:
    """Where the drafts of some requests go on, one entry a request.

    Attributes:
        req_ids: the requests.
        tokens: int64, drafted last.
        index: int64, token index whose row comes next: its position, KV place and context.
        hidden: the head's state of the row before.
    """

    req_ids: list[str]
    tokens: IntArray
    index: IntArray
    hidden: Hidden

    def keep(self, head: DraftHead, rows: list[int]) -> _Front:
        """Some of the requests."""
        at = np.array(rows, dtype=np.int64)
        req_ids = [self.req_ids[row] for row in rows]
        return _Front(req_ids, self.tokens[at], self.index[at], head.take(self.hidden, at))


class MtpDrafter(Drafter):
    """Drafts with a head that reads the target's hidden states and one token ahead.

    At each step it first computes the rows of the tokens that the target computed (a prompt chunk
    by chunk, of a decode the accepted ones), with the target's true hidden states; so it follows
    the target through preemption and rejects. Then it drafts on from its own.

    Args:
        head: the head.
        vocab_size: of the target.
        eos_token_id: stops a draft.
        num_drafts: most tokens it is asked for.
        block_size: tokens a KV block.
    """

    lookahead = 1

    def __init__(
        self,
        head: DraftHead,
        *,
        vocab_size: int,
        eos_token_id: int,
        num_drafts: int,
        block_size: int,
    ) -> None:
        self._head = head
        self._vocab_size = vocab_size
        self._eos = eos_token_id
        self._block_size = block_size
        self.num_ahead = num_drafts - 1  # the first draft needs no place of its own

    def forward(self, engine: Engine, inputs: StepInputs) -> tuple[Logits, Hidden | None]:
        """See ``Drafter.forward``."""
        return cast("DraftingEngine", engine).forward_hidden(inputs)

    def draft(
        self, vl: HostBatch, outputs: StepOutputs, most: Mapping[str, int]
    ) -> dict[str, list[int]]:
        """See ``Drafter.draft``; drafts fewer tokens where KV blocks are short."""
        logits, front = self._catch_up(vl, outputs, most)
        limits = {r: min(n, self._room(vl, r)) for r, n in most.items()}
        drafts: dict[str, list[int]] = {req_id: [] for req_id in front.req_ids}
        while front.req_ids:
            front.tokens = logits.argmax(axis=1)
            going_on: list[int] = []
            for row, req_id in enumerate(front.req_ids):
                if front.tokens[row] != self._eos:
                    drafts[req_id].append(int(front.tokens[row]))
                    if len(drafts[req_id]) < limits[req_id]:
                        going_on.append(row)
            if not going_on:
                break
            front = front.keep(self._head, going_on)
            logits, front.hidden = self._head.forward(self._next_inputs(vl, front), front.hidden)
            front.index += 1
        return drafts

    def _room(self, vl: HostBatch, req_id: str) -> int:
        """Tokens that can be drafted in the KV blocks that a request has."""
        held = vl.batch.length(req_id, "block_table") * self._block_size
        return max(1, held - vl.batch.computed_of(req_id) + 1)

    def _catch_up(
        self, vl: HostBatch, outputs: StepOutputs, most: Mapping[str, int]
    ) -> tuple[Logits, _Front]:
        """Compute the rows of the step's tokens; logits at the last one of who is to draft."""
        order = outputs.order
        there = outputs.is_there(vl)
        rows = DrafterRows.of(order, outputs.accepted, skip=np.flatnonzero(~there))
        drafting = [row for row, req_id in enumerate(order.req_ids) if req_id in most]
        front = _Front(
            req_ids=[order.req_ids[row] for row in drafting],
            tokens=outputs.newest[drafting],
            index=outputs.stops[drafting],
            hidden=None,
        )
        if not len(rows.places):
            return np.empty((0, self._vocab_size), dtype=np.float32), front
        assert outputs.ahead is not None  # noqa: S101 (this drafter reads ahead)
        features = rows.features(order, outputs.ahead)
        following = following_tokens(order, vl.batch["token_ids"], outputs.newest)
        inputs = StepInputs(
            token_ids=clamp_placeholders(
                shift_tokens(rows, outputs.token_ids, following),
                np.concatenate([features.tokens, features.skipped]),
                vocab_size=self._vocab_size,
            ),
            positions=outputs.positions[:, rows.places],
            query_start=rows.query_start,
            computed=order.computed.astype(np.int32),
            block_tables=_block_tables(vl, order.req_ids, there),
            feature_tokens=features.tokens,
            features=features.arrays(),
            logit_tokens=rows.query_start[1:][drafting].astype(np.int64) - 1,
        )
        logits, front.hidden = self._head.forward(
            inputs, self._head.take(outputs.hidden, rows.places)
        )
        return logits, front

    def _next_inputs(self, vl: HostBatch, front: _Front) -> StepInputs:
        """One more token for each request that goes on."""
        num = len(front.req_ids)
        slots = [vl.batch.slot_of(req_id) for req_id in front.req_ids]
        rotary = front.index + vl.positions.delta_of_slot[slots]
        return StepInputs(
            token_ids=front.tokens,
            positions=np.broadcast_to(rotary, (3, num)),
            query_start=np.arange(num + 1, dtype=np.int32),
            computed=front.index.astype(np.int32),
            block_tables=_block_tables(vl, front.req_ids, np.ones(num, dtype=np.bool_)),
            feature_tokens=np.zeros(0, dtype=np.int64),
            features=[],
            logit_tokens=np.arange(num),
        )


def _block_tables(
    vl: HostBatch, req_ids: Sequence[str], there: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int32]:
    """Block tables of requests as they are now; -1 for those that are not there."""
    table: npt.NDArray[np.int32] = vl.batch["block_table"]
    out = np.full((len(req_ids), table.shape[1]), -1, dtype=np.int32)
    for row in np.flatnonzero(there).tolist():
        out[row] = table[vl.batch.row_of(req_ids[row])]
    return out


def make_drafter(
    settings: RunSettings, engine: Engine, prompts: PromptBuilder, model_dir: Path
) -> Drafter:
    """Make the drafter of a run.

    Raises:
        InvalidSetting: the engine can have no draft head.
        VlbatchError: the folder has none for its model.
    """
    if settings.speculative == "none":
        return Drafter()
    if settings.speculative == "ngram":
        return NgramDrafter({prompts.eos_token_id, *prompts.placeholder_ids})
    if not isinstance(engine, DraftingEngine):
        raise InvalidSetting(
            f"a {type(engine).__name__} can have no draft head", setting="speculative"
        )
    return MtpDrafter(
        engine.make_draft_head(model_dir),
        vocab_size=engine.vocab_size,
        eos_token_id=prompts.eos_token_id,
        num_drafts=settings.num_drafts,
        block_size=settings.block_size,
    )
