"""Stop strings of chats whose reasoning is returned separately (serving-faults F12): they concern what is visible."""

from __future__ import annotations

from typing import Any

import pytest

from tests.replies import good, named_events
from tests.server.site import chat_site
from tests.server.test_anthropic_replies import put_together
from tests.server.test_tools import flat, joined
from tests.text.tool_templates import HERMES, OPENED

CHAT, MESSAGES, GENERATE = "/v1/chat/completions", "/v1/messages", "/inference/v1/generate"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "request_id": "r"}
ROWS = [
    (HERMES, "<think>\n9.11 and 9.8: compare</think>\n\nIt is 9.8, so", "9.11 and 9.8: compare", "It is "),
    (OPENED, "9.11 and 9.8: compare</think>\n\nIt is 9.8, so", "9.11 and 9.8: compare", "It is "),
    (HERMES, "It is 9.8, so", None, "It is "),
]


@pytest.mark.parametrize(("template", "text", "reasoning", "content"), ROWS)
def test_a_stop_string_in_reasoning_does_not_end_the_output(
    template: str, text: str, reasoning: str | None, content: str
) -> None:
    s = chat_site(text, template, reasoning_parser="qwen3")
    body = BODY | {"stop": ["9.8"]}
    reply = good(s.post(CHAT, body))
    [choice] = reply["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == (reasoning, content)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "9.8")
    assert joined(s.events(CHAT, body)) == flat(reply)
    rendered = good(s.post(CHAT + "/render", body))
    assert rendered["sampling_params"]["stop_after"][1] == "</think>"
    for request in (rendered, rendered | {"sampling_params": {"max_tokens": 100}}):  # as a server without text does
        generated = good(s.post(GENERATE, request))
        back = good(s.post(CHAT + "/derender", {"generate_response": generated, "chat_request": body}))
        assert back["choices"][0]["message"] == choice["message"]
        assert back["choices"][0]["stop_reason"] == "9.8"
    sent = BODY | {"model": "tiny", "max_tokens": 100, "stop_sequences": ["9.8"]}
    answer = good(s.post(MESSAGES, sent))
    assert answer["stop_reason"] == "stop_sequence" and answer["content"][-1] == {"type": "text", "text": content}
    assert put_together(named_events(s.post(MESSAGES, sent | {"stream": True}).text)) == answer


def test_without_a_reasoning_parser_stop_strings_count_everywhere() -> None:
    s = chat_site(ROWS[0][1])
    [choice] = good(s.post(CHAT, BODY | {"stop": "9.8"}))["choices"]
    assert choice["message"]["content"] == "<think>\n9.11 and "
    named = good(s.post(CHAT, BODY | {"stop": "9.8", "stop_after": ["<think>", "</think>"]}))["choices"][0]
    assert named["message"]["content"].endswith("It is ")
