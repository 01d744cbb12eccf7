"""Gather: each token of a step gets its own feature row, and no other token gets one."""

from __future__ import annotations

import random

import numpy as np
import pytest
from drive import Drive, delivered, order_of, run
from naive_media import encoded, item, owners_of, random_items

from vlbatch.cache import EntryKey
from vlbatch.errors import InvalidField, InvariantBroken, UnknownRequest


def driven(lookahead: int = 0) -> Drive:
    """A with X at [2, 6), B with Y at [0, 3) and Z at [6, 8); everything is encoded."""
    drive = Drive(lookahead=lookahead)
    drive.add("A", 10, item(2, 4, "X"))
    drive.add("B", 10, item(0, 3, "Y"), item(6, 2, "Z"))
    drive.commit(drive.reserve(A=10, B=10))
    return drive


class TestRows:
    def test_tokens_are_of_the_flattened_step(self) -> None:
        """Row after row, with the rows' first tokens added."""
        drive = driven()
        inputs = drive.store.gather(drive.order(A=5, B=8))

        assert inputs.tokens.tolist() == [2, 3, 4, 5, 6, 7, 11, 12]
        assert [(s.req_id, s.item, s.content, s.rows) for s in inputs.segments] == [
            ("A", 0, "X", (0, 3)),
            ("B", 0, "Y", (0, 3)),
            ("B", 1, "Z", (0, 2)),
        ]
        assert inputs.skipped.tolist() == []

    def test_each_request_has_its_own_part(self) -> None:
        """By request there are the same tokens and segments, in the same order, and no others."""
        drive = driven()
        inputs = drive.store.gather(drive.order(A=5, B=8))
        parts = inputs.by_request()

        assert {r: part.tokens.tolist() for r, part in parts.items()} == {
            "A": [2, 3, 4],
            "B": [5, 6, 7, 11, 12],
        }
        assert [s for part in parts.values() for s in part.segments] == list(inputs.segments)
        assert drive.store.gather(drive.order()).by_request() == {}

    def test_order_is_that_of_the_rows(self) -> None:
        """Swap the rows: the same features, at the other tokens (B56)."""
        drive = driven()

        assert drive.gather(A=10, B=10) == drive.gather(B=10, A=10)
        assert drive.store.gather(drive.order(B=8, A=5)).tokens.tolist() == [
            0,
            1,
            2,
            6,
            7,
            10,
            11,
            12,
        ]

    def test_decode_rows_get_nothing(self) -> None:
        """A decode may sample the placeholder id: places come from spans, not from ids (B38)."""
        drive = driven()
        drive.add("D", 5, item(0, 5, "W"), computed=5)
        inputs = drive.store.gather(drive.order(D=1, A=10))

        assert inputs.tokens.tolist() == [3, 4, 5, 6]
        assert {segment.req_id for segment in inputs.segments} == {"A"}

    def test_decodes_only(self) -> None:
        """A step without prefill has no features and looks no request up."""
        order = order_of({"gone": (5, 1)}, {"gone": 5})
        inputs = driven().store.gather(order)

        assert (inputs.tokens.tolist(), inputs.segments, inputs.arrays()) == ([], (), [])
        assert inputs.tokens.dtype == np.int64

    def test_arrival_policy_has_decodes_among_the_others(self) -> None:
        """Without regions a decode row before a prefill row shifts its tokens, no more."""
        drive = driven()
        drive.add("D", 5, item(0, 5, "W"), computed=5)
        order = drive.order("arrival", A=5, D=1, B=8)
        assert order.num_leading_decodes == 0

        inputs = drive.store.gather(order)
        assert inputs.tokens.tolist() == [2, 3, 4, 6, 7, 8, 12, 13]
        assert delivered(order, inputs) == {"A": run("X", 2, 0, 3), "D": [],
                                            "B": run("Y", 0, 0, 3) + run("Z", 6, 0, 2)}  # fmt: skip

    def test_lengths_are_ragged(self) -> None:
        """4 and 24 rows in one step: nothing is stacked (B44)."""
        drive = Drive()
        drive.add("R1", 10, item(2, 4, "X", grid=(1, 2, 2)))
        drive.add("R2", 40, item(4, 24, "Y", grid=(1, 4, 6)))
        drive.commit(drive.reserve(R1=10, R2=40))
        inputs = drive.store.gather(drive.order(R1=10, R2=40))

        assert [np.shape(array) for array in inputs.arrays()] == [(4, 3), (24, 3)]

    def test_touching_items_and_both_ends(self) -> None:
        """Items without text between them, at token 0 and at the last one (B46)."""
        drive = Drive()
        drive.add("R", 12, item(0, 2, "A"), item(2, 6, "B"), item(8, 4, "C"))

        assert drive.step(R=5)["R"] == run("A", 0, 0, 2) + run("B", 2, 0, 3)
        assert drive.step(R=7)["R"] == run("B", 5, 3, 3) + run("C", 8, 0, 4)

    def test_masked_out_tokens_keep_their_text(self) -> None:
        """Only true places are tokens of the gather (B14)."""
        drive = Drive()
        drive.add("R", 20, item(4, 12, "X", mask="101010111101"))

        assert drive.step(R=9)["R"] == [(4, "X", 0), (6, "X", 1), (8, "X", 2)]
        assert drive.step(R=11)["R"] == [(t, "X", r) for r, t in enumerate((10, 11, 12, 13, 15), 3)]

    def test_features_are_slices_not_copies(self) -> None:
        """The rows that a step reads are views of what the encoder gave."""
        drive = Drive()
        drive.add("R", 20, item(4, 6, "X"))
        work = drive.reserve(R=20)
        features = encoded("X", 6)
        drive.store.commit({work.tasks[0].key: (features,)})
        array = drive.store.gather(drive.order(R=8)).arrays()[0]

        assert np.shares_memory(np.asarray(array), features)
        assert np.shape(array) == (4, 3)

    @pytest.mark.parametrize("case", range(30))
    def test_random_steps(self, seed: int, case: int) -> None:
        """Any chunks of any prompts: every place its own row, nobody else any (property)."""
        rng = random.Random(f"{seed}/{case}")
        drive, owners, items = Drive(), {}, {}
        for req_id in "ABCD":
            items[req_id] = random_items(rng, 30, rng.randint(0, 5))
            owners[req_id] = owners_of(items[req_id])
            drive.add(req_id, 30, *items[req_id], computed=rng.choice((0, rng.randrange(30))))
        while drive.computed:
            chosen = rng.sample(list(drive.computed), rng.randint(1, len(drive.computed)))
            scheduled = {r: rng.randint(1, 30 - drive.computed[r]) for r in chosen}
            chunks = drive.chunks(scheduled)
            got = drive.step(**scheduled)
            for req_id, (start, num_tokens) in chunks.items():
                expected = []
                for token in range(start, start + num_tokens):
                    if token in owners[req_id]:
                        number, row = owners[req_id][token]
                        expected.append((token, items[req_id][number].key, row))
                assert sorted(got[req_id]) == expected
                if drive.computed[req_id] == 30:
                    del drive.computed[req_id]
                    drive.store.remove(req_id)


