"""A step's outputs, of every shape that samplers give, read at once or after later reorders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from made_runs import make_prompt, make_workload, run

from vlbatch import BatchOrder, InputBatch, NumpyBackend
from vlbatch.batch import ProposerInputBatch, own
from vlbatch.cli.run_report import to_json
from vlbatch.errors import StaleOrder
from vlbatch.fields import row
from vlbatch.runner.outputs import StepOutputs
from vlbatch.speculative import num_logits

ARRAYS = ("numpy", "paddle", "torch")


@pytest.fixture(params=ARRAYS)
def make_array(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Constructor of one library's arrays; skipped where it is not installed."""
    library = pytest.importorskip(request.param)
    makers = {"numpy": "array", "paddle": "to_tensor", "torch": "tensor"}
    maker: Callable[[Any], Any] = getattr(library, makers[request.param])
    return maker


class Logprobs(NamedTuple):
    """Of each logit row: the best ids, their values, the rank of the chosen one."""

    ids: Any
    values: Any
    ranks: Any


class SamplerOutput(NamedTuple):
    """What a sampler gives for a step with drafts: one entry a logit row."""

    token_ids: Any
    logprobs: Logprobs | None
    sampling_mask: Any
    text: list[str]


def plain(value: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_replace"):
        return type(value)(*map(plain, value))
    return value.tolist() if hasattr(value, "tolist") else value


class Batch:
    """Five requests that move at every step, and a follower with a value of its own."""

    def __init__(self) -> None:
        self.batch: InputBatch[Any] = InputBatch(
            [row("x")], backend=NumpyBackend(), capacity=5, max_model_len=99, num_drafts=3
        )
        self.draft = ProposerInputBatch(self.batch, [own(row("y"))], backend=NumpyBackend())
        for number, (req_id, prompt_len) in enumerate({"a": 12, "b": 1, "c": 6, "d": 1}.items()):
            self.batch.add(req_id, prompt_len=prompt_len, fields={"x": number})
            self.draft.write(req_id, "y", 10 * number)

    def step(self, **scheduled: int) -> BatchOrder:
        order = self.batch.apply(self.batch.plan(scheduled))
        self.batch.advance(order)
        return order

    def outputs(self, order: BatchOrder, make_array: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Outputs of a step, and what each request must get: entries that name their request."""
        counts = num_logits(order).tolist()
        tags = [
            1000 * order.step + 100 * int(self.batch.read(r, "x")) + i
            for r, n in zip(order.req_ids, counts, strict=True)
            for i in range(n)
        ]

        def made(numbers: list[int], convert: Callable[[Any], Any]) -> SamplerOutput:
            return SamplerOutput(
                convert(numbers),
                Logprobs(
                    convert([[n, n + 1] for n in numbers]),
                    convert([[-float(n), -n - 0.5] for n in numbers]),
                    convert([n % 7 for n in numbers]),
                ),
                convert([[n % 2 == 0, n % 3 == 0, True] for n in numbers]),
                [f"token {n}" for n in numbers],
            )

        expected = {}
        at = 0
        for req_id, count in zip(order.req_ids, counts, strict=True):
            expected[req_id] = made(tags[at : at + count], list)
            at += count
        return made(tags, make_array), expected


@pytest.mark.parametrize("late", [0, 1, 2])
def test_outputs_of_any_shape_find_their_request(
    make_array: Callable[[Any], Any], late: int
) -> None:
    """Tokens, logprobs (ids, values, ranks), masks and texts of unequal length, read late too.

    FastDeploy I16, I19, I20, I21: ranks, masks and lists were left in row order, and late outputs
    were mapped with the next step's order.
    """
    state = Batch()
    waiting: list[tuple[BatchOrder, SamplerOutput, dict[str, Any]]] = []
    rows_then: list[tuple[str | None, ...]] = []
    moved = 0
    steps: list[dict[str, int]] = [
        {"a": 4, "b": 1, "c": 4, "d": 1},
        {"d": 4, "b": 2, "a": 4},
        {"c": 2, "d": 1, "b": 4, "a": 1},
        {"a": 3, "c": 3},
        {"b": 1, "c": 1, "d": 4, "a": 4},
    ]
    for scheduled in (*steps, *[{}] * late):
        if scheduled:
            order = state.step(**scheduled)
            waiting.append((order, *state.outputs(order, make_array)))
            rows_then.append(state.batch.rows)
        if len(waiting) > late or not scheduled:
            order, outputs, expected = waiting.pop(0)
            moved += rows_then.pop(0) != state.batch.rows
            got = order.restore(outputs, counts=num_logits(order))
            assert got.keys() == expected.keys()
            assert {r: plain(part) for r, part in got.items()} == expected
    assert not waiting
    assert (moved > 0) == (late > 0)


def test_late_outputs_after_departures() -> None:
    """Outputs name who they belong to, gone or back again; ranks tell the lives apart."""
    state = Batch()
    batch = state.batch
    order = state.step(a=4, b=1, c=4, d=1)
    then = batch.admission_of(order)
    batch.preempt("b")
    batch.remove("c")
    batch.add("e", prompt_len=3, fields={"x": 4})
    batch.resume("b")
    state.step(e=3, b=2)

    assert order.restore(list(order.req_ids)) == {r: r for r in "abcd"}
    same = batch.admission_of(order) == then
    assert dict(zip(order.req_ids, same.tolist(), strict=True)) == {
        "a": True, "b": False, "c": False, "d": True,
    }  # fmt: skip
    assert batch.slot_of("e") in order.slots, "the slot is taken again"


def test_outputs_of_another_step_are_refused() -> None:
    """Counts of one step do not fit the outputs of another."""
    state = Batch()
    first = state.step(a=4, b=1, c=6, d=1)
    second = state.step(a=4, b=4, d=4)
    with pytest.raises(StaleOrder, match="another step"):
        first.restore(np.zeros(8), counts=num_logits(first))
    assert second.restore(np.zeros(8), counts=num_logits(second)).keys() == {"a", "b", "d"}


def test_step_outputs() -> None:
    """The newest token of a row is the one after its accepted drafts; progress ends before it."""
    state = Batch()
    state.step(a=4, b=1, c=6, d=1)
    order = state.step(d=4, b=2, c=1, a=3)
    assert order.req_ids == ("d", "b", "c", "a")
    logits = np.eye(20, dtype=np.float32)[[7, 8, 11, 12, 5, 6, 3]]
    outputs = StepOutputs(
        number=1, order=order, admission=state.batch.admission_of(order),
        token_ids=np.array([1, 7, 8, 9, 2, 4, 3, 0, 0, 0]), positions=np.zeros((3, 10)),  # type: ignore[arg-type]
        logits=logits, hidden=None, ahead=None,
    )  # fmt: skip

    assert outputs.sampled.tolist() == [7, 8, 11, 12, 5, 6, 3]
    assert outputs.accepted.tolist() == [2, 0, 0, 0]
    assert outputs.newest.tolist() == [11, 5, 3, -1]
    assert outputs.stops.tolist() == [1 + 3, 1 + 1, 6 + 1, 4 + 3]


def test_json_of_a_run() -> None:
    """The outcome of a run says what was drafted, accepted and saved."""
    outcome = run(make_workload({"a": make_prompt(5)}, max_tokens=4))
    results = list(outcome.results.values())
    counters = outcome.runner.counters
    counters.drafted, counters.accepted = 5, 3
    results[0].steps = [0, 1, 1, 1, 2]

    assert to_json(results, outcome.runner, None, [])["speculative"] == {
        "drafted": 5, "accepted": 3, "steps_saved": 2,
    }  # fmt: skip
