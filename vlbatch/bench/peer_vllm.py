"""vLLM's own V1 ``InputBatch``. Importing this module imports vLLM; written against 0.33."""

# vLLM is not there when types are checked
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import os
from importlib.metadata import version
from inspect import signature
from typing import Any

import numpy as np
import numpy.typing as npt

from vlbatch.bench.workload import PROMPT_LEN, Workload
from vlbatch.errors import MissingDependency
from vlbatch.runner._quiet import quiet_libraries

_INSTALL = "pip install 'vllm==0.33.*'"
_BLOCK_SIZE = 16

# without it a build for CUDA asks for pinned memory, which needs a driver
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

try:
    with quiet_libraries():
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.v1.attention.backends.utils import reorder_batch_to_split_decodes_and_prefills
        from vllm.v1.core.sched.output import SchedulerOutput
        from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
except ImportError as error:
    raise MissingDependency(f"--peer vllm needs vLLM: {_INSTALL} (got: {error})") from error


class VllmBatch:
    """vLLM's batch on the CPU, ordered by vLLM's own function.

    It moves its own rows and not FastDeploy's: tokens, a block table, numbers and sampling
    parameters. Sampling metadata is not rebuilt.

    Raises:
        MissingDependency: the batch of the installed version takes other arguments.
    """

    def __init__(self, work: Workload) -> None:
        self._number_of = {f"r{number}": number for number in range(work.num_reqs)}
        self._scheduled = SchedulerOutput.make_empty()
        self._scheduled.num_scheduled_tokens = dict.fromkeys(self._number_of, 1)
        self._batch = _empty_batch(work)
        for req_id, number in self._number_of.items():
            request = CachedRequestState(
                req_id=req_id,
                prompt_token_ids=list(range(PROMPT_LEN)),
                mm_features=[],
                sampling_params=SamplingParams(temperature=0.0),
                generator=None,
                block_ids=([2 * number, 2 * number + 1],),
                num_computed_tokens=0,
                output_token_ids=[],
            )
            self._batch.add_request(request)

    @property
    def rows(self) -> list[int]:
        """Row -> request."""
        return [self._number_of[req_id] for req_id in self._batch.req_ids]

    def step(self, decode: npt.NDArray[np.bool_]) -> None:
        """Set progress and reorder; then drop the record of moves, which grows otherwise."""
        computed = np.where(decode[self.rows], PROMPT_LEN, PROMPT_LEN - 1)
        self._batch.num_computed_tokens_cpu[: len(computed)] = computed
        reorder_batch_to_split_decodes_and_prefills(self._batch, self._scheduled)
        self._batch.batch_update_builder.reset()


def _empty_batch(work: Workload) -> Any:  # Any: vLLM's class, see above
    sizes = work.sizes
    arguments = {
        "max_num_reqs": work.num_reqs,
        "max_model_len": sizes.max_model_len,
        "max_num_batched_tokens": sizes.max_model_len,
        "device": torch.device("cpu"),
        "vocab_size": sizes.vocab_size,
        "block_sizes": [_BLOCK_SIZE],
        "max_num_blocks_per_req": [sizes.max_model_len // _BLOCK_SIZE],
        "num_spec_tokens": sizes.num_draft_tokens,
    }
    try:
        signature(InputBatch).bind(**arguments)
    except TypeError as error:
        raise MissingDependency(
            f"--peer vllm needs vLLM's InputBatch of another version than {version('vllm')}: "
            f"{_INSTALL} (got: {error})"
        ) from error
    return InputBatch(**arguments)
