"""Families over HTTP: parsers that follow from the chat template, ids that the model gives, messages of gpt-oss."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from tests.replies import good
from tests.server.byte_tokenizer import TOKENIZER
from tests.server.site import Site, chat_site
from tests.server.test_tools import flat, joined
from tests.text.family_outputs import FUNCTIONS, OUTPUTS, Output
from tests.text.family_templates import GPT_OSS, KIMI, SHOWS

CHAT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/responses", "/v1/messages"
MESSAGES = [{"role": "user", "content": "Weather?"}]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": FUNCTIONS[name]}} for name in FUNCTIONS]
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
SCHEMAS = [{"name": name, "input_schema": {"type": "object", **FUNCTIONS[name]}} for name in FUNCTIONS]
FAMILIES = (
    "gpt-oss",
    "GLM-4.5",
    "DeepSeek V3 and R1",
    "DeepSeek V3.2",
    "Hunyuan A13B",
    "Gemma 4",
    "LFM2",
    "Llama 4, JSON",
)
CALLING = [output for output in OUTPUTS if output.family in FAMILIES]  # one for each kind of form


def text_of(output: Output, kind: str) -> str:
    return "".join(text for one, text in output.pieces if one == kind)


def calls_of(output: Output) -> list[tuple[str, str]]:
    texts = [text for kind, text in output.pieces if kind in ("call", "arguments")]
    return list(zip(texts[::2], texts[1::2], strict=True))


def served(output: Output, **options: Any) -> Site:
    """A server whose template shows the parsers of the output, if there is one, and whose answer it is."""
    templates = [source for tools, thinking, source in SHOWS if (tools, thinking) == (output.tools, output.thinking)]
    names = {"tool_call_parser": output.tools, "reasoning_parser": output.thinking or "none"}
    return chat_site(output.text, templates[0], **options) if templates else chat_site(output.text, **names, **options)


@pytest.mark.some(3)
@pytest.mark.parametrize("output", CALLING, ids=lambda output: output.family)
def test_the_calls_of_a_family_on_every_route(output: Output) -> None:
    s = served(output)
    body = {"messages": MESSAGES, "tools": TOOLS, "request_id": "r", "return_token_ids": True}
    reply = good(s.post(CHAT, body))
    (choice,) = flat(reply)
    assert [tuple(call[1:]) for call in choice["calls"]] == calls_of(output)
    assert (choice["reasoning"], choice["content"]) == (text_of(output, "reasoning"), text_of(output, "content"))
    assert choice["finish_reason"] == "tool_calls"
    assert joined(s.events(CHAT, body)) == [choice]
    items = good(s.post(RESPONSES, {"input": "Weather?", "tools": FLAT}))["output"]
    functions = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
    assert functions == calls_of(output)
    assert all(item["status"] == "completed" for item in items if item["type"] == "function_call")
    blocks = good(s.post(ANTHROPIC, {"messages": MESSAGES, "tools": SCHEMAS, "max_tokens": 900, "model": "tiny"}))[
        "content"
    ]
    uses = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    assert uses == [(name, json.loads(arguments)) for name, arguments in calls_of(output)]


def test_the_log_names_the_parsers_of_the_template(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tokserve"):
        chat_site("", GPT_OSS)
    assert "tool calls: openai, as the chat template writes them" in caplog.text
    assert "reasoning: openai_gptoss, as the chat template has it" in caplog.text


def test_the_ids_of_calls_are_the_models_where_it_gives_them() -> None:
    kimi = next(output for output in OUTPUTS if output.tools == "kimi_k2")
    s, ids = chat_site(kimi.text, KIMI), ["functions.get_weather:0", "functions.now:1"]
    body = {"messages": MESSAGES, "tools": TOOLS, "request_id": "r", "return_token_ids": True}
    message = good(s.post(CHAT, body))["choices"][0]["message"]
    assert [call["id"] for call in message["tool_calls"]] == ids
    assert [call[0] for call in joined(s.events(CHAT, body))[0]["calls"]] == ids
    items = good(s.post(RESPONSES, {"input": "Weather?", "tools": FLAT}))["output"]
    assert [item["call_id"] for item in items if item["type"] == "function_call"] == ids
    blocks = good(s.post(ANTHROPIC, {"messages": MESSAGES, "tools": SCHEMAS, "max_tokens": 900, "model": "tiny"}))[
        "content"
    ]
    assert [block["id"] for block in blocks if block["type"] == "tool_use"] == ids
    results = [{"role": "tool", "tool_call_id": one, "content": "4"} for one in ids]
    good(s.post(CHAT, {"messages": [*MESSAGES, message, *results], "tools": TOOLS}))
    prompt = TOKENIZER.decode(s.llm.calls[-1].prompt, False)
    assert kimi.text[kimi.text.index("<|tool_calls_section_begin|>") :] in prompt  # as the model wrote them


FORCED = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}'
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_a_forced_call_is_a_message_of_gpt_oss(choice: Any, reason: str) -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + FORCED
    s = chat_site(text, GPT_OSS)
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "request_id": "r", "return_token_ids": True}
    grammar = good(s.post(CHAT + "/render", body))["sampling_params"]["structured_outputs"]["grammar"]
    assert "commentary to=functions.get_weather" in grammar and ("functions.now" in grammar) == (choice == "required")
    (reply,) = flat(good(s.post(CHAT, body)))
    assert [call[1:] for call in reply["calls"]] == [["get_weather", '{"city": "Oslo"}']]
    assert (reply["reasoning"], reply["content"], reply["finish_reason"]) == ("Hm.", "", reason)
    assert joined(s.events(CHAT, body)) == [reply]


def test_the_roles_of_gpt_oss_on_chat_responses_and_messages() -> None:
    """A turn with reasoning, a call and its result is shown alike, whichever route it comes from."""
    s = chat_site("<|channel|>final<|message|>Rain.", GPT_OSS)
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    chat = [
        {"role": "system", "content": "Be brief."},
        *MESSAGES,
        {"role": "assistant", "reasoning": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    items = [
        *MESSAGES,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "noon"},
    ]
    blocks = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "tool_use", "id": "c1", "name": "now", "input": {}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "noon"}]},
    ]
    prompts = []
    for path, body in (
        (CHAT, {"messages": chat, "tools": TOOLS}),
        (RESPONSES, {"instructions": "Be brief.", "input": items, "tools": FLAT}),
        (ANTHROPIC, {"system": "Be brief.", "messages": blocks, "tools": SCHEMAS, "max_tokens": 50, "model": "tiny"}),
    ):
        good(s.post(path, body))
        prompts.append(TOKENIZER.decode(s.llm.calls[-1].prompt, False).partition("<|start|>user")[2])
    assert prompts[0] == prompts[1] == prompts[2]
    assert "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.now<|channel|>" in prompts[0]
    assert prompts[0].endswith(
        '<|start|>functions.now to=assistant<|channel|>commentary<|message|>"noon"<|end|><|start|>assistant'
    )
    developer = [{"role": "developer", "content": "Be brief."}, *chat[1:]]
    good(s.post(CHAT, {"messages": developer, "tools": TOOLS}))
    assert "<|start|>developer<|message|>Be brief." in TOKENIZER.decode(s.llm.calls[-1].prompt, False)


def test_an_answer_in_a_form_is_the_final_message_of_gpt_oss() -> None:
    s = chat_site('<|channel|>final<|message|>{"a": 1}', GPT_OSS)
    body = {"messages": MESSAGES, "response_format": {"type": "json_object"}}
    message = good(s.post(CHAT, body))["choices"][0]["message"]
    assert json.loads(message["content"]) == {"a": 1}
    grammar = s.llm.calls[-1].params.structured_outputs.grammar
    assert "<|channel|>final<|message|>" in grammar and "<|channel|>analysis<|message|>" in grammar


def test_a_call_that_cannot_be_read_is_not_complete_on_any_route() -> None:
    text = "[get_weather(city=Oslo)]"
    s = chat_site(text, tool_call_parser="pythonic")
    choice = good(s.post(CHAT, {"messages": MESSAGES, "tools": TOOLS}))["choices"][0]
    assert choice["finish_reason"] == "stop"
    with pytest.raises(ValueError):
        json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])
    (item,) = good(s.post(RESPONSES, {"input": "?", "tools": FLAT}))["output"]
    assert (item["type"], item["status"]) == ("function_call", "incomplete")
    blocks = good(s.post(ANTHROPIC, {"messages": MESSAGES, "tools": SCHEMAS, "max_tokens": 900, "model": "tiny"}))[
        "content"
    ]
    assert [block["type"] for block in blocks] == ["text"] and blocks[0]["text"] == text
