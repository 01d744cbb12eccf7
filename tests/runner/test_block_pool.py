"""KV blocks: handed out, given back, never two owners."""

from __future__ import annotations

import random

import pytest

from vlbatch.errors import InvariantBroken, OutOfBlocks
from vlbatch.runner.blocks import BlockPool


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (8, 1), (9, 2), (16, 2)])
def test_blocks_for_rounds_up(num_tokens, blocks):
    """A block that is begun is needed whole."""
    assert BlockPool(4, 8).blocks_for(num_tokens) == blocks


def test_more_than_is_free_is_refused_whole():
    """Asking for too many blocks names the request and takes none."""
    pool = BlockPool(3, 8)
    pool.take("a", 2)

    with pytest.raises(OutOfBlocks, match=r"request 'b': asks for 2 KV blocks; 1 of 3 are free"):
        pool.take("b", 2)

    assert (pool.num_free, pool.blocks_of("b")) == (1, ())
    pool.check()


def test_giving_back_twice_changes_nothing():
    """A request without blocks has nothing to give back."""
    pool = BlockPool(3, 8)
    pool.take("a", 2)

    pool.give_back("a")
    pool.give_back("a")

    assert pool.num_free == 3
    pool.check()


def test_random_walk_against_a_dict(seed):
    """Blocks are of one owner at a time and keep the order in which they were taken."""
    rng = random.Random(seed)
    pool = BlockPool(12, 4)
    owned: dict[str, list[int]] = {}
    for _ in range(500):
        req_id = rng.choice("abcd")
        if rng.random() < 0.3:
            pool.give_back(req_id)
            owned.pop(req_id, None)
        else:
            count = rng.randrange(4)
            if pool.can_take(count):
                owned.setdefault(req_id, []).extend(pool.take(req_id, count))
        taken = [block for blocks in owned.values() for block in blocks]
        assert len(set(taken)) == len(taken) == 12 - pool.num_free, f"{seed=}"
        assert all(list(pool.blocks_of(r)) == blocks for r, blocks in owned.items()), f"{seed=}"
        pool.check()


def test_check_finds_a_block_with_two_owners():
    """A block that is free and taken at once is named."""
    pool = BlockPool(3, 8)
    pool.take("a", 1)
    pool.check()

    pool._free.append(pool.blocks_of("a")[0])

    with pytest.raises(InvariantBroken, match=r"3 free and 1 taken KV blocks are not the 3"):
        pool.check()
