"""``InputBatch`` with FastDeploy's names, over the core's ``VLBatch``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from vlbatch.backends import Backend, make_backend
from vlbatch.batch import InputBatch as CoreBatch
from vlbatch.batch import ProposerInputBatch as CoreFollower
from vlbatch.batch import own
from vlbatch.cache import EncoderCache
from vlbatch.errors import InvalidField, StaleOrder, VlbatchError
from vlbatch.features import FeatureSpec, FeatureStore
from vlbatch.integrations.fastdeploy.access import LAUNCH_BUFFERS, SharedInputs
from vlbatch.integrations.fastdeploy.config import (
    free_blocks,
    paddle_backend,
    read_sizes,
    setting,
)
from vlbatch.integrations.fastdeploy.features import RequestFeatures, StepFeatures
from vlbatch.integrations.fastdeploy.fields import HOST_FIELDS, FieldSizes, declare_fields
from vlbatch.items import IntArray, Item
from vlbatch.order import BatchOrder, OrderPolicy
from vlbatch.step import Encoder, VLBatch

REASONING_ALLOWED_TOKENS = (100973, 100975)
"""Of the upstream's model: a tool call, or the response."""

_FAMILIES = {
    "qwen3_vl": "qwen3_vl", "qwen2_5_vl": "qwen2_5_vl", "qwen2_vl": "qwen2_vl",
    "ernie4_5_moe_vl": "ernie4_5_vl", "ernie4_5_vl": "ernie4_5_vl",
    "paddleocr_vl": "qwen2_vl",
}  # fmt: skip


