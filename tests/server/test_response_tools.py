"""The tools of /v1/responses besides functions: how models see them, what their calls come back as, and what is left
out or refused."""

from __future__ import annotations

import json
import logging
from typing import Any

import pydantic
import pytest
from openai.types.responses import ResponseOutputItem, ResponseStreamEvent

from tests.server.byte_tokenizer import TOKENIZER
from tests.server.response_events import put_together
from tests.server.site import Site, chat_site
from tests.server.test_responses import HI, RESPONSES, TOOLS, ask, chats, prompt, streamed
from tests.server.test_tools import CHAT
from tests.text.tool_templates import HERMES, THINKER
from tokserve.dialects.openai.response_calls import InputReader
from tokserve.dialects.openai.response_tools import CLIENT_TOOLS, note_left_out

CRM: dict[str, Any] = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [
        {
            "type": "function",
            "name": "find",
            "parameters": {"type": "object", "properties": {"id": {"type": "string"}}},
        },
        {"type": "custom", "name": "note", "description": "Writes a note."},
    ],
}
PATCH: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Edits."}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "ab" /c+/'}
REGEX = {"type": "grammar", "syntax": "regex", "definition": "[a-c]+"}
BUILT_IN: list[dict[str, Any]] = [{"type": "local_shell"}, {"type": "shell"}, {"type": "apply_patch"}]
HOSTED: list[dict[str, Any]] = [
    {"type": "web_search"},
    {"type": "web_search_preview_2025_03_11"},
    {"type": "file_search", "vector_store_ids": ["v"]},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "image_generation"},
    {"type": "mcp", "server_label": "deepwiki", "server_url": "https://example.org"},
    {"type": "computer_use_preview", "display_width": 1, "display_height": 1, "environment": "browser"},
    {"type": "shell", "environment": {"type": "container_auto"}},
    {"type": "tool_search"},
]
SEARCH: dict[str, Any] = {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}}
ITEM = pydantic.TypeAdapter[Any](ResponseOutputItem)
EVENT = pydantic.TypeAdapter[Any](ResponseStreamEvent)


def call(name: str, arguments: Any) -> str:
    """The text of a call, as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def outputs(text: str, tools: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    """The items of an answer, which are the same whole and streamed, and are of the SDK's types."""
    s = chat_site(text, max_model_len=8192)
    output: list[dict[str, Any]] = ask(s, tools=tools, **fields)["output"]
    events = streamed(s, tools=tools, **fields)
    assert put_together(events)["output"] == output
    for event in events:
        EVENT.validate_python(event)
    for item in output:
        parsed = ITEM.validate_python(item)
        assert type(parsed).model_validate(item).type == item["type"]
    return output


def refusal(s: Site, **fields: Any) -> tuple[str, str, str]:
    answers = [s.post(RESPONSES, {"input": "hi", "stream": stream} | fields) for stream in (False, True)]
    assert {answer.status_code for answer in answers} == {400}, answers[0].text
    error, same = (answer.json()["error"] for answer in answers)
    assert error == same
    return error["param"], error["code"], error["message"]


# what comes back


def test_calls_of_a_namespace_carry_it() -> None:
    (item,) = outputs(call("crm__find", {"id": "7"}), [*TOOLS, CRM])
    assert {k: v for k, v in item.items() if k not in ("id", "call_id")} == {
        "type": "function_call",
        "status": "completed",
        "name": "find",
        "namespace": "crm",
        "arguments": '{"id": "7"}',
    }
    (item,) = outputs(call("weather", {"city": "Rome"}), [*TOOLS, CRM])
    assert "namespace" not in item and item["name"] == "weather"
    (item,) = outputs(call("crm__other", {}), [CRM])
    assert (item["type"], item["name"]) == ("function_call", "crm__other") and "namespace" not in item


