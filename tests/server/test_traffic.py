"""Bodies recorded from real clients, and the OpenAI SDK unmodified."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import openai
import pytest

from tests.server.byte_tokenizer import TOKENIZER, ids
from tests.server.scripted_llm import says
from tests.server.site import Site, site

RENDERERS = {
    "model": "tiny",
    "token_ids": [5, 6, 7],
    "cache_salt": "3",
    "priority": 0,
    "sampling_params": {
        "temperature": 1.0,
        "max_tokens": 8,
        "stop_token_ids": [2],
        "logprobs": 1,
        "skip_special_tokens": False,
    },
}
TRL_COMPLETIONS = {
    "model": "tiny",
    "prompt": [[1, 2, 3], [4, 5]],
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "n": 2,
    "repetition_penalty": 1.0,
    "temperature": 0.7,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "max_tokens": 4,
    "logprobs": 0,
}
TRL_SCORING = {"prompt": [[1, 2, 3, 4, 5]], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 2}
TRL_GENERATE = {
    "request_id": "trl-1",
    "model": "tiny",
    "token_ids": [1, 2, 3],
    "features": None,
    "sampling_params": {"n": 1, "max_tokens": 4, "logprobs": 0, "output_kind": 2},
}
LM_EVAL = {
    "model": "tiny",
    "prompt": [[20, 13, 20]],
    "temperature": 0,
    "max_tokens": 1,
    "logprobs": 1,
    "seed": 1234,
    "echo": True,
}
GUIDELLM = {
    "model": "tiny",
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "max_completion_tokens": 4,
    "ignore_eos": True,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
}
ROUTER = {
    "no_stop_trim": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
    "include_reasoning": True,
}
QUESTION: Any = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("tokens_only", [False, True])
def test_renderers(tokens_only: bool) -> None:
    s = site(tokens_only=tokens_only)
    choice = s.post("/inference/v1/generate", RENDERERS, headers={"x-session-id": "traj-1"}).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == len(choice["token_ids"])
    for token, entry in zip(choice["token_ids"], content, strict=True):
        assert entry["token"] == f"token_id:{token}" and -9999.0 < entry["logprob"] <= 0


def test_trl_completions() -> None:
    choices = site().post("/v1/completions", TRL_COMPLETIONS).json()["choices"]
    assert [c["prompt_token_ids"] for c in choices] == [[1, 2, 3]] * 2 + [[4, 5]] * 2
    for choice in choices:
        assert [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]] == choice["token_ids"]
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"]) == 4


def test_trl_scoring() -> None:
    scores = site().post("/v1/completions", TRL_SCORING).json()["choices"][0]["prompt_logprobs"]
    assert scores[0] is None and [next(iter(entry)) for entry in scores[1:]] == ["2", "3", "4", "5"]
    assert all(value["rank"] >= 1 for entry in scores[1:] for value in entry.values())


def test_trl_generate() -> None:
    reply = site().post("/inference/v1/generate", TRL_GENERATE).json()
    assert reply["request_id"] == "generate-tokens-trl-1" and len(reply["choices"][0]["token_ids"]) == 4


def test_lm_eval() -> None:
    actual = site().post("/v1/completions", LM_EVAL).json()["choices"][0]["logprobs"]
    assert len(actual["token_logprobs"]) == 4 and actual["token_logprobs"][0] is None
    for token, tops in zip(actual["tokens"][1:-1], actual["top_logprobs"][1:-1], strict=True):
        assert token in tops


def test_guidellm() -> None:
    events = site().events("/v1/chat/completions", GUIDELLM)
    assert all(event["usage"] for event in events)
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 4


def test_vllm_router() -> None:
    answer = site(says("a")).post("/v1/chat/completions", {"messages": QUESTION} | ROUTER)
    assert answer.status_code == 200  # values that say nothing are no news
    assert answer.headers["x-ignored-fields"].split(", ") == ["separate_reasoning", "stream_reasoning"]


def with_sdk(s: Site, scene: Callable[[openai.AsyncOpenAI], Awaitable[None]], key: str = "none") -> None:
    async def run() -> None:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(s.app))
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key=key, http_client=http, max_retries=0)
        async with client:
            await scene(client)

    asyncio.run(run())


def test_sdk_chat() -> None:
    async def scene(client: openai.AsyncOpenAI) -> None:
        answer = await client.chat.completions.create(model="tiny", messages=QUESTION, logprobs=True, top_logprobs=1)
        assert answer.choices[0].message.content == "aé" and answer.choices[0].message.role == "assistant"
        assert answer.choices[0].finish_reason == "stop" and answer.usage and answer.usage.completion_tokens == 4
        assert answer.choices[0].logprobs and answer.choices[0].logprobs.content
        assert answer.choices[0].logprobs.content[0].token == "a"

    with_sdk(site(says("aé")), scene)


def test_sdk_chat_stream() -> None:
    async def scene(client: openai.AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(
            model="tiny", messages=QUESTION, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "aé"
        assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 4
        assert chunks[-2].choices[0].finish_reason == "stop"

    with_sdk(site(says("aé")), scene)


def test_sdk_completions() -> None:
    async def scene(client: openai.AsyncOpenAI) -> None:
        answer = await client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=3, logprobs=1, echo=True)
        assert [c.index for c in answer.choices] == [0, 1] and answer.choices[1].text.startswith("b")
        assert answer.choices[0].logprobs and answer.choices[0].logprobs.tokens
        stream = await client.completions.create(model="tiny", prompt="a", max_tokens=3, stream=True)
        assert len([chunk async for chunk in stream]) == 3

    with_sdk(site(), scene)


def test_sdk_errors_and_models() -> None:
    async def scene(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="tiny", messages=QUESTION, temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="nope", messages=QUESTION)
        assert unknown.value.code == "model_not_found"
        assert [model.id async for model in client.models.list()] == ["tiny", "alias"]

    with_sdk(site(api_key=["k"]), scene, key="k")

    async def refused(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()

    with_sdk(site(api_key=["k"]), refused)


def test_sdk_stream_that_fails() -> None:
    s = site()
    s.llm.fails = lambda index: True

    async def scene(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.APIError, match="not finite"):
            async for _ in await client.chat.completions.create(model="tiny", messages=QUESTION, stream=True):
                pass

    with_sdk(s, scene)


def test_non_ascii_text_survives() -> None:
    s = site(says("日本"))
    assert s.post("/v1/chat/completions", {"messages": QUESTION}).json()["choices"][0]["message"]["content"] == "日本"
    raw = s.post("/v1/completions", {"prompt": "é", "echo": True}).content
    assert json.loads(raw)["choices"][0]["text"].startswith("é")
    assert TOKENIZER.decode(ids("日本")) == "日本"
