"""Drafts that the device draws, in the engine: planned, masked, counted, and compared with their cost."""

from __future__ import annotations

import math
from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.engine.drafters import text_drafter
from tests.engine.harness import Engine
from tests.engine.test_drafter import PROMPT, Compiled
from tokserve.engine.request import Request
from tokserve.features.grammar.engine import GrammarFeature
from tokserve.features.speculation.draft_budget import StepCosts
from tokserve.features.speculation.draft_state import DrawState
from tokserve.features.speculation.drawn import EXPLORE, PRIOR, DrawnDrafts
from tokserve.protocol.messages import Submit
from tokserve.protocol.params import StructuredOutputs
from tokserve.protocol.plan import DRAWN, DraftPasses

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
RUN: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}


def drawing(method: str = "self", **options: Any) -> Engine:
    engine = Engine(**options)
    engine.draft_with(text_drafter(method))
    return engine


@DEPTHS
def test_the_device_draws_and_the_result_is_the_same(depth: int) -> None:
    engine = drawing(depth=depth)
    for index in range(4):
        engine.add(f"r{index}", [*PROMPT, index], seed=index, logprobs=1, **RUN)
    engine.run()
    for index in range(4):
        engine.check_complete(f"r{index}")
    engine.check_empty()
    assert any(DRAWN in plan.draft_token_ids for plan in engine.executor.plans)
    sources = engine.stats.rooms["drafts_by_source"]
    assert sources["draft_model"][0] > sources["draft_model"][1] > 8
    assert sum(accepted for _, accepted in sources.values()) == sum(engine.stats.rooms["accepted_by_position"])
    assert sum(drafts for drafts, _ in sources.values()) == engine.stats.rooms["draft_tokens"]


def test_the_first_token_is_not_drawn_for() -> None:
    engine = drawing("draft_model")
    engine.add("a", PROMPT, seed=1, **RUN)
    engine.step()
    assert int(engine.executor.plans[0].num_drafts[0]) == 0
    engine.run()
    assert len(engine.executor.plans) < 24


@DEPTHS
def test_masks_follow_the_drawn_drafts(depth: int) -> None:
    def run(engine: Engine) -> list[list[int]]:
        engine.feature(GrammarFeature).grammars = cast(Any, Compiled())
        engine.feature(GrammarFeature).masks.slow_after = math.inf
        tokens = []
        for seed in range(40):
            rid, structure = f"r{seed}", StructuredOutputs(regex="x")
            request = engine.make(rid, [*PROMPT, seed % 20], seed=seed, structured_outputs=structure, max_tokens=9)
            engine.core.receive(b"A", Submit(7, rid, [request]))
            engine.run()
            while engine.feature(GrammarFeature).masks:  # a thread makes the masks
                engine.run()
            tokens.append(engine.tokens(rid))
        engine.feature(GrammarFeature).masks.close()
        return tokens

    engine = drawing(depth=depth)
    assert run(engine) == run(Engine(depth=depth))
    if depth == 1:  # else a token is always in flight, and masks are made of known ones
        assert engine.stats.rooms["drafts_by_source"]["draft_model"][0] > 10


def test_rows_that_are_behind_are_not_counted() -> None:
    engine = drawing()
    engine.executor.behind = True
    engine.add("a", PROMPT, seed=1, **RUN)
    engine.run()
    engine.check_complete("a")
    assert engine.stats.rooms["drafts_by_source"].get("draft_model") is None
    assert any(DRAWN in plan.draft_token_ids for plan in engine.executor.plans)


