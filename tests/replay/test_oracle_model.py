"""The oracle itself, against values worked out by hand: cache, rows, fields, schedules."""

from __future__ import annotations

import pytest

from vlbatch.replay.oracle import (
    FieldRule,
    Finding,
    ObservedState,
    ObservedStep,
    Oracle,
    OracleItem,
    OracleSettings,
)
from vlbatch.replay.oracle.cache import OracleCache, OracleEntry
from vlbatch.replay.oracle.fields import UNCHECKED, OracleFields, same_value
from vlbatch.replay.oracle.requests import DECODE, EXTEND, PREFILL
from vlbatch.replay.oracle.rows import OracleRows


def item(key: str, offset: int, length: int, mask: str | None = None) -> OracleItem:
    """An image with one row of cells."""
    places = None if mask is None else tuple(c == "1" for c in mask)
    count = length if places is None else sum(places)
    return OracleItem(key, "image", offset, length, (1, 1, count), places)


class TestCache:
    def test_accounting(self) -> None:
        """Used + free = budget; reclaimable = free and what nobody refers to."""
        cache = OracleCache(16)
        cache.entries[("X", 0)] = OracleEntry(6, ready=True)
        cache.entries[("Y", 0)] = OracleEntry(4, ready=True)
        cache.refer(("X", 0), ("A", 0))
        cache.refer(("X", 0), ("A", 1))
        cache.settle(("Y", 0))
        assert (cache.used, cache.free, cache.reclaimable) == (10, 6, 10)

        cache.release(("X", 0), ("A", 0))
        cache.release(("X", 0), ("A", 0))
        assert cache.reclaimable == 10
        cache.release(("X", 0), ("A", 1))
        assert cache.reclaimable == 16
        assert list(cache.unused) == [("Y", 0), ("X", 0)]

    def test_weights(self) -> None:
        """Entries of old weights go at once, or with their last reference."""
        cache = OracleCache(16)
        for key in ("X", "Y"):
            cache.entries[(key, 0)] = OracleEntry(4, ready=True)
        cache.refer(("X", 0), ("A", 0))
        cache.settle(("Y", 0))

        cache.set_epoch(1)
        assert list(cache.entries) == [("X", 0)]
        cache.release(("X", 0), ("A", 0))
        assert cache.entries == {}


class TestRows:
    def test_stable(self) -> None:
        """Decode, extend, prefill, idle; relative order kept, newcomers last by arrival."""
        rows = OracleRows("split", stable=True)
        rows.rows = ["A", "B", "C", None, "E"]
        rows.enter("N")  # takes the hole
        rows.enter("M")
        regions = {"A": EXTEND, "B": DECODE, "N": EXTEND, "E": EXTEND, "M": PREFILL}

        found = rows.arrange(regions, ["B", "A", "E", "N", "M"], ["C"])

        assert found == []
        assert (rows.moved, rows.moved_busy) == (4, 3)  # B, A, E and the idle C

    def test_stable_is_unique(self) -> None:
        """Any other order is wrong, also one by region."""
        rows = OracleRows("split", stable=True)
        rows.rows = ["A", "B"]

        found = rows.arrange({"A": DECODE, "B": DECODE}, ["B", "A"], [])

        assert found == [Finding("order of rows", ["A", "B"], ["B", "A"])]

    @pytest.mark.parametrize(
        ("seen", "what"),
        [
            (["C", "B", "A"], None),  # C takes A's row, B stays
            (["B", "C", "A"], "row"),  # B moved though its row is a decode's
            (["A", "B", "C"], "order of rows, in any order by region"),
            (["C", "B"], "order of rows, in any order by region"),
        ],
    )
    def test_fewest_moves(self, seen: list[str], what: str | None) -> None:
        """Without a stable order any order by region will do that moves nobody needlessly."""
        rows = OracleRows("split", stable=False)
        rows.rows = ["A", "B", "C"]

        found = rows.arrange({"A": PREFILL, "B": DECODE, "C": DECODE}, seen, [])

        assert [f.what for f in found] == ([] if what is None else [what])

    def test_two_regions_and_none(self) -> None:
        """``two`` has decodes in front, ``arrival`` no regions."""
        regions = {"A": PREFILL, "B": EXTEND, "C": DECODE}
        for policy, order in (("two", ["C", "A", "B"]), ("arrival", ["A", "B", "C"])):
            rows = OracleRows(policy, stable=True)
            rows.rows = ["A", "B", "C"]
            assert rows.arrange(regions, order, []) == []


