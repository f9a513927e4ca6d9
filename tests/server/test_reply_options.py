"""Options of servers whose clients cannot be changed, ids of requests and the engine's load in headers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.replies import good
from tests.server.scripted_llm import FORWARD_SECONDS, TOKEN_SECONDS, WAIT_SECONDS, endless, says
from tests.server.site import Site, site

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
    COMPLETIONS: {"prompt": "x", "max_tokens": 4},
    GENERATE: {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4}},
}
TIMES = ["time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
def test_usage_can_be_forced(path: str, options: dict[str, Any] | None) -> None:
    """peer-suites-3 (c): in vLLM, forced usage is in every chunk and at the end."""
    s = site(endless, enable_force_include_usage=True)
    events = s.events(path, BODIES[path] | {"stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts[-2:] == [4, 4] and events[-1]["choices"] == []
    assert all("usage" not in event for event in site(endless).events(path, BODIES[path]))


@pytest.mark.parametrize(("requested", "shows_ids"), [(None, True), (True, True), (False, False)])
def test_logprobs_can_always_name_ids(requested: bool | None, shows_ids: bool) -> None:
    s = site(says("ab"), return_tokens_as_token_ids=True)
    fields = {"return_tokens_as_token_ids": requested, "logprobs": 1}
    names = good(s.post(COMPLETIONS, BODIES[COMPLETIONS] | fields))["choices"][0]["logprobs"]["tokens"]
    chat = good(s.post(CHAT, BODIES[CHAT] | fields | {"logprobs": True}))["choices"][0]["logprobs"]["content"]
    for name in [*names, *(entry["token"] for entry in chat)]:
        assert name.startswith("token_id:") == shows_ids
    body = {"input": "x", "include": ["message.output_text.logprobs"], "return_tokens_as_token_ids": requested}
    content = good(s.post("/v1/responses", body))["output"][0]["content"][0]
    assert content["logprobs"][0]["token"].startswith("token_id:") == shows_ids


@pytest.mark.parametrize("path", BODIES)
def test_replies_can_have_the_times_of_their_request(path: str) -> None:
    """peer-suites-3 (c): names, units and meanings are vLLM's."""
    s = site(endless, enable_per_request_metrics=True)
    metrics = good(s.post(path, BODIES[path]))["metrics"]
    assert list(metrics) == TIMES
    assert metrics["queue_time_ms"] == 1000 * WAIT_SECONDS
    assert metrics["time_to_first_token_ms"] == 1000 * FORWARD_SECONDS
    assert metrics["generation_time_ms"] == 3000 * TOKEN_SECONDS and metrics["mean_itl_ms"] == 1000 * TOKEN_SECONDS
    assert metrics["tokens_per_second"] == pytest.approx(4 / (FORWARD_SECONDS + 3 * TOKEN_SECONDS))
    events = s.events(path, BODIES[path] | {"stream_options": {"include_usage": True}})
    assert events[-1]["metrics"] == metrics and all("metrics" not in event for event in events[:-1])
    assert all("metrics" not in event for event in s.events(path, BODIES[path]))
    assert "metrics" not in site(endless).post(path, BODIES[path]).json()


def test_the_times_of_one_token_and_of_several_choices() -> None:
    s = site(endless, enable_per_request_metrics=True)
    metrics = good(s.post(COMPLETIONS, BODIES[COMPLETIONS] | {"max_tokens": 1}))["metrics"]
    assert metrics["mean_itl_ms"] is None and metrics["generation_time_ms"] == 0.0
    for several in ({"n": 2}, {"prompt": ["x", "y"]}):
        assert "metrics" not in good(s.post(COMPLETIONS, BODIES[COMPLETIONS] | several))
    drafts = good(s.post(COMPLETIONS, BODIES[COMPLETIONS] | {"spec_decode_metrics": "summary"}))["metrics"]
    assert set(drafts) == {*TIMES, "speculative_decoding"}
    alone = good(site(endless).post(COMPLETIONS, BODIES[COMPLETIONS] | {"spec_decode_metrics": "summary"}))["metrics"]
    assert list(alone) == ["speculative_decoding"]


