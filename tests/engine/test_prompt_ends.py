"""Requests with one prompt: what does not fill a block of it is computed once, and copied."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.engine.drafters import text_drafter
from tests.engine.harness import Engine
from tokserve.features.groups.prompt_ends import PromptEnds

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + i) % 19 for i in range(length)]


def add_group(engine: Engine, name: str, count: int, ids: list[int], **options: Any) -> list[str]:
    options = {"max_tokens": 6, "ignore_eos": True} | options
    names = [f"{name}{i}" for i in range(count)]
    for i, rid in enumerate(names):
        engine.add(rid, ids, seed=i, **options)
    return names


def copied(engine: Engine) -> int:
    return sum(row.copied_block is not None for plan in engine.executor.plans for row in plan.new)


@DEPTHS
@pytest.mark.parametrize("length", [5, 9, 10, 11, 12, 13, 31])
def test_members_compute_the_last_token_only(depth: int, length: int) -> None:
    engine = Engine(depth=depth)
    first, *others = add_group(engine, "g", 6, prompt(length))
    engine.run()
    for rid in others:
        assert engine.received[rid].cached == length - 1
        assert engine.executor.computed[rid] - engine.executor.computed[first] == 1 - length
    assert copied(engine) == engine.feature(PromptEnds).copied == (0 if length % 4 < 2 else 5)
    for rid in (first, *others):
        engine.check_complete(rid)
    engine.check_empty()


def test_ends_that_differ_are_not_shared() -> None:
    engine = Engine()
    engine.add("a", prompt(11), max_tokens=9, ignore_eos=True)
    engine.add("b", [*prompt(10), 3], max_tokens=9, ignore_eos=True)
    engine.add("c", prompt(10), max_tokens=9, ignore_eos=True)
    engine.add("d", prompt(11), cache_salt="other", max_tokens=9, ignore_eos=True)
    engine.run()
    assert copied(engine) == 0
    assert [engine.received[rid].cached for rid in "abcd"] == [0, 8, 8, 0]
    for rid in "abcd":
        engine.check_complete(rid)


@DEPTHS
def test_a_late_member_gets_it_from_one_that_runs(depth: int) -> None:
    """The block has the holder's own tokens by then, and may be full."""
    engine = Engine(depth=depth)
    engine.add("a", prompt(11), max_tokens=30, ignore_eos=True)
    for late in range(5):
        engine.steps(3)
        engine.add(f"late{late}", prompt(11), seed=late, max_tokens=2)
    engine.run()
    assert copied(engine) == 5
    assert all(engine.received[f"late{late}"].cached == 10 for late in range(5))
    engine.add("after", prompt(11), max_tokens=2)  # nobody runs that has it
    engine.run()
    assert copied(engine) == 5 and engine.received["after"].cached == 8
    for rid in ("a", "after", *(f"late{late}" for late in range(5))):
        engine.check_complete(rid)
    engine.check_empty()


def test_prompt_logprobs_and_no_cache_leave_nothing_to_copy() -> None:
    for engine, options in ((Engine(), {"prompt_logprobs": 1}), (Engine(enable_prefix_caching=False), {})):
        names = add_group(engine, "g", 3, prompt(11), **options)
        engine.run()
        assert copied(engine) == 0
        for rid in names:
            engine.check_complete(rid)


def test_recurrent_states_have_no_copies() -> None:
    engine = Engine(snapshots=4)
    names = add_group(engine, "g", 3, prompt(11))
    engine.run()
    assert copied(engine) == 0
    for rid in names:
        engine.check_complete(rid)


@DEPTHS
def test_a_group_is_preempted_from_its_end_before_an_earlier_group(depth: int) -> None:
    engine = Engine(depth=depth, num_blocks=34)
    names = [
        *add_group(engine, "a", 4, prompt(14), max_tokens=24),
        *add_group(engine, "b", 4, prompt(14, 5), max_tokens=24),
    ]
    engine.run()
    times = {rid: 0 for rid in names}
    for plan in engine.executor.plans:
        for row in plan.new:
            times[row.request_id] += 1
    assert engine.stats.preemptions > 0
    assert [times[rid] for rid in names] == sorted(times.values()), "the last are preempted first and most often"
    assert all(times[rid] == 1 for rid in names[:4])
    for rid in names:
        engine.check_complete(rid)
    engine.check_empty()


def run_groups(seed: int, depth: int) -> Engine:
    """Groups of one prompt, nested prefixes, few blocks, drafts, aborts and resets."""
    rng = random.Random(seed)
    engine = Engine(
        depth=depth,
        num_blocks=rng.choice([17, 20, 64]),
        max_num_batched_tokens=rng.choice([8, 32]),
    )
    if seed % 2:
        engine.draft_with(text_drafter())
    stems = [prompt(rng.randrange(3, 14), rng.randrange(19)) for _ in range(2)]
    names: list[str] = []
    aborted: set[str] = set()
    for group in range(5):
        ids = [*rng.choice(stems), *prompt(rng.randrange(1, 8), rng.randrange(3))]
        names += add_group(engine, f"g{group}-", rng.randrange(2, 6), ids, max_tokens=rng.randrange(1, 30))
        engine.steps(rng.randrange(9))
        event = rng.random()
        if event < 0.2:
            rid = rng.choice(names)
            if engine.received.get(rid) is None or engine.received[rid].finish is None:
                engine.abort(rid)
                aborted.add(rid)
        elif event < 0.3:
            engine.call("reset_prefix_cache", call_id=group + 10)
    engine.run()
    for rid in names:
        if rid not in aborted:
            engine.check_complete(rid)
    engine.check_empty()
    return engine


@pytest.mark.some(1)
@DEPTHS
def test_random_groups_give_what_their_requests_give_alone(depth: int) -> None:
    copies = preemptions = 0
    for seed in range(16):
        engine = run_groups(seed, depth)
        copies += copied(engine)
        preemptions += engine.stats.preemptions
    assert copies > 20 and preemptions > 20
