"""Blocks: their holders, which are reused, and the order of eviction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tokserve.engine.kv_cache.block_pool import BlockPool, CacheBroken


def new(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_available - pool.num_cached, pool.num_cached, pool.num_in_use


def test_blocks_are_free_then_held_then_free_again() -> None:
    pool = BlockPool(4)
    table = new(pool, 3)
    assert len(set(table)) == 3
    assert counts(pool) == (1, 0, 3)
    pool.check([table])
    pool.release(table)
    assert counts(pool) == (4, 0, 0)
    pool.check([])


def test_too_many_blocks_are_refused_without_a_change() -> None:
    pool = BlockPool(4)
    table = new(pool, 3)
    assert pool.allocate(2) is None
    assert counts(pool) == (1, 0, 3)
    pool.check([table])


def test_published_content_is_found_while_held_and_after() -> None:
    pool = BlockPool(3)
    (block,) = new(pool, 1)
    pool.cache_block(block, b"x")
    assert pool.lookup(b"x") == block
    assert pool.is_in_use(block)
    pool.release([block])
    assert pool.lookup(b"x") == block
    assert not pool.is_in_use(block)
    assert counts(pool) == (2, 1, 0)


def test_a_found_block_is_shared_until_its_last_holder_leaves() -> None:
    pool = BlockPool(3)
    (block,) = new(pool, 1)
    pool.cache_block(block, b"x")
    pool.ref(block)
    pool.check([[block], [block]])
    pool.release([block])
    assert pool.is_in_use(block)
    pool.check([[block]])
    pool.release([block])
    assert counts(pool) == (2, 1, 0)


def test_taking_a_cached_block_keeps_it_from_being_given_away() -> None:
    pool = BlockPool(2)
    (block,) = new(pool, 1)
    pool.cache_block(block, b"x")
    pool.release([block])
    pool.ref(block)
    (other,) = new(pool, 1)
    assert other != block
    assert pool.allocate(1) is None
    pool.check([[block], [other]])


def test_free_blocks_go_first_then_the_least_recently_released_tail_first() -> None:
    pool = BlockPool(5)
    first, second = new(pool, 2), new(pool, 2)
    for i, block in enumerate(first + second):
        pool.cache_block(block, bytes([i]))
    pool.release(second)
    pool.release(first)
    spare = new(pool, 1)
    assert not set(spare) & set(first + second)
    assert new(pool, 4) == [second[1], second[0], first[1], first[0]]


def test_a_block_given_away_is_not_found_any_more() -> None:
    pool = BlockPool(1)
    (block,) = new(pool, 1)
    pool.cache_block(block, b"x")
    pool.release([block])
    assert new(pool, 1) == [block]
    assert pool.lookup(b"x") is None
    pool.check([[block]])


def test_the_first_block_with_a_content_stays_the_one_that_is_found() -> None:
    pool = BlockPool(2)
    one, two = new(pool, 2)
    pool.cache_block(one, b"x")
    pool.cache_block(two, b"x")
    assert pool.lookup(b"x") == one
    pool.release([one, two])
    assert counts(pool) == (1, 1, 0)
    pool.check([])


def test_clear_forgets_all_content_and_no_holder() -> None:
    pool = BlockPool(4)
    table = new(pool, 3)
    for i, block in enumerate(table):
        pool.cache_block(block, bytes([i]))
    pool.release(table[1:])
    pool.clear()
    assert counts(pool) == (3, 0, 1)
    assert pool.lookup(b"\0") is None
    pool.check([table[:1]])


def test_check_finds_what_is_wrong() -> None:
    pool = BlockPool(4)
    table = new(pool, 2)
    for wrong in ([], [table, table], [[*table, 3]]):
        with pytest.raises(CacheBroken, match="counts"):
            pool.check(wrong)
    pool.ref(table[0])
    with pytest.raises(CacheBroken, match="twice"):
        pool.check([[table[0], *table]])
    pool.release(table[:1])


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda pool: pool._free.pop(), "0 is wrongly listed as free"),  # a lost block
        (lambda pool: pool._free.append(1), "1 is wrongly listed as free"),
        (lambda pool: pool._free.append(0), "free 2"),
        (lambda pool: pool._cached.clear(), "2 is wrongly listed as cached"),
        (lambda pool: pool._cached.update({1: None}), "1 is wrongly listed as cached"),
        (lambda pool: pool._index.update({b"x": 2}), "1 is not indexed"),
        (lambda pool: pool._index.update({b"z": 0}), "other content"),
    ],
)
def test_check_finds_what_was_lost_or_misplaced(break_it: Callable[[Any], None], message: str) -> None:
    """Block 0 is empty, 1 is held and found as x, 2 is cached and found as y."""
    pool = BlockPool(3)
    zero, one, two = new(pool, 3)
    pool.cache_block(one, b"x")
    pool.cache_block(two, b"y")
    pool.release([zero])
    pool.release([two])
    pool.check([[one]])
    break_it(pool)
    with pytest.raises(CacheBroken, match=message):
        pool.check([[one]])


def test_blocks_to_keep_go_last_in_their_own_order() -> None:
    pool = BlockPool(4)
    table = new(pool, 4)
    for i, block in enumerate(table):
        pool.cache_block(block, bytes([i]))
    pool.keep(bytes([0]))  # in use
    pool.release(table)
    pool.keep(bytes([3]))  # cached
    pool.check([])
    assert counts(pool) == (0, 4, 0)
    assert new(pool, 2) == [table[2], table[1]]
    pool.keep_no_longer(bytes([3]))
    pool.check([[table[2]], [table[1]]])
    assert new(pool, 2) == [table[3], table[0]]


def test_a_block_to_keep_is_found_and_released_like_others() -> None:
    pool = BlockPool(3)
    (block,) = new(pool, 1)
    pool.keep(b"x")  # not there yet
    pool.cache_block(block, b"x")
    pool.release([block])
    pool.ref(block)
    assert pool.is_in_use(block)
    pool.release([block])
    pool.check([])
    pool.clear()
    pool.check([])
    assert counts(pool) == (3, 0, 0) and pool.lookup(b"x") is None
