"""The README's code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

README = Path(__file__).parents[1] / "README.md"


def test_use_in_ones_own_runner() -> None:
    """The example gives both requests their part, and a's image its six placeholders."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(blocks[0], str(README), "exec"), names)  # noqa: S102 (our own page)

    order, features, positions = names["order"], names["features"], names["positions"]
    assert sorted(order.req_ids) == ["a", "b"]  # type: ignore[attr-defined]
    start = order.query_start[order.row_of("a")]  # type: ignore[attr-defined]
    assert features.tokens.tolist() == list(range(start + 4, start + 10))  # type: ignore[attr-defined]
    assert isinstance(positions, np.ndarray)
    assert positions.shape == (3, 17)
    assert names["sampled"].keys() == {"a", "b"}  # type: ignore[attr-defined]


def test_commands_exist() -> None:
    """Every vlbatch command that the page shows is one."""
    from vlbatch.cli import cli

    shown = set(
        re.findall(r"vlbatch (run|replay|fuzz|timeline|bench|graphs)\b", README.read_text())
    )
    assert shown <= set(cli.commands)
    assert {"run", "replay", "timeline", "bench"} <= shown
