"""/v1/messages: blocks and events, streamed and whole alike; stop reasons, usage, errors, and clients that leave."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest
from pydantic_core import from_json

from tests.replies import good, named_events
from tests.server.byte_tokenizer import ids
from tests.server.scripted_llm import endless, says
from tests.server.site import Caller, Site, chat_site, site
from tests.server.test_tools import ANSWERS, CALL
from tests.text.tool_templates import HERMES
from tests.tiers import paired
from tokserve.base.errors import Overloaded, QueueFull

MESSAGES, CHAT = "/v1/messages", "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: list[dict[str, Any]] = [{"name": "weather", "input_schema": SCHEMA}, {"name": "ping", "input_schema": {}}]
FUNCTIONS = [
    {"type": "function", "function": {"name": tool["name"], "parameters": {"type": "object"} | tool["input_schema"]}}
    for tool in TOOLS
]
PROMPT = len(ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"))


def ask(s: Site, **fields: Any) -> dict[str, Any]:
    return good(s.post(MESSAGES, BODY | {"request_id": "r"} | fields))


def streamed(s: Site, **fields: Any) -> list[dict[str, Any]]:
    answer = s.post(MESSAGES, BODY | {"request_id": "r", "stream": True} | fields)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer.text
    return named_events(answer.text)


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events add up to, after a look at the order of all of them."""
    assert events[0]["type"] == "message_start" and [e["type"] for e in events[-2:]] == [
        "message_delta",
        "message_stop",
    ]
    message = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None and message["usage"]["output_tokens"] == 0
    block, texts = None, ""
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert block is None and event["index"] == len(message["content"])
            block, texts = event["content_block"], ""
        elif event["type"] == "content_block_delta":
            assert block is not None and event["index"] == len(message["content"])
            texts += add(block, event["delta"])
        else:
            assert event == {"type": "content_block_stop", "index": len(message["content"])} and block is not None
            if block["type"] == "tool_use":
                block["input"] = from_json(texts or "{}", allow_partial=True)
            message["content"].append(block)
            block = None
    assert block is None
    last = events[-2]
    assert last["usage"].keys() == message["usage"].keys()
    return (
        message
        | last["delta"]
        | {"usage": last["usage"]}
        | {name: last[name] for name in ("token_ids", "weight_versions") if name in last}
    )


def add(block: dict[str, Any], delta: dict[str, str]) -> str:
    match delta:
        case {"type": "text_delta", "text": text} if block["type"] == "text":
            block["text"] += text
        case {"type": "thinking_delta", "thinking": text} if block["type"] == "thinking":
            assert not block["signature"]
            block["thinking"] += text
        case {"type": "signature_delta", "signature": text} if block["type"] == "thinking":
            assert not block["signature"]
            block["signature"] = text
        case {"type": "input_json_delta", "partial_json": text} if block["type"] == "tool_use":
            assert block["input"] == {}
            return text
        case _:
            raise AssertionError((block, delta))
    assert text
    return ""


def test_the_whole_shape() -> None:
    answer = chat_site("hello").post(MESSAGES, BODY, headers={"X-Request-Id": "r"})
    assert answer.headers["x-request-id"] == answer.headers["request-id"] == "r"
    assert answer.json() == {
        "id": "msg_r",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": PROMPT,
            "output_tokens": 6,
            "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 0,
        },
    }


def test_the_events_of_a_thought_a_text_and_a_call() -> None:
    events = streamed(chat_site(f"<think>hm</think>so\n{CALL}", reasoning_parser="qwen3"), tools=TOOLS)
    for event in events:
        event.pop("message", None)
    kinds = [(event["type"], event.get("index")) for event in events]
    runs = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    blocks = [(f"content_block_{kind}", index) for index in range(3) for kind in ("start", "delta", "stop")]
    assert runs == [("message_start", None), *blocks, ("message_delta", None), ("message_stop", None)]
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert starts[0] == {"type": "thinking", "thinking": "", "signature": ""} and starts[1] == {
        "type": "text",
        "text": "",
    }
    assert starts[2].pop("id") and starts[2] == {"type": "tool_use", "name": "weather", "input": {}}
    assert events[-1] == {"type": "message_stop"}


