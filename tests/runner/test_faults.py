"""Each fault breaks what it says, once, and the comparison with each request alone names it."""

from __future__ import annotations

import numpy as np
import pytest
from made_runs import make_item, make_prompt, make_workload, random_workload, run

from vlbatch.errors import InvalidSetting
from vlbatch.features import FeatureInputs
from vlbatch.features.gather import Segment
from vlbatch.order import DECODE, PREFILL, BatchOrder
from vlbatch.runner import FAULTS, RunSettings, make_faults
from vlbatch.runner.state import moving_fields

NAMES = sorted(FAULTS)


@pytest.mark.parametrize("name", NAMES)
def test_every_fault_is_noticed(seed, name):
    """Where a fault happens in a random run the comparison finds it; where not, it is clean.

    Unless requests were preempted: what the fault broke may have been computed again.
    """
    for number in range(30):
        work = random_workload(np.random.default_rng([seed, 7, number]))
        faults = make_faults(name, work.settings)

        outcome = run(work, faults=faults)

        case = f"VLBATCH_SEED={seed}, {name}, {number=}"
        if not faults.happened:
            assert outcome.mismatches == [], case
        elif not outcome.runner.scheduler.num_preemptions:
            assert outcome.mismatches, case


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("swap-features", "logits differ"),
        ("shift-features", "logits differ"),
        ("shift-positions", "logits differ"),
        ("stale-row", "logits differ|field max_tokens is"),
        ("drop-field:block_table", "logits differ"),
        ("drop-field:next_token", "logits differ"),
        ("drop-field:max_tokens", "field max_tokens is|alone it"),
    ],
)
def test_the_first_mismatch_says_who_when_and_what(name, what):
    """The first mismatch has a request of the run, a step in which it sampled, and what differs."""
    items = [make_item(f"x{n}", (1, 2, 2)) for n in range(4)]
    prompts = {f"r{n}": make_prompt(n % 4, items[n % 4], 3, seed=n) for n in range(10)}
    work = make_workload(
        prompts, arrivals={f"r{n}": n // 2 for n in range(10)}, max_tokens=9, max_num_seqs=4,
        kv_blocks=40, chunk=6,
    )  # fmt: skip
    for n, request in enumerate(work.requests):
        object.__setattr__(request, "max_tokens", 3 + n % 4)
    faults = make_faults(name, work.settings)

    outcome = run(work, faults=faults)

    assert faults.happened
    assert 1 <= len(outcome.mismatches) <= 2  # the others are not touched
    first = outcome.mismatches[0]
    result = outcome.results[first.req_id]
    assert first.step in result.steps
    assert result.steps.index(first.step) == first.token
    assert any(part in first.what for part in what.split("|")), first.what


def test_no_fault_changes_nothing():
    """Without a name there is no fault, and it never happens."""
    faults = make_faults(None, RunSettings())

    assert not faults.happened
    assert run(make_workload({"a": make_prompt(4)}), faults=faults).mismatches == []


def test_without_an_occasion_nothing_happens():
    """A run of one request of text has no row to forget and no feature to swap."""
    for name in NAMES:
        if name != "shift-positions":
            faults = make_faults(name, RunSettings())

            assert run(make_workload({"a": make_prompt(4)}), faults=faults).mismatches == []
            assert not faults.happened


@pytest.mark.parametrize(
    "name", ["", "swap", "drop-field", "drop-field:", "drop-field:token_ids", "drop-field:bogus"]
)
def test_unknown_faults_are_refused(name):
    """A name that is no fault, or a field that never moves, is refused with the names there are."""
    with pytest.raises(InvalidSetting, match=r"swap-features, .*drop-field:max_tokens") as caught:
        make_faults(name, RunSettings())

    assert caught.value.setting == "inject"


def test_every_moving_field_can_be_dropped():
    """The names of drop-field are those of the declared fields that move."""
    dropped = {name.removeprefix("drop-field:") for name in NAMES if name.startswith("drop-field")}

    assert dropped == set(moving_fields(RunSettings()))


def make_features(*rows: int) -> FeatureInputs:
    """One segment a request, of so many rows, at consecutive tokens."""
    segments = tuple(
        Segment(f"r{n}", 0, f"content {n}", (0, count), (np.full((count, 2), n),))
        for n, count in enumerate(rows)
    )
    tokens = np.arange(sum(rows), dtype=np.int64)
    return FeatureInputs(tokens, segments, np.zeros(0, dtype=np.int64))


class TestFeatures:
    def test_swap(self):
        """The first two requests with as many rows of other content are swapped, once."""
        faults = make_faults("swap-features", RunSettings())
        inputs = make_features(2, 3, 2, 3)

        swapped = faults.features(inputs)

        assert [s.req_id for s in swapped.segments] == ["r2", "r1", "r0", "r3"]
        assert faults.features(inputs) is not swapped
        assert [s.req_id for s in faults.features(inputs).segments] == ["r0", "r1", "r2", "r3"]

    def test_shift(self):
        """The rows of one item go one token on; its last token's row comes first."""
        faults = make_faults("shift-features", RunSettings())
        inputs = make_features(1, 3, 2)

        assert faults.features(inputs).tokens.tolist() == [0, 2, 3, 1, 4, 5]
        assert inputs.tokens.tolist() == [0, 1, 2, 3, 4, 5]
        assert faults.features(inputs) is inputs


def test_shift_positions():
    """The positions of one chunk with media are one token late; decodes and text keep theirs."""
    faults = make_faults("shift-positions", RunSettings())
    one = np.ones(3, dtype=np.int64)
    order = BatchOrder(
        batch_id="b", step=0, policy="split", req_ids=("d", "text", "image"), idle=(),
        slots=np.arange(3), prompt_lens=4 * one, computed=np.array([4, 0, 0]),
        scheduled=np.array([1, 2, 3]), classes=np.array([DECODE, PREFILL, PREFILL]),
    )  # fmt: skip
    positions = np.array([[9, 0, 1, 0, 1, 1], [9, 0, 1, 0, 1, 1], [9, 0, 1, 0, 1, 2]])

    shifted = faults.positions(order, positions)

    assert shifted[2].tolist() == [9, 0, 1, 2, 0, 1]
    assert shifted[:, :3].tolist() == positions[:, :3].tolist()
    assert faults.positions(order, positions) is positions
