"""The alignment oracle: fed from a runner's five calls, it raises at the first wrong row.

What is right is worked out by the naive model (``vlbatch.replay.oracle``) from each request's items
and the steps, never from what the runner computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from vlbatch.errors import VlbatchError
from vlbatch.items import Item
from vlbatch.replay.assertions import table
from vlbatch.replay.delivered import UNKNOWN_ROW, Delivered, Gathered, Watched
from vlbatch.replay.fingerprints import Fingerprints
from vlbatch.replay.oracle import Oracle, OracleItem, OracleSettings, prompt_positions
from vlbatch.replay.oracle.requests import OracleRequest
from vlbatch.replay.watch import How, RunnerWatch

P = ParamSpec("P")
T = TypeVar("T")

_UNLIMITED = 1 << 62


def _asserting(method: Callable[P, T]) -> Callable[P, T]:
    """Turn refusals of a runner's call into failed assertions, at the line of the call."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True
        try:
            return method(*args, **kwargs)
        except AssertionError as error:
            raise error.with_traceback(None) from None
        except VlbatchError as error:
            raise AssertionError(str(error)) from None

    return call


class Alignment(RunnerWatch):
    """Compares what a runner does with what is right, call by call.

    Args:
        family: position family; see ``vlbatch.positions.FAMILIES``.
        tokens_per_second: of families with timed videos.
        max_rows: feature rows remembered beyond those of live requests.

    Attributes:
        num_steps: steps begun.

    """

    def __init__(
        self,
        *,
        family: str = "qwen2_vl",
        tokens_per_second: float = 2.0,
        max_rows: int = 1 << 20,
    ) -> None:
        super().__init__(max_rows=max_rows)
        self._settings = OracleSettings(
            capacity=1,  # the oracle is only asked about one request at a time
            max_model_len=_UNLIMITED,
            cache_rows=_UNLIMITED,
            family=family,
            tokens_per_second=tokens_per_second,
        )
        self._oracle = Oracle(self._settings)
        self._models: dict[str, OracleRequest] = {}
        self._unseen: set[str] = set()  # requests of the step that are not gathered yet
        self.num_steps = 0

    admit = _asserting(RunnerWatch.admit)
    step = _asserting(RunnerWatch.step)
    encoded = _asserting(RunnerWatch.encoded)
    gathered = _asserting(RunnerWatch.gathered)
    left = _asserting(RunnerWatch.left)
    accepted = _asserting(RunnerWatch.accepted)
    confirmed = _asserting(RunnerWatch.confirmed)

    @_asserting
    def finish(self) -> None:
        """Say that the last step is over: all of its requests must have been gathered."""
        self._settle()

    def _fail(self, what: str, *lines: str) -> None:
        where = f"step {self.num_steps}: " if self.num_steps else ""
        raise AssertionError("\n".join([where + what, *lines]))

    # -- requests ----------------------------------------------------------------------------
    def _on_admit(self, request: Watched) -> None:
        items = sorted(map(_oracle_item, request.items), key=lambda item: (item.offset, item.stop))
        reasons = self._oracle.refusals_of_add(
            request.req_id, request.prompt_len, items, request.computed
        )
        if reasons:
            self._fail(
                f"request {request.req_id!r} was admitted; it is to be refused"
                f" ({' or '.join(sorted(reasons))})"
            )
        settings = self._settings
        self._models[request.req_id] = OracleRequest(
            request.req_id,
            request.prompt_len,
            items,
            prompt_positions(
                settings.family, request.prompt_len, items, settings.tokens_per_second
            ),
        )

    def _on_left(self, request: Watched, how: How) -> None:
        self._unseen.discard(request.req_id)
        if how != "preempt":
            del self._models[request.req_id]

    # -- a step ------------------------------------------------------------------------------
    def _on_step(self) -> None:
        self.num_steps += 1
        self._unseen = set(self._scheduled)
        for req_id, tokens in self._scheduled.items():
            request = self._requests[req_id]
            rest = request.prompt_len - request.computed
            if 0 < rest < tokens:
                self._fail(
                    f"request {req_id!r} computes {tokens} tokens; {rest} of its prompt are left"
                )

    def _on_encoded(self, key: str, prints: Fingerprints) -> None:
        for req_id, model in self._models.items():
            for item in model.items:
                places = len(item.places())
                if item.key == key and len(prints) != places:
                    self._fail(
                        f"{key!r} was encoded to {len(prints)} feature rows; request {req_id!r}"
                        f" has {places} places for it at token {item.offset}"
                    )

    def _on_gathered(self, order: list[str], seen: Gathered) -> None:
        for req_id in order:
            self._unseen.discard(req_id)
            start = self._requests[req_id].computed
            stop = start + self._scheduled[req_id]
            self._compare_features(req_id, start, stop, seen.features.get(req_id, []))
            if seen.positions:
                self._compare_positions(req_id, start, stop, seen.positions[req_id])
            if req_id in seen.kv_index and seen.kv_index[req_id] != list(range(start, stop)):
                self._fail(
                    f"request {req_id!r} writes the KV of tokens {seen.kv_index[req_id]};"
                    f" expected {list(range(start, stop))}"
                )

    def _compare_features(
        self, req_id: str, start: int, stop: int, delivered: list[Delivered]
    ) -> None:
        model = self._models[req_id]
        expected = {
            token: (model.items[number].key, row)
            for token, number, row in model.places(start, stop)
        }
        got: dict[int, list[tuple[str, int]]] = {}
        for place in delivered:
            got.setdefault(place.token, []).append((place.key, place.row))
        right = {token: [source] for token, source in expected.items()}
        wrong = [t for t in sorted(right.keys() | got.keys()) if right.get(t) != got.get(t)]
        if not wrong:
            return
        rows: list[tuple[str, ...]] = [
            (
                str(token),
                _show(expected.get(token)),
                " and ".join(map(_show, got.get(token, [None]))),
            )
            for token in wrong
        ]
        self._fail(
            f"request {req_id!r}: {len(wrong)} of the feature rows in its tokens"
            f" [{start}, {stop}) are wrong",
            *table(("token", "expected", "got"), rows),
            *self._hint(req_id, [(expected.get(t), got.get(t, [])) for t in wrong]),
        )

    def _hint(
        self, req_id: str, pairs: list[tuple[tuple[str, int] | None, list[tuple[str, int]]]]
    ) -> list[str]:
        """Say what the wrong rows have in common."""
        singles = [(e, g[0]) for e, g in pairs if e is not None and len(g) == 1]
        if len(singles) < len(pairs):
            return []
        shifts = {g[1] - e[1] for e, g in singles}
        if all(e[0] == g[0] for e, g in singles) and len(shifts) == 1:
            return [f"every row is shifted by {shifts.pop():+d}"]
        keys = {g[0] for _, g in singles}
        owners = sorted(
            other for other, model in self._models.items()
            if other != req_id and keys & {item.key for item in model.items}
        )  # fmt: skip
        if owners:
            return [f"such rows belong to request {', '.join(map(repr, owners))}"]
        present = {item.key for model in self._models.values() for item in model.items}
        gone = ", ".join(sorted(keys - present - {UNKNOWN_ROW}))
        return [f"no request in the batch has {gone}"] if gone else []

    def _compare_positions(self, req_id: str, start: int, stop: int, axes: list[list[int]]) -> None:
        model = self._models[req_id]
        rows: list[tuple[str, ...]] = []
        for number, token in enumerate(range(start, stop)):
            expected = model.position_of(token)
            got = tuple(axis[number] for axis in axes)
            if got * (len(expected) if len(got) == 1 else 1) != expected:
                rows.append((str(token), str(expected), str(got)))
        if rows:
            self._fail(
                f"request {req_id!r}: {len(rows)} of the positions of its tokens"
                f" [{start}, {stop}) are wrong",
                *table(("token", "expected", "got"), rows),
            )

    def _on_step_over(self) -> None:
        for req_id in sorted(self._unseen):
            request = self._requests[req_id]
            stop = request.computed + self._scheduled[req_id]
            if self._models[req_id].places(request.computed, stop):
                self._unseen = set()
                self._fail(
                    f"request {req_id!r} was never gathered, though its tokens"
                    f" [{request.computed}, {stop}) take feature rows"
                )


def _oracle_item(item: Item) -> OracleItem:
    return OracleItem(
        key=item.key,
        modality=item.modality,
        offset=item.offset,
        length=item.length,
        grid=item.grid,
        mask=None if item.embed_mask is None else tuple(item.embed_mask.tolist()),
        seconds_per_grid=item.seconds_per_grid,
        rows=item.declared_rows,
    )


def _show(source: tuple[str, int] | None) -> str:
    return "-" if source is None else f"{source[0]} row {source[1]}"
