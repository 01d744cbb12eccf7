"""Request files with made-up pictures, and what a call of the command leaves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlbatch.runner import Runner

FIXTURES = Path(__file__).parents[2] / "fixtures"
MODEL = FIXTURES / "tiny-vl"


@dataclass
class Outcome:
    """What a call of the command left."""

    code: int
    out: str
    err: str
    json: dict[str, Any]
    runners: list[Runner]

    @property
    def by_id(self) -> dict[str, dict[str, Any]]:
        return {request["req_id"]: request for request in self.json["requests"]}


class Files:
    """Pictures, clips and request files in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def picture(self, name: str, rows: int = 2, columns: int = 2, seed: int = 0) -> str:
        """A random picture of ``rows * columns`` feature rows; returns its name."""
        rng = np.random.default_rng(seed)
        pixels = rng.integers(0, 256, (28 * rows, 28 * columns)).astype(np.uint8)
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
        return name

    def clip(self, name: str, num_frames: int = 4) -> str:
        """A folder of random frames; returns its name."""
        (self.folder / name).mkdir()
        for n in range(num_frames):
            self.picture(f"{name}/{n}.png", 1, 2, n)
        return name

    def requests(self, *requests: dict[str, Any], name: str = "requests.jsonl") -> Path:
        """A request file."""
        path = self.folder / name
        path.write_text("".join(json.dumps(request) + "\n" for request in requests))
        return path
