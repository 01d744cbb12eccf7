"""What the oracle is told: settings, items, and what the library was seen to do.

Plain numbers, strings, lists and dicts only. Token numbers of a *step* count its tokens in row
order; token indices count those of one request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

Key: TypeAlias = tuple[str, int]
"""Content of an item, and the weight epoch that encoded it."""

Occurrence: TypeAlias = tuple[str, int]
"""Request, and number of one of its items by offset."""

FeatureValue: TypeAlias = tuple[str, int, int]
"""What a feature row says of itself: content, row of the item, weight epoch."""

FAMILIES = ("1d", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "ernie4_5_vl")
"""Position families that the oracle knows."""


@dataclass(frozen=True, slots=True)
class OracleSettings:
    """Settings of a scenario; see the scenario format for each."""

    capacity: int = 8
    max_model_len: int = 512
    cache_rows: int = 1024
    encode_rows: int | None = None
    lookahead: int = 0
    num_drafts: int = 0
    family: str = "qwen2_vl"
    tokens_per_second: float = 2.0
    policy: str = "split"
    stable: bool = True
    whole_items: bool = False
    auto_confirm: bool = True


@dataclass(frozen=True, slots=True)
class OracleItem:
    """One image, video or audio clip; its span is ``[offset, offset + length)``.

    Attributes:
        key: identity of the content.
        modality: ``"image"``, ``"video"`` or ``"audio"``.
        offset: first token of the span.
        length: tokens of the span.
        grid: frames, rows, columns; ``None`` for an item placed like text.
        mask: per token of the span, whether it takes a feature row; ``None`` for all.
        seconds_per_grid: of a timed video.
        rows: feature rows that its source promises, where it promises any.

    """

    key: str
    modality: str
    offset: int
    length: int
    grid: tuple[int, int, int] | None = None
    mask: tuple[bool, ...] | None = None
    seconds_per_grid: float | None = None
    rows: int | None = None

    @property
    def stop(self) -> int:
        """First token after the span."""
        return self.offset + self.length

    def places(self) -> list[int]:
        """Tokens that take a feature row, in order: row ``j`` goes to the ``j``-th."""
        if self.mask is None:
            return list(range(self.offset, self.stop))
        return [self.offset + i for i, true in enumerate(self.mask) if true]


@dataclass(slots=True)
class ObservedStep:
    """What one step of the library did.

    Attributes:
        order: row -> request, of the requests with tokens.
        idle: the other live requests, in row order.
        regions: decode, extend and prefill requests.
        moved: requests that changed row and were in the batch before.
        encoded: keys encoded, in order.
        hits: keys found ready by a request that did not refer to them.
        held: keys found ready by a request that referred to them.
        evicted: keys that went for space, in order.
        failed: request -> name of the reason.
        features: one list a level: (token of the step, value that it got).
        draft_features: as ``features``, for the follower that reads ahead.
        skipped: tokens of the step for which the follower has no feature.
        positions: one list an axis, by token of the step.
        token_indices: token of the step -> index in its request.
        derived: derived field -> its values.
        restored: request -> what came back for it from outputs by row.
        restored_late: the same of the step before, restored after this step moved rows.

    """

    order: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    regions: tuple[int, int, int] = (0, 0, 0)
    moved: int = 0
    encoded: list[Key] = field(default_factory=list)
    hits: list[Key] = field(default_factory=list)
    held: list[Key] = field(default_factory=list)
    evicted: list[Key] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    features: list[list[tuple[int, FeatureValue]]] = field(default_factory=list)
    draft_features: list[list[tuple[int, FeatureValue]]] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    positions: list[list[int]] = field(default_factory=list)
    token_indices: list[int] = field(default_factory=list)
    derived: dict[str, list[int]] = field(default_factory=dict)
    restored: dict[str, object] = field(default_factory=dict)
    restored_late: dict[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class ObservedState:
    """What the library's objects hold between two events.

    Attributes:
        rows: row -> request, ``None`` for a hole.
        slots: live request -> slot.
        preempted: requests that can be resumed.
        progress: live request -> prompt length, computed and confirmed tokens.
        known_tokens: request -> tokens with a known id.
        stored: live request -> field -> what lies in the array at its row or slot.
        values: of requests that were read: field -> its value as the library reads it.
        whole: field of the whole batch -> its values.
        followed: row -> entry of a list that follows the rows from outside.
        usage: used, free and reclaimable feature rows of the cache.
        entries: key -> feature rows, whether they can be read, occurrences that refer to it.
        deltas: request -> position minus index past its media.
        mirror: keys that a second store holds which follows only what was encoded and freed.

    """

    rows: list[str | None] = field(default_factory=list)
    slots: dict[str, int] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    progress: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    known_tokens: dict[str, int] = field(default_factory=dict)
    stored: dict[str, dict[str, object]] = field(default_factory=dict)
    values: dict[str, dict[str, object]] = field(default_factory=dict)
    whole: dict[str, object] = field(default_factory=dict)
    followed: list[object] = field(default_factory=list)
    usage: tuple[int, int, int] = (0, 0, 0)
    entries: dict[Key, tuple[int, bool, frozenset[Occurrence]]] = field(default_factory=dict)
    deltas: dict[str, int] = field(default_factory=dict)
    mirror: list[Key] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FeatureRow:
    """One line of a table of wrong features; ``"-"`` stands for no feature."""

    req_id: str
    token: int
    expected: str
    got: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference between the oracle and the library.

    Attributes:
        what: the thing compared.
        expected: what the oracle says.
        got: what the library did.
        req_id: the request concerned, where it is one.
        table: the tokens concerned, where features are wrong.

    """

    what: str
    expected: object
    got: object
    req_id: str | None = None
    table: tuple[FeatureRow, ...] = ()
