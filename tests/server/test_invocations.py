"""/invocations replies as the route whose body it gets (the contract of SageMaker's containers)."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.replies import good
from tests.server.scripted_llm import endless
from tests.server.site import Caller, site
from tokserve.checkpoint import DEMO_DIR
from tokserve.features.pooling.routes import inputs
from tokserve.features.pooling.routes.inputs import PooledPrompts, PoolingUsage

PATH = "/invocations"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "request_id": "r"}
TEXT: dict[str, Any] = {"prompt": "x", "max_tokens": 4, "request_id": "r"}
ROUTES = [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_body_is_answered_by_its_route(path: str, body: dict[str, Any]) -> None:
    """peer-suites-3 A11."""
    s = site(endless)
    replies = [good(s.post(where, body)) | {"created": 0} for where in (path, PATH)]
    assert replies[0] == replies[1]
    streams = [s.events(where, body) for where in (path, PATH)]
    direct, through = ([event["choices"] for event in events] for events in streams)
    assert direct == through
    packed = msgspec.msgpack.encode(body)
    headers = {"content-type": "application/msgpack"}
    assert good(s.post(PATH, content=packed, headers=headers))["choices"] == replies[0]["choices"]


def test_bodies_of_no_route_and_wrong_fields_are_refused_by_name() -> None:
    s = site(endless)
    for body, param in (({"input": "x"}, None), ({}, None), (CHAT | {"top_p": 7}, "top_p"), ([], None)):
        answer = s.post(PATH, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert "messages, prompt" in s.post(PATH, {"input": "x"}).json()["error"]["message"]
    assert s.post(PATH, content=b"x", headers={"content-type": "text/csv"}).status_code == 415
    assert site(endless, api_key=["k"]).post(PATH, CHAT).status_code == 401


def test_the_header_of_an_adapter_is_the_model() -> None:
    s = site(endless, enable_lora=True)
    s.llm.load_adapter("sql", "/p")
    headers = {"X-Amzn-SageMaker-Adapter-Identifier": "sql"}
    assert good(s.post(PATH, CHAT, headers=headers))["model"] == "sql"
    assert s.post(PATH, CHAT | {"model": "tiny"}, headers=headers).json()["error"]["param"] == "model"
    assert s.post(PATH, CHAT, headers={"X-Amzn-SageMaker-Adapter-Identifier": "x"}).status_code == 404


def test_a_server_that_pools_makes_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    async def pool(*_: Any) -> PooledPrompts:
        return PooledPrompts("key", [np.ones(64, "<f4").tobytes()], PoolingUsage(1, 1), {"X-Request-Id": "id"}, "0")

    monkeypatch.setattr(inputs, "pool", pool)
    s = site(runner="pooling", model=str(DEMO_DIR))
    s.llm.ready.facts["hidden_size"] = 64
    assert len(good(s.post(PATH, {"input": "ab"}))["data"][0]["embedding"]) == 64
    assert s.post(PATH, TEXT).status_code == 400


def test_a_client_that_leaves_aborts_its_invocation() -> None:
    async def run() -> None:
        s = site(endless)
        caller = Caller(s, PATH, CHAT | {"max_tokens": 400, "stream": True})
        await caller.wait_for(lambda one: len(one.writes) > 2)
        caller.hang_up()
        await caller.task
        assert s.llm.num_inflight == 0 and s.app.state.serving.bodies.held == 0

    asyncio.run(run())
