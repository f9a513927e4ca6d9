"""What people build on the OpenAI SDK or beside it: litellm, pydantic-ai, instructor, LangChain and the Agents SDK.

Each as its own documentation has it, with the server's address as its base URL.  None of them needs anything else: what
they add to bodies must be taken, and what cannot be had must come to their users as an error that names the field.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import agents
import instructor
import langchain_openai
import litellm
import openai
import pydantic_ai
from pydantic import BaseModel, ConfigDict
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from report import Report

QUESTION = "What is 47 + 38?"
MESSAGES = [{"role": "user", "content": QUESTION}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CITIES = ("Oslo", "Rome")
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
LIMIT = 300  # tokens: the model likes white space, of which the grammar lets it write a bounded amount
# what the output begins with says whether it is an answer of its form or a call
ANSWER, CALL = {"90": 20}, {"27": 20}  # the demo model's "{" and "<"

City = Literal["Oslo", "Rome"]


class Verdict(BaseModel):
    model_config = ConfigDict(extra="forbid")  # or the schema allows others, and the model writes them
    right: bool


def with_litellm(report: Report, base: str) -> None:
    for provider in ("openai", "hosted_vllm"):
        common: dict[str, Any] = {
            "model": f"{provider}/demo",
            "api_base": base,
            "api_key": "none",
            "messages": MESSAGES,
            "max_retries": 0,
        }
        answer = litellm.completion(**common, temperature=0, user="u", reasoning_effort="low")
        report.check(f"litellm {provider}: chat", answer.choices[0].message.content == "85")
        options = {"seed": 5, "max_tokens": 16, "logprobs": True, "top_logprobs": 2, "stop": ["x"]}
        reply = litellm.completion(**common, **options)
        chunks = list(litellm.completion(**common, **options, **USAGE))
        built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
        same = built.choices[0].message.content == reply.choices[0].message.content
        report.check("a stream, put together", same and built.usage.total_tokens == reply.usage.total_tokens)
        report.check("logprobs", len(reply.choices[0].logprobs.content[0].top_logprobs) == 2)
        report.check("choices", len(litellm.completion(**common, n=3, max_completion_tokens=4).choices) == 3)
        result = litellm.completion(**common, max_tokens=LIMIT, response_format=Verdict).choices[0].message.content
        report.check("a schema from a class", Verdict.model_validate_json(result))
        litellm_calls(report, common)
        try:
            litellm.completion(**common, temperature=-1)
        except litellm.BadRequestError as error:
            report.check("a refusal", "temperature" in str(error))
        else:
            report.check("a temperature of 7 must be refused", False)
    text: dict[str, Any] = {
        "model": "text-completion-openai/demo",
        "api_base": base,
        "api_key": "none",
        "max_tokens": 4,
        "temperature": 0,
    }
    scored = litellm.text_completion(prompt="ab", echo=True, logprobs=2, **text).choices[0]
    report.check("litellm: a completion", scored.text.startswith("ab") and scored.logprobs.token_logprobs[0] is None)
    report.check("several prompts", len(litellm.text_completion(prompt=["ab", "cd"], **text).choices) == 2)


def litellm_calls(report: Report, common: dict[str, Any]) -> None:
    forced: dict[str, Any] = {**common, "tools": [TOOL], "tool_choice": "required", "max_tokens": LIMIT, "seed": 1}
    choice = litellm.completion(**forced).choices[0]
    call = choice.message.tool_calls[0].function
    report.check("a forced call", call.name == "weather" and json.loads(call.arguments)["city"] in CITIES)
    report.check("its end", choice.finish_reason == "tool_calls" and choice.message.content is None)
    built = litellm.stream_chunk_builder(list(litellm.completion(**forced, **USAGE)), messages=MESSAGES)
    streamed = [item.function for item in built.choices[0].message.tool_calls]
    reply = [item.function for item in choice.message.tool_calls]
    report.check("calls streamed", [(f.name, f.arguments) for f in streamed] == [(f.name, f.arguments) for f in reply])
    result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "sunny"}
    history = [*MESSAGES, choice.message.model_dump(), result]
    again = litellm.completion(**(common | {"messages": history, "tools": [TOOL], "max_tokens": 8}))
    report.check("its result", again.usage.prompt_tokens > built.usage.prompt_tokens)
    for free in ("auto", "none"):
        answer = litellm.completion(**common, temperature=0, tools=[TOOL], tool_choice=free).choices[0].message
        report.check(f"tools, {free}", answer.content == "85" and not answer.tool_calls)
    either = {**common, "tools": [TOOL], "response_format": Verdict, "max_tokens": LIMIT, "temperature": 0}
    answer = litellm.completion(**either, logit_bias=ANSWER).choices[0].message
    report.check("a schema beside tools", Verdict.model_validate_json(answer.content) and not answer.tool_calls)
    [call] = litellm.completion(**either, logit_bias=CALL, parallel_tool_calls=False).choices[0].message.tool_calls
    report.check("a call beside a schema", json.loads(call.function.arguments)["city"] in CITIES)


def with_pydantic_ai(report: Report, base: str) -> None:
    model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=base, api_key="none"))
    settings: Any = {"temperature": 0, "seed": 1, "max_tokens": 20, "parallel_tool_calls": False}
    agent = pydantic_ai.Agent(model, system_prompt="Answer.")
    first = agent.run_sync(QUESTION, model_settings=settings)
    report.check("pydantic-ai: an agent", first.output == "85")
    again = agent.run_sync(QUESTION, model_settings=settings, message_history=first.all_messages())
    report.check("a history", again.output)
    native = pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(Verdict))
    report.check(
        "native output", isinstance(native.run_sync(QUESTION, model_settings={"max_tokens": LIMIT}).output, Verdict)
    )
    by_call = pydantic_ai.Agent(model, output_type=Verdict)
    report.check("output by a tool call", isinstance(by_call.run_sync(QUESTION).output, Verdict))

    async def streamed() -> Any:
        async with by_call.run_stream(QUESTION) as stream:
            return await stream.get_output()

    report.check("the same, streamed", isinstance(asyncio.run(streamed()), Verdict))
    able = pydantic_ai.Agent(model, system_prompt="Answer.", tools=[weather])
    report.check("an agent with tools", able.run_sync(QUESTION, model_settings=settings).output == "85")
    called: list[City] = []

    def forecast(city: City) -> str:
        """The weather of a city."""
        called.append(city)
        return f"sunny in {city}"

    both = pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(Verdict), tools=[forecast])
    settings |= {"max_tokens": LIMIT, "logit_bias": ANSWER}
    report.check(
        "native output beside tools", isinstance(both.run_sync(QUESTION, model_settings=settings).output, Verdict)
    )
    once, settings["logit_bias"] = pydantic_ai.UsageLimits(request_limit=1), CALL
    try:
        both.run_sync(QUESTION, model_settings=settings, usage_limits=once)
    except pydantic_ai.UsageLimitExceeded:
        report.check("a tool beside native output", len(called) == 1 and called[0] in CITIES)


def weather(city: City) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def with_instructor(report: Report, base: str) -> None:
    sdk = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
    client = instructor.from_openai(sdk, mode=instructor.Mode.JSON_SCHEMA)
    common: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "response_model": Verdict, "max_tokens": LIMIT}
    report.check("instructor: a model", isinstance(client.chat.completions.create(**common), Verdict))
    report.check("a partial model", list(client.chat.completions.create_partial(**common))[-1].right in (True, False))
    by_call = instructor.from_openai(sdk)  # which names the function
    report.check("a model by a tool call", isinstance(by_call.chat.completions.create(**common), Verdict))
    parts = list(by_call.chat.completions.create_partial(**common))
    report.check("the same, in parts", parts[-1].right in (True, False))


def with_langchain(report: Report, base: str) -> None:
    common: dict[str, Any] = {"model": "demo", "base_url": base, "api_key": "none", "max_retries": 0}
    chat = langchain_openai.ChatOpenAI(**common, temperature=0, logprobs=True, top_logprobs=2, stream_usage=True)
    reply = chat.invoke(QUESTION)
    report.check("langchain: invoke", reply.content == "85" and reply.usage_metadata["output_tokens"] == 3)
    chunks = list(chat.stream(QUESTION))
    total = sum(chunks[1:], chunks[0])
    report.check("a stream, added up", total.content == "85" and total.usage_metadata["output_tokens"] == 3)
    logprobs = [part.response_metadata["logprobs"]["content"] for part in (reply, total)]
    report.check("its logprobs", logprobs[0] == logprobs[1])
    report.check("a batch", [answer.content for answer in chat.batch([QUESTION] * 3)] == ["85"] * 3)
    structured = langchain_openai.ChatOpenAI(**common, max_tokens=LIMIT).with_structured_output(
        Verdict, method="json_schema"
    )
    report.check("structured output", isinstance(structured.invoke(QUESTION), Verdict))
    limited = langchain_openai.ChatOpenAI(**common, max_tokens=LIMIT, seed=1)
    by_call = limited.with_structured_output(Verdict, method="function_calling")
    report.check("output by a tool call", isinstance(by_call.invoke(QUESTION), Verdict))
    for choice in ("any", "weather"):
        bound = limited.bind_tools([TOOL], tool_choice=choice)
        result = bound.invoke(QUESTION)
        report.check(
            f"bound tools, {choice}", result.tool_calls[0]["args"]["city"] in CITIES and not result.invalid_tool_calls
        )
        pieces = list(bound.stream(QUESTION))
        added = [(c["name"], c["args"]) for c in sum(pieces[1:], pieces[0]).tool_calls]
        report.check("the same, added up", added == [(call["name"], call["args"]) for call in result.tool_calls])
    report.check("bound tools", chat.bind_tools([TOOL]).invoke(QUESTION).content == "85")
    completes = langchain_openai.OpenAI(**common, temperature=0, max_tokens=4)
    report.check("a completion, streamed", "".join(completes.stream("ab")) == completes.invoke("ab"))
    twice = langchain_openai.OpenAI(**common, max_tokens=4, n=2, best_of=2)
    report.check("as many choices as the best are of", len(twice.generate(["ab"]).generations[0]) == 2)


def with_responses(report: Report, base: str) -> None:
    """The Responses API by those who can speak it; the Agents SDK does unless it is told otherwise."""
    common: dict[str, Any] = {"api_base": base, "api_key": "none", "model": "openai/demo", "input": QUESTION}
    answer = litellm.responses(**common, temperature=0)
    report.check("responses: litellm", answer.output[0].content[0].text == "85" and answer.usage.output_tokens == 3)
    kinds = [event.type for event in litellm.responses(**common, temperature=0, stream=True)]
    report.check("its events", kinds[0] == "response.created" and kinds[-1] == "response.completed")
    model = OpenAIResponsesModel("demo", provider=OpenAIProvider(base_url=base, api_key="none"))
    agent = pydantic_ai.Agent(model, instructions="Answer.", tools=[weather])
    settings: Any = {"temperature": 0, "max_tokens": 20}
    first = agent.run_sync(QUESTION, model_settings=settings)
    report.check("responses: pydantic-ai", first.output == "85")
    again = agent.run_sync(QUESTION, model_settings=settings, message_history=first.all_messages())
    report.check("a history", again.output)
    judge = pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(Verdict))
    report.check(
        "native output", isinstance(judge.run_sync(QUESTION, model_settings={"max_tokens": LIMIT}).output, Verdict)
    )
    by_call = pydantic_ai.Agent(model, output_type=Verdict)
    report.check("output by a tool call", isinstance(by_call.run_sync(QUESTION).output, Verdict))
    chat: dict[str, Any] = {"model": "demo", "base_url": base, "api_key": "none", "use_responses_api": True}
    langchain = langchain_openai.ChatOpenAI(**chat, temperature=0, max_retries=0)
    reply = langchain.invoke(QUESTION)
    report.check("responses: langchain", reply.text == "85" and reply.usage_metadata["output_tokens"] == 3)
    chunks = list(langchain.stream(QUESTION))
    report.check("a stream, added up", sum(chunks[1:], chunks[0]).text == "85")
    structured = langchain_openai.ChatOpenAI(**chat, max_tokens=LIMIT).with_structured_output(Verdict)
    report.check("structured output", isinstance(structured.invoke(QUESTION), Verdict))


async def with_agents(report: Report, base: str, kind: Any) -> None:
    agents.set_tracing_disabled(True)
    sdk = openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0)
    common: dict[str, Any] = {"name": "a", "model": kind("demo", openai_client=sdk)}
    settings = agents.ModelSettings(temperature=0, include_usage=True, store=False, metadata={"a": "b"})
    agent = agents.Agent(instructions="Answer.", model_settings=settings, **common)
    report.check(f"agents, {kind.__name__}: run", (await agents.Runner.run(agent, QUESTION)).final_output == "85")
    streamed = agents.Runner.run_streamed(agent, QUESTION)
    kinds = [event.type async for event in streamed.stream_events()]
    report.check("agents: streamed", streamed.final_output == "85" and "raw_response_event" in kinds)
    report.check("its usage", streamed.context_wrapper.usage.output_tokens == 3)
    short = agents.ModelSettings(max_tokens=LIMIT)
    judge = agents.Agent(output_type=Verdict, model_settings=short, **common)
    report.check("output of a type", isinstance((await agents.Runner.run(judge, QUESTION)).final_output, Verdict))
    called = []

    @agents.function_tool
    def forecast(city: City) -> str:
        """The weather of a city."""
        called.append(city)
        return f"sunny in {city}"

    forced = agents.ModelSettings(tool_choice="required", max_tokens=LIMIT, parallel_tool_calls=False)
    able = agents.Agent(tools=[forecast], model_settings=forced, **common)
    ran = await agents.Runner.run(able, QUESTION)
    kinds = [item.type for item in ran.new_items]
    report.check(
        "a tool is run, and its result answered",
        called[0] in CITIES and kinds[:2] == ["tool_call_item", "tool_call_output_item"],
    )
    streamed = agents.Runner.run_streamed(able, QUESTION)
    names = [event.name async for event in streamed.stream_events() if event.type == "run_item_stream_event"]
    report.check("the same, streamed", names[:2] == ["tool_called", "tool_output"] and len(called) == 2)
    called.clear()
    for bias, count in ((ANSWER, 0), (CALL, 1)):
        settings = agents.ModelSettings(
            temperature=0, max_tokens=LIMIT, parallel_tool_calls=False, extra_body={"logit_bias": bias}
        )
        both = agents.Agent(tools=[forecast], output_type=Verdict, model_settings=settings, **common)
        try:
            ran = await agents.Runner.run(both, QUESTION, max_turns=1)
            report.check("an output type beside tools", isinstance(ran.final_output, Verdict) and not called)
        except agents.MaxTurnsExceeded:
            report.check("a tool beside an output type", len(called) == count == 1 and called[0] in CITIES)
    await sdk.close()


def main() -> None:
    report = Report()
    litellm.suppress_debug_info = True
    base = report.url + "/v1"
    with_litellm(report, base)
    with_pydantic_ai(report, base)
    with_instructor(report, base)
    with_langchain(report, base)
    with_responses(report, base)
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        asyncio.run(with_agents(report, base, kind))
    report.done("litellm", "pydantic-ai-slim", "instructor", "langchain-openai", "openai-agents", "openai")


if __name__ == "__main__":
    main()
