"""Chunk arithmetic against counting token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from naive_media import item, owners_of, random_items

from vlbatch.features import PlacedItem, items_in, uncut_stop
from vlbatch.features.chunks import overlapping
from vlbatch.items import Item

L = 30
EVERY_CHUNK = [(a, b) for a in range(L + 1) for b in range(a, L + 3)]


def place(items: Sequence[Item]) -> list[PlacedItem]:
    return [PlacedItem.of(each) for each in items]


def naive_rows(items: Sequence[Item], number: int, start: int, stop: int) -> list[tuple[int, int]]:
    """(token, feature row) of one item in a chunk."""
    return [
        (token, feature_row)
        for token, (owner, feature_row) in sorted(owners_of(items).items())
        if owner == number and start <= token < stop
    ]


def naive_items_in(items: Sequence[Item], start: int, stop: int) -> list[int]:
    """Owners of the chunk's tokens, in the order in which they are met."""
    owners = owners_of(items)
    met = [owners[token][0] for token in range(start, stop) if token in owners]
    return list(dict.fromkeys(met))


def naive_uncut_stop(items: Sequence[Item], start: int, stop: int) -> int:
    """Try every end from the largest down."""
    for end in range(stop, start, -1):
        if not any(start <= each.offset < end < each.stop for each in items):
            return end
    return start


class TestProperties:
    @pytest.mark.parametrize("case", range(12))
    def test_every_chunk_of_random_prompts(self, seed: int, case: int) -> None:
        """Rows, places and items of a chunk are what counting token by token says."""
        rng = random.Random(f"{seed}/{case}")
        items = random_items(rng, L, rng.randint(1, 6))
        placed = place(items)
        for start, stop in EVERY_CHUNK:
            chunk = f"chunk [{start}, {stop}) of {items}"
            assert list(items_in(placed, start, stop)) == naive_items_in(items, start, stop), chunk
            for number, each in enumerate(placed):
                expected = naive_rows(items, number, start, stop)
                first, last = each.rows_in(start, stop)
                assert list(range(first, last)) == [row for _, row in expected], chunk
                assert each.places_in(start, stop).tolist() == [t for t, _ in expected], chunk

    @pytest.mark.parametrize("case", range(12))
    def test_any_chunking_covers_each_row_once(self, seed: int, case: int) -> None:
        """Cut anywhere, the chunks of a prompt take every row of every item once, in order."""
        rng = random.Random(f"{seed}/{case}")
        items = random_items(rng, L, 5)
        cuts = [0, *sorted(rng.sample(range(1, L), 6)), L]
        for number, each in enumerate(place(items)):
            taken = []
            for start, stop in pairwise(cuts):
                taken += range(*each.rows_in(start, stop))
            assert taken == list(range(items[number].num_rows))

    @pytest.mark.parametrize("case", range(12))
    def test_uncut_stop_is_the_largest_that_cuts_nothing(self, seed: int, case: int) -> None:
        """No larger end up to the wanted one leaves every item that starts in the chunk whole."""
        rng = random.Random(f"{seed}/{case}")
        items = random_items(rng, L, rng.randint(1, 6))
        placed = place(items)
        for start, stop in EVERY_CHUNK:
            assert uncut_stop(placed, start, stop) == naive_uncut_stop(items, start, stop), (
                f"chunk [{start}, {stop}) of {items}"
            )

    @pytest.mark.parametrize("case", range(12))
    def test_first_place_from_every_token(self, seed: int, case: int) -> None:
        """The first place at or after a token, for every token up to the last place."""
        rng = random.Random(f"{seed}/{case}")
        for each in place(random_items(rng, L, 4)):
            places = each.item.places().tolist()
            for token in range(places[-1] + 1):
                assert each.first_place_from(token) == min(p for p in places if p >= token)

    @pytest.mark.parametrize("case", range(12))
    def test_overlapping_groups_share_a_token_inside_and_none_across(
        self, seed: int, case: int
    ) -> None:
        """Groups are the connected parts of "spans share a token"."""
        rng = random.Random(f"{seed}/{case}")
        items = random_items(rng, L, 6)
        groups = [[each.item for each in group] for group in overlapping(place(items))]

        assert [each for group in groups for each in group] == items
        spans = [{t for each in group for t in range(each.offset, each.stop)} for group in groups]
        for tokens in spans:
            assert tokens == set(range(min(tokens), max(tokens) + 1))
        assert sum(map(len, spans)) == len(set().union(*spans))
        for group in groups:
            for number in range(1, len(group)):
                assert group[number].offset < max(each.stop for each in group[:number])


