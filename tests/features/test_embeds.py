"""What feature arrays must look like, in numpy and in the tensor libraries that are installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from naive_media import item

from vlbatch.errors import FeatureRowsMismatch, InvalidItem, PlaceholderMismatch, VlbatchError
from vlbatch.features import FeatureSpec, PlacedItem
from vlbatch.features.embeds import check_embeds, dtype_name

SPEC = FeatureSpec(hidden_size=64, dtype="float32")

Make = Callable[..., Any]


def _numpy_array(shape: tuple[int, ...], dtype: str) -> Any:
    return np.zeros(shape, dtype=dtype)


def _torch_tensor(shape: tuple[int, ...], dtype: str) -> Any:
    torch = pytest.importorskip("torch")
    return torch.zeros(shape, dtype=getattr(torch, dtype))


def _paddle_tensor(shape: tuple[int, ...], dtype: str) -> Any:
    paddle = pytest.importorskip("paddle")
    paddle.disable_signal_handler()  # Paddle's own SIGTERM handler can leave a process hanging
    return paddle.zeros(shape, dtype=dtype)


@pytest.fixture(params=[_numpy_array, _torch_tensor, _paddle_tensor], ids=lambda f: f.__name__)
def make(request: pytest.FixtureRequest) -> Make:
    """``make(shape, dtype)``: zeros of one library; skipped where it is not installed."""
    request.param((1,), "float32")
    function: Make = request.param
    return function


def _torch_sparse() -> list[Any]:
    zeros = _torch_tensor((4, 64), "float32")
    return [zeros.to_sparse(), zeros.to_sparse_csr()]


def _paddle_sparse() -> list[Any]:
    sparse = pytest.importorskip("paddle").sparse
    ones = np.ones(2, dtype=np.float32)
    return [
        sparse.sparse_coo_tensor([[0, 1], [1, 2]], ones, [4, 64]),
        sparse.sparse_csr_tensor([0, 1, 2, 2, 2], [1, 2], ones, [4, 64]),
    ]


def _scipy_sparse() -> list[Any]:
    sparse = pytest.importorskip("scipy.sparse")
    zeros = np.zeros((4, 64), dtype=np.float32)
    return [sparse.csr_matrix(zeros), sparse.coo_array(zeros)]


def refused(error: type[VlbatchError], match: str, embeds: Any, spec: FeatureSpec = SPEC) -> None:
    """Expect this refusal of precomputed embeddings for the 4 places of an item, with its name."""
    placed = PlacedItem.of(item(2, 5, "X", mask="11011", embeds=embeds))
    with pytest.raises(error, match=match) as caught:
        check_embeds(placed.item, placed.num_rows, spec, "R")
    assert type(caught.value) is error
    assert caught.value.req_id == "R"
    assert "item 'X'" in str(caught.value)


def accepted(embeds: Any, spec: FeatureSpec = SPEC) -> None:
    placed = PlacedItem.of(item(2, 5, "X", mask="11011", embeds=embeds))
    check_embeds(placed.item, placed.num_rows, spec, "R")


class TestPrecomputed:
    """Hidden 64, 4 places: the refusals of B95."""

    def test_right_form_is_accepted(self, make: Make) -> None:
        """One array [places, hidden] of the dtype, bare or as a tuple of one level."""
        accepted(make((4, 64), "float32"))
        accepted((make((4, 64), "float32"),))

    def test_wrong_hidden_size(self, make: Make) -> None:
        """(4, 128) has the right number of rows and cannot be used."""
        refused(InvalidItem, "hidden size 128; expected 64", make((4, 128), "float32"))

    def test_wrong_number_of_rows(self, make: Make) -> None:
        """(5, 64) for 4 places would shift what follows; it has as many rows as the span."""
        said = "have 5 rows for 4 placeholder tokens"
        refused(PlaceholderMismatch, said, make((5, 64), "float32"))

    def test_wrong_dtype(self, make: Make) -> None:
        """Another dtype is refused, not converted."""
        refused(InvalidItem, "dtype float16; expected float32", make((4, 64), "float16"))

    @pytest.mark.parametrize("shape", [(64,), (1, 4, 64), ()])
    def test_wrong_rank(self, make: Make, shape: tuple[int, ...]) -> None:
        """Only a matrix has rows."""
        refused(InvalidItem, r"expected dense \[rows, hidden\]", make(shape, "float32"))

    def test_nan_by_policy(self, make: Make) -> None:
        """NaN is refused unless the spec allows it."""
        embeds = make((4, 64), "float32")
        embeds[3, 63] = float("nan")

        refused(InvalidItem, r"contain NaN \(setting: allow_nan\)", embeds)
        accepted(embeds, FeatureSpec(hidden_size=64, dtype="float32", allow_nan=True))

    @pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
    @pytest.mark.parametrize("make_all", [_torch_sparse, _paddle_sparse, _scipy_sparse])
    def test_sparse_layouts(self, make_all: Callable[[], list[Any]]) -> None:
        """A sparse array has a shape and a dtype too, but no rows to slice."""
        for embeds in make_all():
            refused(InvalidItem, r"expected dense \[rows, hidden\]", embeds)

    @pytest.mark.parametrize("embeds", [[[0.0] * 64] * 4, "embeds", 3])
    def test_not_an_array(self, embeds: object) -> None:
        """Lists and strings are not arrays."""
        refused(InvalidItem, r"expected dense \[rows, hidden\]", embeds)

    def test_every_level_is_checked(self, make: Make) -> None:
        """With several levels each has its rows, hidden size and NaN looked at."""
        spec = FeatureSpec(hidden_size=64, dtype="float32", num_levels=3)
        good = make((4, 64), "float32")
        bad = make((4, 64), "float32")
        bad[0, 0] = float("nan")

        accepted((good, good, good), spec)
        refused(InvalidItem, "have 1 levels; expected 3", good, spec)
        refused(InvalidItem, "hidden size 65", (good, good, make((4, 65), "float32")), spec)
        refused(PlaceholderMismatch, "3 rows", (good, make((3, 64), "float32"), good), spec)
        refused(InvalidItem, "NaN", (good, good, bad), spec)

    def test_unchecked_properties(self, make: Make) -> None:
        """A spec that states nothing checks rank, rows and NaN only."""
        accepted(make((4, 7), "float16"), FeatureSpec())
        refused(PlaceholderMismatch, "5 rows", make((5, 7), "float16"), FeatureSpec())


class TestEncoderOutputs:
    @pytest.mark.parametrize(
        ("features", "said"),
        [
            ((), "0 levels; expected 2"),
            ((np.zeros((4, 64), "f4"),), "1 levels; expected 2"),
            ((np.zeros((4, 64), "f4"), np.zeros((4, 63), "f4")), "hidden size 63; expected 64"),
            ((np.zeros((4, 64), "f4"), np.zeros((4, 64))), "dtype float64; expected float32"),
            ((np.zeros((4, 64), "f4"), None), "a NoneType of shape"),
            (np.zeros((2, 4, 64), "f4"), "a ndarray; expected a tuple of arrays, one a level"),
            (None, "a NoneType; expected a tuple of arrays"),
        ],
    )
    def test_wrong_form(self, features: Any, said: str) -> None:
        """Levels, hidden size and dtype are looked at before a feature is stored (V19)."""
        spec = FeatureSpec(hidden_size=64, dtype="float32", num_levels=2)

        with pytest.raises(FeatureRowsMismatch, match=f"the encoder delivered {said}"):
            spec.check_levels(features)

    def test_nan_of_an_encoder_is_not_looked_for(self) -> None:
        """Reading every encoder output back from a device would cost a synchronisation a step."""
        FeatureSpec(hidden_size=1).check_levels((np.full((4, 1), np.nan),))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64"])
def test_dtype_names_are_the_same_in_every_library(make: Make, dtype: str) -> None:
    """A spec names a dtype once for every library."""
    if make is _numpy_array and dtype == "bfloat16":
        pytest.skip("numpy has no bfloat16")
    assert dtype_name(make((1,), dtype).dtype) == dtype
