"""``vlbatch graphs`` and the figures that it shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from vlbatch.cli.graphs import graphs_command
from vlbatch.cli.graphs_report import padding_of, step_buffers, tile_bounds
from vlbatch.errors import InvalidSetting
from vlbatch.graphs import GraphConfig, TileShape


def call(tmp_path: Path, *options: object) -> tuple[dict[str, Any], str]:
    out = tmp_path / "out.json"
    done = CliRunner().invoke(
        graphs_command, [*map(str, options), "--json", str(out)], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    return json.loads(out.read_text()), done.output


@pytest.mark.parametrize(("rows", "count"), [(8, 4), (64, 11), (100, 16), (256, 27), (512, 35)])
def test_worked_counts(tmp_path, rows, count):
    """The numbers of graphs are those of the rule's worked examples, sizes descending."""
    outcome, text = call(tmp_path, "--max-num-seqs", rows)

    assert len(outcome["sizes"]) == count
    assert outcome["sizes"] == sorted(outcome["sizes"], reverse=True)
    assert outcome["sizes"][0] == rows
    assert f"decode: {count} graphs of {rows}, " in text


def test_only_prefill(tmp_path):
    """Without decode graphs the sizes are those of prefills, up to 512 tokens."""
    outcome, text = call(tmp_path, "--max-num-seqs", 8, "--only-prefill")

    assert (len(outcome["sizes"]), outcome["sizes"][0]) == (35, 512)
    assert list(outcome["kinds"]) == ["prefill"]
    assert "decode:" not in text


def test_drafts(tmp_path):
    """With 3 drafts decode sizes are whole groups of 4 tokens."""
    outcome, _ = call(tmp_path, "--max-num-seqs", 8, "--draft-tokens", 3)

    assert outcome["sizes"] == [32, 16, 8, 4]


def test_buffers(tmp_path):
    """Shapes and bytes are those of the formulas, worked by hand for a small case."""
    outcome, text = call(
        tmp_path, "--max-num-seqs", 8, "--group", 4, "--max-model-len", 128, "--hidden", 16
    )
    by_name = {b["name"]: b for b in outcome["buffers"]}

    assert by_name["embeddings"]["shape"] == [512, 16]
    assert by_name["embeddings"]["bytes"] == 512 * 16 * 2
    assert by_name["positions"]["bytes"] == 3 * 512 * 8
    assert by_name["block_table"]["shape"] == [8, 2]
    assert by_name["decoder_batch_ids"]["shape"] == [1024 * 8]
    assert by_name["encoder_batch_ids"]["shape"] == [8 * (128 * 4 // 64)]
    assert by_name["kv_batch_ids"]["shape"] == [8 * 2]
    assert outcome["total_bytes"] == sum(b["bytes"] for b in outcome["buffers"])
    assert f"{outcome['total_bytes']:,} bytes" in text


def test_buffer_bytes_are_those_of_the_arrays():
    """Bytes equal what numpy takes for the shape and type."""
    shape = TileShape(max_num_seqs=3, max_model_len=192, group=5)
    for buffer in step_buffers(GraphConfig(max_num_seqs=3), shape, 7):
        dtype = "float16" if buffer.dtype == "bfloat16" else buffer.dtype
        assert buffer.num_bytes == np.zeros(buffer.shape, dtype).nbytes, buffer


def test_padding_by_hand():
    """3 -> 4, 5 -> 8, 8 -> 8 pad 4 of 20 tokens; 9 and 0 fit no graph: 2 of 5 steps."""
    padding = padding_of([3, 5, 8, 9, 0], [8, 4, 2, 1])

    assert (padding.waste, padding.eager) == (4 / 20, 2 / 5)
    assert padding_of([9], [8]).waste == 0


def test_lengths_file(tmp_path):
    """A file of step lengths takes the place of the uniform distribution."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("3 5\n8\n9 0\n")

    outcome, _ = call(tmp_path, "--max-num-seqs", 8, "--lengths", lengths)

    assert outcome["kinds"]["decode"]["padding_waste"] == 4 / 20
    assert outcome["kinds"]["decode"]["eager_steps"] == pytest.approx(2 / 5)


@pytest.mark.parametrize("text", ["", "1 x", "-1"])
def test_bad_lengths(tmp_path, text):
    """A file without steps, or with something else than token counts, is refused."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text(text)

    with pytest.raises(InvalidSetting, match="lengths"):
        call(tmp_path, "--max-num-seqs", 8, "--lengths", lengths)


def test_tile_bounds():
    """Bounds use the tiles of each kind: 16 rows for decodes, 64 for prefills."""
    config = GraphConfig(max_num_seqs=8, prefill_graphs=True, max_capture_shape_prefill=64)
    shape = TileShape(max_num_seqs=8, max_model_len=128, group=5)

    assert tile_bounds(config, shape, "decode")[8] == (8 * 5 + 8 * 15) // 16
    assert tile_bounds(config, shape, "prefill")[64] == (64 * 5 + 8 * 63) // 64
