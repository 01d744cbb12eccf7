"""``InputBatch`` with FastDeploy's names, over the core's ``VLBatch``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vlbatch.backends import Backend, make_backend
from vlbatch.batch import InputBatch as CoreBatch
from vlbatch.cache import EncoderCache
from vlbatch.errors import StaleOrder
from vlbatch.features import FeatureSpec, FeatureStore
from vlbatch.integrations.fastdeploy.access import LAUNCH_BUFFERS
from vlbatch.integrations.fastdeploy.config import (
    cache_budget,
    free_blocks,
    inject_tokens,
    integer,
    look_up,
    lookahead,
    number,
    paddle_backend,
    read_family,
    read_sizes,
)
from vlbatch.integrations.fastdeploy.features import StepFeatures, by_request
from vlbatch.integrations.fastdeploy.fields import FieldSizes, declare_fields
from vlbatch.integrations.fastdeploy.followers import AfterReset, host_part, split_by_place
from vlbatch.integrations.fastdeploy.media import StepViews
from vlbatch.integrations.fastdeploy.rows import name_of
from vlbatch.items import Item
from vlbatch.order import OrderPolicy
from vlbatch.positions import family_of
from vlbatch.step import VLBatch

REASONING_ALLOWED_TOKENS = (100973, 100975)
"""Of the upstream's model: a tool call, or the response."""


