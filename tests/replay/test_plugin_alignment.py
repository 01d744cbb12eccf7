"""Alignment: the oracle that a runner's five calls feed, and the first wrong thing it raises at."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from example_runner import ToyRunner

from vlbatch import Item
from vlbatch.replay.alignment import Alignment

CAT, DOG = (np.random.default_rng(n).standard_normal((6, 4)) for n in range(2))
DIAGONAL = [[n] * 3 for n in range(20)]


def image(key: str, offset: int, **more: Any) -> Item:
    """An image of 2 x 3 places."""
    return Item(key=key, modality="image", offset=offset, length=6, grid=(1, 2, 3), **more)


def message_of(raised: pytest.ExceptionInfo[AssertionError]) -> list[str]:
    return str(raised.value).splitlines()


@pytest.fixture
def watch() -> Alignment:
    """Two requests with an image each, both encoded in the step under way."""
    watch = Alignment()
    watch.admit("a", prompt_len=10, items=[image("cat", 2)])
    watch.admit("b", prompt_len=10, items=[image("dog", 2)])
    watch.step({"a": 10, "b": 10})
    watch.encoded("cat", CAT)
    watch.encoded("dog", DOG)
    return watch


PLACES = [*range(2, 8), *range(12, 18)]
"""Token numbers of both images, a's rows before b's."""

POSITIONS = [
    [0, 1, 2, 2, 2, 2, 2, 2, 5, 6] * 2,
    [0, 1, 2, 2, 2, 3, 3, 3, 5, 6] * 2,
    [0, 1, 2, 3, 4, 2, 3, 4, 5, 6] * 2,
]


class TestFeatures:
    def test_right_rows_pass(self, watch: Alignment) -> None:
        """Nothing is raised where every place has its own row, and its own position."""
        watch.gathered(["a", "b"], tokens=PLACES, features=[CAT, DOG], positions=POSITIONS)
        watch.finish()

    def test_any_order_of_requests(self, watch: Alignment) -> None:
        """The rows of the batch are the runner's own business."""
        watch.gathered(["b", "a"], tokens=PLACES, features=[DOG, CAT])

    def test_swapped(self, watch: Alignment) -> None:
        """Rows of another request are named with that request, by token."""
        with pytest.raises(AssertionError) as raised:
            watch.gathered(["a", "b"], tokens=PLACES, features=[DOG, CAT])

        assert message_of(raised) == [
            "step 1: request 'a': 6 of the feature rows in its tokens [0, 10) are wrong",
            "  token  expected   got",
            "  2      cat row 0  dog row 0",
            "  3      cat row 1  dog row 1",
            "  4      cat row 2  dog row 2",
            "  5      cat row 3  dog row 3",
            "  6      cat row 4  dog row 4",
            "  7      cat row 5  dog row 5",
            "such rows belong to request 'b'",
        ]

    def test_shifted(self, watch: Alignment) -> None:
        """Rows that are all off by the same number are said to be shifted."""
        late = np.concatenate([CAT[:2], CAT[1:5]])
        with pytest.raises(AssertionError) as raised:
            watch.gathered(["a", "b"], tokens=PLACES, features=[late, DOG])

        assert message_of(raised)[2:] == [
            "  4      cat row 2  cat row 1",
            "  5      cat row 3  cat row 2",
            "  6      cat row 4  cat row 3",
            "  7      cat row 5  cat row 4",
            "every row is shifted by -1",
        ]

    def test_missing_and_surplus(self, watch: Alignment) -> None:
        """A place without a row and a token that is no place are both in the table."""
        with pytest.raises(AssertionError) as raised:
            watch.gathered(["a", "b"], tokens=[1, *PLACES[1:]], features=[CAT, DOG])

        assert message_of(raised)[2:4] == [
            "  1      -          cat row 0",
            "  2      cat row 0  -",
        ]

    def test_changed_row(self, watch: Alignment) -> None:
        """A row that was changed after it was encoded is nobody's."""
        changed = CAT.copy()
        changed[4] += 1
        with pytest.raises(AssertionError, match=r"6 +cat row 4 +\(unknown row\) row"):
            watch.gathered(["a", "b"], tokens=PLACES, features=[changed, DOG])

    def test_long_tables_are_cut(self) -> None:
        """Of many wrong rows the first twelve are shown, and how many there are."""
        watch = Alignment()
        rows = np.random.default_rng(0).standard_normal((40, 4))
        watch.admit("a", prompt_len=40, items=[Item("X", "image", 0, 40, grid=(1, 5, 8))])
        watch.step({"a": 40})
        watch.encoded("X", rows)
        with pytest.raises(AssertionError) as raised:
            watch.gathered(["a"], tokens=range(40), features=rows[::-1])

        assert len(message_of(raised)) == 15
        assert message_of(raised)[-1] == "  and 28 more"

    def test_row_of_a_departed_request(self) -> None:
        """Where no request has the item any more, that is said."""
        watch = Alignment()
        watch.encoded("owl", DOG)
        watch.admit("a", prompt_len=10, items=[image("cat", 2)])
        watch.step({"a": 10})
        watch.encoded("cat", CAT)
        with pytest.raises(AssertionError, match=r"no request in the batch has owl$"):
            watch.gathered(["a"], tokens=range(2, 8), features=DOG)

    def test_never_gathered(self, watch: Alignment) -> None:
        """A request whose image is in the chunk but was never gathered is missed."""
        watch.gathered(["a"], tokens=PLACES[:6], features=CAT)
        with pytest.raises(AssertionError, match=r"'b' was never gathered.*\[0, 10\)"):
            watch.step({"a": 1})

    def test_preempted_request_starts_again(self, watch: Alignment) -> None:
        """After a preemption the chunk begins at the prefix hit, and outputs are prompt."""
        watch.gathered(["a", "b"], tokens=PLACES, features=[CAT, DOG])
        watch.left("a", "preempt")
        watch.admit("a", prompt_len=11, computed=4)
        watch.step({"a": 7})
        watch.gathered(["a"], tokens=[0, 1, 2, 3], features=CAT[2:])
        watch.left("b")
        watch.step({"a": 1})
        with pytest.raises(AssertionError, match=r"11 +\(8, 8, 8\) +\(11, 11, 11\)"):
            watch.gathered(["a"], positions=[[11]] * 3)