class TestBoundaries:
    """An item at [4, 10); chunks that end and start at its ends."""

    ITEM = place([item(4, 6)])

    @pytest.mark.parametrize(
        ("start", "stop", "rows"),
        [
            (0, 4, None),  # ends where the item starts
            (0, 5, (0, 1)),
            (3, 4, None),
            (4, 5, (0, 1)),
            (9, 10, (5, 6)),  # the last token still needs it
            (9, 30, (5, 6)),
            (10, 11, None),  # starts behind it
            (0, 30, (0, 6)),
            (4, 4, None),
        ],
    )
    def test_chunk_touches_the_item(
        self, start: int, stop: int, rows: tuple[int, int] | None
    ) -> None:
        """The ends are half-open: token 4 is in, token 10 is out (rules 1 and 3 of vLLM)."""
        assert list(items_in(self.ITEM, start, stop)) == ([] if rows is None else [0])
        first, last = self.ITEM[0].rows_in(start, stop)
        assert (first, last) == (rows or (first, first))
        assert self.ITEM[0].places_in(start, stop).tolist() == list(
            range(4 + first, 4 + last) if rows else []
        )

    def test_look_ahead_widens_the_chunk(self) -> None:
        """A chunk that ends at the item touches it once one token is read ahead (B16)."""
        assert list(items_in(self.ITEM, 0, 4)) == []
        assert list(items_in(self.ITEM, 0, 4 + 1)) == [0]

    def test_masked_out_tokens_do_not_touch(self) -> None:
        """A chunk with masked-out tokens of a span only does not need the item (vLLM rule 2)."""
        masked = place([item(4, 6, mask="001100")])

        assert [list(items_in(masked, a, b)) for a, b in ((0, 6), (5, 7), (8, 10))] == [[], [0], []]


class TestReports:
    def test_mask_and_a_cut_inside(self) -> None:
        """3 true places before the cut: rows 0..2, then 3..7; 8 rows in all, not 12 (B14)."""
        masked = PlacedItem.of(item(4, 12, mask="101010111101"))

        assert masked.num_rows == 8
        assert masked.rows_in(0, 9) == (0, 3)
        assert masked.rows_in(9, 20) == (3, 8)
        assert masked.places_in(0, 9).tolist() == [4, 6, 8]

    def test_chunks_get_their_own_rows_only(self) -> None:
        """Chunks before, into and out of an item take no rows, [0, 5), [5, 12) (B40)."""
        placed = PlacedItem.of(item(20, 12))

        rows = [placed.rows_in(a, b) for a, b in ((0, 10), (10, 25), (25, 40))]

        assert rows == [(0, 0), (0, 5), (5, 12)]

    @pytest.mark.parametrize(("hit", "rows"), [(16, (12, 24)), (28, (24, 24)), (32, (24, 24))])
    def test_prefix_hit_inside_and_behind_an_item(self, hit: int, rows: tuple[int, int]) -> None:
        """What a prefix cache holds is cut off the features too (B41)."""
        assert PlacedItem.of(item(4, 24)).rows_in(hit, 40) == rows

    def test_touching_items_are_both_found_in_order(self) -> None:
        """No text between two images, one at token 0 and one at the end (B46)."""
        items = place([item(0, 2, "A"), item(2, 4, "B"), item(6, 6, "C"), item(12, 18, "D")])

        assert list(items_in(items, 0, 30)) == [0, 1, 2, 3]
        assert list(items_in(items, 5, 7)) == [1, 2]
        assert [p.rows_in(5, 7) for p in items[1:3]] == [(3, 4), (0, 1)]

    def test_nested_spans_with_different_ends_are_found(self) -> None:
        """A video [0, 20) is in the window [10, 12) although audio [2, 7) starts later (vLLM)."""
        video = item(0, 20, "v", mask="11" + "0" * 5 + "1" * 13)
        items = place([video, item(2, 5, "a")])

        assert list(items_in(items, 10, 12)) == [0]
        assert items[0].rows_in(10, 12) == (5, 7)
        assert list(items_in(items, 0, 20)) == [0, 1]

    def test_order_is_by_first_place_in_the_chunk(self) -> None:
        """In a later chunk of interleaved spans the audio can come before the video."""
        video, audio = item(0, 8, "v", mask="11000110"), item(2, 6, "a", mask="111001")
        items = place([video, audio])

        assert list(items_in(items, 0, 8)) == [0, 1]
        assert list(items_in(items, 3, 8)) == [1, 0]

    def test_blocks_stay_whole_by_image_not_by_prompt(self) -> None:
        """Items (6, 8) and (20, 8) under a budget of 10: chunks end at item borders (B61)."""
        items = place([item(6, 8), item(20, 8)])
        chunks, start = [], 0
        while start < 40:
            stop = uncut_stop(items, start, min(start + 10, 40))
            chunks.append((start, stop))
            start = stop

        assert chunks == [(0, 6), (6, 16), (16, 20), (20, 30), (30, 40)]

    def test_item_longer_than_the_chunk_cannot_start(self) -> None:
        """A chunk of 5 cannot hold 8 tokens: nothing of the item fits (B61)."""
        assert uncut_stop(place([item(6, 8)]), 6, 11) == 6

    def test_prefix_hit_inside_an_item_may_cut_it_again(self) -> None:
        """A chunk that starts inside an item is not held up by it."""
        assert uncut_stop(place([item(6, 8), item(14, 4)]), 8, 12) == 12
        assert uncut_stop(place([item(6, 8), item(14, 4)]), 8, 16) == 14
