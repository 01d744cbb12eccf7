"""PositionStore: life of a request, and a step's positions against naive concatenation."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from naive_positions import as_axes, naive_positions

from vlbatch.errors import (
    DuplicateRequest,
    InvalidField,
    InvalidSchedule,
    InvariantBroken,
    UnknownRequest,
    VlbatchError,
)
from vlbatch.items import Item
from vlbatch.positions import PositionRuns, PositionStore, build_runs


def image(offset: int, h: int, w: int) -> Item:
    return Item(key=f"@{offset}", modality="image", offset=offset, length=h * w, grid=(1, h, w))


IMAGE_RUNS = build_runs("qwen2_vl", [image(4, 4, 6)])  # delta -18
SMALL_RUNS = build_runs("qwen2_vl", [image(2, 2, 2)])  # delta -2
TEXT_RUNS = build_runs("qwen2_vl", [])


def store_of(**runs: PositionRuns) -> PositionStore:
    """Return a store of eight slots with these requests bound to slots 0, 1, ..."""
    store = PositionStore(8, 3)
    for slot, (req_id, its_runs) in enumerate(runs.items()):
        store.add(req_id, its_runs)
        store.bind(req_id, slot)
    return store


def assemble(store: PositionStore, *rows: tuple[str, int, int, int]) -> list[list[int]]:
    """Assemble rows (req_id, slot, computed, scheduled)."""
    req_ids, slots, computed, scheduled = zip(*rows, strict=True)
    return store.assemble(
        req_ids, np.array(slots), np.array(computed), np.array(scheduled)
    ).tolist()


class TestSteps:
    """Steps written out in public bug reports."""

    def test_drafts_of_image_and_text_requests(self) -> None:
        """Decode rows with drafts are at index + own delta on all axes (`sglang#28464`)."""
        store = store_of(A=IMAGE_RUNS, B=TEXT_RUNS)

        positions = assemble(store, ("A", 0, 40, 4), ("B", 1, 12, 4))

        assert positions == [[22, 23, 24, 25, 12, 13, 14, 15]] * 3

    def test_delta_through_chunks_hits_and_preemption(self) -> None:
        """The delta is the prompt's, whatever part of it was computed (`vllm#10403`)."""
        store = store_of(A=IMAGE_RUNS)
        for computed, scheduled in ((0, 16), (16, 16), (32, 8)):
            assemble(store, ("A", 0, computed, scheduled))
            assert store.delta("A") == -18

        store.unbind("A")
        assert store.delta("A") == -18
        store.bind("A", 5)
        assert store.delta("A") == -18
        assert store.delta_of_slot.tolist() == [0, 0, 0, 0, 0, -18, 0, 0]

    def test_resumed_prefill_covers_generated_tokens(self) -> None:
        """Generated tokens that are computed again keep their positions (`sglang#13700`)."""
        store = store_of(A=IMAGE_RUNS)
        store.unbind("A")
        store.bind("A", 3)

        first = assemble(store, ("A", 3, 0, 20))
        second = assemble(store, ("A", 3, 20, 23))

        naive = as_axes(naive_positions("qwen2_vl", [image(4, 4, 6)], 43))
        assert [a + b for a, b in zip(first, second, strict=True)] == naive
        assert [axis[-3:] for axis in second] == [[22, 23, 24]] * 3
        assert store.next_position("A", 43) == 25

    def test_prefill_beside_decode(self) -> None:
        """A new request's prefill leaves the delta of a decoding one alone (`mlx-vlm#1143`)."""
        store = store_of(A=IMAGE_RUNS, B=SMALL_RUNS)

        mixed = assemble(store, ("A", 0, 45, 1), ("B", 1, 0, 10))
        decode = assemble(store, ("A", 0, 46, 1), ("B", 1, 10, 1))

        assert mixed == [
            [27, 0, 1, 2, 2, 2, 2, 4, 5, 6, 7],
            [27, 0, 1, 2, 2, 3, 3, 4, 5, 6, 7],
            [27, 0, 1, 2, 3, 2, 3, 4, 5, 6, 7],
        ]
        assert decode == [[28, 8]] * 3

    def test_nothing_is_left_of_a_larger_step(self) -> None:
        """After eight requests finish, a step of one has only its tokens (`transformers#44873`)."""
        store = store_of(**{f"R{number}": IMAGE_RUNS for number in range(8)})
        assemble(store, *[(f"R{number}", number, 40, 1) for number in range(8)])
        for number in range(8):
            store.remove(f"R{number}")
        store.add("new", TEXT_RUNS)
        store.bind("new", 6)

        assert assemble(store, ("new", 6, 0, 3)) == [[0, 1, 2]] * 3
        assert store.delta_of_slot.tolist() == [0] * 8

    def test_step_without_rows(self) -> None:
        """A step without rows has no positions."""
        nothing = np.zeros(0, dtype=np.int64)

        assert store_of().assemble([], nothing, nothing, nothing).shape == (3, 0)

    def test_one_axis(self) -> None:
        """A store of one axis returns one row, indices as positions."""
        store = PositionStore(2, 1)
        store.add("A", build_runs("1d", [image(0, 2, 2)]))
        store.bind("A", 1)

        assert assemble(store, ("A", 1, 3, 4)) == [[3, 4, 5, 6]]


