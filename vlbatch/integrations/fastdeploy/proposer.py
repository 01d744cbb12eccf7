"""``ProposerInputBatch`` with FastDeploy's names: the draft model's state on the target's rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vlbatch.batch import InputBatch as CoreBatch
from vlbatch.batch import ProposerInputBatch as CoreFollower
from vlbatch.batch import own
from vlbatch.errors import InvalidSetting, StaleOrder
from vlbatch.integrations.fastdeploy.access import LAUNCH_BUFFERS
from vlbatch.integrations.fastdeploy.config import (
    free_blocks,
    hidden_tokens,
    integer,
    num_model_steps,
)
from vlbatch.integrations.fastdeploy.features import RequestFeatures, by_request
from vlbatch.integrations.fastdeploy.followers import AfterReset, host_part, split_by_place
from vlbatch.integrations.fastdeploy.input_batch import InputBatch
from vlbatch.integrations.fastdeploy.proposer_fields import declare_draft_fields, targets_fields
from vlbatch.integrations.fastdeploy.rows import RowViews
from vlbatch.items import IntArray


class ProposerInputBatch(RowViews):
    """Draft model's fields. Rows are the target's, at any time: nothing here moves them.

    Fields of the same value for target and draft are the target's very arrays; copied ones take
    the target's value when a request is added and go their own way from there.

    Args:
        fd_config: as for ``InputBatch``.
        target_model_input_batch: whose rows it follows.
        kept: names of further objects that the runner stores here.

    Raises:
        InvalidSetting: the configuration lacks a setting, or a speculative method.
    """

    _views = (*RowViews._views, "base_model_draft_tokens")  # noqa: SLF001 (own base)

    def __init__(
        self,
        fd_config: object,
        target_model_input_batch: InputBatch,
        *,
        kept: Iterable[str] = (),
    ) -> None:
        sizes = target_model_input_batch.sizes
        if not sizes.num_draft_tokens:
            raise InvalidSetting(
                "the target drafts nothing; expected a method", setting="speculative_config.method"
            )
        self._target = target_model_input_batch
        self._blocks = free_blocks(fd_config)
        self._fields = declare_draft_fields(
            sizes,
            hidden_size=integer(fd_config, "model_config.hidden_size"),
            num_model_steps=num_model_steps(fd_config),
            max_tokens=hidden_tokens(fd_config, sizes),
        )
        self._targets_fields = targets_fields(sizes)
        declared = {field.name for field in self._fields}
        declared |= self._targets_fields.keys()
        own_rope = () if sizes.rope_table else ("rope_emb",)
        super().__init__(declared, [*LAUNCH_BUFFERS, "caches", *own_rope], kept)
        self._kept["substep"] = None
        self._followers: tuple[CoreFollower[Any], ...] = ()  # made by ``init_share_inputs``

    def init_share_inputs(self) -> None:
        """Allocate the fields and follow the target from now on.

        Raises:
            StaleOrder: it was called before, or not yet on the target.
        """
        if self._parts:
            raise StaleOrder("allocated already, and addresses stay: use reset_share_inputs()")
        core, backend = self._target.core, self._target.backend
        fields, pinned = split_by_place(self._fields, backend)
        on_host = host_part(core, pinned, backend, self._target.host_backend)
        declared = [*map(own, fields), *self._targets_fields.values()]
        self._followers = (CoreFollower(core, declared, backend=backend), *on_host)
        self._parts = self._followers
        core.register_follower(AfterReset(self._restore))
        self._restore()

    def _restore(self) -> None:
        """Give what is not per request what it holds before the first one."""
        self["free_list"] = self._blocks
        self["free_list_len"] = len(self._blocks)
        self["substep"] = 0

    def reset_model_inputs(self) -> None:
        """Set every own field to what ``init_share_inputs`` gave it, in place.

        A reset of the target does that too, and resets what is shared; call it before or after.

        Raises:
            StaleOrder: the target still has requests, live or preempted; or there was no
                ``init_share_inputs`` yet.
        """
        if not self._followers:
            raise StaleOrder("nothing is allocated yet: call init_share_inputs() first")
        left = (*self.core.req_ids, *self.core.preempted)
        if left:
            raise StaleOrder(
                f"the target has requests {left}: reset it first; the proposer is reset with it"
            )
        for part in self._followers:
            part.on_reset()
        self._restore()

    reset_share_inputs = reset_model_inputs

    def reorder_inputs(self, target: InputBatch | Mapping[int, int] | None = None) -> None:
        """Follow the target: already done, when it moved.

        Args:
            target: it, or its ``index_to_batch_id`` of now.

        Raises:
            StaleOrder: another target than its own, or another map.
        """
        known = isinstance(target, Mapping) and self.index_to_batch_id.matches(target)
        if target is not None and target is not self._target and not known:
            raise StaleOrder(
                f"this proposer follows another target, whose rows are"
                f" {dict(self.index_to_batch_id)}"
            )

    def swap_states(self, i1: int, i2: int) -> None:
        """Refuse: rows are swapped in the target, which takes the proposer along.

        Raises:
            StaleOrder: always.
        """
        raise StaleOrder(f"rows {i1} and {i2} are the target's: swap them there, once for both")

    # Any: the array type is the backend's own business
    @property
    def core(self) -> CoreBatch[Any]:
        """The target's rows and fields.

        Raises:
            StaleOrder: before ``init_share_inputs`` of the target.
        """
        return self._target.core

    @property
    def enable_pd_reorder(self) -> bool:
        """The target's, as of now."""
        return self._target.enable_pd_reorder

    # Any: an array of the backend
    @property
    def base_model_draft_tokens(self) -> Any:
        """The target's ``draft_tokens``."""
        return self._target["draft_tokens"]

    def draft_features(self, shift: int = 1) -> dict[int, RequestFeatures]:
        """batch_id -> features that a draft module reads in this step, in row order.

        Token ``i`` of a chunk takes the embedding of the prompt's token ``i + shift``. An item
        beyond the target's chunk is left out where the cache had no space for it.

        Args:
            shift: 1 for the first module, 2 for the second, and so on.

        Raises:
            StaleOrder: there is no step; ask before requests are added or removed.
            InvalidField: more than ``speculative_config.num_model_steps``.
        """
        order = self._target.order
        found = by_request(order, self._target.vl.gather(order, shift=shift), shift)
        return {int(name): features for name, features in found.items()}

    def positions(self) -> IntArray:
        """The target's rotary positions of the step, which are the draft model's too.

        Raises:
            StaleOrder: there is no step.
        """
        return self._target.positions()

    def check(self) -> None:
        """Verify every invariant of the proposer's part.

        Raises:
            InvariantBroken: naming what is broken.
        """
        for part in self._followers:
            part.check()
