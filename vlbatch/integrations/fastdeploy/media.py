"""The steps of a batch: read from the runner's fields, encoded, and seen as features."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from vlbatch.batch import InputBatch as CoreBatch
from vlbatch.errors import InvalidField, InvalidSchedule, StaleOrder, VlbatchError
from vlbatch.integrations.fastdeploy.features import RequestFeatures, StepFeatures
from vlbatch.integrations.fastdeploy.rows import LENGTHS, RowViews, name_of
from vlbatch.items import IntArray
from vlbatch.order import BatchOrder
from vlbatch.step import Encoder, Step, VLBatch


class StepViews(RowViews):
    """Begins steps, encodes for them, and shows features by request, by row and in one piece.

    Args:
        declared: see ``SharedInputs``.
        fixed: see ``SharedInputs``.
        kept: see ``SharedInputs``.
        num_rows: most requests.
    """

    _views = (*RowViews._views, "image_features", "image_features_list")  # noqa: SLF001 (own base)

    def __init__(
        self, declared: Collection[str], fixed: Iterable[str], kept: Iterable[str], num_rows: int
    ) -> None:
        super().__init__(declared, fixed, kept)
        self._num_rows = num_rows
        # Any: the array type is the backend's own business
        self._vl: VLBatch[Any] | None = None  # made by ``init_share_inputs``
        self._step: StepFeatures | None = None
        self._failed: dict[int, VlbatchError] = {}

    # Any: the array type is the backend's own business
    @property
    def vl(self) -> VLBatch[Any]:
        """The batch behind the names: positions, features, orders, checks.

        Raises:
            StaleOrder: before ``init_share_inputs``.
        """
        if self._vl is None:
            raise StaleOrder("nothing is allocated yet: call init_share_inputs() first")
        return self._vl

    # Any: the array type is the backend's own business
    @property
    def core(self) -> CoreBatch[Any]:
        """Its rows and fields; raises as ``vl``."""
        return self.vl.batch

    # -- a step ------------------------------------------------------------------------------
    def _begin(self) -> Step:
        """Start a step from what the runner wrote; the views of the one before are over."""
        self._step = None
        counts = self._counts()
        return self.vl.begin(self._scheduled(*counts), counts=counts)

    def _by_row(self, name: str) -> IntArray:
        """Host copy of a field of the rows in use."""
        values = self.core.to_host(name)[: self.core.num_rows]
        return values.reshape(-1).astype(np.int64)

    def _counts(self) -> tuple[IntArray, IntArray]:
        """Prompt lengths and computed tokens, by row."""
        return self._by_row("prompt_lens"), self._by_row("seq_lens_decoder")

    def _scheduled(self, prompt_lens: IntArray, computed: IntArray) -> dict[str, int]:
        """Tokens of this step, by request."""
        rows, taken = self.core.rows, self.core.row_admissions >= 0
        encoder, this_time = self._by_row("seq_lens_encoder"), self._by_row(LENGTHS)
        expected = np.where(computed < prompt_lens, this_time, 0)
        wrong = (this_time < 0) | (encoder != expected)
        for row in np.flatnonzero(wrong & taken):
            raise InvalidSchedule(
                f"has seq_lens_encoder {encoder[row]} and seq_lens_this_time {this_time[row]};"
                f" expected {LENGTHS}[row] to be the same number for a prefill, 1 or more beside"
                " seq_lens_encoder 0 for a decode, 0 beside 0 for a row without tokens",
                req_id=rows[row],
            )
        return {
            name: count
            for name, count in zip(rows, this_time.tolist(), strict=True)
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
        step = self._begin()
        self._failed.clear()
        try:
            self.vl.encode(step, extract, max_rows=max_rows)
        finally:
            self.vl.abandon(step)  # what an interrupt left open, else nothing
        self._note_failed(step)

    def _note_failed(self, step: Step) -> None:
        self._failed.update((int(name), error) for name, error in step.failed.items())

    @property
    def failed(self) -> Mapping[int, VlbatchError]:
        """Requests that left because an item failed, with the reason.

        ``process_mm_features`` starts it anew; look after ``arrange`` at the latest.
        """
        return MappingProxyType(self._failed)

    # -- views of the latest step ------------------------------------------------------------
    def _latest(self) -> StepFeatures:
        """Order and features of the rows as they are; adding, removing and swapping ends a step."""
        now = self.core.row_admissions
        if self._step is None or not np.array_equal(self._step.admissions, now):
            raise StaleOrder(
                "there is no step: condense or reorder first, after any add, remove or swap"
            )
        return self._step

    @property
    def order(self) -> BatchOrder:
        """Order of the latest step; outputs are restored with it, whatever happens after."""
        return self._latest().order

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
        if self._step is not None:
            self._step.by_request.clear()

    def _check_view(self, name: str, value: object) -> None:
        if name.startswith("image_features") and value is not None:
            raise InvalidField(
                f"{name!r} follows from process_mm_features; expected None, which clears it"
            )
        super()._check_view(name, value)

    def positions(self) -> IntArray:
        """Rotary positions of the step, int64 ``[axes, num_tokens]``, in batch order.

        Raises:
            StaleOrder: there is no step.
        """
        return self.vl.positions_of(self.order)

    def update_weights(self, epoch: int) -> None:
        """Make features of other weights than these unreachable.

        Raises:
            VlbatchError: see ``EncoderCache.set_epoch``.
        """
        self.vl.features.cache.set_epoch(epoch)
