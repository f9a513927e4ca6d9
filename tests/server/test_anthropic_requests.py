"""/v1/messages, /v1/messages/count_tokens, /v1/messages/render: what becomes of a body, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.server.byte_tokenizer import TOKENIZER
from tests.server.scripted_llm import says
from tests.server.site import Site, chat_site, site
from tests.server.test_openapi import numbers
from tests.text.tool_templates import HERMES, MISTRAL, OPENED, THINKER
from tokserve.dialects.anthropic.bodies import CountTokensBody, MessagesBody
from tokserve.features.chat.chat import ChatTemplate

MESSAGES, COUNT, RENDER, CHAT = (
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/messages/render",
    "/v1/chat/completions",
)
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": HI}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {"name": "weather", "description": "d", "input_schema": SCHEMA},
    {"name": "ping", "input_schema": {}},
]
FUNCTIONS = [
    {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "ping", "parameters": {"type": "object"}}},
]
ONE_SYSTEM = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('one') }}{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}"  # noqa: E501


@pytest.fixture(scope="module")
def server() -> Site:
    return chat_site("x")


def prompt(s: Site, **fields: Any) -> str:
    """The prompt that a body comes to, which all three routes agree on."""
    answer = s.post(RENDER, BODY | fields)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["token_ids"]
    counted = s.post(COUNT, {name: value for name, value in (BODY | fields).items() if name != "max_tokens"})
    assert counted.json() == {"input_tokens": len(tokens), "context_management": {"original_input_tokens": len(tokens)}}
    assert s.post(MESSAGES, BODY | fields).status_code == 200
    assert s.llm.calls[-1].prompt == tokens
    return TOKENIZER.decode(tokens, False)


def as_chat(s: Site, messages: list[dict[str, Any]], **fields: Any) -> str:
    answer = s.post(f"{CHAT}/render", {"messages": messages, "max_tokens": 9} | fields)
    assert answer.status_code == 200, answer.text
    return TOKENIZER.decode(answer.json()["token_ids"], False)


CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
USE = {"type": "tool_use", "id": "abcdefghi", "name": "weather", "input": {"city": "Oslo"}}
RESULT = {"type": "tool_result", "tool_use_id": "abcdefghi"}
TEXT = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "citations": None}
MORE = {"type": "text", "text": "b"}
BILLING = {"type": "text", "text": "x-anthropic-billing-header: cch=1;"}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}
CONVERSATIONS: list[tuple[Any, list[dict[str, Any]], list[dict[str, Any]]]] = [  # system, messages, chat messages
    (None, HI, HI),
    ("s", HI, [{"role": "system", "content": "s"}, *HI]),
    ("", HI, HI),
    ([TEXT, MORE], HI, [{"role": "system", "content": [TEXT, MORE]}, *HI]),
    ([BILLING, TEXT], HI, [{"role": "system", "content": "a"}, *HI]),
    ([BILLING], HI, HI),
    ("x-anthropic-billing-header: cch=1;\n\na", HI, [{"role": "system", "content": "a"}, *HI]),
    (None, [{"role": "user", "content": [TEXT]}], [{"role": "user", "content": "a"}]),
    (None, [{"role": "user", "content": []}], [{"role": "user", "content": ""}]),
    (
        None,
        [*HI, {"role": "user", "content": [TEXT]}],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "a"}]}],
    ),
    (None, [*HI, {"role": "assistant", "content": "so"}, *HI], [*HI, {"role": "assistant", "content": "so"}, *HI]),
    (
        None,
        [
            *HI,
            {"role": "assistant", "content": [THOUGHT, {"type": "redacted_thinking", "data": "?"}, TEXT, USE]},
            {"role": "user", "content": [RESULT | {"content": "sunny", "is_error": False}]},
        ],
        [
            *HI,
            {"role": "assistant", "reasoning": "hm", "content": "a", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "abcdefghi", "content": "sunny"},
        ],
    ),
    (
        None,
        [
            *HI,
            {"role": "assistant", "content": [USE]},
            {"role": "assistant", "content": [USE | {"input": {}}]},
            {"role": "user", "content": [TEXT, RESULT, RESULT | {"content": [TEXT], "is_error": True}]},
            *HI,
        ],
        [
            *HI,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [CALL, CALL | {"function": {"name": "weather", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "abcdefghi", "content": ""},
            {"role": "tool", "tool_call_id": "abcdefghi", "content": "a", "is_error": True},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "hi"}]},
        ],
    ),
    (
        "s",
        [*HI, {"role": "system", "content": [TEXT]}, {"role": "assistant", "content": "so"}, *HI],
        [
            {"role": "system", "content": "s"},
            *HI,
            {"role": "system", "content": "a"},
            {"role": "assistant", "content": "so"},
            *HI,
        ],
    ),
    ("s", [{"role": "system", "content": "t"}, *HI], [{"role": "system", "content": "s\n\nt"}, *HI]),
    (None, [*HI, {"role": "system", "content": "x-anthropic-billing-header: 1"}], HI),
]


@pytest.mark.some(19)
@pytest.mark.parametrize(("system", "messages", "chat"), CONVERSATIONS, ids=range(len(CONVERSATIONS)))
@pytest.mark.parametrize("template", [HERMES, THINKER], ids=["hermes", "thinker"])
def test_a_conversation_is_that_of_chat(template: str, system: Any, messages: Any, chat: Any) -> None:
    s = chat_site("x", template=template)
    assert prompt(s, system=system, messages=messages) == as_chat(s, chat)


PLAIN = {"type": "text", "media_type": "text/plain", "data": "the text"}
DOCUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"type": "document", "source": PLAIN}, "the text"),
    (
        {"type": "document", "source": PLAIN, "title": None, "citations": {"enabled": False}, "cache_control": None},
        "the text",
    ),
    ({"type": "document", "source": PLAIN, "context": "c", "title": "t"}, "t\n\nc\n\nthe text"),
    ({"type": "document", "source": {"type": "content", "content": "the text"}, "title": "t"}, "t\n\nthe text"),
    ({"type": "document", "source": {"type": "content", "content": [TEXT, TEXT]}}, "a\n\na"),
    ({"type": "search_result", "source": "http://u", "title": "t", "content": [TEXT]}, "t\n\nhttp://u\n\na"),
]


@pytest.mark.parametrize(("block", "text"), DOCUMENTS)
def test_documents_and_search_results_become_text(server: Site, block: dict[str, Any], text: str) -> None:
    """serving-faults, refusals."""
    assert prompt(server, messages=[{"role": "user", "content": [block]}]) == as_chat(
        server, [{"role": "user", "content": text}]
    )
    parts = [{"type": "text", "text": text}, {"type": "text", "text": "and?"}]
    followed = prompt(server, messages=[{"role": "user", "content": [block, parts[1]]}])
    assert followed == as_chat(server, [{"role": "user", "content": parts}])
    turns = [*HI, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT | {"content": [block]}]}]
    assert text in prompt(server, messages=turns)


def test_a_final_turn_of_the_assistant_is_continued(server: Site) -> None:
    begun = {"role": "assistant", "content": "The answer is"}
    for content in ("The answer is", [{"type": "text", "text": "The answer is"}]):
        text = prompt(server, messages=[*HI, begun | {"content": content}])
        assert text == as_chat(server, [*HI, begun], continue_final_message=True) and text.endswith("The answer is")


def test_system_messages_move_only_where_the_template_demands_it() -> None:
    messages = [
        *HI,
        {"role": "system", "content": "a"},
        {"role": "assistant", "content": "so"},
        *HI,
        {"role": "system", "content": [TEXT, TEXT]},
    ]
    s = chat_site("x", ONE_SYSTEM)
    assert prompt(s, system="s", messages=messages).startswith("system:s\n\na\n\na\na;user:hi;")
    assert prompt(s, messages=messages).startswith("system:a\n\na\na;user:hi;assistant:so;")


@pytest.mark.parametrize(
    ("template", "stay"),
    [
        (HERMES, True),
        (THINKER, True),
        (OPENED, True),
        (ONE_SYSTEM, False),
        (MISTRAL, True),
        ("{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}", False),
        (
            "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
            "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
            False,
        ),
        (
            "{% for m in messages %}{% if tools and m.role == 'system' and not loop.first %}{{ raise_exception('') }}"
            "{% endif %}{{ m.content }}{% endfor %}",
            False,
        ),
    ],
)
def test_where_a_template_takes_system_messages(template: str, stay: bool) -> None:
    assert ChatTemplate(TOKENIZER, template).takes_later_system is stay


def sent(s: Site, **fields: Any) -> dict[str, Any]:
    """What render makes of a body, without its prompt."""
    answer = s.post(RENDER, BODY | fields)
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [  # of messages, and of chat
    ({}, {}),
    ({"stop_sequences": ["a", "b"]}, {"stop": ["a", "b"]}),
    ({"temperature": 0.5, "top_p": 0.5, "top_k": 3, "stream": True},) * 2,
    ({"seed": 3, "min_p": 0.1, "ignore_eos": True, "stop_token_ids": [5], "logit_bias": {"5": 1}},) * 2,
    ({"cache_salt": "s", "priority": 3, "vllm_xargs": {"a": 1}, "deadline_ms": 5, "group_id": "g"},) * 2,
    ({"structured_outputs": {"regex": "a+"}},) * 2,
    ({"chat_template_kwargs": {"enable_thinking": False}},) * 2,
    ({"tools": TOOLS}, {"tools": FUNCTIONS}),
    ({"tools": TOOLS, "tool_choice": {"type": "auto"}}, {"tools": FUNCTIONS, "tool_choice": "auto"}),
    ({"tools": TOOLS, "tool_choice": {"type": "none"}}, {"tools": FUNCTIONS, "tool_choice": "none"}),
    ({"tools": TOOLS, "tool_choice": {"type": "any"}}, {"tools": FUNCTIONS, "tool_choice": "required"}),
    (
        {"tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"tools": FUNCTIONS, "tool_choice": "required", "parallel_tool_calls": False},
    ),
    (
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "ping"}},
        {"tools": FUNCTIONS, "tool_choice": {"type": "function", "function": {"name": "ping"}}},
    ),
    (
        {"tools": [TOOLS[0] | {"strict": True, "type": "custom", "cache_control": {"type": "ephemeral"}}]},
        {"tools": [{"type": "function", "function": FUNCTIONS[0]["function"] | {"strict": True}}]},
    ),  # type: ignore[dict-item]
    (
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "output", "schema": SCHEMA, "strict": True},
            }
        },
    ),
    (
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "output", "schema": SCHEMA, "strict": True},
            }
        },
    ),
    ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
    ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
    ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, {"reasoning_effort": "none"}),
    ({"thinking": {"type": "adaptive", "display": "summarized"}}, {}),
    ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, {"reasoning_effort": "max"}),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1025},
        {"chat_template_kwargs": {"enable_thinking": True}, "max_tokens": 1025, "thinking_token_budget": 1024},
    ),
    ({"metadata": {"user_id": "u"}, "service_tier": "auto", "context_management": {"edits": []}}, {}),
]


@pytest.mark.parametrize(("fields", "chat"), FIELDS, ids=range(len(FIELDS)))
def test_fields_are_those_of_chat(fields: dict[str, Any], chat: dict[str, Any]) -> None:
    s = chat_site("x", template=THINKER, reasoning_parser="qwen3")
    expected = s.post(f"{CHAT}/render", {"model": "tiny", "messages": HI, "max_tokens": 9} | chat)
    assert expected.status_code == 200, expected.text
    # each rendering has an id of its own
    assert sent(s, **fields) | {"request_id": ""} == expected.json() | {"request_id": ""}


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"metadata": {"user_id": "u"}}, "metadata"),
        ({"no_such_name": 1}, "no_such_name"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking, thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        ({"thinking": {"type": "disabled"}}, None),
        ({"service_tier": "standard_only", "speed": "standard", "mcp_servers": [], "thread": None}, None),
    ],
)
def test_what_has_no_effect_is_named(server: Site, fields: dict[str, Any], ignored: str | None) -> None:
    for path in (MESSAGES, RENDER, COUNT):
        answer = server.post(path, BODY | fields | ({"max_tokens": 1025} if path != COUNT else {}))
        named = answer.headers.get("x-ignored-fields", "").removeprefix("max_tokens" if path == COUNT else "")
        assert answer.status_code == 200 and named.removeprefix(", ") == (ignored or ""), answer.text


def test_an_effort_that_no_template_reads_is_named(server: Site) -> None:
    answer = server.post(MESSAGES, BODY | {"output_config": {"effort": "low"}})
    assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == "output_config.effort"


@pytest.mark.parametrize(
    ("choice", "status"),
    [
        (None, 400),
        ({"type": "auto"}, 400),
        ({"type": "none"}, 200),
        ({"type": "any"}, 200),
        ({"type": "tool", "name": "weather"}, 200),
    ],
)
def test_all_routes_refuse_the_same_tools_where_the_template_shows_none(
    choice: dict[str, Any] | None, status: int
) -> None:
    s = site(says("[]"))
    fields = {"tools": TOOLS[:1], "tool_choice": choice}
    if status == 200:
        assert prompt(s, **fields) == "user:hi;assistant:"
    for path in (MESSAGES, RENDER, COUNT):
        answer = s.post(path, BODY | fields)
        assert answer.status_code == status
        assert status == 200 or "--chat-template FILE" in answer.json()["error"]["message"]


def test_deferred_tools_are_shown_once_the_conversation_refers_to_them(server: Site) -> None:
    tools = [TOOLS[0] | {"defer_loading": True}, TOOLS[1]]
    result = RESULT | {"content": [{"type": "tool_reference", "tool_name": "weather"}]}
    loaded = [*HI, {"role": "assistant", "content": [USE | {"name": "ping"}]}, {"role": "user", "content": [result]}]
    assert '"weather"' not in prompt(server, tools=tools) and '"ping"' in prompt(server, tools=tools)
    assert '"weather"' in prompt(server, tools=tools, messages=loaded)
    by_name = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "weather"}}
    removal = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "weather"}}
    added, removed = ({"role": "system", "content": [block]} for block in (by_name, removal))
    assert '"weather"' in prompt(server, tools=tools, messages=[*HI, added])
    assert '"weather"' not in prompt(server, tools=tools, messages=[*HI, added, *HI, removed])
    defined = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": TOOLS[0]}}
    assert '"weather"' in prompt(server, messages=[*HI, {"role": "system", "content": [defined]}])
    only = {"type": "tool", "name": "weather"}
    assert refused(server.post(MESSAGES, BODY | {"tools": tools, "tool_choice": only}), 400, "tool_choice")


def refused(answer: Any, status: int, *words: str) -> str:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()
    assert set(error) == {"type", "error"} and error["type"] == "error" and set(error["error"]) == {"type", "message"}
    message: str = error["error"]["message"]
    assert all(word in message for word in words), message
    kinds = {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        405: "invalid_request_error",
        409: "invalid_request_error",
        413: "request_too_large",
        429: "rate_limit_error",
        500: "api_error",
        503: "overloaded_error",
    }
    assert error["error"]["type"] == kinds[status]
    return message


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"messages": [*HI, {"role": "assistant", "content": list(blocks)}]}


def system(*blocks: Any) -> dict[str, Any]:
    return {"messages": [*HI, {"role": "system", "content": list(blocks)}]}


DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
CONVERSATIONS_REFUSED: list[tuple[dict[str, Any], str]] = [  # of both routes
    ({"model": None}, "model is required"),
    ({"model": ""}, "model is required"),
    ({"model": 5}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages must not be empty"),
    ({"messages": "x"}, "messages"),
    ({"messages": [5]}, "messages[0] must be an object"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role must be one of user, assistant, system"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is required"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content must be a string or a list of blocks"),
    (user("x"), "messages[0].content[0] must be an object"),
    (user({}), "messages[0].content[0].type is required"),
    (user({"type": 5}), "messages[0].content[0].type must be a string"),
    (user({"type": "text"}), "messages[0].content[0].text is required"),
    (user(TEXT, {"type": "text", "text": 5}), "messages[0].content[1].text must be a string"),
    (user(IMAGE), "messages[0].content[0].type is 'image': this model takes no images"),
    (user({"type": "document"}), "messages[0].content[0].source is required"),
    (user({"type": "server_tool_use"}), "messages[0].content[0].type must be text, image, document"),
    (user({"type": "document", "source": {}}), "messages[0].content[0].source.type must be text or content"),
    (
        user(DOCUMENT | {"source": {"type": "base64", "media_type": "application/pdf", "data": "x"}}),
        "messages[0].content[0].source.type must be text or content, got 'base64': no PDF, URL or file is read here",
    ),
    (user(DOCUMENT | {"source": {"type": "text", "data": 5}}), "messages[0].content[0].source.data must be a string"),
    (user(DOCUMENT | {"source": {"type": "content", "content": [5]}}), "messages[0].content[0].source.content[0] must"),
    (
        user(DOCUMENT | {"source": {"type": "content", "content": [IMAGE]}}),
        "messages[0].content[0].source.content[0].type is 'image': this model takes no images",
    ),
    (user(DOCUMENT | {"title": 5}), "messages[0].content[0].title must be a string"),
    (user(DOCUMENT | {"citations": {"enabled": True}}), "messages[0].content[0].citations are not supported"),
    (user({"type": "search_result", "title": "t", "content": []}), "messages[0].content[0].source is required"),
    (user(USE), "messages[0].content[0].type"),
    (user(THOUGHT), "messages[0].content[0].type"),
    (user({"type": "tool_addition", "tool": {}}), "messages[0].content[0].type"),
    (user({"type": "tool_result", "content": "x"}), "messages[0].content[0].tool_use_id is required"),
    (user(RESULT | {"content": 5}), "messages[0].content[0].content must be"),
    (user(RESULT | {"content": ["x"]}), "messages[0].content[0].content[0] must be an object"),
    (user(RESULT | {"content": [IMAGE]}), "messages[0].content[0].content[0].type is 'image'"),
    (user(RESULT | {"content": [{"type": "text"}]}), "messages[0].content[0].content[0].text is required"),
    (
        user(RESULT | {"content": [{"type": "tool_reference", "tool_name": "x"}]}),
        "messages[0].content[0].content[0].tool_name: 'x' is not one of the tools",
    ),
    (assistant(RESULT), "messages[1].content[0].type"),
    (assistant(IMAGE), "messages[1].content[0].type"),
    (assistant({"type": "server_tool_use"}), "messages[1].content[0].type must be"),
    (assistant({"type": "thinking"}), "messages[1].content[0].thinking is required"),
    (assistant({"type": "tool_use", "id": "x", "input": {}}), "messages[1].content[0].name is required"),
    (assistant({"type": "tool_use", "name": "x", "input": {}}), "messages[1].content[0].id is required"),
    (assistant(USE | {"input": "{}"}), "messages[1].content[0].input must be an object"),
    (system({"type": "tool_addition"}), "messages[1].content[0].tool must"),
    (
        system({"type": "tool_removal", "tool": {"type": "tool_definition"}}),
        "messages[1].content[0].tool.type must be tool_reference",
    ),
    (
        system({"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {"name": "x"}}}),
        "messages[1].content[0].tool.definition.input_schema is required",
    ),
    ({"system": 5}, "system"),
    ({"system": [IMAGE]}, "system[0].type"),
    ({"system": ["x"]}, "system[0]"),
    ({"tools": {}}, "tools"),
    ({"tools": ["x"]}, "tools[0]"),
    ({"tools": [{}]}, "tools[0].name"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema is required"),
    ({"tools": [{"name": "x", "input_schema": []}]}, "tools[0].input_schema must be a JSON schema"),
    ({"tools": [{"name": "x", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type must be 'object'"),
    ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].name: two tools have the name 'weather'"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type is not supported"),
    ({"tools": [TOOLS[0] | {"strict": "yes"}]}, "tools[0].strict"),
    ({"tools": [TOOLS[0] | {"description": 5}]}, "tools[0].description"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {}}, "tool_choice.type is required"),
    ({"tool_choice": {"type": "required"}}, "tool_choice.type: input should be 'auto', 'any', 'tool' or 'none'"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: there are no tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name is required"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice: 'x' is not one of the tools"),
    ({"thinking": True}, "thinking"),
    ({"thinking": {}}, "thinking.type is required"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is required"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens"),
    ({"output_config": {"effort": "none"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is required"),
    (
        {
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
            "output_format": {"type": "json_schema", "schema": {}},
        },
        "output_format",
    ),
    ({"container": "c"}, "container is not supported"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
]
GENERATION_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ({"max_tokens": -1}, "max_tokens must be at least 1, got -1"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"temperature": -1}, "temperature must be a finite number of at least 0"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": [5]}, "stop_sequences[0]"),
    ({"stream": "yes"}, "stream"),
    ({"stop": ["x"]}, "stop is not supported by this server: use stop_sequences"),
    ({"n": 2}, "n is not supported"),
    ({"response_format": {"type": "json_object"}}, "use output_config.format"),
    ({"logprobs": True}, "logprobs is not"),
    ({"max_completion_tokens": 5}, "use max_tokens"),
    ({"kv_transfer_params": {}}, "kv_transfer_params is not"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"guided_json": {}}, "guided_json is not supported"),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1024},
        "thinking.budget_tokens must be below max_tokens (1024)",
    ),
    (
        {
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
            "structured_outputs": {"regex": "a"},
        },
        "output_config.format",
    ),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"x": "y" * 70_000}}}}, "output_config.format"),
    ({"messages": [{"role": "user", "content": "x" * 3000}]}, "messages"),
    ({"seed": "x"}, "seed"),
]


@pytest.mark.some(48)
@pytest.mark.parametrize(("fields", "message"), CONVERSATIONS_REFUSED, ids=range(len(CONVERSATIONS_REFUSED)))
def test_bad_conversations_are_refused_by_their_path(server: Site, fields: dict[str, Any], message: str) -> None:
    body = {name: value for name, value in (BODY | {"max_tokens": 2000} | fields).items() if value is not None}
    for path in (MESSAGES, RENDER, COUNT):
        refused(server.post(path, body), 400, message)
    refused(server.post(MESSAGES, body | {"stream": True}), 400, message)


@pytest.mark.parametrize(("fields", "message"), GENERATION_REFUSED, ids=range(len(GENERATION_REFUSED)))
def test_bad_fields_are_refused_by_their_name(server: Site, fields: dict[str, Any], message: str) -> None:
    body = {name: value for name, value in (BODY | fields).items() if value is not None}
    for path in (MESSAGES, RENDER):
        refused(server.post(path, body), 400, message)
    refused(server.post(MESSAGES, {"stream": True} | body), 400, message)


def test_a_thread_is_refused_so_that_the_sdk_sends_the_whole_conversation(server: Site) -> None:
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        answer = server.post(MESSAGES, BODY | {"thread": thread})
        assert answer.status_code == 400 and "thread is not supported" in answer.json()["error"]["message"]
        assert answer.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


def test_strict_servers_refuse_unknown_fields() -> None:
    s = chat_site("x", strict=True)
    refused(s.post(MESSAGES, BODY | {"max_tokenz": 1}), 400, "max_tokenz", "did you mean 'max_tokens'")
    assert s.post(MESSAGES, BODY | {"metadata": {"user_id": "u"}}).status_code == 200


def test_a_template_that_refuses_and_arguments_that_are_nested_deeply() -> None:
    refused(chat_site("x", template="{{ raise_exception('no') }}").post(MESSAGES, BODY), 400, "messages: no")
    nested: Any = {}
    for _ in range(500):
        nested = {"a": nested}
    answer = chat_site("x", max_model_len=8192).post(COUNT, {"model": "tiny"} | assistant(USE | {"input": nested}))
    assert answer.status_code == 200 or refused(answer, 400, "messages are nested too deeply")


def test_null_is_the_default_of_every_optional_field(server: Site) -> None:
    nulls = dict.fromkeys(name for name in MessagesBody.model_fields if name not in BODY)
    assert server.post(MESSAGES, BODY | nulls).status_code == 200
    nulls = dict.fromkeys(name for name in CountTokensBody.model_fields if name not in BODY)
    assert server.post(COUNT, {"model": "tiny", "messages": HI} | nulls).status_code == 200


@pytest.mark.parametrize("path", [MESSAGES, COUNT, RENDER])
def test_errors_of_every_kind_have_anthropics_shape(path: str) -> None:
    s = chat_site("x", api_key=["sesame"], max_body_mb=1)
    key = {"x-api-key": "sesame"}
    refused(s.post(path, BODY), 401, "an API key is required")
    refused(s.post(path, BODY, headers={"x-api-key": "wrong"}), 401, "the API key is wrong")
    refused(s.post(path, BODY, headers={"Authorization": "Basic sesame"}), 401, "the API key is wrong")
    for headers in (key, {"Authorization": "Bearer sesame"}, key | {"Authorization": "Bearer other"}):
        assert s.post(path + "?beta=true", BODY, headers=headers | {"anthropic-beta": "a,b"}).status_code == 200
    refused(s.post(path, BODY | {"model": "claude"}, headers=key), 404, "claude", "tiny")
    refused(s.get(path, headers=key), 405, "POST")
    refused(s.post(path + "/nothing", BODY, headers=key), 404, path + "/nothing")
    refused(s.post(path + "/nothing", BODY), 401)
    refused(s.post(path, content=b"{", headers=key | {"content-type": "application/json"}), 400, "JSON")
    refused(s.post(path, content=b"[]", headers=key | {"content-type": "application/json"}), 400, "object")
    refused(s.post(path, content=b"x" * (1 << 21), headers=key), 413, "1 MiB")
    refused(site(tokens_only=True).post(path, BODY), 404, "tokens-only")


def test_the_key_opens_all_routes_in_either_header() -> None:
    s = site(says("a"), api_key=["sesame"], admin_api_key=["root"])
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 1}}
    for headers in ({"x-api-key": "sesame"}, {"Authorization": "Bearer sesame"}, {"x-api-key": "root"}):
        assert s.post("/inference/v1/generate", body, headers=headers).status_code == 200
    assert s.post("/pause", {}, headers={"x-api-key": "root"}).status_code == 200
    for headers in ({"x-api-key": "sesame"}, {"x-api-key": ""}, {"x-api-key": "Bearer root"}):
        answer = s.post("/pause", {}, headers=headers)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"


def test_a_body_over_a_limit_of_messages(server: Site) -> None:
    s = chat_site("x", max_messages=3)
    refused(s.post(MESSAGES, BODY | {"messages": HI * 4}), 400, "messages must have at most 3")
    refused(s.post(MESSAGES, BODY | user(TEXT, TEXT, TEXT)), 400, "messages must have at most 3")


def test_msgpack_is_taken_and_given(server: Site) -> None:
    kind = {"content-type": "application/msgpack", "accept": "application/msgpack"}
    answer = server.post(MESSAGES, content=msgspec.msgpack.encode(BODY), headers=kind)
    assert msgspec.msgpack.decode(answer.content)["content"] == [{"type": "text", "text": "x"}]
    packed = msgspec.msgpack.encode(BODY | {"stream": True})
    refused(server.post(MESSAGES, content=packed, headers=kind), 400, "msgpack needs stream: false")


def test_openapi_describes_the_routes(server: Site) -> None:
    described = server.get("/openapi.json").json()
    for path in (MESSAGES, COUNT, RENDER):
        operation = described["paths"][path]["post"]
        assert operation["responses"]["400"]["content"]["application/json"]["schema"]["$ref"].endswith("/MessagesError")
    schemas = described["components"]["schemas"]
    assert set(schemas["MessagesBody"]["required"]) == {"max_tokens", "messages", "model"}
    assert schemas["CountTokensBody"]["properties"]["model"]["enum"] == ["tiny", "alias"]
    assert {"MessagesError", "MessagesReply", "ErrorBody", "ThinkingOptions"} <= set(schemas)
    cases = numbers(schemas["MessagesBody"])
    assert {"max_tokens", "temperature", "top_p", "top_k"} <= {name for name, _ in cases}
    for name, value in cases:
        refused(server.post(MESSAGES, BODY | {name: value}), 400, name)


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_a_form_and_a_turn_to_be_continued_exclude_each_other(name: str) -> None:
    """Anthropic refuses them together: the form would begin anew (serving-faults F16)."""
    form = {"type": "json_schema", "schema": {"type": "object"}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": '{"a":'}]
    body = {"model": "tiny", "max_tokens": 9, "messages": messages}
    body |= {"output_config": {"format": form}} if name == "output_config" else {"output_format": form}
    answer = chat_site("a").post("/v1/messages", body)
    assert answer.status_code == 400
    assert (
        "applies to a whole answer" in answer.json()["error"]["message"] and name in answer.json()["error"]["message"]
    )