class Told(SimpleNamespace):
    """What a test tells, as a key of a table."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def request(**fields: Any) -> Request:
    """What `DrawnDrafts` reads of a request."""
    defaults = {
        "is_decoding": True,
        "features": (),
        "num_output": 40,
        "prompt_len": 8,
        "options": SimpleNamespace(adapter=""),
        "tokens": array("i"),
    }
    return cast(Request, Told(**(defaults | fields)))


def known(drawn: DrawnDrafts, rate: float, **fields: Any) -> Request:
    """A request whose drafts are right so often."""
    result = request(**fields)
    drawn._states[result] = DrawState(rate)
    return result


def chosen(drawn: DrawnDrafts, *requests: Request, gains: list[float] | None = None) -> list[int]:
    count = len(requests)
    counts = [0 if gain == 0.0 else 4 for gain in gains or [0.0] * count]
    return drawn.choose(requests, [60] * count, gains or [0.0] * count, counts, count, StepCosts())


def test_more_is_drawn_for_those_that_are_more_often_right() -> None:
    drawn = DrawnDrafts(32, computes_prompts=False)
    good, fair, bad = (known(drawn, rate) for rate in (0.97, 0.8, 0.05))
    counts = chosen(drawn, good, fair, bad)
    assert counts[0] > counts[1] > counts[2] == 0
    assert chosen(drawn, good)[0] > chosen(drawn, fair)[0] > 0
    assert chosen(drawn, good, gains=[3.9]) == [0], "a text that is right costs no passes"
    assert chosen(drawn, good, gains=[0.4])[0] > 0
    few = DrawnDrafts(3, computes_prompts=False)
    assert max(chosen(few, known(few, 0.97))) == 3


def test_passes_that_cost_as_much_as_steps_are_not_made() -> None:
    drawn, costs = DrawnDrafts(32, computes_prompts=False), StepCosts()
    good = known(drawn, 0.9)
    for _ in range(40):
        costs.record(1, 1, 0.01)
        drawn.on_drawn(DraftPasses(0.02, 2, 2), 1)
    assert drawn.choose([good], [60], [0.0], [0], 1, costs) == [0]
    for _ in range(80):
        drawn.on_drawn(DraftPasses(0.002, 2, 3), 1)
        drawn.on_drawn(DraftPasses(9.0, 2, 300), 1)  # most of that was a prompt
    assert drawn.choose([good], [60], [0.0], [0], 1, costs)[0] > 2


def test_drafting_is_tried_again_after_a_number_of_tokens() -> None:
    drawn = DrawnDrafts(32, computes_prompts=False)
    one = known(drawn, 0.05, num_output=3)
    assert chosen(drawn, one) == [0]
    one.__dict__["num_output"] = EXPLORE
    assert chosen(drawn, one) == [2] and chosen(drawn, one) == [0]
    one.__dict__["num_output"] = EXPLORE + 5
    assert chosen(drawn, one) == [0]


def test_a_prompt_is_computed_for_drafts_when_the_output_is_long() -> None:
    drawn = DrawnDrafts(32, computes_prompts=True)
    assert chosen(drawn, request(prompt_len=640, num_output=9)) == [0]
    assert chosen(drawn, request(prompt_len=640, num_output=10))[0] > 0
    assert chosen(drawn, request(is_decoding=False)) == [0]
    assert chosen(drawn, request(features=(1,))) == [0]


def test_new_requests_begin_with_what_is_known_of_their_adapter() -> None:
    drawn = DrawnDrafts(32, computes_prompts=False)
    assert drawn.state(request()).rate == PRIOR
    for _ in range(200):
        drawn.on_verified(request(), 3, 3)
        drawn.on_verified(request(options=SimpleNamespace(adapter="a")), 3, 0)
    assert drawn.state(request()).rate > 0.95
    assert drawn.state(request(options=SimpleNamespace(adapter="a"))).rate < 0.05
    for number in range(1000):
        drawn.on_verified(request(options=SimpleNamespace(adapter=str(number))), 1, 1)
    assert len(drawn._rates) <= 256


def test_a_rate_counts_what_was_verified() -> None:
    state = DrawState(0.5)
    for _ in range(300):
        state.record(4, 3)  # three right, and one wrong
    assert state.rate == pytest.approx(0.75, abs=0.05)
