"""Coding agents from npm, unmodified, against a scripted model: each calls its shell, is continued and is interrupted.

Runs with this project's interpreter; the agents' programs are in the directory AGENTS_BIN.  Each agent has a home of
its own, which is removed at the end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

from report import Report

from tests.clients.agent_prompts import (
    AGAIN,
    COMMAND,
    ENDLESS,
    LONG,
    MAKE,
    PREFACE,
    PRINTED,
    REMEMBERED,
    REPORTED,
    RUN,
    TURNS,
    WRITTEN,
)
from tests.clients.relay import Exchange, relay
from tests.waiting import PATIENCE, until

BIN = Path(os.environ["AGENTS_BIN"])
ROUTES = ("/v1/responses", "/v1/messages", "/v1/chat/completions")
Command = Callable[[str, bool], list[str]]  # of a prompt, and whether the last conversation goes on


class Agent(NamedTuple):
    """An agent.

    `command`: its arguments.  `env`: its variables, and `files` those in its home, for the address of the server.
    `package`: its name in npm.  `route`: the one that it uses.  `sends`: headers that name the session, and are the
    same in all requests of a conversation.  `keys`: of its body.
    """

    name: str
    package: str
    route: str
    command: Command
    env: Callable[[str], Mapping[str, str]]
    files: Callable[[str], Mapping[str, str]]
    sends: Sequence[str]
    keys: frozenset[str]


def codex_files(url: str) -> dict[str, str]:
    """The provider, and no sandbox: the test runs in any container."""
    lines = (
        'model_provider = "tokserve"',
        'approval_policy = "never"',
        'sandbox_mode = "danger-full-access"',
        "[model_providers.tokserve]",
        'name = "tokserve"',
        f'base_url = "{url}/v1"',
        'wire_api = "responses"',
        "request_max_retries = 0",
        "stream_max_retries = 0",
    )
    return {".codex/config.toml": "\n".join(lines)}


def codex(model: str) -> Command:
    """The command of Codex.  What it knows of a model's name decides which tools it sends."""

    def command(prompt: str, again: bool) -> list[str]:
        start = ["codex", "exec", "--skip-git-repo-check", "--json", "-m", model]
        return [*start, *(["resume", "--last"] if again else []), prompt]

    return command


def opencode_files(url: str) -> dict[str, str]:
    """The provider as the AI SDK's package for servers with OpenAI's chat route."""
    model = {"name": "demo", "limit": {"context": 1_000_000, "output": 32_000}}
    options = {"baseURL": f"{url}/v1", "apiKey": "none"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "tokserve", "options": options, "models": {"demo": model}}
    config = {
        "model": "tokserve/demo",
        "small_model": "tokserve/demo",
        "autoupdate": False,
        "share": "disabled",
        "permission": {"bash": "allow"},
        "provider": {"tokserve": provider},
    }
    return {"work/opencode.json": json.dumps(config)}


def no_files(url: str) -> dict[str, str]:
    """No files: the agent reads variables."""
    return {}


CODEX_KEYS = frozenset(
    [
        "model",
        "stream",
        "input",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "reasoning",
        "store",
        "include",
        "prompt_cache_key",
        "client_metadata",
    ]
)
CODEX_HEADERS = ("session-id", "thread-id", "x-client-request-id")
CHAT_KEYS = frozenset(["model", "messages", "stream", "stream_options", "max_tokens"])
CODEX = Agent(
    "Codex", "@openai/codex", ROUTES[0], codex("demo"), lambda url: {}, codex_files, CODEX_HEADERS, CODEX_KEYS
)
AGENTS = (
    CODEX,
    Agent(
        "Claude Code",
        "@anthropic-ai/claude-code",
        ROUTES[1],
        lambda prompt, again: [
            *("claude", "-p", prompt, "--output-format", "stream-json", "--verbose", "--allowedTools", "Bash"),
            *(["--continue"] if again else []),
        ],
        lambda url: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "none",
            **dict.fromkeys(
                (
                    "ANTHROPIC_MODEL",
                    "ANTHROPIC_DEFAULT_OPUS_MODEL",
                    "ANTHROPIC_DEFAULT_SONNET_MODEL",
                    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
                ),
                "demo",
            ),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        no_files,
        ("x-claude-code-session-id",),
        frozenset(["model", "messages", "system", "tools", "metadata", "max_tokens", "thinking", "stream"]),
    ),
    Agent(
        "opencode",
        "opencode-ai",
        ROUTES[2],
        lambda prompt, again: ["opencode", "run", "--format", "json", *(["--continue"] if again else []), prompt],
        lambda url: {},
        opencode_files,
        ("x-session-id", "x-session-affinity"),
        CHAT_KEYS,
    ),
    Agent(
        "Qwen Code",
        "@qwen-code/qwen-code",
        ROUTES[2],
        lambda prompt, again: [
            *("qwen", "--auth-type", "openai", "--yolo", "--output-format", "stream-json"),
            *(["--continue"] if again else []),
            *("-p", prompt),
        ],
        lambda url: {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "demo"},
        no_files,
        (),
        CHAT_KEYS,
    ),
)
# Names that Codex knows: with one it has a patch as a custom tool and searches for tools, with the other all of its
# tools are in namespaces, and a custom tool runs JavaScript that calls them.
CODEX_MODELS = {"gpt-5.5": "custom", "gpt-6.2-sol": "namespace"}


