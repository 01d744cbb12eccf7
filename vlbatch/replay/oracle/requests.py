"""How far each request is, and what it refers to."""

from __future__ import annotations

from dataclasses import dataclass, field

from vlbatch.replay.oracle.positions import Position, delta_of
from vlbatch.replay.oracle.values import Key, OracleItem

DECODE, EXTEND, PREFILL = range(3)


@dataclass(slots=True)
class OracleRequest:
    """One live or preempted request.

    Attributes:
        req_id: its name.
        prompt_len: tokens to prefill; after a resume the prompt and the outputs so far.
        items: by offset, then by end.
        positions: of the prompt as admitted, one tuple a token.
        computed: tokens computed, counting steps in flight.
        confirmed: tokens computed for certain.
        live: whether it has a slot.
        slot: where it was first seen since it has been live.
        held: item number -> key that it refers to.
        delta: position minus index of every token past the prompt as admitted.

    """

    req_id: str
    prompt_len: int
    items: list[OracleItem]
    positions: list[Position]
    computed: int = 0
    confirmed: int = 0
    live: bool = True
    slot: int | None = None
    held: dict[int, Key] = field(default_factory=dict)
    delta: int = field(init=False)

    def __post_init__(self) -> None:
        """Work out the delta."""
        self.delta = delta_of(self.positions)

    @property
    def known_tokens(self) -> int:
        """Tokens with a known id: the prompt, or all that are computed and the sampled one."""
        return self.prompt_len if self.computed < self.prompt_len else self.computed + 1

    @property
    def region(self) -> int:
        """Decode once the prompt is computed; before that extend, or prefill if nothing is."""
        if self.computed >= self.prompt_len:
            return DECODE
        return EXTEND if self.computed > 0 else PREFILL

    def most_tokens(self, num_drafts: int, max_model_len: int) -> int:
        """Most tokens that one step may compute."""
        rest = self.prompt_len - self.computed
        return min(rest if rest > 0 else 1 + num_drafts, max_model_len - self.computed)

    def position_of(self, token: int) -> Position:
        """Position of any token, generated ones included."""
        if token < len(self.positions):
            return self.positions[token]
        axes = len(self.positions[0])
        return (token + self.delta,) * axes

    def places(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Token, item number and feature row of every place in ``[start, stop)``, by token."""
        found = []
        for number, item in enumerate(self.items):
            if item.stop <= start or item.offset >= stop:
                continue
            for row, token in enumerate(item.places()):
                if start <= token < stop:
                    found.append((token, number, row))
        return sorted(found)

    def items_in(self, start: int, stop: int) -> list[int]:
        """Items with a place in ``[start, stop)``, by their first place there."""
        numbers: list[int] = []
        for _, number, _ in self.places(start, stop):
            if number not in numbers:
                numbers.append(number)
        return numbers
