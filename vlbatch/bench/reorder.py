"""Plan and apply one step's row order: here, and by the methods that engines use today."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from vlbatch.backends import make_backend
from vlbatch.batch import InputBatch
from vlbatch.bench.harness import Outcome, Timing, measure
from vlbatch.bench.peers import CycleSwaps, IndexSelect, PairwiseSwaps, RowMethod, SortGather
from vlbatch.bench.workload import PROMPT_LEN, Workload
from vlbatch.integrations.fastdeploy.fields import declare_fields

NUM_REQS = 256

PEERS = ("fastdeploy", "v1", "v2", "index_select", "vllm")


class Ours:
    """``InputBatch.plan`` and ``apply`` on one backend."""

    def __init__(self, work: Workload, backend: str = "numpy") -> None:
        self.batch: InputBatch[Any] = InputBatch(
            declare_fields(work.sizes),
            backend=make_backend(backend),
            capacity=work.num_reqs,
            max_model_len=work.sizes.max_model_len,
            num_drafts=work.sizes.num_draft_tokens,
        )
        tokens = np.arange(PROMPT_LEN)
        for number in range(work.num_reqs):
            self.batch.add(
                f"r{number}", prompt_len=PROMPT_LEN,
                fields={"token_ids_all": tokens, "input_ids": tokens},
            )  # fmt: skip
        self._before = np.full(work.num_reqs, PROMPT_LEN - 1)
        self._schedule = {f"r{number}": 1 for number in range(work.num_reqs)}
        self.batch.apply(self.batch.plan(self._schedule))

    def step(self, decode: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        """Set progress by hand, then plan and apply."""
        # slot == number: requests were admitted in order and none left
        np.add(self._before, decode, out=self.batch.progress.computed)
        self.batch.apply(self.batch.plan(self._schedule))

    @property
    def rows(self) -> list[int]:
        """Row -> request."""
        return [int(str(req_id)[1:]) for req_id in self.batch.rows]


def methods(work: Workload, peer: str | None = None) -> dict[str, RowMethod]:
    """Every method that this machine can run, ours first.

    Args:
        work: what they are timed on.
        peer: ``vllm`` for its own batch as well.

    Raises:
        MissingDependency: the peer is not installed, or not in a version that fits.
    """
    found: dict[str, RowMethod] = {
        "vlbatch": Ours(work),
        "v1": CycleSwaps(work),
        "v2": SortGather(work),
    }
    if peer == "vllm":
        from vlbatch.bench.peer_vllm import VllmBatch

        found["vllm"] = VllmBatch(work)
    for library, (make, select) in _tensor_libraries().items():
        found[f"fastdeploy {library}"] = PairwiseSwaps(work, make)
        found[f"index_select {library}"] = IndexSelect(work, make, select)
    if find_spec("paddle"):
        found["vlbatch paddle"] = Ours(work, "paddle")
    return found


def _tensor_libraries() -> dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]]:
    libraries: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {}
    if find_spec("paddle"):
        import paddle

        # Paddle lacks index_select for small integers: gather does the same
        libraries["paddle"] = (paddle.to_tensor, paddle.gather)
    if find_spec("torch"):
        import torch

        libraries["torch"] = (torch.tensor, lambda t, index: t.index_select(0, index))
    return libraries


def run_reorder(num_reqs: int = NUM_REQS, *, rounds: int = 100, peer: str | None = None) -> Outcome:
    """Time every method and check that each put decodes first.

    Returns:
        Timings, and ``ratios``: the peer's median over ours.

    Raises:
        MissingDependency: see ``methods``.
        AssertionError: a method left a prefill before a decode.
    """
    if find_spec("torch"):
        import torch

        torch.set_num_threads(1)  # arrays are small: threads cost more than they bring
    work = Workload.make(num_reqs)
    found = methods(work, peer)
    timings = measure({name: _on(work, method) for name, method in found.items()}, rounds=rounds)
    for name, method in found.items():
        _check_order(name, method, work)
    return Outcome(timings, {"num_reqs": num_reqs, "ratios": _ratios(timings)})


def _on(work: Workload, method: RowMethod) -> Callable[[int], None]:
    return lambda number: method.step(work.classes(number))


def _check_order(name: str, method: RowMethod, work: Workload) -> None:
    """One more round: a method that is fast and wrong is not timed."""
    decode = work.classes(0)
    method.step(decode)
    flags = decode[method.rows]
    if sorted(method.rows) != list(range(work.num_reqs)) or np.any(np.diff(flags.astype(int)) > 0):
        raise AssertionError(f"{name} did not put decodes first: {method.rows}")


def _ratios(timings: dict[str, Timing]) -> dict[str, float]:
    """Peer's median over ours; of a method in several libraries, its fastest."""
    ratios = {}
    for peer in PEERS:
        medians = [t.median for name, t in timings.items() if name.split()[0] == peer]
        if medians:
            ratios[peer] = min(medians) / timings["vlbatch"].median
    return ratios