@pytest.mark.parametrize("text", ["", "a", 'say "hi"\n\té \\ /', "😀 \x00 漢", "*** Begin Patch\n+x\n*** End Patch\n"])
def test_custom_calls_have_their_input_as_text(text: str) -> None:
    item, note = outputs(f"{call('patch', {'input': text})}{call('crm__note', {'input': text})}", [PATCH, CRM])
    assert item["id"].startswith("ctc_") and len(item["call_id"]) == 9 and item["call_id"] != note["call_id"]
    assert {k: v for k, v in item.items() if k not in ("id", "call_id")} == {
        "type": "custom_tool_call",
        "status": "completed",
        "name": "patch",
        "input": text,
    }
    assert (note["name"], note["namespace"], note["input"]) == ("note", "crm", text)


def test_a_custom_call_that_is_cut_off_or_has_other_arguments() -> None:
    (item,) = outputs('<tool_call>\n{"name": "patch", "arguments": {"input": "a\\nb', [PATCH])
    assert (item["input"], item["status"]) == ("a\nb", "incomplete")
    (item,) = outputs(call("patch", {"diff": "a"}), [PATCH])
    assert (item["input"], item["status"]) == ('{"diff": "a"}', "completed")
    (item,) = outputs(call("patch", {"input": "a", "more": "b"}), [PATCH])
    assert item["input"] == "a"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\n\\u00e9\\ud83d\\ude00\\"\\\\"}', 'a\né😀"\\'),
        (' {\n "input"\t:"x" , "y": 1}', "x"),
        ('{"input": 5}', '{"input": 5}'),
        ('{"in put": "x"}', '{"in put": "x"}'),
        ("{}", "{}"),
        ('{"inp', '{"inp'),
        ('{"input": "a\\u00', "a\\u00"),
        ('{"input": "a\\ud83d', "a\\ud83d"),
        ('{"input": "\\ud83dx\\n"}', "\\ud83dx\n"),
        ('{"input": "\\ud83d\\u0041"}', "\\ud83dA"),
    ],
)
def test_inputs_do_not_depend_on_how_they_arrive(arguments: str, text: str) -> None:
    texts = set()
    for size in range(1, len(arguments) + 1):
        reader = InputReader()
        pieces = [reader.push(arguments[at : at + size]) for at in range(0, len(arguments), size)]
        texts.add("".join(pieces) + reader.rest())
    assert texts == {text}


def test_calls_of_tools_that_the_client_runs() -> None:
    command = {"command": ["bash", "-lc", "ls"], "timeout_ms": 5, "working_directory": "/tmp"}
    commands = {"commands": ["ls", "pwd é"], "max_output_length": 10}
    change = {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b\n"}
    deletion = {"type": "delete_file", "path": "a.py"}
    calls = [
        call("local_shell", command),
        call("shell", commands),
        call("apply_patch", change),
        call("apply_patch", deletion),
    ]
    items = outputs("\n".join(calls), BUILT_IN)
    assert [item["type"] for item in items] == [
        "local_shell_call",
        "shell_call",
        "apply_patch_call",
        "apply_patch_call",
    ]
    assert items[0]["action"] == {"type": "exec", "env": {}, "user": None, **command}
    assert items[1]["action"] == {"timeout_ms": None, **commands} and items[1]["environment"] == {"type": "local"}
    assert [items[2]["operation"], items[3]["operation"]] == [change, deletion]
    assert len({item["call_id"] for item in items}) == len({item["id"] for item in items}) == 4
    assert all(item["status"] == "completed" for item in items)
    (search,) = outputs(call("tool_search", {"query": "mail"}), [SEARCH])
    assert (search["type"], search["execution"], search["arguments"]) == (
        "tool_search_call",
        "client",
        {"query": "mail"},
    )


def test_arguments_that_are_no_action_come_as_a_function_call() -> None:
    (item,) = outputs(call("shell", {"commands": "ls"}), BUILT_IN)
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "shell", '{"commands": "ls"}')
    cut = '<tool_call>\n{"name": "local_shell", "arguments": {"command": ["ls"'
    (item,) = outputs(cut, BUILT_IN)
    assert (item["type"], item["status"], item["arguments"]) == ("function_call", "incomplete", '{"command": ["ls"')