class Home:
    """An agent's home and working directory, and its configuration for a server."""

    def __init__(self, agent: Agent, place: Path) -> None:
        self.work = place / "work"
        self.work.mkdir()
        self._agent, self._place = agent, place

    def start(self, url: str, prompt: str, *, again: bool = False) -> subprocess.Popen[str]:
        """Start the agent in a group of processes of its own."""
        for name, text in self._agent.files(url).items():
            path = self._place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        env = {name: os.environ[name] for name in ("LANG", "TERM", "NODE_EXTRA_CA_CERTS") if name in os.environ}
        env |= {"HOME": str(self._place), "PATH": f"{BIN}:{os.environ['PATH']}", "SHELL": "/bin/bash"}
        env |= self._agent.env(url)
        return subprocess.Popen(
            self._agent.command(prompt, again),
            cwd=self.work,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ask(self, url: str, prompt: str, *, again: bool = False, patience: float = PATIENCE) -> str:
        """What the agent prints until it ends."""
        process = self.start(url, prompt, again=again)
        try:
            out, errors = process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            end(process)
            raise
        if process.returncode:
            raise SystemExit(f"FAILED: {self._agent.name} ended with {process.returncode}\n{out}\n{errors}")
        return out


def end(process: subprocess.Popen[str], number: int = signal.SIGKILL) -> None:
    """Send a signal to the agent and to what it has started."""
    os.killpg(process.pid, number)


def load(url: str) -> dict[str, Any]:
    with urlopen(f"{url}/load") as answer:
        values: dict[str, Any] = json.load(answer)
    return values


def of_conversation(exchanges: Sequence[Exchange], route: str) -> list[Exchange]:
    """The requests with tools: others are for titles."""
    with_tools = [exchange for exchange in exchanges if exchange.path == route and exchange.body.get("tools")]
    codex_lite = [exchange for exchange in exchanges if exchange.path == route and route == ROUTES[0]]
    return with_tools or codex_lite


def check_agent(report: Report, agent: Agent, place: Path) -> None:
    home = Home(agent, place)
    with relay(report.url) as (url, exchanges):
        out = home.ask(url, RUN)
        report.check(f"{agent.name}: calls its shell, and sees what it printed", REPORTED in out)
        report.check("the text before the call", PREFACE in out and json.dumps(COMMAND)[1:-1] in out)
        first = of_conversation(exchanges, agent.route)
        out = home.ask(url, AGAIN, again=True)
        report.check("is continued", REMEMBERED in out)
    sent = of_conversation(exchanges, agent.route)
    report.check("no request is refused", {exchange.status for exchange in exchanges} == {200})
    report.check("the result of the call goes back", PRINTED in json.dumps([e.body for e in first[1:]]))
    report.check("and so does the first turn in the second", len(sent) > len(first) >= 2)
    report.check("all is streamed", all(e.body["stream"] and e.num_pieces > 3 for e in sent))
    report.check("its fields", all(agent.keys <= e.body.keys() for e in sent))
    for name in agent.sends:
        report.check(f"{name} names the session", len({e.headers[name] for e in sent}) == 1)
    if agent.sends:
        check_session(report, sent, agent.sends[0])
    process = home.start(report.url, ENDLESS)
    try:
        until(lambda: load(report.url)["running"] or process.poll() is not None, f"{agent.name} writes")
        report.check("it waits for more", process.poll() is None)
        until(lambda: is_freed(report.url, process), f"{agent.name} is interrupted")
        report.check("an interruption frees the request", load(report.url)["running"] == 0)
    finally:
        end_now(process)


def is_freed(url: str, process: subprocess.Popen[str]) -> bool:
    """Interrupt an agent, which while it starts may not take a signal; returns whether the server has no request."""
    with suppress(ProcessLookupError):
        end(process, signal.SIGINT)
    return not load(url)["server_load"]


def check_session(report: Report, sent: Sequence[Exchange], header: str) -> None:
    """Each turn of the session that the agent names continues the one before, but for its side calls."""
    with urlopen(f"{report.url}/sessions/{sent[0].headers[header]}/tree") as answer:
        turns = json.load(answer)["turns"]
    continued = [turn["parent"] for turn in turns if turn["parent"] is not None]
    report.check("its turns are a chain", len(set(continued)) == len(continued) == len(sent) - 1)


def check_long_run(report: Report, agent: Agent, place: Path) -> None:
    """Fifty calls of the shell in a session of the base URL: one chain of turns, besides the agent's side calls."""
    name = agent.package.rpartition("/")[2]
    out = Home(agent, place).ask(f"{report.url}/sessions/{name}", LONG, patience=10 * PATIENCE)
    report.check(f"{agent.name}: {TURNS} calls of its shell", REPORTED in out)
    with urlopen(f"{report.url}/sessions/{name}/tree") as answer:
        turns = json.load(answer)["turns"]
    parents = [turn["parent"] for turn in turns if turn["parent"] is not None]
    inner = {turn["turn_id"]: turn["parent"] for turn in turns}
    last, depth = next(reversed([turn["turn_id"] for turn in turns if turn["parent"] is not None])), 0
    while (last := inner[last]) is not None:
        depth += 1
    report.check(f"its {TURNS + 1} turns are a chain", depth == len(parents) == len(set(parents)) == TURNS)
    others = [turn["continues"] for turn in turns if turn["parent"] is None][1:]
    print(f"  {agent.name}: {len(others)} side calls {others}", flush=True)


def end_now(process: subprocess.Popen[str]) -> None:
    """End an agent that may have ended."""
    with suppress(ProcessLookupError):
        end(process)
    process.communicate()


def check_codex_tools(report: Report, model: str, kind: str, place: Path) -> None:
    """Codex with the tools that it sends for a model that it knows."""
    agent = CODEX._replace(name=f"Codex, {model}", command=codex(model))
    home = Home(agent, place)
    with relay(report.url) as (url, exchanges):
        out = home.ask(url, MAKE if kind == "custom" else RUN)
        if kind == "custom":
            report.check(f"{agent.name}: patches a file", (home.work / WRITTEN).read_text() == f"{PRINTED}\n")
        else:
            report.check(f"{agent.name}: runs a script of its tools", REPORTED in out)
        out = home.ask(url, AGAIN, again=True)
    last = of_conversation(exchanges, agent.route)[-1]
    report.check("no request is refused", {exchange.status for exchange in exchanges} == {200})
    kinds = [item["type"] for item in last.body["input"]]
    report.check("its call and its output go back", {"custom_tool_call", "custom_tool_call_output"} <= set(kinds))
    if kind == "custom":
        report.check("it searches for tools itself", "tool_search" in [tool["type"] for tool in last.body["tools"]])
        report.check("what only OpenAI runs is left out", [n for n in last.ignored if n.startswith("tools[")])
    else:
        tools = [tool["type"] for item in last.body["input"] for tool in item.get("tools", ())]
        report.check("its tools are items", "additional_tools" in kinds and set(tools) == {"namespace"})


def main() -> None:
    report = Report()
    for agent in AGENTS:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
            check_agent(report, agent, Path(place))
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
            check_long_run(report, agent, Path(place))
    for model, kind in CODEX_MODELS.items():
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
            check_codex_tools(report, model, kind, Path(place))
    packages = {agent.package: BIN.parent / agent.package / "package.json" for agent in AGENTS}
    versions = {name: json.loads(path.read_text())["version"] for name, path in packages.items()}
    report.done(others=versions)


if __name__ == "__main__":
    main()
