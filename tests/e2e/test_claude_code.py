"""What Claude Code sends, recorded, against a server with room for it: streams, its prefix cached, exact counts."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Served
from tests.threads import ServerThread
from tests.tiny_models import tiny_config, write_checkpoint
from tokserve.checkpoint import DEMO_DIR

RECORDED = json.loads((Path(__file__).parent / "claude_code.json").read_text())
CONTEXT = 32768


def bodies() -> list[dict[str, Any]]:
    """The recorded ones, with texts as long as they were."""

    def text(actual: re.Match[str]) -> str:
        return ("some words " * (int(actual[1]) // 11 + 1))[: int(actual[1])]

    first, *later = RECORDED["requests"]
    requests = [first, *(first | one for one in later)]
    return [json.loads(re.sub(r"\((\d+) characters\)", text, json.dumps(body))) for body in requests]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("long")
    write_checkpoint(directory, tiny_config("qwen3", dtype="float32", max_position_embeddings=CONTEXT), seed=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_DIR / name, directory)
    with ServerThread(directory, "--served-model-name", "demo") as one:
        yield one


def post(server: Served, path: str, body: dict[str, Any]) -> httpx.Response:
    answer = httpx.post(f"{server.url}{path}?beta=true", json=body, headers=RECORDED["headers"], timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def message(answer: httpx.Response) -> dict[str, int]:
    """The last usage of a stream that has all its events in order."""
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") > 0
    usage: dict[str, int] = events[0]["message"]["usage"] | events[-2]["usage"]
    return usage


def prompt_of(usage: dict[str, int]) -> int:
    return usage["input_tokens"] + usage["cache_read_input_tokens"]


@pytest.mark.slow
def test_a_conversation_is_served_and_finds_its_prefix_cached(server: Served) -> None:
    known = 0  # tokens of the prompt before
    for number, body in enumerate(bodies()):
        body["system"][0]["text"] = f"x-anthropic-billing-header: cc_version=2.1.328.{number}; cch={number}abcd;"
        answer = post(server, "/v1/messages", body)
        assert set(answer.headers["x-ignored-fields"].split(", ")) >= {"metadata", "context_management"}
        usage = message(answer)
        counted = {name: body[name] for name in ("model", "messages", "system", "tools", "thinking")}
        assert post(server, "/v1/messages/count_tokens", counted).json()["input_tokens"] == prompt_of(usage) > 8000
        assert usage["cache_read_input_tokens"] >= 0.99 * known
        known = prompt_of(usage)


def test_where_it_comes_from_is_named() -> None:
    assert RECORDED["version"] and len(bodies()) == 3
    assert {"tool_use", "thinking"} <= {block["type"] for block in bodies()[1]["messages"][2]["content"]}