class InputBatch(StepViews):
    """The running batch of a FastDeploy runner.

    A request is named by its slot id of the engine's scheduler (``batch_id``). Its row is what
    ``add`` returns and ``get_index_by_batch_id`` looks up; it changes in ``condense``,
    ``reorder_split_prefill_and_decode`` and ``swap_states``, with every field and every follower.

    Args:
        fd_config: FastDeploy's configuration, or a namespace with the same sections and names.
        backend: where fields live; ``None`` for Paddle's current place.
        host_backend: where fields are that stay in host memory beside a device; needed with a
            device backend that is not one of ``vlbatch.backends``.
        family: rules of rotary positions; ``None`` for those of ``model_config.model_type``, or
            one-dimensional ones where ``model_config.enable_mm`` is off.
        rope_table: declare ``rope_emb``, a rotary table a request, for multimodal kernels that
            read it; without it positions come from ``positions`` alone.
        encoder_cache_rows: feature rows of the encoder cache, kept until their space is needed;
            ``None`` for ``cache_config.max_encoder_cache``: see ``config.cache_budget``.
        spec: what features must look like; ``None``: ``model_config.hidden_size`` columns.
        kept: names of further objects that the runner stores here.

    Raises:
        InvalidSetting: ``fd_config`` lacks a setting, or has an impossible one.
    """

    # Any: the array type is the backend's own business
    def __init__(
        self,
        fd_config: object,
        *,
        backend: Backend[Any, Any] | str | None = None,
        host_backend: Backend[Any, Any] | str | None = None,
        family: str | None = None,
        rope_table: bool = True,
        encoder_cache_rows: int | None = None,
        spec: FeatureSpec | None = None,
        kept: Iterable[str] = (),
    ) -> None:
        sizes = read_sizes(fd_config, rope_table=rope_table)
        fields = declare_fields(sizes)
        own_rope = () if sizes.rope_table else ("rope_emb",)
        super().__init__(
            {field.name for field in fields},
            [*LAUNCH_BUFFERS, "caches", *own_rope],
            kept,
            sizes.max_num_seqs,
        )
        self._kept["logits_processors"] = None
        self._fd_config = fd_config
        self._sizes = sizes
        self._fields = fields
        self._family = read_family(fd_config) if family is None else family
        family_of(self._family)  # refuses an unknown one
        self._blocks = free_blocks(fd_config)
        self._inject_tokens = inject_tokens(fd_config)
        self._tokens_per_second = number(
            fd_config, "model_config.vision_config.tokens_per_second", 2.0
        )
        self._lookahead = lookahead(fd_config)
        self._budget = cache_budget(fd_config, sizes)
        if encoder_cache_rows is not None:
            given = {"encoder_cache_rows": encoder_cache_rows}
            self._budget = integer(given, "encoder_cache_rows"), True
        path = "model_config.hidden_size"
        width = None if look_up(fd_config, path) is None else integer(fd_config, path)
        self._spec = spec or FeatureSpec(hidden_size=width)
        self._backend = make_backend(backend) if isinstance(backend, str) else backend
        self._host_backend = (
            make_backend(host_backend) if isinstance(host_backend, str) else host_backend
        )
        self._made: Backend[Any, Any] | None = None  # by ``init_share_inputs``
        self._enable_pd_reorder = False

    def init_share_inputs(self) -> None:
        """Allocate every field; their addresses stay for the life of the batch.

        Raises:
            MissingDependency: Paddle is not installed and no other backend was given.
            InvalidSetting: the backend is a device's, and needs a ``host_backend``.
            StaleOrder: it was called before.
        """
        if self._parts:
            raise StaleOrder("allocated already, and addresses stay: use reset_share_inputs()")
        sizes = self._sizes
        backend = self._backend or paddle_backend()
        fields, pinned = split_by_place(self._fields, backend)
        core: CoreBatch[Any] = CoreBatch(
            fields,
            backend=backend,
            capacity=sizes.max_num_seqs,
            max_model_len=sizes.max_model_len,
            num_drafts=sizes.num_draft_tokens,
            policy="two",
        )
        parts = (core, *host_part(core, pinned, backend, self._host_backend))
        max_rows, retain = self._budget
        features = FeatureStore(
            EncoderCache(max_rows=max_rows, retain=retain),
            lookahead=self._lookahead,
            spec=self._spec,
            copy_features=True,
        )
        vl = VLBatch(core, features, family=self._family, tokens_per_second=self._tokens_per_second)
        core.register_follower(AfterReset(self._restore))
        self._made, self._parts, self._vl = backend, parts, vl
        self._restore()

    def _restore(self) -> None:
        """Give what is not per request what it holds before the first one."""
        self["free_list"] = self._blocks
        self["free_list_len"] = len(self._blocks)
        self["reasoning_allowed_tokens"] = list(REASONING_ALLOWED_TOKENS)
        self["inject_token_ids"] = [[token] for token in self._inject_tokens]
        self._step = None
        self._failed.clear()
        self._enable_pd_reorder = False

    def reset_share_inputs(self) -> None:
        """Drop every request and set every field to what ``init_share_inputs`` gave it, in place.

        Followers (a proposer) are reset with it; the encoder cache keeps its features.

        Raises:
            StaleOrder: before ``init_share_inputs``.
        """
        self.vl.reset()

    # -- the core ----------------------------------------------------------------------------
    # Any: see __init__
    @property
    def backend(self) -> Backend[Any, Any]:
        """Where fields live.

        Raises:
            StaleOrder: before ``init_share_inputs``.
        """
        if self._made is None:
            raise StaleOrder("nothing is allocated yet: call init_share_inputs() first")
        return self._made

    # Any: see __init__
    @property
    def host_backend(self) -> Backend[Any, Any] | None:
        """Where fields are that stay in host memory, as it was given."""
        return self._host_backend

    @property
    def sizes(self) -> FieldSizes:
        """Extents of the fields."""
        return self._sizes

    @property
    def fd_config(self) -> object:
        """The configuration that the sizes were read from."""
        return self._fd_config

    # -- requests ----------------------------------------------------------------------------
    def add(
        self,
        batch_id: int,
        *,
        prompt_len: int,
        computed: int = 0,
        items: Sequence[Item] = (),
        adapter: str = "",
    ) -> int:
        """Admit a request; its fields hold their defaults until the runner writes its row.

        Writes ``prompt_lens`` and ``seq_lens_decoder``.

        Args:
            batch_id: slot id of the engine's scheduler, not in the batch.
            prompt_len: tokens of the prompt (after a preemption: prompt and outputs so far).
            computed: tokens whose KV a prefix cache already holds.
            items: media of the prompt; see ``items_of``.
            adapter: encoder adapter; part of the cache key.

        Returns:
            Its row, until rows move.

        Raises:
            VlbatchError: see ``VLBatch.add``; nothing was changed.
        """
        name = name_of(batch_id)
        fields = {"prompt_lens": prompt_len, "seq_lens_decoder": computed}
        self.vl.add(
            name, prompt_len=prompt_len, items=items, computed=computed, fields=fields,
            adapter=adapter,
        )  # fmt: skip
        return self.core.row_of(name)

    def remove(self, batch_id: int) -> None:
        """Let a request go: finished or aborted. Its row is cleared at once.

        A request in ``failed`` has left already.

        Raises:
            UnknownRequest: not in the batch, nor preempted.
        """
        self.vl.remove(name_of(batch_id))

    def preempt(self, batch_id: int) -> None:
        """Free the row of a request that will come back by ``resume``.

        Its fields are read first: call it before they are cleared by hand.

        Raises:
            UnknownRequest: not in the batch.
            InvalidSchedule: ``prompt_lens`` or ``seq_lens_decoder`` of a request is impossible.
        """
        name = name_of(batch_id)
        self.core.row_of(name)
        self.vl.set_progress(*self._counts())
        self.vl.preempt(name)

    def resume(self, batch_id: int, *, computed: int = 0) -> int:
        """Give a preempted request a row again.

        Its fields come back but for the block table and the tokens of a step, which are none until
        the runner writes them; ``prompt_lens`` is its prompt and outputs so far,
        ``seq_lens_decoder`` what is computed.

        Returns:
            Its row.

        Raises:
            VlbatchError: see ``VLBatch.resume``.
        """
        name = name_of(batch_id)
        fields = {"seq_lens_decoder": computed}
        if name in self.core.preempted:
            fields["prompt_lens"] = self.core.known_tokens_of(name)
        self.vl.resume(name, computed=computed, fields=fields)
        return self.core.row_of(name)

    def get_index_by_batch_id(self, batch_id: int) -> int:
        """Row of a request; looks it up and never adds.

        Raises:
            UnknownRequest: not in the batch; ``add`` adds.
        """
        return self.core.row_of(name_of(batch_id))

    def has(self, batch_id: int) -> bool:
        """Whether the request has a row."""
        return self.core.is_live(name_of(batch_id))

    # -- rows --------------------------------------------------------------------------------
    @property
    def enable_pd_reorder(self) -> bool:
        """Whether ``process_reorder`` puts decodes before prefills."""
        return self._enable_pd_reorder

    @enable_pd_reorder.setter
    def enable_pd_reorder(self, value: bool) -> None:
        self._enable_pd_reorder = bool(value)

    def swap_states(self, i1: int, i2: int) -> None:
        """Exchange two rows by hand, in every field and follower.

        Raises:
            UnknownRequest: a row that is not in use.
        """
        self.core.swap_rows(i1, i2)

    def condense(self) -> None:
        """Close the holes of requests that left; the others keep their order.

        Newcomers follow in order of arrival, rows without tokens come last.

        Raises:
            VlbatchError: see ``arrange``.
        """
        self.arrange("arrival")

    def arrange(self, policy: OrderPolicy) -> None:
        """Move every row to its place in this step, and gather the step's features.

        Args:
            policy: ``"arrival"`` closes holes and keeps the order; ``"two"`` puts decodes before
                prefills, and a row that is among its own already stays.

        Raises:
            StaleOrder: features of the step are missing: ``process_mm_features`` comes first.
            InvalidSchedule: ``prompt_lens``, ``seq_lens_decoder``, ``seq_lens_encoder`` and
                ``seq_lens_this_time_buffer`` of a request contradict each other.
        """
        step = self._begin()
        self._note_failed(step)
        if step.tasks:
            self.vl.abandon(step)
            missing = [task.reference.req_id for task in step.tasks]
            raise StaleOrder(
                f"features of requests {missing} are not encoded: call process_mm_features first"
            )
        order = self.vl.arrange(step, policy=policy, stable=policy == "arrival")
        found = by_request(order, self.vl.gather(order))
        self._step = StepFeatures(order, self.core.row_admissions, found)

    def check(self) -> None:
        """Verify every invariant of the batch.

        Raises:
            InvariantBroken: naming what is broken.
        """
        self.vl.check()
