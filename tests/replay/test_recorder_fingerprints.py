"""Fingerprints of feature rows, and finding out which row a token got."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from vlbatch.errors import InvalidField
from vlbatch.replay.fingerprints import FingerprintBook, digest, row_fingerprints


def features(seed: int, rows: int = 4, dtype: str = "float32") -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((rows, 6)).astype(dtype)


class TestRowFingerprints:
    def test_first_eight_bytes_of_blake3(self) -> None:
        """A fingerprint is the first eight bytes of the blake3 hash of the row's bytes."""
        rows = features(0)

        prints = row_fingerprints(rows)

        expected = [int.from_bytes(blake3(r.tobytes()).digest()[:8], "little") for r in rows]
        assert prints.tolist() == expected

    def test_levels_are_hashed_together(self) -> None:
        """With several levels a row is its bytes on all of them, one level behind the other."""
        shallow, deep = features(0), features(1)

        prints = row_fingerprints((shallow, deep))

        joined = np.concatenate([shallow, deep], axis=1)
        assert prints.tolist() == row_fingerprints(joined).tolist()
        assert prints.tolist() != row_fingerprints((deep, shallow)).tolist()

    def test_views_hash_like_copies(self) -> None:
        """A strided view has the fingerprints of a contiguous copy of it."""
        rows = features(0, rows=9)[1::2]

        assert row_fingerprints(rows).tolist() == row_fingerprints(rows.copy()).tolist()

    def test_no_rows(self) -> None:
        """An empty slice of features has no fingerprints."""
        assert row_fingerprints(features(0)[:0]).shape == (0,)

    @pytest.mark.parametrize("library", ["torch", "paddle"])
    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    def test_tensors_hash_like_arrays(self, library: str, dtype: str) -> None:
        """A tensor has the fingerprints of the numpy array with the same values."""
        module = pytest.importorskip(library)
        rows = features(0, dtype=dtype)
        tensor = module.from_numpy(rows) if library == "torch" else module.to_tensor(rows)

        assert row_fingerprints(tensor).tolist() == row_fingerprints(rows).tolist()

    @pytest.mark.parametrize("library", ["torch", "paddle"])
    def test_bfloat16(self, library: str) -> None:
        """Rows of bfloat16, which numpy lacks, differ where their values differ."""
        module = pytest.importorskip(library)
        rows = module.zeros([3, 4], dtype=module.bfloat16)
        rows[1, 2] = 0.5

        prints = row_fingerprints(rows).tolist()

        assert prints[0] == prints[2] != prints[1]

    @pytest.mark.parametrize("shape", [(4,), (2, 3, 4), (3, 0)])
    def test_other_shapes_are_refused(self, shape: tuple[int, ...]) -> None:
        """Features that are not [rows, hidden] are refused, with their shape."""
        with pytest.raises(InvalidField, match=str(shape[0])):
            row_fingerprints(np.zeros(shape))

    def test_levels_of_different_lengths_are_refused(self) -> None:
        """All levels of an item have the same number of rows."""
        with pytest.raises(InvalidField, match=r"\[4, 3\]"):
            row_fingerprints((features(0), features(1, rows=3)))

    def test_digest_depends_on_the_order_of_rows(self) -> None:
        """The digest of an item changes when two of its rows change places."""
        prints = row_fingerprints(features(0))

        assert digest(prints) == digest(prints.copy())
        assert digest(prints) != digest(prints[::-1])


class TestFingerprintBook:
    def test_finds_the_row(self) -> None:
        """A print is traced to its key and row, one of nothing known to nothing."""
        book = FingerprintBook()
        book.learn("X", row_fingerprints(features(0)))
        book.learn("Y", row_fingerprints(features(1)))
        asked = np.concatenate([row_fingerprints(features(n))[[2, 0]] for n in (1, 0, 7)])

        found = book.find(asked)

        assert found == [("Y", 2), ("Y", 0), ("X", 2), ("X", 0), None, None]

    def test_preferred_key_first(self) -> None:
        """Of rows that several items have in common, the preferred item's is named."""
        book = FingerprintBook()
        shared = row_fingerprints(np.ones((2, 4)))
        for key in "XYZ":
            book.learn(key, shared)

        assert book.find(shared[:1], ["Z"]) == [("Z", 0)]
        assert book.find(shared[:1]) == [("X", 0)]

    def test_older_versions_still_agree(self) -> None:
        """Rows of a key that was encoded anew are that key's rows before and after."""
        book = FingerprintBook()
        old, new = row_fingerprints(features(0)), row_fingerprints(features(1))
        book.learn("X", old)
        book.learn("X", new)
        rows = np.arange(4)

        assert book.agrees("X", rows, old).all()
        assert book.agrees("X", rows, new).all()
        assert not book.agrees("X", rows, new[::-1]).any()

    def test_rows_beyond_the_item_do_not_agree(self) -> None:
        """A row number that the item does not have agrees with no print."""
        book = FingerprintBook()
        prints = row_fingerprints(features(0))
        book.learn("X", prints)

        assert book.agrees("X", np.array([4, 3]), prints[[3, 3]]).tolist() == [False, True]

    def test_memory_is_bounded(self) -> None:
        """Beyond the bound the longest unused keys are forgotten."""
        book = FingerprintBook(max_rows=10)
        for n in range(5):
            book.learn(f"X{n}", row_fingerprints(features(n)))

        assert book.num_rows == 8
        assert [n for n in range(5) if book.knows(f"X{n}")] == [3, 4]

    def test_pinned_keys_stay(self) -> None:
        """A key of a live request is never forgotten, and goes by age once it is not pinned."""
        book = FingerprintBook(max_rows=4)
        book.pin("X0")
        for n in range(3):
            book.learn(f"X{n}", row_fingerprints(features(n)))
        assert (book.knows("X0"), book.knows("X1"), book.num_rows) == (True, False, 4)

        book.learn("X3", row_fingerprints(features(3)))
        book.unpin("X0")

        assert book.num_rows == 4

    def test_learning_the_same_rows_again_costs_nothing(self) -> None:
        """Encoding an item again to the same rows keeps one version of them."""
        book = FingerprintBook()
        for _ in range(3):
            book.learn("X", row_fingerprints(features(0)))

        assert book.num_rows == 4