def test_a_function_may_have_the_name_of_a_tool() -> None:
    tool = {"type": "function", "name": "shell", "parameters": {"type": "object"}}
    (item,) = outputs(call("shell", {"commands": ["ls"]}), [tool])
    assert item["type"] == "function_call"
    assert refusal(chat_site("a"), tools=[tool, {"type": "shell"}])[0] == "tools[1].name"


# what the model sees


def shown(tools: list[dict[str, Any]], conversation: Any = "hi", **fields: Any) -> dict[str, dict[str, Any]]:
    """The functions that the prompt shows, by name."""
    s = chat_site("a", "{{ tools | tojson }}", max_model_len=8192)
    ask(s, conversation, tools=tools, tool_choice="none", **fields)
    functions = json.loads(TOKENIZER.decode(s.llm.calls[-1].prompt, False))
    return {tool["function"]["name"]: tool["function"] for tool in functions}


def test_tools_are_shown_as_functions() -> None:
    functions = shown([*TOOLS, CRM, PATCH | {"format": LARK}, *BUILT_IN, SEARCH, *HOSTED])
    names = ["weather", "ping", "crm__find", "crm__note", "patch", "local_shell", "shell", "apply_patch", "tool_search"]
    assert list(functions) == names
    assert functions["crm__find"]["description"] == "[crm: Customers.]"
    assert functions["crm__find"]["parameters"] == CRM["tools"][0]["parameters"]
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    assert functions["crm__note"] == {
        "name": "crm__note",
        "description": "Writes a note.",
        "parameters": text | {"additionalProperties": False},
    }
    assert functions["patch"]["description"].startswith("Edits.\n\n") and LARK["definition"] in str(functions["patch"])
    for name, (description, parameters) in CLIENT_TOOLS.items():
        assert functions[name] == {"name": name, "description": description, "parameters": parameters}


