"""What people build on the OpenAI SDK or beside it: litellm, pydantic-ai, instructor, LangChain and the Agents SDK.

Each as its own documentation has it, with the server's address as its base URL.  None of them needs anything else: what
they add to bodies must be taken, and what cannot be had must come to their users as an error that names the field.
"""

from __future__ import annotations

import asyncio
from typing import Any

import agents
import instructor
import langchain_openai
import litellm
import openai
import pydantic_ai
from pydantic import BaseModel, ConfigDict
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from report import Report

QUESTION = "What is 47 + 38?"
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
LIMIT = 300  # tokens: the model likes white space, of which the grammar lets it write a bounded amount


class Verdict(BaseModel):
    model_config = ConfigDict(extra="forbid")  # or the schema allows others, and the model writes them
    right: bool


def with_litellm(report: Report, base: str) -> None:
    for provider in ("openai", "hosted_vllm"):
        common: dict[str, Any] = {
            "model": f"{provider}/demo", "api_base": base, "api_key": "none", "messages": MESSAGES, "max_retries": 0,
        }  # fmt: skip
        answer = litellm.completion(**common, temperature=0, user="u", reasoning_effort="low")
        report.check(f"litellm {provider}: chat", answer.choices[0].message.content == "85")
        options = {"seed": 5, "max_tokens": 16, "logprobs": True, "top_logprobs": 2, "stop": ["x"]}
        whole = litellm.completion(**common, **options)
        chunks = list(litellm.completion(**common, **options, **USAGE))
        built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
        same = built.choices[0].message.content == whole.choices[0].message.content
        report.check("a stream, put together", same and built.usage.total_tokens == whole.usage.total_tokens)
        report.check("logprobs", len(whole.choices[0].logprobs.content[0].top_logprobs) == 2)
        report.check("choices", len(litellm.completion(**common, n=3, max_completion_tokens=4).choices) == 3)
        made = litellm.completion(**common, max_tokens=LIMIT, response_format=Verdict).choices[0].message.content
        report.check("a schema from a class", Verdict.model_validate_json(made))
        for wrong in ({"temperature": 7}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"}):
            try:
                litellm.completion(**common, **wrong)
            except litellm.BadRequestError as error:
                report.check(f"refusal of {list(wrong)}", next(iter(wrong)) in str(error))
            else:
                report.check(f"{wrong} must be refused", False)
    text: dict[str, Any] = {
        "model": "text-completion-openai/demo", "api_base": base, "api_key": "none", "max_tokens": 4, "temperature": 0,
    }  # fmt: skip
    scored = litellm.text_completion(prompt="ab", echo=True, logprobs=2, **text).choices[0]
    report.check("litellm: a completion", scored.text.startswith("ab") and scored.logprobs.token_logprobs[0] is None)
    report.check("several prompts", len(litellm.text_completion(prompt=["ab", "cd"], **text).choices) == 2)


def with_pydantic_ai(report: Report, base: str) -> None:
    model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=base, api_key="none"))
    settings: Any = {"temperature": 0, "seed": 1, "max_tokens": 20, "parallel_tool_calls": False}
    agent = pydantic_ai.Agent(model, system_prompt="Answer.")
    first = agent.run_sync(QUESTION, model_settings=settings)
    report.check("pydantic-ai: an agent", first.output == "85")
    again = agent.run_sync(QUESTION, model_settings=settings, message_history=first.all_messages())
    report.check("a history", again.output)
    native = pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(Verdict))
    report.check("native output", isinstance(native.run_sync(QUESTION, model_settings={"max_tokens": LIMIT}).output,
                                             Verdict))  # fmt: skip
    try:
        pydantic_ai.Agent(model, output_type=Verdict).run_sync(QUESTION)  # by a tool call
    except pydantic_ai.exceptions.ModelHTTPError as error:
        report.check("output by a tool call", error.status_code == 400 and "tool calls are not supported" in str(error))
    else:
        report.check("a tool call must be refused", False)


def with_instructor(report: Report, base: str) -> None:
    sdk = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
    client = instructor.from_openai(sdk, mode=instructor.Mode.JSON_SCHEMA)
    common: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "response_model": Verdict, "max_tokens": LIMIT}
    report.check("instructor: a model", isinstance(client.chat.completions.create(**common), Verdict))
    report.check("a partial model", list(client.chat.completions.create_partial(**common))[-1].right in (True, False))


def with_langchain(report: Report, base: str) -> None:
    common: dict[str, Any] = {"model": "demo", "base_url": base, "api_key": "none", "max_retries": 0}
    chat = langchain_openai.ChatOpenAI(**common, temperature=0, logprobs=True, top_logprobs=2, stream_usage=True)
    whole = chat.invoke(QUESTION)
    report.check("langchain: invoke", whole.content == "85" and whole.usage_metadata["output_tokens"] == 3)
    chunks = list(chat.stream(QUESTION))
    total = sum(chunks[1:], chunks[0])
    report.check("a stream, added up", total.content == "85" and total.usage_metadata["output_tokens"] == 3)
    own = [part.response_metadata["logprobs"]["content"] for part in (whole, total)]
    report.check("its logprobs", own[0] == own[1])
    report.check("a batch", [answer.content for answer in chat.batch([QUESTION] * 3)] == ["85"] * 3)
    structured = langchain_openai.ChatOpenAI(**common, max_tokens=LIMIT).with_structured_output(
        Verdict, method="json_schema"
    )
    report.check("structured output", isinstance(structured.invoke(QUESTION), Verdict))
    completes = langchain_openai.OpenAI(**common, temperature=0, max_tokens=4)
    report.check("a completion, streamed", "".join(completes.stream("ab")) == completes.invoke("ab"))
    twice = langchain_openai.OpenAI(**common, max_tokens=4, n=2, best_of=2)
    report.check("as many choices as the best are of", len(twice.generate(["ab"]).generations[0]) == 2)


async def with_agents(report: Report, base: str) -> None:
    agents.set_tracing_disabled(True)
    sdk = openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0)
    common: dict[str, Any] = {"name": "a", "model": agents.OpenAIChatCompletionsModel("demo", openai_client=sdk)}
    settings = agents.ModelSettings(temperature=0, include_usage=True, store=False, metadata={"a": "b"})
    agent = agents.Agent(instructions="Answer.", model_settings=settings, **common)
    report.check("agents: run", (await agents.Runner.run(agent, QUESTION)).final_output == "85")
    streamed = agents.Runner.run_streamed(agent, QUESTION)
    kinds = [event.type async for event in streamed.stream_events()]
    report.check("agents: streamed", streamed.final_output == "85" and "raw_response_event" in kinds)
    report.check("its usage", streamed.context_wrapper.usage.output_tokens == 3)
    short = agents.ModelSettings(max_tokens=LIMIT)
    judge = agents.Agent(output_type=Verdict, model_settings=short, **common)
    report.check("output of a type", isinstance((await agents.Runner.run(judge, QUESTION)).final_output, Verdict))
    await sdk.close()


def main() -> None:
    report = Report()
    litellm.suppress_debug_info = True
    base = report.url + "/v1"
    with_litellm(report, base)
    with_pydantic_ai(report, base)
    with_instructor(report, base)
    with_langchain(report, base)
    asyncio.run(with_agents(report, base))
    report.done("litellm", "pydantic-ai-slim", "instructor", "langchain-openai", "openai-agents", "openai")


if __name__ == "__main__":
    main()
