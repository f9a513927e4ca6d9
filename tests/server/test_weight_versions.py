"""A prompt that two versions of the weights computed, as every route reports it (rl-faults F3)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.replies import good
from tests.server.site import Site, site
from tokserve.protocol.messages import Call
from tokserve.protocol.plan import StepPlan
from tokserve.rl.rollouts import read_rollout

PROMPT = [70, 71, 72, 73, 74, 75, 76, 77]
SPANS = [{"version": "0", "start": 0, "end": 0}, {"version": "two", "start": 0, "end": 3}]
PROMPT_SPANS = [{"version": "0", "start": 0, "end": 2}, {"version": "two", "start": 2, "end": 8}]


def renewed(**options: Any) -> Site:
    """A server that computes two tokens a step, and has other weights after the first step."""
    s = site(max_num_batched_tokens=2, max_num_seqs=1, depth=1, **options)
    link = s.llm.link
    forward, steps = link._model.forward, []

    def watched(plan: StepPlan) -> None:
        forward(plan)
        steps.append(plan.step)
        if len(steps) == 1:
            link._core.receive(b"another", Call(1, "update_weight_version", {"new_version": "two"}))

    link._model.forward = watched  # type: ignore[method-assign]
    return s


@pytest.mark.parametrize("stream", [False, True])
def test_the_token_route_has_the_versions_of_the_prompt(stream: bool) -> None:
    s, sent = renewed(), {"token_ids": PROMPT, "sampling_params": {"max_tokens": 3}}
    if stream:
        choice = s.events("/inference/v1/generate", sent)[-1]["choices"][0]
    else:
        [choice] = good(s.post("/inference/v1/generate", sent))["choices"]
    assert choice["weight_versions"] == SPANS and choice["prompt_weight_versions"] == PROMPT_SPANS
    if not stream:
        rollout = read_rollout(0, PROMPT, choice | {"logprobs": None})  # type: ignore[arg-type]
        assert rollout.weight_versions == [("0", 0, 0), ("two", 0, 3)]
        assert rollout.prompt_weight_versions == [("0", 0, 2), ("two", 2, 8)]


def test_prompt_logprobs_are_of_one_version() -> None:
    sent = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 3, "prompt_logprobs": 0}}
    [choice] = good(renewed().post("/inference/v1/generate", sent))["choices"]
    assert choice["weight_versions"] == SPANS[1:] and "prompt_weight_versions" not in choice


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "abcdefgh"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abcd"}]}),
    ],
)
def test_text_routes_have_an_entry_for_every_version(path: str, fields: dict[str, Any]) -> None:
    sent = {"max_tokens": 3, "return_weight_versions": True, "model": "tiny", **fields}
    [choice] = good(renewed().post(path, sent))["choices"]
    assert choice["weight_versions"] == SPANS


def test_sglang_has_its_field_for_the_prompt() -> None:
    s = renewed(sglang_api=True)
    info = good(s.post("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3}}))["meta_info"]
    assert info["weight_versions"] == SPANS and info["prefill_weight_versions"] == PROMPT_SPANS
    assert info["weight_version"] == "two"
    info = good(s.post("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3}}))["meta_info"]
    assert info["prefill_weight_versions"] == [{"version": "two", "start": 0, "end": 8}]