class TestFields:
    RULES = [  # noqa: RUF012 (read only)
        FieldRule("tag"),
        FieldRule("count", default=5, kept=False),
        FieldRule("peer", holds="request"),
    ]

    def test_preempted(self) -> None:
        """What is kept is kept, the rest has its default, pointers point to nobody."""
        fields = OracleFields(self.RULES, 4)
        fields.enter("A", {"tag": 7, "count": 9})
        fields.enter("B", {"tag": 8})
        fields.point("A", "peer", "B")
        assert fields.expected("A", {"B": 1, "A": 2}) == {"tag": 7, "count": 9, "peer": 1}

        fields.preempt("A")
        assert fields.expected("A", {"A": 0, "B": 1}) == {"tag": 7, "count": 5, "peer": -1}

    def test_pointer_to_someone_who_left(self) -> None:
        """It is -1 after the next step at the latest, also if someone else took the row."""
        fields = OracleFields(self.RULES, 4)
        fields.enter("A", {})
        fields.enter("B", {})
        fields.point("A", "peer", "B")
        fields.write_ring(["B", "A"])
        fields.leave("B")
        assert fields.expected("A", {"A": 0})["peer"] is UNCHECKED
        assert fields.expected_ring({"A": 0}) == [UNCHECKED, 0]

        fields.arranged()
        assert fields.expected("A", {"C": 0, "A": 1})["peer"] == -1
        assert fields.expected_ring({"C": 0, "A": 1}) == [-1, 1]

    def test_values(self) -> None:
        """Floats are compared as float32 keeps them, everything else exactly."""
        assert same_value(0.7, 0.699999988079071)
        assert not same_value(0.7, 0.70001)
        assert same_value([1, [2.0]], [1, [2.0]])
        assert not same_value([1], [1, 2])
        assert not same_value({"tag": 1}, {"tag": 2})


class TestFit:
    def make(self, **settings: object) -> Oracle:
        """R: L=20, item (8, 6, X); P: L=8, item (0, 6, W)."""
        oracle = Oracle(OracleSettings(**settings))  # type: ignore[arg-type]  # test data
        oracle.add("R", 20, [item("X", 8, 6)])
        oracle.add("P", 8, [item("W", 0, 6)])
        return oracle

    def test_encode_budget(self) -> None:
        """What others use up of a step's budget shortens the chunk, by the look-ahead too (B16)."""
        assert self.make(encode_rows=6).fit({"P": 8, "R": 20}) == {"P": 8, "R": 8}
        assert self.make(encode_rows=6, lookahead=1).fit({"P": 8, "R": 20}) == {"P": 8, "R": 7}
        assert self.make(lookahead=1).fit({"P": 8, "R": 8}) == {"P": 8, "R": 8}

    def test_cache(self) -> None:
        """What does not fit the cache shortens the chunk; the first in the schedule goes first."""
        assert self.make(cache_rows=8).fit({"P": 8, "R": 20}) == {"P": 8, "R": 8}
        assert self.make(cache_rows=8).fit({"R": 20, "P": 8}) == {"R": 20, "P": 0}
        assert self.make(cache_rows=12).fit({"R": 20, "P": 8}) == {"R": 20, "P": 8}

    def test_whole_items(self) -> None:
        """A chunk ends in front of an item that it would cut (B61)."""
        oracle = self.make(whole_items=True)
        assert [oracle.fit({"R": n})["R"] for n in (7, 8, 9, 13, 14, 20)] == [7, 8, 8, 8, 14, 20]

    def test_limits_of_progress(self) -> None:
        """Never more than remains: the prompt, or one token and the drafts."""
        oracle = self.make(num_drafts=2)
        assert oracle.fit({"R": 100}) == {"R": 20}
        oracle.requests["R"].computed = 20
        assert oracle.fit({"R": 100}) == {"R": 3}

    def test_own_references_are_given_up(self) -> None:
        """A request that cannot move gives up what it does not need yet."""
        oracle = Oracle(OracleSettings(cache_rows=8))
        oracle.add("A", 20, [item("X", 1, 4), item("Y", 6, 8), item("X", 15, 4)])
        seen = ObservedStep(order=["A"], regions=(0, 0, 1), encoded=[("X", 0)])
        oracle.step({"A": 6}, seen)
        assert oracle.cache.entries[("X", 0)].references == {("A", 2)}

        assert oracle.fit({"A": 14}) == {"A": 9}  # Y in place of X, which is encoded again later


