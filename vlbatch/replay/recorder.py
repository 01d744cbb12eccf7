"""Recording a live runner as a scenario file.

What the runner did stands in the file as expectations, so that ``vlbatch replay`` finds the first
step that differs from what is right: features as fingerprints found them (see ``delivered``),
positions as given, and for runners that share the library's order and cache these too. Notes hold
what has no place in the format: a digest of the fingerprints of each encoded item, and the row
order of other runners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from vlbatch.items import Item
from vlbatch.replay.delivered import Delivered, Gathered, Watched
from vlbatch.replay.fingerprints import Fingerprints, digest
from vlbatch.replay.format import TRACE_NOTE
from vlbatch.replay.scenario import Header
from vlbatch.replay.trace_file import TraceFile
from vlbatch.replay.watch import How, RunnerWatch

if TYPE_CHECKING:
    from typing_extensions import Self

ANY_RUNNER = Header(
    capacity=256, max_model_len=8192, cache_rows=1 << 20, order="arrival", stable=False
)
"""Limits that stand in nobody's way, for a runner with its own order and cache."""


@dataclass(slots=True)
class _Step:
    """What is known of the step under way.

    Attributes:
        scheduled: as decided, without requests that left before the forward.
        accepted: request -> accepted drafts.
        failing: keys whose encode raised.
        failed: requests that the step lost to it.
        encoded: key -> digest.
        expected: key of ``expect`` -> what the runner did.
        notes: further lines.
        is_abandoned: it will not be computed.

    """

    scheduled: dict[str, int]
    accepted: dict[str, int] = field(default_factory=dict)
    failing: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    encoded: dict[str, str] = field(default_factory=dict)
    expected: dict[str, object] = field(default_factory=dict)
    notes: list[object] = field(default_factory=list)
    is_abandoned: bool = False


