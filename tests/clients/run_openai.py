"""The OpenAI SDK as it comes from PyPI, sync and async, against a demo server; runs under 2.x and 3.x alike."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
from report import Report

QUESTION = "What is 47 + 38?"
MESSAGES = [{"role": "user", "content": QUESTION}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
STREAM_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def chat(report: Report, client: Any) -> None:
    create = client.chat.completions.create
    answer = create(model="demo", messages=MESSAGES, temperature=0)
    report.check(
        "chat answers", answer.choices[0].message.content == "85" and answer.choices[0].finish_reason == "stop"
    )
    options: dict[str, Any] = {"seed": 5, "max_completion_tokens": 16, "logprobs": True, "top_logprobs": 3, "n": 3}
    expected = create(model="demo", messages=MESSAGES, **options)
    texts, entries, ends = [""] * 3, [[] for _ in range(3)], [None] * 3
    usage = None
    for chunk in create(model="demo", messages=MESSAGES, **options, **STREAM_USAGE):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            entries[choice.index] += choice.logprobs.content if choice.logprobs else []
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    report.check("a stream's texts", texts == [choice.message.content for choice in expected.choices])
    report.check("a stream's logprobs", entries == [choice.logprobs.content for choice in expected.choices])
    report.check("a stream's ends", ends == [choice.finish_reason for choice in expected.choices])
    report.check("a stream's usage", usage.completion_tokens == expected.usage.completion_tokens)
    report.check("logprobs have their alternatives", all(len(e.top_logprobs) == 3 for es in entries for e in es))
    stopped = create(model="demo", messages=MESSAGES, temperature=0, stop=["5"])
    report.check("stop strings", stopped.choices[0].message.content == "8")
    parts = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
    report.check(
        "content parts", create(model="demo", messages=parts, temperature=0).choices[0].message.content == "85"
    )
    extra = create(model="demo", messages=MESSAGES, temperature=0, extra_body={"return_token_ids": True, "top_k": 5})
    report.check("extensions in extra_body", extra.prompt_token_ids and extra.choices[0].token_ids)
    with client.chat.completions.stream(model="demo", messages=MESSAGES, temperature=0) as stream:
        kinds = [event.type for event in stream]
        report.check("the stream helper", stream.get_final_completion().choices[0].message.content == "85")
    report.check("its events", kinds[0] == "chunk" and "content.done" in kinds)
    raw = client.chat.completions.with_raw_response.create(
        model="demo", messages=MESSAGES, max_tokens=1, extra_headers={"X-Request-Id": "mine"}
    )
    report.check("raw responses", raw.headers["x-request-id"] == "mine" and raw.parse().id == "chatcmpl-mine")
    with client.chat.completions.with_streaming_response.create(
        model="demo", messages=MESSAGES, temperature=0, stream=True
    ) as response:
        lines = [line for line in response.iter_lines() if line]
    report.check("streaming responses", lines[-1] == "data: [DONE]")


def responses(report: Report, client: Any) -> None:
    common: dict[str, Any] = {"model": "demo", "input": QUESTION}
    answer = client.responses.create(**common, temperature=0, store=False, include=["reasoning.encrypted_content"])
    report.check("responses", answer.output_text == "85" and answer.status == "completed")
    report.check(
        "their usage", answer.usage.output_tokens == 3 and answer.usage.input_tokens_details.cached_tokens >= 0
    )
    options: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 8}
    expected = client.responses.create(**common, **options, extra_body={"seed": 5})
    events = list(client.responses.create(**common, **options, extra_body={"seed": 5}, stream=True))
    report.check("their events", [event.sequence_number for event in events] == list(range(len(events))))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    report.check("their text", text == expected.output_text == events[-1].response.output_text)
    shown = [reply.output[0].content[0].logprobs for reply in (expected, events[-1].response)]
    report.check("their logprobs", shown[0] == shown[1] and len(shown[0][0].top_logprobs) == 2)
    with client.responses.stream(**common, temperature=0) as stream:
        kinds = [event.type for event in stream]
        report.check("their stream helper", stream.get_final_response().output_text == "85")
    report.check("its last event", kinds[-1] == "response.completed")
    tool = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
    forced: dict[str, Any] = common | {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    call = client.responses.create(**forced, max_output_tokens=300).output[0]
    report.check("a call", call.type == "function_call" and json.loads(call.arguments)["city"] in ("Oslo", "Rome"))
    messages = [
        {"role": "user", "content": QUESTION},
        call,
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    again = client.responses.create(model="demo", input=messages, tools=[tool], max_output_tokens=8)
    report.check("its result", again.usage.input_tokens > answer.usage.input_tokens)
    for kind, options in (
        (openai.BadRequestError, {"previous_response_id": "resp_1"}),
        (openai.BadRequestError, {"background": True}),
        (openai.NotFoundError, {"model": "gpt-9"}),
        (openai.BadRequestError, {"temperature": -1, "stream": True}),
    ):
        try:
            client.responses.create(**common | options)
        except kind as error:
            report.check(f"{kind.__name__} names {error.param}", error.param in options)
        else:
            report.check(f"{options} must be refused", False)
    try:
        client.responses.retrieve("resp_1")
    except openai.NotFoundError as error:
        report.check("responses are not stored", error.code == "not_stored")


def completions(report: Report, client: Any) -> None:
    create = client.completions.create
    for prompt in ("ab", ["ab", "cd"], [5, 6], [[5, 6], [7]]):
        answer = create(model="demo", prompt=prompt, max_tokens=3, n=2, seed=1)
        several = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
        report.check(f"a prompt as {prompt!r}", [c.index for c in answer.choices] == list(range(2 * several)))
    scored = create(model="demo", prompt="abc", max_tokens=0, echo=True, logprobs=2).choices[0]
    columns = scored.logprobs
    report.check(
        "scoring", scored.text == "abc" and columns.token_logprobs[0] is None and columns.token_logprobs[1] < 0
    )
    expected = create(model="demo", prompt="abc", max_tokens=8, seed=3)
    stream = create(model="demo", prompt="abc", max_tokens=8, seed=3, **STREAM_USAGE)
    chunks = list(stream)
    joined = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    report.check("a stream of a completion", joined == expected.choices[0].text and chunks[-1].usage == expected.usage)


def errors(report: Report, client: Any) -> None:
    create = client.chat.completions.create
    for kind, options in (
        (openai.BadRequestError, {"temperature": -1}),
        (openai.NotFoundError, {"model": "gpt-9"}),
        (openai.BadRequestError, {"messages": []}),
        (openai.BadRequestError, {"stream": True, "top_p": 0}),
    ):
        try:
            create(**{"model": "demo", "messages": MESSAGES} | options)
        except kind as error:
            report.check(f"{kind.__name__} names {error.param}", error.param in options and error.type)
        else:
            report.check(f"{options} must be refused", False)
    try:
        client.embeddings.create(model="demo", input="x")
    except openai.BadRequestError as error:
        report.check("a model that generates makes no embeddings", error.code == "unsupported")
    else:
        report.check("embeddings of a model that generates must be refused", False)
    try:
        client.images.generate(model="demo", prompt="x")
    except openai.NotFoundError as error:
        report.check("routes that are not there", error.code == "unknown_route")
    else:
        report.check("an unknown route must be refused", False)
    names = [model.id for model in client.models.list()]
    report.check("models", names == ["demo"] and client.models.retrieve("demo").id == "demo")


async def concurrently(report: Report) -> None:
    async with openai.AsyncOpenAI(base_url=report.url + "/v1", api_key="none", max_retries=0) as client:
        create = client.chat.completions.create

        async def ask(a: int, b: int) -> bool:
            messages = [{"role": "user", "content": f"What is {a} + {b}?"}]
            stream = await create(model="demo", messages=messages, temperature=0, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            return text == str(a + b)

        right = await asyncio.gather(*[ask(10 + i, 40 - i) for i in range(30)])
        report.check("thirty streams at once add well", sum(right) >= 27)
        stream = await create(
            model="demo", messages=MESSAGES, stream=True, max_tokens=400, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        await stream.close()
        report.check("a stream that is left", True)


def main() -> None:
    report = Report()
    client = openai.OpenAI(base_url=report.url + "/v1", api_key="none", max_retries=0)
    chat(report, client)
    responses(report, client)
    completions(report, client)
    errors(report, client)
    asyncio.run(concurrently(report))
    report.done("openai")


if __name__ == "__main__":
    main()