RIGHT = [(2 + j, ("X", j, 0)) for j in range(4)]
"""Features of the step below: token of the step, and what it gets."""


class TestStep:
    def step(self, **changes: object) -> list[Finding]:
        """A: L=8, item (2, 4, X), whole prompt in one step; one thing was seen differently."""
        oracle = Oracle(OracleSettings())
        oracle.add("A", 8, [OracleItem("X", "image", 2, 4, (1, 2, 2))])
        right: dict[str, object] = {
            "order": ["A"],
            "regions": (0, 0, 1),
            "encoded": [("X", 0)],
            "features": [RIGHT],
            "positions": [
                [0, 1, 2, 2, 2, 2, 4, 5],
                [0, 1, 2, 2, 3, 3, 4, 5],
                [0, 1, 2, 3, 2, 3, 4, 5],
            ],
            "token_indices": list(range(8)),
            "restored": {"A": "A"},
        }
        return oracle.step({"A": 8}, ObservedStep(**{**right, **changes}))  # type: ignore[arg-type]

    def test_right(self) -> None:
        """Nothing is found where everything is right."""
        assert self.step() == []

    @pytest.mark.parametrize(
        ("changes", "what", "table"),
        [
            ({"features": [[(2 + j, ("X", 3 - j, 0)) for j in range(4)]]}, "features", 4),
            ({"features": [[(2 + j, ("X", j, 1)) for j in range(4)]]}, "features", 4),
            ({"features": [[(3 + j, ("X", j, 0)) for j in range(4)]]}, "features", 5),
            ({"features": [[(2 + j, ("X", j, 0)) for j in range(3)]]}, "features", 1),
            ({"features": [[(2, ("X", 0, 0)), *RIGHT]]}, "features", 1),
            ({"features": [[*RIGHT, (9, ("X", 0, 0))]]}, "features", 1),
            ({"encoded": []}, "encoded keys", 0),
            ({"hits": [("X", 0)]}, "keys found ready", 0),
            ({"failed": {"A": "EncodeFailed"}}, "failed requests", 0),
            ({"regions": (0, 1, 0)}, "regions", 0),
            ({"moved": 1}, "requests that moved", 0),
            ({"token_indices": list(range(1, 9))}, "token indices", 0),
            ({"positions": [[0, 1, 2, 3, 4, 5, 6, 7]] * 3}, "position of token 3", 0),
            ({"positions": [[0]] * 3}, "number of positions", 0),
            ({"evicted": [("Y", 0)]}, "entries evicted without need", 0),
            ({"restored": {"A": "B"}}, "restored outputs", 0),
        ],
    )  # fmt: skip
    def test_wrong(self, changes: dict[str, object], what: str, table: int) -> None:
        """Each thing seen wrongly is found, with a line for every token concerned."""
        found = self.step(**changes)

        assert found
        assert found[0].what.startswith(what)
        assert len(found[0].table) == table

    def test_given_up(self) -> None:
        """Given up with X encoded: A refers to X and not to Y, and has computed nothing."""
        oracle = Oracle(OracleSettings())
        oracle.add("A", 9, [item("X", 1, 2), item("Y", 4, 3)])
        for encoded, what in (([("X", 0), ("Y", 0)], ["encoded keys"]), ([("X", 0)], [])):
            findings = oracle.step({"A": 9}, ObservedStep(encoded=encoded), abandoned=["X"])
            assert [finding.what for finding in findings] == what
            assert {key: e.references for key, e in oracle.cache.entries.items()} == {
                ("X", 0): {("A", 0)}
            }
            assert (oracle.requests["A"].held, oracle.requests["A"].computed) == ({0: ("X", 0)}, 0)
            oracle.cache.entries.clear()
            oracle.requests["A"].held.clear()

    def test_eviction(self) -> None:
        """Entries in use stay; the longest unused goes first; nothing goes without need."""
        for victims, what in (
            ([("X", 0)], None),
            ([("Y", 0)], "entry evicted first"),
            ([("Z", 0)], "entry evicted"),
            ([], "entry evicted"),
            ([("X", 0), ("Y", 0)], "entries evicted without need"),
        ):
            oracle = Oracle(OracleSettings(cache_rows=6))
            oracle.add("A", 20, [item("Z", 1, 2)])
            oracle.add("B", 20, [item("W", 1, 2)])
            for clock, key in enumerate(("X", "Y")):
                oracle.cache.entries[(key, 0)] = OracleEntry(2, ready=True)
                oracle.cache.unused[(key, 0)] = clock
            oracle.step({"A": 2}, ObservedStep(order=["A"], idle=["B"], encoded=[("Z", 0)]))
            seen = ObservedStep(order=["B"], idle=["A"], encoded=[("W", 0)], evicted=victims)
            found = [f.what for f in oracle.step({"B": 2}, seen)]

            assert (found[0] == what) if what else not any("evict" in w for w in found), victims


