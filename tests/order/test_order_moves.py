"""Row moves as followers see them."""

from __future__ import annotations

import gc
import weakref

import numpy as np

from vlbatch.order import DECODE, HOLE, PREFILL, SideTable, place_rows, vacate_rows


class Thing:
    """An object that a weak reference can point to."""


def side_table(*entries: object) -> SideTable:
    table = SideTable(len(entries), default="-")
    table[:] = entries
    return table


def test_side_table_follows_a_chain() -> None:
    """Entries move by reference, all read before one is written (FastDeploy I3, M1)."""
    a, b, c, d = Thing(), Thing(), Thing(), Thing()
    table = side_table(a, b, c, d)
    classes = np.array([PREFILL, HOLE, DECODE, DECODE])
    table.follow(place_rows(classes, np.full(4, -1), stable=True))

    assert table[0] is c
    assert table[1] is d
    assert table[2] is a
    assert table[3] == "-"


def test_vacated_rows_take_the_default() -> None:
    """A row whose request left holds the default of its own table."""
    table = side_table("a", "b", "c")
    table.follow(vacate_rows(1, 3, np.zeros(3, dtype=np.bool_)))

    assert table == ["a", "-", "-"]


def test_side_table_lets_go() -> None:
    """An entry of a row that was vacated, or overwritten by a move, is not kept alive."""
    gone, overwritten = Thing(), Thing()
    table = side_table(overwritten, "b", gone)
    watched = weakref.ref(gone), weakref.ref(overwritten)
    del gone, overwritten
    table.follow(vacate_rows(2, 3, np.zeros(3, dtype=np.bool_)))
    table.follow(place_rows(np.array([HOLE, DECODE, HOLE]), np.full(3, -1)))
    gc.collect()

    assert table == ["b", "-", "-"]
    assert [ref() for ref in watched] == [None, None]


def test_vacate_rows_moves_nothing() -> None:
    """Clearing rows names them, maps them and older holes to -1, and leaves the others in place."""
    moves = vacate_rows(1, 3, np.array([True, False, False, False, False]))

    assert not len(moves.sources)
    assert moves.vacated.tolist() == [1, 2]
    assert moves.new_row_of.tolist() == [-1, -1, -1, 3, 4]
    assert (moves.num_moved, moves.is_identity) == (0, False)
    assert vacate_rows(0, 0, np.zeros(0, dtype=np.bool_)).is_identity
