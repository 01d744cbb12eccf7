"""Orders made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vlbatch.order import BatchOrder, OrderPolicy


def ints(values: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def make_order(
    req_ids: Sequence[str] = ("a", "b", "c"),
    *,
    idle: Sequence[str] = (),
    slots: Sequence[int] | None = None,
    prompt_lens: Sequence[int] | None = None,
    computed: Sequence[int] | None = None,
    scheduled: Sequence[int] | None = None,
    classes: Sequence[int] | None = None,
    batch_id: str = "batch",
    policy: OrderPolicy = "split",
) -> BatchOrder:
    """Make an order of a step; what is not given is the same plain number in each row."""
    num = len(req_ids)
    return BatchOrder(
        batch_id=batch_id,
        step=0,
        policy=policy,
        req_ids=tuple(req_ids),
        idle=tuple(idle),
        slots=ints(range(num) if slots is None else slots),
        prompt_lens=ints([8] * num if prompt_lens is None else prompt_lens),
        computed=ints([0] * num if computed is None else computed),
        scheduled=ints([1] * num if scheduled is None else scheduled),
        classes=ints([2] * num if classes is None else classes),
    )
