"""The pool of KV blocks: which are free and who has the others."""

from __future__ import annotations

from vlbatch.errors import InvariantBroken, OutOfBlocks


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

    def blocks_of(self, req_id: str) -> tuple[int, ...]:
        """Blocks that a request has, in the order of its tokens; empty for an unknown one."""
        return tuple(self._taken.get(req_id, ()))

    def take(self, req_id: str, count: int) -> list[int]:
        """Give a request more blocks, in the order of its tokens.

        Raises:
            OutOfBlocks: fewer are free; ask ``can_take`` first.
        """
        if not self.can_take(count):
            raise OutOfBlocks(
                f"asks for {count} KV blocks; {len(self._free)} of {self.num_blocks} are free",
                req_id=req_id,
                setting="kv_blocks",
            )
        blocks = [self._free.pop() for _ in range(count)]
        self._taken.setdefault(req_id, []).extend(blocks)
        return blocks

    def give_back(self, req_id: str) -> None:
        """Take all blocks of a request back; it need not have any."""
        self._free += self._taken.pop(req_id, [])[::-1]

    def check(self) -> None:
        """Verify that every block is free or has one owner.

        Raises:
            InvariantBroken: with each term of the broken sum.
        """
        taken = [block for blocks in self._taken.values() for block in blocks]
        if sorted(self._free + taken) != list(range(self.num_blocks)):
            raise InvariantBroken(
                f"{len(self._free)} free and {len(taken)} taken KV blocks are not the"
                f" {self.num_blocks} of the pool: free {self._free}, taken {self._taken}"
            )
