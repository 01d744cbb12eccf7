"""Settings with which no step can be made are refused, naming the setting."""

from __future__ import annotations

import pytest

from vlbatch.errors import InvalidSetting
from vlbatch.runner import RunSettings
from vlbatch.runner.state import declare_fields, make_cache, moving_fields

COUNTS = [
    "max_num_seqs", "chunk", "token_budget", "kv_blocks", "block_size", "max_model_len",
    "encode_rows",
]  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 2**31])
def test_counts_are_positive_int32(name, value):
    """Every count is at least one, and fits the int32 in which kernels count."""
    with pytest.raises(InvalidSetting, match=f"got {value}; expected 1..2147483647") as caught:
        RunSettings(**{name: value})

    assert caught.value.setting == name


def test_a_step_has_a_token_for_every_decode():
    """A token budget below the number of rows is refused: full of decodes, it would starve one."""
    with pytest.raises(InvalidSetting, match="room for 3 tokens, but up to 4 requests") as caught:
        RunSettings(max_num_seqs=4, token_budget=3)

    assert caught.value.setting == "token_budget, max_num_seqs"


@pytest.mark.parametrize(("cache_bytes", "rows"), [(64, 1), (127, 1), (128, 2), (2**40, 2**34)])
def test_the_cache_counts_whole_rows(cache_bytes, rows):
    """A cache budget in bytes holds whole feature rows of float32, 16 elements of 4 bytes here."""
    assert make_cache(RunSettings(cache_bytes=cache_bytes), 16).capacity_rows == rows


@pytest.mark.parametrize("cache_bytes", [-5, 0, 63])
def test_a_cache_without_a_row_is_refused(cache_bytes):
    """A cache that cannot hold one feature row names the run's own setting."""
    with pytest.raises(InvalidSetting) as caught:
        make_cache(RunSettings(cache_bytes=cache_bytes), 16)

    assert caught.value.setting == "cache_bytes"


def test_fields_that_move():
    """Fields in slots stay where they are; all others of a request move with its row."""
    settings = RunSettings()

    assert list(moving_fields(settings)) == ["block_table", "next_token", "max_tokens"]
    assert {f.name for f in declare_fields(settings)} - set(moving_fields(settings)) == {
        "token_ids"
    }