class TestState:
    def test_nothing_seen(self) -> None:
        """A request that the library does not have is found at once."""
        oracle = Oracle(OracleSettings())
        oracle.add("A", 8, [])

        found = oracle.compare(ObservedState())

        assert [f.what for f in found] == ["rows", "live requests"]

    @pytest.mark.parametrize(
        ("name", "value", "what"),
        [
            ("slots", {"A": 3}, "slot"),
            ("progress", {"A": (8, 0, 1)}, "prompt, computed, confirmed tokens"),
            ("stored", {"A": {"tag": 2}}, "field 'tag'"),
            ("values", {"A": {"tag": 2}}, "field 'tag' as read"),
            ("known_tokens", {"A": 9}, "tokens with a known id"),
            ("deltas", {"A": 1}, "delta"),
            ("followed", ["B"], "entry 0 of the list that follows"),
            ("usage", (1, 15, 16), "used, free, reclaimable feature rows"),
            ("entries", {("X", 0): (4, True, frozenset())}, "cache entry ('X', 0)"),
            ("mirror", [("X", 0)], "mirror of the cache"),
            ("whole", {"ring": [0, -1]}, "ring of rows"),
            ("preempted", ["B"], "preempted requests"),
        ],
    )
    def test_each_part_is_compared(self, name: str, value: object, what: str) -> None:
        """One wrong part is found and named."""
        oracle = Oracle(OracleSettings(capacity=2, cache_rows=16), [FieldRule("tag")])
        oracle.add("A", 8, [], values={"tag": 1})
        right: dict[str, object] = {
            "rows": ["A"],
            "slots": {"A": 0},
            "progress": {"A": (8, 0, 0)},
            "stored": {"A": {"tag": 1}},
            "known_tokens": {"A": 8},
            "deltas": {"A": 0},
            "followed": ["A", None],
            "usage": (0, 16, 16),
            "whole": {"ring": [-1, -1]},
        }
        assert oracle.compare(ObservedState(**right)) == []  # type: ignore[arg-type]

        found = oracle.compare(ObservedState(**{**right, name: value}))  # type: ignore[arg-type]

        assert [f.what[: len(what)] for f in found] == [what]
