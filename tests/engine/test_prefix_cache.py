"""The prefix cache: which blocks are found, and which requests wait for pending blocks."""

from __future__ import annotations

from array import array

import pytest

from tokserve.engine.kv_cache.block_pool import CacheBroken
from tokserve.engine.kv_cache.block_table import BlockTable
from tokserve.engine.kv_cache.prefix_cache import PrefixCache
from tokserve.features.lora.adapter import Adapter
from tokserve.protocol.prompt import Feature


def make(num_blocks: int = 16, *, enabled: bool = True, model: str = "m", epoch: int = 1) -> PrefixCache:
    cache = PrefixCache(num_blocks, 4, enabled=enabled, model=model)
    cache.set_epoch(epoch)
    return cache


def tokens(count: int, start: int = 0) -> array[int]:
    return array("i", range(start, start + count))


def run(cache: PrefixCache, ids: array[int], salt: str = "", adapter: Adapter | None = None) -> BlockTable:
    """A request that computes all its tokens, taking what it can from the cache; it stays."""
    table = BlockTable(salt, adapter)
    hits = cache.lookup(table, ids, len(ids) // 4)
    assert hits is not None
    assert cache.allocate(table, ids, hits, reserve=0)
    cache.cache_full_blocks(table, ids, len(ids))
    return table


def hits(cache: PrefixCache, ids: array[int], salt: str = "") -> int | None:
    return cache.lookup(BlockTable(salt), ids, len(ids) // 4)


def test_full_blocks_of_a_computed_prefix_are_found() -> None:
    cache = make()
    run(cache, tokens(10))
    assert hits(cache, tokens(10)) == 2
    assert hits(cache, tokens(3)) == 0
    assert hits(cache, tokens(30)) == 2
    assert hits(cache, array("i", [*range(4), 99, 5, 6, 7])) == 1
    assert hits(cache, tokens(8, start=4)) == 0  # the same block content after another prefix


def test_blocks_survive_their_request() -> None:
    cache = make()
    table = run(cache, tokens(10))
    cache.free(table)
    cache.check()
    cache.check_idle()
    assert cache.pool.num_cached == 2
    assert hits(cache, tokens(10)) == 2


def test_shared_blocks_are_the_same_blocks() -> None:
    cache = make()
    one, two = run(cache, tokens(10)), run(cache, tokens(12))
    assert one.blocks[:2] == two.blocks[:2]
    assert one.blocks[2] != two.blocks[2]
    assert cache.pool.num_in_use == 4
    cache.check()


@pytest.mark.parametrize("usable", [0, 1, 2])
def test_no_more_than_usable_blocks_are_found(usable: int) -> None:
    cache = make()
    run(cache, tokens(12))
    assert cache.lookup(BlockTable(""), tokens(12), usable) == usable


def test_salts_do_not_share() -> None:
    cache = make()
    run(cache, tokens(8), "mine")
    assert hits(cache, tokens(8), "mine") == 2
    assert hits(cache, tokens(8), "yours") == 0
    assert hits(cache, tokens(8)) == 0


def test_the_root_of_the_chain_names_model_version_salt_and_process() -> None:
    def digest(cache: PrefixCache, salt: str = "", adapter: Adapter | None = None) -> bytes:
        table = BlockTable(salt, adapter)
        cache.lookup(table, tokens(4), 1)
        return table.hashes[0]

    caches = [make(), make(model="other"), make(epoch=2)]
    for cache in caches:
        cache._key = bytes(32)
    adapters = [Adapter("a", "", 0, 1), Adapter("b", "", 0, 1), Adapter("a", "", 0, 2)]
    digests = [digest(cache) for cache in caches] + [digest(caches[0], adapter=adapter) for adapter in adapters]
    digests += [digest(caches[0], "salt"), digest(make()), digest(make())]
    assert len(set(digests)) == len(digests)  # the last two differ by their keys


def test_a_replaced_adapter_finds_nothing_of_the_old_and_others_keep_theirs() -> None:
    cache = make()
    replaced, other = Adapter("mine", "", 0, 1), Adapter("other", "", 1, 2)
    for adapter in (replaced, other, None):
        run(cache, tokens(8), adapter=adapter)
    running, waiting = BlockTable("", replaced), BlockTable("", replaced)
    assert cache.allocate(running, tokens(12), 0, reserve=0)
    assert cache.lookup(waiting, tokens(12), 2) == 2
    assert cache.lookup(waiting, tokens(12), 3) is None  # the third block is pending
    replaced.generation = 3
    cache.on_variant_replaced(replaced)
    assert not cache.must_wait(waiting) and cache.lookup(waiting, tokens(12), 3) == 0
    cache.cache_full_blocks(running, tokens(12), 12)  # computed in part by the old weights: must not be found
    assert cache.lookup(BlockTable("", replaced), tokens(12), 3) == 0
    assert cache.lookup(BlockTable("", other), tokens(8), 2) == cache.lookup(BlockTable(""), tokens(8), 2) == 2
    cache.free(running)
    run(cache, tokens(8), adapter=replaced)
    assert cache.lookup(BlockTable("", replaced), tokens(8), 2) == 2
    cache.check()


def test_model_and_epoch_are_hashed_separately() -> None:
    one, two = make(model="ab", epoch=1), make(model="ab1", epoch=1)
    one._key = two._key
    assert one._root(BlockTable("")) != two._root(BlockTable(""))


def test_disabled_finds_nothing_and_pending_nothing() -> None:
    cache = make(enabled=False)
    table = run(cache, tokens(8))
    assert hits(cache, tokens(8)) == 0
    cache.free(table)
    assert cache.pool.num_cached == 0


def test_admission_allocates_all_blocks_or_none() -> None:
    cache = make(num_blocks=4)
    table = BlockTable("")
    assert not cache.allocate(table, tokens(17), 0, reserve=0)
    assert not cache.allocate(table, tokens(16), 0, reserve=1)
    assert table.blocks == []
    cache.check_idle()
    assert cache.allocate(table, tokens(16), 0, reserve=0)
    assert len(table.blocks) == 4


def test_admission_counts_reused_free_blocks_as_taken() -> None:
    cache = make(num_blocks=4)
    cache.free(run(cache, tokens(8)))
    other = BlockTable("")
    assert cache.allocate(other, tokens(4, start=50), 0, reserve=0)
    late = BlockTable("")
    hits = cache.lookup(late, tokens(16), 4)
    assert hits == 2
    assert not cache.allocate(late, tokens(16), 2, reserve=0)
    assert cache.allocate(late, tokens(12), 2, reserve=0)
    cache.check()


def test_growth_is_refused_when_nothing_is_left() -> None:
    cache = make(num_blocks=2)
    table = run(cache, tokens(4))
    assert cache.extend(table, 4)
    assert len(table.blocks) == 1
    assert cache.extend(table, 5)
    assert len(table.blocks) == 2
    assert not cache.extend(table, 9)
    assert len(table.blocks) == 2


def test_blocks_are_found_only_when_they_have_been_computed() -> None:
    cache = make()
    table = BlockTable("")
    cache.allocate(table, tokens(12), 0, reserve=0)
    cache.cache_full_blocks(table, tokens(12), 7)
    assert cache.pool.lookup(table.hashes[0]) is not None
    assert cache.pool.lookup(table.hashes[1]) is None


def test_output_is_found_too() -> None:
    cache = make()
    ids = tokens(5)
    table = run(cache, ids)
    ids.extend([70, 71, 72])
    cache.extend(table, 8)
    cache.cache_full_blocks(table, ids, 8)
    assert hits(cache, array("i", [0, 1, 2, 3, 4, 70, 71, 72, 1])) == 2


def test_a_request_waits_for_a_shared_block_that_is_being_computed() -> None:
    cache = make()
    first = BlockTable("")
    cache.allocate(first, tokens(12), 0, reserve=0)
    second = BlockTable("")
    assert cache.lookup(second, tokens(10), 2) is None
    assert cache.must_wait(second)
    cache.cache_full_blocks(first, tokens(12), 4)
    assert not cache.must_wait(second)
    assert cache.lookup(second, tokens(10), 2) is None  # now for the second block
    cache.cache_full_blocks(first, tokens(12), 8)
    assert cache.lookup(second, tokens(10), 2) == 2


def test_requests_do_not_wait_for_blocks_they_cannot_use() -> None:
    cache = make()
    cache.allocate(BlockTable(""), tokens(12), 0, reserve=0)
    assert cache.lookup(BlockTable(""), tokens(12), 0) == 0
    assert hits(cache, tokens(12, start=7)) == 0
    assert hits(cache, tokens(12), "salt") == 0


def test_a_pending_block_ends_with_its_request() -> None:
    cache = make()
    first, second = BlockTable(""), BlockTable("")
    cache.allocate(first, tokens(12), 0, reserve=0)
    assert cache.lookup(second, tokens(12), 3) is None
    cache.free(first)
    assert not cache.must_wait(second)
    assert cache.lookup(second, tokens(12), 3) == 0
    cache.check_idle()


def test_a_pending_block_outlasts_another_request_that_computes_it() -> None:
    cache = make()
    first, same, waiting = BlockTable(""), BlockTable(""), BlockTable("")
    cache.allocate(first, tokens(12), 0, reserve=0)
    cache.allocate(same, tokens(12), 0, reserve=0)  # one that may reuse nothing
    cache.free(same)
    assert cache.lookup(waiting, tokens(12), 3) is None


def test_reset_changes_all_names() -> None:
    cache = make()
    table = BlockTable("")
    cache.lookup(table, tokens(8), 2)
    before = list(table.hashes)
    cache.reset()
    cache.lookup(table, tokens(8), 2)
    assert len(table.hashes) == 2 and not set(before) & set(table.hashes)


def test_reset_forgets_even_what_is_being_computed() -> None:
    cache = make()
    table, waiting = BlockTable(""), BlockTable("")
    cache.allocate(table, tokens(12), 0, reserve=0)
    cache.cache_full_blocks(table, tokens(12), 4)
    assert cache.lookup(waiting, tokens(12), 3) is None
    cache.reset()
    assert not cache.must_wait(waiting)
    assert cache.lookup(waiting, tokens(12), 3) == 0
    cache.cache_full_blocks(table, tokens(12), 12)
    assert hits(cache, tokens(12)) == 0
    cache.free(table)
    cache.check()
    assert cache.pool.num_cached == 0
    run(cache, tokens(12))
    assert hits(cache, tokens(12)) == 3


def test_checks_find_a_table_that_was_not_freed() -> None:
    cache = make()
    table = run(cache, tokens(8))
    cache.check()
    with pytest.raises(CacheBroken):
        cache.check_idle()
    cache._pending[b"x"] = BlockTable("")
    with pytest.raises(CacheBroken, match="does not run"):
        cache.check()
    cache._pending.clear()
    table.blocks.pop()
    with pytest.raises(CacheBroken):
        cache.check()


# --- features ---


def image(content: bytes, start: int = 2, length: int = 5, kind: str = "image") -> Feature:
    return Feature(kind, content, start, length, b"")


def hashes(cache: PrefixCache, *features: Feature, count: int = 12) -> list[bytes]:
    table = BlockTable("", features=features)
    cache.lookup(table, tokens(count), count // 4)
    return table.hashes


def test_blocks_of_equal_ids_are_shared_only_if_their_features_are_equal() -> None:
    cache = make()
    table = BlockTable("", features=(image(b"one", start=5),))
    assert cache.allocate(table, tokens(12), 0, reserve=0)
    cache.cache_full_blocks(table, tokens(12), 12)

    def num_cached(*features: Feature) -> int | None:
        return cache.lookup(BlockTable("", features=features), tokens(12), 3)

    assert num_cached(image(b"one", start=5)) == 3
    assert num_cached(image(b"two", start=5)) == num_cached() == num_cached(image(b"one", start=5, kind="audio")) == 1
    assert num_cached(image(b"one", start=4)) == num_cached(image(b"one", start=6)) == 1
    assert num_cached(image(b"one", start=3)) == 0, "it begins in the first block"


def test_a_feature_changes_the_blocks_it_overlaps_and_those_after() -> None:
    cache = make()
    plain = hashes(cache)
    for start, length, first in ((0, 1, 0), (3, 1, 0), (3, 2, 0), (4, 4, 1), (7, 5, 1), (8, 4, 2), (12, 3, 3)):
        changed = hashes(cache, image(b"x", start, length))
        assert changed[:first] == plain[:first]
        assert not set(changed[first:]) & set(plain), (start, length)


def test_the_same_part_of_a_feature_is_the_same_and_another_part_is_not() -> None:
    cache = make()
    two = [hashes(cache, image(b"x", 0, 12), image(b"y", 12, 4), count=16) for _ in range(2)]
    assert two[0] == two[1]
    shifted = hashes(cache, image(b"x", 1, 12), image(b"y", 13, 3), count=16)
    assert not set(shifted) & set(two[0])
    assert (
        len(
            {*hashes(cache, image(b"x", 4, 4), image(b"y", 8, 4)), *hashes(cache, image(b"y", 4, 4), image(b"x", 8, 4))}
        )
        == 5
    )
