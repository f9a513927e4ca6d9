"""Snapshots of recurrent states: when they are taken, their use for prefix hits, and requests that wait for them."""

from __future__ import annotations

import pytest

from tests.engine.harness import Engine
from tokserve.engine.kv_cache.block_pool import CacheBroken
from tokserve.families.recurrent.snapshots import Snapshots

PROMPT = [9, 8, 7, 6, 5, 4, 3, 2] * 4


def reserved(snapshots: Snapshots) -> int:
    snapshot = snapshots.reserve()
    assert snapshot is not None
    return snapshot


def test_the_least_recently_used_one_is_dropped() -> None:
    snapshots = Snapshots(2, 1)
    for name in (b"a", b"b"):
        snapshots.keep(reserved(snapshots), name)
    snapshots.use(b"a")
    snapshots.keep(reserved(snapshots), b"c")
    assert b"a" in snapshots and b"b" not in snapshots and b"c" in snapshots
    assert snapshots.num_kept == 2
    snapshots.check_idle()


def test_a_reserved_snapshot_is_not_reused() -> None:
    snapshots = Snapshots(2, 1)
    first, second = reserved(snapshots), reserved(snapshots)
    assert snapshots.reserve() is None
    with pytest.raises(CacheBroken, match="2 snapshots are reserved"):
        snapshots.check_idle()
    snapshots.keep(first, b"a")
    snapshots.keep(second, b"a")  # another request took one of the same prefix
    assert snapshots.num_kept == 1 and reserved(snapshots) == second
    snapshots.clear()
    assert b"a" not in snapshots
    snapshots.check()


def test_they_are_due_every_interval_and_where_the_prompts_last_full_block_ends() -> None:
    assert [index for index in range(12) if Snapshots(1, 4).is_due(index, last=7)] == [4, 7, 8]
    assert not Snapshots(0, 4).is_due(4, last=7)


def test_a_prefix_is_reused_up_to_its_last_snapshot() -> None:
    engine = Engine(snapshots=8, interval=16)  # blocks of 4
    engine.add("a", PROMPT[:30], max_tokens=1)
    engine.run()
    assert engine.stats.rooms["snapshots"] == 2  # after 16 tokens and after 28
    for rid, prompt, cached in (
        ("same", PROMPT[:30], 28),
        ("longer", [*PROMPT[:30], 1, 2, 3], 28),
        ("shorter", PROMPT[:27], 16),
        ("early", PROMPT[:15], 0),
        ("whole", PROMPT[:28], 27),
        ("exact", PROMPT[:16], 15),
    ):
        engine.add(rid, prompt, max_tokens=1)
        engine.run()
        assert engine.received[rid].cached == cached, rid
        engine.check_complete(rid)


def test_output_has_snapshots_too() -> None:
    engine = Engine(snapshots=8, interval=16)
    engine.add("a", PROMPT[:5], max_tokens=40, ignore_eos=True)
    engine.run()
    engine.add("b", PROMPT[:5] + engine.tokens("a")[:35], max_tokens=1)
    engine.run()
    assert engine.received["b"].cached == 32
    engine.check_complete("b")


def test_choices_of_one_prompt_wait_for_its_snapshot() -> None:
    engine = Engine(snapshots=8, interval=16)
    for choice in range(4):
        engine.add(f"r{choice}", PROMPT[:22], seed=choice, max_tokens=3)
    engine.run()
    assert [engine.received[f"r{choice}"].cached for choice in range(4)] == [0, 20, 20, 20]
    assert sum(engine.executor.computed.values()) < 22 + 3 * 2 + 4 * 3


def test_without_free_snapshots_nothing_is_reused_and_no_request_waits() -> None:
    engine = Engine(snapshots=0)
    for rid in ("a", "b"):
        engine.add(rid, PROMPT[:22], max_tokens=5, ignore_eos=True)
    engine.steps(1)
    assert engine.stats.running == 2 and engine.stats.deferred == 0
    engine.run()
    assert engine.received["b"].cached == 0


def test_a_reset_forgets_them() -> None:
    engine = Engine(snapshots=8, interval=8)
    engine.add("a", PROMPT[:22], max_tokens=20, ignore_eos=True)
    engine.steps(2)
    engine.call("reset_prefix_cache")
    engine.run()
    assert engine.stats.rooms["snapshots"] == 0
    engine.add("b", PROMPT[:22], max_tokens=1)
    engine.run()
    assert engine.received["b"].cached == 0
    engine.check_empty()
