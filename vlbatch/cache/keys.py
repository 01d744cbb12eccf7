"""What names an entry of the cache, a reader of it, and its content."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class EntryKey(NamedTuple):
    """What features depend on.

    Attributes:
        content: identity of pixels, shape, mode, processor options and model.
        epoch: weight epoch that encoded it.
        adapter: adapter active in the encoder, ``""`` for none.
    """

    content: str
    epoch: int = 0
    adapter: str = ""


class Reference(NamedTuple):
    """One occurrence of an item."""

    req_id: str
    item: int


Features: TypeAlias = tuple[object, ...]
"""One array ``[rows, hidden]`` a level; opaque here."""
