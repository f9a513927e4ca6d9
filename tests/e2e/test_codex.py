"""What Codex sends, recorded, against a scripted model: each kind of tool is called, and the conversation goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.agent_prompts import PATCH, REMEMBERED
from tests.clients.agent_script import Script, model_with_context
from tests.replies import named_events
from tokserve.testing import ScriptedServer, scripted_server
from tokserve.text.tokenizer import Tokenizer

RECORDED = json.loads((Path(__file__).parent / "codex.json").read_text())
CONVERSATIONS = {entry["request"]["model"]: entry for entry in RECORDED["conversations"]}


def bodies(model: str) -> list[dict[str, Any]]:
    """The requests of a conversation, with texts as long as they were."""

    def text(length: re.Match[str]) -> str:
        return ("some words " * (int(length[1]) // 11 + 1))[: int(length[1])]

    entry = CONVERSATIONS[model]
    first = entry["request"]
    requests = [first, *(first | {"input": first["input"] + more} for more in entry["later_input"])]
    return [json.loads(re.sub(r"\((\d+) characters\)", text, json.dumps(body))) for body in requests]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    model = model_with_context(tmp_path_factory.mktemp("agents") / "model")
    with scripted_server(Script(Tokenizer.load(model)), model, served_model_name=[*CONVERSATIONS]) as running:
        yield running


def post(server: ScriptedServer, model: str, body: dict[str, Any]) -> tuple[httpx.Response, list[dict[str, Any]]]:
    """A streamed answer and its events, which are all there."""
    headers = CONVERSATIONS[model]["headers"]
    answer = httpx.post(f"{server.url}/v1/responses", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    events = named_events(answer.text)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.completed"
    return answer, events


@pytest.mark.some(1)
@pytest.mark.parametrize("model", CONVERSATIONS)
def test_a_conversation_is_served_and_finds_its_prefix_cached(server: ScriptedServer, model: str) -> None:
    known = 0  # tokens of the prompt before
    requests = bodies(model)
    for number, body in enumerate(requests):
        answer, events = post(server, model, body)
        response = events[-1]["response"]
        usage = response["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] >= 0.99 * known
        known = usage["input_tokens"]
        assert known > 10_000
        hosted = [f"tools[{i}]" for i, tool in enumerate(body.get("tools", ())) if tool["type"] == "web_search"]
        ignored = set(answer.headers["x-ignored-fields"].split(", "))
        assert ignored >= {"prompt_cache_key", "client_metadata", *hosted}
        assert not [name for name in ignored - {*hosted} if name.startswith(("tools", "input"))]
        if number == 0:
            check_call(model, response["output"], events)
    text = response["output"][-1]["content"][0]["text"]
    assert (text == REMEMBERED) is (model != "gpt-5.5")  # a patch prints nothing


def check_call(model: str, output: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
    """The call of the first turn is the item that Codex's tool has."""
    _, call = output
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta")
    if model == "demo":
        assert (call["type"], call["name"]) == ("function_call", "exec_command") and not deltas
    elif model == "gpt-5.5":
        assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", PATCH) and deltas
    else:
        assert (call["type"], call["namespace"], call["name"]) == ("custom_tool_call", "functions", "exec")
        assert call["input"] == deltas and "tools.exec_command(" in deltas


def test_the_recording_has_all_kinds_of_tools_and_items() -> None:
    kinds: set[str] = set()
    for model in CONVERSATIONS:
        *_, last = bodies(model)
        kinds |= {item["type"] for item in last["input"]}
        tools = [*last.get("tools", ()), *(tool for item in last["input"] for tool in item.get("tools", ()))]
        kinds |= {f"tool {tool['type']}" for tool in tools}
    assert kinds >= {"function_call_output", "custom_tool_call_output", "additional_tools"}
    assert kinds >= {f"tool {kind}" for kind in ("function", "custom", "namespace", "tool_search", "web_search")}
    assert RECORDED["version"]
