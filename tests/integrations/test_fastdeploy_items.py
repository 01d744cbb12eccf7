"""``multimodal_inputs`` become items, or are refused by an error that says what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fault_batches import media

from vlbatch.errors import InvalidItem, InvalidSetting
from vlbatch.integrations.fastdeploy import items_of


def test_frames_that_merge() -> None:
    """Where two frames become one, a video has half as many; a single image stays one."""
    inputs = {
        "mm_positions": [(0, 1), (2, 4)],
        "mm_hashes": ["a-1", "v-2"],
        "grid_thw": [(1, 2, 2), (4, 2, 4)],
        "image_type_ids": [0, 1, 1, 1, 1],
    }
    items = items_of(inputs, temporal_merge_size=2)
    assert [item.grid for item in items] == [(1, 1, 1), (2, 1, 2)]


def test_items_of_objects_and_nothing() -> None:
    """Positions may be objects; no media is no item."""

    class ImagePosition:
        offset, length = 3, 2

    (item,) = items_of(
        {
            "mm_positions": [ImagePosition()],
            "mm_hashes": ["a-1"],
            "grid_thw": np.array([[1, 2, 4]]),
        },
        payloads=["pixels"],
    )
    assert (item.offset, item.length, item.payload, item.key) == (3, 2, "pixels", "a-1")
    assert items_of(None) == items_of({}) == []
    assert items_of({"mm_positions": [], "mm_hashes": [], "grid_thw": []}) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mm_hashes": ["a-1"]}, "2 positions, 1 hashes, 2 grids, 2 payloads"),
        ({"mm_hashes": "ab"}, "mm_hashes is a str; expected a list"),
        ({"mm_hashes": 5}, "mm_hashes is a int; expected a list"),
        ({"mm_positions": [(0, 1), 3]}, "got position 3; expected two integers"),
        ({"mm_positions": [(0, 1), (3, 2, 1)]}, "expected two integers"),
        ({"mm_positions": [(0, 1), (3.5, 2)]}, "expected two integers"),
        ({"mm_positions": [(0, 1), ("3", "2")]}, "expected two integers"),
        ({"grid_thw": [(1, 2, 2)]}, "2 positions, 2 hashes, 1 grids"),
        ({"grid_thw": [(1, 2), (1, 2)]}, "expected frames, rows and columns"),
        ({"grid_thw": [(1, 2, 2), (1, 2)]}, "grid_thw"),
        ({"grid_thw": [(1, 2, 2), (0, 2, 4)]}, "all positive"),
        ({"grid_thw": [(1, 2, 2), (1, 2, 4.5)]}, "expected int64"),
        ({"grid_thw": [(1, 2, 2), (1, 2, "4")]}, "expected int64"),
        ({"grid_thw": 7}, "grid_thw is a int"),
        ({"images": np.zeros((11, 3))}, "got 11 patches; the grids have 12"),
        ({"images": 11}, "images are a int"),
        ({"image_type_ids": [0]}, r"got 1 image_type_ids; the grids have \[2\] frames"),
        ({"image_type_ids": ["a", "b"]}, "expected int64"),
        ({"image_type_ids": 1}, "image_type_ids is a int"),
    ],
)
def test_lists_that_do_not_fit(change: dict[str, object], says: str) -> None:
    """Lists of different lengths, and entries that are none, are refused by a typed error."""
    with pytest.raises(InvalidItem, match=says):
        items_of({**media(("a-1", 0, 1), ("b-2", 3, 2)), **change})


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"merge_size": 0}, InvalidSetting, "merge_size"),
        ({"merge_size": 1.5}, InvalidSetting, "merge_size"),
        ({"temporal_merge_size": 0}, InvalidSetting, "temporal_merge_size"),
        ({"temporal_merge_size": "2"}, InvalidSetting, "temporal_merge_size"),
        ({"seconds_per_grid": ["1.5"]}, InvalidItem, "expected a number or None"),
        ({"seconds_per_grid": 1.5}, InvalidItem, "seconds_per_grid is a float"),
        ({"seconds_per_grid": np.array([1.5, 2.5])}, InvalidItem, "2 seconds"),
        ({"payloads": 4}, InvalidItem, "payloads is a int"),
    ],
)
def test_arguments_that_do_not_fit(
    arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    """What is beside the inputs is checked too."""
    with pytest.raises(error, match=says):
        items_of(media(("a-1", 0, 1)), **arguments)
    with pytest.raises(InvalidItem, match="got a list; expected a mapping"):
        items_of([("a-1", 0, 1)])  # type: ignore[arg-type]  # refusing this is the test
