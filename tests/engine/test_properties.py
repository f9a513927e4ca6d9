"""Random arrivals, chunks, shared prefixes, preemption and aborts: a result equals that of the request alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.drafters import RandomDrafter, text_drafter
from tests.engine.harness import Engine
from tests.engine.solo import VOCAB
from tokserve.protocol.params import PoolingParams
from tokserve.protocol.prompt import Feature

OPEN = [9, 8, 7, 6, 5, 4, 3, 2, 9, 9, 8, 8, 7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2]  # what prompts begin with


@dataclass(frozen=True)
class Arrival:
    turn: int
    prompt: tuple[int, ...]
    fields: tuple[tuple[str, Any], ...]
    abort_after: int | None
    owner: bytes
    client: str = ""


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    shared = draw(st.sampled_from([0, 0, 3, 4, 8, 8, 16, 24]))
    suffix = draw(st.lists(st.integers(0, 3), min_size=not shared, max_size=draw(st.sampled_from([1, 3, 14]))))
    fields: dict[str, Any] = {
        "seed": draw(st.integers(0, 2)),
        "max_tokens": draw(st.sampled_from([1, 2, 5, 12, 20, 30, None, None])),
        "ignore_eos": draw(st.sampled_from([False, True, True])),
        "stream": draw(st.booleans()),
        "cache_salt": draw(st.sampled_from(["", "", "s"])),
        "priority": draw(st.integers(-1, 1)),
        "arrival": float(draw(st.integers(0, 3))),
    }
    if draw(st.booleans()):
        fields["stop_token_ids"] = [draw(st.integers(0, VOCAB - 1))]
        fields["min_tokens"] = draw(st.integers(0, fields["max_tokens"] or 6))
    if draw(st.booleans()):
        fields["stop_token_sequences"] = [[draw(st.integers(0, VOCAB - 1))]]
        fields["logprobs"] = draw(st.sampled_from([0, 1, 3, -1]))
    if draw(st.integers(0, 3)) == 0:
        fields["prompt_logprobs"] = draw(st.sampled_from([0, 2]))
        fields["prompt_logprobs_start"] = draw(st.sampled_from([0, 1, 5, 9, 16, 40]))
        fields["max_tokens"] = draw(st.sampled_from([0, 0, fields["max_tokens"]]))  # 0: only the prompt is scored
        fields["min_tokens"] = 0 if fields["max_tokens"] == 0 else fields.get("min_tokens", 0)
    if draw(st.integers(0, 3)) == 0:
        fields["logprob_token_ids"] = [3, 5]
    if draw(st.integers(0, 5)) == 0:
        fields["task"] = PoolingParams(draw(st.sampled_from(["last", "mean"])))
    if draw(st.integers(0, 3)) == 0:
        start = draw(st.integers(0, shared + len(suffix) - 1))
        length = draw(st.integers(1, shared + len(suffix) - start))
        fields["features"] = (Feature("image", draw(st.sampled_from([b"x", b"y"])), start, length, b""),)
    return Arrival(
        draw(st.sampled_from([0, 0, 1, 2, 5, 12])),
        tuple(OPEN[:shared] + suffix),
        tuple(fields.items()),
        draw(st.sampled_from([None, None, None, 0, 1, 4, 9])),
        draw(st.sampled_from([b"A", b"B"])),
        draw(st.sampled_from(["", "", "x", "y"])),
    )


engines = st.fixed_dictionaries(
    {
        "size": st.sampled_from([(40, 1), (22, 2), (10, 4), (12, 4), (14, 4), (100, 4)]),
        "depth": st.sampled_from([1, 2]),
        "max_num_seqs": st.sampled_from([1, 3, 8]),
        "max_num_batched_tokens": st.sampled_from([1, 3, 7, 16, 64]),
        "max_chunk": st.sampled_from([None, 1, 5]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "enable_prefix_caching": st.sampled_from([True, True, False]),
        "right": st.sampled_from([None, 0.0, 0.5, 1.0]),
        "snapshots": st.sampled_from([None, 0, 2, 9]),  # of recurrent states; None: the model has none
    }
)


def play(options: dict[str, Any], script: list[Arrival], reset_at: int | None) -> Engine:
    """Run a script to its end and compare every request with its solo run.  `right`: the share of right drafts, None:
    there are none."""
    num_blocks, block_size = options.pop("size")
    right = options.pop("right")
    engine = Engine(num_blocks=num_blocks, block_size=block_size, context=40, **options)
    if right is not None:
        guesses = RandomDrafter(engine.executor, len(script), right)
        engine.draft_with(guesses if len(script) % 3 else text_drafter())
    aborts: list[tuple[int, str]] = []
    expected: dict[str, str] = {}
    for turn in range(2000):
        for number, arrival in enumerate(script):
            if arrival.turn == turn:
                rid = f"r{number}"
                engine.add(rid, arrival.prompt, owner=arrival.owner, client=arrival.client, **dict(arrival.fields))
                if arrival.abort_after is not None:
                    aborts.append((turn + arrival.abort_after, rid))
        for when, rid in aborts:
            if when == turn:
                ended = engine.received[rid].finish is not None if rid in engine.received else False
                expected[rid] = "finished" if ended else "aborted"
                engine.abort(rid, owner=b"C")
        if turn == reset_at:
            engine.call("reset_prefix_cache", call_id=2)
        if not engine.step() and turn > 25:
            break
    else:
        raise AssertionError("the engine does not come to rest")
    acknowledged = {rid: state for reply in engine.replies if reply.call_id == 1 for rid, state in reply.result.items()}
    assert acknowledged == expected
    for rid in (f"r{number}" for number in range(len(script))):
        if expected.get(rid) == "aborted":
            check_aborted(engine, rid)
        else:
            engine.check_complete(rid)
    engine.check_empty()
    assert engine.stats.output_tokens >= sum(len(received.tokens) for received in engine.received.values())
    return engine


def check_aborted(engine: Engine, rid: str) -> None:
    received, expected = engine.received[rid], engine.solo(rid)
    assert received.finish is not None and (received.finish.reason, received.finish.detail) == ("abort", "abort_user")
    assert received.tokens == expected.tokens[: len(received.tokens)]
    if received.logprobs is not None:
        assert expected.logprobs is not None and received.logprobs == expected.logprobs.part(0, len(received.tokens))
    if received.prompt_logprobs is not None and received.tokens:
        assert received.prompt_logprobs == expected.prompt_logprobs


@given(engines, st.lists(arrivals(), min_size=2, max_size=10), st.sampled_from([5, 20, None]))
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_results_do_not_depend_on_other_requests(
    options: dict[str, Any], script: list[Arrival], reset_at: int | None
) -> None:
    play(options, script, reset_at)


@pytest.mark.some(1)
@pytest.mark.parametrize("seeds", [20, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("depth", [1, 2])
def test_results_do_not_depend_on_preemption_or_drafts(depth: int, seeds: int) -> None:
    """Many requests in caches that hold hardly more than one full context."""
    preemptions = hits = accepted = rejected = restored = 0
    for seed in range(seeds):
        rng = random.Random(seed)
        script = []
        for _ in range(rng.randint(4, 14)):
            prompt = OPEN[: rng.choice([0, 4, 8])] + [rng.randrange(4) for _ in range(rng.randint(1, 6))]
            fields: dict[str, Any] = {"seed": rng.randrange(3), "ignore_eos": rng.random() < 0.9, "logprobs": 1}
            fields |= {"max_tokens": rng.choice([3, 20, 28, None]), "priority": rng.randrange(3)}
            if rng.random() < 0.3:
                fields |= {"prompt_logprobs": 1, "prompt_logprobs_start": rng.choice([0, 5])}
            abort_after = rng.randint(0, 30) if rng.random() < 0.2 else None
            script.append(Arrival(rng.choice([0, 0, 1, 9]), tuple(prompt), tuple(fields.items()), abort_after, b"A"))
        options = {
            "size": rng.choice([(40, 1), (21, 2), (10, 4), (12, 4), (18, 4)]),
            "depth": depth,
            "max_num_batched_tokens": rng.choice([4, 9, 64]),
            "max_chunk": rng.choice([None, 3]),
            "scheduling_policy": rng.choice(["fcfs", "priority"]),
            "enable_prefix_caching": rng.random() < 0.7,
            "right": rng.choice([None, 0.3, 0.9]),
            "snapshots": [None, 8][seed % 2],
        }
        engine = play(options, script, None)
        preemptions += engine.stats.preemptions
        hits += engine.stats.prefix_hits
        accepted += engine.executor.accepted
        rejected += engine.executor.rejected
        restored += engine.executor.states.restored
    assert min(preemptions, hits) > 3 * seeds and accepted > 1.5 * seeds  # otherwise the test has no case
    assert min(rejected, restored) > seeds // 2
