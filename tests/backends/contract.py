"""What every backend must do, whichever library it wraps.

A suite for a backend subclasses these classes beside a fixture ``backend`` that gives it;
``test_backend_contract.py`` does so for each backend that the library knows.

- ``ArrayContract``: the operations of the ``Backend`` protocol, each against plain lists.
- ``FieldContract``: a batch with a field of every kind, residency, layout and dtype.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from exposed import address_of, dtype_of, to_host
from tagged import (
    DTYPES,
    MAX_STEP_TOKENS,
    NUM_DRAFTS,
    SIGNED,
    TaggedBatch,
    assert_same,
    stored,
)

from vlbatch import Backend
from vlbatch.backends.base import pow2_buckets
from vlbatch.backends.dtypes import STORED_AS
from vlbatch.fields import Kind

AnyBackend = Backend[Any, Any]

# destinations <- sources, over 8 entries
MOVES = {
    "swap": ([0, 1], [1, 0]),
    "cycle of three": ([0, 3, 5], [3, 5, 0]),
    "chain of five": ([0, 1, 2, 3, 4], [1, 2, 3, 4, 7]),
    "overlap up": ([1, 2, 3, 4], [0, 1, 2, 3]),
    "overlap down": ([0, 1, 2, 3], [1, 2, 3, 4]),
    "two cycles": ([0, 1, 2, 5, 6, 7], [2, 0, 1, 7, 5, 6]),
    "reversal": ([0, 1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0]),
    "one": ([3], [6]),
    "none": ([], []),
}


def indices(values: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def numbers(dtype: str, *shape: int) -> np.ndarray[Any, Any]:
    """Host values of a storage dtype, different from entry to entry where it can be."""
    count = int(np.prod(shape))
    values = np.arange(count) % 3 == 0 if dtype == "bool" else np.arange(count) % 113 + 1
    return values.astype(STORED_AS[dtype]).reshape(shape)


class ArrayContract:
    """Operations on stored arrays; each array lies inside a block whose rest must not change."""

    margin = 16

    def place(self, backend: AnyBackend, values: np.ndarray[Any, Any], dtype: str) -> Any:
        """Put values in the middle of a block of ones; returns their stored array."""
        self.block = backend.allocate(values.size + 2 * self.margin, dtype)
        self.backend = backend
        backend.fill(self.block, np.ones((), STORED_AS[dtype]))
        array = backend.view(self.block, self.margin, values.shape)
        backend.write(array, 0, values)
        self.array, self.address = array, backend.address(array)
        return array

    def assert_holds(self, expected: np.ndarray[Any, Any] | list[Any]) -> None:
        """The array holds this, at its old address, and its neighbours are untouched."""
        held = self.backend.read(self.array, 0, len(expected))
        np.testing.assert_array_equal(held, np.array(expected, dtype=held.dtype))
        assert self.backend.address(self.array) == self.address
        whole = self.backend.read(self.block, 0, held.size + 2 * self.margin)
        assert (whole[: self.margin] == 1).all()
        assert (whole[-self.margin :] == 1).all()
        np.testing.assert_array_equal(whole[self.margin : -self.margin], held.ravel())

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_new_block_is_zero(self, backend: AnyBackend, dtype: str) -> None:
        """A block holds zeros of the storage dtype."""
        held = backend.read(backend.allocate(9, dtype), 0, 9)

        assert held.dtype == STORED_AS[dtype]
        assert not held.any()

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_views_and_handles_share_the_block(self, backend: AnyBackend, dtype: str) -> None:
        """A view lies at its elements of the block, and the user's handle shows the same bytes."""
        values = numbers(dtype, 4, 3)
        array = self.place(backend, values, dtype)
        handle = backend.expose(array, dtype)
        itemsize = STORED_AS[dtype].itemsize

        assert self.address == backend.address(self.block) + self.margin * itemsize
        assert address_of(handle) == self.address
        np.testing.assert_array_equal(to_host(handle), values)
        handle[1] = handle[3]

        values[1] = values[3]
        self.assert_holds(values)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_handle_dtype(self, backend: AnyBackend, dtype: str) -> None:
        """The user sees the declared dtype; only numpy shows bfloat16 as uint16 bits."""
        handle = backend.expose(self.place(backend, numbers(dtype, 4), dtype), dtype)
        expected = str(STORED_AS[dtype]) if backend.name == "numpy" else dtype

        assert dtype_of(handle) == expected

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_read_is_a_small_copy(self, backend: AnyBackend, dtype: str) -> None:
        """What was read does not change with the array, and keeps no more than itself alive."""
        values = numbers(dtype, 6, 2)
        array = self.place(backend, values, dtype)
        got = backend.read(array, 2, 4)
        backend.fill(array, np.zeros((), STORED_AS[dtype]))

        np.testing.assert_array_equal(got, values[2:4])
        assert got.base is None or np.prod(got.base.shape) <= got.size

    def test_empty_read_and_write(self, backend: AnyBackend) -> None:
        """Nothing can be read and written anywhere."""
        array = self.place(backend, numbers("int32", 4), "int32")

        assert backend.read(array, 2, 2).shape == (0,)
        backend.write(array, 4, numbers("int32", 0))
        self.assert_holds(numbers("int32", 4))

    @pytest.mark.parametrize("axis", [0, 1])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_clear_a_range(self, backend: AnyBackend, dtype: str, axis: int) -> None:
        """A range of either axis takes the default, each field of a group its own."""
        values = numbers(dtype, 3, 5, 2)
        array = self.place(backend, values, dtype)
        default = numbers(dtype, 3, 1, 1) if axis == 1 else numbers(dtype, 1)[0]
        backend.clear(array, axis, 1, 3, np.asarray(default))

        values[(slice(None),) * axis + (slice(1, 3),)] = default
        self.assert_holds(values)

    @pytest.mark.parametrize("moves", MOVES)
    @pytest.mark.parametrize("axis", [0, 1])
    def test_move(self, backend: AnyBackend, axis: int, moves: str) -> None:
        """All sources are read before any destination is written: chains and cycles are right."""
        destinations, sources = MOVES[moves]
        values = numbers("int64", *((8, 3), (2, 8, 3))[axis])
        array = self.place(backend, values, "int64")
        backend.move(array, axis, indices(destinations), indices(sources))

        rows = np.moveaxis(values, axis, 0)
        expected = rows.copy()
        for destination, source in zip(destinations, sources, strict=True):
            expected[destination] = rows[source]
        self.assert_holds(np.moveaxis(expected, 0, axis))

    @pytest.mark.parametrize("axis", [0, 1])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_move_of_every_dtype(self, backend: AnyBackend, dtype: str, axis: int) -> None:
        """Every dtype can be moved along both axes."""
        values = numbers(dtype, 4, 4, 2)
        array = self.place(backend, values, dtype)
        backend.move(array, axis, indices([0, 1, 3]), indices([1, 3, 0]))

        self.assert_holds(np.take(values, [1, 3, 2, 0], axis))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_move_prefixes_of_unequal_width(self, backend: AnyBackend, dtype: str) -> None:
        """Prefixes of 0 to 300 elements move at once, in a cycle, each to its own row."""
        lengths = [0, 1, 300, 2, 65, 64]
        values = np.zeros((6, 300), STORED_AS[dtype])
        for row, length in enumerate(lengths):
            values[row, :length] = numbers(dtype, length)[::-1]
        array = self.place(backend, values, dtype)
        destinations, sources = [0, 1, 2, 3, 4, 5], [2, 0, 1, 5, 3, 4]
        widths = [max(lengths[s], lengths[d]) for d, s in zip(destinations, sources, strict=True)]
        backend.move_prefixes(array, indices(widths), indices(destinations), indices(sources))

        self.assert_holds(values[sources])

    @pytest.mark.parametrize("dtype", SIGNED)
    def test_remap(self, backend: AnyBackend, dtype: str) -> None:
        """Row numbers are looked up; what names no row becomes -1, beyond the table too."""
        largest = np.iinfo(dtype).max
        values = np.array([[2, 0], [-1, 1], [3, largest], [-7, 4]], dtype=dtype)
        array = self.place(backend, values, dtype)
        backend.remap(array, indices([5, -1, 0, 2]))

        self.assert_holds([[0, 5], [-1, -1], [2, -1], [-1, -1]])

    def test_remap_with_a_table_beyond_the_dtype(self, backend: AnyBackend) -> None:
        """A table longer than a small dtype counts is no problem: its row numbers fit."""
        array = self.place(backend, np.array([0, 100, 127], dtype=np.int8), "int8")
        backend.remap(array, np.arange(200)[::-1] % 100)

        self.assert_holds([99, 99, 72])

    def test_bucket_widths(self) -> None:
        """Buckets cover every non-empty width once, and none is twice as wide as its narrowest."""
        widths = indices([0, 1, 1, 2, 3, 4, 5, 8, 9, 0, 1000, 513, 512])
        buckets = pow2_buckets(widths)

        members = [m for _, bucket in buckets for m in bucket.tolist()]
        assert sorted(members) == np.flatnonzero(widths).tolist()
        for width, bucket in buckets:
            assert width == widths[bucket].max()
            assert width < 2 * widths[bucket].min() or width == 1