class TestShift:
    """A drafter reads tokens shifted by one."""

    def test_chunk_in_the_middle_of_an_item(self) -> None:
        """For target tokens 3 and 4 the drafter reads tokens 4 and 5."""
        drive = driven(lookahead=1)
        drive.computed["A"] = 3
        inputs = drive.store.gather(drive.order(A=2), shift=1)

        assert inputs.tokens.tolist() == [0, 1]
        assert inputs.segments[0].rows == (2, 4)

    def test_ends_of_an_item(self) -> None:
        """The token before the item reads its first row, its last token reads text."""
        drive = driven(lookahead=1)
        assert drive.gather(A=2, shift=1)["A"] == [(2, "X", 0)]
        drive.computed["A"] = 5
        assert drive.gather(A=1)["A"] == [(5, "X", 3)]
        assert drive.gather(A=1, shift=1)["A"] == []

    def test_every_token_of_the_prompt(self) -> None:
        """Over all chunks the drafter gets each row once but that of token 0."""
        drive = driven(lookahead=1)
        got = []
        for start in range(0, 10, 2):
            drive.computed["B"] = start
            got += drive.gather(B=2, shift=1)["B"]

        assert got == run("Y", 1, 1, 2) + run("Z", 6, 0, 2)

    def test_a_missing_item_beyond_the_chunk_is_skipped(self) -> None:
        """At the boundary the drafter reads no feature of an item that is not there (B18)."""
        drive = Drive(lookahead=1)
        drive.add("R", 10, item(4, 4, "X"))
        inputs = drive.store.gather(drive.order(R=4), shift=1)

        assert (inputs.tokens.tolist(), inputs.skipped.tolist()) == ([], [3])

    def test_a_missing_item_in_the_chunk_is_an_error(self) -> None:
        """The target needs it in this step: there is no fallback (rule 13 of vLLM)."""
        drive = Drive(lookahead=1)
        drive.add("R", 10, item(4, 4, "X"))
        with drive.refused(InvariantBroken, r"item 0 \('X'\).*no reference", req_id="R"):
            drive.gather(R=5, shift=1)

    def test_shift_is_limited_by_the_look_ahead(self) -> None:
        """Features further ahead are neither encoded nor kept: a wrong setting is refused."""
        drive = driven(lookahead=1)
        for shift in (2, -1):
            with drive.refused(InvalidField, rf"shift {shift}; expected 0..1", setting="lookahead"):
                drive.gather(A=2, shift=shift)


class TestRefusals:
    def test_not_planned(self) -> None:
        """A chunk whose item was never asked for fails before the forward, naming the request."""
        drive = Drive()
        drive.add("R", 10, item(4, 4, "X"))
        assert drive.gather(R=4) == {"R": []}
        with drive.refused(InvariantBroken, r"features of item 0 \('X'\)", req_id="R"):
            drive.gather(R=5)

    def test_not_committed(self) -> None:
        """A reserved entry is not read (phantom entry)."""
        drive = Drive()
        drive.add("R", 10, item(4, 4, "X"))
        drive.reserve(R=10)
        with drive.refused(InvariantBroken, "refers to .*'X'.*, which is not ready", req_id="R"):
            drive.gather(R=10)

    def test_a_request_that_left(self) -> None:
        """The order still has it: the caller hears which one."""
        drive = driven()
        drive.store.remove("A")
        with drive.refused(UnknownRequest, req_id="A"):
            drive.gather(A=10, B=10)

    def test_somebody_elses_entry_is_not_used(self) -> None:
        """A key that is ready but not referenced by this request is not handed out."""
        drive = driven()
        drive.add("C", 10, item(2, 4, "X"))
        assert drive.cache.is_ready(EntryKey("X"))
        with drive.refused(InvariantBroken, "no reference", req_id="C"):
            drive.gather(C=10)
