"""The OpenAI SDK's responses, unmodified, against the demo model: its types hold, and the answers are chat's."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from tests.e2e.server import Server

QUESTION = "What is 47 + 38?"
ASK: dict[str, Any] = {"model": "demo", "input": QUESTION}
EVENT = pydantic.TypeAdapter[Any](ResponseStreamEvent)


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: Literal["Oslo", "Rome"]


TOOL = {"type": "function", "name": "Weather", "parameters": Weather.model_json_schema(), "strict": True}
FORCED: dict[str, Any] = ASK | {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
OPTIONS: list[dict[str, Any]] = [
    {"input": QUESTION, "temperature": 0},
    {
        "input": QUESTION,
        "seed": 5,
        "max_output_tokens": 9,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "return_token_ids": True,
    },
    {
        "input": [{"role": "user", "content": "?"}],
        "instructions": "x",
        "seed": 2,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "Weather"},
    },
]


@pytest.fixture
def client(demo: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=demo.url + "/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


@pytest.mark.parametrize("body", OPTIONS, ids=range(len(OPTIONS)))
def test_replies_and_events_are_of_the_sdks_types(demo: Server, body: dict[str, Any]) -> None:
    reply = demo.post("/v1/responses", body).json()
    Response.model_validate(reply)
    text = demo.post("/v1/responses", body | {"stream": True}).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    for event in events:
        EVENT.validate_python(event)
    last = events[-1]["response"]
    assert [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in last["output"]] == [
        {k: v for k, v in item.items() if k not in ("id", "call_id")} for item in reply["output"]
    ]
    assert last["status"] == reply["status"] and last.get("token_ids") == reply.get("token_ids")


def test_create_is_the_chat_it_describes(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        **ASK,
        instructions="Answer.",
        max_output_tokens=12,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
        extra_body={"seed": 5},
    )
    chat = client.chat.completions.create(
        model="demo",
        messages=[{"role": "system", "content": "Answer."}, {"role": "user", "content": QUESTION}],
        max_tokens=12,
        logprobs=True,
        top_logprobs=2,
        seed=5,
    )
    choice = chat.choices[0]
    assert choice.logprobs and choice.logprobs.content and chat.usage and answer.usage
    assert answer.output_text == choice.message.content
    (entries,) = [
        part.logprobs
        for item in answer.output
        if item.type == "message"
        for part in item.content
        if part.type == "output_text"
    ]
    assert entries and [e.to_dict() for e in entries] == [e.to_dict() for e in choice.logprobs.content]
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )


def test_parse_and_the_stream_helper(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(**ASK, text_format=Weather, max_output_tokens=300)
    assert isinstance(parsed.output_parsed, Weather)
    with client.responses.stream(**ASK, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == "85"


def test_a_call_and_its_result_by_the_sdks_helpers(client: openai.OpenAI) -> None:
    body = FORCED | {"tools": [openai.pydantic_function_tool(Weather)]}
    with client.responses.stream(**body, extra_body={"seed": 2}) as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_response().output
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds
    reply = client.responses.parse(**body, extra_body={"seed": 2})
    (again,) = reply.output
    assert call.type == again.type == "function_call" and call.arguments == again.arguments
    assert isinstance(again.parsed_arguments, Weather)
    result: Any = {"type": "function_call_output", "call_id": again.call_id, "output": "sunny"}
    history: Any = [{"role": "user", "content": QUESTION}, *reply.output, result]
    assert client.responses.create(model="demo", input=history, max_output_tokens=8, tools=[TOOL]).usage


def test_unsupported_calls_raise_the_sdks_exceptions(client: openai.OpenAI, demo: Server) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(**ASK, previous_response_id="resp_1")
    assert bad.value.param == "previous_response_id" and bad.value.code == "unsupported"
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="does not store responses"):
            call("resp_1")
    stream = client.responses.create(**ASK, stream=True, max_output_tokens=1500, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    demo.wait_idle()
