"""FastDeploy's batch, by its own names: change the import, keep the runner's code.

Owns: names, shapes and defaults of the upstream's fields, and the shapes in which its code expects
features and outputs. Never: orders rows, moves a field or caches a feature; the core does.
``docs/fastdeploy.md`` says what differs and why.
"""

from vlbatch.integrations.fastdeploy.access import LAUNCH_BUFFERS, SharedInputs
from vlbatch.integrations.fastdeploy.features import RequestFeatures
from vlbatch.integrations.fastdeploy.fields import FieldSizes, declare_fields
from vlbatch.integrations.fastdeploy.input_batch import InputBatch
from vlbatch.integrations.fastdeploy.items import items_of
from vlbatch.integrations.fastdeploy.proposer import ProposerInputBatch
from vlbatch.integrations.fastdeploy.recover import (
    recover_batch_index_for_output,
    recover_batch_index_for_sampler_output,
)
from vlbatch.integrations.fastdeploy.reorder import (
    ids_reorder_enabled,
    process_reorder,
    reorder_split_prefill_and_decode,
    reorder_split_prefill_and_decode_form_index_to_batch_id,
)
from vlbatch.integrations.fastdeploy.rows import RowMap

__all__ = [
    "LAUNCH_BUFFERS",
    "FieldSizes",
    "InputBatch",
    "ProposerInputBatch",
    "RequestFeatures",
    "RowMap",
    "SharedInputs",
    "declare_fields",
    "ids_reorder_enabled",
    "items_of",
    "process_reorder",
    "recover_batch_index_for_output",
    "recover_batch_index_for_sampler_output",
    "reorder_split_prefill_and_decode",
    "reorder_split_prefill_and_decode_form_index_to_batch_id",
]
