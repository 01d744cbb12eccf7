"""Every expectation: met, and not met, reported at its line with what was expected and got."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from replay_builders import Line, add, expect, image, replay_lines, step

from vlbatch.replay import Divergence

X = image("X", 2, (1, 2, 2))
TWO_REQUESTS = [
    add("A", 8, X),
    add("B", 4),
    step(A=4, B=4),
    step(A=4, B=1),  # B decodes in front of A
]
"""After it: order B, A; both moved; A got X[2..3] at 4 and 5; delta of A -2."""


def diverge(tmp_path: Path, lines: list[Line], **header: Any) -> Divergence:
    """Replay lines that must not pass."""
    result = replay_lines(tmp_path, lines, **header)
    assert result.error is None, result.error
    assert result.divergence is not None, "passed"
    return result.divergence


MET = [
    {"order": ["B", "A"]},
    {"regions": {"decode": 1, "extend": 1, "prefill": 0}},
    {"regions": {"extend": 1}},
    {"moved": 2},
    {"encoded": []},
    {"hits": []},
    {"hits": ["X"]},  # in use before
    {"features": {"A": [[4, "X", 2, 4]], "B": []}},
    {"features": {"A": [[5, "X", 3, 4], [4, "X", 2, 3]]}},
    {"features": {"not in the step": []}},
    {"positions": {"A": [[2, 2, 4, 5], [3, 3, 4, 5], [2, 3, 4, 5]]}},
    {"positions": {"B": [4]}},
    {"next_position": {"A": 6, "B": 5}},
    {"next_position": {"A": [6, 6, 6]}},
    {"delta": {"A": -2, "B": 0}},
    {"kv_index": {"A": [4, 5, 6, 7], "B": [4]}},
    {"cache": {"used": 4, "free": 1020, "reclaimable": 1024, "referenced": [], "present": ["X"]}},
    {"failed": []},
]


@pytest.mark.parametrize("expected", MET, ids=lambda e: "-".join(e))
def test_met(tmp_path: Path, expected: dict[str, Any]) -> None:
    """What the library does, in any of the forms that the format allows, passes."""
    result = replay_lines(tmp_path, [*TWO_REQUESTS, {"expect": expected}])

    assert result.status == "ok", str(result.divergence)


@pytest.mark.parametrize(
    ("expected", "key", "got"),
    [
        ({"order": ["A", "B"]}, "order", ["B", "A"]),
        ({"regions": {"extend": 2}}, "regions", {"decode": 1, "extend": 1, "prefill": 0}),
        ({"moved": 1}, "moved", 2),
        ({"encoded": ["X"]}, "encoded", []),
        ({"hits": ["Y"]}, "hits", []),
        ({"positions": {"B": [[4], [4], [5]]}}, "positions", [[4], [4], [4]]),
        (
            {"positions": {"A": [3, 3, 4, 5]}},
            "positions",
            [[2, 2, 4, 5], [3, 3, 4, 5], [2, 3, 4, 5]],
        ),
        ({"next_position": {"A": 7}}, "next_position", [6, 6, 6]),
        ({"next_position": {"Z": 7}}, "next_position", "no such request"),
        ({"delta": {"A": -3}}, "delta", -2),
        ({"delta": {"Z": 0}}, "delta", "no such request"),
        ({"kv_index": {"A": [2, 3, 4, 5]}}, "kv_index", [4, 5, 6, 7]),
        ({"cache": {"used": 8}}, "cache.used", 4),
        ({"cache": {"free": 1024}}, "cache.free", 1020),
        ({"cache": {"reclaimable": 1020}}, "cache.reclaimable", 1024),
        ({"cache": {"referenced": ["X"]}}, "cache.referenced", []),
        ({"cache": {"present": []}}, "cache.present", ["X"]),
        ({"failed": ["A"]}, "failed", []),
        ({"error": {"type": "BatchFull"}}, "error", "was accepted"),
        ({"fit": {"A": 1}}, "fit", "the event was no question, or was refused"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_not_met(tmp_path: Path, expected: dict[str, Any], key: str, got: object) -> None:
    """A wrong expectation is reported at its own line, with what really happened."""
    lines = [*TWO_REQUESTS, expect(moved=2), {"expect": expected}, step(A=1)]

    found = diverge(tmp_path, lines)

    assert (found.line, found.step, found.what, found.got) == (7, 2, key, got)


class TestFeatures:
    @pytest.mark.parametrize(
        ("runs", "token", "expected", "got"),
        [
            ([[4, "X", 1, 3]], 4, "(X, 1)", "(X, 2)"),
            ([[4, "Y", 2, 4]], 4, "(Y, 2)", "(X, 2)"),
            ([[4, "X", 2, 3]], 5, "-", "(X, 3)"),
            ([[4, "X", 2, 5]], 6, "(X, 4)", "-"),
            ([[5, "X", 3, 4], [4, "X", 2, 3], [5, "X", 2, 3]], 5, "(X, 2) and (X, 3)", "(X, 3)"),
            ([], 4, "-", "(X, 2)"),
        ],
    )
    def test_table(
        self, tmp_path: Path, runs: list[list[Any]], token: int, expected: str, got: str
    ) -> None:
        """Wrong features come with a table of the tokens that differ, and only these."""
        found = diverge(tmp_path, [*TWO_REQUESTS, expect(features={"B": [], "A": runs})])

        assert (found.line, found.req_id) == (6, "A")
        row = found.table[0]
        assert (row.req_id, row.token, row.expected, row.got) == ("A", token, expected, got)

    def test_masked_item(self, tmp_path: Path) -> None:
        """A run of a masked item goes over its true places, from the index on."""
        lines = [
            add(
                "A",
                12,
                {"key": "X", "offset": 2, "length": 6, "grid": [1, 2, 2], "embeds": "101101"},
            ),
            step(A=5),
            expect(features={"A": [[2, "X", 0, 2]]}),
            step(A=7),
            expect(features={"A": [[5, "X", 2, 4]]}),
        ]
        assert replay_lines(tmp_path, lines).status == "ok"

        found = diverge(tmp_path, [*lines[:2], expect(features={"A": [[2, "X", 0, 3]]})])
        assert [(r.token, r.expected, r.got) for r in found.table] == [(5, "(X, 2)", "-")]

    def test_repeated_key(self, tmp_path: Path) -> None:
        """Two occurrences of a key in one chunk are told apart by the index."""
        masked = {"key": "X", "offset": 8, "length": 5, "grid": [1, 2, 2], "embeds": "11011"}
        lines = [
            add("A", 14, X, masked),
            step(A=14),
            expect(features={"A": [[2, "X", 0, 4], [8, "X", 0, 4]]}),
        ]

        assert replay_lines(tmp_path, lines).status == "ok"


class TestEncodes:
    LINES = [  # noqa: RUF012 (read only)
        add("A", 8, X),
        step(A=2),
        add("B", 8, image("Y", 2, (1, 2, 2)), image("X", 6, (1, 1, 2))),
        add("C", 8, image("Y", 2, (1, 2, 2))),
        add("D", 8, image("Z", 2, (1, 2, 2))),
        {"fail_encode": ["Z"]},
        step(C=8, D=8, A=6),
    ]

    @pytest.mark.parametrize("encoded", [["Y", "X"], ["X", "Y"], ["Y", "Z", "X"]])
    def test_order(self, tmp_path: Path, encoded: list[str]) -> None:
        """Encodes may be listed by schedule or by row, and failed ones may be left out."""
        lines = [*self.LINES, expect(encoded=encoded, failed=["D"], order=["A", "C"])]
        result = replay_lines(tmp_path, lines)

        assert result.status == "ok", str(result.divergence)

    @pytest.mark.parametrize("encoded", [["Y"], ["Z"], ["X", "Y", "Y"], ["X", "Z", "Y"]])
    def test_other_lists(self, tmp_path: Path, encoded: list[str]) -> None:
        """Any other list is wrong."""
        found = diverge(tmp_path, [*self.LINES, expect(encoded=encoded)])

        assert (found.line, found.what, found.got) == (9, "encoded", ["Y", "X"])

    def test_hits(self, tmp_path: Path) -> None:
        """New hits must be listed; keys shared within the step, or in use, may be."""
        lines = [
            add("A", 8, X),
            step(A=8),
            add("B", 8, X),
            add("C", 8, image("Y", 2, (1, 2, 2))),
            add("D", 8, image("Y", 2, (1, 2, 2))),
            step(B=4, C=8, D=8),
        ]
        for hits in (["X"], ["X", "Y"]):
            result = replay_lines(tmp_path, [*lines, expect(encoded=["Y"], hits=hits)])
            assert result.status == "ok", str(result.divergence)
        for hits in ([], ["Y"]):
            found = diverge(tmp_path, [*lines, expect(hits=hits)])
            assert (found.line, found.got) == (8, ["X"])
        held = [*lines, step(B=4), expect(hits=[]), expect(hits=["X"])]
        assert replay_lines(tmp_path, held).status == "ok"


class TestAbandoned:
    """A cache of 8 rows; A holds X (4 rows), B needs X, Y (2 rows) and Z (2 rows)."""

    LINES = [  # noqa: RUF012 (read only)
        add("A", 8, X),
        step(A=3),
        add("B", 14, X, image("Y", 6, (1, 1, 2)), image("Z", 8, (1, 1, 2))),
        {"step": {"A": 1, "B": 14}, "abandon": ["Y"]},
    ]

    def replay(self, tmp_path: Path, *lines: Line) -> Divergence | None:
        return replay_lines(tmp_path, [*self.LINES, *lines], cache_rows=8).divergence

    def test_what_stays(self, tmp_path: Path) -> None:
        """What was encoded and found stays referred to, the rest goes back; nobody moves on."""
        first = expect(encoded=["Y"], hits=["X"], failed=[], order=["A", "B"], moved=0)
        cache = expect(cache={"used": 6, "reclaimable": 2, "referenced": ["X", "Y"]})
        again = [step(A=1, B=14), expect(encoded=["Z"], kv_index={"A": [3], "B": list(range(14))})]

        found = self.replay(tmp_path, first, cache, *again)

        assert found is None, str(found)

    def test_wrong_encodes(self, tmp_path: Path) -> None:
        """A file that says otherwise diverges at its line."""
        found = self.replay(tmp_path, expect(encoded=["Y", "Z"]))

        assert found is not None
        assert (found.line, found.step, found.what, found.got) == (6, 2, "encoded", ["Y"])

    def test_failed_encode(self, tmp_path: Path) -> None:
        """An encode that fails before the step is given up costs its request."""
        lines = [*self.LINES[:3], {"fail_encode": ["Y"]}, self.LINES[3]]
        lines += [expect(failed=["B"], encoded=[], order=["A"]), step(A=5)]

        result = replay_lines(tmp_path, lines, cache_rows=8)

        assert result.status == "ok", str(result.divergence)

    def test_drafts_are_counted_from_where_it_was(self, tmp_path: Path) -> None:
        """Without draft_tokens in the header, a step given up counts no tokens as computed."""
        lines = [add("A", 4), {"step": {"A": 4}, "abandon": []}, step(A=4), step(A=3)]
        lines += [{"ask": {"A": 10}}, expect(fit={"A": 3})]  # a token and two drafts

        result = replay_lines(tmp_path, lines)

        assert result.status == "ok", str(result.divergence)


class TestRefusals:
    LINES = [add("A", 8), step(A=4), step(A=5)]  # noqa: RUF012 (read only)

    @pytest.mark.parametrize(
        "error",
        [
            {"type": "InvalidSchedule", "req_id": "A"},
            {"type": "InvalidSchedule"},
            {"type": "VlbatchError", "req_id": "A"},
            {"req_id": "A"},
            "InvalidSchedule",
        ],
    )
    def test_expected(self, tmp_path: Path, error: dict[str, str] | str) -> None:
        """A refusal passes by its name or a base's, and the request if one is named."""
        result = replay_lines(tmp_path, [*self.LINES, expect(error=error), step(A=4)])

        assert result.status == "ok", str(result.divergence)

    @pytest.mark.parametrize("error", [{"type": "BatchFull"}, {"req_id": "B"}])
    def test_another_one(self, tmp_path: Path, error: dict[str, str]) -> None:
        """Another type or request is a divergence at the expectation."""
        found = diverge(tmp_path, [*self.LINES, expect(error=error)])

        assert (found.line, found.what) == (5, "error")
        assert "InvalidSchedule (req_id A)" in str(found.got)

    def test_unexpected(self, tmp_path: Path) -> None:
        """A refusal that the file does not expect is a divergence at the event."""
        found = diverge(tmp_path, [*self.LINES, expect(order=["A"])])

        assert (found.line, found.req_id, found.expected) == (4, "A", "no refusal")

    def test_subclass(self, tmp_path: Path) -> None:
        """What does not fit is an InvalidSchedule, whatever the library calls it."""
        lines = [add("A", 8, X), add("B", 8, image("Y", 2, (1, 2, 2))), step(A=8, B=8)]
        result = replay_lines(
            tmp_path,
            [*lines, expect(error={"type": "InvalidSchedule", "req_id": "B"})],
            cache_rows=4,
        )

        assert result.status == "ok", str(result.divergence)

    def test_leaving_twice(self, tmp_path: Path) -> None:
        """A second abort does nothing, or is expected to be refused; of nobody it is refused."""
        once = [add("A", 8), {"abort": "A"}]
        assert replay_lines(tmp_path, [*once, {"abort": "A"}, {"finish": "A"}]).status == "ok"
        unknown = expect(error={"type": "UnknownRequest", "req_id": "A"})
        assert replay_lines(tmp_path, [*once, {"abort": "A"}, unknown]).status == "ok"
        assert diverge(tmp_path, [*once, {"abort": "B"}]).line == 4

    def test_failed_in_a_step(self, tmp_path: Path) -> None:
        """A request that fails in a step is in ``failed``, by name too, or is the ``error``."""
        lines = [{"fail_encode": ["X"]}, add("A", 8, X), add("B", 4), step(A=8, B=4)]
        for expected in (
            {"failed": ["A"]},
            {"failed": {"A": "EncodeFailed"}},
            {"error": {"type": "EncodeFailed", "req_id": "A"}},
        ):
            result = replay_lines(tmp_path, [*lines, {"expect": expected}])
            assert result.status == "ok", str(result.divergence)
        found = diverge(tmp_path, [*lines, expect(failed={"A": "ItemTooLarge"})])
        assert (found.line, found.got, found.req_id) == (6, "EncodeFailed", "A")
        found = diverge(tmp_path, [*lines, expect(error={"type": "EncodeFailed", "req_id": "B"})])
        assert (found.line, found.what) == (6, "error")

    def test_several_confirmations(self, tmp_path: Path) -> None:
        """A confirm of several requests is refused whole or not at all."""
        lines = [
            add("A", 8),
            add("B", 8),
            step(A=8, B=8),
            {"confirm": {"A": 5, "B": 9}},
            expect(error={"type": "InvalidSchedule", "req_id": "B"}, kv_index={"A": []}),
            {"confirm": {"A": 8, "B": 7}},
            step(A=1, B=1),
            expect(kv_index={"A": [8], "B": [7]}),
        ]
        result = replay_lines(tmp_path, lines, confirm="manual")

        assert result.status == "ok", str(result.divergence)


