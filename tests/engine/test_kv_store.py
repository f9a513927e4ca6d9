"""The KV store's policy: what is stored, what is loaded and when; the scripted executor fails on a wrong block."""

from __future__ import annotations

import math
import random
from collections import deque
from typing import Any

import pytest

from tests.engine.harness import Engine
from tests.engine.scripted_copies import ScriptedCopies
from tests.engine.test_kv_events import config as events_config
from tests.tiers import slow_after
from tokserve.base.errors import StartError
from tokserve.config import Config
from tokserve.features.kv.external_kv import KeptKV, KVEvents
from tokserve.features.kv.load_rates import FILE_RATE, LoadRates
from tokserve.features.kv.slots import MemorySlots

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]  # two full blocks of four tokens, and one token


def engine(tmp_path: str = "/nowhere", **options: Any) -> Engine:
    return Engine(kv_offloading_size=1.0, kv_offloading_dir=tmp_path, **options)


def cached(e: Engine, rid: str, prompt: list[int] = PROMPT, **fields: Any) -> int:
    """Run a request; how many of its prompt tokens were cached."""
    e.add(rid, prompt, max_tokens=2, ignore_eos=True, **fields)
    run(e)
    e.check_complete(rid)
    return max(output.cached for output in e.received[rid].outputs)


def run(e: Engine) -> None:
    """Until idle, and no copy has ended since."""
    count = -1
    while count < len(e.wakes):
        count = len(e.wakes)
        e.run()


def flush(e: Engine) -> None:
    e.call("reset_prefix_cache", call_id=2)


def test_blocks_come_back_from_memory_and_are_counted() -> None:
    e = engine()
    assert cached(e, "a") == 0
    flush(e)
    assert cached(e, "b") == 8
    store = e.stats.rooms["kv_store"]
    assert [store[name] for name in ("saved", "written", "loaded", "read")] == [2, 2, 2, 0]
    assert [store[name] for name in ("hits", "memory_blocks", "file_blocks")] == [8, 2, 2]
    assert cached(e, "c") == 8 and e.stored("loaded") == 2  # from the KV cache
    e.check_empty()


def test_blocks_come_back_from_files_after_a_restart() -> None:
    first = engine()
    cached(first, "a")
    second = engine()
    second.executor.copies.files.update(first.executor.copies.files)
    watch = second.feature(KeptKV).watch
    assert watch is not None
    watch._forget()  # look at the files again
    second.step()
    second.step()
    assert cached(second, "b") == 8
    assert (second.stored("read"), second.stored("loaded")) == (2, 2)


@pytest.mark.parametrize("fields", [{"cache_salt": "s"}, {"prompt": [5, 6, 7, 8, 9, 10, 11, 4, 13]}])
def test_other_content_has_other_keys(fields: dict[str, Any]) -> None:
    e = engine()
    cached(e, "a")
    flush(e)
    assert cached(e, "b", **fields) == (4 if "prompt" in fields else 0)


def update_weights(e: Engine, to: str) -> None:
    e.executor.directories[to] = (to, "stamp")
    e.call("update_weights_from_dir", weight_dir=to, weight_version=to, call_id=3)
    e.weights_of[to] = to
    run(e)


def test_kv_of_other_weights_is_not_found_and_that_of_the_same_is() -> None:
    e = engine()
    cached(e, "a")
    update_weights(e, "w2")
    assert cached(e, "b") == 0
    update_weights(e, "w3")
    assert cached(e, "c") == 0
    e.executor.directories["w2"] = ("w2", "stamp")
    e.call("update_weights_from_dir", weight_dir="w2", weight_version="again", call_id=3)
    e.weights_of["again"] = "w2"
    run(e)
    assert cached(e, "d") == 8


@pytest.mark.parametrize("num_before", range(5))
def test_a_step_that_begins_in_the_turn_of_a_commit_has_no_kv_of_the_old_weights(num_before: int) -> None:
    e = engine()
    cached(e, "a")
    e.call("pause", mode="keep", call_id=4)
    e.add("b", PROMPT, max_tokens=2, ignore_eos=True)
    e.executor.slow = deque()
    e.executor.directories["w2"] = ("w2", "stamp")
    e.weights_of["w2"] = "w2"
    e.call("update_weights_from_dir", weight_dir="w2", weight_version="w2", call_id=3)
    for _ in range(num_before):
        e.executor.settle(1)
        e.step()
    e.executor.settle(1)
    e.call("resume", call_id=5)
    e.step()
    e.executor.settle()
    run(e)
    e.check_complete("b")
    [(version, _, _)] = e.received["b"].outputs[-1].spans
    assert max(output.cached for output in e.received["b"].outputs) == (0 if version == "w2" else 8)


def test_nothing_is_kept_while_the_identity_is_unknown() -> None:
    e = engine()
    e.call("collective_rpc", method="f", call_id=4)
    run(e)
    assert cached(e, "a") == 0
    assert e.stored("saved") == 0  # the worker call may have changed the weights, and cached KV is of the old ones
    flush(e)
    run(e)
    assert cached(e, "b") == 0 and e.stored("saved") == 2


