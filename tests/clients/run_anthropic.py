"""Anthropic's SDK as it comes from PyPI, sync and async, against a demo server; and bodies like Claude Code's."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import anthropic
import httpx2 as httpx
import pydantic
from report import Report

QUESTION = "What is 47 + 38?"
GREEDY = {"temperature": 0}  # which this version of the SDK has no parameter for
ASK: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 32,
    "messages": [{"role": "user", "content": QUESTION}],
    "extra_body": GREEDY,
}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"name": "weather", "description": "The weather of a city.", "input_schema": CITY}
FORCED: dict[str, Any] = ASK | {
    "tools": [TOOL],
    "max_tokens": 300,
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}
MESSAGE_EVENTS = {
    "message_start",
    "content_block_start",
    "content_block_delta",
    "text",
    "content_block_stop",
    "message_delta",
    "message_stop",
}


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Rome"]


def messages(report: Report, client: Any) -> None:
    create = client.messages.create
    answer = create(**ASK)
    report.check("a message", answer.content[0].text == "85" and answer.stop_reason == "end_turn")
    report.check("its type", isinstance(answer, anthropic.types.Message) and answer.role == "assistant")
    anthropic.types.Message.model_validate(answer.to_dict())
    report.check("its usage", answer.usage.output_tokens == 3 and answer.usage.cache_read_input_tokens is not None)
    report.check("its request id", answer._request_id and answer.id == f"msg_{answer._request_id}")
    report.check("max_tokens", create(**ASK | {"max_tokens": 1}).stop_reason == "max_tokens")
    stopped = create(**ASK, stop_sequences=["x", "5"])
    report.check(
        "stop sequences",
        (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("8", "stop_sequence", "5"),
    )
    parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}]}]
    report.check("blocks", create(**ASK | {"messages": parts}).content[0].text == "85")
    turns = [*ASK["messages"], answer.to_param(), {"role": "user", "content": "Reverse the word apple."}]
    several = create(**ASK | {"messages": turns}, system=[{"type": "text", "text": "Answer."}])
    report.check("a system prompt and several turns", several.usage.input_tokens > answer.usage.input_tokens)
    begun = create(**ASK | {"messages": [*ASK["messages"], {"role": "assistant", "content": "8"}]})
    report.check("a turn that is continued", begun.content[0].text == "5")
    extra = create(**ASK | {"extra_body": GREEDY | {"return_token_ids": True}}, metadata={"user_id": "u"})
    report.check("extensions in extra_body", len(extra.token_ids) == 3 and extra.prompt_token_ids)
    raw = client.messages.with_raw_response.create(**ASK, metadata={"user_id": "u"})
    report.check(
        "raw responses", raw.headers["x-ignored-fields"] == "metadata" and raw.parse().content == answer.content
    )
    thought = create(**ASK | {"max_tokens": 2000}, thinking={"type": "enabled", "budget_tokens": 1024})
    report.check("thinking, which this model does not do", thought.content[-1].text == "85")
    beta = client.beta.messages.create(**ASK, betas=["no-such-beta-2025-01-01", "interleaved-thinking-2025-05-14"])
    report.check("betas", beta.content[0].text == "85")


def streams(report: Report, client: Any) -> None:
    reply = client.messages.create(**ASK)
    events = list(client.messages.create(**ASK, stream=True))
    kinds = [event.type for event in events]
    report.check("a stream", kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"])
    with client.messages.stream(**ASK) as stream:
        seen = {event.type for event in stream}
        final = stream.get_final_message()
    report.check("the events of the stream helper", seen == MESSAGE_EVENTS)
    report.check("its message", final.content[0].text == "85" and final.stop_reason == reply.stop_reason)
    counts = (final.usage.input_tokens + final.usage.cache_read_input_tokens, final.usage.output_tokens)
    usage = reply.usage
    report.check("its usage", counts == (usage.input_tokens + usage.cache_read_input_tokens, usage.output_tokens))
    with client.messages.stream(**ASK) as stream:
        report.check("its texts", "".join(stream.text_stream) == "85" == stream.get_final_text())
    with client.messages.stream(**FORCED) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "input_json"]
        call = stream.get_final_message().content[0]
    report.check("its calls", call.type == "tool_use" and snapshots[-1] == call.input and call.input["city"])
    with client.messages.stream(**ASK | {"max_tokens": 200, "extra_body": {"ignore_eos": True}}) as stream:
        next(iter(stream))
    report.check("a stream that is left")


def tools(report: Report, client: Any) -> None:
    reply = client.messages.create(**FORCED)
    [call] = reply.content
    report.check("a forced call", call.type == "tool_use" and call.name == "weather" and call.input["city"])
    report.check("its stop reason", reply.stop_reason == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    history = [*ASK["messages"], reply.to_param(), {"role": "user", "content": [result]}]
    again = client.messages.create(**ASK | {"messages": history}, tools=[TOOL])
    report.check("its result", again.usage.input_tokens > reply.usage.input_tokens)
    named = client.messages.create(**FORCED | {"tool_choice": {"type": "tool", "name": "weather"}})
    report.check("a named call", named.content[0].name == "weather" and named.stop_reason == "tool_use")
    free = client.messages.create(**ASK, tools=[TOOL], tool_choice={"type": "auto"})
    report.check("tools that are offered", free.stop_reason in ("end_turn", "tool_use", "max_tokens"))
    none = client.messages.create(**ASK, tools=[TOOL], tool_choice={"type": "none"})
    report.check("tools that are forbidden", all(block.type == "text" for block in none.content))

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"sunny in {city}"

    runner = client.beta.messages.tool_runner(
        model="demo", max_tokens=64, tools=[weather], messages=ASK["messages"], max_iterations=2
    )
    report.check("the tool runner", [message.role for message in runner])
    form = {"type": "json_schema", "schema": CITY}
    shaped = client.messages.create(**ASK | {"max_tokens": 200}, output_config={"format": form})
    report.check("structured output", json.loads(shaped.content[0].text)["city"] in ("Oslo", "Rome"))
    parsed = client.messages.parse(**ASK | {"max_tokens": 200}, output_format=Weather)
    report.check("parse", isinstance(parsed.parsed_output, Weather))
    with client.messages.stream(**ASK | {"max_tokens": 200}, output_format=Weather) as stream:
        report.check("parse of a stream", isinstance(stream.get_final_message().parsed_output, Weather))


def models(report: Report, client: Any) -> None:
    [model] = client.models.list().data
    report.check("models", model.id == "demo" == client.models.retrieve("demo").id)


def counts(report: Report, client: Any) -> None:
    fields = {name: ASK[name] for name in ("model", "messages")}
    for more in ({}, {"system": "Answer."}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": {"type": "any"}}):
        counted = client.messages.count_tokens(**fields, **more).input_tokens
        usage = client.messages.create(**ASK | {"max_tokens": 300}, **more).usage
        report.check(f"a count with {list(more)}", counted == usage.input_tokens + usage.cache_read_input_tokens)
    beta = client.beta.messages.count_tokens(**fields, betas=["token-counting-2024-11-01"])
    report.check("what would be cleared", beta.context_management.original_input_tokens == beta.input_tokens)


def errors(report: Report, client: Any, url: str) -> None:
    create = client.messages.create
    cases: tuple[tuple[Any, dict[str, Any], str, str], ...] = (
        (anthropic.BadRequestError, {"max_tokens": 0}, "invalid_request_error", "max_tokens"),
        (
            anthropic.BadRequestError,
            {"extra_body": {"temperature": -1}, "stream": True},
            "invalid_request_error",
            "temperature",
        ),
        (
            anthropic.BadRequestError,
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "url"}}]}]},
            "invalid_request_error",
            "messages[0].content[0].source.type",
        ),
        (anthropic.NotFoundError, {"model": "claude"}, "not_found_error", "claude"),
    )
    for kind, fields, name, word in cases:
        try:
            create(**ASK | fields)
        except kind as error:
            details = error.body["error"]
            report.check(f"{kind.__name__} of {list(fields)}", details["type"] == name and word in details["message"])
        else:
            report.check(f"{fields} must be refused", False)
    tries: list[int] = []

    def overloaded(request: Any) -> Any:
        tries.append(1)
        if len(tries) < 3:
            error = {"type": "error", "error": {"type": "overloaded_error", "message": "x"}}
            return httpx.Response(503, json=error, headers={"retry-after": "0.01"}, request=request)
        passed = httpx.post(f"{url}/v1/messages", content=request.read(), headers={"content-type": "application/json"})
        return httpx.Response(passed.status_code, content=passed.content, headers={"content-type": "application/json"})

    retrying = anthropic.Anthropic(
        base_url=url, api_key="none", http_client=httpx.Client(transport=httpx.MockTransport(overloaded))
    )
    report.check("retries", retrying.messages.create(**ASK).content[0].text == "85" and len(tries) == 3)


async def many(report: Report, url: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:

        async def one(seed: int) -> str:
            async with client.messages.stream(**ASK | {"extra_body": GREEDY | {"seed": seed}}) as stream:
                return str(await stream.get_final_text())

        texts = await asyncio.gather(*(one(seed) for seed in range(20)))
    report.check("twenty streams at once", texts == ["85"] * 20)


def claude_code(report: Report, url: str) -> None:
    """The shape of Claude Code's requests: a hash before the system prompt, cache marks, many betas."""
    reads = []
    for number in range(2):
        body = {
            "model": "demo",
            "max_tokens": 64,
            "stream": True,
            "temperature": 1,
            "system": [
                {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.278.{number}; cch={number}abcd;"},
                {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "Be brief. " * 40, "cache_control": {"type": "ephemeral", "ttl": "1h"}},
            ],
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "<system-reminder>\nToday.\n</system-reminder>"},
                        {"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}},
                    ],
                }
            ],
            "tools": [TOOL | {"input_schema": {"$schema": "http://json-schema.org/draft-07/schema#", **CITY}}],
            "metadata": {"user_id": "user_x_account__session_y"},
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "medium"},
        }
        headers = {
            "anthropic-version": "2023-06-01",
            "x-api-key": "none",
            "x-app": "cli",
            "x-stainless-retry-count": "0",
            "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
            "anthropic-dangerous-direct-browser-access": "true",
        }
        answer = httpx.post(f"{url}/v1/messages?beta=true", json=body, headers=headers, timeout=60)
        lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        report.check("a body of Claude Code", answer.status_code == 200 and events[-1]["type"] == "message_stop")
        reads.append(events[0]["message"]["usage"]["cache_read_input_tokens"])
    report.check("its second prompt is cached", reads[1] > 50)
    count = {name: body[name] for name in ("model", "messages", "tools", "system")}
    answer = httpx.post(f"{url}/v1/messages/count_tokens?beta=true", json=count, headers=headers)
    report.check("its count", answer.json()["input_tokens"] > 50)


def main() -> None:
    report = Report()
    with anthropic.Anthropic(base_url=report.url, api_key="none", max_retries=0) as client:
        messages(report, client)
        streams(report, client)
        tools(report, client)
        models(report, client)
        counts(report, client)
        errors(report, client, report.url)
    asyncio.run(many(report, report.url))
    claude_code(report, report.url)
    report.done("anthropic")


if __name__ == "__main__":
    main()
