"""Loops of forced tool calls with the OpenAI SDK, on a chat template that adds up contents as text.

Such templates are common: they take no null, and they show no tools.  A call that was forced has a content of null, and
its message is sent back as the SDK has it.
"""

from __future__ import annotations

import json
from typing import Any

import openai
from report import Report

MESSAGES = [{"role": "user", "content": "What is 47 + 38?"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
NAMED = {"type": "function", "function": {"name": "weather"}}
FLAT = [{"type": "function", "name": "weather", "parameters": CITY}]
TURNS = 2


def called(name: str, arguments: str) -> bool:
    return name == "weather" and json.loads(arguments)["city"] in ("Oslo", "Rome")


def by_chat(report: Report, client: openai.OpenAI, choice: Any, dump: Any, what: str) -> None:
    messages: list[Any] = list(MESSAGES)
    for turn in range(1, TURNS + 1):
        answer = client.chat.completions.create(
            model="demo",
            messages=messages,
            tools=TOOLS,
            tool_choice=choice,
            seed=turn,
            extra_body={"max_tool_calls": 3},
        )
        message = answer.choices[0].message
        calls = message.tool_calls
        report.check(
            f"chat, {what}, turn {turn}: {len(calls)} calls",
            message.content is None
            and len(calls) <= 3
            and all(called(call.function.name, call.function.arguments) for call in calls),
        )
        messages += [dump(message), *({"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in calls)]
    report.check(
        "the results are answered", client.chat.completions.create(model="demo", messages=messages, max_tokens=4)
    )


def by_stream(report: Report, client: openai.OpenAI) -> None:
    messages: list[Any] = list(MESSAGES)
    for turn in range(1, TURNS + 1):
        with client.chat.completions.stream(model="demo", messages=messages, tools=TOOLS, tool_choice=NAMED) as stream:
            message = stream.get_final_completion().choices[0].message
        [call] = message.tool_calls
        report.check(f"chat, streamed, turn {turn}", called(call.function.name, call.function.arguments))
        sent = message.model_dump(exclude={"parsed"}, exclude_unset=True)
        for tool_call in sent["tool_calls"]:
            tool_call["function"].pop("parsed_arguments", None)
        messages += [sent, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]


def by_responses(report: Report, client: openai.OpenAI) -> None:
    items: list[Any] = list(MESSAGES)
    for turn in range(1, TURNS + 1):
        answer = client.responses.create(
            model="demo", input=items, tools=FLAT, tool_choice="required", max_tool_calls=2
        )
        calls = [item for item in answer.output if item.type == "function_call"]
        report.check(
            f"responses, turn {turn}: {len(calls)} calls",
            0 < len(calls) <= 2 == answer.max_tool_calls and all(called(call.name, call.arguments) for call in calls),
        )
        items += answer.output
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
    answer = client.responses.create(model="demo", input=items, max_output_tokens=16)
    report.check("the results are answered", answer.output)


def refusals(report: Report, client: openai.OpenAI) -> None:
    try:
        client.chat.completions.create(model="demo", messages=MESSAGES, tools=TOOLS)
    except openai.BadRequestError as error:
        report.check("free calls need a template that shows tools", "--chat-template FILE" in str(error))
    else:
        report.check("free calls must be refused", False)


def main() -> None:
    report = Report()
    client = openai.OpenAI(base_url=report.url + "/v1", api_key="none", max_retries=0)
    for choice, what in (("required", "required"), (NAMED, "named")):
        by_chat(report, client, choice, lambda message: message, f"{what}, the SDK's message")
        by_chat(report, client, choice, lambda message: message.model_dump(), f"{what}, all fields")
        by_chat(report, client, choice, lambda message: message.model_dump(exclude_none=True), f"{what}, no nulls")
    by_stream(report, client)
    by_responses(report, client)
    refusals(report, client)
    report.done("openai")


if __name__ == "__main__":
    main()
