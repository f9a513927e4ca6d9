"""Events are whole lines also to clients that split at more than the line ends of SSE: `str.splitlines`, httpx."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.site import Site, chat_site

SEPARATED = "a\x85b\u2028c\u2029d\x0be\x0cf\x1cg\x1dh\x1ei é😀"
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "logprobs": True},
    "/v1/completions": {"prompt": SEPARATED, "echo": True, "logprobs": 1, "max_tokens": 40},
    "/v1/responses": {"input": "hi", "include": ["message.output_text.logprobs"]},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 40},
    "/inference/v1/generate": {
        "token_ids": [5],
        "output_mode": "text",
        "sampling_params": {"max_tokens": 40, "logprobs": 0},
    },
    "/generate": {"text": "hi", "return_logprob": True, "return_text_in_logprobs": True},
}


@pytest.fixture(scope="module")
def server() -> Site:
    return chat_site(SEPARATED, sglang_api=True)


@pytest.mark.parametrize("route", BODIES)
def test_an_event_is_one_line_to_every_client(server: Site, route: str) -> None:
    """serving-faults F14."""
    answer = server.post(route, BODIES[route] | {"stream": True})
    assert answer.status_code == 200, answer.text
    lines = answer.content.decode().splitlines()
    assert lines == answer.content.decode().split("\n")[: len(lines)]
    values = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    texts = json.dumps([json.loads(value) for value in values if value != "[DONE]"])
    for separator in "\x85\u2028\u2029":
        assert json.dumps(separator)[1:-1] in texts


def test_the_text_of_a_stream_is_that_of_the_whole_reply(server: Site) -> None:
    body = {"messages": MESSAGES}
    full = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    deltas = [choice["delta"] for event in server.events("/v1/chat/completions", body) for choice in event["choices"]]
    assert full == SEPARATED == "".join(delta.get("content", "") for delta in deltas)


@pytest.mark.parametrize("route", BODIES)
def test_no_proxy_keeps_events_back(server: Site, route: str) -> None:
    """serving-faults F16: nginx with its defaults sends a stream at its end."""
    headers = server.post(route, BODIES[route] | {"stream": True}).headers
    assert headers["x-accel-buffering"] == "no" and headers["cache-control"] == "no-cache"
