"""Reasoning in replies: the names that clients read, the counts of its tokens, what SGLang's clients can choose
(peer-suites-3 A5, A6)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.replies import good
from tests.server.byte_tokenizer import ids
from tests.server.scripted_llm import says
from tests.server.site import Site, chat_site
from tests.server.test_tools import CALL, TOOLS
from tests.text.tool_templates import HERMES, OPENED

CHAT, GENERATE, RESPONSES = "/v1/chat/completions", "/generate", "/v1/responses"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "request_id": "r"}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
THOUGHT, ANSWER = "<think>\nhm, 漢\n</think>\n\n", "Yes."
ROWS = [  # template, text, tokens of reasoning
    (HERMES, THOUGHT + ANSWER, len(ids(THOUGHT))),
    (HERMES, THOUGHT, len(ids(THOUGHT)) + 1),
    (HERMES, ANSWER, 0),
    (OPENED, "hm</think>" + ANSWER, len(ids("hm</think>"))),
    (OPENED, "hm", 3),
    (OPENED, "hm</think>" + CALL, 10),
    (HERMES, f"<think>a</think>{CALL}<think>b</think>{ANSWER}", 32),
    (HERMES, "", 0),
]


@pytest.fixture(scope="module")
def sites() -> dict[tuple[str, bool], Site]:
    return {
        (template, sglang): chat_site("", template, reasoning_parser="qwen3", sglang_api=sglang)
        for template in (HERMES, OPENED)
        for sglang in (False, True)
    }


def thoughts(events: list[dict[str, Any]], name: str) -> str:
    return "".join(event["choices"][0]["delta"].get(name, "") for event in events if event["choices"])


@pytest.mark.parametrize(("template", "text", "count"), ROWS)
def test_tokens_of_reasoning_are_counted_alike_on_all_routes(
    sites: dict[tuple[str, bool], Site], template: str, text: str, count: int
) -> None:
    for sglang in (False, True):
        s = sites[template, sglang]
        s.llm.script = says(text)
        body = BODY | {"tools": TOOLS}
        usage = good(s.post(CHAT, body))["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": count}
        assert usage.get("reasoning_tokens") == (count if sglang else None)
        counts = [event["usage"] for event in s.events(CHAT, body | USAGE)]
        assert counts[-1] == usage
        numbers = [one["completion_tokens_details"]["reasoning_tokens"] for one in counts]
        assert numbers == sorted(numbers) and all(
            one["completion_tokens"] >= number for one, number in zip(counts, numbers, strict=True)
        )
        flat_tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
        details = good(s.post(RESPONSES, {"input": "hi", "tools": flat_tools}))["usage"]["output_tokens_details"]
        assert details == {"reasoning_tokens": count}
        if not sglang:
            generated = s.post("/inference/v1/generate", s.post(CHAT + "/render", body).json()).json()
            back = good(s.post(CHAT + "/derender", {"generate_response": generated, "chat_request": body}))
            assert back["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}


def test_tokens_of_reasoning_of_several_choices_are_added_up(sites: dict[tuple[str, bool], Site]) -> None:
    s = sites[HERMES, False]
    s.llm.script = says(THOUGHT + ANSWER)
    details = good(s.post(CHAT, BODY | {"n": 3}))["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": 3 * len(ids(THOUGHT))}
    hidden = good(s.post(CHAT, BODY | {"include_reasoning": False}))["usage"]["completion_tokens_details"]
    assert hidden == {"reasoning_tokens": len(ids(THOUGHT))}


def test_without_a_reasoning_parser_nothing_is_counted() -> None:
    s = chat_site(THOUGHT + ANSWER, sglang_api=True)
    assert "completion_tokens_details" not in good(s.post(CHAT, BODY))["usage"]
    assert good(s.post(CHAT, BODY))["usage"]["reasoning_tokens"] == 0
    assert good(s.post(GENERATE, {"text": "x"}))["meta_info"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("sglang", [False, True])
def test_reasoning_comes_under_both_names(sites: dict[tuple[str, bool], Site], sglang: bool) -> None:
    s = sites[HERMES, sglang]
    s.llm.script = says(THOUGHT + ANSWER)
    message = good(s.post(CHAT, BODY))["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "hm, 漢" and message["content"] == ANSWER
    events = s.events(CHAT, BODY)
    assert thoughts(events, "reasoning") == thoughts(events, "reasoning_content") == "hm, 漢"
    again = [*BODY["messages"], message, *BODY["messages"]]  # the names do not add up in the next turn
    assert good(s.post(CHAT, BODY | {"messages": again}))["choices"][0]["message"] == message
    s.llm.script = says(ANSWER)
    plain = good(s.post(CHAT, BODY))["choices"][0]["message"]
    assert plain["reasoning"] is None and "reasoning_content" not in plain


def test_sglangs_clients_choose_whether_reasoning_is_apart_and_streamed(sites: dict[tuple[str, bool], Site]) -> None:
    s = sites[HERMES, True]
    s.llm.script = says(THOUGHT + ANSWER)
    message = good(s.post(CHAT, BODY | {"separate_reasoning": False}))["choices"][0]["message"]
    assert message["content"] == THOUGHT + ANSWER and message["reasoning"] is None
    events = s.events(CHAT, BODY | {"separate_reasoning": False})
    assert thoughts(events, "content") == THOUGHT + ANSWER and not thoughts(events, "reasoning")
    for fields, pieces in (({"stream_reasoning": False}, 1), ({"stream_reasoning": True}, 3), ({}, 3)):
        events = s.events(CHAT, BODY | fields)
        with_thoughts = [event for event in events if event["choices"][0]["delta"].get("reasoning_content")]
        assert thoughts(events, "reasoning_content") == "hm, 漢" and thoughts(events, "content") == ANSWER
        assert (len(with_thoughts) == 1) == (pieces == 1)
    s.llm.script = says("<think>hm")
    events = s.events(CHAT, BODY | {"stream_reasoning": False, "n": 2})
    for index in range(2):
        of_choice = [event for event in events if event["choices"][0]["index"] == index]
        assert thoughts(of_choice, "reasoning_content") == "hm"
    answer = s.post(CHAT, BODY | {"separate_reasoning": True, "stream_reasoning": False})
    assert "x-ignored-fields" not in answer.headers


def test_generate_counts_tokens_of_reasoning(sites: dict[tuple[str, bool], Site]) -> None:
    for template, prompt, text, count in (
        (HERMES, "<|im_start|>assistant\n", THOUGHT + ANSWER, len(ids(THOUGHT))),
        (OPENED, "<|im_start|>assistant\n<think>\n", "hm</think>Yes", len(ids("hm</think>"))),
        (OPENED, "<|im_start|>assistant\n<think>\n</think>", "Yes", 0),
    ):
        s = sites[template, True]
        s.llm.script = says(text)
        for more in ({}, {"require_reasoning": True}, {"input_ids": ids(prompt), "text": None}):
            body = {"text": prompt} | more
            assert good(s.post(GENERATE, body))["meta_info"]["reasoning_tokens"] == count
            last = s.events(GENERATE, body)[-1]
            assert last["meta_info"]["reasoning_tokens"] == count
    both = s.post(CHAT, BODY | {"return_meta_info": True}).json()["choices"][0]["meta_info"]
    assert both["reasoning_tokens"] == 4  # the prompt opens the thought
    for fields, words in (
        ({"sampling_params": {"regex": "a"}}, "structured output applies"),
        ({"sampling_params": [{"regex": "a"}], "text": ["x"]}, "structured output applies"),
    ):
        refused = s.post(GENERATE, {"text": "x", "require_reasoning": True} | fields)
        assert refused.status_code == 400 and words in refused.text and "require_reasoning" in refused.text
    without = chat_site("x", sglang_api=True).post(GENERATE, {"text": "x", "require_reasoning": True})
    assert without.status_code == 400 and "--reasoning-parser" in without.text
