"""Requests of a speculative run as plain lists: what they know, what must come next."""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from vlbatch import Item

SENTINEL = 1_000_003
"""Id at placeholder places, far outside the vocabulary."""


def next_token(tokens: list[int]) -> int:
    """What the model says after these tokens: depends on each of them and on their order."""
    return zlib.crc32(repr(tokens).encode()) % 50


@dataclass
class Known:
    """One request as the model sees it.

    Attributes:
        tokens: prompt and outputs that were read, the newest not yet computed.
        prompt_len: tokens to prefill; after a resume all that were known.
        confirmed: computed for certain.
        unread: tokens of each step in flight.
        undecided: a step in flight has drafts, or samples while the drafter waits for it.
        state: what was last written to each field.
    """

    tokens: list[int]
    items: list[Item]
    prompt_len: int
    confirmed: int = 0
    unread: deque[int] = field(default_factory=deque)
    undecided: bool = False
    member: bool = True
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def computed(self) -> int:
        return self.confirmed + sum(self.unread)

    def true_tokens(self, num: int) -> list[int]:
        """The first ``num`` tokens; those not read yet are what the model will say."""
        tokens = list(self.tokens)
        while len(tokens) < num:
            tokens.append(next_token(tokens))
        return tokens[:num]

    def positions(self, num: int) -> list[tuple[int, int, int]]:
        """Qwen2-VL's rule, one token at a time; images have one row of places."""
        starts = {item.offset: item for item in self.items}
        positions: list[tuple[int, int, int]] = []
        here = 0
        while len(positions) < num:
            item = starts.get(len(positions))
            if item is None:
                positions.append((here, here, here))
                here += 1
            else:
                positions += [(here, here, here + i) for i in range(item.length)]
                here += item.length
        return positions[:num]

    def features(self, start: int, stop: int) -> dict[int, tuple[str, int]]:
        """Token -> key and feature row, of the tokens in a range that take one."""
        return {
            item.offset + i: (item.key, i)
            for item in self.items
            for i in range(item.length)
            if start <= item.offset + i < stop
        }