class TestFit:
    LINES = [add("A", 8, X), add("B", 8, image("Y", 2, (1, 2, 2)))]  # noqa: RUF012 (read only)

    def test_met_and_not_met(self, tmp_path: Path) -> None:
        """Only the requests named are compared."""
        ask = {"ask": {"A": 100, "B": 8}}
        good = [*self.LINES, ask, expect(fit={"A": 8}), expect(fit={"B": 2})]
        assert replay_lines(tmp_path, good, cache_rows=4).status == "ok"
        found = diverge(tmp_path, [*self.LINES, ask, expect(fit={"A": 8, "B": 8})], cache_rows=4)
        assert (found.line, found.what, found.req_id, found.got) == (5, "fit", "B", 2)
        found = diverge(tmp_path, [*self.LINES, ask, expect(fit={"C": 8})])
        assert found.got == "not asked for"

    @pytest.mark.parametrize("name", ["UnknownRequest", "InvalidSchedule"])
    def test_unknown_id(self, tmp_path: Path, name: str) -> None:
        """A question about nobody is refused under either name."""
        lines = [{"ask": {"A": 1}}, expect(error={"type": name, "req_id": "A"})]

        assert replay_lines(tmp_path, lines).status == "ok"


class TestRoom:
    """Where the format leaves room."""

    @pytest.mark.parametrize("order", [["B"], ["B", "A"]])
    @pytest.mark.parametrize("moved", [1, 2])
    def test_idle_requests(self, tmp_path: Path, order: list[str], moved: int) -> None:
        """Requests without tokens are behind the others, and may be left out or counted."""
        lines = [add("A", 8), add("B", 8), step(A=4, B=4), step(B=4)]
        result = replay_lines(tmp_path, [*lines, expect(order=order, moved=moved)])

        assert result.status == "ok", str(result.divergence)

    @pytest.mark.parametrize(
        "regions",
        [
            {"decode": 1, "extend": 1, "prefill": 1},
            {"decode": 1, "prefill": 2},
            {"decode": 1, "extend": 2, "prefill": 0},
        ],
    )
    def test_two_regions(self, tmp_path: Path, regions: dict[str, int]) -> None:
        """With two regions the rest may be counted as one."""
        lines = [add("A", 8), add("B", 4), step(A=4, B=4), add("C", 4), step(A=4, B=1, C=4)]
        result = replay_lines(tmp_path, [*lines, expect(regions=regions)], order="two")

        assert result.status == "ok", str(result.divergence)
        if regions != {"decode": 1, "extend": 1, "prefill": 1}:
            found = diverge(tmp_path, [*lines, expect(regions=regions)], order="split")
            assert found.what == "regions"

    def test_next_position_before_the_end_of_the_prompt(self, tmp_path: Path) -> None:
        """It is that of the next token, or that of the first generated one."""
        lines = [add("A", 12, image("X", 4, (1, 2, 2))), step(A=2)]
        met = [expect(next_position={"A": 2}), expect(next_position={"A": 10})]
        assert replay_lines(tmp_path, [*lines, *met]).status == "ok"
        assert diverge(tmp_path, [*lines, expect(next_position={"A": 9})]).line == 4

    def test_missing_grid(self, tmp_path: Path) -> None:
        """An image without a grid is refused where that is expected, else it is one row."""
        bare = {"key": "X", "offset": 2, "length": 4}
        refused = [add("A", 8, bare), expect(error={"type": "InvalidItem", "req_id": "A"})]
        assert replay_lines(tmp_path, refused).status == "ok"
        placed = [
            add("A", 8, bare),
            step(A=8),
            expect(positions={"A": [[0, 1, 2, 2, 2, 2, 6, 7]] * 2 + [list(range(8))]}),
        ]
        assert replay_lines(tmp_path, placed).status == "ok"
        assert replay_lines(tmp_path, placed[:2], positions="1d").status == "ok"

    def test_other_number_of_rows(self, tmp_path: Path) -> None:
        """It is refused at the door where that is expected, else the encoder delivers it."""
        short = {**X, "rows": 3}
        refused = [add("A", 8, short), expect(error={"type": "PlaceholderMismatch"})]
        assert replay_lines(tmp_path, refused).status == "ok"
        delivered = [
            add("A", 8, short),
            step(A=8),
            expect(failed={"A": "FeatureRowsMismatch"}, cache={"used": 0}),
        ]
        assert replay_lines(tmp_path, delivered).status == "ok"

    def test_drafts_without_a_header(self, tmp_path: Path) -> None:
        """Without draft_tokens the file's decodes may have as many drafts as they compute."""
        lines = [add("A", 4), step(A=4), {"step": {"A": 4}, "accept": {"A": 1}}, step(A=2)]
        good = [*lines, expect(kv_index={"A": [6, 7]})]
        assert replay_lines(tmp_path, good).status == "ok"
        assert diverge(tmp_path, good, draft_tokens=2).line == 4
        refused = [add("A", 4), step(A=4), step(A=2), expect(error="InvalidSchedule")]
        assert replay_lines(tmp_path, refused).status == "ok"

    def test_before_and_between_steps(self, tmp_path: Path) -> None:
        """Without a step nothing was encoded or moved, and nobody has a chunk."""
        nothing = expect(
            encoded=[], hits=[], failed=[], moved=0, features={"A": []}, kv_index={"A": []}
        )
        lines = [
            expect(order=[], cache={"free": 1024}),
            nothing,
            add("A", 8, X),
            expect(order=["A"], regions={"decode": 0, "extend": 0, "prefill": 1}),
            step(A=4),
            {"weights": 1},
            nothing,
            expect(order=["A"], regions={"extend": 1}),
        ]
        result = replay_lines(tmp_path, lines)

        assert result.status == "ok", str(result.divergence)

    def test_declared_fields(self, tmp_path: Path) -> None:
        """A file may give values for declared fields; they follow the request like tags."""
        fields = {
            "temperature": 0.7,
            "top_k": 5,
            "seed": 3,
            "greedy": True,
            "stop_token_ids": [1, 2],
            "params": {"any": "thing"},
            "draft_token_ids": 9,
        }
        lines = [add("A", 8, fields=fields), add("B", 4), step(A=4, B=4), step(A=2, B=1)]
        assert replay_lines(tmp_path, lines, draft_tokens=2).status == "ok"
        for wrong, name in (({"no_such": 1}, "UnknownField"), ({"top_k": 0.5}, "InvalidField")):
            refused = [add("A", 8, fields=wrong), expect(error={"type": name, "req_id": "A"})]
            result = replay_lines(tmp_path, refused)
            assert result.status == "ok", str(result.divergence)
