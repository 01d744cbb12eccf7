"""A whole step of bookkeeping, and its parts, for steady decode and for prefill with images."""

from __future__ import annotations

import numpy as np

from vlbatch.backends import NumpyBackend
from vlbatch.backends.dtypes import HostArray
from vlbatch.batch import InputBatch
from vlbatch.bench.harness import Outcome, measure
from vlbatch.bench.workload import Workload
from vlbatch.cache import EncoderCache
from vlbatch.features import FeatureStore
from vlbatch.integrations.fastdeploy.fields import declare_fields
from vlbatch.items import Item
from vlbatch.replay.audit import Auditor
from vlbatch.step import VLBatch

SIZES = (64, 256, 1024, 4096)
HIDDEN = 64
ITEM_ROWS = 16


def decoding_batch(num_reqs: int) -> VLBatch[HostArray]:
    """A batch in which every request decodes behind an image."""
    sizes = Workload.make(num_reqs).sizes
    batch = InputBatch(
        declare_fields(sizes), backend=NumpyBackend(), capacity=num_reqs, max_model_len=1024
    )
    cache = EncoderCache(max_rows=num_reqs * ITEM_ROWS)
    vl = VLBatch(batch, FeatureStore(cache), family="qwen2_vl")
    names = [f"r{number}" for number in range(num_reqs)]
    for name in names:
        item = Item(name, "image", 4, ITEM_ROWS, (1, 4, 4))
        vl.add(name, prompt_len=ITEM_ROWS + 8, items=[item])
    step = vl.begin(dict.fromkeys(names, ITEM_ROWS + 8))
    features = np.zeros((ITEM_ROWS, HIDDEN), dtype=np.float32)
    vl.encode(step, lambda tasks: [(features,) for _ in tasks])
    vl.complete(vl.arrange(step))
    return vl


class Decode:
    """One steady decode step after another."""

    def __init__(self, num_reqs: int) -> None:
        self.vl = decoding_batch(num_reqs)
        self.schedule = dict.fromkeys(self.vl.batch.req_ids, 1)
        self.ids = np.zeros(num_reqs, dtype=np.int64)
        self.positions = np.zeros((3, num_reqs), dtype=np.int64)

    def whole(self, _: int) -> None:
        """Plan, apply, features, positions, inputs, outputs' progress; then back one token."""
        vl = self.vl
        order = vl.arrange(vl.begin(self.schedule))
        vl.gather(order)
        vl.positions_of(order, out=self.positions)
        np.copyto(self.ids, vl.batch["next_tokens"][: order.num_reqs, 0])
        vl.complete(order)
        self._back()

    def plan_and_apply(self, _: int) -> None:
        """Nothing to move."""
        self.vl.batch.apply(self.vl.batch.plan(self.schedule))

    def _back(self) -> None:
        """Stay within max_model_len for as long as the bench runs."""
        progress = self.vl.batch.progress
        progress.computed -= 1
        progress.confirmed -= 1


def run_step(num_reqs: int = 256, *, rounds: int = 200) -> Outcome:
    """Time the parts of a steady decode step."""
    decode = Decode(num_reqs)
    order = decode.vl.batch.apply(decode.vl.batch.plan(decode.schedule))
    auditor = Auditor(decode.vl, every=1)
    timings = measure(
        {
            "plan + apply, nothing to move": decode.plan_and_apply,
            "features": lambda _: decode.vl.gather(order),
            "positions": lambda _: decode.vl.positions_of(order, out=decode.positions),
            "whole step": decode.whole,
        },
        rounds=rounds,
    )
    # apart: it reads so much memory that it would slow its neighbours
    timings |= measure({"audit of everything": lambda _: auditor.audit()}, rounds=rounds // 10)
    return Outcome(timings, {"num_reqs": num_reqs})


def run_sizes(*, rounds: int = 100) -> Outcome:
    """Cost of a whole decode step against the number of requests."""
    decodes = {n: Decode(n) for n in SIZES}
    timings = measure({str(n): decode.whole for n, decode in decodes.items()}, rounds=rounds)
    per_row = {n: timings[str(n)].median / n for n in SIZES}
    facts: dict[str, object] = {
        "per_row_us": {str(n): cost * 1e6 for n, cost in per_row.items()},
        "per_row_4096_over_256": per_row[4096] / per_row[256],
    }
    return Outcome(timings, facts)