def chat_call(name: str, arguments: Any, call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def called(name: str, arguments: Any, result: str) -> list[dict[str, Any]]:
    """The messages of a chat for a call and its result."""
    return [
        HI,
        {"role": "assistant", "tool_calls": [chat_call(name, arguments)]},
        {"role": "tool", "tool_call_id": "c1", "content": result},
    ]


COMMAND = {"type": "exec", "command": ["ls"], "env": {}, "user": None}
RAN = [{"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]
CHANGE = {"type": "create_file", "path": "a", "diff": "+a"}
C1 = {"call_id": "c1"}
HISTORIES: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    (
        [
            {"type": "function_call", "name": "find", "namespace": "crm", "arguments": "{}", **C1},
            {"type": "function_call_output", "output": "x", **C1},
        ],
        called("crm__find", "{}", "x"),
    ),
    (
        [
            {"type": "custom_tool_call", "name": "patch", "input": "a\nb", "id": "ctc_1", "status": "completed", **C1},
            {"type": "custom_tool_call_output", "output": [{"type": "input_text", "text": "done"}], **C1},
        ],
        called("patch", {"input": "a\nb"}, "done"),
    ),
    (
        [
            {"type": "local_shell_call", "id": "x", "action": COMMAND, "status": "completed", **C1},
            {"type": "local_shell_call_output", "id": "c1", "output": "a"},
        ],
        called("local_shell", {"command": ["ls"], "env": {}}, "a"),
    ),
    (
        [
            {"type": "shell_call", "action": {"commands": ["ls"], "timeout_ms": None}, **C1},
            {"type": "shell_call_output", "output": RAN, "max_output_length": 5, **C1},
        ],
        called("shell", {"commands": ["ls"]}, json.dumps(RAN, separators=(",", ":"))),
    ),
    (
        [
            {"type": "apply_patch_call", "operation": CHANGE, "status": "completed", **C1},
            {"type": "apply_patch_call_output", "status": "failed", "output": "no", **C1},
        ],
        called("apply_patch", CHANGE, "failed: no"),
    ),
    (
        [
            {"type": "tool_search_call", "execution": "client", "arguments": {"query": "x"}, **C1},
            {"type": "tool_search_output", "execution": "client", "tools": [], **C1},
        ],
        called("tool_search", {"query": "x"}, '{"tools":[]}'),
    ),
    (
        [{"type": "mcp_call", "id": "c1", "server_label": "wiki", "name": "ask", "arguments": "{}", "output": "x"}],
        called("wiki__ask", "{}", "x"),
    ),
    (
        [
            {
                "type": "code_interpreter_call",
                "id": "c1",
                "code": "1",
                "outputs": [{"type": "logs", "logs": "1"}, {"type": "image", "url": "u"}],
            }
        ],
        called("code_interpreter", {"code": "1"}, "1"),
    ),
    (
        [{"type": "file_search_call", "id": "c1", "queries": ["q"], "results": [{"text": "t"}]}],
        called("file_search", {"queries": ["q"]}, '[{"text":"t"}]'),
    ),
]


@pytest.mark.parametrize(("items", "messages"), HISTORIES, ids=[items[0]["type"] for items, _ in HISTORIES])
@pytest.mark.parametrize("template", [HERMES, THINKER])
def test_items_of_calls_are_the_messages_of_a_chat(
    items: list[dict[str, Any]], messages: list[dict[str, Any]], template: str
) -> None:
    assert prompt([HI, *items], template) == chats(messages, template)


def test_output_items_of_all_tools_go_back_as_they_came() -> None:
    texts = [
        call("crm__find", {"id": "7"}),
        call("patch", {"input": 'a\n"b"'}),
        call("shell", {"commands": ["ls"]}),
        call("apply_patch", {"type": "delete_file", "path": "a"}),
    ]
    text = "\n".join(texts)
    s = chat_site(text, max_model_len=16384)
    tools = [CRM, PATCH, *BUILT_IN]
    output = ask(s, tools=tools)["output"]
    assert len(output) == 4
    ask(s, [HI, *output, HI], tools=tools)
    first, again = (TOKENIZER.decode(sent.prompt, False) for sent in s.llm.calls)
    assert again.startswith(first + text)


def test_tools_that_were_searched_for_can_be_called() -> None:
    items = [
        {"type": "tool_search_call", "execution": "client", "arguments": {}, **C1},
        {"type": "tool_search_output", "tools": [CRM, TOOLS[0]], **C1},
        {"type": "additional_tools", "role": "developer", "tools": [CRM, PATCH]},
        {"type": "tool_search_call", "execution": "server", "arguments": {}, "call_id": None},
    ]
    assert list(shown([TOOLS[0], SEARCH], [HI, *items])) == [
        "weather",
        "tool_search",
        "crm__find",
        "crm__note",
        "patch",
    ]
    s = chat_site(call("crm__note", {"input": "a"}), max_model_len=8192)
    (item,) = ask(s, [HI, *items], tools=[TOOLS[0], SEARCH])["output"]
    assert (item["type"], item["namespace"]) == ("custom_tool_call", "crm")
    assert '"tools":["crm__find","crm__note","weather"]' in TOKENIZER.decode(s.llm.calls[0].prompt, False)


# what is forced


def forced(tools: list[dict[str, Any]], choice: Any, **fields: Any) -> Any:
    """The structured outputs of a request."""
    s = chat_site("a", max_model_len=8192)
    ask(s, tools=tools, tool_choice=choice, **fields)
    structured = s.llm.calls[0].params.structured_outputs
    return structured and {name: value for name in structured.__struct_fields__ if (value := getattr(structured, name))}


def test_a_custom_tool_can_be_forced() -> None:
    choice = {"type": "custom", "name": "patch"}
    assert forced([PATCH, *TOOLS], choice)["json"]["properties"] == {"input": {"type": "string"}}
    pattern = forced([PATCH | {"format": REGEX}, *TOOLS], choice)["json"]["properties"]["input"]["pattern"]
    assert pattern == "^(?:[a-c]+)$"
    assert "^(?:[a-c]+)$" in json.dumps(forced([PATCH | {"format": REGEX}, *TOOLS], "required"))
    assert forced([PATCH | {"format": {"type": "text"}}], choice) == forced([PATCH], choice)
    s = chat_site('{"input": "ab"}')
    (item,) = ask(s, tools=[PATCH], tool_choice=choice)["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", "ab")


def test_a_lark_grammar_is_that_of_the_whole_answer() -> None:
    tool = PATCH | {"format": LARK}
    names = ({"type": "custom", "name": "patch"}, "required")
    many = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "patch"}]}
    for tools, choice in (([tool, *TOOLS], names[0]), ([tool], names[1]), ([tool, *TOOLS], many)):
        assert forced(tools, choice) == {"grammar": LARK["definition"]}
        for text, status in (("abcc", "completed"), ("", "completed")):
            (item,) = outputs(text, tools, tool_choice=choice)
            assert (item["type"], item["input"], item["status"]) == ("custom_tool_call", text, status)
    assert forced([tool, *TOOLS], "auto") is None
    form = {"format": {"type": "json_object"}}
    assert forced([tool], names[0], text=form) == {"grammar": LARK["definition"]}
    s = chat_site("<think>\nhm\n</think>\n\nabc", THINKER, reasoning_parser="qwen3")
    thought, item = ask(s, tools=[tool], tool_choice=names[0])["output"]
    assert (thought["type"], item["input"]) == ("reasoning", "abc")
    cut = ask(chat_site("abcccc"), tools=[tool], tool_choice=names[0], max_output_tokens=3)["output"]
    assert [(item["input"], item["status"]) for item in cut] == [("abc", "incomplete")]