REQUESTS = [
    ("GET", "/health", 200),
    ("GET", "/v1/models", 200),
    ("GET", "/metrics", 200),
    ("GET", "/nowhere", 404),
    ("PUT", CHAT, 405),
    ("POST", "/tokenize", 400),
    ("POST", "/pause", 200),
    ("GET", "/", 404),
]


@pytest.mark.parametrize(("method", "path", "status"), REQUESTS)
def test_every_reply_has_the_id_of_its_request(method: str, path: str, status: int) -> None:
    """peer-suites-3 A24."""
    s = site()
    answer = s.request(method, path, headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.headers.get_list("x-request-id")) == (status, ["mine"])
    assert "x-request-id" not in s.request(method, path).headers
    named = site(enable_request_id_headers=True).request(method, path).headers.get_list("x-request-id")
    assert len(named) == 1 and len(named[0]) == 32


def test_ids_of_refused_and_of_odd_requests() -> None:
    s = site(api_key=["k"], enable_request_id_headers=True)
    assert s.get("/v1/models", headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
    odd = s.get("/health", headers={"X-Request-Id": "x" * 300})
    assert odd.status_code == 200 and len(odd.headers["x-request-id"]) == 32
    assert "x-request-id" not in site().get("/health", headers={"X-Request-Id": "x" * 300}).headers
    body = BODIES[CHAT] | {"request_id": "of the body"}
    answer = site(enable_request_id_headers=True).post(CHAT, body)
    assert answer.headers.get_list("x-request-id") == ["of the body"]


@pytest.mark.some(4)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [*BODIES, "/v1/responses"])
def test_the_load_is_in_a_header_on_request(path: str, stream: bool) -> None:
    """peer-suites-3 A23: gateways of Kubernetes read it."""
    s = site(endless)
    body = BODIES.get(path, {"input": "x"}) | {"stream": stream}
    value = s.post(path, body, headers={"endpoint-load-metrics-format": "text"}).headers["endpoint-load-metrics"]
    assert value == "TEXT named_metrics.kv_cache_usage_perc=0.0, named_metrics.num_requests_waiting=0.0"
    value = s.post(path, body, headers={"endpoint-load-metrics-format": "JSON"}).headers["endpoint-load-metrics"]
    form, _, report = value.partition(" ")
    assert form == "JSON"
    assert json.loads(report) == {"named_metrics": {"kv_cache_usage_perc": 0.0, "num_requests_waiting": 0.0}}
    for headers in ({}, {"endpoint-load-metrics-format": "BIN"}):
        assert "endpoint-load-metrics" not in s.post(path, body, headers=headers).headers


@pytest.mark.parametrize("path", ["/v1/models", "/llm/v1/models", "/llm/llm/v1/models"])
def test_a_root_path_need_not_be_stripped(path: str) -> None:
    """peer-suites-3 (c).  uvicorn puts the root path before the path of every request."""
    s = site(root_path="/llm", admin_api_key=["k"])

    def status(method: str, where: str) -> int:
        return rooted(s, method, "/llm" + where).status_code

    assert status("GET", path) == (404 if path.startswith("/llm/llm") else 200)
    assert status("POST", path.replace("v1/models", "pause")) == (404 if path.startswith("/llm/llm") else 401)
    assert status("GET", "/llmv1/models") == 404


@pytest.mark.parametrize(
    ("method", "path", "text"),
    [
        ("GET", "/foo", "there is no route /foo"),
        ("GET", "/llm/foo", "there is no route /foo"),
        ("GET", "/llm/chat/completions", "there is no route /chat/completions; did you mean /v1/chat/completions?"),
        ("GET", "/llm/v1/completions", "/v1/completions takes POST, not GET"),
    ],
)
def test_errors_below_a_root_path_name_the_route(method: str, path: str, text: str) -> None:
    answer = rooted(site(root_path="/llm"), method, "/llm" + path)
    assert answer.json()["error"]["message"] == text


def rooted(s: Site, method: str, path: str) -> httpx.Response:
    """The reply to a request whose server has a root path."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(s.app, root_path="/llm")
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path)

    return asyncio.run(send())
