"""The way back from rows to batch_ids, by FastDeploy's functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from vlbatch.backends.arrays import array_like, host_values
from vlbatch.errors import InvalidField, StaleOrder
from vlbatch.integrations.fastdeploy.access import SharedInputs
from vlbatch.integrations.fastdeploy.rows import RowViews
from vlbatch.order import outputs_by_slot, sums_by_slot

BY_ROW = ("sampled_token_ids", "token_num_per_batch", "logz_per_batch")
"""Members of a sampler's output with one entry a row."""

COUNTS = ("token_num_per_batch",)
"""Of these, members that count entries: 0 for ids that are not in the batch."""

BY_TOKEN = ("logprobs_tensors", "logits", "sampling_mask")
"""Members with ``token_num_per_batch[row]`` entries a row, where that is there; else one a row."""

SUMS = (
    "cu_batch_token_offset", "cu_next_token_offset", "cu_seqlens_q", "cu_seqlens_k",
    "cu_seqlens_q_output",
)  # fmt: skip
"""Running sums over rows: made again for the other order, never permuted."""


def recover_batch_index_for_output(
    output_cls: object,
    index_to_batch_id: Mapping[int, int],
    enable_pd_reorder: bool = True,  # noqa: ARG001 (upstream's call; the map decides)
    recover_list: Iterable[str] = (),
) -> dict[str, object]:
    """Outputs by row -> new outputs by batch_id.

    Args:
        output_cls: object, mapping or batch with the outputs. Arrays, tensors and lists may be
            longer than there are rows; what is inside tuples and mappings may not.
        index_to_batch_id: row -> batch_id, as it was in the step of the outputs. With a batch's
            own buffers pass what its ``index_to_batch_id`` gave: that knows a request from a later
            one of the same id; of a plain dict the ids alone are compared.
        enable_pd_reorder: has no effect; rows may differ from batch_ids without a reorder too.
        recover_list: names to recover.

    Returns:
        name -> output whose entry ``j`` is that of batch_id ``j``, up to the largest one. Entries
        of ids that are not in the batch are -1, NaN, ``False`` or ``None``.

    Raises:
        InvalidField: a name is missing or cannot be recovered.
        StaleOrder: fewer entries than rows; or the outputs are a batch's, whose rows have moved
            since the step: recover or copy them before the next one.
    """
    if isinstance(output_cls, RowViews):
        now = output_cls.index_to_batch_id
        if not now.matches(index_to_batch_id):
            raise StaleOrder(
                f"got the order {dict(index_to_batch_id)}; the buffers have moved with the rows of"
                f" the batch, which are now those of {dict(now)}: recover or copy them before the"
                " next step"
            )
    names = list(recover_list)
    outputs = {name: _member(output_cls, name) for name in names}
    ids = _ids(index_to_batch_id)
    return {name: _by_id(name, output, ids) for name, output in outputs.items()}


def recover_batch_index_for_sampler_output(
    sampler_output: object,
    index_to_batch_id: Mapping[int, int],
    enable_pd_reorder: bool = True,  # noqa: ARG001 (see above)
) -> None:
    """Bring every member of a sampler's output from rows to batch_ids, in place.

    Members with several entries a row (logits and logprobs of accepted drafts) are recovered as
    groups; sums over rows are computed again.

    Args:
        sampler_output: object with members of ``BY_ROW``, ``BY_TOKEN`` and ``SUMS``, each of which
            may be ``None``.
        index_to_batch_id: see ``recover_batch_index_for_output``.
        enable_pd_reorder: has no effect.

    Raises:
        InvalidField: a member that has no rule here; no object with attributes.
        StaleOrder: another number of entries than rows; nothing was changed.
    """
    if not hasattr(sampler_output, "__dict__"):
        raise InvalidField(
            f"got a {type(sampler_output).__name__}; expected an object whose members can be set"
        )
    members = {name: value for name, value in vars(sampler_output).items() if value is not None}
    unknown = members.keys() - {*BY_ROW, *BY_TOKEN, *SUMS}
    if unknown:
        raise InvalidField(f"no rule to recover {sorted(unknown)} of a sampler's output")
    ids = _ids(index_to_batch_id)
    counts = members.get("token_num_per_batch")
    if counts is not None:
        counts = host_values(counts).reshape(-1)[: len(ids)]
    recovered = {
        name: outputs_by_slot(value, ids, _num_slots(ids), counts=counts)
        if name in BY_TOKEN
        else _by_id(name, value, ids)
        for name, value in members.items()
    }
    for name, value in recovered.items():
        setattr(sampler_output, name, value)


def _by_id(name: str, output: object, ids: Sequence[int]) -> object:
    """One output by row, by id; an array or list may be longer than there are rows."""
    if isinstance(output, list) or getattr(output, "ndim", None):
        output = output[: len(ids) + (name in SUMS)]  # type: ignore[index]  # has axes
    if name in SUMS:
        return sums_by_slot(output, ids, _num_slots(ids))
    found = outputs_by_slot(output, ids, _num_slots(ids))
    if name in COUNTS:
        return array_like(output, np.maximum(host_values(found), 0))
    return found


def _num_slots(ids: Sequence[int]) -> int:
    return max(ids, default=-1) + 1


def _member(output_cls: object, name: str) -> object:
    """Read a member of a mapping, of a batch, or by attribute."""
    if isinstance(output_cls, SharedInputs) and name not in SUMS:
        output_cls.check_by_row(name)
    if isinstance(output_cls, Mapping | SharedInputs):
        found = output_cls.get(name)
    else:
        found = getattr(output_cls, name, None)
    if found is None:
        raise InvalidField(f"the output has no {name!r} to recover")
    return found


def _ids(index_to_batch_id: Mapping[int, int]) -> list[int]:
    """batch_ids by row."""
    rows = range(len(index_to_batch_id))
    if index_to_batch_id.keys() != set(rows):
        raise InvalidField(
            f"rows {sorted(index_to_batch_id)} are not dense: condense before the forward"
        )
    return [index_to_batch_id[row] for row in rows]
