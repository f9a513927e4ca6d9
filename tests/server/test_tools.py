"""Tool calls and reasoning of chat answers: streamed, whole or derendered, and the forms that calls are forced into."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.replies import good
from tests.server.byte_tokenizer import TOKENIZER, byte_tokenizer, ids
from tests.server.scripted_llm import says
from tests.server.site import Site, chat_site, site
from tests.text.tool_templates import DEEPSEEK, HERMES, LLAMA, MISTRAL, OPENED, THINKER
from tests.tiers import in_turns
from tokserve.base.errors import RequestError, StartError
from tokserve.config import Config
from tokserve.config.resolve import resolve
from tokserve.dialects.openai import tools
from tokserve.features.chat.tool_formats import THINKING, TOOL_FORMATS
from tokserve.text.tokenizer import Tokenizer

CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"
MESSAGES = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "ping"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
PING = {"type": "function", "function": {"name": "ping"}}
ALLOWED = "tool_choice.allowed_tools.tools"
ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
CALL = f"<tool_call>\n{ROME}\n</tool_call>"


def ask(s: Site, **fields: Any) -> dict[str, Any]:
    return good(s.post(CHAT, {"messages": MESSAGES, "tools": TOOLS, "request_id": "r"} | fields))


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def other() -> dict[str, Any]:
    """The choice of a function that no request has."""
    return {"type": "function", "function": {"name": "other"}}


def message(text: str, template: str = HERMES, **fields: Any) -> dict[str, Any]:
    actual: dict[str, Any] = ask(chat_site(text, template), **fields)["choices"][0]["message"]
    return actual


def functions(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]


def refusal(s: Site, path: str = CHAT, **fields: Any) -> tuple[str, str | None, str]:
    answer = s.post(path, {"messages": MESSAGES, "tools": TOOLS} | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["code"], error["message"]


def test_the_whole_shape() -> None:
    choice = ask(chat_site(f"Let me see.\n{CALL}"))["choices"][0]
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": "Let me see.", "refusal": None, "reasoning": None}
    assert choice["finish_reason"] == "tool_calls" and choice["stop_detail"] == {"kind": "eos"}
    assert list(call) == ["id", "type", "function"] and call["type"] == "function"
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert len(call["id"]) == 9 and call["id"].isalnum()


def test_text_without_calls_is_content() -> None:
    choice = ask(chat_site("Hello <tool"))["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello <tool", "refusal": None, "reasoning": None}
    assert choice["finish_reason"] == "stop"


def test_the_shape_of_a_stream() -> None:
    events = chat_site(f"Ok {CALL}").events(CHAT, {"messages": MESSAGES, "tools": TOOLS, "request_id": "r"})
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == "Ok"
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert list(calls[0]) == ["index", "id", "type", "function"] and calls[0]["function"]["name"] == "weather"
    assert all(list(call) == ["index", "function"] and list(call["function"]) == ["arguments"] for call in calls[1:])
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Rome"}' and len(calls) > 5
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a stream as those of a whole answer."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in event["choices"]:
            choice = choices.setdefault(part["index"], {"content": "", "reasoning": "", "calls": [], "logprobs": []})
            delta = part["delta"]
            choice["content"] += delta.get("content", "")
            choice["reasoning"] += delta.get("reasoning", "")
            for call in delta.get("tool_calls", []):
                if call["index"] == len(choice["calls"]):
                    choice["calls"].append([call["id"], call["function"]["name"], ""])
                choice["calls"][call["index"]][2] += call["function"]["arguments"]
            choice["logprobs"] += (part["logprobs"] or {"content": []})["content"]
            choice["finish_reason"] = part["finish_reason"]
            choice["token_ids"] = choice.get("token_ids", []) + part.get("token_ids", [])
    return [choices[index] for index in sorted(choices)]


def flat(reply: dict[str, Any]) -> list[dict[str, Any]]:
    """The same of a whole answer."""
    return [
        {
            "content": choice["message"]["content"] or "",
            "reasoning": choice["message"]["reasoning"] or "",
            "calls": [[c["id"], *c["function"].values()] for c in choice["message"].get("tool_calls", [])],
            "logprobs": (choice["logprobs"] or {"content": []})["content"],
            "finish_reason": choice["finish_reason"],
            "token_ids": choice["token_ids"] or [],
        }
        for choice in reply["choices"]
    ]


ANSWERS = [
    "Hello.",
    f"Ok {CALL}\n{CALL}",
    f"<tool_call> no {CALL} tail ",
    "<think>\nhm\n</think>\n\nYes.",
    f"hm</think>{CALL}",
    '<tool_call>{"name": "weather", "arguments": {"city": "Ro',
    '{"city": "Rome"}',
    "{ ",
    '[{"name": "weather", "parameters": {"city": "Rome"}}, {"name": "ping", "parameters": {}}]',
    "naïve 漢字 <tool_",
    '{"name": "ping", "parameters": {}}',
]
ASKED: list[dict[str, Any]] = [
    {},
    {"parallel_tool_calls": False},
    {"tool_choice": "none"},
    {"tool_choice": "required"},
    {"tool_choice": NAMED},
    {"tools": None},
    {"n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    {"stop": ["Ro", "</th"]},
    {"max_tokens": 7},
    {"response_format": {"type": "json_object"}, "tool_choice": "none"},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "a"}, "tool_choice": "required"},
]


@pytest.mark.some(3)
@pytest.mark.parametrize(("fields", "answers"), in_turns(ASKED, ANSWERS, 4))
def test_streamed_whole_and_derendered_are_the_same(fields: dict[str, Any], answers: list[str], reader: Site) -> None:
    s = reader
    for text in answers:
        s.llm.script = says(text)
        body = {"messages": MESSAGES, "tools": TOOLS, "request_id": "r"} | fields
        reply = s.post(CHAT, body).json()
        assert joined(s.events(CHAT, body)) == flat(reply), text
        generated = s.post(GENERATE, s.post(CHAT + "/render", body).json()).json()
        back = s.post(CHAT + "/derender", {"generate_response": generated, "chat_request": body})
        assert back.status_code == 200, back.text
        assert back.json()["choices"] == reply["choices"], text


def test_token_ids_and_logprobs_cover_the_text_of_calls() -> None:
    fields = {"return_token_ids": True, "logprobs": True}
    choice = ask(chat_site(CALL), **fields)["choices"][0]
    assert choice["token_ids"] == [*ids(CALL), 0]
    assert [entry["token"] for entry in choice["logprobs"]["content"]][:-1] == list(CALL)
    events = chat_site(CALL).events(CHAT, {"messages": MESSAGES, "tools": TOOLS} | fields)
    (streamed,) = joined(events)
    assert streamed["token_ids"] == choice["token_ids"] and streamed["logprobs"] == choice["logprobs"]["content"]
    assert not any("<" in event["choices"][0]["delta"].get("content", "") for event in events)


def test_calls_of_several_choices_have_ids_of_their_own() -> None:
    choices = ask(chat_site(f"{CALL}{CALL}"), n=3)["choices"]
    assert len({call["id"] for choice in choices for call in choice["message"]["tool_calls"]}) == 6


@pytest.mark.parametrize(
    ("text", "fields", "reason"),
    [
        (CALL, {}, "tool_calls"),
        (CALL, {"max_tokens": 60}, "length"),
        (CALL, {"stop": "</tool_call>"}, "tool_calls"),
        (CALL, {"stop": "Ro"}, "stop"),
        ("a", {}, "stop"),
        ('{"city": "Rome"}', {"tool_choice": NAMED}, "stop"),
        ('[{"name": "ping", "parameters": {}}]', {"tool_choice": "required"}, "tool_calls"),
    ],
)
def test_finish_reason(text: str, fields: dict[str, Any], reason: str) -> None:
    assert ask(chat_site(text), **fields)["choices"][0]["finish_reason"] == reason


def test_one_call_at_most_without_parallel_calls() -> None:
    assert functions(message(CALL + CALL)) == [("weather", '{"city": "Rome"}')] * 2
    assert functions(message(CALL + CALL, parallel_tool_calls=False)) == [("weather", '{"city": "Rome"}')]


def test_turns_with_one_request_id_have_ids_of_their_own() -> None:
    """serving-faults F16: proxies send the id of a session, and all calls of a conversation had the same names."""
    s = chat_site(CALL)
    tools = {"tools": [{"name": "weather", "input_schema": PARAMETERS}], "model": "tiny", "max_tokens": 200}
    flat_tools = {"tools": [{"type": "function"} | TOOLS[0]["function"]]}
    turns = [MESSAGES, [*MESSAGES, {"role": "assistant", "content": "so"}, *MESSAGES]]
    headers = {"X-Request-Id": "session"}
    chats = [s.post(CHAT, {"messages": turn, "tools": TOOLS}, headers=headers).json() for turn in turns]
    answers = [s.post("/v1/messages", {"messages": turn} | tools, headers=headers).json() for turn in turns]
    items = [s.post("/v1/responses", {"input": turn} | flat_tools, headers=headers).json() for turn in turns]
    for call_ids in (
        [reply["choices"][0]["message"]["tool_calls"][0]["id"] for reply in chats],
        [reply["content"][0]["id"] for reply in answers],
        [reply["output"][0]["call_id"] for reply in items],
    ):
        assert call_ids[0] != call_ids[1] and all(len(one) == 9 and one.isalnum() for one in call_ids)
    again = s.post(CHAT, {"messages": turns[0], "tools": TOOLS}, headers=headers).json()
    assert again["choices"] == chats[0]["choices"]


# the form that is forced


def forced(**fields: Any) -> Any:
    s = chat_site("[]")
    rendered = s.post(CHAT + "/render", {"messages": MESSAGES, "tools": TOOLS} | fields)
    assert rendered.status_code == 200, rendered.text
    return rendered.json()["sampling_params"].get("structured_outputs")


def test_a_named_function_forces_its_arguments() -> None:
    form = forced(tool_choice=NAMED)
    assert form["json"] == PARAMETERS | {"additionalProperties": False} and form["whitespace_pattern"] == r"\x20?"
    nothing = {"type": "object", "additionalProperties": False}
    assert forced(tool_choice={"type": "function", "function": {"name": "ping"}})["json"] == nothing
    assert forced(tool_choice="auto") is None and forced(tool_choice="none") is None
    choice = ask(chat_site('{"city": "Oslo"}'), tool_choice=NAMED)["choices"][0]
    assert functions(choice["message"]) == [("weather", '{"city": "Oslo"}')] and choice["message"]["content"] is None
    assert choice["finish_reason"] == "stop"  # as OpenAI says of a call that could be no other


def test_required_forces_a_list_of_calls() -> None:
    schema = forced(tool_choice="required")["json"]
    assert schema["minItems"] == 1 and schema["maxItems"] == 16
    names = [call["properties"]["name"]["const"] for call in schema["items"]["anyOf"]]
    assert names == ["weather", "ping"]
    assert all(call["required"] == ["name", "parameters"] for call in schema["items"]["anyOf"])
    assert forced(tool_choice="required", parallel_tool_calls=False)["json"]["maxItems"] == 1
    text = '[{"name": "ping", "parameters": {}}, {"name": "weather", "parameters": {"city": "Oslo"}}]'
    actual = message(text, tool_choice="required")
    assert functions(actual) == [("ping", "{}"), ("weather", '{"city": "Oslo"}')] and actual["content"] is None


def test_references_inside_parameters_still_meet_their_definitions() -> None:
    inner = {"type": "object", "properties": {"p": {"$ref": "#/$defs/P"}, "q": {"$ref": "#"}}, "$defs": {"P": {}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": inner}}
    schema = forced(tools=[TOOLS[1], tool], tool_choice="required")["json"]
    assert schema["items"]["anyOf"][1]["properties"]["parameters"] == {"$ref": "#/$defs/f"}
    actual = schema["$defs"]["f"]["properties"]
    assert actual == {"p": {"$ref": "#/$defs/f/$defs/P"}, "q": {"$ref": "#/$defs/f"}}


@pytest.mark.parametrize("more", [{"additionalProperties": {"type": "string"}}, {"allOf": [{}]}, {"$ref": "#/$defs/A"}])
def test_a_schema_with_additional_properties_is_unchanged(more: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": more}}
    choice = {"type": "function", "function": {"name": "f"}}
    assert forced(tools=[tool], tool_choice=choice)["json"] == {"type": "object"} | more


# an answer of some form, or calls

VERDICT = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": {"enum": ["yes"]}}}


def test_structured_outputs_with_tools_constrain_content_and_calls() -> None:
    for field in ({"response_format": VERDICT}, {"structured_outputs": {"choice": ["yes"]}}):
        grammar = forced(**field)["grammar"]
        assert "yes" in grammar and '"<tool_call>" inside' in grammar and '{"const": "weather"}' in grammar
        assert "(gap? call){" in grammar and "(gap? call)" not in forced(**field, parallel_tool_calls=False)["grammar"]
        for choice in ("required", NAMED):  # whose answer is nothing but calls
            assert forced(**field, tool_choice=choice) == forced(tool_choice=choice)
    assert forced(structured_outputs={"choice": ["yes"]}, tool_choice="none") == {"choice": ["yes"]}


@pytest.mark.parametrize("options", [{}, {"reasoning_parser": "qwen3"}], ids=str)
def test_with_structured_outputs_calls_and_content_are_parsed(options: dict[str, Any]) -> None:
    choice = ask(chat_site(CALL, **options), response_format=VERDICT)["choices"][0]
    assert functions(choice["message"]) == [("weather", '{"city": "Rome"}')] and choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    choice = ask(chat_site('"yes"', **options), response_format=VERDICT)["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": '"yes"', "refusal": None, "reasoning": None}
    assert choice["finish_reason"] == "stop"


def test_tools_without_a_grammar_are_refused_with_structured_outputs() -> None:
    nameless = [{"type": "function", "function": {"name": "f", "parameters": {"anyOf": [PARAMETERS]}}}]
    coder = chat_site("a", tool_call_parser="qwen3_coder")
    for field in ({"response_format": VERDICT}, {"structured_outputs": {"regex": "a"}}):
        param, code, words = refusal(coder, tools=nameless, **field)
        assert (param, code) == (*field, "unsupported") and words.startswith(f"{param} and tools") and "anyOf" in words
    assert refusal(chat_site("a", "{{ tools }}"), response_format=VERDICT)[:2] == ("tools", "unsupported")


def test_only_allowed_tools_are_called() -> None:
    """The prompt shows all tools, so that a conversation keeps its prefix; the grammar has the allowed ones."""
    grammar = forced(tool_choice=allowed("auto", PING))["grammar"]
    assert '{"const": "ping"}' in grammar and "weather" not in grammar
    assert forced(tool_choice=allowed("auto", PING, NAMED)) is None
    schema = forced(tool_choice=allowed("required", PING))["json"]
    assert schema == forced(tools=[TOOLS[1]], tool_choice="required")["json"]
    verdict = forced(tool_choice=allowed("auto", PING), response_format=VERDICT)
    assert verdict == forced(tools=[TOOLS[1]], response_format=VERDICT)
    prompts = []
    for choice in ("auto", allowed("auto", PING)):
        s = chat_site(CALL)
        actual = ask(s, tool_choice=choice)["choices"][0]["message"]
        prompts.append(s.llm.calls[0].prompt)
    assert prompts[0] == prompts[1] and functions(actual) == [("weather", '{"city": "Rome"}')]
    bare = chat_site('{"name": "weather", "parameters": {"city": "Rome"}}', LLAMA)
    assert "tool_calls" not in ask(bare, tool_choice=allowed("auto", PING))["choices"][0]["message"]
    assert functions(ask(bare)["choices"][0]["message"]) == [("weather", '{"city": "Rome"}')]


def test_allowed_tools_without_a_grammar_are_refused() -> None:
    odd = [{"type": "function", "function": {"name": "a b"}}, TOOLS[1]]
    choice = allowed("auto", {"type": "function", "function": {"name": "a b"}})
    coder = chat_site("a", tool_call_parser="qwen3_coder")
    param, code, words = refusal(coder, tools=odd, tool_choice=choice)
    assert (param, code) == ("tool_choice", "unsupported") and words.startswith("tool_choice: some tools cannot")


def strictly(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True} | fields}, TOOLS[1]]


def test_calls_of_strict_functions_keep_to_their_schemas() -> None:
    grammar = forced(tools=strictly())["grammar"]
    assert '{"const": "weather"}' in grammar and "added: <[0-2]>" in grammar
    assert '"required": ["city"], "additionalProperties": false' in grammar
    assert "(head rest (TEXT added)*)* TEXT" in grammar
    assert "(head rest (TEXT added)*)? TEXT" in forced(tools=strictly(), parallel_tool_calls=False)["grammar"]
    assert forced(tools=strictly(strict=False)) is None and forced(tools=strictly(strict=None)) is None
    assert forced(tools=strictly(), tool_choice="none") is None
    assert forced(tools=strictly(), tool_choice=NAMED) == forced(tool_choice=NAMED)
    assert forced(tools=strictly(), response_format=VERDICT) == forced(response_format=VERDICT)
    s = chat_site(f"<think>hm</think>Yes {CALL}", reasoning_parser="qwen3")
    actual = ask(s, tools=strictly())["choices"][0]["message"]
    assert functions(actual) == [("weather", '{"city": "Rome"}')]
    assert (actual["reasoning"], actual["content"]) == ("hm", "Yes")


def test_strict_functions_without_a_grammar() -> None:
    nameless = strictly(parameters={"anyOf": [PARAMETERS]})
    assert refusal(chat_site("a", tool_call_parser="qwen3_coder"), tools=nameless)[:2] == ("tools", "unsupported")
    s = chat_site("a", LLAMA)  # whose calls nothing tells from other JSON
    ask(s, tools=nameless)
    assert s.llm.calls[-1].params.structured_outputs is None


# what the model sees


def test_a_template_that_shows_no_tools_serves_all_but_free_calls() -> None:
    s = site(says("[]"))  # its template knows no tools
    assert refusal(s)[:2] == ("tools", "unsupported")
    for choice in ("required", NAMED, "none"):
        assert s.post(CHAT, {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}).status_code == 200
        assert TOKENIZER.decode(s.llm.calls[-1].prompt, False) == "user:hi;assistant:"
    for choice in ("required", NAMED, "auto"):
        shown = chat_site("[]")
        assert shown.post(CHAT, {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}).status_code == 200
        assert '"weather"' in TOKENIZER.decode(shown.llm.calls[-1].prompt, False)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (HERMES, CALL),
        (MISTRAL, f"[TOOL_CALLS] [{ROME}]"),
        (LLAMA, '{"name": "weather", "parameters": {"city": "Rome"}}'),
    ],
)
def test_a_call_and_its_result_go_back_into_the_conversation(template: str, text: str) -> None:
    s = chat_site(text, template)
    message = ask(s)["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
    assert s.post(CHAT, {"messages": [*MESSAGES, message, result], "tools": TOOLS}).status_code == 200
    prompt = TOKENIZER.decode(s.llm.calls[-1].prompt, False)
    assert '{"city": "Rome"}' in prompt and "sunny" in prompt


def test_the_prompt_may_come_as_ids() -> None:
    body = {"tokens": ids("x"), "tools": TOOLS}
    for choice, text in (("auto", CALL), (NAMED, '{"city": "Rome"}')):
        reply = chat_site(text).post(CHAT + "/tokens", body | {"tool_choice": choice}).json()
        assert functions(reply["choices"][0]["message"]) == [("weather", '{"city": "Rome"}')]


# reasoning


@pytest.mark.parametrize(
    ("template", "fields", "text", "reasoning", "content"),
    [
        (THINKER, {}, "<think>\nhm\n</think>\n\nYes.", "hm", "Yes."),
        (THINKER, {"chat_template_kwargs": {"enable_thinking": False}}, "Yes.", None, "Yes."),
        (OPENED, {}, "hm\n</think>\n\nYes.", "hm", "Yes."),
        (OPENED, {}, "hm", "hm", None),
        (THINKER, {}, "Yes <think>.", None, "Yes <think>."),
        (OPENED, {"response_format": {"type": "json_object"}}, "hm</think>{}", "hm", "{}"),
    ],
)
def test_reasoning_is_separated_from_content(
    template: str, fields: dict[str, Any], text: str, reasoning: str | None, content: str | None
) -> None:
    s = chat_site(text, template, reasoning_parser="qwen3")
    actual = ask(s, tools=None, **fields)["choices"][0]["message"]
    assert (actual.get("reasoning"), actual["content"]) == (reasoning, content)


@pytest.mark.parametrize(("text", "content"), [("hm\n</think>\n\nYes.", "Yes."), ("hm", None)])
def test_reasoning_is_left_out_on_request(text: str, content: str | None) -> None:
    s = chat_site(text, OPENED, reasoning_parser="qwen3")
    fields: dict[str, Any] = {"tools": None, "return_token_ids": True}
    shown, hidden = ask(s, **fields), ask(s, **fields, include_reasoning=False)
    choice, actual = shown["choices"][0], hidden["choices"][0]
    assert actual["message"] == {"role": "assistant", "content": content, "refusal": None, "reasoning": None}
    assert choice["message"]["reasoning"] == "hm" and ask(s, **fields, include_reasoning=True)["choices"] == [choice]
    assert actual["token_ids"] == choice["token_ids"] and shown["usage"] == hidden["usage"]
    body = {"messages": MESSAGES, "return_token_ids": True, "include_reasoning": False, "request_id": "r"}
    (streamed,) = joined(s.events(CHAT, body))
    assert streamed == flat(hidden)[0]
    generated = s.post(GENERATE, s.post(CHAT + "/render", body).json()).json()
    back = s.post(CHAT + "/derender", {"generate_response": generated, "chat_request": body}).json()
    assert back["choices"][0]["message"] == actual["message"]


def test_reasoning_is_content_without_a_reasoning_parser() -> None:
    s = chat_site("<think>hm</think>Yes", THINKER, reasoning_parser="none")
    assert ask(s, tools=None)["choices"][0]["message"]["content"] == "<think>hm</think>Yes"
    for template, parsed in ((THINKER, "Yes"), (HERMES, "<think>hm</think>Yes")):  # which says nothing of reasoning
        assert message("<think>hm</think>Yes", template, tools=None)["content"] == parsed


def test_derender_reads_from_the_messages_whether_reasoning_is_open() -> None:
    s = chat_site("hm</think>Yes", OPENED, reasoning_parser="qwen3")
    body = {"messages": MESSAGES}
    rendered = s.post(CHAT + "/render", body).json()
    generated = s.post(GENERATE, rendered).json()
    for more in ({"chat_request": body}, {"chat_request": {}, "prompt_token_ids": rendered["token_ids"]}):
        back = s.post(CHAT + "/derender", {"generate_response": generated} | more).json()["choices"][0]["message"]
        assert (back["reasoning"], back["content"]) == ("hm", "Yes")
    for more in ({}, {"chat_request": {}}):
        back = s.post(CHAT + "/derender", {"generate_response": generated} | more).json()["choices"][0]["message"]
        assert back["content"] == "hm</think>Yes"
    wrong = s.post(CHAT + "/derender", {"generate_response": generated, "chat_request": {"messages": []}}).json()
    assert wrong["error"]["param"] == "chat_request.messages"


# options and refusals


def test_the_format_may_be_named() -> None:
    s = chat_site(f"[TOOL_CALLS] [{ROME}]", tool_call_parser="mistral")
    assert functions(ask(s)["choices"][0]["message"]) == [("weather", '{"city": "Rome"}')]
    assert ask(chat_site(CALL, DEEPSEEK))["choices"][0]["message"]["content"] == CALL


@pytest.mark.parametrize("path", [CHAT, CHAT + "/tokens", CHAT + "/render"])
@pytest.mark.parametrize("options", [{}, {"enable_auto_tool_choice": False, "tool_call_parser": "hermes"}], ids=str)
def test_without_a_tool_format_auto_is_refused_with_the_alternatives(path: str, options: dict[str, Any]) -> None:
    s = chat_site("a", "{{ tools }}{{ messages[0].content }}", **options)
    for more, field in (({}, "tools"), ({"tool_choice": "auto"}, "tool_choice")):
        param, code, words = refusal(s, path, **more)
        assert (param, code) == (field, "unsupported")
        assert ("--no-enable-auto-tool-choice" if options else "formats does: hermes, seed_oss") in words


def test_unusable_options_are_refused_at_the_start() -> None:
    with pytest.raises(StartError, match="--tool-call-parser"):
        site(enable_auto_tool_choice=True)
    for option, table in (("tool_call_parser", TOOL_FORMATS), ("reasoning_parser", THINKING)):
        for form in table:
            resolve(Config.make(model="demo", **{option: form.name}))
        with pytest.raises(StartError, match=f"option {option}: must be one of auto, .*{table[0].name}"):
            resolve(Config.make(model="demo", **{option: "x"}))
    for options in ({"reasoning_parser": "qwen3"}, {"enable_auto_tool_choice": True}):
        with pytest.raises(StartError, match="tokens_only"):
            resolve(Config.make(model="demo", tokens_only=True, **options))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tool_choice": allowed("any")}, "tool_choice.allowed_tools.mode"),
        ({"tool_choice": allowed("auto", {})}, "tool_choice.allowed_tools.tools[0].type"),
        ({"tool_choice": allowed("auto", {"type": "function", "name": "ping"})}, f"{ALLOWED}[0].function"),
        ({"tool_choice": allowed("auto", NAMED, {"type": "function", "function": {}})}, f"{ALLOWED}[1].function.name"),
        ({"tool_choice": allowed("auto", other())}, f"{ALLOWED}[0].function.name"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}, ALLOWED),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tool_choice": other()}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": None, "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": "x"}}]}, "tools[0].function.strict"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": "5"}}, "structured_outputs.json"),
    ],
)
def test_refusals(fields: dict[str, Any], param: str) -> None:
    assert refusal(chat_site("a"), **fields)[0] == param
    generated = {"choices": [{"token_ids": [5]}]}
    back = chat_site("a").post(
        CHAT + "/derender",
        {"generate_response": generated, "chat_request": {"messages": MESSAGES, "tools": TOOLS} | fields},
    )
    assert back.json()["error"]["param"] == f"chat_request.{param}"


def test_parameters_that_are_nested_too_deeply() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(RequestError, match="nested") as caught:
        tools.make_plan(
            [{"type": "function", "function": {"name": "f", "parameters": deep}}],
            "required",
            parallel=True,
            response_format=None,
            form=None,
            thinking=None,
            tokenizer=byte_tokenizer(),
        )
    assert caught.value.field == "tools[0].function.parameters"
    with pytest.raises(RequestError) as caught:
        tools.check_functions([{"type": "function", "function": {"name": ""}}])
    assert caught.value.field == "tools[0].function.name"


def special_tokenizer() -> Tokenizer:
    plain = byte_tokenizer()
    backend = tokenizers.Tokenizer.from_str(plain._backend.to_str())
    backend.add_special_tokens(["[TOOL_CALLS]"])
    return Tokenizer(backend, plain.special_tokens, plain.chat_template)


def test_markers_that_are_special_tokens_stay_in_the_text() -> None:
    tokenizer = special_tokenizer()
    for form in TOOL_FORMATS:
        plan = tools.make_plan(
            TOOLS, None, parallel=True, response_format=None, form=form, thinking=None, tokenizer=tokenizer
        )
        assert ("skip_special_tokens" in plan.params(tokenizer)) == (form.name == "mistral")
    plan = tools.make_plan(
        TOOLS, "none", parallel=True, response_format=None, form=TOOL_FORMATS[2], thinking=None, tokenizer=tokenizer
    )
    assert plan.params(tokenizer) == {"structured_outputs": None}


def test_what_is_forced_is_json_that_the_parser_reads_back() -> None:
    (call,) = message(json.dumps([{"name": "weather", "parameters": {"city": "ß"}}]), tool_choice="required")[
        "tool_calls"
    ]
    assert json.loads(call["function"]["arguments"]) == {"city": "ß"}


CONCATENATES = (  # a template that shows calls and adds contents up as text
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% for c in m.tool_calls or [] %}"
    "{{ '\n' if m.content or not loop.first }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "{% endfor %}{{ tools | length if tools }}"
)


def test_a_forced_call_can_be_sent_back() -> None:
    s = chat_site('{"city": "Rome"}', CONCATENATES)
    message = ask(s, tool_choice=NAMED)["choices"][0]["message"]
    assert message["content"] is None and message["tool_calls"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
    ask(s, messages=[*MESSAGES, message, result], tool_choice=NAMED)
    turn = f"<user>hi<assistant><tool_call>\n{ROME}\n</tool_call><tool>sunny"
    assert TOKENIZER.decode(s.llm.calls[-1].prompt, False).startswith(turn)
    function = message["tool_calls"][0]["function"]
    items = [
        *MESSAGES,
        {"type": "function_call", "call_id": "c1", **function},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    answer = s.post("/v1/responses", {"input": items})
    assert answer.status_code == 200, answer.text
    assert TOKENIZER.decode(s.llm.calls[-1].prompt, False) == turn


def test_strict_closes_the_objects_in_a_functions_arguments() -> None:
    nested = {"type": "object", "properties": {"at": {"type": "object", "properties": {"x": {}}}}}
    for strict, actual in ((True, {"additionalProperties": False}), (False, {}), (None, {})):
        function = {"type": "function", "function": {"name": "f", "parameters": nested, "strict": strict}}
        named = {"type": "function", "function": {"name": "f"}}
        schema = forced(tools=[function], tool_choice=named)["json"]
        assert schema["properties"]["at"] == nested["properties"]["at"] | actual  # type: ignore[index]
        (arguments,) = forced(tools=[function], tool_choice="required")["json"]["$defs"].values()
        assert arguments["properties"]["at"] == nested["properties"]["at"] | actual  # type: ignore[index]


BLIND = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"  # shows no tools


def test_refusals_of_free_calls_name_the_cure_that_works(tmp_path: Path) -> None:
    path = tmp_path / "tools.jinja"
    path.write_text(HERMES)
    for options in ({}, {"tool_call_parser": "hermes"}):
        for fields in ({}, {"tool_choice": "auto"}):
            _, _, message = refusal(chat_site("a", BLIND, **options), **fields)
            assert "--chat-template FILE" in message and '"none"' not in message
            assert ask(chat_site('{"city": "Rome"}', BLIND, **options), tool_choice=NAMED)
            assert ask(chat_site(CALL, str(path), **options), **fields)["choices"][0]["message"]["tool_calls"]
    assert ask(chat_site("a", BLIND), tool_choice="none")["choices"][0]["message"]["content"] == "a"


def test_max_tool_calls() -> None:
    def most(**fields: Any) -> int:
        actual: int = forced(tool_choice="required", **fields)["json"]["maxItems"]
        return actual

    assert (most(), most(max_tool_calls=None), most(max_tool_calls=3), most(max_tool_calls=128)) == (16, 16, 3, 128)
    assert most(max_tool_calls=3, parallel_tool_calls=False) == 1
    assert "(gap? call){0,15}" in forced(response_format=VERDICT)["grammar"]
    assert "(gap? call){0,2}" in forced(response_format=VERDICT, max_tool_calls=3)["grammar"]
    two = functions(message(f"{CALL}\n" * 3, max_tool_calls=2))
    assert two == [("weather", '{"city": "Rome"}')] * 2
    many = ask(chat_site(CALL * 20, max_model_len=4096))["choices"][0]["message"]  # a free model's calls are its own
    assert len(functions(many)) == 20
    streamed = chat_site(CALL * 3).events(CHAT, {"messages": MESSAGES, "tools": TOOLS, "max_tool_calls": 2})
    assert len(joined(streamed)[0]["calls"]) == 2
    s = chat_site(CALL * 3)
    flat_tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    reply = s.post("/v1/responses", {"input": "hi", "tools": flat_tools, "max_tool_calls": 2}).json()
    assert reply["max_tool_calls"] == 2 and [item["type"] for item in reply["output"]] == ["function_call"] * 2
    for wrong in (0, -1, 129):
        param, _, words = refusal(chat_site("a"), max_tool_calls=wrong)
        assert param == "max_tool_calls" and "from 1 to 128" in words
    assert refusal(chat_site("a"), max_tool_calls="2")[0] == "max_tool_calls"


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"response_format": {"type": "json_object"}}, {}])
def test_descriptions_of_many_tools_do_not_count(fields: dict[str, Any]) -> None:
    """100 KB of tools, most of it descriptions, which no grammar needs (serving-faults F9)."""
    parameter = {"type": "string", "description": "e" * 200, "examples": ["f" * 100]}
    many = [
        {
            "type": "function",
            "function": {
                "name": f"tool{i}",
                "description": "d" * 1200,
                "strict": True,
                "parameters": {"type": "object", "properties": {"a": parameter, "b": parameter}, "title": "T"},
            },
        }
        for i in range(60)
    ]
    assert len(json.dumps(many)) > 100_000
    s = chat_site("a", HERMES.replace("tool | tojson", "tool.function.name"))
    assert ask(s, tools=many, **fields)["choices"]
    form = s.llm.calls[-1].params.structured_outputs
    assert form is not None and "eee" not in str(form) and "dddd" not in str(form)