class TestStaticBuffer:
    def test_written_in_place(self) -> None:
        """A given buffer is written up to the step's tokens, and not beyond."""
        store = store_of(A=IMAGE_RUNS, B=TEXT_RUNS)
        buffer = np.full((3, 12), -7, dtype=np.int64)
        rows = (np.array([0, 1]), np.array([26, 5]), np.array([4, 2]))

        positions = store.assemble(["A", "B"], *rows, out=buffer)

        assert np.shares_memory(positions, buffer)
        assert positions.tolist() == store.assemble(["A", "B"], *rows).tolist()
        assert buffer[:, :6].tolist() == [
            [4, 4, 10, 11, 5, 6],
            [7, 7, 10, 11, 5, 6],
            [8, 9, 10, 11, 5, 6],
        ]
        assert (buffer[:, 6:] == -7).all()

    @pytest.mark.parametrize(
        "buffer",
        [
            np.zeros((3, 5), dtype=np.int64),
            np.zeros((1, 9), dtype=np.int64),
            np.zeros((3, 9), dtype=np.int32),
        ],
        ids=["short", "one axis", "int32"],
    )
    def test_unfit_buffer(self, buffer: np.ndarray) -> None:
        """A buffer of another shape or dtype is refused and stays as it was."""
        store = store_of(A=IMAGE_RUNS)

        with pytest.raises(InvalidField, match=r"int64 \(3, 6\)"):
            store.assemble(["A"], np.array([0]), np.array([0]), np.array([6]), out=buffer)

        assert not buffer.any()


def random_runs(rng: random.Random) -> tuple[PositionRuns, list[tuple[int, int, int]]]:
    """Draw a prompt and return its runs and its naive positions, far into the outputs."""
    items = []
    token = rng.randint(0, 5)
    for _ in range(rng.randint(0, 3)):
        items.append(image(token, rng.randint(1, 4), rng.randint(1, 4)))
        token = items[-1].stop + rng.randint(0, 5)
    return build_runs("qwen2_vl", items), naive_positions("qwen2_vl", items, token + 200)


@pytest.mark.parametrize("seed", range(20))
def test_random_walk(seed: int) -> None:
    """Through any life of many requests a step equals the naive positions of its chunks."""
    rng = random.Random(seed)
    store = PositionStore(6, 3)
    naive: dict[str, list[tuple[int, int, int]]] = {}
    slots: dict[str, int] = {}
    for action in range(200):
        waiting = [req_id for req_id in naive if req_id not in slots]
        free = [slot for slot in range(6) if slot not in slots.values()]
        match rng.choice(["add", "bind", "unbind", "remove", "step", "step", "step"]):
            case "add":
                req_id = f"R{action}"
                runs, naive[req_id] = random_runs(rng)
                store.add(req_id, runs)
            case "bind" if waiting and free:
                req_id = rng.choice(waiting)
                slots[req_id] = rng.choice(free)
                store.bind(req_id, slots[req_id])
            case "unbind" if slots:
                req_id = rng.choice(list(slots))
                del slots[req_id]
                store.unbind(req_id)
            case "remove" if naive:
                req_id = rng.choice(list(naive))
                del naive[req_id]
                slots.pop(req_id, None)
                store.remove(req_id)
            case "step" if slots:
                rows = []
                expected: list[tuple[int, int, int]] = []
                for req_id in rng.sample(list(slots), rng.randint(1, len(slots))):
                    computed = rng.choice([rng.randint(0, 60), rng.randint(60, 150)])
                    scheduled = rng.choice([1, 1, 2, rng.randint(1, 30)])
                    rows.append((req_id, slots[req_id], computed, scheduled))
                    expected += naive[req_id][computed : computed + scheduled]
                assert assemble(store, *rows) == as_axes(expected), f"seed {seed}, {rows}"
        store.check()
        assert store.req_ids == tuple(naive)
        assert len(store) == len(naive)
        assert all(req_id in store for req_id in naive)


