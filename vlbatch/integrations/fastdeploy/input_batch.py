"""``InputBatch`` with FastDeploy's names, over the core's ``VLBatch``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from vlbatch.backends import Backend, make_backend
from vlbatch.batch import InputBatch as CoreBatch
from vlbatch.batch import ProposerInputBatch as CoreFollower
from vlbatch.batch import own
from vlbatch.cache import EncoderCache
from vlbatch.errors import StaleOrder
from vlbatch.features import FeatureSpec, FeatureStore
from vlbatch.integrations.fastdeploy.access import LAUNCH_BUFFERS, check_lengths
from vlbatch.integrations.fastdeploy.config import (
    cache_rows,
    free_blocks,
    inject_tokens,
    paddle_backend,
    read_family,
    read_sizes,
    setting,
)
from vlbatch.integrations.fastdeploy.features import StepFeatures
from vlbatch.integrations.fastdeploy.fields import HOST_FIELDS, FieldSizes, declare_fields
from vlbatch.integrations.fastdeploy.views import FeatureViews, name_of
from vlbatch.items import Item
from vlbatch.order import OrderPolicy
from vlbatch.step import VLBatch

REASONING_ALLOWED_TOKENS = (100973, 100975)
"""Of the upstream's model: a tool call, or the response."""


class InputBatch(FeatureViews):
    """The running batch of a FastDeploy runner.

    A request is named by its slot id of the engine's scheduler (``batch_id``). Its row is what
    ``add`` returns and ``get_index_by_batch_id`` looks up; it changes in ``condense``,
    ``reorder_split_prefill_and_decode`` and ``swap_states``, with every field and every follower.

    Args:
        fd_config: FastDeploy's configuration, or a namespace with the same sections and names.
        backend: where fields live; ``None`` for Paddle's current place.
        family: rules of rotary positions; ``None`` for those of ``model_config.model_type``, or
            one-dimensional ones where ``model_config.enable_mm`` is off.
        rope_table: declare ``rope_emb``, a rotary table a request, for multimodal kernels that
            read it; without it positions come from ``positions`` alone.
        encoder_cache_rows: budget of the encoder cache; ``None`` for
            ``cache_config.max_encoder_cache``, where that is not above 0 for as many as a step
            of full chunks can need.
        spec: what features must look like; ``None``: ``model_config.hidden_size`` columns.
        kept: names of further objects that the runner stores here.

    Raises:
        InvalidSetting: ``fd_config`` lacks a setting, or has an impossible one.
    """

    _views = (
        "seq_lens_this_time", "image_features", "image_features_list", "index_to_batch_id",
        "num_running_requests", "running_requests_ids", "enable_pd_reorder",
    )  # fmt: skip
    _writable_views = (
        "seq_lens_this_time", "image_features", "image_features_list", "enable_pd_reorder",
    )  # fmt: skip

    # Any: the array type is the backend's own business
    def __init__(
        self,
        fd_config: object,
        *,
        backend: Backend[Any, Any] | str | None = None,
        family: str | None = None,
        rope_table: bool = True,
        encoder_cache_rows: int | None = None,
        spec: FeatureSpec | None = None,
        kept: Iterable[str] = (),
    ) -> None:
        sizes = read_sizes(fd_config, rope_table=rope_table)
        own_rope = () if sizes.rope_table else ("rope_emb",)
        super().__init__(
            [*LAUNCH_BUFFERS, "caches", *own_rope],
            ["logits_processors", *kept],
            sizes.max_num_seqs,
        )
        self._fd_config = fd_config
        self._sizes = sizes
        self._family = family or read_family(fd_config)
        self._cache_rows = cache_rows(fd_config) or sizes.max_tokens
        if encoder_cache_rows is not None:
            self._cache_rows = encoder_cache_rows
        hidden_size: int | None = setting(fd_config, "model_config.hidden_size", None)
        self._spec = spec or FeatureSpec(hidden_size=hidden_size)
        self._backend = make_backend(backend) if isinstance(backend, str) else backend
        self._enable_pd_reorder = False

    def init_share_inputs(self) -> None:
        """Allocate every field; their addresses stay for the life of the batch.

        Raises:
            MissingDependency: Paddle is not installed and no other backend was given.
            StaleOrder: it was called before.
        """
        if self._parts:
            raise StaleOrder("allocated already, and addresses stay: use reset_share_inputs()")
        sizes = self._sizes
        backend = self._backend or paddle_backend()
        fields = declare_fields(sizes)
        pinned = [] if backend.on_host else [f for f in fields if f.name in HOST_FIELDS]
        core: CoreBatch[Any] = CoreBatch(
            [f for f in fields if f not in pinned],
            backend=backend,
            capacity=sizes.max_num_seqs,
            max_model_len=sizes.max_model_len,
            num_drafts=sizes.num_draft_tokens,
            policy="two",
        )
        on_host = make_backend(backend.name.removesuffix("-tensor"))
        host = CoreFollower(core, [own(field) for field in pinned], backend=on_host)
        self._made, self._parts = backend, (core, host)
        cache = EncoderCache(max_rows=self._cache_rows)
        self._vl = VLBatch(
            core,
            FeatureStore(cache, spec=self._spec),
            family=self._family,
            tokens_per_second=setting(
                self._fd_config, "model_config.vision_config.tokens_per_second", 2.0
            ),
        )
        self._write_constants()

    def _write_constants(self) -> None:
        """Give the fields of the whole batch what they hold before the first request."""
        blocks = free_blocks(self._fd_config)
        self["free_list"] = blocks or -1
        self["free_list_len"] = len(blocks)
        self["reasoning_allowed_tokens"] = list(REASONING_ALLOWED_TOKENS)
        self["inject_token_ids"] = [[token] for token in inject_tokens(self._fd_config)]

    def reset_share_inputs(self) -> None:
        """Drop every request and set every field to what ``init_share_inputs`` gave it, in place.

        Followers (a proposer) are reset with it; the encoder cache keeps its features.
        """
        self._vl.reset()
        self._features = None
        self._failed.clear()
        self._enable_pd_reorder = False
        self._write_constants()

    # -- the core ----------------------------------------------------------------------------
    # Any: see __init__
    @property
    def backend(self) -> Backend[Any, Any]:
        """Where fields live."""
        return self._made

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
        self._vl.add(
            name, prompt_len=prompt_len, items=items, computed=computed, fields=fields,
            adapter=adapter,
        )  # fmt: skip
        self._features = None
        return self.core.row_of(name)

    def remove(self, batch_id: int) -> None:
        """Let a request go: finished, aborted or failed. Its row is cleared at once.

        Raises:
            UnknownRequest: not in the batch, nor preempted.
        """
        self._vl.remove(name_of(batch_id))
        self._features = None

    def preempt(self, batch_id: int) -> None:
        """Free the row of a request that will come back by ``resume``.

        Raises:
            UnknownRequest: not in the batch.
        """
        self._vl.preempt(name_of(batch_id))
        self._features = None

    def resume(self, batch_id: int, *, computed: int = 0) -> int:
        """Give a preempted request a row again, with its fields but its block table.

        Returns:
            Its row.

        Raises:
            VlbatchError: see ``VLBatch.resume``.
        """
        name = name_of(batch_id)
        self._vl.resume(name, computed=computed)
        row = self.core.row_of(name)
        self.core.write(name, "prompt_lens", self.core.known_tokens_of(name))
        self.core.write(name, "seq_lens_decoder", computed)
        self._features = None
        return row

    def get_index_by_batch_id(self, batch_id: int) -> int:
        """Row of a request; looks it up and never adds.

        Raises:
            UnknownRequest: not in the batch; ``add`` adds.
        """
        return self.core.row_of(name_of(batch_id))

    def has(self, batch_id: int) -> bool:
        """Whether the request has a row."""
        return self.core.is_live(name_of(batch_id))

    @property
    def index_to_batch_id(self) -> Mapping[int, int]:
        """Row -> batch_id as of now: a snapshot that later moves do not change."""
        rows = enumerate(self.core.rows)
        return MappingProxyType({row: int(name) for row, name in rows if name is not None})

    @property
    def num_running_requests(self) -> int:
        """Rows in use: requests, and holes until the next ``condense``."""
        return len(self.core.rows)

    @property
    def running_requests_ids(self) -> range:
        """Rows in use."""
        return range(self.num_running_requests)

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
        self._features = None

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
        step = self._vl.begin(self._scheduled())
        self._note_failed(step)
        if step.tasks:
            self._vl.abandon(step)
            missing = [task.reference.req_id for task in step.tasks]
            raise StaleOrder(
                f"features of requests {missing} are not encoded: call process_mm_features first"
            )
        order = self._vl.arrange(step, policy=policy, stable=policy == "arrival")
        self._features = StepFeatures(order, self._vl.gather(order))

    # -- views -------------------------------------------------------------------------------
    # Any: an array of the backend
    @property
    def seq_lens_this_time(self) -> Any:
        """The first ``num_running_requests`` entries of ``seq_lens_this_time_buffer``."""
        return self["seq_lens_this_time_buffer"][: self.num_running_requests]

    @seq_lens_this_time.setter
    def seq_lens_this_time(self, value: Any) -> None:  # Any: as above
        """Copy into the buffer; a view of it is there already."""
        self._check_view("seq_lens_this_time", value)
        self["seq_lens_this_time_buffer"][: len(value)] = value

    def _check_view(self, name: str, value: object) -> None:
        if name == "seq_lens_this_time":
            check_lengths(value, self["seq_lens_this_time_buffer"])
        else:
            super()._check_view(name, value)

    def check(self) -> None:
        """Verify every invariant of the batch.

        Raises:
            InvariantBroken: naming what is broken.
        """
        self._vl.check()
