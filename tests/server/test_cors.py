"""Pages of other origins use the server from a browser: preflights, replies, streams, errors, disconnects."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.server.scripted_llm import endless
from tests.server.site import Caller, Site, site
from tokserve.base.errors import StartError
from tokserve.config import Config
from tokserve.config.resolve import resolve

PAGE = "http://page.example:3000"
CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
ALLOW = "access-control-allow-origin"


def preflight(s: Site, path: str = CHAT, origin: str = PAGE, method: str = "POST") -> httpx.Response:
    headers = {"Origin": origin, "Access-Control-Request-Method": method}
    headers["Access-Control-Request-Headers"] = "authorization, content-type, x-stainless-lang"
    return s.request("OPTIONS", path, headers=headers)


def test_without_the_option_no_page_is_told_anything() -> None:
    s = site()
    assert preflight(s).status_code == 405
    answer = s.post(CHAT, BODY, headers={"Origin": PAGE})
    assert answer.status_code == 200 and not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.parametrize("origins", [["*"], [PAGE, "null"]])
def test_a_preflight_needs_no_key_and_the_request_does(origins: list[str]) -> None:
    """serving-faults, refusals: browser front ends."""
    s = site(allowed_origins=origins, api_key=["k"])
    answer = preflight(s)
    assert answer.status_code == 200
    assert answer.headers[ALLOW] == ("*" if "*" in origins else PAGE)
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "authorization" in answer.headers["access-control-allow-headers"]
    refused = s.post(CHAT, BODY, headers={"Origin": PAGE})
    assert refused.status_code == 401 and refused.headers[ALLOW] == answer.headers[ALLOW]
    headers = {"Origin": PAGE, "Authorization": "Bearer k", "X-Request-Id": "r"}
    reply = s.post(CHAT, BODY, headers=headers)
    assert reply.status_code == 200 and reply.headers[ALLOW] == answer.headers[ALLOW]
    assert "X-Request-Id" in reply.headers["access-control-expose-headers"]


def test_other_pages_are_not_told_that_they_may() -> None:
    s = site(allowed_origins=[PAGE])
    for origin in ("http://evil.example", "http://page.example:3001", "null"):
        refused = preflight(s, origin=origin)
        assert refused.status_code == 400 and ALLOW not in refused.headers
        assert ALLOW not in s.post(CHAT, BODY, headers={"Origin": origin}).headers


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, {"messages": 5}, 400),
        ("/nowhere", {}, 404),
        (CHAT, BODY | {"model": "x"}, 404),
        (CHAT, BODY | {"stream": True}, 200),
        (GENERATE, {"token_ids": [5], "stream": True}, 200),
    ],
)
def test_errors_and_streams_can_be_read(path: str, body: dict[str, Any], status: int) -> None:
    answer = site(allowed_origins=[PAGE]).post(path, body, headers={"Origin": PAGE})
    assert answer.status_code == status and answer.headers[ALLOW] == PAGE and "Origin" in answer.headers["vary"]
    if status == 200:
        assert answer.text.endswith("data: [DONE]\n\n")


def test_methods_headers_and_credentials() -> None:
    s = site(allowed_origins=["*"], allowed_methods=["POST"], allowed_headers=["Content-Type"], allow_credentials=True)
    refused = preflight(s)
    assert refused.status_code == 400 and "headers" in refused.text
    headers = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    answer = s.request("OPTIONS", CHAT, headers=headers | {"Access-Control-Request-Headers": "content-type"})
    assert answer.status_code == 200 and answer.headers["access-control-allow-credentials"] == "true"
    assert answer.headers[ALLOW] == PAGE, "browsers refuse * with credentials"
    assert s.request("OPTIONS", CHAT, headers=headers | {"Access-Control-Request-Method": "GET"}).status_code == 400


def test_control_routes_without_keys_refuse_allowed_pages_too() -> None:
    s = site(allowed_origins=[PAGE])
    answer = s.post("/pause", headers={"Origin": PAGE, "Content-Type": "application/json"})
    assert answer.status_code == 403 and answer.headers[ALLOW] == PAGE


def test_a_page_that_leaves_ends_its_stream() -> None:
    async def run() -> None:
        s = site(endless, allowed_origins=[PAGE])
        caller = Caller(s, GENERATE, {"token_ids": [5], "stream": True}, {"origin": PAGE})
        await caller.wait_for(lambda one: len(one.writes) > 2)
        assert caller.headers[ALLOW] == PAGE
        caller.hang_up()
        await caller.task
        assert s.llm.num_inflight == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allowed_origins": ["http://a/"]}, "'http://a/' is not an origin"),
        ({"allowed_origins": ["a.example"]}, "'a.example' is not an origin"),
        ({"allowed_headers": ["X-A"]}, "allowed_headers needs allowed_origins"),
        ({"allow_credentials": True}, "allow_credentials needs allowed_origins"),
    ],
)
def test_options_that_would_never_match_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(StartError, match=message):
        resolve(Config.make(model="demo", **options))
