"""Requests that generate no tokens: they end when their prompt is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.harness import Engine
from tests.engine.test_control import ask, update
from tests.engine.test_request import emitted
from tests.engine.test_request import make as make_request
from tokserve.base.errors import RequestError
from tokserve.protocol.params import PoolingParams

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
PROMPT = [3, 4, 5, 6, 7, 8, 9, 2, 3]
LAST, MEAN = PoolingParams("last"), PoolingParams("mean")


@DEPTHS
@pytest.mark.parametrize("budget", [2, 4, 32])
@pytest.mark.parametrize("task", [LAST, MEAN])
def test_a_vector_comes_with_the_end_of_the_prompt(depth: int, budget: int, task: PoolingParams) -> None:
    engine = Engine(depth=depth, max_num_batched_tokens=budget)
    for i in range(3):
        engine.add(f"p{i}", PROMPT[i:], task=task)
    engine.add("a", PROMPT, max_tokens=5, ignore_eos=True)
    engine.run()
    for rid in ("p0", "p1", "p2", "a"):
        engine.check_complete(rid)
    received = engine.received["p0"]
    assert received.finish is not None and (received.finish.reason, received.finish.detail) == ("stop", "pooled")
    assert len(received.outputs) == 1 and received.pooled and not received.tokens
    assert engine.stats.output_tokens == 5
    assert all(
        not plan.num_logits[i]
        for plan in engine.executor.plans
        for i in range(len(plan.slots))
        if engine.executor.results[plan.step].values["pooled"].get(i) is not None
    )
    engine.check_empty()


@DEPTHS
def test_a_prompt_of_one_token_and_one_that_fills_the_context(depth: int) -> None:
    engine = Engine(depth=depth, context=16, num_blocks=8, max_num_batched_tokens=5)
    engine.add("one", [3], task=LAST)
    engine.add("all", [i % 20 for i in range(16)], task=LAST)
    refused = engine.submit("more", engine.make("more", [3] * 17, task=LAST))
    assert refused.refusal == "invalid" and "17 tokens does not fit" in refused.message
    engine.run()
    engine.check_complete("one")
    engine.check_complete("all")
    engine.check_empty()


@pytest.mark.parametrize(("task", "cached"), [(LAST, 8), (MEAN, 0)])
def test_the_last_token_needs_no_prefix_and_the_mean_needs_all(task: PoolingParams, cached: int) -> None:
    engine = Engine()
    engine.add("a", PROMPT, max_tokens=1)
    engine.run()
    engine.add("p", PROMPT, task=task)
    engine.run()
    assert engine.received["p"].cached == cached
    assert engine.executor.computed["p"] == len(PROMPT) - cached
    engine.check_complete("p")
    engine.add("b", [*PROMPT, 4], max_tokens=1)  # and what pooling computes is found by others
    engine.run()
    assert engine.received["b"].cached == 8


@DEPTHS
def test_a_preempted_prompt_is_computed_again(depth: int) -> None:
    engine = Engine(depth=depth, max_num_batched_tokens=3, num_blocks=16)
    engine.add("p", PROMPT, task=MEAN, stream=False)
    engine.step()
    engine.call("sleep", level=1, mode="keep", call_id=5)
    engine.run()
    assert "p" not in engine.received and engine.stats.preemptions == 1
    engine.call("wake_up", call_id=6)
    engine.run()
    engine.check_complete("p")
    assert engine.executor.computed["p"] > len(PROMPT)
    engine.check_empty()


@DEPTHS
def test_new_weights_make_the_whole_vector(depth: int) -> None:
    engine = Engine(depth=depth, max_num_batched_tokens=3)
    engine.add("p", PROMPT, task=MEAN)
    engine.step()
    assert not update(engine, "w2", "two").error
    engine.run()
    engine.check_complete("p")
    assert engine.received["p"].outputs[-1].spans == [("two", 0, 0)]
    assert engine.executor.computed["p"] > len(PROMPT)  # from the beginning again
    engine.check_empty()


@DEPTHS
def test_a_new_adapter_makes_the_whole_vector(depth: int) -> None:
    engine = Engine(depth=depth, max_num_batched_tokens=3, enable_lora=True, max_loras=2)
    for name in ("x", "y"):
        assert not ask(engine, "load_lora_adapter", lora_name=name, lora_path=f"/{name}").error
        engine.add(name, PROMPT, adapter=name, task=MEAN)
    engine.steps(2)
    assert not ask(engine, "load_lora_adapter", call_id=2, lora_name="x", lora_path="/new").error
    engine.run()
    spans = {name: engine.received[name].outputs[-1].spans for name in ("x", "y")}
    assert spans == {"x": [("v1+x@3", 0, 0)], "y": [("v1+y@2", 0, 0)]}
    assert engine.executor.computed["x"] > engine.executor.computed["y"] == len(PROMPT)
    engine.check_empty()


@DEPTHS
def test_a_vector_that_is_not_finite_is_an_error(depth: int) -> None:
    engine = Engine(depth=depth)
    engine.executor.spoil.add((7, len(PROMPT)))
    engine.add("p", PROMPT, seed=7, task=LAST)
    engine.run()
    received = engine.received["p"]
    assert received.finish is not None and (received.finish.reason, received.finish.detail) == ("error", "nan")
    assert not received.pooled
    engine.check_empty()


@DEPTHS
@pytest.mark.parametrize("ending", ["abort", "deadline", "stall"])
def test_it_ends_early_like_any_request(depth: int, ending: str) -> None:
    engine = Engine(depth=depth, max_num_batched_tokens=2)
    fields: dict[str, Any] = {"deadline_ms": 500} if ending == "deadline" else {}
    engine.add("p", PROMPT, task=LAST, **fields)
    engine.steps(2)
    if ending == "abort":
        engine.abort("p")
    elif ending == "deadline":
        engine.clock.now += 1.0
    else:
        engine.stall("p")  # its prompt is computed all the same, and its vector is its only output
    engine.run()
    received = engine.received["p"]
    assert received.finish is not None
    assert received.finish.detail == {"abort": "abort_user", "deadline": "deadline", "stall": "pooled"}[ending]
    assert bool(received.pooled) == (ending == "stall")
    engine.check_empty()


def test_a_pooling_request_may_fill_the_context() -> None:
    request = make_request([10] * 32, task=PoolingParams())
    assert request.prompt_only and request.limit == request.prompt_len == 32 and request.stop_ids == ()
    with pytest.raises(RequestError, match="prompt of 33 tokens does not fit"):
        make_request([10] * 33, task=PoolingParams())
    request.output.collect("pooled", 0, 32, np.array([0.5, -1.0], np.float32))
    request.on_prompt_computed(101.0)
    output = emitted(request)
    assert np.frombuffer(output.pooled, "<f4").tolist() == [0.5, -1.0] and not output.token_ids
    assert output.finish is not None and (output.finish.reason, output.finish.detail) == ("stop", "pooled")