class TestPositions:
    def test_wrong_positions(self, watch: Alignment) -> None:
        """A token with another position is named with both, on every axis."""
        with pytest.raises(AssertionError) as raised:
            watch.gathered(
                ["a", "b"], tokens=PLACES, features=[CAT, DOG],
                positions=[POSITIONS[0], POSITIONS[0], POSITIONS[2]],
            )  # fmt: skip

        assert message_of(raised) == [
            "step 1: request 'a': 3 of the positions of its tokens [0, 10) are wrong",
            "  token  expected   got",
            "  5      (2, 3, 2)  (2, 2, 2)",
            "  6      (2, 3, 3)  (2, 2, 3)",
            "  7      (2, 3, 4)  (2, 2, 4)",
        ]

    def test_family(self) -> None:
        """Positions follow the family that was asked for."""
        clip = Item("clip", "video", 1, 2, grid=(2, 1, 1), seconds_per_grid=2.0)
        for family, t in (("qwen2_vl", 2), ("qwen2_5_vl", 7)):
            watch = Alignment(family=family, tokens_per_second=3.0)
            watch.admit("a", prompt_len=3, items=[clip])
            watch.step({"a": 3})
            watch.gathered(
                ["a"], tokens=[1, 2], features=CAT[:2],
                positions=[[0, 1, t], [0, 1, 1], [0, 1, 1]],
            )  # fmt: skip

    def test_kv_index(self) -> None:
        """KV goes to the token's own index, never to a rotary coordinate."""
        watch = Alignment()
        watch.admit("a", prompt_len=3)
        watch.step({"a": 3})
        with pytest.raises(AssertionError, match=r"writes the KV of tokens \[0, 1, 1\]"):
            watch.gathered(["a"], kv_index={"a": [0, 1, 1]})

    @pytest.mark.parametrize(("accepted", "start"), [(1, 5), (0, 4), (None, 7)])
    def test_progress_counts_accepted_drafts(self, accepted: int | None, start: int) -> None:
        """The next chunk begins behind the accepted drafts, or behind all where nothing is said."""
        watch = Alignment()
        watch.admit("a", prompt_len=3)
        watch.step({"a": 3})
        watch.gathered(["a"], kv_index={"a": [0, 1, 2]})
        watch.step({"a": 4})
        watch.gathered(["a"], kv_index={"a": [3, 4, 5, 6]})
        if accepted is not None:
            watch.accepted({"a": accepted})
        watch.step({"a": 1})
        watch.gathered(["a"], kv_index={"a": [start]})


class TestRequests:
    @pytest.mark.parametrize(
        ("items", "reason"),
        [
            ([image("cat", 8)], "InvalidItem"),
            ([image("cat", 0), image("dog", 5)], "InvalidItem"),
            ([Item("cat", "image", 0, 6, grid=(1, 2, 2))], "InvalidItem"),
            ([image("cat", 0, declared_rows=5)], "PlaceholderMismatch"),
        ],
    )
    def test_impossible_requests(self, items: list[Item], reason: str) -> None:
        """A runner that admits what is to be refused is told so, with the reason."""
        with pytest.raises(AssertionError, match=f"'a' was admitted; .*{reason}"):
            Alignment().admit("a", prompt_len=12, items=items)

    def test_other_number_of_feature_rows(self) -> None:
        """An encoder that delivers another number of rows than there are places is caught."""
        watch = Alignment()
        watch.admit("a", prompt_len=10, items=[image("cat", 2)])
        watch.step({"a": 10})
        with pytest.raises(AssertionError, match=r"'cat' was encoded to 5 .*'a' has 6 places"):
            watch.encoded("cat", CAT[:5])

    def test_more_than_the_prompt(self, watch: Alignment) -> None:
        """A chunk never goes past the end of the prompt."""
        watch.admit("c", prompt_len=4)
        watch.gathered(["a", "b"], tokens=PLACES, features=[CAT, DOG])
        with pytest.raises(AssertionError, match="'c' computes 5 tokens; 4 of its prompt are left"):
            watch.step({"c": 5})

    def test_misuse_is_a_failed_assertion(self, watch: Alignment) -> None:
        """A call about a request that is not in the batch fails the test, as an assertion."""
        with pytest.raises(AssertionError, match="'z'"):
            watch.left("z")


def test_example_runner_is_right() -> None:
    """The example runner agrees with the oracle through chunks, moves and decodes."""
    watch = Alignment()
    runner = ToyRunner(watch)
    runner.add("a", 15, [image("cat", 2), image("owl", 8)])
    runner.add("b", 4, [])
    runner.step({"a": 5, "b": 4})
    runner.add("c", 20, [image("dog", 1), image("cat", 9)])
    for _ in range(5):
        runner.step({"a": 2, "b": 1, "c": 3})
    runner.finish("a")
    runner.step({"c": 5, "b": 1})
    runner.finish("b")
    runner.step({"c": 1})
    runner.finish("c")
    watch.finish()

    assert watch.num_steps == 8
