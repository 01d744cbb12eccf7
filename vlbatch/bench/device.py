"""What moves, features and positions cost on a CUDA device, beside the methods of engines.

``vlbatch bench reorder|features|positions|all --device``; all of it takes about 16 GB of memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vlbatch.backends.torch_backend import TorchTensorBackend
from vlbatch.bench.device_parts import (
    NUM_REQS,
    time_decode_features,
    time_everything_in_rows,
    time_features,
    time_moves,
    time_positions,
)
from vlbatch.bench.device_timing import Bandwidth, raise_clocks
from vlbatch.bench.harness import Outcome, Timing
from vlbatch.errors import InvalidSetting

RATIOS = {
    "fastdeploy": "pairwise swaps with clones",
    "index_select": "index_select a field",
    "gather": "torch, one gather a group",
}
"""Name in ``ratios`` -> method whose median is divided by that of our move."""


def device_runs() -> dict[str, Callable[[], Outcome]]:
    """Name -> bench, on torch's current CUDA device.

    A bench raises ``MissingDependency`` without ``vlbatch[cuda]``, and ``AssertionError`` where a
    result that was about to be timed is wrong.

    Raises:
        InvalidSetting: torch finds no CUDA device.
    """
    if not torch.cuda.is_available():
        raise InvalidSetting(f"torch {torch.__version__} finds no CUDA device", setting="--device")
    return {"reorder": _reorder, "features": _features, "positions": _positions}


def _backend() -> TorchTensorBackend:
    backend = TorchTensorBackend("cuda", fused=True)
    raise_clocks(backend.device)
    return backend


def _reorder() -> Outcome:
    backend = _backend()
    walls, issues, num_fields = time_moves(backend)
    torch.cuda.empty_cache()
    ours = walls["move"].median
    ratios = {name: walls[method].median / ours for name, method in RATIOS.items()}
    return Outcome(
        walls,
        {
            **_about(issues),
            "num_reqs": NUM_REQS,
            "num_fields": num_fields,
            "ratios": ratios,
            "over_empty_launch": ours / walls["empty launch"].median,
            "bandwidths": _rates(time_everything_in_rows(backend)),
        },
    )


def _features() -> Outcome:
    backend = _backend()
    walls, issues = time_decode_features(backend)
    return Outcome(walls, {**_about(issues), "bandwidths": _rates(time_features(backend))})


def _positions() -> Outcome:
    walls, issues = time_positions(_backend())
    return Outcome(walls, _about(issues))


def _about(issues: dict[str, Timing]) -> dict[str, object]:
    """The device, and how long each call kept the host; ``timings`` are wall times."""
    return {
        "device": torch.cuda.get_device_name(),
        "until_return_us": {name: timing.median * 1e6 for name, timing in issues.items()},
    }


def _rates(found: list[Bandwidth]) -> dict[str, dict[str, float]]:
    """Bytes read and written a second, in TB, and their share of a plain copy's."""
    return {
        each.name: {"TB/s": each.bytes_per_second / 1e12, "of_copy": each.share_of_copy}
        for each in found
    }