def test_a_reset_of_everything_empties_the_store() -> None:
    e = engine()
    cached(e, "a")
    e.call("reset_prefix_cache", reset_external=True, call_id=2)
    assert cached(e, "b") == 0 and not e.executor.copies.calls.count("read_files")
    assert e.stored("memory_blocks") == 2


def test_files_that_are_being_written_at_a_reset_of_everything_are_not_there_afterwards() -> None:
    e = engine()
    copies = e.executor.copies
    copies.instant = False
    cached(e, "a")
    copies.advance("pages")
    e.step()
    assert copies.calls == ["use_identity", "save_blocks", "write_files"]
    e.call("reset_prefix_cache", reset_external=True, call_id=2)
    copies.advance("write")
    run(e)
    assert e.stored("file_blocks") == 0
    copies.instant = True
    copies.advance("write")
    assert cached(e, "b") == 0
    assert e.stored("file_blocks") == len(copies.files) == 2, "they are written again"


def test_events_tell_where_blocks_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    e = engine(**events_config())
    published: list[Any] = []
    monkeypatch.setattr(e.feature(KVEvents).publisher, "publish", published.extend)

    def stored(medium: str) -> list[tuple[str, int]]:
        return [
            (type(event).__name__, block)
            for event in published
            if event.medium == medium
            for block in event.block_hashes
        ]

    cached(e, "a")
    first, second = (block for _, block in stored("GPU"))
    assert stored("CPU") == stored("STORAGE") == [("BlockStored", first), ("BlockStored", second)]
    kept = [event for event in published if event.medium == "CPU"]
    assert [event.parent_block_hash for event in kept] == [None, first]
    assert [event.token_ids for event in kept] == [PROMPT[:4], PROMPT[4:8]]
    copies = e.executor.copies
    _, (_, key) = copies.files
    copies.broken.add(key)
    for number in range(40):  # more than the KV cache holds, and memory
        cached(e, f"other{number}", [4 + number % 14, 4 + number // 14] * 4 + [9])
    assert {("BlockRemoved", first), ("BlockRemoved", second)} <= set(stored("CPU"))
    assert all(kind == "BlockStored" for kind, _ in stored("STORAGE"))
    published.clear()
    assert cached(e, "b") == 4, "the other block's file is damaged"
    assert stored("STORAGE") == [("BlockRemoved", second), ("BlockStored", second)]
    published.clear()
    e.call("reset_prefix_cache", reset_external=True, call_id=2)
    e.run()
    assert [type(event).__name__ for event in published] == ["AllBlocksCleared"]
    e.core.close()


def test_a_damaged_file_is_computed_again_and_counted() -> None:
    e = engine()
    cached(e, "a")
    copies, store = e.executor.copies, e.feature(KeptKV).store
    assert store is not None
    store._slots.clear()
    _, (_, second) = copies.files
    copies.broken.add(second)
    flush(e)
    assert cached(e, "b") == 4
    assert e.stored("damaged") == 1 and len(copies.files) == 2  # it was written again


def test_a_full_disk_costs_only_hits() -> None:
    e = engine()
    e.executor.copies.is_full = True
    cached(e, "a")
    flush(e)
    assert cached(e, "b") == 8  # from memory
    assert (e.stored("failed_writes"), e.stored("written")) == (2, 0)


def test_a_disk_that_hangs_is_given_up_and_left_alone() -> None:
    e = engine()
    cached(e, "a")
    store = e.feature(KeptKV).store
    assert store is not None
    store._slots.clear()
    flush(e)
    e.executor.copies.is_hung = True
    e.add("b", PROMPT, max_tokens=2, ignore_eos=True)
    run(e)
    assert "b" not in e.received
    seconds = e.core.seconds_to_deadline()
    assert seconds is not None and 0 < seconds < 10
    e.clock.now += seconds
    run(e)
    e.check_complete("b")
    flush(e)
    store._slots.clear()
    cached(e, "c")  # the thread that reads is busy still
    assert e.stored("given_up") == 1
    e.executor.copies.advance("read")
    run(e)
    e.check_empty()


def test_a_block_is_not_given_away_before_its_copy() -> None:
    """Copies are late and the cache holds two requests: a block given away too early is copied with other content."""
    e = engine(num_blocks=6)
    e.executor.copies.instant = False
    for number in range(6):
        e.add(f"r{number}", [number, 6, 7, 8, 9, 10, 11, 12, 13], max_tokens=2, ignore_eos=True)
        run(e)
    e.executor.copies.instant = True
    for lane in ("pages", "write"):
        while e.executor.copies.lanes[lane]:
            e.executor.copies.advance(lane)
    run(e)
    flush(e)
    for number in range(6):
        assert cached(e, f"again{number}", [number, 6, 7, 8, 9, 10, 11, 12, 13]) == 8


def test_adapters_are_distinguished_by_their_weights() -> None:
    e = engine(enable_lora=True, max_loras=3)
    for name, path in (("one", "a"), ("same", "a"), ("other", "b")):
        e.call("load_lora_adapter", lora_name=name, lora_path=path, load_inplace=None, call_id=5)
        run(e)
    cached(e, "a", adapter="one")
    assert cached(e, "b", adapter="same") == 8
    assert cached(e, "c", adapter="other") == 0
    assert cached(e, "d") == 0


@pytest.mark.parametrize("seed", slow_after(range(12), 4))
def test_results_do_not_depend_on_the_store(seed: int) -> None:
    """Many requests, preemption, resets, weight updates, damaged files and slow copies."""
    rng = random.Random(seed)
    e = engine(num_blocks=rng.choice([12, 20, 40]), context=40, depth=1 + seed % 2)
    copies: ScriptedCopies = e.executor.copies
    copies.instant = False
    names = []
    for turn in range(150):
        if rng.random() < 0.3 and turn < 110:
            prompt = PROMPT[: rng.choice([4, 8, 9])] + [rng.randrange(3) for _ in range(rng.randint(1, 12))]
            names.append(f"r{turn}")
            e.add(
                names[-1],
                prompt,
                max_tokens=rng.randint(1, 12),
                ignore_eos=True,
                logprobs=1,
                cache_salt=rng.choice(["", "", "s"]),
            )
        if rng.random() < 0.04:
            flush(e)
        if rng.random() < 0.02:
            copies.broken.update(key for _, key in rng.sample(sorted(copies.files), min(3, len(copies.files))))
        if rng.random() < 0.02:
            e.executor.only_own_kv = False
            update_to = f"w{turn}"
            e.executor.directories[update_to] = (update_to, "stamp")
            e.weights_of[update_to] = update_to
            e.call("update_weights_from_dir", weight_dir=update_to, weight_version=update_to, call_id=3)
        if rng.random() < 0.05:
            copies.is_full = not copies.is_full
        for lane in copies.lanes:
            if rng.random() < 0.5:
                copies.advance(lane)
        e.step()
    for _ in range(2000):
        for lane in copies.lanes:
            copies.advance(lane)
        if not e.step() and not any(copies.lanes.values()):
            break
    for rid in names:
        if len(e.weights_of) == 1:
            e.check_complete(rid)
        else:
            assert e.received[rid].finish is not None
    e.check_empty()


def test_rates_decide_and_files_that_were_slow_are_tried_again() -> None:
    rate = [0.0]
    rates = LoadRates(1_000_000, 16, lambda: rate[0])
    assert rates.is_worthwhile(10, 10, 0, now=0.0)
    rate[0] = 16e3  # a block a millisecond: files take five
    assert not rates.is_worthwhile(10, 10, 0, now=1.0)
    assert rates.is_worthwhile(10, 0, 0, now=1.0)
    for _ in range(40):
        rates.read(10, 0.001, now=2.0)
    assert rates.is_worthwhile(10, 10, 0, now=3.0) and not rates.is_worthwhile(10, 10, 100_000, now=3.0)
    rates.timed_out(10, 100.0, now=4.0)
    assert rates.files < FILE_RATE and rates.patience(10) > 100
    rate[0] = 1e3
    assert not rates.is_worthwhile(10, 10, 0, now=5.0) and rates.is_worthwhile(10, 10, 0, now=100.0)


def test_slots_that_are_pinned_are_not_replaced() -> None:
    evicted: list[bytes] = []
    slots = MemorySlots(3, evicted.append)
    for key in (b"a", b"b", b"c"):
        [slot] = slots.take(1)
        assert slots.keep(key, slot)
        slots.unpin([slot])
    slots.use(b"a")
    slots.pin([slots.use(b"b")])
    assert len(slots.take(3, keep={b"a"})) == 1 and evicted == [b"c"]
    slots.clear()
    assert len(slots) == 0 and len(slots.take(3)) == 1  # the other two are pinned still


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_offloading_dir": "d"}, "needs kv_offloading_size"),
        ({"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"}, "lmcache is not supported"),
        ({"kv_offloading_size": 0.0}, "kv_offloading_size: must be above 0"),
        ({"kv_offloading_size": math.inf}, "kv_offloading_size: must be at most"),
        ({"kv_offloading_disk_size": math.inf}, "kv_offloading_disk_size: must be at most"),
        ({"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}}, "LMCacheConnectorV1"),
        ({"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}}, "kv_connector_extra"),
        (
            {
                "kv_transfer_config": {
                    "kv_connector": "OffloadingConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"cpu_bytes_to_use": 1, "eviction_policy": "arc"},
                }
            },
            "eviction_policy",
        ),
        (
            {
                "kv_transfer_config": {
                    "kv_connector": "OffloadingConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"cpu_bytes_to_use": 1, "offload_prompt_only": True},
                }
            },
            "offload_prompt_only",
        ),
    ],
)
def test_options_that_cannot_be_served_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(StartError, match=reason):
        Config.make(**options).kv.store()


def test_vllms_connector_means_the_same() -> None:
    extra = {"cpu_bytes_to_use": 1 << 20, "secondary_tiers": [{"type": "fs", "path": "d", "max_bytes": 5}]}
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    plan = Config.make(kv_transfer_config=config).kv.store()
    assert plan is not None and (plan.memory_bytes, plan.directory, plan.disk_bytes) == (1 << 20, "d", 5)
