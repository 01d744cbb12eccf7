"""A scenario as data: header, events and expectations, each with its line number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Header:
    """Settings of a scenario; see the scenario format.

    ``draft_tokens`` is ``None`` where the file does not say.
    """

    capacity: int = 8
    max_model_len: int = 512
    cache_rows: int = 1024
    encode_rows: int | None = None
    lookahead: int = 0
    draft_tokens: int | None = None
    positions: str = "qwen2_vl"
    tokens_per_second: float = 2.0
    order: str = "split"
    stable: bool = True
    chunking: str = "through"
    confirm: str = "auto"


@dataclass(frozen=True, slots=True)
class ItemSpec:
    """One item of an ``add``; ``embeds`` says per token of the span whether it is a place."""

    key: str
    modality: str
    offset: int
    length: int
    grid: tuple[int, int, int] | None
    embeds: tuple[bool, ...] | None
    rows: int | None
    seconds_per_grid: float | None


# -- events --------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Add:
    """Admit a request."""

    req_id: str
    prompt_len: int
    items: tuple[ItemSpec, ...] = ()
    computed: int = 0
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """Compute tokens; ``accept`` says how many drafts of a decode were accepted.

    With ``abandon`` the step is given up once these of its keys are encoded.
    """

    scheduled: Mapping[str, int]
    accept: Mapping[str, int] = field(default_factory=dict)
    abandon: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask how many tokens fit."""

    wanted: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Confirm:
    """Computed tokens that are final; ``in_flight`` tokens of later steps stay counted."""

    computed: Mapping[str, int]
    in_flight: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Leave:
    """Finish or abort a request."""

    req_id: str


@dataclass(frozen=True, slots=True)
class Preempt:
    """Take a request out for later."""

    req_id: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Admit a preempted request again."""

    req_id: str
    computed: int = 0


@dataclass(frozen=True, slots=True)
class Drop:
    """Lose an unreferenced cache entry."""

    key: str


@dataclass(frozen=True, slots=True)
class Weights:
    """Change the weights of the encoder."""

    epoch: int


@dataclass(frozen=True, slots=True)
class FailEncode:
    """Let the next encode of these keys raise."""

    keys: tuple[str, ...]


Event: TypeAlias = (
    Add | Step | Ask | Confirm | Leave | Preempt | Resume | Drop | Weights | FailEncode
)


# -- expectations --------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class FeatureRun:
    """Rows ``[first, stop)`` of a key, from token ``index`` on."""

    index: int
    key: str
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class CacheExpectation:
    """Feature rows and keys; ``None`` is not compared."""

    used: int | None = None
    free: int | None = None
    reclaimable: int | None = None
    referenced: tuple[str, ...] | None = None
    present: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ErrorExpectation:
    """A refusal: the name of its class or of a base, and the request that it names."""

    type: str | None = None
    req_id: str | None = None


@dataclass(frozen=True, slots=True)
class Expectation:
    """One ``expect`` line; what is ``None`` was not given and is not compared.

    Attributes:
        line: number in the file.
        order: requests by row.
        regions: requests by region.
        moved: requests that changed row.
        encoded: keys encoded, in order.
        hits: keys found ready.
        features: req_id -> runs.
        positions: req_id -> one tuple an axis.
        next_position: req_id -> one number, or one an axis.
        delta: req_id -> position minus index.
        kv_index: req_id -> token indices.
        cache: accounting.
        fit: req_id -> tokens.
        error: refusal.
        failed: req_id -> name of the reason, ``None`` for any.

    """

    line: int
    order: tuple[str, ...] | None = None
    regions: Mapping[str, int] | None = None
    moved: int | None = None
    encoded: tuple[str, ...] | None = None
    hits: tuple[str, ...] | None = None
    features: Mapping[str, tuple[FeatureRun, ...]] | None = None
    positions: Mapping[str, tuple[tuple[int, ...], ...]] | None = None
    next_position: Mapping[str, tuple[int, ...]] | None = None
    delta: Mapping[str, int] | None = None
    kv_index: Mapping[str, tuple[int, ...]] | None = None
    cache: CacheExpectation | None = None
    fit: Mapping[str, int] | None = None
    error: ErrorExpectation | None = None
    failed: Mapping[str, str | None] | None = None


# -- the file ------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class EventLine:
    """An event, its line number, and what is expected of it."""

    line: int
    event: Event
    expectations: tuple[Expectation, ...]

    @property
    def expects_refusal(self) -> bool:
        """Whether the file expects this event to be refused."""
        return any(expectation.error is not None for expectation in self.expectations)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One file.

    Attributes:
        path: as given.
        header: settings.
        opening: expectations before the first event.
        events: in order.
        is_trace: what the file expects is what a runner did.
        torn: what is wrong with the last line of a trace that was cut off; else ``None``.

    """

    path: str
    header: Header
    opening: tuple[Expectation, ...]
    events: tuple[EventLine, ...]
    is_trace: bool = False
    torn: str | None = None