def plain(reply: dict[str, Any]) -> dict[str, Any]:
    """A message's contents as chat has them."""
    blocks = reply["content"]
    calls = [(block["id"], block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    text = {kind: "".join(block[kind] for block in blocks if block["type"] == kind) for kind in ("text", "thinking")}
    return {"content": text["text"] or None, "reasoning": text["thinking"] or None, "calls": calls}


@pytest.mark.some(11)
@pytest.mark.parametrize(
    ("answer", "fields"), paired(ANSWERS, [{}, {"tools": TOOLS}, {"tools": TOOLS, "max_tokens": 7}])
)
def test_a_message_is_chats_answer_streamed_and_whole(reader: Site, answer: str, fields: dict[str, Any]) -> None:
    reader.llm.script = says(answer)
    message_reply = ask(reader, **fields)
    joined = put_together(streamed(reader, **fields))
    assert joined == message_reply
    chat = {**BODY, **fields} | ({"tools": FUNCTIONS} if "tools" in fields else {}) | {"request_id": "r"}
    [choice] = reader.post(CHAT, chat).json()["choices"]
    message = choice["message"]
    if choice["finish_reason"] == "stop" and message.get("tool_calls"):  # not complete
        assert plain(message_reply) == {"content": answer, "reasoning": message["reasoning"], "calls": []}
    elif message_reply["stop_reason"] != "max_tokens":
        calls = [
            (call["id"], call["function"]["name"], from_json(call["function"]["arguments"], allow_partial=True))
            for call in message.get("tool_calls", [])
        ]
        expected = {"content": message["content"] or None, "reasoning": message["reasoning"], "calls": calls}
        assert plain(message_reply) == expected
    reasons = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
    assert message_reply["stop_reason"] == reasons[choice["finish_reason"]]


def test_an_empty_answer_is_an_empty_text() -> None:
    s = chat_site("")
    assert ask(s)["content"] == put_together(streamed(s))["content"] == [{"type": "text", "text": ""}]


def test_the_signature_is_a_digest_of_the_thought() -> None:
    [thought, text] = ask(chat_site("<think>hm</think>so", reasoning_parser="qwen3"))["content"]
    assert thought == {"type": "thinking", "thinking": "hm", "signature": hashlib.sha256(b"hm").hexdigest()}
    assert text == {"type": "text", "text": "so"}


@pytest.mark.parametrize(
    ("text", "fields", "reason", "sequence"),
    [
        ("hello", {}, "end_turn", None),
        ("hello", {"max_tokens": 2}, "max_tokens", None),
        ("hello", {"stop_sequences": ["z", "l"]}, "stop_sequence", "l"),
        ("hello", {"stop_token_ids": ids("l")}, "end_turn", None),
        (CALL, {"tools": TOOLS}, "tool_use", None),
        (CALL, {"tools": TOOLS, "max_tokens": 30}, "max_tokens", None),
        (CALL, {"tools": TOOLS, "tool_choice": {"type": "none"}}, "end_turn", None),
        (CALL, {"tools": TOOLS, "stop_sequences": ["Rome"]}, "stop_sequence", "Rome"),
        (CALL + " so", {"tools": TOOLS, "stop_sequences": ["so"]}, "tool_use", None),
        ('[{"name": "ping", "parameters": {}}]', {"tools": TOOLS, "tool_choice": {"type": "any"}}, "tool_use", None),
        ('{"city": "Rome"}', {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "weather"}}, "tool_use", None),
    ],
)
def test_stop_reasons(text: str, fields: dict[str, Any], reason: str, sequence: str | None) -> None:
    s = chat_site(text)
    events = streamed(s, **fields)
    message_reply = ask(s, **fields)
    assert (message_reply["stop_reason"], message_reply["stop_sequence"]) == (reason, sequence) and put_together(
        events
    ) == message_reply
    assert ("stop_detail" in events[-2]["delta"]) == ("stop_token_ids" in fields)


def test_arguments_of_a_call_that_was_cut_off_are_the_complete_ones() -> None:
    begun = '<tool_call>\n{"name": "weather", "arguments": {"days": 3, "city": "O'
    s = chat_site(begun + 'slo"}}\n</tool_call>')
    [call] = ask(s, tools=TOOLS, max_tokens=len(begun))["content"]
    assert call["type"] == "tool_use" and call["input"] == {"days": 3}
    events = streamed(s, tools=TOOLS, max_tokens=len(begun))
    parts = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(parts) == '{"days":3}'


def test_usage_counts_cached_tokens_separately() -> None:
    s = chat_site("hello", enable_prefix_caching=True, block_size=1)
    assert ask(s)["usage"]["cache_read_input_tokens"] == 0
    expected = {
        "input_tokens": 1,
        "output_tokens": 6,
        "cache_read_input_tokens": PROMPT - 1,
        "cache_creation_input_tokens": 0,
    }
    assert ask(s)["usage"] == expected
    events = streamed(s)
    assert events[0]["message"]["usage"] == expected | {"output_tokens": 0} and events[-2]["usage"] == expected


def test_token_ids_on_demand() -> None:
    s = chat_site("<think>hm</think>so", reasoning_parser="qwen3")
    reply = ask(s, return_token_ids=True)
    assert reply["token_ids"][:-1] == ids("<think>hm</think>so") and len(reply["prompt_token_ids"]) == PROMPT
    count = len(reply["token_ids"])
    assert reply["weight_versions"] == [{"version": "0", "start": 0, "end": count}]
    assert put_together(streamed(s, return_token_ids=True)) == reply


def test_a_request_that_was_aborted_keeps_its_text() -> None:
    async def scene() -> tuple[Caller, str]:
        s = site(endless, chat_template=HERMES)
        caller = Caller(s, MESSAGES, BODY | {"request_id": "r", "stream": True})
        await caller.wait_for(lambda c: len(c.writes) > 3)
        async with s.client() as client:
            answer = await client.post("/abort_requests", json={"request_ids": ["msg_r"]})
        await caller.task
        return caller, answer.text

    caller, answer = asyncio.run(scene())
    assert "aborted" in answer
    reply = put_together(named_events(b"".join(caller.writes).decode()))
    assert reply["stop_reason"] is None and reply["stop_detail"] == {"kind": "abort_user"}
    assert reply["content"][0]["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request(stream: bool) -> None:
    async def scene() -> Site:
        s = site(endless, chat_template=HERMES, max_model_len=4000)
        caller = Caller(s, MESSAGES, BODY | {"max_tokens": 3000, "stream": stream})
        await caller.wait_for(lambda c: bool(c.writes) if stream else bool(s.llm.num_inflight))
        caller.hang_up()
        await caller.task
        return s

    s = asyncio.run(scene())
    assert len(s.llm.released) == 1 and not s.llm.num_inflight


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (QueueFull("full", retry_after=7), 429, "rate_limit_error"),
        (Overloaded("paused", retry_after=7), 503, "overloaded_error"),
    ],
)
def test_refusals_of_the_engine_come_before_a_stream(stream: bool, error: Any, status: int, kind: str) -> None:
    s = chat_site("x")
    s.llm.refuse = error
    answer = s.post(MESSAGES, BODY | {"stream": stream})
    assert answer.status_code == status and answer.json() == {
        "type": "error",
        "error": {"type": kind, "message": error.message},
    }
    assert answer.headers.get("retry-after") == "7"