class FieldContract:
    """A batch that declares everything: what each request wrote is what it reads, always."""

    @pytest.fixture
    def all_fields(self, backend: AnyBackend) -> TaggedBatch:
        return TaggedBatch(backend)

    def test_values_follow_their_request(self, all_fields: TaggedBatch, seed: int) -> None:
        """Through removals, newcomers and reorders every value stays with its request.

        FastDeploy I1-I5, I13 (fields are moved as declared, none by hand, none twice, no row is
        shared), I8, I9 (rows are dense after each step).
        """
        choose = random.Random(seed)
        for i in range(14):
            live = list(all_fields.tags)
            if len(live) == all_fields.batch.capacity or (len(live) > 2 and choose.random() < 0.3):
                all_fields.remove(choose.choice(live))
            all_fields.add(f"r{i}", prompt_len=choose.choice([1, 2, 8]))
            all_fields.assert_all_hold()
            live = list(all_fields.tags)
            chosen = choose.sample(live, choose.randint(0, len(live)))
            order = all_fields.step(**dict.fromkeys(chosen, 1))
            assert sorted(order.req_ids) == sorted(chosen)
            assert None not in all_fields.batch.rows
            all_fields.assert_all_hold()

    def test_cycle_of_three_requests(self, all_fields: TaggedBatch) -> None:
        """Three requests that change places in a ring keep their values (FastDeploy M1)."""
        for req_id, prompt_len in {"extend": 4, "idle": 4, "decode": 1}.items():
            all_fields.add(req_id, prompt_len)
        all_fields.step(extend=1, idle=1, decode=1)
        moves = all_fields.batch.plan({"extend": 1, "decode": 1}).moves
        all_fields.step(extend=1, decode=1)

        assert (moves.destinations.tolist(), moves.sources.tolist()) == ([0, 1, 2], [2, 0, 1])
        assert all_fields.batch.rows == ("decode", "extend", "idle")
        all_fields.assert_all_hold()

    def test_views_taken_earlier_stay_right(self, all_fields: TaggedBatch) -> None:
        """A view of a field's rows shows every later state, and no field changes its extent.

        FastDeploy I25: what is active is a number of rows, never another view of the buffer.
        """
        handles = all_fields.handles
        shapes = {name: tuple(handle.shape) for name, handle in handles.items()}
        views = {name: handle[1:3] for name, handle in handles.items()}
        for req_id in "abcd":
            all_fields.add(req_id)
        for scheduled in ({"c": 1, "a": 1}, {"d": 2, "b": 1, "c": 1}, {}, {"b": 1}):
            all_fields.step(**scheduled)
            for name, view in views.items():
                np.testing.assert_array_equal(to_host(view), to_host(handles[name])[1:3])
        all_fields.remove("c")
        all_fields.step(b=1)
        all_fields.assert_all_hold()

        for name, view in views.items():
            np.testing.assert_array_equal(to_host(view), to_host(handles[name])[1:3])
            assert tuple(all_fields.batch[name].shape) == shapes[name]

    def test_unused_rows_hold_defaults(self, all_fields: TaggedBatch) -> None:
        """Nothing of a request is left in row-resident arrays once it is gone."""
        fresh = {name: to_host(handle) for name, handle in all_fields.handles.items()}
        for req_id in "abcd":
            all_fields.add(req_id)
        all_fields.step(a=1, b=1, c=1, d=1)
        for req_id in "dbac":
            all_fields.remove(req_id)

        for field in all_fields.per_request():
            if field.residency == "rows" and field.kind is not Kind.HOST:
                assert_same(to_host(all_fields.handles[field.name]), fresh[field.name], "-", field)

    def test_newcomers_start_with_defaults(self, all_fields: TaggedBatch) -> None:
        """A request gets the declared default for what it does not set, in a used slot too."""
        for req_id in "ab":
            all_fields.add(req_id)
        all_fields.step(a=1, b=1)
        all_fields.remove("a")
        all_fields.batch.add("new", prompt_len=3)

        for name in all_fields.names(Kind.HOST):
            assert all_fields.batch.read("new", name) is None
        for name in all_fields.names(Kind.RAGGED):
            assert all_fields.batch.length("new", name) == 0
        for name in all_fields.names(Kind.ROW, Kind.PER_DRAFT):
            field = all_fields.batch.registry[name]
            shape = field.row_shape(NUM_DRAFTS)
            expected = np.full(shape, stored(field, field.default))
            assert_same(all_fields.batch.read("new", name), expected, "new", field)

    def test_derived_fields_are_rebuilt(self, all_fields: TaggedBatch) -> None:
        """Sums and packed buffers come from each step's lengths, pads included.

        FastDeploy I4, I17: running sums and token-level buffers are never permuted by row.
        """
        batch, capacity = all_fields.batch, all_fields.batch.capacity
        for req_id in "abc":
            all_fields.add(req_id)
        for scheduled in ({"a": 3, "b": 1, "c": 2}, {"c": 1}, {}):
            order = all_fields.step(**scheduled)
            lengths = [scheduled[r] for r in order.req_ids]
            sums = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
            tokens = [row % 2 for row, n in enumerate(lengths) for _ in range(n)]
            slots = [batch.slot_of(r) for r in order.req_ids]
            whole = {name: to_host(handle) for name, handle in all_fields.handles.items()}

            assert whole["slot_of_row"].tolist() == slots + [-1] * (capacity - len(slots))
            for dtype in SIGNED:
                pad = sums[-1:] * (capacity - len(lengths))
                assert whole[f"sums_{dtype}"].tolist() == sums + pad
            for dtype in DTYPES:
                field = batch.registry[f"packed_{dtype}"]
                expected = stored(field, tokens + [1] * (MAX_STEP_TOKENS - len(tokens)))
                assert_same(whole[field.name], expected, "-", field)

    def test_row_numbers_follow_rows(self, all_fields: TaggedBatch) -> None:
        """Row-valued fields name the same request after a move, and no one once it left.

        FastDeploy I27, and the newcomer that takes the row of a request that left.
        """
        batch = all_fields.batch
        names = all_fields.names(Kind.ROW_VALUED)
        for req_id in "abcd":
            all_fields.add(req_id, prompt_len=2)
        all_fields.step(a=1, b=1, c=1, d=1)
        row = {r: batch.row_of(r) for r in "abcd"}
        for name in names:
            if batch.registry[name].whole:
                batch[name] = [row["d"], -1, row["b"], row["a"]]
            else:
                batch.write("c", name, [row["d"], row["a"]])
        all_fields.remove("a")
        all_fields.add("e")
        assert batch.row_of("e") == row["a"]
        all_fields.step(d=1, e=1)

        assert batch.rows[:2] == ("d", "e")
        for name in names:
            if batch.registry[name].whole:
                assert to_host(batch[name]).tolist() == [0, -1, batch.row_of("b"), -1]
            else:
                assert to_host(batch[name])[batch.row_of("c")].tolist() == [0, -1]

    def test_global_fields_are_untouched(self, all_fields: TaggedBatch) -> None:
        """Nothing that requests do changes a field of the whole batch (FastDeploy I26)."""
        names = all_fields.names(Kind.GLOBAL)
        for name in names:
            all_fields.batch[name] = [0, 1, 0, 1, 1]
        before = {name: to_host(all_fields.batch[name]) for name in names}
        for req_id in "abc":
            all_fields.add(req_id)
        all_fields.step(c=1, b=1)
        all_fields.remove("b")
        all_fields.step(a=1)

        for name in names:
            np.testing.assert_array_equal(to_host(all_fields.batch[name]), before[name])

    def test_reset_in_place(self, all_fields: TaggedBatch) -> None:
        """Reset brings back exactly the state of a new batch, at the same addresses.

        FastDeploy R1 (no address changes), R2, R5, R7 (no field and no request is left), R3 (init
        and reset agree), R4 (nothing is skipped silently).
        """
        fresh = {name: to_host(handle) for name, handle in all_fields.handles.items()}
        for req_id in "abc":
            all_fields.add(req_id)
        for name in all_fields.names(Kind.GLOBAL, Kind.PACKED):
            all_fields.batch[name] = 0
        all_fields.step(a=2, b=1)
        all_fields.batch.preempt("b")
        all_fields.batch.reset()
        all_fields.tags.clear()

        batch = all_fields.batch
        assert (batch.req_ids, batch.preempted, batch.rows) == ((), (), ())
        for name, handle in all_fields.handles.items():
            np.testing.assert_array_equal(to_host(handle), fresh[name], err_msg=name)
            assert address_of(handle) == address_of(batch[name])
        for name in all_fields.names(Kind.HOST):
            assert batch.objects(name) == [None] * batch.capacity
        all_fields.add("a")
        all_fields.step(a=1)
        all_fields.assert_all_hold()

    def test_preempted_values_come_back(self, all_fields: TaggedBatch) -> None:
        """A resumed request finds every kept value, in another slot and row."""
        for req_id in "abc":
            all_fields.add(req_id)
        all_fields.step(a=1, b=1, c=1)
        tag = all_fields.tags.pop("a")
        all_fields.batch.preempt("a")
        all_fields.add("d")
        all_fields.step(b=1, d=1)
        all_fields.assert_all_hold()
        all_fields.batch.resume("a")
        all_fields.tags["a"] = tag
        all_fields.assert_all_hold()
        all_fields.step(a=1, c=1)
        all_fields.assert_all_hold()

    def test_whole_field_writes(self, all_fields: TaggedBatch) -> None:
        """Assigning an array or a scalar copies into the field, and converts it to its dtype."""
        for name, handle in all_fields.handles.items():
            field = all_fields.batch.registry[name]
            if field.kind is Kind.RAGGED:
                continue
            shape = to_host(handle).shape
            values = np.arange(np.prod(shape)).reshape(shape) % 2
            all_fields.batch[name] = values
            assert_same(to_host(handle), stored(field, values), "-", field)
            all_fields.batch[name] = 1
            assert_same(to_host(handle), np.full(shape, stored(field, 1)), "-", field)
