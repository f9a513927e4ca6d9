"""Which weights computed a prompt is reported, and what scores a prompt is of one set of weights (rl-faults F3).

The scripted executor knows what wrote each position of the KV cache, and its prompt logprobs depend on that:
`check_complete` compares both with what was reported.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.harness import Engine
from tests.engine.test_control import DEPTHS, ask, update
from tokserve.protocol.messages import Reply

PROMPT = [9, 8, 7, 6, 5, 4, 3, 2, 9, 8]


def make(depth: int, **options: Any) -> Engine:
    """Prompts take several steps of 3 tokens."""
    return Engine(depth=depth, max_num_batched_tokens=3, **options)


def push(engine: Engine, weights: str, version: str) -> Reply:
    """A whole update, of which there may be several."""
    engine.messages.clear()
    return update(engine, weights, version)


def reported(engine: Engine, rid: str) -> tuple[list[Any], list[Any]]:
    """Spans of the output, and of the prompt."""
    last = engine.received[rid].outputs[-1]
    return last.spans, last.prompt_spans


@DEPTHS
def test_a_prompt_of_two_versions_is_reported_as_such(depth: int) -> None:
    engine = make(depth)
    engine.add("r", PROMPT, max_tokens=4, ignore_eos=True)
    engine.steps(2)
    assert not push(engine, "w2", "two").error
    engine.run()
    engine.check_complete("r")
    spans, prompt_spans = reported(engine, "r")
    assert spans == [("v1", 0, 0), ("two", 0, 4)]
    assert [version for version, _, _ in prompt_spans] == ["v1", "two"] and prompt_spans[-1][2] == len(PROMPT)


@DEPTHS
def test_a_prompt_of_two_loads_of_an_adapter_is_reported_as_such(depth: int) -> None:
    engine = make(depth, enable_lora=True, max_loras=2)
    ask(engine, "load_lora_adapter", call_id=1, lora_name="a", lora_path="/old")
    engine.add("r", PROMPT, adapter="a", max_tokens=4, ignore_eos=True)
    engine.steps(2)
    ask(engine, "load_lora_adapter", call_id=2, lora_name="a", lora_path="/new")
    engine.run()
    engine.check_complete("r")
    assert reported(engine, "r")[0] == [("v1+a@1", 0, 0), ("v1+a@2", 0, 4)]


@DEPTHS
@pytest.mark.parametrize("fields", [{"max_tokens": 1}, {"max_tokens": 4, "prompt_logprobs_start": 5}])
def test_prompt_logprobs_begin_again_with_new_weights(depth: int, fields: dict[str, Any]) -> None:
    engine = make(depth)
    engine.add("r", PROMPT, prompt_logprobs=1, ignore_eos=True, **fields)
    engine.steps(2)
    assert not push(engine, "w2", "two").error
    engine.run()
    engine.check_complete("r")
    assert reported(engine, "r") == ([("two", 0, fields["max_tokens"])], [("two", 0, len(PROMPT))])


@DEPTHS
def test_prompt_logprobs_begin_again_with_a_new_load_of_their_adapter(depth: int) -> None:
    engine = make(depth, enable_lora=True, max_loras=2)
    for number, name in enumerate(("a", "b")):
        ask(engine, "load_lora_adapter", call_id=number, lora_name=name, lora_path=f"/{name}")
        engine.add(name, PROMPT, adapter=name, prompt_logprobs=0, max_tokens=1, ignore_eos=True)
    engine.steps(3)
    ask(engine, "load_lora_adapter", call_id=9, lora_name="a", lora_path="/new")
    engine.run()
    for name, label in (("a", "v1+a@3"), ("b", "v1+b@2")):
        engine.check_complete(name)
        assert reported(engine, name) == ([(label, 0, 1)], [(label, 0, len(PROMPT))])
    assert engine.executor.computed["b"] == len(PROMPT)  # it did not begin again


@DEPTHS
def test_scores_that_wait_without_their_kv_begin_again_too(depth: int) -> None:
    """Rows that were kept when the KV cache's memory was given back are of the old weights."""
    engine = make(depth)
    engine.add("r", PROMPT, prompt_logprobs=1, max_tokens=1, ignore_eos=True)
    engine.steps(3)
    ask(engine, "sleep", call_id=1, level=1, mode="keep")
    assert not push(engine, "w2", "two").error
    ask(engine, "wake_up", call_id=2)
    engine.run()
    engine.check_complete("r")
    assert reported(engine, "r")[1] == [("two", 0, len(PROMPT))]


@DEPTHS
def test_weights_whose_kv_is_gone_are_not_reported(depth: int) -> None:
    engine = make(depth)
    engine.add("r", PROMPT, max_tokens=4, ignore_eos=True)
    engine.steps(2)
    ask(engine, "start_weight_update", call_id=1)
    ask(engine, "update_weights", call_id=2, update={"weights": "w2"})
    engine.weights_of["two"] = "w2"
    assert not ask(engine, "finish_weight_update", call_id=3, weight_version="two", recompute_kv=True).error
    engine.run()
    engine.check_complete("r")
    assert reported(engine, "r") == ([("two", 0, 4)], [("two", 0, len(PROMPT))])


@DEPTHS
def test_weights_that_only_computed_tokens_again_are_reported(depth: int) -> None:
    """Tokens by the first, their KV again by the second and the third, and then tokens by the third."""
    engine = make(depth, num_blocks=40)
    engine.add("r", PROMPT, max_tokens=12, ignore_eos=True)
    while len(engine.received["r"].tokens if "r" in engine.received else ()) < 4:
        engine.step()
    ask(engine, "pause", call_id=1, mode="retract")
    num_made = len(engine.tokens("r"))
    assert not push(engine, "w2", "two").error
    ask(engine, "resume", call_id=2)
    engine.steps(3)
    assert len(engine.tokens("r")) == num_made and not push(engine, "w3", "three").error
    engine.run()
    engine.check_complete("r")
    spans, prompt_spans = reported(engine, "r")
    assert spans == [("v1", 0, num_made), ("two", num_made, num_made), ("three", num_made, 12)]
    assert prompt_spans == [("v1", 0, len(PROMPT))]  # as the first token found it


@DEPTHS
def test_blocks_of_the_prefix_cache_are_of_the_weights_that_serve(depth: int) -> None:
    engine = make(depth)
    for rid, version in (("old", "two"), ("new", "three"), ("again", "")):
        engine.add(rid, PROMPT, max_tokens=2, ignore_eos=True)
        engine.run()
        engine.check_complete(rid)
        if version:
            assert not push(engine, version, version).error
    assert [reported(engine, rid)[1] for rid in ("old", "new", "again")] == [
        [(version, 0, len(PROMPT))] for version in ("v1", "two", "three")
    ]
    engine.add("hit", [*PROMPT, 1, 1], max_tokens=2, ignore_eos=True)
    engine.run()
    engine.check_complete("hit")
    assert engine.received["hit"].cached == 8 and reported(engine, "hit")[1] == [("three", 0, 12)]


@DEPTHS
def test_a_request_that_ends_in_its_prompt_says_how_far_it_came(depth: int) -> None:
    engine = make(depth)
    engine.add("r", PROMPT, max_tokens=4)
    engine.steps(2)
    engine.abort("r")
    engine.run()
    spans, prompt_spans = reported(engine, "r")
    assert spans == [("v1", 0, 0)] and prompt_spans[0][:2] == ("v1", 0) and prompt_spans[0][2] in (3, 6)
