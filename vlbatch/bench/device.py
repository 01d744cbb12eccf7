"""What moves, features and positions cost on a CUDA device, beside the methods of engines.

Run it with ``vlbatch bench --device [--json OUT]``, or with ``python -m vlbatch.bench.device`` to
choose the device; it takes about 16 GB of device memory.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch

from vlbatch.backends.torch_backend import TorchTensorBackend
from vlbatch.bench.device_parts import (
    NUM_REQS,
    time_everything_in_rows,
    time_features,
    time_inputs,
    time_moves,
)
from vlbatch.bench.device_timing import Bandwidth, raise_clocks
from vlbatch.bench.harness import Timing, machine
from vlbatch.errors import InvalidSetting


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """All of a run. Times in seconds.

    Attributes:
        machine: what it ran on.
        num_fields: fields whose rows move with the wide ones in slots.
        walls: method -> wall time, with the device's work, at 256 rows of which 128 move.
        issues: method -> time until the call returned.
        bandwidths: one entry a size.
    """

    machine: dict[str, str]
    num_fields: int
    walls: dict[str, Timing]
    issues: dict[str, Timing]
    bandwidths: list[Bandwidth]

    @property
    def ratios(self) -> dict[str, float]:
        """Medians of wall time over that of our move, and of our move over an empty launch."""
        ours = self.walls["move"].median
        peers = {
            name: timing.median / ours
            for name, timing in self.walls.items()
            if name.startswith(("pairwise", "index_select", "torch"))
        }
        return {
            "move / empty launch": ours / self.walls["empty launch"].median,
            "move / empty record": ours / self.walls["empty record"].median,
            **peers,
        }


def run_device(device: str = "cuda") -> DeviceFigures:
    """Time everything on a device.

    Raises:
        MissingDependency: ``vlbatch[cuda]`` is not installed.
        InvalidSetting: torch finds no CUDA device.
        AssertionError: a result that was about to be timed is wrong.
    """
    if not torch.cuda.is_available():
        raise InvalidSetting(f"torch {torch.__version__} finds no CUDA device", setting="--device")
    backend = TorchTensorBackend(device, fused=True)
    with torch.cuda.device(backend.device):
        raise_clocks(backend.device)
        walls, issues, num_fields = time_moves(backend)
        more_walls, more_issues = time_inputs(backend)
        found = time_features(backend)
        torch.cuda.empty_cache()
        found += time_everything_in_rows(backend)
    about = {**machine(), "device": torch.cuda.get_device_name(backend.device)}
    return DeviceFigures(about, num_fields, walls | more_walls, issues | more_issues, found)


def report_device(device: str, out: Path | None) -> None:
    """Time everything on a device, print it, and write all figures to ``out``.

    Raises:
        MissingDependency, InvalidSetting, AssertionError: see ``run_device``.
    """
    figures = run_device(device)
    for key, value in figures.machine.items():
        click.echo(f"{key}: {value}")
    click.echo(f"{figures.num_fields} fields in rows, {NUM_REQS} rows, half of them moved")
    for title, timings in (("wall", figures.walls), ("until return", figures.issues)):
        click.echo(f"\n{title + ', µs':32}{'median':>11}{'min':>11}{'rounds':>8}")
        for name, timing in timings.items():
            median, minimum = timing.median * 1e6, timing.minimum * 1e6
            click.echo(f"{name:32}{median:11.2f}{minimum:11.2f}{timing.rounds:8}")
    click.echo("")
    for name, ratio in figures.ratios.items():
        click.echo(f"{name:32}{ratio:11.2f}")
    click.echo(f"\n{'bandwidth':34}       ms  best ms     TB/s  of copy")
    for each in figures.bandwidths:
        click.echo(
            f"{each.name:34}{each.seconds * 1e3:9.3f}{each.best_seconds * 1e3:9.3f}"
            f"{each.bytes_per_second / 1e12:9.3f}{each.share_of_copy:9.3f}"
        )
    if out is not None:
        found = {**asdict(figures), "ratios": figures.ratios}
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


@click.command()
@click.option("--device", default="cuda", help="As torch takes it.")
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write all figures there.")
def main(device: str, out: Path | None) -> None:
    """Print what moves, features and positions cost on a CUDA device."""
    report_device(device, out)


if __name__ == "__main__":
    main()
