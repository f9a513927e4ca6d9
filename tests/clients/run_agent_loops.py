"""Agents written with the OpenAI Agents SDK and pydantic-ai, against a scripted model.

A tool is called, the conversation is continued, and an answer is interrupted.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.request import urlopen

import agents
import openai
import pydantic_ai
from agent_prompts import AGAIN, COMMAND, ENDLESS, MAKE, PATCH, PRINTED, REMEMBERED, REPORTED, RUN, WRITTEN
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from report import Report

PATIENCE = 120.0  # seconds; machines are busy
LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /(.|\\n)+/"}


def run_in_shell(command: str | list[str]) -> str:
    """What a command prints."""
    return subprocess.run(command, shell=isinstance(command, str), capture_output=True, text=True).stdout


async def until_idle(report: Report) -> None:
    """Until the server has no request."""
    end = time.monotonic() + PATIENCE
    while True:
        with urlopen(f"{report.url}/load") as answer:
            if not json.load(answer)["server_load"]:
                return
        if time.monotonic() > end:
            raise SystemExit("FAILED: a request that its client has left is still there")
        await asyncio.sleep(0.02)


class Editor:
    """Takes the changes of files that `apply_patch` asks for."""

    def __init__(self) -> None:
        self.changes: list[Any] = []

    def create_file(self, operation: Any) -> str:
        """Note the change; the other operations are the same."""
        self.changes.append(operation)
        return PRINTED

    update_file = delete_file = create_file


def shell_tools(calls: list[str]) -> dict[str, Callable[[], list[Any]]]:
    """The ways to give an agent of the Agents SDK a shell, by the type of the items of its calls; `calls`: takes the
    commands."""

    @agents.function_tool
    def run_command(command: str) -> str:
        """Runs a command."""
        calls.append(command)
        return run_in_shell(command)

    def local(request: Any) -> str:
        calls.append(request.data.action.command[-1])
        return run_in_shell(request.data.action.command)

    def several(request: Any) -> str:
        calls.extend(request.data.action.commands)
        return "\n".join(map(run_in_shell, request.data.action.commands))

    def in_namespace() -> list[Any]:
        return agents.tool_namespace(name="host", description="Of this machine.", tools=[run_command])

    return {
        "function_call": lambda: [run_command],
        "namespace": in_namespace,
        "local_shell_call": lambda: [agents.LocalShellTool(executor=local)],
        "shell_call": lambda: [agents.ShellTool(executor=several)],
    }


async def with_agents(report: Report, base: str, kind: Any) -> None:
    sdk = openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0)
    model = kind("demo", openai_client=sdk)
    calls: list[str] = []
    of_responses = kind is agents.OpenAIResponsesModel
    for item_type, tools in shell_tools(calls).items():
        if item_type != "function_call" and not of_responses:
            continue
        calls.clear()
        hosted = [agents.WebSearchTool()] if of_responses else []
        agent = agents.Agent(name="a", instructions="Help.", model=model, tools=[*tools(), *hosted])
        first = agents.Runner.run_streamed(agent, RUN)
        deltas = [event async for event in first.stream_events()]
        raw = [e for e in deltas if e.type == "raw_response_event"]
        report.check(f"{kind.__name__}, {item_type}: the shell is called", calls == [COMMAND])
        report.check("its output is reported", first.final_output == REPORTED)
        report.check("all is streamed", len(raw) > 20)
        history = [*first.to_input_list(), {"role": "user", "content": AGAIN}]
        second = await agents.Runner.run(agent, history)
        report.check("is continued", second.final_output == REMEMBERED)
    agent = agents.Agent(name="a", instructions="Help.", model=model)
    endless = agents.Runner.run_streamed(agent, ENDLESS)
    async for event in endless.stream_events():
        if event.type == "raw_response_event" and getattr(event.data, "delta", None):
            break
    endless.cancel()
    async for _ in endless.stream_events():
        pass
    await until_idle(report)
    report.check("an interruption frees the request")
    await sdk.close()


async def with_patches(report: Report, base: str) -> None:
    """The Agents SDK's tools for changes of files: one of a type of its own, and a custom one with a grammar."""
    sdk = openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0)
    model = agents.OpenAIResponsesModel("demo", openai_client=sdk)
    editor, inputs = Editor(), list[str]()

    async def take(_: Any, text: str) -> str:
        inputs.append(text)
        return PRINTED

    patch = [agents.ApplyPatchTool(editor=editor), agents.LocalShellTool(executor=lambda request: "")]
    custom = [agents.CustomTool(name="edit", description="Edits.", on_invoke_tool=take, format=LARK)]
    for name, tools in (("apply_patch", patch), ("custom", custom)):
        agent = agents.Agent(name="a", instructions="Help.", model=model, tools=tools)
        for streamed in (False, True):
            run = agents.Runner.run_streamed(agent, MAKE) if streamed else await agents.Runner.run(agent, MAKE)
            if streamed:
                _ = [event async for event in run.stream_events()]
            history = [*run.to_input_list(), {"role": "user", "content": AGAIN}]
            kinds = [item.get("type") for item in run.to_input_list()]
            kind = "apply_patch_call" if name == "apply_patch" else "custom_tool_call"
            report.check(f"{name}: its call and its output are items", {kind, f"{kind}_output"} <= set(kinds))
            again = await agents.Runner.run(agent, history)
            report.check("they go back", again.final_output == REMEMBERED)
    paths = [(change.type, change.path, change.diff) for change in editor.changes]
    report.check("apply_patch: the change", paths == [("create_file", WRITTEN, f"+{PRINTED}")] * 2)
    report.check("custom: its input is the text", inputs == [PATCH] * 2)
    await sdk.close()


async def with_pydantic_ai(report: Report, base: str, kind: Any) -> None:
    sdk = openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0)
    agent = pydantic_ai.Agent(kind("demo", provider=OpenAIProvider(openai_client=sdk)), instructions="Help.")
    calls: list[str] = []

    @agent.tool_plain
    def run_command(command: str) -> str:
        """Runs a command."""
        calls.append(command)
        return run_in_shell(command)

    pieces: list[str] = []
    async with agent.run_stream(RUN) as first:
        async for text in first.stream_text(delta=True, debounce_by=None):
            pieces.append(text)
    report.check(f"pydantic-ai, {kind.__name__}: text before a call ends a streamed run", len(pieces) > 5)
    run = await agent.run(RUN)
    report.check("the shell is called", calls[-1] == COMMAND and run.output == REPORTED)
    again = await agent.run(AGAIN, message_history=run.all_messages())
    report.check("is continued", again.output == REMEMBERED)
    async with agent.run_stream(ENDLESS) as endless:
        async for _ in endless.stream_text(delta=True, debounce_by=None):
            break
    await sdk.close()
    await until_idle(report)
    report.check("an interruption frees the request")


def main() -> None:
    report = Report()
    agents.set_tracing_disabled(True)
    base = report.url + "/v1"
    runs: list[Callable[[], Coroutine[Any, Any, None]]] = [
        lambda: with_agents(report, base, agents.OpenAIResponsesModel),
        lambda: with_agents(report, base, agents.OpenAIChatCompletionsModel),
        lambda: with_patches(report, base),
        lambda: with_pydantic_ai(report, base, OpenAIResponsesModel),
        lambda: with_pydantic_ai(report, base, OpenAIChatModel),
    ]
    for run in runs:
        asyncio.run(run())
    report.done("openai-agents", "pydantic-ai-slim", "openai")


if __name__ == "__main__":
    main()