def test_a_dead_engine_and_a_draining_server_are_overloaded() -> None:
    s = chat_site("x")
    s.app.state.draining = True
    answer = s.post(MESSAGES, BODY)
    assert answer.status_code == 503 and answer.json()["error"]["type"] == "overloaded_error"
    assert answer.headers["retry-after"]
    s.app.state.draining = False
    s.llm.die()
    answer = s.post(MESSAGES, BODY)
    assert answer.status_code == 503 and answer.json()["error"]["type"] == "overloaded_error"


def test_an_error_within_a_stream_is_its_last_event() -> None:
    async def scene(s: Site, begin: bool) -> list[dict[str, Any]]:
        s.llm.hold = not begin
        caller = Caller(s, MESSAGES, BODY | {"stream": True})
        await caller.wait_for(lambda c: len(c.writes) > 2 if begin else c.status is not None)
        s.llm.die()
        await caller.task
        assert caller.status == 200 and caller.done
        return named_events(b"".join(caller.writes).decode())

    events = asyncio.run(scene(site(endless, chat_template=HERMES), True))
    error = {"type": "error", "error": {"type": "overloaded_error", "message": "the engine process ended"}}
    assert events[0]["type"] == "message_start" and events[-1] == error
    assert not {"message_delta", "message_stop"} & {event["type"] for event in events}
    assert asyncio.run(scene(site(endless, chat_template=HERMES), False)) == [error]


def test_a_request_that_fails_is_an_api_error() -> None:
    s = chat_site("x")
    s.llm.fails = lambda index: True
    answer = s.post(MESSAGES, BODY)
    expected = {"type": "error", "error": {"type": "api_error", "message": "the model's logits are not finite"}}
    assert answer.status_code == 500 and answer.json() == expected
    assert streamed(s)[-1] == expected


def test_an_unexpected_error_is_an_api_error_without_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    s = chat_site("x")
    monkeypatch.setattr(s.llm, "prepare", lambda *_: 1 / 0)
    answer = s.post(MESSAGES, BODY)
    assert answer.status_code == 500
    assert answer.json() == {"type": "error", "error": {"type": "api_error", "message": "internal error"}}
