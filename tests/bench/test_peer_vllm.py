"""``--peer vllm``, on a stand-in that has exactly what is used of vLLM 0.33's interface.

The real package is too large for a test environment; where it is installed, it is run too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from vlbatch.bench.peers import RowMethod
from vlbatch.bench.reorder import methods, run_reorder
from vlbatch.bench.workload import Workload
from vlbatch.errors import MissingDependency


@dataclass
class Request:
    req_id: str
    prompt_token_ids: list[int]
    mm_features: list[object]
    sampling_params: object
    generator: None
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    output_token_ids: list[int]


class Batch:
    """Requests in rows; keeps what it was given."""

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        device: object,
        vocab_size: int,
        block_sizes: list[int],
        max_num_blocks_per_req: list[int],
        logitsprocs: object = None,
        num_spec_tokens: int = 0,
    ) -> None:
        self.max_blocks = max_num_blocks_per_req[0]
        self.block_size = block_sizes[0]
        self.requests: list[Request] = []
        self.num_computed_tokens_cpu = np.zeros(max_num_reqs, dtype=np.int32)
        self.batch_update_builder = SimpleNamespace(reset=lambda: self.moved.clear())
        self.moved: list[str] = []

    @property
    def req_ids(self) -> list[str]:
        return [request.req_id for request in self.requests]

    def add_request(self, request: Request) -> None:
        (blocks,) = request.block_ids
        assert len(request.prompt_token_ids) <= len(blocks) * self.block_size
        assert len(blocks) <= self.max_blocks
        self.requests.append(request)


@dataclass
class Scheduled:
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)

    @classmethod
    def make_empty(cls) -> Scheduled:
        return cls()


def reorder(batch: Batch, scheduled: Scheduled, decode_threshold: int = 1) -> bool:
    """Decodes (one token, the whole prompt computed) first."""
    rows = range(len(batch.requests))
    is_decode = [
        scheduled.num_scheduled_tokens[batch.requests[row].req_id] <= decode_threshold
        and batch.num_computed_tokens_cpu[row] >= len(batch.requests[row].prompt_token_ids)
        for row in rows
    ]
    order = sorted(rows, key=lambda row: not is_decode[row])
    batch.moved += [batch.requests[row].req_id for row in order]
    batch.requests = [batch.requests[row] for row in order]
    batch.num_computed_tokens_cpu[: len(order)] = batch.num_computed_tokens_cpu[order]
    return True


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Modules named as vLLM's; yields the one of the batch."""
    pytest.importorskip("torch")
    members: dict[str, dict[str, object]] = {
        "vllm.sampling_params": {"SamplingParams": SimpleNamespace},
        "vllm.v1.attention.backends.utils": {
            "reorder_batch_to_split_decodes_and_prefills": reorder
        },
        "vllm.v1.core.sched.output": {"SchedulerOutput": Scheduled},
        "vllm.v1.worker.gpu_input_batch": {"CachedRequestState": Request, "InputBatch": Batch},
    }
    for path, found in members.items():
        names = path.split(".")
        for depth in range(1, len(names) + 1):
            name = ".".join(names[:depth])
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[path].__dict__.update(found)
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    sys.modules.pop("vlbatch.bench.peer_vllm", None)
    yield sys.modules["vllm.v1.worker.gpu_input_batch"]
    sys.modules.pop("vlbatch.bench.peer_vllm", None)


def check_decodes_first(method: RowMethod, num_reqs: int) -> None:
    rng = np.random.default_rng(3)
    for _ in range(6):
        decode = rng.integers(0, 2, num_reqs).astype(np.bool_)
        method.step(decode)

        flags = decode[method.rows].tolist()
        assert flags == sorted(flags, reverse=True)
        assert sorted(method.rows) == list(range(num_reqs))


@pytest.mark.usefixtures("stand_in")
def test_decodes_first() -> None:
    """Progress reaches vLLM's rows, and rows are read back as requests."""
    method = methods(Workload.make(24), "vllm")["vllm"]

    check_decodes_first(method, 24)
    assert method._batch.moved == []  # type: ignore[attr-defined]  # of the stand-in


@pytest.mark.usefixtures("stand_in")
def test_ratio_only_if_asked_for() -> None:
    """``ratios`` has ``vllm`` with the peer, and only then."""
    asked = run_reorder(16, rounds=1, peer="vllm").facts["ratios"]
    plain = run_reorder(16, rounds=1).facts["ratios"]

    assert isinstance(asked, dict)
    assert isinstance(plain, dict)
    assert asked.keys() - plain.keys() == {"vllm"}


def test_batch_of_another_version(stand_in: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that wants other arguments is refused by name, not called."""

    class Older(Batch):
        def __init__(self, *, pin_memory: bool, **rest: object) -> None:
            raise AssertionError

    monkeypatch.setattr(stand_in, "InputBatch", Older)
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.20.2")

    with pytest.raises(MissingDependency, match=r"0\.20\.2.*vllm==0\.33.*pin_memory"):
        methods(Workload.make(8), "vllm")


def test_the_real_one() -> None:
    """VLLM's own batch puts decodes first when driven from here."""
    pytest.importorskip("vllm")

    check_decodes_first(methods(Workload.make(24), "vllm")["vllm"], 24)
