"""The media half of ``InputBatch``: encoding, and the views of a step's features."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import index
from types import MappingProxyType
from typing import Any

import numpy as np

from vlbatch.batch import InputBatch as CoreBatch
from vlbatch.errors import InvalidField, InvalidSchedule, StaleOrder, VlbatchError
from vlbatch.integrations.fastdeploy.access import SharedInputs
from vlbatch.integrations.fastdeploy.features import RequestFeatures, StepFeatures, copying
from vlbatch.items import IntArray
from vlbatch.order import BatchOrder
from vlbatch.step import Encoder, Step, VLBatch


class FeatureViews(SharedInputs):
    """Features and positions of the latest step, by request, by row and in one piece.

    Args:
        fixed: see ``SharedInputs``.
        kept: see ``SharedInputs``.
        num_rows: most requests.
    """

    # Any: the array type is the backend's own business
    _vl: VLBatch[Any]  # made by ``init_share_inputs``

    def __init__(self, fixed: Iterable[str], kept: Iterable[str], num_rows: int) -> None:
        super().__init__(fixed, kept)
        self._num_rows = num_rows
        self._features: StepFeatures | None = None
        self._failed: dict[int, VlbatchError] = {}

    # Any: the array type is the backend's own business
    @property
    def vl(self) -> VLBatch[Any]:
        """The batch behind the names: positions, features, orders, checks."""
        return self._vl

    # Any: the array type is the backend's own business
    @property
    def core(self) -> CoreBatch[Any]:
        """Its rows and fields."""
        return self._vl.batch

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

    @property
    def failed(self) -> Mapping[int, VlbatchError]:
        """Requests that left because an item failed, with the reason.

        ``process_mm_features`` starts it anew; look after ``arrange`` at the latest.
        """
        return MappingProxyType(self._failed)

    def _scheduled(self) -> dict[str, int]:
        """Read progress and this step's tokens from the runner's fields: four small copies."""
        core, rows = self.core, self.core.rows
        prompt_lens, computed, encoder, this_time = (
            core.to_host(name)[: len(rows)].reshape(-1).astype(np.int64)
            for name in (
                "prompt_lens", "seq_lens_decoder", "seq_lens_encoder", "seq_lens_this_time_buffer"
            )
        )  # fmt: skip
        unlike = (encoder > 0) & (this_time > 0) & (encoder != this_time)
        for row in np.flatnonzero(unlike | (np.minimum(encoder, this_time) < 0)):
            raise InvalidSchedule(
                f"has seq_lens_encoder {encoder[row]} and seq_lens_this_time {this_time[row]};"
                " expected the same number for a prefill, 0 and 1 or more for a decode",
                req_id=rows[row],
            )
        self._vl.set_progress(prompt_lens, computed)
        tokens = np.maximum(encoder, this_time).tolist()
        return {
            name: count
            for name, count in zip(rows, tokens, strict=True)
            if name is not None and count > 0
        }

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
        try:
            self._vl.encode(step, copying(extract), max_rows=max_rows)
        finally:
            self._vl.abandon(step)  # what an interrupt left open, else nothing
        self._note_failed(step)
        self._features = None

    def _note_failed(self, step: Step) -> None:
        self._failed.update((int(name), error) for name, error in step.failed.items())

    def features_of(self, batch_id: int) -> RequestFeatures | None:
        """Features of a request's chunk and their places, ``None`` for none.

        Raises:
            StaleOrder: there is no step.
            UnknownRequest: not in the batch.
        """
        name = name_of(batch_id)
        self.core.row_of(name)
        return self._latest().by_request.get(name)

    # Any: an array of the encoder's library
    @property
    def image_features(self) -> Any:
        """Features of the step, all rows in batch order; ``None`` for none or once consumed.

        Raises:
            StaleOrder: there are requests, but no step.
        """
        return self._latest().whole() if self.core.num_reqs else None

    @image_features.setter
    def image_features(self, value: None) -> None:
        self._check_view("image_features", value)
        self._clear_features()

    @property
    def image_features_list(self) -> list[object]:
        """Row -> features of the step, -1 for none or once consumed.

        Raises:
            StaleOrder: there are requests, but no step.
        """
        num_rows = self._num_rows
        if not self.core.num_reqs:
            return [-1] * num_rows
        return self._latest().by_row(self.core.rows, num_rows)

    @image_features_list.setter
    def image_features_list(self, value: None) -> None:
        self._check_view("image_features_list", value)
        self._clear_features()

    # Any: see image_features
    def take_image_features(self) -> Any:
        """Give ``image_features`` and clear both views: the step has consumed them."""
        taken = self.image_features
        self._clear_features()
        return taken

    def _clear_features(self) -> None:
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

    def _check_view(self, name: str, value: object) -> None:
        if name.startswith("image_features") and value is not None:
            raise InvalidField(
                f"{name!r} follows from process_mm_features; expected None, which clears it"
            )


def name_of(batch_id: int) -> str:
    """Name a request for the core.

    Raises:
        InvalidField: no integer of at least 0.
    """
    try:
        number = index(batch_id)
    except TypeError:
        number = -1
    if number < 0:
        raise InvalidField(f"got batch_id {batch_id!r}; expected an integer of at least 0")
    return str(number)
