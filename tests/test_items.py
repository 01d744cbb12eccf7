"""Items: what a span, a mask and a grid may be, and what is refused at admission."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import numpy as np
import pytest
from naive_media import item, owners_of, random_items

from vlbatch.errors import InvalidItem, PlaceholderMismatch, VlbatchError
from vlbatch.items import Item, validate_items


def refused(error: type[VlbatchError], match: str, *items: Item, prompt_len: int = 20) -> None:
    """Expect exactly this refusal, naming the request."""
    with pytest.raises(error, match=match) as caught:
        validate_items(items, prompt_len, "R")
    assert type(caught.value) is error
    assert caught.value.req_id == "R"


class TestSpans:
    def test_touching_items_and_both_ends_of_the_prompt_are_legal(self) -> None:
        """Items may touch each other, start at token 0 and end with the prompt (B46)."""
        items = [item(12, 8, "C"), item(0, 6, "A"), item(6, 6, "B")]

        assert [i.key for i in validate_items(items, 20, "R")] == ["A", "B", "C"]

    @pytest.mark.parametrize(
        ("offset", "length"), [(-1, 4), (17, 4), (20, 1), (4, 0), (4, -2), (0, 21)]
    )
    def test_span_must_be_non_empty_and_inside_the_prompt(self, offset: int, length: int) -> None:
        """A span outside ``[0, prompt_len)`` or without a token is refused, both values said."""
        said = re.escape(f"spans [{offset}, {offset + length}); a span must be non-empty")
        refused(InvalidItem, said, item(offset, length))

    def test_key_must_not_be_empty(self) -> None:
        """An item without identity would share features with every other one."""
        refused(InvalidItem, "item at token 4 has an empty key", item(4, 4, ""))

    def test_order_is_by_offset_then_stop(self) -> None:
        """Items come back by offset, those that start together by their end."""
        long = item(2, 6, "long", mask="011111")
        short = item(2, 1, "short")

        assert validate_items([long, short], 20, "R") == (short, long)

    def test_no_items(self) -> None:
        """A text prompt has no items and nothing to refuse."""
        assert validate_items([], 1, "R") == ()


class TestMasks:
    def test_rows_and_places_count_true_positions(self) -> None:
        """An item has as many feature rows as its mask has true places (B14)."""
        masked = item(4, 12, mask="111001111010")

        assert masked.num_rows == 8
        assert masked.places().tolist() == [4, 5, 6, 9, 10, 11, 12, 14]
        assert masked.stop == 16

    def test_without_a_mask_the_whole_span_is_places(self) -> None:
        """No mask and an all-true mask mean the same places."""
        plain, masked = item(3, 4), item(3, 4, mask="1111")

        assert plain.num_rows == masked.num_rows == 4
        assert plain.places().tolist() == masked.places().tolist() == [3, 4, 5, 6]

    def test_mask_must_have_the_length_of_the_span(self) -> None:
        """A mask of another length is refused with both lengths."""
        said = r"shape \(3,\) and dtype bool; expected bool \(4,\)"
        refused(InvalidItem, said, item(4, 4, mask="101"))

    def test_mask_must_be_bool(self) -> None:
        """Integers as a mask would be counted as places where they are not 0."""
        mask = np.array([0, 1, 2, 3])
        refused(InvalidItem, "dtype int64; expected bool", replace(item(4, 4), embed_mask=mask))

    def test_mask_without_a_place_is_refused(self) -> None:
        """An item that takes no feature is a mistake of the caller."""
        refused(InvalidItem, "without a true place", item(4, 4, mask="0000"))


class TestGrids:
    @pytest.mark.parametrize("grid", [(0, 2, 2), (1, -2, -2), (1, 2, 3), (2, 2, 2), (1, 1, 1)])
    def test_grid_must_have_one_cell_a_place(self, grid: tuple[int, int, int]) -> None:
        """A zero, a negative or a disagreeing grid is refused; 1x-2x-2 has 4 cells all the same."""
        refused(InvalidItem, "has grid", item(4, 4, grid=grid))

    def test_grid_counts_places_not_tokens(self) -> None:
        """Separators in the span are not cells: 16 features + 4 separators are 20 tokens (B59)."""
        rows = item(0, 20, mask="11110" * 4, grid=(1, 4, 4))

        assert validate_items([rows], 20, "R") == (rows,)
        refused(InvalidItem, "1x4x5 = 20 but 16 places", replace(rows, grid=(1, 4, 5)))


class TestDeclaredRows:
    def test_equal_count_is_accepted(self) -> None:
        """A source that promises one row a place is right."""
        declared = replace(item(4, 4, mask="1101"), declared_rows=3)

        assert validate_items([declared], 20, "R") == (declared,)

    @pytest.mark.parametrize("rows", [0, 4, 275])
    def test_other_count_is_a_placeholder_mismatch(self, rows: int) -> None:
        """Promised rows and placeholders are compared at the door, with both numbers (B72)."""
        declared = replace(item(4, 4, mask="1101"), declared_rows=rows)
        refused(PlaceholderMismatch, f"{rows} feature rows for 3 placeholder tokens", declared)


class TestOverlaps:
    def test_nested_and_interleaved_spans_with_disjoint_masks_are_legal(self) -> None:
        """Audio in video: a span inside another, with another end, and no place of both."""
        video = item(0, 12, "v", mask="111000001110")
        audio = item(2, 6, "a", mask="011111", modality="audio")
        after = item(7, 8, "i", mask="00001111")

        assert validate_items([after, audio, video], 20, "R") == (video, audio, after)

    @pytest.mark.parametrize(
        ("first", "second", "token"),
        [
            (item(0, 8, "v"), item(2, 3, "a"), 2),
            (item(0, 8, "v", mask="11100111"), item(2, 6, "a", mask="011001"), 7),
            (item(0, 8, "v"), item(7, 4, "a"), 7),
            (item(3, 2, "v"), item(3, 2, "a"), 3),
        ],
    )
    def test_one_token_cannot_be_a_place_of_two_items(
        self, first: Item, second: Item, token: int
    ) -> None:
        """Two items that claim one token are refused, naming both and the token."""
        said = f"items '[va]' and '[va]' both claim token {token}"
        refused(InvalidItem, said, second, first)

    def test_an_item_behind_a_short_nested_one_is_still_compared(self) -> None:
        """The reach of an earlier, longer span counts, not that of its neighbour."""
        video = item(0, 12, "v", mask="110011111111")
        audio = item(2, 2, "a")
        refused(
            InvalidItem, "items 'v' and 'late' both claim token 9", video, audio, item(9, 1, "late")
        )

    @pytest.mark.parametrize("case", range(60))
    def test_random_items_agree_with_counting(self, seed: int, case: int) -> None:
        """Disjoint places in any order are accepted; one shared place is refused (property)."""
        rng = random.Random(f"{seed}/{case}")
        items = random_items(rng, 30, 6)
        owners = owners_of(items)
        shuffled = rng.sample(items, len(items))

        valid = validate_items(shuffled, 30, "R")

        assert {id(i) for i in valid} == {id(i) for i in items}
        assert [(i.offset, i.stop) for i in valid] == [(i.offset, i.stop) for i in items]
        for number, each in enumerate(items):
            places = [token for token, (n, _) in owners.items() if n == number]
            assert each.places().tolist() == places
            assert each.num_rows == len(places)
        refused(
            InvalidItem, "both claim token",
            *shuffled, item(rng.choice(list(owners)), 1, "thief"),
            prompt_len=30,
        )  # fmt: skip
