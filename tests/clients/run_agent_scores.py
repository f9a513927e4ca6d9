"""Agents of the OpenAI Agents SDK and pydantic-ai with fifty turns of a tool each, over a real small model: the turns
are a chain, and their logprobs are those of a score of their ids."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal
from urllib.request import Request, urlopen

import agents
import openai
import pydantic_ai
from agent_prompts import TURNS
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from report import Report

Place = Literal["here", "there", "far away"]
SAMPLING = {"temperature": 1.0, "max_tokens": 200, "parallel_tool_calls": False}
FORCED = {"tool_choice": "required"}


def seen_at(place: Place) -> str:
    """What is there."""
    return f"{place}: 🙂 naïve, 漢字\n"


def client(base: str, session: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{base}/sessions/{session}/v1", api_key="none", max_retries=0, timeout=600.0)


async def run_agents_sdk(base: str, session: str, kind: Any, *, stream: bool) -> None:
    """Run an agent that calls its tool until it may not go on."""
    sdk = client(base, session)
    settings = agents.ModelSettings(tool_choice="required", **SAMPLING)
    agent = agents.Agent(
        name="a",
        instructions="Look.",
        model=kind("demo", openai_client=sdk),
        tools=[agents.function_tool(seen_at)],
        model_settings=settings,
        reset_tool_choice=False,
    )
    try:
        if stream:
            streamed = agents.Runner.run_streamed(agent, "Look around.", max_turns=TURNS)
            async for _ in streamed.stream_events():
                pass
        else:
            await agents.Runner.run(agent, "Look around.", max_turns=TURNS)
    except agents.MaxTurnsExceeded:
        return
    finally:
        await sdk.close()
    raise SystemExit("FAILED: the agent has ended before its last turn")


async def run_pydantic_ai(base: str, session: str, kind: Any, *, stream: bool) -> None:
    """The same with pydantic-ai."""
    sdk = client(base, session)
    agent = pydantic_ai.Agent(
        kind("demo", provider=OpenAIProvider(openai_client=sdk)), instructions="Look.", tools=[seen_at]
    )
    limits = pydantic_ai.UsageLimits(request_limit=TURNS)
    settings: Any = SAMPLING | {"extra_body": FORCED}
    try:
        if stream:
            async with agent.run_stream_events("Look around.", usage_limits=limits, model_settings=settings) as events:
                async for _ in events:
                    pass
        else:
            await agent.run("Look around.", usage_limits=limits, model_settings=settings)
    except pydantic_ai.UsageLimitExceeded:
        return
    finally:
        await sdk.close()
    raise SystemExit("FAILED: the agent has ended before its last turn")


def load(url: str, body: Any = None) -> Any:
    content = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, content, {"content-type": "application/json"})) as answer:
        return json.load(answer)


def check_turns(report: Report, name: str, session: str) -> None:
    """Each turn continues the one before, and a score of all ids at once has the logprobs of all turns."""
    turns = load(f"{report.url}/sessions/{session}/tree")["turns"]
    parents = [turn["parent"] for turn in turns]
    report.check(f"{name}: {TURNS} turns are a chain", parents == [None, *(f"t{i}" for i in range(TURNS - 1))])
    (row,) = load(f"{report.url}/sessions/{session}/sequences")["sequences"]
    params = {"max_tokens": 0, "prompt_logprobs": 0, "prompt_logprobs_start": 1}
    body = {"token_ids": row["token_ids"], "sampling_params": params, "logprobs_format": "arrays"}
    scores = [0.0, *load(f"{report.url}/inference/v1/generate", body)["prompt_logprobs"]["token_logprobs"]]
    sampled = [index for index, counts in enumerate(row["loss_mask"]) if counts]
    equal = [row["logprobs"][index] == scores[index] for index in sampled]
    report.check(f"the logprobs of {len(sampled)} tokens are those of a score", len(equal) > TURNS and all(equal))


def main() -> None:
    report = Report()
    agents.set_tracing_disabled(True)
    for run, kinds in (
        (run_agents_sdk, (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel)),
        (run_pydantic_ai, (OpenAIResponsesModel, OpenAIChatModel)),
    ):
        for kind in kinds:
            for stream in (False, True):
                session = f"{run.__name__}-{kind.__name__}-{stream}"
                asyncio.run(run(report.url, session, kind, stream=stream))
                check_turns(report, session.replace("-", ", "), session)
    report.done("openai-agents", "pydantic-ai-slim", "openai")


if __name__ == "__main__":
    main()
