"""Which markers a budget of reasoning gets, by route, and where it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.replies import good
from tests.server.byte_tokenizer import ids
from tests.server.site import Site, chat_site, site
from tests.text.tool_templates import THINKER
from tokserve.protocol.params import ThinkingMarkers

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COMPLETIONS, GENERATE = "/v1/completions", "/inference/v1/generate"
HI = [{"role": "user", "content": "hi"}]
OPENS, CLOSES = ids("<think>"), ids("</think>")
OPENED = THINKER + "{% if add_generation_prompt and enable_thinking %}<think>\n{% endif %}"  # begins the thought
BUDGET = {"thinking_token_budget": 7}


def thinker(template: str = THINKER, **options: Any) -> Site:
    return chat_site("a", template, reasoning_parser="qwen3", **options)


def limit(s: Site) -> tuple[int | None, ThinkingMarkers | None]:
    """The budget and the markers of the last request."""
    params = s.llm.calls[-1].params
    return params.thinking_token_budget, params.thinking_markers


def markers(inside: bool | None) -> ThinkingMarkers:
    return ThinkingMarkers(opens=OPENS, closes=CLOSES, inside=inside)


def test_chat_and_responses_know_where_the_answer_begins() -> None:
    for template, inside in ((THINKER, False), (OPENED, True)):
        s = thinker(template)
        fields = {"chat_template_kwargs": {"enable_thinking": True}} if inside else {}
        good(s.post(CHAT, {"messages": HI} | BUDGET | fields))
        assert limit(s) == (7, markers(inside))
        good(s.post(RESPONSES, {"input": "hi"} | BUDGET | fields))
        assert limit(s) == (7, markers(inside))


def test_routes_of_raw_prompts_leave_the_beginning_to_the_prompt() -> None:
    s = thinker()
    good(s.post(COMPLETIONS, {"prompt": ["a", "b"]} | BUDGET))
    assert limit(s) == (7, markers(None))
    custom = {"opens": [3], "closes": [4, 5], "inside": True}
    good(s.post(GENERATE, {"token_ids": [5], "sampling_params": BUDGET | {"thinking_markers": custom}}))
    assert limit(s) == (7, ThinkingMarkers(**custom))


def test_rendered_requests_have_their_markers() -> None:
    s = thinker()
    rendered = good(s.post(CHAT + "/render", {"messages": HI} | BUDGET))
    good(s.post(GENERATE, rendered))
    assert limit(s) == (7, markers(False))


def test_anthropics_budget_is_one() -> None:
    body = {"model": "tiny", "messages": HI, "max_tokens": 1100}
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    s = thinker()
    answer = s.post(MESSAGES, body | thinking)
    assert answer.status_code == 200 and "budget_tokens" not in answer.headers.get("x-ignored-fields", "")
    assert limit(s) == (1024, markers(False))
    for other in ({}, {"thinking": {"type": "disabled"}}, {"thinking": {"type": "adaptive"}}):
        assert s.post(MESSAGES, body | other).status_code == 200 and limit(s) == (None, None)
    plain = chat_site("a", THINKER, reasoning_parser="none")
    answer = plain.post(MESSAGES, body | thinking)
    assert "thinking.budget_tokens" in answer.headers["x-ignored-fields"] and limit(plain) == (None, None)


def test_sglangs_name() -> None:
    s = thinker(sglang_api=True)
    params = {"max_thinking_tokens": 7, "max_new_tokens": 4}
    good(s.post("/generate", {"text": "hi", "sampling_params": params}))
    assert limit(s) == (7, markers(None))


def test_no_limit() -> None:
    for s in (thinker(), chat_site("a", THINKER, reasoning_parser="none")):
        for value in (None, -1):
            good(s.post(CHAT, {"messages": HI, "thinking_token_budget": value}))
            assert limit(s) == (value, None)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        (BUDGET, "thinking_token_budget"),
        (BUDGET | {"thinking_markers": {"closes": []}}, "thinking_markers.closes"),
        (BUDGET | {"thinking_markers": {"opens": [1]}}, "thinking_markers.closes"),
        (BUDGET | {"thinking_markers": {"closes": [1] * 65}}, "thinking_markers.closes"),
        (BUDGET | {"thinking_markers": {"closes": [1 << 20]}}, "thinking_markers.closes[0]"),
        (BUDGET | {"thinking_markers": {"closes": [1], "opens": [-1]}}, "thinking_markers.opens[0]"),
    ],
)
def test_refusals_name_the_field(params: dict[str, Any], field: str) -> None:
    answer = thinker().post(GENERATE, {"token_ids": [5], "sampling_params": params})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == f"sampling_params.{field}", answer.text


def test_a_server_that_does_not_know_reasoning_refuses_a_budget() -> None:
    s = chat_site("a", THINKER, reasoning_parser="none")
    for path, body in ((CHAT, {"messages": HI}), (RESPONSES, {"input": "hi"}), (COMPLETIONS, {"prompt": "a"})):
        error = s.post(path, body | BUDGET).json()["error"]
        assert (error["param"], error["code"]) == ("thinking_token_budget", "unsupported")
    error = site(tokens_only=True).post(GENERATE, {"token_ids": [5], "sampling_params": BUDGET}).json()["error"]
    assert error["param"] == "sampling_params.thinking_token_budget" and "thinking_markers" in error["message"]
