"""What real clients send: recorded bodies, and the OpenAI SDK unmodified with every parameter it has."""

import asyncio
import inspect
from typing import Any

import openai
import pytest
from openai.resources.chat.completions import Completions as SdkChat
from openai.resources.completions import Completions as SdkCompletions

from tests.conformance.api import CHAT, COMPLETIONS, GENERATE, MESSAGES, Api

TIDS = "return_tokens_as_token_ids"


def test_renderers(api: Api) -> None:
    params = {"temperature": 1.0, "max_tokens": 8, "stop_token_ids": [2], "logprobs": 1, "skip_special_tokens": False}
    body = {"model": api.model, "token_ids": [5, 6, 7], "sampling_params": params, "cache_salt": "3", "priority": 0}
    [choice] = api.ok(GENERATE, body, headers={"x-session-id": "traj-1"})["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(-9999.0 < entry["logprob"] <= 0.0 for entry in content)


def test_trl_generates(api: Api) -> None:
    params = {"n": 1, "max_tokens": 4, "logprobs": 0, "output_kind": 2}
    body = {"request_id": "trl-1", "model": api.model, "token_ids": [1, 2, 3], "features": None}
    reply = api.ok(GENERATE, body | {"sampling_params": params})
    assert reply["request_id"] == "generate-tokens-trl-1" and 1 <= len(reply["choices"][0]["token_ids"]) <= 4


def test_trl_completes(text: Api) -> None:
    body = {
        "model": text.model,
        "prompt": [[1, 2, 3], [4, 5]],
        "return_token_ids": True,
        TIDS: True,
        "n": 2,
        "repetition_penalty": 1.0,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "max_tokens": 4,
        "logprobs": 0,
    }
    choices = text.ok(COMPLETIONS, body)["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[1, 2, 3]] * 2 + [[4, 5]] * 2
    for choice in choices:
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]


def test_trl_scores(text: Api) -> None:
    body = {"prompt": [[1, 2, 3, 4, 5]], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 2}
    scored = text.ok(COMPLETIONS, body)["choices"][0]["prompt_logprobs"]
    assert scored[0] is None and [next(iter(entry)) for entry in scored[1:]] == ["2", "3", "4", "5"]
    assert all(value["rank"] >= 1 for entry in scored[1:] for value in entry.values())


def test_lm_eval(text: Api) -> None:
    body = {
        "model": text.model,
        "prompt": [[20, 13, 20]],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    logprobs = text.ok(COMPLETIONS, body)["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 4
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    for token, tops, logprob in list(
        zip(*(logprobs[n] for n in ("tokens", "top_logprobs", "token_logprobs")), strict=True)
    )[1:]:
        assert tops[token] == logprob


def test_guidellm(text: Api) -> None:
    body = {
        "model": text.model,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_completion_tokens": 4,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    }
    events = text.events(CHAT, body)
    assert all(event["usage"] for event in events)
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 4


def test_vllm_router(text: Api) -> None:
    added = {"no_stop_trim": False, "separate_reasoning": True, "stream_reasoning": True, "return_hidden_states": False}
    if text.config["server"]["strict"]:
        pytest.skip("a strict server refuses them")
    answer = text.post(CHAT, {"messages": MESSAGES, "max_tokens": 2, "include_reasoning": True} | added)
    assert answer.status_code == 200 and answer.headers["x-ignored-fields"].split(", ") == [
        "separate_reasoning",
        "stream_reasoning",
    ]


# the OpenAI SDK

PLAIN = {"extra_headers", "extra_query", "extra_body", "timeout", "self", "model", "messages", "prompt"}
VALUES: dict[str, Any] = {
    "audio": None,
    "best_of": 1,
    "echo": True,
    "frequency_penalty": 0.5,
    "function_call": "none",
    "functions": [],
    "logit_bias": {"5": 1},
    "logprobs": 1,
    "max_completion_tokens": 3,
    "max_tokens": 3,
    "metadata": {"a": "b"},
    "modalities": ["text"],
    "n": 2,
    "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": "x"},
    "presence_penalty": 0.5,
    "prompt_cache_key": "k",
    "prompt_cache_options": {},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "none",
    "response_format": {"type": "text"},
    "safety_identifier": "s",
    "seed": 1,
    "service_tier": "auto",
    "stop": ["x"],
    "store": False,
    "stream": False,
    "stream_options": None,
    "suffix": None,
    "temperature": 0.5,
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 0.9,
    "user": "u",
    "verbosity": "medium",
    "web_search_options": None,
}


IGNORED = {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user"}


def sdk(text: Api) -> openai.OpenAI:
    return openai.OpenAI(base_url=text.url + "/v1", api_key="none", max_retries=0)


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in PLAIN and name in VALUES]


@pytest.mark.some(19)
@pytest.mark.parametrize("name", parameters(SdkChat.create))
def test_every_parameter_of_the_sdks_chat_is_taken(text: Api, name: str) -> None:
    value = bool(VALUES[name]) if name == "logprobs" else VALUES[name]
    call: Any = sdk(text).chat.completions.with_raw_response.create
    with_limit = {"max_tokens": 3} if not name.startswith("max_") else {}
    answer = call(model=text.model, messages=MESSAGES, **with_limit, **{name: value})
    assert answer.parse().choices[0].message.role == "assistant"
    assert answer.headers.get("x-ignored-fields") == (name if name in IGNORED else None)


@pytest.mark.parametrize("name", parameters(SdkCompletions.create))
def test_every_parameter_of_the_sdks_completions_is_taken(text: Api, name: str) -> None:
    call: Any = sdk(text).completions.with_raw_response.create
    answer = call(model=text.model, prompt="1+1", **{"max_tokens": 3} | {name: VALUES[name]})
    assert answer.parse().choices and answer.headers.get("x-ignored-fields") == (name if name in IGNORED else None)


def test_the_sdks_stream_helper(text: Api) -> None:
    call: Any = sdk(text).chat.completions.stream
    options = {
        "model": text.model,
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 8,
        "logprobs": True,
        "extra_body": {"min_tokens": 4},
        "logit_bias": {str(text.eos): 100},
    }
    with call(**options, stream_options={"include_usage": True}) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()  # raises if the reply ended by its length
    create: Any = sdk(text).chat.completions.create
    full = create(**options)
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == full.choices[0].message.content
    assert final.usage.completion_tokens == full.usage.completion_tokens
    assert final.choices[0].logprobs.content == full.choices[0].logprobs.content


def test_the_async_sdk_streams_the_same(text: Api) -> None:
    async def scene() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=text.url + "/v1", api_key="none", max_retries=0) as client:
            create: Any = client.chat.completions.create
            options = {"model": text.model, "messages": MESSAGES, "seed": 3, "max_tokens": 8}
            full, stream = await asyncio.gather(create(**options), create(**options, stream=True))
            deltas = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return full.choices[0].message.content, "".join(deltas)

    full, joined = asyncio.run(scene())
    assert full == joined


def test_the_sdk_lists_models(text: Api) -> None:
    assert [model.id for model in sdk(text).models.list()] and sdk(text).models.retrieve(text.model).id == text.model


def test_the_sdks_exceptions_carry_param_and_code(text: Api) -> None:
    create: Any = sdk(text).chat.completions.create
    with pytest.raises(openai.BadRequestError) as refused:
        create(model=text.model, messages=MESSAGES, temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        create(model="gpt-9", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):  # it generates
        sdk(text).embeddings.create(model=text.model, input="x")
