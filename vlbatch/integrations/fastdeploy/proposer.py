"""``ProposerInputBatch`` with FastDeploy's names: the draft model's state on the target's rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vlbatch.batch import ProposerInputBatch as CoreFollower
from vlbatch.errors import InvalidSetting, StaleOrder
from vlbatch.integrations.fastdeploy.access import LAUNCH_BUFFERS, SharedInputs, check_lengths
from vlbatch.integrations.fastdeploy.config import free_blocks, hidden_tokens, required, setting
from vlbatch.integrations.fastdeploy.input_batch import InputBatch
from vlbatch.integrations.fastdeploy.proposer_fields import declare_draft_fields


class ProposerInputBatch(SharedInputs):
    """Draft model's fields. Rows are the target's, at any time: nothing here moves them.

    Fields of the same value for target and draft are the target's very arrays; copied ones take
    the target's value when a request is added and go their own way from there.

    Args:
        fd_config: as for ``InputBatch``.
        target_model_input_batch: whose rows it follows.
        kept: names of further objects that the runner stores here.
    """

    _views = (
        "seq_lens_this_time", "base_model_draft_tokens", "index_to_batch_id",
        "num_running_requests", "running_requests_ids", "enable_pd_reorder",
    )  # fmt: skip
    _writable_views = ("seq_lens_this_time",)

    def __init__(
        self,
        fd_config: object,
        target_model_input_batch: InputBatch,
        *,
        kept: Iterable[str] = (),
    ) -> None:
        self._target = target_model_input_batch
        self._fd_config = fd_config
        rope = () if "rope_emb" in target_model_input_batch.core.registry else ("rope_emb",)
        super().__init__([*LAUNCH_BUFFERS, "caches", *rope], ["substep", *kept])

    def init_share_inputs(self) -> None:
        """Allocate the fields and follow the target from now on.

        Raises:
            InvalidSetting: the configuration lacks a setting, or a speculative method.
        """
        if not self._target.sizes.num_draft_tokens:
            raise InvalidSetting(
                "the target drafts nothing; expected a method", setting="speculative_config.method"
            )
        config, sizes = self._fd_config, self._target.sizes
        fields = declare_draft_fields(
            sizes,
            hidden_size=required(config, "model_config.hidden_size"),
            num_model_steps=setting(config, "speculative_config.num_model_steps", 1),
            max_tokens=hidden_tokens(config, sizes),
        )
        self._follower: CoreFollower[Any] = CoreFollower(
            self._target.core, fields, backend=self._target.backend
        )
        self._parts = (self._follower,)
        self._write_constants()

    def _write_constants(self) -> None:
        blocks = free_blocks(self._fd_config)
        self["free_list"] = blocks or -1
        self["free_list_len"] = len(blocks)
        self["substep"] = 0

    def reset_model_inputs(self) -> None:
        """Restore what is not per request; the rest was reset with the target, which comes first.

        Raises:
            StaleOrder: the target still has requests.
        """
        if self._target.core.num_reqs:
            raise StaleOrder(
                f"the target has requests {self._target.core.req_ids}: reset it first; the"
                " proposer's rows are reset with it"
            )
        self._write_constants()

    reset_share_inputs = reset_model_inputs

    def reorder_inputs(self, target: InputBatch | Mapping[int, int] | None = None) -> None:
        """Follow the target: already done, when it moved.

        Args:
            target: it, or its ``index_to_batch_id`` of now.

        Raises:
            StaleOrder: another target than its own, or another map.
        """
        known = isinstance(target, Mapping) and target == self.index_to_batch_id
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

    @property
    def index_to_batch_id(self) -> Mapping[int, int]:
        """The target's; see ``InputBatch.index_to_batch_id``."""
        return self._target.index_to_batch_id

    @property
    def num_running_requests(self) -> int:
        """The target's."""
        return self._target.num_running_requests

    @property
    def running_requests_ids(self) -> range:
        """The target's."""
        return self._target.running_requests_ids

    @property
    def enable_pd_reorder(self) -> bool:
        """The target's, as of now."""
        return self._target.enable_pd_reorder

    # Any: an array of the backend
    @property
    def base_model_draft_tokens(self) -> Any:
        """The target's ``draft_tokens``."""
        return self._target["draft_tokens"]

    # Any: as above
    @property
    def seq_lens_this_time(self) -> Any:
        """The first ``num_running_requests`` entries of its own ``seq_lens_this_time_buffer``."""
        return self["seq_lens_this_time_buffer"][: self.num_running_requests]

    @seq_lens_this_time.setter
    def seq_lens_this_time(self, value: Any) -> None:  # Any: as above
        self._check_view("seq_lens_this_time", value)
        self["seq_lens_this_time_buffer"][: len(value)] = value

    def _check_view(self, name: str, value: object) -> None:  # noqa: ARG002 (the only one)
        check_lengths(value, self["seq_lens_this_time_buffer"])

    def check(self) -> None:
        """Verify every invariant of the proposer's part.

        Raises:
            InvariantBroken: naming what is broken.
        """
        self._follower.check()