def test_tools_of_the_client_and_of_namespaces_can_be_forced() -> None:
    find = {"type": "function", "name": "find"}
    for choice in (find, find | {"namespace": "crm"}):
        assert forced([CRM, *BUILT_IN], choice)["json"]["properties"] == {"id": {"type": "string"}}
    for kind in CLIENT_TOOLS:
        assert forced([CRM, *BUILT_IN], {"type": kind})["json"]["properties"].keys() == (
            CLIENT_TOOLS[kind][1]["properties"].keys()
        )
    again = CRM | {"name": "erp"}
    assert forced([CRM, again], find | {"namespace": "erp"}) == forced([CRM], find)
    assert refusal(chat_site("a"), tools=[CRM, again], tool_choice=find)[0] == "tool_choice.namespace"


def test_allowed_tools_are_the_chats() -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "ping"}]}
    in_chat = {"mode": "required", "tools": [{"type": "function", "function": {"name": "ping"}}]}
    s = chat_site("a")
    for mode in ("auto", "required"):
        ask(s, tools=TOOLS, tool_choice=allowed | {"mode": mode})
        choice = {"type": "allowed_tools", "allowed_tools": in_chat | {"mode": mode}}
        functions = [{"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in TOOLS]
        assert s.post(CHAT, {"messages": [HI], "tools": functions, "tool_choice": choice}).status_code == 200
        sent, chats_own = s.llm.calls[-2:]
        assert (sent.params, sent.prompt) == (chats_own.params, chats_own.prompt)
    mixed = [{"type": "namespace", "name": "crm"}, {"type": "shell"}, {"type": "web_search"}]
    names = forced([CRM, *TOOLS, *BUILT_IN, *HOSTED], allowed | {"tools": mixed})["json"]["$defs"]
    assert list(names) == ["crm__find", "crm__note", "shell"]
    only_hosted = allowed | {"mode": "auto", "tools": [{"type": "web_search"}]}
    assert forced([*TOOLS, *HOSTED], only_hosted) is None


# what is left out, and what is refused


def test_what_only_openai_can_use_is_left_out_and_listed(caplog: pytest.LogCaptureFixture) -> None:
    note_left_out.cache_clear()
    items = [
        HI,
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "file_search_call", "id": "fs_1", "queries": ["q"], "results": None},
        {"type": "computer_call_output", "call_id": "c", "output": {}},
    ]
    body = {"input": items, "tools": [TOOLS[1], *HOSTED]}
    s = chat_site("a")
    with caplog.at_level(logging.WARNING, "tokserve"):
        answers = [s.post(RESPONSES, body | {"stream": stream}) for stream in (False, True, False)]
    left_out = [*(f"tools[{i}]" for i in range(1, len(HOSTED) + 1)), *(f"input[{i}]" for i in range(1, 5))]
    for answer in answers:
        assert answer.status_code == 200 and answer.headers["x-ignored-fields"].split(", ") == left_out
    assert answers[0].json()["tools"] == body["tools"]
    assert s.llm.calls[0].prompt == s.llm.calls[-1].prompt
    assert TOKENIZER.decode(s.llm.calls[0].prompt, False) == prompt([HI], HERMES, tools=[TOOLS[1]])
    lines = [record.getMessage() for record in caplog.records if "only OpenAI" in record.getMessage()]
    assert len(lines) == len(HOSTED) + 4 == len(set(lines))
    strict = chat_site("a", strict=True).post(RESPONSES, body)
    assert (strict.status_code, strict.json()["error"]["param"]) == (400, "tools[1].type")


def allowed_tools(*tools: Any, mode: str = "auto") -> dict[str, Any]:
    return {"tool_choice": {"type": "allowed_tools", "mode": mode, "tools": list(tools)}}


def custom(**form: Any) -> list[dict[str, Any]]:
    return [TOOLS[0], PATCH | {"format": {"type": "grammar"} | form}]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": HOSTED, "tool_choice": "required"}, "tools[0].type", "only OpenAI"),
        ({"tools": HOSTED, "tool_choice": {"type": "web_search"}}, "tool_choice", "only OpenAI"),
        (
            {"tools": [*TOOLS, *HOSTED], "tool_choice": {"type": "mcp", "server_label": "x"}},
            "tool_choice",
            "only OpenAI",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "shell"}}, "tool_choice", "not one of the tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "frobnicate"}}, "tool_choice", "send none, auto"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "name": "ping"}}, "tool_choice", "not one of the tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.name", "string"),
        (
            {"tools": [CRM], "tool_choice": {"type": "function", "name": "find", "namespace": 1}},
            "tool_choice.namespace",
            "",
        ),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name", "string"),
        ({"tools": [CRM | {"tools": []}]}, "tools[0].tools", "not empty"),
        ({"tools": [CRM | {"description": 5}]}, "tools[0].description", "string"),
        ({"tools": [CRM | {"tools": [5]}]}, "tools[0].tools[0]", "object"),
        ({"tools": [CRM | {"tools": [{"type": "shell"}]}]}, "tools[0].tools[0].type", "custom"),
        ({"tools": [TOOLS[0], CRM | {"tools": [TOOLS[0] | {"strict": 1}]}]}, "tools[1].tools[0].strict", "true"),
        ({"tools": [CRM, CRM]}, "tools[1].tools[0].name", "two tools"),
        ({"tools": [PATCH | {"name": ""}]}, "tools[0].name", "string"),
        ({"tools": [PATCH | {"description": 5}]}, "tools[0].description", "string"),
        ({"tools": [PATCH | {"format": 5}]}, "tools[0].format", "object"),
        ({"tools": [PATCH | {"format": {"type": "x"}}]}, "tools[0].format.type", "grammar"),
        ({"tools": custom(syntax="ebnf")}, "tools[1].format.syntax", "lark"),
        ({"tools": custom(syntax="lark", definition="")}, "tools[1].format.definition", "empty"),
        ({"tools": custom(**LARK), "tool_choice": "required"}, "tools[1].format", "tool_choice names this tool"),
        (
            {"tools": custom(**(REGEX | {"definition": "(?=a)b"})), "tool_choice": "required"},
            "tools[1].format.definition",
            "look",
        ),
        (
            {
                "tools": custom(**(LARK | {"definition": "x" * 2_000_000})),
                "tool_choice": {"type": "custom", "name": "patch"},
            },
            "tools[1].format.definition",
            "bytes",
        ),
        ({"tools": TOOLS, **allowed_tools()}, "tool_choice.tools", "not empty"),
        ({"tools": TOOLS, **allowed_tools(TOOLS[0], mode="any")}, "tool_choice.mode", "auto"),
        ({"tools": TOOLS, **allowed_tools(5)}, "tool_choice.tools[0]", "object"),
        ({"tools": TOOLS, **allowed_tools({"type": "function", "name": "x"})}, "tool_choice.tools[0].name", "not one"),
        ({"tools": TOOLS, **allowed_tools({"type": "namespace", "name": "x"})}, "tool_choice.tools[0].name", "not one"),
        ({"tools": TOOLS, **allowed_tools({"type": "shell"})}, "tool_choice.tools[0].type", "not one"),
        ({"tools": TOOLS, **allowed_tools({"type": "x"})}, "tool_choice.tools[0].type", "type of a tool"),
        ({"tools": HOSTED, **allowed_tools({"type": "mcp"}, mode="required")}, "tool_choice.tools", "only OpenAI"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "p"}]}, "input[0].input", "string"),
        ({"input": [{"type": "function_call", "name": "f", "namespace": 1, "call_id": "c"}]}, "input[0].namespace", ""),
        ({"input": [{"type": "custom_tool_call_output", "call_id": "c"}]}, "input[0].output", "parts"),
        ({"input": [{"type": "local_shell_call", "call_id": "c"}]}, "input[0].action", "object"),
        ({"input": [{"type": "local_shell_call_output", "output": "x"}]}, "input[0].id", "string"),
        ({"input": [{"type": "shell_call_output", "call_id": "c", "output": "x"}]}, "input[0].output", "list"),
        ({"input": [{"type": "shell_call_output", "call_id": "c", "output": [{}]}]}, "input[0].output[0].stdout", ""),
        ({"input": [{"type": "apply_patch_call", "call_id": "c"}]}, "input[0].operation", "object"),
        ({"input": [{"type": "apply_patch_call_output", "call_id": "c", "output": 5}]}, "input[0].output", "string"),
        ({"input": [{"type": "apply_patch_call_output", "call_id": "c"}]}, "input[0].status", "string"),
        ({"input": [{"type": "tool_search_output", "call_id": "c", "tools": 5}]}, "input[0].tools", "list"),
        ({"input": [HI, {"type": "additional_tools", "tools": [{"type": "x"}]}]}, "input[1].tools[0].type", "serves"),
        ({"input": [{"type": "mcp_call", "name": "f"}]}, "input[0].server_label", "string"),
        ({"input": [{"type": "code_interpreter_call", "outputs": 5}]}, "input[0].outputs", "list"),
        ({"input": [{"type": "code_interpreter_call", "code": 5}]}, "input[0].code", "string"),
        ({"input": [{"type": "file_search_call", "results": []}]}, "input[0].id", "string"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str, message: str) -> None:
    actual = refusal(chat_site("a", max_model_len=8192), **fields)
    assert actual[0] == param and message in actual[2], actual
