"""Several clients: the order of requests, preemption and stalls; results do not depend on them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.engine.harness import Engine
from tests.engine.solo import engine_request
from tests.tiers import slow_after
from tokserve.engine.output.output_buffer import Limits
from tokserve.engine.queue import POLICIES
from tokserve.engine.request import Request
from tokserve.features.fairness.engine import Fairness
from tokserve.features.fairness.sharing import FairQueue, Shares
from tokserve.protocol.messages import SubmitReply

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
LIMITS = Limits(64, 20, (1,), "raw")


def request(number: int, client: str, priority: int = 0, arrival: float = 0.0) -> Request:
    spec = engine_request(f"{client}{number}", [3], priority=priority, arrival=arrival)
    return Request(spec, owner=b"A", number=number, received=0.0, limits=LIMITS, client=client)


def entered(engine: Engine) -> list[str]:
    return [row.request_id for plan in engine.executor.plans for row in plan.new]


def fill(engine: Engine, client: str, count: int, tokens: int = 30) -> list[str]:
    """Add `count` requests of a client."""
    rids = [f"{client}{i}" for i in range(count)]
    for i, rid in enumerate(rids):
        engine.add(rid, [3, i % 20, len(client)], max_tokens=tokens, ignore_eos=True, client=client, seed=i)
    return rids


def slots(engine: Engine, client: str) -> int:
    sharing = engine.feature(Fairness).sharing
    assert sharing is not None
    return sharing.shares.running[client]


# --- the queue ---


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_one_client_is_served_by_the_policy(policy: str) -> None:
    chance = random.Random(1)
    queue = FairQueue(POLICIES[policy], Shares())
    waiting = [request(i, "a", chance.randrange(3), chance.randrange(5)) for i in range(40)]
    for queued in waiting:
        queue.add(queued)
    assert list(queue) == list(queue.order()) == sorted(waiting, key=POLICIES[policy])


def test_clients_alternate() -> None:
    queue = FairQueue(POLICIES["fcfs"], Shares())
    for i, client in enumerate("aaaabbc"):
        queue.add(request(i, client))
    assert [queued.request_id for queued in queue] == ["a0", "b4", "c6", "a1", "b5", "a2", "a3"]


def test_priority_is_compared_before_clients() -> None:
    queue = FairQueue(POLICIES["priority"], Shares())
    for i, (client, priority) in enumerate([("a", 0), ("a", 0), ("b", 1), ("b", 0)]):
        queue.add(request(i, client, priority))
    assert [queued.request_id for queued in queue] == ["a0", "b3", "a1", "b2"]


def test_only_admitted_requests_change_the_order() -> None:
    shares = Shares()
    queue = FairQueue(POLICIES["fcfs"], shares)
    for i, client in enumerate("aaab"):
        queue.add(request(i, client))
    seen = []
    for queued in queue.order():
        seen.append(queued.request_id)
        if queued.request_id != "a1":  # passed over
            queue.remove(queued)
            shares.admitted(queued)
    assert seen == ["a0", "b3", "a1", "a2"] and len(queue) == 1


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_the_queue_yields_each_request_once(seed: int) -> None:
    chance, shares = random.Random(seed), Shares()
    queue, inside = FairQueue(POLICIES["priority"], shares), []
    for i in range(300):
        if inside and chance.random() < 0.4:
            removed = inside.pop(chance.randrange(len(inside)))
            queue.remove(removed)
        else:
            inside.append(request(i, chance.choice("abc"), chance.randrange(3)))
            queue.add(inside[-1])
        for order in (queue, queue.order()):
            rids = [queued.request_id for queued in order]
            assert sorted(rids) == sorted(queued.request_id for queued in inside) and len(queue) == len(rids)


# --- slots ---


@DEPTHS
def test_one_client_may_have_everything(depth: int) -> None:
    engine = Engine(depth=depth)
    rids = fill(engine, "a", 20)
    engine.steps(4)
    assert slots(engine, "a") == 8
    engine.run()
    assert engine.stats.preemptions == 0 and entered(engine) == rids
    engine.check_empty()


@DEPTHS
def test_a_second_client_gets_its_half_at_once(depth: int) -> None:
    engine = Engine(depth=depth)
    greedy = fill(engine, "a", 20)
    engine.steps(6)
    modest = fill(engine, "b", 6)
    engine.steps(4)
    assert (slots(engine, "a"), slots(engine, "b")) == (4, 4)
    assert engine.stats.displaced == 4 and engine.stats.rooms["clients"] == 2
    engine.run()
    for rid in greedy + modest:
        engine.check_complete(rid)
    assert engine.stats.displaced <= 6, "slots went back and forth"
    engine.check_empty()


@DEPTHS
def test_a_single_request_does_not_wait_for_many_of_another_client(depth: int) -> None:
    engine = Engine(depth=depth)
    fill(engine, "a", 60)
    engine.steps(5)
    engine.add("one", [5, 6], max_tokens=3, ignore_eos=True, client="b")
    engine.steps(3 + 2 * depth)
    engine.check_complete("one")
    engine.run()
    engine.check_empty()


@DEPTHS
def test_fairness_can_be_turned_off(depth: int) -> None:
    engine = Engine(depth=depth, fair_clients=False, max_requests_per_client=20)
    greedy = fill(engine, "a", 20)
    engine.steps(6)
    modest = fill(engine, "b", 6)
    engine.run()
    assert engine.stats.preemptions == 0 and entered(engine) == greedy + modest
    fill(engine, "c", 1)
    assert engine.submit("d", *[engine.make(f"d{i}", [3, i]) for i in range(20)], client="c").refusal == "client_limit"
    engine.run()
    engine.check_empty()


def test_a_request_of_higher_priority_is_not_preempted() -> None:
    engine = Engine(scheduling_policy="priority", max_num_seqs=4)
    for i in range(4):
        engine.add(f"a{i}", [3, i], max_tokens=20, ignore_eos=True, client="a", priority=-1)
    engine.steps(2)
    engine.add("b", [4], max_tokens=2, ignore_eos=True, client="b")
    engine.steps(5)
    assert engine.stats.displaced == 0 and slots(engine, "b") == 0
    engine.run()
    engine.check_empty()


def test_more_clients_than_slots_take_turns() -> None:
    engine = Engine(max_num_seqs=2)
    for i in range(12):
        engine.add(f"{i}", [3, i], max_tokens=4, ignore_eos=True, client="abcdef"[i % 6])
    engine.run()
    assert entered(engine) == [str(i) for i in range(12)] and engine.stats.displaced == 0
    engine.check_empty()


@DEPTHS
def test_blocks_are_shared_too(depth: int) -> None:
    engine = Engine(num_blocks=16, context=40, depth=depth)
    greedy = fill(engine, "a", 4, tokens=12)
    engine.steps(8)  # each has three blocks or so
    engine.add("one", list(range(2, 20)) * 2, max_tokens=3, ignore_eos=True, client="b")
    engine.steps(20)
    engine.check_complete("one")
    engine.run()
    for rid in greedy:
        engine.check_complete(rid)
    engine.check_empty()


def test_a_long_prompt_leaves_room_for_another_client() -> None:
    engine = Engine(num_blocks=256, context=600, max_num_batched_tokens=16)
    engine.add("long", [i % 20 for i in range(500)], max_tokens=2, ignore_eos=True, client="a")
    engine.steps(2)
    engine.add("short", [5, 6], max_tokens=3, ignore_eos=True, client="b")
    engine.steps(6)
    engine.check_complete("short")
    assert all(int(plan.num_tokens.sum()) == 16 for plan in engine.executor.plans), "budget was wasted"
    engine.run()
    engine.check_complete("long")


# --- a limit per client ---


def test_the_requests_of_a_client_are_limited() -> None:
    engine = Engine(max_requests_per_client=3)
    fill(engine, "a", 2)
    refused = engine.submit("two", *[engine.make(f"two#{i}", [3, i]) for i in range(2)], client="a")
    assert refused.refusal == "client_limit" and "--max-requests-per-client" in refused.message
    assert "2 requests in flight" in refused.message
    assert engine.submit("other", engine.make("other", [3]), client="b") == SubmitReply(7)
    for i in range(5):  # no client name: the offline API
        assert engine.submit(f"n{i}", engine.make(f"n{i}", [3]), client="") == SubmitReply(7)
    engine.run()
    assert engine.submit("three", *[engine.make(f"three#{i}", [3, i]) for i in range(3)], client="a") == SubmitReply(7)
    engine.run()
    engine.check_empty()


# --- stalled requests ---


@DEPTHS
def test_a_stalled_request_gets_no_tokens_until_its_client_reads(depth: int) -> None:
    engine = Engine(depth=depth)
    engine.add("s", [3, 4], max_tokens=20, ignore_eos=True)
    engine.steps(5)
    engine.stall("s")
    engine.run()
    count = len(engine.tokens("s"))
    assert count <= 5 and engine.stats.running == engine.stats.stalled == 1
    engine.add("a", [5], max_tokens=6, ignore_eos=True)
    engine.run()
    engine.check_complete("a")
    assert len(engine.tokens("s")) == count and engine.stats.preemptions == 0
    engine.stall("s", stalled=False)
    engine.run()
    engine.check_complete("s")
    engine.check_empty()


@DEPTHS
@pytest.mark.parametrize("client", ["a", "b"])
def test_stalled_requests_give_up_their_slots(depth: int, client: str) -> None:
    engine = Engine(depth=depth)
    stalled = fill(engine, "a", 8, tokens=20)
    engine.steps(6)
    engine.stall(*stalled)
    engine.run()
    engine.add("one", [5, 6], max_tokens=3, ignore_eos=True, client=client)
    engine.run()
    engine.check_complete("one")
    assert engine.stats.running == 7 and engine.stats.waiting == 1
    engine.stall(*stalled, stalled=False)
    engine.run()
    for rid in stalled:
        engine.check_complete(rid)
    engine.check_empty()


@DEPTHS
def test_stalled_requests_give_up_their_blocks(depth: int) -> None:
    engine = Engine(num_blocks=16, context=60, depth=depth)
    stalled = fill(engine, "a", 4, tokens=20)
    engine.steps(12)
    engine.stall(*stalled)
    engine.run()
    engine.add("one", [i % 20 for i in range(50)], max_tokens=3, ignore_eos=True, client="a")
    engine.run()
    engine.check_complete("one")
    engine.stall(*stalled, stalled=False)
    engine.run()
    for rid in stalled:
        engine.check_complete(rid)
    engine.check_empty()


@DEPTHS
def test_a_stalled_request_can_be_aborted_and_runs_into_its_deadline(depth: int) -> None:
    engine = Engine(depth=depth, max_num_seqs=2)
    for rid, fields in (("held", {}), ("parked", {}), ("late", {"deadline_ms": 1000})):
        engine.add(rid, [3, 4], max_tokens=20, ignore_eos=True, **fields)
    engine.steps(4)
    engine.stall("held", "parked", "late")
    engine.run()
    engine.add("a", [5], max_tokens=2, ignore_eos=True)
    engine.run()
    engine.abort("held", "parked")
    engine.clock.now += 2.0
    engine.run()
    assert all(engine.received[rid].finish is not None for rid in ("held", "parked", "late"))
    engine.check_empty()
    assert engine.stats.stalled == 0


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
def test_a_pause_does_not_wait_for_clients_that_do_not_read(mode: str) -> None:
    engine = Engine()
    stalled = fill(engine, "a", 8, tokens=20)
    engine.steps(6)
    engine.stall(*stalled)
    engine.run()
    engine.add("one", [5, 6], max_tokens=3, ignore_eos=True, client="a")  # some are stalled now
    engine.run()
    engine.call("pause", mode=mode, call_id=50)
    engine.run()
    assert any(reply.call_id == 50 and reply.error is None for reply in engine.replies)
    engine.call("resume", call_id=51)
    engine.stall(*stalled, stalled=False)
    engine.run()
    engine.check_empty()


def test_others_do_not_wait_for_a_prefix_that_a_stalled_request_computes() -> None:
    engine = Engine(max_num_batched_tokens=4, num_blocks=64, context=60)
    shared = [i % 20 for i in range(40)]
    engine.add("s", shared, max_tokens=9, ignore_eos=True)
    engine.steps(2)
    engine.stall("s")
    engine.add("a", [*shared, 5], max_tokens=3, ignore_eos=True)
    engine.run()
    engine.check_complete("a")
    engine.stall("s", stalled=False)
    engine.run()
    engine.check_complete("s")


@pytest.mark.parametrize("seed", slow_after(range(60), 4))
def test_results_do_not_depend_on_clients_and_stalls(seed: int) -> None:
    """Many requests of several clients, some of which do not read, in caches that are too small for them."""
    chance = random.Random(seed)
    options: dict[str, Any] = {
        "depth": chance.choice([1, 2]),
        "max_num_seqs": chance.choice([1, 2, 4]),
        "block_size": chance.choice([1, 4]),
        "max_num_batched_tokens": chance.choice([2, 5, 32]),
        "max_chunk": chance.choice([None, 3]),
        "scheduling_policy": chance.choice(["fcfs", "priority"]),
        "enable_prefix_caching": chance.random() < 0.7,
    }
    options["num_blocks"] = (12 if options["block_size"] == 4 else 44) + chance.randrange(20)
    engine = Engine(context=40, **options)
    rids, live = [], []
    for turn in range(120):
        if turn < 60 and chance.random() < 0.5:
            rid = f"r{turn}"
            prompt = [9, 8, 7, 6, 5, 4, 3, 2][: chance.choice([0, 4, 8])] + [chance.randrange(4)] * chance.randint(1, 9)
            engine.add(
                rid,
                prompt,
                client=chance.choice(["", "a", "a", "b"]),
                seed=chance.randrange(3),
                logprobs=1,
                max_tokens=chance.choice([1, 5, 20]),
                priority=chance.randrange(2),
                ignore_eos=chance.random() < 0.9,
            )
            rids.append(rid)
            live.append(rid)
        if live and chance.random() < 0.4:
            engine.stall(*chance.sample(live, min(len(live), 3)), stalled=chance.random() < 0.6)
        engine.step()
    bystander = engine.add("bystander", [3, 4, 5], client="c", max_tokens=3, ignore_eos=True)
    engine.run()
    engine.check_complete(bystander.request_id)
    engine.stall(*rids, stalled=False)
    engine.run()
    for rid in rids:
        engine.check_complete(rid)
    engine.check_empty()
    fairness = engine.feature(Fairness)
    assert fairness.sharing is not None and not fairness.sharing.shares.running
    assert not fairness.live and not fairness._accepted
