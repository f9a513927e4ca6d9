"""The rows of each plan, and their order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.harness import Engine
from tokserve.base.errors import RequestError
from tokserve.engine import counters
from tokserve.protocol.plan import StepPlan, StepResult
from tokserve.protocol.prompt import Feature, check_features


def shape(plan: StepPlan) -> list[tuple[int, int, bool]]:
    """(first position, count, samples) of each row."""
    columns = (plan.num_computed.tolist(), plan.num_tokens.tolist(), (plan.num_logits > 0).tolist())
    return list(zip(*columns, strict=True))


def shapes(engine: Engine) -> list[list[tuple[int, int, bool]]]:
    return [shape(plan) for plan in engine.executor.plans]


def names(engine: Engine, plan: StepPlan) -> list[str]:
    return [engine.executor.slots[slot].row.request_id for slot in plan.slots.tolist()]


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + i) % 19 for i in range(length)]


DEPTHS = pytest.mark.parametrize("depth", [1, 2])


@DEPTHS
def test_one_request_is_a_prompt_and_then_a_token_a_step(depth: int) -> None:
    engine = Engine(depth=depth)
    engine.add("a", prompt(5), max_tokens=3, ignore_eos=True)
    engine.run()
    assert shapes(engine) == [[(0, 5, True)], [(5, 1, True)], [(6, 1, True)]]
    engine.check_complete("a")
    engine.check_empty()


def test_depth_two_plans_while_a_step_is_in_flight() -> None:
    engine = Engine(depth=2)
    engine.add("a", prompt(5), max_tokens=5, ignore_eos=True)
    engine.step()
    assert len(engine.executor.plans) == 1 and list(engine.executor.in_flight) == [0]
    engine.step()
    assert len(engine.executor.plans) == 2 and list(engine.executor.in_flight) == [1]
    assert len(engine.tokens("a")) == 1  # the second plan was made without it


def test_depth_two_computes_one_surplus_row_after_a_stop_found_late() -> None:
    engine = Engine(depth=2, eos_token_ids=list(range(20)))  # every token ends
    engine.add("a", prompt(5), max_tokens=9)
    engine.run()
    assert len(engine.executor.plans) == 2
    assert len(engine.tokens("a")) == 1
    engine.check_complete("a")
    engine.check_empty()


def test_depth_two_holds_slot_and_blocks_until_the_surplus_is_in() -> None:
    engine = Engine(depth=2, eos_token_ids=list(range(20)), max_num_seqs=1)
    engine.add("a", prompt(5), max_tokens=9)
    engine.add("b", prompt(5, 3), max_tokens=9)
    engine.steps(2)
    assert engine.received["a"].finish is not None
    assert engine.stats.blocks_held == 2 and not engine.core.scheduler._free_slots
    engine.run()
    engine.check_complete("b")
    engine.check_empty()


@DEPTHS
def test_nothing_is_scheduled_beyond_max_tokens(depth: int) -> None:
    engine = Engine(depth=depth)
    engine.add("a", prompt(5), max_tokens=1)
    engine.run()
    assert shapes(engine) == [[(0, 5, True)]]


@DEPTHS
def test_nothing_is_scheduled_beyond_the_context(depth: int) -> None:
    engine = Engine(depth=depth, context=8)
    engine.add("a", prompt(5), ignore_eos=True)
    engine.run()
    assert shapes(engine)[-1] == [(6, 1, True)]
    assert engine.received["a"].finish.detail == "context"  # type: ignore[union-attr]
    engine.check_complete("a")


def test_long_prompts_are_cut_to_the_budget() -> None:
    engine = Engine(max_num_batched_tokens=8, max_num_seqs=4)
    engine.add("a", prompt(20), max_tokens=2, ignore_eos=True)
    engine.run()
    assert shapes(engine) == [[(0, 8, False)], [(8, 8, False)], [(16, 4, True)], [(20, 1, True)]]
    engine.check_complete("a")


def test_a_prompt_in_progress_does_not_delay_decodes() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.add("short", prompt(2, 7), max_tokens=9, ignore_eos=True)
    engine.step()
    engine.add("long", prompt(30), max_tokens=1)
    engine.steps(4)
    for plan in engine.executor.plans[1:5]:
        assert names(engine, plan)[0] == "short" and shape(plan)[0][1:] == (1, True)
        assert int(plan.num_tokens.sum()) == 8


def test_max_chunk_bounds_a_prompt_only_while_others_wait_or_run() -> None:
    engine = Engine(max_num_batched_tokens=16, max_chunk=4)
    engine.add("alone", prompt(20), max_tokens=1)
    engine.run()
    assert shapes(engine) == [[(0, 16, False)], [(16, 4, True)]]
    engine = Engine(max_num_batched_tokens=16, max_chunk=4)
    engine.add("a", prompt(10), max_tokens=1)
    engine.add("b", prompt(6, 5), max_tokens=1)
    engine.run()
    assert shapes(engine) == [[(0, 4, False), (0, 4, False)], [(4, 4, False), (4, 2, True)], [(8, 2, True)]]


def test_slots_limit_the_running_requests() -> None:
    engine = Engine(max_num_seqs=2)
    for name in "abc":
        engine.add(name, prompt(3, ord(name)), max_tokens=3, ignore_eos=True)
    engine.step()
    assert (engine.stats.running, engine.stats.waiting) == (2, 1)
    engine.run()
    assert engine.executor.plans[3].new[0].request_id == "c" and len(engine.executor.plans[3].freed) == 2


def test_no_more_requests_run_than_can_have_a_token_each_step() -> None:
    engine = Engine(max_num_seqs=8, max_num_batched_tokens=3)
    for name in "abcde":
        engine.add(name, prompt(1, ord(name)), max_tokens=6, ignore_eos=True)
    engine.step()
    assert engine.stats.running == 3
    engine.run()
    assert shapes(engine)[5] == [(5, 1, True)] * 3


def test_waiting_requests_enter_in_the_order_of_the_policy() -> None:
    engine = Engine(max_num_seqs=1, scheduling_policy="priority")
    for name, priority in [("a", 0), ("b", 5), ("c", -5), ("d", 5)]:
        engine.add(name, prompt(3, ord(name)), max_tokens=2, priority=priority, ignore_eos=True)
    engine.run()
    entered = [row.request_id for plan in engine.executor.plans for row in plan.new]
    assert entered == ["c", "a", "b", "d"]


def test_a_request_that_does_not_fit_now_is_not_overtaken() -> None:
    engine = Engine(num_blocks=8, context=30)
    engine.add("a", prompt(20), max_tokens=4, ignore_eos=True)
    engine.add("big", prompt(20, 7), max_tokens=2, ignore_eos=True)
    engine.add("small", prompt(2, 3), max_tokens=2, ignore_eos=True)
    engine.run()
    assert [row.request_id for plan in engine.executor.plans for row in plan.new] == ["a", "big", "small"]
    engine.check_empty()


def test_admission_leaves_a_block_for_each_that_runs() -> None:
    engine = Engine(num_blocks=6, context=20)
    engine.add("a", prompt(4), max_tokens=2, ignore_eos=True)
    engine.add("b", prompt(4, 5), max_tokens=2, ignore_eos=True)
    engine.add("c", prompt(9, 9), max_tokens=2, ignore_eos=True)  # 3 blocks and 2 to spare, of 4
    engine.step()
    assert [row.request_id for row in engine.executor.plans[0].new] == ["a", "b"]
    engine.run()
    assert engine.stats.preemptions == 0
    engine.check_complete("c")


# --- preemption ---


def crowd(depth: int = 1, **options: Any) -> Engine:
    """Two requests that both fit at first, and not at their ends."""
    engine = Engine(num_blocks=8, context=32, depth=depth, **options)
    for name, priority in [("a", 1), ("b", 0)]:
        engine.add(name, prompt(6, ord(name)), max_tokens=18, ignore_eos=True, priority=priority, logprobs=2)
    return engine


@DEPTHS
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_requests_keep_their_output_and_give_the_same(depth: int, caching: bool) -> None:
    engine = crowd(depth, enable_prefix_caching=caching)
    engine.run()
    assert engine.stats.preemptions > 0
    for name in "ab":
        engine.check_complete(name)
        assert len(engine.received[name].outputs) == 18
    engine.check_empty()


def test_the_default_policy_is_priority_and_equal_ones_are_served_as_they_arrive() -> None:
    engine = Engine(max_num_seqs=1)
    for name, priority in [("a", 0), ("b", 0), ("c", -1), ("d", 0)]:
        engine.add(name, prompt(3, ord(name)), max_tokens=2, priority=priority, ignore_eos=True)
    engine.run()
    assert [row.request_id for plan in engine.executor.plans for row in plan.new] == ["c", "a", "b", "d"]


@DEPTHS
@pytest.mark.parametrize(("policy", "victim"), [("fcfs", "b"), ("priority", "a")])
def test_the_last_by_policy_is_preempted(depth: int, policy: str, victim: str) -> None:
    engine = crowd(depth, scheduling_policy=policy)
    engine.run()
    entered = [row.request_id for plan in engine.executor.plans for row in plan.new]
    assert len(entered) > 2 and set(entered[2:]) == {victim}


def test_a_preempted_request_enters_with_its_output_and_most_of_its_cache() -> None:
    engine = crowd(scheduling_policy="fcfs")
    engine.run()
    back = next(row for plan in engine.executor.plans[1:] for row in plan.new)
    assert back.prompt_len == 6 and len(back.tokens) > 6
    assert back.tokens[6:].tolist() == engine.tokens("b")[: len(back.tokens) - 6]
    assert engine.executor.computed["b"] < 24 + len(back.tokens)  # not all of it was computed again
    assert engine.received["b"].cached == 0  # that is about the prompt at its first admission


def test_a_step_that_preempted_admits_no_request() -> None:
    steps = 0
    rehearsal = crowd(scheduling_policy="priority")
    while rehearsal.stats.preemptions == 0:
        rehearsal.step()
        steps += 1
    engine = crowd(scheduling_policy="priority")
    engine.steps(steps - 1)
    engine.add("first", [3], max_tokens=1, priority=-9)  # there would be room for it
    engine.step()
    assert engine.stats.preemptions == 1 and not engine.executor.plans[-1].new
    engine.step()
    assert [row.request_id for row in engine.executor.plans[-1].new] == ["first"]
    engine.run()
    engine.check_complete("first")


@DEPTHS
def test_a_request_alone_in_the_cache_runs_to_its_end(depth: int) -> None:
    engine = Engine(num_blocks=4, context=16, depth=depth)
    engine.add("a", prompt(3), ignore_eos=True)
    engine.run()
    assert engine.stats.preemptions == 0
    engine.check_complete("a")


@DEPTHS
def test_prompt_logprobs_survive_preemption(depth: int) -> None:
    engine = Engine(num_blocks=9, context=32, depth=depth, max_num_batched_tokens=2)
    engine.add("a", prompt(3), max_tokens=28, ignore_eos=True)
    engine.steps(8)
    engine.add("b", prompt(12, 5), max_tokens=3, ignore_eos=True, prompt_logprobs=2, stream=False)
    engine.run()
    assert engine.stats.preemptions > 0
    engine.check_complete("a")
    engine.check_complete("b")


# --- prefix cache ---


@DEPTHS
def test_a_second_request_takes_the_prefix_from_the_cache(depth: int) -> None:
    engine = Engine(depth=depth)
    engine.add("a", prompt(10), max_tokens=2, ignore_eos=True)
    engine.run()
    engine.add("b", [*prompt(9), 18], max_tokens=2, ignore_eos=True)
    engine.run()
    assert engine.received["b"].cached == 8
    assert engine.executor.computed["b"] == 3
    assert (engine.stats.prefix_queries, engine.stats.prefix_hits) == (20, 8)
    engine.check_complete("b")


def test_a_full_hit_computes_the_last_token_only() -> None:
    engine = Engine()
    for name in "ab":
        engine.add(name, prompt(8), max_tokens=1)
        engine.run()
    assert engine.received["b"].cached == 7
    assert shapes(engine)[1] == [(7, 1, True)]
    engine.check_complete("b")


def test_output_is_found_by_the_next_turn() -> None:
    engine = Engine()
    engine.add("a", prompt(6), max_tokens=7, ignore_eos=True)
    engine.run()
    engine.add("b", prompt(6) + engine.tokens("a") + [3], max_tokens=1)
    engine.run()
    assert engine.received["b"].cached == 12
    engine.check_complete("b")


def test_without_prefix_caching_nothing_is_found() -> None:
    engine = Engine(enable_prefix_caching=False)
    for name in "ab":
        engine.add(name, prompt(8), max_tokens=1)
        engine.run()
    assert engine.received["b"].cached == 0
    assert engine.stats.prefix_queries == engine.stats.blocks_cached == 0


def test_salts_do_not_share() -> None:
    engine = Engine()
    for name, salt in [("a", "x"), ("b", "y"), ("c", "x")]:
        engine.add(name, prompt(8), max_tokens=1, cache_salt=salt)
        engine.run()
    assert [engine.received[name].cached for name in "abc"] == [0, 0, 7]


@DEPTHS
def test_equal_prompts_that_arrive_together_are_computed_once(depth: int) -> None:
    engine = Engine(depth=depth)
    for seed in range(4):
        engine.add(f"r{seed}", prompt(13), seed=seed, max_tokens=3, ignore_eos=True)
    engine.run()
    assert engine.executor.computed == {"r0": 15, "r1": 3, "r2": 3, "r3": 3}
    for seed in range(4):
        engine.check_complete(f"r{seed}")
    engine.check_empty()


@DEPTHS
def test_a_request_that_waits_for_a_prefix_blocks_no_later_one(depth: int) -> None:
    engine = Engine(depth=depth, max_num_batched_tokens=8, max_chunk=4)
    engine.add("owner", prompt(16), max_tokens=1)
    engine.add("waiter", prompt(16), max_tokens=1)
    engine.add("other", prompt(4, 9), max_tokens=1)
    engine.step()
    assert [row.request_id for row in engine.executor.plans[0].new] == ["owner", "other"]
    engine.run()
    assert engine.executor.computed["waiter"] == 1
    engine.check_complete("waiter")


@DEPTHS
def test_a_request_that_waits_for_a_prefix_continues_if_its_owner_is_aborted(depth: int) -> None:
    engine = Engine(depth=depth, max_num_batched_tokens=8)
    engine.add("owner", prompt(30), max_tokens=1)
    for name in "ab":
        engine.add(name, prompt(30), max_tokens=2, seed=ord(name), ignore_eos=True)
    engine.steps(2)
    assert engine.stats.waiting == 2
    engine.abort("owner")
    engine.run()
    for name in "ab":
        engine.check_complete(name)
    assert engine.executor.computed["b"] == 2  # and it waited for the next one, whose prompt's end it got
    engine.check_empty()


def test_a_request_that_waits_for_a_prefix_continues_if_its_owner_fails() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.executor.spoil.add((0, 12))
    engine.add("owner", prompt(12), max_tokens=1)
    engine.add("waiter", prompt(14), max_tokens=2, seed=1)
    engine.run()
    engine.check_complete("waiter")


@DEPTHS
@pytest.mark.parametrize(("start", "cached"), [(0, 0), (1, 0), (5, 4), (8, 4), (9, 8), (12, 11), (99, 11)])
def test_prompt_logprobs_are_complete_cold_or_warm(depth: int, start: int, cached: int) -> None:
    engine = Engine(depth=depth, max_num_batched_tokens=5)
    for name in ("cold", "warm"):
        engine.add(name, prompt(12), max_tokens=2, ignore_eos=True, prompt_logprobs=2, prompt_logprobs_start=start)
        engine.run()
        engine.check_complete(name)
    assert engine.received["warm"].cached == cached
    assert engine.received["warm"].prompt_logprobs == engine.received["cold"].prompt_logprobs


@DEPTHS
def test_equal_placeholders_of_different_images_share_nothing(depth: int) -> None:
    engine = Engine(depth=depth)
    for rid, content in (("a", b"x"), ("b", b"y"), ("c", b"x"), ("d", b"")):
        features = (Feature("image", content, 4, 6, b"data"),) if content else ()
        engine.add(rid, prompt(13), max_tokens=3, ignore_eos=True, features=features)
        engine.run()
        engine.check_complete(rid)
    assert [engine.received[rid].cached for rid in "abcd"] == [0, 4, 12, 4]
    rows = {row.request_id: row for plan in engine.executor.plans for row in plan.new}
    assert rows["b"].features == (Feature("image", b"y", 4, 6, b"data"),) and rows["d"].features == ()
    engine.check_empty()


# --- results ---


def test_an_answer_to_another_step_is_refused() -> None:
    engine = Engine()
    engine.add("a", prompt(4))
    engine.core.scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match="step 7"):
        engine.core.scheduler.update(
            StepResult(7, np.ones(1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.uint8)), 0.0
        )


def test_nothing_to_do_is_no_plan() -> None:
    assert Engine().core.scheduler.schedule(0.0) is None


def test_the_number_of_remembered_versions_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "EPOCHS_KEPT", 2)
    scheduler = Engine().core.scheduler
    for epoch in (1, 2, 3, 4):
        scheduler.weights.use(f"w{epoch}", epoch)
    assert scheduler.weights._epochs == {"w3": 3, "w4": 4}
    scheduler.weights.use("w3", 5)
    assert list(scheduler.weights._epochs.items()) == [("w4", 4), ("w3", 5)]


@pytest.mark.parametrize(
    "features, message",
    [
        ([Feature("sound", b"x", 0, 1, b"")], "kind 'sound' are not supported; known: image"),
        ([Feature("image", b"x", 1, 3, b"")], "within the prompt"),
        ([Feature("image", b"x", 0, 0, b"")], "within the prompt"),
        ([Feature("image", b"x", 0, 2, b""), Feature("image", b"x", 1, 1, b"")], "in order, apart"),
    ],
)
def test_features_that_cannot_be_computed_are_refused_at_admission(features: list[Feature], message: str) -> None:
    engine = Engine()
    reply = engine.submit("a", engine.make("a", [5, 6, 7], features=tuple(features), max_tokens=2))
    assert reply.refusal == "invalid" and message in reply.message
    engine.add("b", [5, 6, 7], max_tokens=2)
    engine.run()
    engine.check_complete("b")


def test_the_data_of_features_has_the_size_that_the_device_takes() -> None:
    check_features([Feature("embeddings", b"", 1, 2, bytes(16))], 3, {"embeddings": 8})
    with pytest.raises(RequestError, match="length 2 needs 16 bytes of data, got 12"):
        check_features([Feature("embeddings", b"", 1, 2, bytes(12))], 3, {"embeddings": 8})
