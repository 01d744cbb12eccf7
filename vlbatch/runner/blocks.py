"""The pool of KV blocks: which are free and who has the others."""

from __future__ import annotations


class BlockPool:
    """KV blocks by request; a request's block table in the batch is a copy for the kernels.

    Args:
        num_blocks: blocks of the engine's cache.
        block_size: tokens a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks))[::-1]  # the last one is handed out first
        self._taken: dict[str, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def can_take(self, count: int) -> bool:
        """Whether this many blocks are free."""
        return count <= len(self._free)

    def num_taken(self, req_id: str) -> int:
        """Blocks that a request has."""
        return len(self._taken.get(req_id, ()))

    def take(self, req_id: str, count: int) -> list[int]:
        """Give a request more blocks, in the order of its tokens; only after ``can_take``."""
        blocks = [self._free.pop() for _ in range(count)]
        self._taken.setdefault(req_id, []).extend(blocks)
        return blocks

    def give_back(self, req_id: str) -> None:
        """Take all blocks of a request back; it need not have any."""
        self._free += self._taken.pop(req_id, [])[::-1]
