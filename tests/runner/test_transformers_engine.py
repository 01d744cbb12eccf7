"""The second engine answers as the first one does; each runs in a process of its own.

PaddleFormers and transformers on torch cannot be imported into one process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dump_answers import FIXTURES

HERE = Path(__file__).parent
NEEDS = {
    "paddle": ("paddle", "paddleformers"),
    "transformers": ("torch", "transformers"),
    "captured": ("torch", "transformers"),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Engine -> what it answered, run when first asked for."""
    folder, done = tmp_path_factory.mktemp("answers"), {}

    def ask(name: str) -> dict[str, Any]:
        if not all(map(find_spec, NEEDS[name])):
            pytest.skip(f"needs {NEEDS[name]}")
        if name not in done:
            out = folder / f"{name}.npz"
            _python(HERE / "dump_answers.py", name, out)
            done[name] = dict(np.load(out))
        return done[name]

    return ask


def _python(*arguments: object, code: int = 0) -> str:
    root = str(HERE.parents[1])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("other", ["paddle", "captured"])
def test_same_answers(answers, other):
    """Tokens are equal and logits agree within 1e-3, over all fixture requests."""
    ours, theirs = answers("transformers"), answers(other)

    assert ours.keys() == theirs.keys()
    assert len(ours) == 2 * 24
    for name, values in ours.items():
        if name.endswith("tokens"):
            assert values.tolist() == theirs[name].tolist(), name
        else:
            np.testing.assert_allclose(values, theirs[name], rtol=0, atol=1e-3, err_msg=name)


@pytest.mark.slow
@pytest.mark.skipif(
    not (find_spec("transformers") and find_spec("torch")), reason="needs torch and transformers"
)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "transformers", "--device", "cuda:99"], "no device 'cuda:99'"),
        (["--device", "cuda", "--graph", "both"], "only steps of the transformers engine"),
        (["--engine", "transformers", "--graph", "both"], "captured on a CUDA device"),
        (["--engine", "transformers", "--poison"], "no step is padded"),
        (["--prefill-gate", "4"], "is not N:SECONDS"),
        (["--prefill-gate", "0:1"], "got 0 prompts"),
    ],
)
def test_refused(options, message):
    """What cannot run is one line that names the setting, and exit code 2."""
    text = _python("-m", "vlbatch", "run", FIXTURES / "requests.jsonl", *options, code=2)

    assert message in text
    assert "Traceback" not in text