class TestRefusals:
    """A refused call leaves the store as it was."""

    @pytest.mark.parametrize(
        ("call", "error"),
        [
            (lambda store: store.add("A", TEXT_RUNS), DuplicateRequest),
            (lambda store: store.add("C", build_runs("1d", [])), InvalidField),
            (lambda store: store.bind("C", 7), UnknownRequest),
            (lambda store: store.bind("A", 7), InvariantBroken),
            (lambda store: store.bind("W", 0), InvariantBroken),
            (lambda store: store.bind("W", 8), InvariantBroken),
            (lambda store: store.bind("W", -1), InvariantBroken),
            (lambda store: store.unbind("C"), UnknownRequest),
            (lambda store: store.unbind("W"), InvariantBroken),
            (lambda store: store.remove("C"), UnknownRequest),
            (lambda store: store.runs_of("C"), UnknownRequest),
            (lambda store: store.delta("C"), UnknownRequest),
            (lambda store: store.next_position("C", 50), UnknownRequest),
            (lambda store: store.next_position("A", 27), InvalidSchedule),
        ],
    )
    def test_state_is_unchanged(
        self, call: Callable[[PositionStore], object], error: type[VlbatchError]
    ) -> None:
        """Each misuse raises its own error and changes nothing."""
        store = store_of(A=IMAGE_RUNS, B=TEXT_RUNS)
        store.add("W", SMALL_RUNS)
        before = assemble(store, ("A", 0, 0, 40), ("B", 1, 3, 1))

        with pytest.raises(error) as refusal:
            call(store)

        assert refusal.value.req_id in {"A", "C", "W"}
        assert (len(store), "C" in store) == (3, False)
        assert store.delta_of_slot.tolist() == [-18, 0, 0, 0, 0, 0, 0, 0]
        assert assemble(store, ("A", 0, 0, 40), ("B", 1, 3, 1)) == before
        store.check()

    def test_remove_twice(self) -> None:
        """A finished request is unknown afterwards."""
        store = store_of(A=IMAGE_RUNS)
        store.remove("A")

        with pytest.raises(UnknownRequest):
            store.remove("A")

    @pytest.mark.parametrize(
        ("row", "error"),
        [
            (("A", 5, 40, 1), InvariantBroken),
            (("A", 1, 0, 4), InvariantBroken),
            (("W", 5, 99, 1), InvariantBroken),
            (("C", 5, 0, 4), UnknownRequest),
        ],
        ids=["slot without request", "slot of another", "preempted", "unknown"],
    )
    def test_wrong_row(self, row: tuple[str, int, int, int], error: type[VlbatchError]) -> None:
        """A row that cannot be assembled is refused before the buffer is written."""
        store = store_of(A=IMAGE_RUNS, B=SMALL_RUNS)
        store.add("W", SMALL_RUNS)
        buffer = np.zeros((3, 8), dtype=np.int64)
        req_ids, slots, computed, scheduled = zip(("B", 1, 12, 1), row, strict=True)

        with pytest.raises(error) as refusal:
            store.assemble(
                req_ids, np.array(slots), np.array(computed), np.array(scheduled), out=buffer
            )

        assert refusal.value.req_id == row[0]
        assert not buffer.any()

    def test_slot_deltas_are_read_only(self) -> None:
        """The published deltas cannot be written by a reader."""
        with pytest.raises(ValueError, match="read-only"):
            store_of(A=IMAGE_RUNS).delta_of_slot[0] = 1

    def test_slot_deltas_keep_their_address(self) -> None:
        """The published deltas stay at one address and show later changes."""
        store = store_of(A=IMAGE_RUNS)
        deltas = store.delta_of_slot
        store.add("B", SMALL_RUNS)
        store.bind("B", 4)

        assert deltas.tolist() == [-18, 0, 0, 0, -2, 0, 0, 0]
        assert deltas is store.delta_of_slot


class TestCheck:
    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda store: store._delta_of_slot.__setitem__(0, -17), "slot 0 .*-17.*-18"),
            (lambda store: store._media_stop_of_slot.__setitem__(1, 3), r"slot 1 .*\(0, 3\)"),
            (lambda store: store._delta_of_slot.__setitem__(5, 1), "slot 5"),
            (lambda store: store._slots.__setitem__("B", 0), "'B'.*slot 0 is also 'A'"),
            (lambda store: store._slots.__setitem__("ghost", 5), "'ghost'.*slot 5"),
            (
                lambda store: store._runs.__setitem__(
                    "B", PositionRuns(3, IMAGE_RUNS.runs, delta=-1, media_stop=28)
                ),
                r"'B'.*\(28, -1, 3\).*\(28, -18, 3\)",
            ),
            (
                lambda store: store._runs.__setitem__(
                    "B",
                    PositionRuns.from_records(
                        3, [(4, 8, 4, 0, -2, 2, 2, 1.0), (6, 9, 6, 0, -2, 1, 3, 1.0)]
                    ),
                ),
                r"'B'.*overlap.*\[4, 8, 6, 9\]",
            ),
        ],
    )
    def test_broken_state_is_named(
        self, damage: Callable[[PositionStore], object], message: str
    ) -> None:
        """Each broken invariant is reported with the request or slot and the terms."""
        store = store_of(A=IMAGE_RUNS, B=TEXT_RUNS)
        store.check()
        damage(store)

        with pytest.raises(InvariantBroken, match=message):
            store.check()


def test_memory_of_a_request() -> None:
    """A request costs at most 2 KB plus 32 bytes a media item, whatever its length."""
    num_requests, num_images = 200, 64
    images = [image(500 * number, 20, 24) for number in range(num_images)]  # 32k tokens
    store = PositionStore(num_requests, 3)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(num_requests):
        store.add(f"R{number}", build_runs("qwen2_vl", images))
        store.bind(f"R{number}", number)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert (after - before) / num_requests <= 2048 + 32 * num_images
    assert store.nbytes == num_requests * (32 * num_images + 16)
