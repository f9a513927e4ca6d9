"""The OpenAI SDK, unmodified, against the demo model; chat equals template + generate + decode, token for token."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.e2e.server import Server

QUESTION = [{"role": "user", "content": "What is 47 + 38?"}]


@pytest.fixture
def client(demo: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=demo.url + "/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def ask(client: openai.OpenAI, **kwargs: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=QUESTION, **kwargs)  # type: ignore[call-overload]


def test_chat(client: openai.OpenAI) -> None:
    answer = ask(client, temperature=0)
    assert answer.choices[0].message.content == "85"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.model == "demo" and answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")


def test_chat_stream_equals_the_full_answer(client: openai.OpenAI) -> None:
    full = ask(client, temperature=1, seed=5, max_tokens=20, logprobs=True, top_logprobs=2)
    chunks = list(
        ask(
            client,
            temperature=1,
            seed=5,
            max_tokens=20,
            logprobs=True,
            top_logprobs=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    logprobs = [e for c in chunks if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert text == full.choices[0].message.content
    assert logprobs == full.choices[0].logprobs.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == full.usage and chunks[-1].choices == []
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == full.choices[0].finish_reason


def test_chat_logprobs_carry_tokens_and_bytes(client: openai.OpenAI) -> None:
    answer = ask(client, temperature=0, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert "".join(e.token for e in content).startswith("85")
    assert bytes(content[0].bytes) == b"8"
    assert all(len(e.top_logprobs) == 3 and e.top_logprobs[0].logprob >= e.top_logprobs[1].logprob for e in content)
    assert content[0].top_logprobs[0].token == "8" and content[0].logprob == content[0].top_logprobs[0].logprob


def test_n_choices_are_the_seeds_that_follow(client: openai.OpenAI) -> None:
    several = ask(client, temperature=1.5, seed=10, n=3, max_tokens=12)
    alone = [ask(client, temperature=1.5, seed=10 + i, max_tokens=12) for i in range(3)]
    assert [c.index for c in several.choices] == [0, 1, 2]
    assert [c.message.content for c in several.choices] == [a.choices[0].message.content for a in alone]


def test_n_choices_at_temperature_zero_are_equal(client: openai.OpenAI) -> None:
    answer = ask(client, temperature=0, n=3, max_tokens=4)
    assert [choice.message.content for choice in answer.choices] == ["85"] * 3
    assert answer.usage.completion_tokens == 3 * ask(client, temperature=0, max_tokens=4).usage.completion_tokens
    texts = {0: "", 1: "", 2: ""}
    for chunk in ask(client, temperature=0, n=3, max_tokens=4, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert set(texts.values()) == {"85"}
    completed = client.completions.create(model="demo", prompt=["ab", "cd"], max_tokens=3, temperature=0, n=2)
    texts = [choice.text for choice in completed.choices]
    assert texts[0] == texts[1] and texts[2] == texts[3] and len(texts) == 4


def test_stop_string_is_cut(client: openai.OpenAI) -> None:
    answer = ask(client, temperature=0, stop=["5"])
    assert answer.choices[0].message.content == "8" and answer.choices[0].finish_reason == "stop"
    streamed = list(ask(client, temperature=0, stop=["5"], stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == "8"


def test_max_tokens_ends_with_length(client: openai.OpenAI) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = ask(client, temperature=0, **{name: 1})
        assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 1


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=["ab", "cd"], max_tokens=3, temperature=0, n=1, echo=True)
    assert [c.index for c in answer.choices] == [0, 1]
    assert answer.choices[0].text.startswith("ab") and answer.choices[1].text.startswith("cd")


def test_errors_are_the_sdks_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        ask(client, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-nope", messages=QUESTION)  # type: ignore[arg-type]
    assert [m.id for m in client.models.list()] == ["demo"]


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Rome"]
    days: int = pydantic.Field(le=9, ge=1)


def test_tool_calls_by_the_sdks_helpers(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {
        "model": "demo",
        "messages": QUESTION,
        "max_tokens": 200,
        "seed": 2,
        "tool_choice": "required",
        "tools": [openai.pydantic_function_tool(Weather)],
        "parallel_tool_calls": False,
    }
    choice = client.chat.completions.parse(**body).choices[0]
    (call,) = choice.message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather) and choice.finish_reason == "tool_calls"
    with client.chat.completions.stream(**body) as stream:
        kinds = {event.type for event in stream}
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds


def test_async_client_that_leaves_aborts(demo: Server) -> None:
    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=demo.url + "/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model="demo",
                messages=QUESTION,
                stream=True,
                max_tokens=1500,  # type: ignore[arg-type]
                extra_body={"ignore_eos": True},
            )
            async for _ in stream:
                break
            await stream.close()

    asyncio.run(leave())
    demo.wait_idle()


def test_chat_is_template_plus_generate_plus_decode(demo: Server, demo_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_dir)
    messages = [*QUESTION, {"role": "assistant", "content": "85"}, {"role": "user", "content": "Reverse: abc"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    params = {"temperature": 0.8, "seed": 3, "max_tokens": 16}
    chat = demo.post("/v1/chat/completions", {"messages": messages, "return_token_ids": True, **params}).json()
    tokens = demo.generate(ids, **params)
    assert chat["prompt_token_ids"] == ids
    assert chat["choices"][0]["token_ids"] == tokens["choices"][0]["token_ids"]
    text = tokenizer.decode(tokens["choices"][0]["token_ids"], skip_special_tokens=True)
    assert chat["choices"][0]["message"]["content"] == text
