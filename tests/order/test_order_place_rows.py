"""The order planner against brute force over all permutations, for up to seven rows."""

from __future__ import annotations

import random
from functools import cache
from itertools import permutations, product
from typing import NamedTuple

import numpy as np
import pytest

from vlbatch.order import DECODE, EXTEND, HOLE, IDLE, PREFILL, OrderPolicy, RowMoves, place_rows

POLICIES: tuple[OrderPolicy, ...] = ("split", "two", "arrival")

# policy -> class -> region, written out by hand: the oracle shares nothing with the planner
REGIONS: dict[OrderPolicy, dict[int, int]] = {
    "split": {DECODE: 0, EXTEND: 1, PREFILL: 2, IDLE: 3},
    "two": {DECODE: 0, EXTEND: 1, PREFILL: 1, IDLE: 3},
    "arrival": {DECODE: 0, EXTEND: 0, PREFILL: 0, IDLE: 3},
}


class Row(NamedTuple):
    """One row before the step: its class, and whether its request is new."""

    cls: int
    new: bool = False


ANY_ROW = [Row(c, new) for c in (DECODE, EXTEND, PREFILL, IDLE) for new in (False, True)]
ANY_ROW.append(Row(HOLE))
Rows = tuple[Row, ...]


def plan(rows: Rows, policy: OrderPolicy, *, stable: bool) -> RowMoves:
    """Ask the planner; newcomers are ranked against their row order."""
    classes = np.array([r.cls for r in rows], dtype=np.int64)
    ranks = [100 - i if r.new else -1 for i, r in enumerate(rows)]
    return place_rows(classes, np.array(ranks, dtype=np.int64), policy=policy, stable=stable)


def result_of(moves: RowMoves, num_rows: int) -> list[int | None]:
    """New row -> old row, by doing the moves one list entry at a time."""
    old: list[int | None] = list(range(num_rows))
    new = old.copy()
    for row in moves.vacated.tolist():
        new[row] = None
    for source, destination in zip(
        moves.sources.tolist(), moves.destinations.tolist(), strict=True
    ):
        new[destination] = old[source]
    while new and new[-1] is None:
        new.pop()
    return new


@cache
def all_orders(count: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    orders = list(permutations(range(count)))
    return np.array(orders, dtype=np.int64).reshape(len(orders), count)


def fewest_moves(rows: Rows, policy: OrderPolicy) -> int:
    """Fewest requests of the previous order that change row, over all correct orders."""
    live = np.array([i for i, r in enumerate(rows) if r.cls != HOLE], dtype=np.int64)
    region = np.array([REGIONS[policy].get(r.cls, -1) for r in rows], dtype=np.int64)
    known = np.array([not r.new for r in rows], dtype=np.bool_)
    orders = live[all_orders(len(live))]  # [orders, new row] -> old row
    regions = region[orders]
    orders = orders[(regions[:, 1:] >= regions[:, :-1]).all(axis=1)]
    moved = (orders != np.arange(len(live))) & known[orders]
    return int(moved.sum(axis=1).min())


def only_stable_order(rows: Rows, policy: OrderPolicy) -> list[int]:
    """New row -> old row if regions keep relative order, newcomers last by rank."""
    live = [i for i, r in enumerate(rows) if r.cls != HOLE]
    return sorted(
        live, key=lambda i: (REGIONS[policy][rows[i].cls], rows[i].new, -i if rows[i].new else i)
    )


def assert_right(rows: Rows, policy: OrderPolicy, *, stable: bool) -> None:
    """The moves make a correct order with the fewest moves, and describe it consistently."""
    moves = plan(rows, policy, stable=stable)
    got = result_of(moves, len(rows))
    live = [i for i, r in enumerate(rows) if r.cls != HOLE]

    assert sorted(i for i in got if i is not None) == live, (rows, moves)
    assert len(got) == len(live), (rows, moves)
    regions = [REGIONS[policy][rows[i].cls] for i in got if i is not None]
    assert regions == sorted(regions), (rows, moves)
    if stable:
        assert got == only_stable_order(rows, policy), (rows, moves)
    else:
        assert moves.num_moved == fewest_moves(rows, policy), (rows, moves)

    moved = [i for new, i in enumerate(got) if i is not None and i != new]
    assert sorted(moves.sources.tolist()) == sorted(moved), (rows, moves)  # each once, and no other
    assert moves.num_moved == sum(not rows[i].new for i in moved), (rows, moves)
    new_row = {i: new for new, i in enumerate(got) if i is not None}
    assert moves.new_row_of.tolist() == [new_row.get(i, -1) for i in range(len(rows))], (
        rows,
        moves,
    )
    assert moves.vacated.tolist() == list(range(len(live), len(rows))), (rows, moves)
    assert moves.is_identity == (not moved and len(live) == len(rows)), (rows, moves)


@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_batch_of_up_to_four_rows(policy: OrderPolicy, stable: bool) -> None:
    """All classes, holes and newcomers in all places: a right order, with the fewest moves.

    FastDeploy I6, I8, I9, I10 (holes close, whatever the rows), I11 (nothing but host integers
    decides), I12 (a hole or an idle row is no decode).
    """
    for count in range(5):
        for rows in product(ANY_ROW, repeat=count):
            assert_right(rows, policy, stable=stable)


@pytest.mark.parametrize("count", [5, 6])
def test_every_batch_of_known_requests(count: int) -> None:
    """All classes and holes in five and six rows, three regions: the fewest moves."""
    for classes in product(range(5), repeat=count):
        assert_right(tuple(map(Row, classes)), "split", stable=False)


@pytest.mark.parametrize("policy", POLICIES)
def test_seven_rows_of_decodes_prefills_and_holes(policy: OrderPolicy) -> None:
    """All decodes, prefills and holes in seven rows: the fewest moves."""
    for classes in product((DECODE, PREFILL, HOLE), repeat=7):
        assert_right(tuple(map(Row, classes)), policy, stable=False)


@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_random_batches_of_seven_rows(policy: OrderPolicy, stable: bool, seed: int) -> None:
    """Seven rows of any class, holes and newcomers among them."""
    choose = random.Random(seed)
    for _ in range(150):
        assert_right(tuple(choose.choices(ANY_ROW, k=7)), policy, stable=stable)


def test_a_row_in_its_region_stays() -> None:
    """Only the prefill among the decodes and the decode behind them change places."""
    rows = tuple(map(Row, (DECODE, PREFILL, DECODE, EXTEND, DECODE, PREFILL)))
    moves = plan(rows, "split", stable=False)

    assert moves.sources.tolist() == [4, 1]
    assert moves.destinations.tolist() == [1, 4]


def test_condense_and_split_are_one_plan() -> None:
    """Closing a hole and bringing a decode forward is one move of one row."""
    rows = tuple(map(Row, (DECODE, HOLE, PREFILL, DECODE)))
    moves = plan(rows, "split", stable=False)

    assert (moves.sources.tolist(), moves.destinations.tolist()) == ([3], [1])
    assert moves.vacated.tolist() == [3]
    assert moves.new_row_of.tolist() == [0, -1, 2, 1]


def test_moves_are_read_only() -> None:
    """What followers are handed cannot be changed by one of them."""
    moves = plan(tuple(map(Row, (PREFILL, HOLE, DECODE))), "split", stable=False)
    for array in (moves.sources, moves.destinations, moves.vacated, moves.new_row_of):
        assert array.dtype == np.int64
        assert not array.flags.writeable
    with pytest.raises(AttributeError):
        moves.num_moved = 0  # type: ignore[misc]  # that it is frozen is what is tested
