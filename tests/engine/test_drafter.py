"""Drafts: verified in the step that computes them, rolled back where they are wrong, without cost to other requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, cast

import pytest

from tests.engine.drafters import OneByOne, RandomDrafter
from tests.engine.grammars import Machine, compiled
from tests.engine.harness import Engine
from tests.engine.solo import VOCAB
from tokserve.engine.kv_cache.block_table import BlockTable
from tokserve.engine.request import Request
from tokserve.features.grammar.engine import GrammarFeature
from tokserve.features.grammar.grammar import Grammar
from tokserve.protocol.messages import Submit
from tokserve.protocol.params import StructuredOutputs
from tokserve.protocol.plan import StepPlan

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
PROMPT = [3, 4, 5, 6, 7]


class Fixed(OneByOne):
    """Proposes by output position: `right` tokens of what the request gives alone, then `wrong` others."""

    def __init__(self, engine: Engine, right: int, wrong: int = 0, only: Sequence[int] | None = None) -> None:
        self.engine, self.right, self.wrong, self.only = engine, right, wrong, only
        self.calls: list[tuple[int, int]] = []  # known output tokens, limit

    def propose_one(self, request: Request, limit: int) -> list[int]:
        if request.num_in_flight:
            return []
        self.calls.append((request.num_output, limit))
        if self.only is not None and request.num_output not in self.only:
            return []
        rest = self.engine.solo(request.request_id).tokens[request.num_output :]
        drafts = rest[: self.right]
        wrong = (rest[len(drafts)] + 1) % VOCAB if len(rest) > len(drafts) else 0
        return [*drafts, *[wrong] * self.wrong]


def drafting(right: int, wrong: int = 0, only: Sequence[int] | None = None, **options: Any) -> tuple[Engine, Fixed]:
    engine = Engine(**options)
    drafter = engine.draft_with(Fixed(engine, right, wrong, only))
    return engine, drafter


def columns(plan: StepPlan) -> list[tuple[int, int, int, int]]:
    """(num_computed, num_tokens, num_drafts, num_logits) of each row."""
    rows = (plan.num_computed, plan.num_tokens, plan.num_drafts, plan.num_logits)
    return list(zip(*(column.tolist() for column in rows), strict=True))


def test_right_drafts_are_all_kept() -> None:
    engine, _ = drafting(3)
    engine.add("a", PROMPT, max_tokens=9, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    engine.run()
    assert [columns(plan) for plan in engine.executor.plans] == [[(0, 8, 3, 4)], [(8, 4, 3, 4)], [(12, 1, 0, 1)]]
    assert [len(output.token_ids) for output in engine.received["a"].outputs] == [4, 4, 1]
    engine.check_complete("a")
    assert engine.stats.output_tokens == 9
    engine.check_empty()


def test_rejected_drafts_are_rolled_back() -> None:
    engine, _ = drafting(1, 2)
    engine.add("a", PROMPT, max_tokens=6, ignore_eos=True, logprobs=0)
    engine.run()
    assert [columns(plan) for plan in engine.executor.plans] == [[(0, 8, 3, 4)], [(6, 4, 3, 4)], [(8, 2, 1, 2)]]
    engine.check_complete("a")
    assert (engine.executor.accepted, engine.executor.rejected) == (3, 4)


def test_at_depth_two_the_next_plan_counts_drafts_in_flight_as_accepted() -> None:
    engine, drafter = drafting(1, 2, depth=2)
    engine.add("a", PROMPT, max_tokens=8, ignore_eos=True)
    engine.run()
    plans = [columns(plan)[0] for plan in engine.executor.plans]
    assert plans[:3] == [(0, 8, 3, 4), (8, 1, 0, 1), (7, 1, 0, 1)]  # 2 of the 3 drafts were rejected
    assert [known for known, _ in drafter.calls] == [0], "what follows unknown tokens is not drafted"
    engine.check_complete("a")
    engine.check_empty()


@DEPTHS
@pytest.mark.parametrize("stop", ["stop_token_ids", "stop_token_sequences"])
def test_a_stop_among_accepted_drafts_drops_what_follows(depth: int, stop: str) -> None:
    rehearsal = Engine()
    rehearsal.add("a", PROMPT, max_tokens=12, ignore_eos=True)
    rehearsal.run()
    tokens = rehearsal.tokens("a")
    last = tokens[2]
    fields: dict[str, Any] = {
        "stop_token_ids": {"stop_token_ids": [last]},
        "stop_token_sequences": {"stop_token_sequences": [tokens[1:3]]},
    }[stop]
    engine = Engine(depth=depth)
    engine.add("a", PROMPT, max_tokens=12, ignore_eos=True, logprobs=1, **fields)

    class Through(OneByOne):
        """Proposes on, past the end."""

        def propose_one(self, request: Request, limit: int) -> list[int]:
            return [] if request.num_in_flight else tokens[request.num_output :][: min(limit, 6)]

    engine.draft_with(Through())
    engine.run()
    assert engine.tokens("a") == tokens[: tokens.index(last) + 1] and engine.executor.accepted >= 3
    engine.check_complete("a")
    assert engine.stats.output_tokens == len(engine.tokens("a"))
    engine.add("b", [*PROMPT, *tokens, 3], max_tokens=2, ignore_eos=True)  # finds settled blocks only
    engine.run()
    engine.check_complete("b")
    engine.check_empty()


@DEPTHS
@pytest.mark.parametrize(("context", "max_tokens"), [(64, 4), (8, None), (9, 30)])
def test_drafts_stay_within_the_limits(depth: int, context: int, max_tokens: int | None) -> None:
    engine, drafter = drafting(9, 9, depth=depth, context=context)
    engine.add("a", PROMPT, max_tokens=max_tokens, ignore_eos=True)
    engine.run()
    room = min(context - len(PROMPT), max_tokens or context)
    assert drafter.calls[0] == (0, room - 1)
    assert int(engine.executor.plans[0].num_tokens[0]) == len(PROMPT) + room - 1
    engine.check_complete("a")


def test_drafts_take_what_is_left_of_the_budget() -> None:
    engine, _ = drafting(0, 9, max_num_batched_tokens=8)
    engine.add("a", PROMPT, max_tokens=30, ignore_eos=True)
    engine.step()
    assert columns(engine.executor.plans[0]) == [(0, 8, 3, 4)]
    engine.add("b", [9, 8, 7, 6, 5, 4], max_tokens=30, ignore_eos=True)
    engine.step()
    assert columns(engine.executor.plans[1]) == [(5, 2, 1, 2), (0, 6, 0, 1)]  # the prompt comes first
    engine.step()
    assert int(engine.executor.plans[2].num_tokens.sum()) == 8
    engine.run()
    engine.check_complete("a")
    engine.check_complete("b")


@DEPTHS
def test_no_request_is_preempted_for_a_draft(depth: int) -> None:
    """A draft gets a new block only if one is left for each running request."""
    engine, _ = drafting(2, 2, depth=depth, num_blocks=10, context=40)
    cache, extend = engine.core.cache, engine.core.cache.extend
    refused = 0

    def checked(table: BlockTable, num_tokens: int, reserve: int = 0) -> bool:
        nonlocal refused
        before = len(table.blocks)
        done = extend(table, num_tokens, reserve)
        refused += not done
        assert len(table.blocks) == before or cache.pool.num_available >= reserve
        assert done or reserve, "a token found no block"
        return done

    cache.extend = checked  # type: ignore[method-assign]
    for i in range(3):
        engine.add(f"r{i}", [3, i, 5], max_tokens=9, ignore_eos=True)
    engine.run()
    assert engine.executor.accepted and engine.stats.preemptions == 0 and (refused or depth == 2)
    for i in range(3):
        engine.check_complete(f"r{i}")
    engine.check_empty()


class Compiled:
    """Takes the place of `Grammars`."""

    num_bytes = num_compiling = num_refused = 0

    def compile(self, *_: object) -> Future[Grammar]:
        future: Future[Grammar] = Future()
        future.set_result(compiled(Machine()))
        return future

    def forget(self, grammar: Grammar) -> None:
        pass


class Given(OneByOne):
    """Proposes the same whenever it may."""

    def __init__(self, drafts: list[int]) -> None:
        self.drafts = drafts

    def propose_one(self, request: Request, limit: int) -> list[int]:
        return self.drafts[request.num_output :][:limit]


@pytest.mark.some(1)
@DEPTHS
def test_drafts_under_a_grammar_are_sampled_as_it_allows(depth: int) -> None:
    """The grammar: 3 or 13, then 5, then 6 or 16, then the end; after 16 its state fails."""

    def run(drafts: list[int], seed: int) -> tuple[list[int], object]:
        engine = Engine(depth=depth, drafter=Given(drafts))
        engine.feature(GrammarFeature).grammars = cast(Any, Compiled())
        engine.feature(GrammarFeature).masks.slow_after = math.inf
        request = engine.make("g", PROMPT, seed=seed, structured_outputs=StructuredOutputs(regex="x"), max_tokens=9)
        engine.core.receive(b"A", Submit(7, "g", [request]))
        engine.run()
        while engine.feature(GrammarFeature).masks:  # a thread makes the masks
            engine.run()
        engine.feature(GrammarFeature).masks.close()
        accepted.append(engine.executor.accepted)
        finish = engine.received["g"].finish
        return engine.tokens("g"), finish and (finish.reason, finish.detail, finish.message)

    accepted: list[int] = []
    for seed in range(6):
        expected = run([], seed)
        assert accepted[-1] == 0
        texts = [[a, 5, b, 1, 7] for a in (3, 13) for b in (6, 16)]
        for drafts in [*texts, [3, 6], [9, 9, 9], [3, 5, 7, 1], [13, 5, 5, 5, 5, 5]]:
            assert run(drafts, seed) == expected
    assert max(accepted) >= 2


@DEPTHS
def test_a_failure_after_accepted_drafts_ends_the_request_with_them(depth: int) -> None:
    engine, _ = drafting(5, depth=depth)
    engine.executor.spoil.add((0, len(PROMPT) + 3))
    engine.add("a", PROMPT, max_tokens=9, ignore_eos=True, logprobs=0)
    engine.run()
    finish = engine.received["a"].finish
    assert finish is not None and finish.detail == "nan"
    assert engine.tokens("a") == engine.solo("a").tokens[:3] and engine.stats.nan_requests == 1
    engine.check_empty()


@DEPTHS
def test_drafts_of_many_requests_in_turn(depth: int) -> None:
    engine = Engine(depth=depth, max_num_batched_tokens=24)
    drafter = engine.draft_with(RandomDrafter(engine.executor, seed=1))
    for i in range(12):
        engine.add(f"r{i}", PROMPT[: 1 + i % 5], seed=i, max_tokens=20, ignore_eos=True, logprobs=1)
    engine.run()
    for i in range(12):
        engine.check_complete(f"r{i}")
    assert drafter.proposed >= engine.executor.accepted + engine.executor.rejected > 0
    engine.check_empty()
