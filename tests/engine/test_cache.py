"""The prefix cache: what is found, what is not, and who waits for whom."""

from __future__ import annotations

from array import array

import pytest

from tokserve.engine.adapter import Adapter
from tokserve.engine.blocks import CacheBroken
from tokserve.engine.cache import Cache, Table


def make(num_blocks: int = 16, *, enabled: bool = True, model: str = "m", epoch: int = 1) -> Cache:
    return Cache(num_blocks, 4, enabled=enabled, model=model, epoch=epoch)


def tokens(count: int, start: int = 0) -> array[int]:
    return array("i", range(start, start + count))


def run(cache: Cache, ids: array[int], salt: str = "", adapter: Adapter | None = None) -> Table:
    """A request that computes all its tokens, taking what it can from the cache; it stays."""
    table = Table(salt, adapter)
    hits = cache.find(table, ids, len(ids) // 4)
    assert hits is not None
    assert cache.admit(table, ids, hits, spare=0)
    cache.settle(table, ids, len(ids))
    return table


def hits(cache: Cache, ids: array[int], salt: str = "") -> int | None:
    return cache.find(Table(salt), ids, len(ids) // 4)


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
    assert cache.pool.num_held == 4
    cache.check()


@pytest.mark.parametrize("usable", [0, 1, 2])
def test_no_more_than_usable_blocks_are_found(usable: int) -> None:
    cache = make()
    run(cache, tokens(12))
    assert cache.find(Table(""), tokens(12), usable) == usable


def test_salts_do_not_share() -> None:
    cache = make()
    run(cache, tokens(8), "mine")
    assert hits(cache, tokens(8), "mine") == 2
    assert hits(cache, tokens(8), "yours") == 0
    assert hits(cache, tokens(8)) == 0


def test_the_root_of_the_chain_names_model_version_salt_and_process() -> None:
    def digest(cache: Cache, salt: str = "", adapter: Adapter | None = None) -> bytes:
        table = Table(salt, adapter)
        cache.find(table, tokens(4), 1)
        return table.digests[0]

    caches = [make(), make(model="other"), make(epoch=2)]
    for cache in caches:
        cache._key = bytes(32)
    adapters = [Adapter("a", "", 0, 1), Adapter("b", "", 0, 1), Adapter("a", "", 0, 2)]
    digests = [digest(cache) for cache in caches] + [digest(caches[0], adapter=adapter) for adapter in adapters]
    digests += [digest(caches[0], "salt"), digest(make()), digest(make())]
    assert len(set(digests)) == len(digests)  # the last two differ by their keys


def test_a_replaced_adapter_finds_nothing_of_the_old_and_others_keep_theirs() -> None:
    cache = make()
    mine, other = Adapter("mine", "", 0, 1), Adapter("other", "", 1, 2)
    for adapter in (mine, other, None):
        run(cache, tokens(8), adapter=adapter)
    running, waiting = Table("", mine), Table("", mine)
    assert cache.admit(running, tokens(12), 0, spare=0)
    assert cache.find(waiting, tokens(12), 2) == 2
    assert cache.find(waiting, tokens(12), 3) is None  # the third block is promised
    mine.generation = 3
    cache.replaced(mine)
    assert not cache.must_wait(waiting) and cache.find(waiting, tokens(12), 3) == 0
    cache.settle(running, tokens(12), 12)  # made by the old weights, in part: nobody may find it
    assert cache.find(Table("", mine), tokens(12), 3) == 0
    assert cache.find(Table("", other), tokens(8), 2) == cache.find(Table(""), tokens(8), 2) == 2
    cache.free(running)
    run(cache, tokens(8), adapter=mine)
    assert cache.find(Table("", mine), tokens(8), 2) == 2
    cache.check()


def test_names_cannot_be_shifted_into_each_other() -> None:
    one, two = make(model="ab", epoch=1), make(model="ab1", epoch=1)
    one._key = two._key
    assert one._root("") != two._root("")


def test_disabled_finds_nothing_and_promises_nothing() -> None:
    cache = make(enabled=False)
    table = run(cache, tokens(8))
    assert hits(cache, tokens(8)) == 0
    cache.free(table)
    assert cache.pool.num_cached == 0


def test_admission_allocates_all_blocks_or_none() -> None:
    cache = make(num_blocks=4)
    table = Table("")
    assert not cache.admit(table, tokens(17), 0, spare=0)
    assert not cache.admit(table, tokens(16), 0, spare=1)
    assert table.blocks == []
    cache.check_idle()
    assert cache.admit(table, tokens(16), 0, spare=0)
    assert len(table.blocks) == 4


def test_admission_counts_found_blocks_that_nobody_holds_as_taken() -> None:
    cache = make(num_blocks=4)
    cache.free(run(cache, tokens(8)))
    other = Table("")
    assert cache.admit(other, tokens(4, start=50), 0, spare=0)
    late = Table("")
    found = cache.find(late, tokens(16), 4)
    assert found == 2
    assert not cache.admit(late, tokens(16), 2, spare=0)
    assert cache.admit(late, tokens(12), 2, spare=0)
    cache.check()


def test_growth_is_refused_when_nothing_is_left() -> None:
    cache = make(num_blocks=2)
    table = run(cache, tokens(4))
    assert cache.grow(table, 4)
    assert len(table.blocks) == 1
    assert cache.grow(table, 5)
    assert len(table.blocks) == 2
    assert not cache.grow(table, 9)
    assert len(table.blocks) == 2


def test_blocks_are_found_only_when_they_have_been_computed() -> None:
    cache = make()
    table = Table("")
    cache.admit(table, tokens(12), 0, spare=0)
    cache.settle(table, tokens(12), 7)
    assert cache.pool.find(table.digests[0]) is not None
    assert cache.pool.find(table.digests[1]) is None


def test_output_is_found_too() -> None:
    cache = make()
    ids = tokens(5)
    table = run(cache, ids)
    ids.extend([70, 71, 72])
    cache.grow(table, 8)
    cache.settle(table, ids, 8)
    assert hits(cache, array("i", [0, 1, 2, 3, 4, 70, 71, 72, 1])) == 2


def test_who_shares_the_next_block_with_one_that_is_computing_waits_for_it() -> None:
    cache = make()
    first = Table("")
    cache.admit(first, tokens(12), 0, spare=0)
    second = Table("")
    assert cache.find(second, tokens(10), 2) is None
    assert cache.must_wait(second)
    cache.settle(first, tokens(12), 4)
    assert not cache.must_wait(second)
    assert cache.find(second, tokens(10), 2) is None  # now for the second block
    cache.settle(first, tokens(12), 8)
    assert cache.find(second, tokens(10), 2) == 2


def test_nobody_waits_for_a_block_it_cannot_use() -> None:
    cache = make()
    cache.admit(Table(""), tokens(12), 0, spare=0)
    assert cache.find(Table(""), tokens(12), 0) == 0
    assert hits(cache, tokens(12, start=7)) == 0
    assert hits(cache, tokens(12), "salt") == 0


def test_a_promise_ends_with_its_request() -> None:
    cache = make()
    first, second = Table(""), Table("")
    cache.admit(first, tokens(12), 0, spare=0)
    assert cache.find(second, tokens(12), 3) is None
    cache.free(first)
    assert not cache.must_wait(second)
    assert cache.find(second, tokens(12), 3) == 0
    cache.check_idle()


def test_a_promise_is_not_withdrawn_by_another_that_computes_the_same() -> None:
    cache = make()
    first, same, waiting = Table(""), Table(""), Table("")
    cache.admit(first, tokens(12), 0, spare=0)
    cache.admit(same, tokens(12), 0, spare=0)  # one that may reuse nothing
    cache.free(same)
    assert cache.find(waiting, tokens(12), 3) is None


def test_reset_changes_all_names() -> None:
    cache = make()
    table = Table("")
    cache.find(table, tokens(8), 2)
    before = list(table.digests)
    cache.reset()
    cache.find(table, tokens(8), 2)
    assert len(table.digests) == 2 and not set(before) & set(table.digests)


def test_reset_forgets_even_what_is_being_computed() -> None:
    cache = make()
    table, waiting = Table(""), Table("")
    cache.admit(table, tokens(12), 0, spare=0)
    cache.settle(table, tokens(12), 4)
    assert cache.find(waiting, tokens(12), 3) is None
    cache.reset()
    assert not cache.must_wait(waiting)
    assert cache.find(waiting, tokens(12), 3) == 0
    cache.settle(table, tokens(12), 12)
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
    cache._promises[b"x"] = Table("")
    with pytest.raises(CacheBroken, match="does not run"):
        cache.check()
    cache._promises.clear()
    table.blocks.pop()
    with pytest.raises(CacheBroken):
        cache.check()