class Recorder(RunnerWatch):
    """Writes down what a runner tells in its calls; see ``RunnerWatch`` for these.

    A step, with all that was told before it, is in the file once all of it is gathered, before the
    forward, or when the next call shows that it is over. Use a recorder as a context manager, or
    ``close`` it.

    Args:
        path: file to write; through gzip if the name ends in ``.gz``.
        header: limits and position family of the runner.
        same_rules: the runner orders its rows and keeps its encoder cache as the header says, by
            the library's rules; then these are replayed too.
        max_rows: feature rows whose fingerprints are remembered beyond those of live requests.

    Raises:
        OSError: the file cannot be written; also from every call.

    """

    def __init__(
        self,
        path: str | Path,
        *,
        header: Header = ANY_RUNNER,
        same_rules: bool = False,
        max_rows: int = 1 << 20,
    ) -> None:
        super().__init__(max_rows=max_rows)
        self._same_order = self._same_cache = same_rules
        self._file = TraceFile(path)
        self._step: _Step | None = None  # not written yet
        self._confirmed: dict[str, int] = {}  # in one line, when something else is written
        self._in_flight: dict[str, int] = {}
        settings = {key: value for key, value in asdict(header).items() if value is not None}
        self._file.write([{"vlbatch_scenario": 1, **settings}, {"note": TRACE_NOTE}])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Write what is known of the step under way and end the file; idempotent."""
        self._write_step()
        self._write([])
        self._file.close()

    def _write(self, lines: Sequence[Mapping[str, object]]) -> None:
        """Write lines, behind what was confirmed before them."""
        if self._confirmed:
            confirm: dict[str, object] = {"confirm": self._confirmed}
            if self._in_flight:
                confirm["in_flight"] = self._in_flight
            lines = [confirm, *lines]
            self._confirmed, self._in_flight = {}, {}
        if lines:
            self._file.write(lines)

    # -- beside the five calls ---------------------------------------------------------------
    def observed(self, expected: Mapping[str, object]) -> None:
        """Add expectations of the format to the step under way, before all of it is gathered."""
        if self._step is not None:
            self._step.expected.update(expected)

    def note(self, note: object) -> None:
        """Write a note: behind the step under way, or now."""
        if self._step is None:
            self._write([{"note": note}])
        else:
            self._step.notes.append(note)

    def ignore_cache(self) -> None:
        """Leave encodes and hits out from now on: the format cannot say what the runner does."""
        self._same_cache = False

    def ignore_order(self) -> None:
        """Leave the order of rows out from now on: it is noted only."""
        self._same_order = False

    def event(self, event: Mapping[str, object]) -> None:
        """Write an event of the format that none of the calls stands for, such as ``drop``."""
        self._write([event])

    # -- requests ----------------------------------------------------------------------------
    def _on_admit(self, request: Watched) -> None:
        add: dict[str, object] = {"req_id": request.req_id, "prompt_len": request.prompt_len}
        if request.items:
            add["items"] = [_item(item) for item in request.items]
        if request.computed:
            add["computed"] = request.computed
        self._write([{"add": add}])

    def _on_resume(self, request: Watched) -> None:
        resume = {"req_id": request.req_id, "computed": request.computed}
        self._write([{"resume": resume if request.computed else request.req_id}])

    def _on_left(self, request: Watched, how: How) -> None:
        req_id = request.req_id
        if self._step is not None and req_id in self._step.scheduled:
            if how == "fail":
                self._step.failed.append(req_id)
                return
            del self._step.scheduled[req_id]
        self._write([{"abort" if how == "fail" else how: req_id}])

    # -- a step ------------------------------------------------------------------------------
    def _on_step(self) -> None:
        self._step = _Step(dict(self._scheduled))

    def _on_encoded(self, key: str, prints: Fingerprints) -> None:
        if self._step is None:
            self.note({"encoded": {key: digest(prints)}})
        else:
            self._step.encoded[key] = digest(prints)

    def _on_encode_failed(self, key: str) -> None:
        if self._step is not None:
            self._step.failing.append(key)

    def _on_gathered(self, order: list[str], seen: Gathered) -> None:
        step = self._step
        if step is None:
            return
        parts: dict[str, dict[str, object]] = {
            "features": {r: self._runs(r, rows) for r, rows in seen.features.items()},
            "positions": {
                r: axes if len(axes) > 1 else axes[0] for r, axes in seen.positions.items()
            },
            "kv_index": dict(seen.kv_index),
        }
        for key, by_request in parts.items():
            if by_request:
                earlier = step.expected.get(key, {})
                assert isinstance(earlier, dict)  # noqa: S101 (only written here)
                step.expected[key] = earlier | by_request
        if len(order) == len(self._scheduled):
            if self._same_order:
                step.expected.setdefault("order", order)
            else:
                step.notes.append({"order": order})
            if not self._has_drafts():
                self._write_step()

    def _on_accepted(self, drafts: dict[str, int]) -> None:
        if self._step is not None:
            self._step.accepted = drafts

    def _on_given_up(self) -> None:
        if self._step is not None:
            self._step.is_abandoned = True
            self._write_step()

    def _on_confirmed(self, req_id: str, computed: int, in_flight: int) -> None:
        if req_id in self._confirmed:
            self._write([])
        self._confirmed[req_id] = computed
        if in_flight:
            self._in_flight[req_id] = in_flight

    def _on_step_over(self) -> None:
        self._write_step()

    def _write_step(self) -> None:
        step, self._step = self._step, None
        if step is None or not step.scheduled:
            return
        lines: list[dict[str, object]] = []
        if step.failing:
            lines.append({"fail_encode": step.failing})
        lines.append({"step": step.scheduled})
        if step.accepted:
            lines[-1]["accept"] = step.accepted
        if step.is_abandoned:
            lines[-1]["abandon"] = [*step.encoded, *step.failing]
            step.expected = {key: step.expected[key] for key in step.expected.keys() & {"hits"}}
        if self._same_cache:
            step.expected["encoded"] = list(step.encoded)
        else:
            step.expected.pop("hits", None)
        if not self._same_order:
            for key in ("order", "regions", "moved"):
                step.expected.pop(key, None)
        if step.failed or self._same_cache:
            step.expected["failed"] = step.failed
        if step.expected:
            lines.append({"expect": step.expected})
        if step.encoded:
            lines.append({"note": {"encoded": step.encoded}})
        self._write([*lines, *({"note": note} for note in step.notes)])
        self._file.flush()

    def _runs(self, req_id: str, rows: Sequence[Delivered]) -> list[list[object]]:
        """Runs ``[index, key, first, stop]`` of the format."""
        masked = [i for i in self._requests[req_id].items if i.embed_mask is not None]
        runs: list[tuple[int, str, int, int]] = []
        for place in sorted(rows):
            key = place.key
            if masked and any(i.key == key and _is_masked_out(i, place.token) for i in masked):
                key = f"{key} (at a token that is not a place)"  # the format cannot say it
            if runs:
                index, last_key, first, stop = runs[-1]
                length = stop - first
                if (place.token, key, place.row) == (index + length, last_key, stop):
                    runs[-1] = (index, key, first, stop + 1)
                    continue
            runs.append((place.token, key, place.row, place.row + 1))
        return [list(run) for run in runs]


def _item(item: Item) -> dict[str, object]:
    """An item as the format has it."""
    data: dict[str, object] = {
        "key": item.key,
        "modality": item.modality,
        "offset": item.offset,
        "length": item.length,
    }
    if item.grid is not None:
        data["grid"] = list(item.grid)
    if item.embed_mask is not None:
        data["embeds"] = "".join("1" if place else "0" for place in item.embed_mask.tolist())
    if item.seconds_per_grid is not None:
        data["seconds_per_grid"] = item.seconds_per_grid
    return data


def _is_masked_out(item: Item, index: int) -> bool:
    inside = item.offset <= index < item.stop
    return inside and item.embed_mask is not None and not item.embed_mask[index - item.offset]