class InputBatch(SharedInputs):
    """The running batch of a FastDeploy runner.

    A request is named by its slot id of the engine's scheduler (``batch_id``). Its row is what
    ``add`` returns and ``get_index_by_batch_id`` looks up; it changes in ``condense``,
    ``reorder_split_prefill_and_decode`` and ``swap_states``, with every field and every follower.

    Args:
        fd_config: FastDeploy's configuration, or a namespace with the same sections and names.
        backend: where fields live; ``None`` for Paddle's current place.
        family: rules of rotary positions; ``None`` for those of ``model_config.model_type``.
        rope_table: declare ``rope_emb``, a rotary table a request, for multimodal kernels that
            read it; without it positions come from ``positions`` alone.
        encoder_cache_rows: budget of the encoder cache; ``None`` for
            ``cache_config.max_encoder_cache``, or for as many as fit a batch of full chunks.
        spec: what features must look like.
        kept: names of further objects that the runner stores here.
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
        super().__init__([*LAUNCH_BUFFERS, "caches", "logits_processors", *own_rope, *kept])
        self._fd_config = fd_config
        self._sizes = sizes
        self._family = family or _family(setting(fd_config, "model_config.model_type", ""))
        self._cache_rows = encoder_cache_rows
        self._spec = spec
        self._backend = make_backend(backend) if isinstance(backend, str) else backend
        self._enable_pd_reorder = False
        self._features: StepFeatures | None = None
        self._failed: dict[int, VlbatchError] = {}

    def init_share_inputs(self) -> None:
        """Allocate every field; their addresses stay for the life of the batch.

        Raises:
            MissingDependency: Paddle is not installed and no other backend was given.
        """
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
        cache = EncoderCache(max_rows=self._cache_rows or sizes.max_tokens)
        self._vl = VLBatch(core, FeatureStore(cache, spec=self._spec), family=self._family)
        self._write_constants()

    def _write_constants(self) -> None:
        """Give the fields of the whole batch what they hold before the first request."""
        blocks = free_blocks(self._fd_config)
        self["free_list"] = blocks or -1
        self["free_list_len"] = len(blocks)
        self["reasoning_allowed_tokens"] = list(REASONING_ALLOWED_TOKENS)

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
    def vl(self) -> VLBatch[Any]:
        """The batch behind the names: positions, features, orders, checks."""
        return self._vl

    # Any: see __init__
    @property
    def core(self) -> CoreBatch[Any]:
        """Its rows and fields."""
        return self._vl.batch

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

    @property
    def order(self) -> BatchOrder:
        """Order of the latest step; outputs are restored with it, whatever happens after."""
        return self._latest().order

    def _latest(self) -> StepFeatures:
        if self._features is None:
            raise StaleOrder(
                "there is no step: condense or reorder first, after any add, remove or swap"
            )
        return self._features

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
        name = _name(batch_id)
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
        self._vl.remove(_name(batch_id))
        self._features = None

    def preempt(self, batch_id: int) -> None:
        """Free the row of a request that will come back by ``resume``.

        Raises:
            UnknownRequest: not in the batch.
        """
        self._vl.preempt(_name(batch_id))
        self._features = None

    def resume(self, batch_id: int, *, computed: int = 0) -> int:
        """Give a preempted request a row again, with its fields but its block table.

        Returns:
            Its row.

        Raises:
            VlbatchError: see ``VLBatch.resume``.
        """
        name = _name(batch_id)
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
        return self.core.row_of(_name(batch_id))

    def has(self, batch_id: int) -> bool:
        """Whether the request has a row."""
        return self.core.is_live(_name(batch_id))

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

    @property
    def failed(self) -> Mapping[int, VlbatchError]:
        """Requests that left by ``process_mm_features``, with the reason; until the next call."""
        return MappingProxyType(self._failed)

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
        """Close the holes of requests that left; rows without tokens in this step come last.

        Raises:
            VlbatchError: see ``arrange``.
        """
        self.arrange("arrival")

    def arrange(self, policy: OrderPolicy) -> None:
        """Move every row to its place in this step, and gather the step's features.

        Args:
            policy: ``"arrival"`` closes holes, ``"two"`` also puts decodes before prefills.

        Raises:
            StaleOrder: features of the step are missing: ``process_mm_features`` comes first.
            InvalidSchedule: ``prompt_lens``, ``seq_lens_decoder``, ``seq_lens_encoder`` and
                ``seq_lens_this_time_buffer`` of a request contradict each other.
        """
        step = self._vl.begin(self._scheduled())
        if step.tasks or step.failed:
            self._vl.abandon(step)
            missing = [task.reference.req_id for task in step.tasks]
            raise StaleOrder(
                f"features of requests {missing} are not encoded (failed: {step.failed}): call"
                " process_mm_features first"
            )
        order = self._vl.arrange(step, policy=policy)
        self._features = StepFeatures(order, self._vl.gather(order))

    def _scheduled(self) -> dict[str, int]:
        """Read progress and this step's tokens from the runner's fields: four small copies."""
        core, rows = self.core, self.core.rows
        prompt_lens, computed, encoder, this_time = (
            core.to_host(name)[: len(rows)].reshape(-1).astype(np.int64)
            for name in (
                "prompt_lens", "seq_lens_decoder", "seq_lens_encoder", "seq_lens_this_time_buffer"
            )
        )  # fmt: skip
        self._vl.set_progress(prompt_lens, computed)
        tokens = np.where(encoder > 0, encoder, this_time).tolist()
        return {
            name: count
            for name, count in zip(rows, tokens, strict=True)
            if name is not None and count > 0
        }

    # -- media -------------------------------------------------------------------------------
    def process_mm_features(self, extract: Encoder, *, max_rows: int | None = None) -> None:
        """Encode what this step's chunks need and the cache lacks, each content once.

        A request whose item fails leaves the batch and is in ``failed``; the others go on.

        Args:
            extract: the vision encoder: tasks -> one tuple of arrays ``[rows, hidden]`` a task;
                ``task.placed.item.payload`` is what the runner gave with the item.
            max_rows: feature rows of one call at most; ``None`` for all in one.

        Raises:
            InvalidSchedule: as ``arrange``; or the cache cannot hold what the step needs.
        """
        self._failed.clear()
        step = self._vl.begin(self._scheduled())
        self._vl.encode(step, extract, max_rows=max_rows)
        self._failed.update((int(name), error) for name, error in step.failed.items())
        self._features = None

    def features_of(self, batch_id: int) -> RequestFeatures | None:
        """Features of a request's chunk and their places, ``None`` for none.

        Raises:
            StaleOrder: there is no step.
        """
        return self._latest().by_request.get(_name(batch_id))

    # Any: an array of the encoder's library
    @property
    def image_features(self) -> Any:
        """Features of the step, all rows in batch order; ``None`` for none or once consumed."""
        return None if self._features is None else self._features.whole()

    @image_features.setter
    def image_features(self, value: None) -> None:
        self._clear_features(value)

    @property
    def image_features_list(self) -> list[object]:
        """Row -> features of the step, -1 for none or once consumed."""
        rows = self.core.rows
        if self._features is None:
            return [-1] * self._sizes.max_num_seqs
        return self._features.by_row(rows, self._sizes.max_num_seqs)

    @image_features_list.setter
    def image_features_list(self, value: None) -> None:
        self._clear_features(value)

    # Any: see image_features
    def take_image_features(self) -> Any:
        """Give ``image_features`` and clear both views: the step has consumed them."""
        taken = self.image_features
        self._clear_features(None)
        return taken

    def _clear_features(self, value: object) -> None:
        if value is not None:
            raise InvalidField(
                "features come from process_mm_features; only None can be assigned, which clears"
                " them"
            )
        if self._features is not None:
            self._features.clear()

    def positions(self) -> IntArray:
        """Rotary positions of the step, int64 ``[axes, num_tokens]``, in batch order.

        Raises:
            StaleOrder: there is no step.
        """
        return self._vl.positions_of(self.order)

    def update_weights(self, epoch: int) -> None:
        """Make features of other weights than these unreachable.

        Raises:
            VlbatchError: see ``EncoderCache.set_epoch``.
        """
        self._vl.features.cache.set_epoch(epoch)

    # -- views -------------------------------------------------------------------------------
    # Any: an array of the backend
    @property
    def seq_lens_this_time(self) -> Any:
        """The first ``num_running_requests`` entries of ``seq_lens_this_time_buffer``."""
        return self["seq_lens_this_time_buffer"][: self.num_running_requests]

    @seq_lens_this_time.setter
    def seq_lens_this_time(self, value: Any) -> None:  # Any: as above
        """Copy into the buffer; a view of it is there already."""
        self["seq_lens_this_time_buffer"][: len(value)] = value

    def check(self) -> None:
        """Verify every invariant of the batch.

        Raises:
            InvariantBroken: naming what is broken.
        """
        self._vl.check()


def _name(batch_id: int) -> str:
    return str(int(batch_id))


def _family(model_type: str) -> str:
    found = [family for name, family in _FAMILIES.items() if name in model_type]
    return found[0] if found else "1d"
