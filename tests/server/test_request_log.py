"""--log-requests: the lines for a request, which contain nothing of its content."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.server.scripted_llm import says
from tests.server.site import Caller, Site, site
from tokserve.base import log
from tokserve.base.errors import QueueFull


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [
        vars(record)["fields"] for record in caplog.records if record.name == "tokserve.features.observe.request_log"
    ]


def logged(caplog: pytest.LogCaptureFixture, **options: Any) -> Site:
    caplog.set_level("INFO", "tokserve.features.observe.request_log")
    return site(**{"log_requests": True} | options)


def test_a_line_at_the_start_and_one_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    s = logged(caplog, script=says("abc"), enable_prefix_caching=True, block_size=1)
    s.post("/inference/v1/generate", {"token_ids": [77, 78]})
    caplog.clear()
    s.post("/inference/v1/generate", {"token_ids": [77, 78, 79], "sampling_params": {"max_tokens": 9, "n": 2}})
    accepted, ended = lines(caplog)
    assert accepted == {"event": "request_accepted", "prompts": 1, "prompt_tokens": 3, "n": 2, "max_tokens": 9}
    assert ended == {
        "event": "request_ended",
        "reasons": {"eos": 2},
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "output_tokens": 8,
        "queued": 0.375,
        "first_token": 0.25,
        "total": 1.25,
    }
    assert caplog.messages[-1] == (
        "request ended: reasons=eos:2 prompt_tokens=3 cached_tokens=2 output_tokens=8 queued=0.375 first_token=0.25 "
        "total=1.25"
    )


def test_streams_and_chat_are_logged_and_texts_are_not(caplog: pytest.LogCaptureFixture) -> None:
    s = logged(caplog, script=says("rosebud"))
    s.events("/v1/chat/completions", {"messages": [{"role": "user", "content": "xanadu"}]})
    assert [line["event"] for line in lines(caplog)] == ["request_accepted", "request_ended"]
    assert "xanadu" not in caplog.text and "rosebud" not in caplog.text


def test_a_refused_request_has_one_line(caplog: pytest.LogCaptureFixture) -> None:
    s = logged(caplog)
    s.llm.refuse = QueueFull("the queue is full", retry_after=3, code="queue_full")
    assert s.post("/v1/completions", {"prompt": "a"}).status_code == 429
    assert s.post("/v1/completions", {"prompt": "a", "temperature": -1}).status_code == 400
    assert lines(caplog) == [
        {"event": "request_refused", "status": 429, "code": "queue_full", "field": None},
        {"event": "request_refused", "status": 400, "code": None, "field": "temperature"},
    ]


@pytest.mark.parametrize(
    ("path", "sent", "line"),
    [
        ("/inference/v1/generate", {"token_ids": [5], "max_token": 1}, (400, "unknown_field", "max_token")),
        ("/inference/v1/generate", {"token_ids": [5], "model": "x"}, (404, "model_not_found", "model")),
        ("/v1/chat/completions", {"messages": []}, (400, None, "messages")),
        ("/v1/responses", {"input": 5}, (400, None, "input")),
        ("/v1/messages", {"model": "m", "messages": []}, (400, None, "max_tokens")),
    ],
)
def test_a_request_that_is_refused_for_its_body_has_one_line_too(
    path: str, sent: dict[str, Any], line: tuple[int, str | None, str], caplog: pytest.LogCaptureFixture
) -> None:
    assert logged(caplog).post(path, sent).status_code == line[0]
    status, code, field = line
    assert lines(caplog) == [{"event": "request_refused", "status": status, "code": code, "field": field}]


def test_a_client_that_leaves(caplog: pytest.LogCaptureFixture) -> None:
    s = logged(caplog)
    s.llm.hold = True

    async def scene() -> None:
        caller = Caller(s, "/inference/v1/generate", {"token_ids": [5], "stream": True})
        await caller.wait_for(lambda c: c.status == 200)
        caller.hang_up()
        await caller.task

    asyncio.run(scene())
    ended = lines(caplog)[-1]
    assert ended["reasons"] == {"abort_disconnect": 1} and ended["output_tokens"] == 0
    assert [ended[name] for name in ("queued", "first_token", "total")] == [None] * 3  # the engine has told none
    assert "total=" not in caplog.messages[-1]


def test_nothing_is_logged_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    logged(caplog, log_requests=False).post("/v1/completions", {"prompt": "a"})
    assert not caplog.records


def test_every_line_of_a_request_has_its_id(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        "tokserve.features.observe.request_log._log_event",
        lambda event, **fields: seen.append((event, log.request_id.get())),
    )
    s = logged(caplog)
    s.post("/v1/completions", {"prompt": "a", "max_tokens": 2}, headers={"X-Request-Id": "cmpl-mine"})
    s.events("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 2}, "request_id": "other"})
    assert seen == [("accepted", "mine"), ("ended", "mine"), ("accepted", "other"), ("ended", "other")]
