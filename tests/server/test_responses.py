"""/v1/responses: its items and events, streamed and whole alike, the same answers as chat's, and what it refuses."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec
import pytest

from tests.replies import good
from tests.server.byte_tokenizer import TOKENIZER, ids
from tests.server.response_events import events, put_together
from tests.server.scripted_llm import endless, says
from tests.server.site import Caller, Site, chat_site, site
from tests.server.test_tools import ANSWERS, CALL, PARAMETERS
from tests.text.tool_templates import THINKER
from tests.tiers import in_turns
from tokserve.base.errors import QueueFull
from tokserve.dialects.openai.responses import ResponsesRenderer
from tokserve.features.observe.observers import metrics_of
from tokserve.server.replies import sse

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "weather", "parameters": PARAMETERS},
    {"type": "function", "name": "ping"},
]
NESTED = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in TOOLS]
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def ask(s: Site, conversation: Any = "hi", **fields: Any) -> dict[str, Any]:
    return good(s.post(RESPONSES, {"input": conversation, "request_id": "r"} | fields))


def streamed(s: Site, conversation: Any = "hi", **fields: Any) -> list[dict[str, Any]]:
    answer = s.post(RESPONSES, {"input": conversation, "request_id": "r", "stream": True} | fields)
    assert answer.status_code == 200, answer.text
    return events(answer.text)


def text_of(reply: dict[str, Any]) -> str:
    return "".join(item["content"][0]["text"] for item in reply["output"] if item["type"] == "message")


def test_the_whole_shape() -> None:
    reply = ask(chat_site("hello"), metadata={"a": "b"}, max_output_tokens=9, temperature=0.5, store=True)
    now = reply.pop("created_at")
    assert now <= reply.pop("completed_at") and reply.pop("system_fingerprint").startswith("tokserve-")
    count = len(ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"))
    text = {"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}
    assert reply == {
        "id": "resp_r",
        "object": "response",
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": 9,
        "max_tool_calls": None,
        "model": "tiny",
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "output": [{"type": "message", "id": "msg_r-0", "status": "completed", "role": "assistant", "content": [text]}],
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": 0.5,
        "top_p": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "truncation": "disabled",
        "metadata": {"a": "b"},
        "stop_reason": None,
        "stop_detail": {"kind": "eos"},
        "usage": {
            "input_tokens": count,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 6,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": count + 6,
        },
    }


ASKED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"tools": TOOLS}, {"tools": NESTED}),
    (LOGPROBS, {"logprobs": True, "top_logprobs": 2}),
    (
        {"tools": TOOLS, "parallel_tool_calls": False, **LOGPROBS},
        {"tools": NESTED, "parallel_tool_calls": False, "logprobs": True, "top_logprobs": 2},
    ),
    (
        {"tools": TOOLS, "tool_choice": "none", "stop": ["Ro", "</th"]},
        {"tools": NESTED, "tool_choice": "none", "stop": ["Ro", "</th"]},
    ),
    ({"tools": TOOLS, "tool_choice": "required"}, {"tools": NESTED, "tool_choice": "required"}),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "weather"}, "max_output_tokens": 7},
        {"tools": NESTED, "tool_choice": {"type": "function", "function": {"name": "weather"}}, "max_tokens": 7},
    ),
    ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    (
        {"max_output_tokens": 7, "tools": TOOLS, **LOGPROBS},
        {"max_tokens": 7, "tools": NESTED, "logprobs": True, "top_logprobs": 2},
    ),
]


@pytest.mark.some(3)
@pytest.mark.parametrize(("bodies", "answers"), in_turns(ASKED, ANSWERS, 3))
def test_streamed_whole_and_chat_are_the_same(
    bodies: tuple[dict[str, Any], dict[str, Any]], answers: list[str], reader: Site
) -> None:
    fields, as_chat = bodies
    for text in answers:
        reader.llm.script = says(text)
        full_reply = ask(reader, **fields)
        response = put_together(streamed(reader, **fields))
        for reply in (full_reply, response):
            reply.pop("created_at"), reply.pop("completed_at")
        assert response == full_reply
        body = {"messages": [{"role": "user", "content": "hi"}], "request_id": "r"} | as_chat
        choice = reader.post(CHAT, body).json()["choices"][0]
        sent, received = (call.params for call in reader.llm.calls[-2:])
        assert sent == received and reader.llm.calls[-2].prompt == reader.llm.calls[-1].prompt
        assert text_of(full_reply) == (choice["message"]["content"] or "")
        reasoning = choice["message"].get("reasoning") or ""
        assert reasoning == "".join(i["content"][0]["text"] for i in full_reply["output"] if i["type"] == "reasoning")
        calls = [
            [i["call_id"], i["name"], i["arguments"]] for i in full_reply["output"] if i["type"] == "function_call"
        ]
        assert calls == [[c["id"], *c["function"].values()] for c in choice["message"].get("tool_calls", [])]
        assert (full_reply["status"] == "incomplete") is (choice["finish_reason"] == "length")
        if "include" in fields and [item["type"] for item in full_reply["output"]] == ["message"]:
            assert full_reply["output"][0]["content"][0]["logprobs"] == choice["logprobs"]["content"]


def test_items_have_the_order_of_the_text() -> None:
    reply = ask(chat_site(f"Ok {CALL}\n{CALL} So.", THINKER), tools=TOOLS)
    kinds = [item["type"] for item in reply["output"]]
    assert kinds == ["message", "function_call", "function_call", "message"] and text_of(reply) == "Ok So."
    message, call, again, _ = reply["output"]
    assert (message["id"], call["id"], again["id"]) == ("msg_r-0", "fc_r-1", "fc_r-2")
    assert call["arguments"] == '{"city": "Rome"}' and call["call_id"] != again["call_id"]


def test_tokens_belong_to_the_item_that_their_text_is_of() -> None:
    text = f"<think>\nhm 漢\n</think>\n\nOk é {CALL}"
    s = chat_site(text, THINKER, reasoning_parser="qwen3")
    reply = ask(s, tools=TOOLS, **LOGPROBS)
    assert [item["type"] for item in reply["output"]] == ["reasoning", "message", "function_call"]
    (part,) = reply["output"][1]["content"]
    assert part["text"] == "Ok é" and b"".join(bytes(e["bytes"]) for e in part["logprobs"]).decode() == "Ok é"
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    thought = len(ids("<think>\nhm 漢\n</think>\n\n"))
    assert reply["usage"]["output_tokens_details"] == {"reasoning_tokens": thought}
    plain = ask(s)
    assert plain["usage"]["output_tokens_details"] == {"reasoning_tokens": thought}
    cut = ask(s, max_output_tokens=12, **LOGPROBS)
    assert cut["usage"]["output_tokens_details"] == {"reasoning_tokens": 12}
    (item,) = cut["output"]
    assert item["type"] == "reasoning" and item["status"] == cut["status"] == "incomplete"
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"} and item["summary"] == []


def test_statuses_of_outputs_that_end() -> None:
    reply = ask(site(endless), max_output_tokens=3)
    assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert reply["output"][0]["status"] == "incomplete" and reply["completed_at"] is None
    assert ask(chat_site("aXb"), stop=["X"])["stop_reason"] == "X"
    (empty,) = ask(chat_site(""))["output"]
    assert empty["content"][0]["text"] == "" and empty["status"] == "completed"
    broken = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro'
    (call,) = ask(chat_site(broken), tools=TOOLS)["output"]
    assert (call["arguments"], call["status"]) == ('{"city": "Ro', "incomplete")


def test_ids_of_the_tokens() -> None:
    s = chat_site("hé")
    full_reply = ask(s, return_token_ids=True)
    assert full_reply["token_ids"] == [*ids("hé"), 0] and full_reply["prompt_token_ids"] == s.llm.calls[0].prompt
    assert (
        full_reply["weight_versions"] == [{"version": "0", "start": 0, "end": 4}]
        and full_reply["weight_version"] == "0"
    )
    last = streamed(s, return_token_ids=True)[-1]["response"]
    assert {name: last[name] for name in ("token_ids", "prompt_token_ids", "weight_version")} == {
        name: full_reply[name] for name in ("token_ids", "prompt_token_ids", "weight_version")
    }


# the input


def prompt(conversation: Any, template: str = THINKER, **fields: Any) -> str:
    s = chat_site("a", template)
    ask(s, conversation, **fields)
    return TOKENIZER.decode(s.llm.calls[0].prompt, False)


def chats(messages: list[dict[str, Any]], template: str = THINKER, **fields: Any) -> str:
    s = chat_site("a", template)
    answer = s.post(CHAT, {"messages": messages} | fields)
    assert answer.status_code == 200, answer.text
    return TOKENIZER.decode(s.llm.calls[0].prompt, False)


CALLED = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}', "id": "fc_1", "status": "x"}
AS_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
HI = {"role": "user", "content": "hi"}


@pytest.mark.some(9)
@pytest.mark.parametrize(
    ("body", "messages"),
    [
        ("hi", [HI]),
        ([HI], [HI]),
        ([HI | {"type": "message"}], [HI]),
        ([{"role": "developer", "content": "be brief"}, HI], [{"role": "developer", "content": "be brief"}, HI]),
        ([{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}], [HI]),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]}],
            [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}],
        ),
        (
            [HI, THOUGHT, {"role": "assistant", "content": [{"type": "output_text", "text": "Yes"}], "id": "m"}, HI],
            [HI, {"role": "assistant", "reasoning": "hm", "content": "Yes"}, HI],
        ),
        (
            [
                HI,
                THOUGHT,
                {"role": "assistant", "content": "Ok"},
                CALLED,
                CALLED,
                {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
            ],
            [
                HI,
                {"role": "assistant", "reasoning": "hm", "content": "Ok", "tool_calls": [AS_CALL, AS_CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
            ],
        ),
        (
            [
                HI,
                CALLED,
                {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "sunny"}]},
                THOUGHT,
                CALLED,
            ],
            [
                HI,
                {"role": "assistant", "content": None, "tool_calls": [AS_CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
                {"role": "assistant", "reasoning": "hm", "tool_calls": [AS_CALL]},
            ],
        ),
        (
            [HI, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
            [HI, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
        ),
        (
            [HI, {"role": "assistant", "content": "a"}, CALLED, {"role": "assistant", "content": "b"}],
            [
                HI,
                {"role": "assistant", "content": [{"type": "text", "text": t} for t in "ab"], "tool_calls": [AS_CALL]},
            ],
        ),
        (
            [
                HI,
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "x"},
                {"role": "assistant", "content": "a"},
                THOUGHT,
            ],
            [HI, {"role": "assistant", "reasoning": "hm", "content": "a"}, {"role": "assistant", "reasoning": "hm"}],
        ),
        ([HI, {"type": "reasoning", "summary": [], "encrypted_content": "x"}], [HI]),
        ([HI, THOUGHT, THOUGHT, CALLED], [HI, {"role": "assistant", "reasoning": "hm\nhm", "tool_calls": [AS_CALL]}]),
    ],
)
def test_items_are_the_messages_of_a_chat(body: Any, messages: list[dict[str, Any]]) -> None:
    assert prompt(body) == chats(messages)
    system = {"role": "system", "content": "Answer."}
    assert prompt(body, instructions="Answer.") == chats([system, *messages])


def test_output_items_are_rendered_unchanged_in_the_next_turn() -> None:
    s = chat_site(f"<think>\nhm\n</think>\n\nOk\n{CALL}", THINKER, reasoning_parser="qwen3")
    output = ask(s, tools=TOOLS)["output"]
    result = {"type": "function_call_output", "call_id": output[2]["call_id"], "output": "sunny"}
    ask(s, [HI, *output, result], tools=TOOLS)
    again = TOKENIZER.decode(s.llm.calls[1].prompt, False)
    assert again.startswith(TOKENIZER.decode(s.llm.calls[0].prompt, False) + f"<think>\nhm\n</think>\n\nOk\n{CALL}")
    assert "sunny" in again


def test_reasoning_goes_back_in_the_field_for_encrypted_reasoning_too() -> None:
    fields = {"tools": TOOLS, "include": ["reasoning.encrypted_content"]}
    s = chat_site(f"<think>\nhm \u00e9\n</think>\n\nOk\n{CALL}", THINKER, reasoning_parser="qwen3")
    output = ask(s, **fields)["output"]
    assert [text["text"] for text in output[0].pop("content")] == ["hm \u00e9"] and output[0]["summary"] == []
    ask(s, [HI, *output], **fields)
    ask(s, [HI, {**output[0], "encrypted_content": output[0]["encrypted_content"] + "!"}, *output[1:]], **fields)
    first, second, third = (TOKENIZER.decode(call.prompt, False) for call in s.llm.calls)
    assert second.startswith(first + "<think>\nhm \u00e9\n</think>\n\nOk") and "hm \u00e9" not in third
    assert "encrypted_content" not in ask(s, tools=TOOLS)["output"][0]


def test_reasoning_is_the_summary_of_clients_that_ask_for_one() -> None:
    fields = {"tools": TOOLS, "reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    s = chat_site(f"<think>\nhm\n</think>\n\nOk\n{CALL}", THINKER, reasoning_parser="qwen3")
    reply = ask(s, **fields)
    thought = reply["output"][0]
    assert thought["summary"] == [{"type": "summary_text", "text": "hm"}] and thought["content"] == []
    assert reply["reasoning"] == {"effort": None, "summary": "auto"}
    assert put_together(streamed(s, **fields))["output"] == reply["output"]
    ask(s, [HI, *reply["output"]], **fields)
    first, *_, last = (TOKENIZER.decode(call.prompt, False) for call in s.llm.calls)
    assert last.startswith(first + "<think>\nhm\n</think>\n\nOk")


def test_effort_and_tools_reach_the_template() -> None:
    for fields, as_chat in (
        ({"reasoning": {"effort": "none"}}, {"reasoning_effort": "none"}),
        ({"tools": TOOLS}, {"tools": NESTED}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"chat_template_kwargs": {"enable_thinking": False}}),
    ):
        assert prompt("hi", **fields) == chats([HI], **as_chat) != prompt("hi")


def test_sampling_and_serving_fields_arrive() -> None:
    s = chat_site("a")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 7, "stop": ["z"], "min_tokens": 1}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    ask(s, **sampling, cache_salt="3", priority=2, text={"format": form}, max_output_tokens=9)
    call = s.llm.calls[0]
    assert {name: getattr(call.params, name) for name in sampling} == sampling and call.params.max_tokens == 9
    assert call.params.structured_outputs.json == schema
    assert (call.options["cache_salt"], call.options["priority"]) == ("3", 2)


def test_fields_without_effect_are_listed() -> None:
    fields = {"reasoning": {"effort": "low", "generate_summary": "auto"}, "text": {"shape": 1}, "frobnicate": 2}
    fields["truncation"] = "auto"
    answer = site(says("a")).post(RESPONSES, {"input": "x"} | fields)
    ignored = set(answer.headers["x-ignored-fields"].split(", "))
    assert ignored == {"frobnicate", "text.shape", "reasoning.generate_summary", "reasoning.effort", "truncation"}
    assert answer.json()["truncation"] == "disabled"
    quiet = {
        "store": False,
        "service_tier": "auto",
        "background": False,
        "metadata": {"a": "b"},
        "include": ["reasoning.encrypted_content"],
        "truncation": "disabled",
        "text": {"verbosity": "medium"},
        "prompt_cache_retention": "in_memory",
        "stream_options": {"include_obfuscation": False},
        "previous_response_id": None,
    }
    answer = site(says("a")).post(RESPONSES, {"input": "x", "stream": True} | quiet)
    assert answer.status_code == 200 and "x-ignored-fields" not in answer.headers
    for name in ("frobnicate", "text.shape", "reasoning.effort", "truncation"):
        outer, _, inner = name.partition(".")
        value = {"effort": "low"} if inner == "effort" else {inner: 1} if inner else 1
        strict = site(says("a"), strict=True).post(RESPONSES, {"input": "x", outer: value})
        assert strict.status_code == 400 and strict.json()["error"]["param"] == name


# refusals


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": None}, "input", "required"),
        ({"input": []}, "input", "empty"),
        ({"input": 5}, "input", "string"),
        ({"input": {}}, "input", "string or a valid list"),
        ({"input": [5]}, "input[0]", "object"),
        ({"input": [{}]}, "input[0].type", "required"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "nothing is stored"),
        ({"input": [HI, {"type": "frobnicate_call"}]}, "input[1].type", "it takes message, reasoning"),
        ({"input": [{"type": [1]}]}, "input[0].type", "not supported"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "developer"),
        ({"input": [{"role": ["user"], "content": "x"}]}, "input[0].role", "one of"),
        ({"input": [{"role": "user"}]}, "input[0].content", "list of parts"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "image"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "string"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", "string"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": 1}]}, "input[0].name", "string"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output", "parts"),
        ({"input": [{"type": "reasoning", "content": 5}]}, "input[0].content", "list"),
        ({"input": [{"type": "reasoning", "summary": [5]}]}, "input[0].summary[0].text", "string"),
        ({"input": "x" * 5000}, "input", "context length"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
        ({"conversation": "c"}, "conversation", "nothing is stored"),
        ({"prompt": {"id": "p"}}, "prompt", "stored"),
        ({"background": True}, "background", "stored"),
        ({"messages": [HI]}, "messages", "use input"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format", "text.format"),
        ({"n": 2}, "n", ""),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "not supported"),
        ({"tokens": [1]}, "tokens", "use input"),
        ({"documents": [{"text": "x"}]}, "documents", "not supported"),
        ({"continue_final_message": True}, "continue_final_message", "not supported"),
        ({"add_generation_prompt": False}, "add_generation_prompt", "not supported"),
        ({"add_special_tokens": True}, "add_special_tokens", "not supported"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "not supported"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must"),
        ({"temperature": -1}, "temperature", "temperature must"),
        ({"model": "other"}, "model", "serves"),
        ({"include": ["x"]}, "include[0]", "not supported"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        (LOGPROBS | {"top_logprobs": 50}, "top_logprobs", "top_logprobs must"),
        ({"text": {"format": {"type": "x"}}}, "text.format.type", "text.format.type must"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "required"),
        ({"text": {"format": 5}}, "text.format", "object"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", "low"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary", "concise"),
        ({"metadata": {"a": 1}}, "metadata.a", ""),
        ({"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}}, "text.format", "both"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", ""),
        ({"tools": [{"type": "frobnicate"}]}, "tools[0].type", "it serves function, custom, namespace"),
        ({"tools": [{"name": "f"}]}, "tools[0].type", "must be one of function"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "tools[0].name must"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name", 'beside "type"'),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools[1].name", "two tools"),
        ({"tools": [TOOLS[1] | {"parameters": 5}]}, "tools[0].parameters", "schema"),
        ({"tools": TOOLS}, "tools", "--tool-call-parser"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.name", "tool_choice.name must"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "not one of the tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice", "not supported"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages", ""),
        ({"cache_salt": ""}, "cache_salt", "1 to"),
        ({"stream": 5}, "stream", "boolean"),
    ],
    ids=str,
)
def test_refusals(fields: dict[str, Any], param: str, message: str, stream: bool, server: Site) -> None:
    answer = server.post(RESPONSES, {"input": "x", "stream": stream} | fields)
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    error = answer.json()["error"]
    assert error["param"] == param and message in error["message"], error
    assert error["code"] == "unsupported" or "input_image" not in error["message"]
    assert not server.llm.num_inflight


@pytest.fixture(scope="module")
def server() -> Site:
    return site(says("a"), chat_template="{{ tools }}{{ messages[-1].content }}")


def test_nothing_is_stored() -> None:
    s = chat_site("a")
    ask(s)
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        answer = s.request(method, f"{RESPONSES}/resp_r{path}")
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_stored"
        assert s.request("PUT", f"{RESPONSES}/resp_r").status_code == 405


def test_a_msgpack_body_and_reply() -> None:
    s = chat_site("hello")
    raw = msgspec.msgpack.encode({"input": "hi"})
    packed = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
    answer = s.post(RESPONSES, content=raw, headers=packed)
    assert text_of(msgspec.msgpack.decode(answer.content)) == "hello"
    streaming = s.post(RESPONSES, {"input": "hi", "stream": True}, headers={"Accept": "application/msgpack"})
    assert streaming.status_code == 400 and streaming.json()["error"]["param"] == "stream"


EXTENSION = msgspec.msgpack.Ext(5, b"a")
BYTES = {"type": "json_schema", "json_schema": {"schema": {"enum": [b"x"]}}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (RESPONSES, {"text": {"format": {"type": "text", "x": EXTENSION}}}, "text.format.x"),
        (RESPONSES, {"tool_choice": "none", "tools": [TOOLS[0] | {"x": {(1,): 1}}]}, "tools[0].x"),
        (RESPONSES, {"instructions": b"x"}, "instructions"),
        (CHAT, {"response_format": BYTES, "tools": NESTED}, "response_format.json_schema.schema.enum[0]"),
    ],
)
def test_msgpack_values_that_json_lacks_are_refused(
    route: str, fields: dict[str, Any], param: str, stream: bool
) -> None:
    s = chat_site("hello")
    body = {"stream": stream} | ({"input": "hi"} if route == RESPONSES else {"messages": [HI]})
    raw = msgspec.msgpack.encode(body | fields)
    answer = s.post(route, content=raw, headers={"Content-Type": "application/msgpack"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert not s.llm.num_inflight


# what goes wrong on the way


def test_a_full_queue_is_refused_before_the_stream_begins() -> None:
    s = chat_site("a")
    s.llm.refuse = QueueFull("the queue is full", retry_after=7, code="queue_full")
    answer = s.post(RESPONSES, {"input": "x", "stream": True})
    assert answer.status_code == 429 and answer.headers["retry-after"] == "7"


def test_a_stream_begins_before_there_is_a_token() -> None:
    async def scene() -> bytes:
        s = site(endless)
        s.llm.hold = True
        caller = Caller(s, RESPONSES, {"input": "x", "stream": True, "max_output_tokens": 2})
        await caller.wait_for(lambda c: bool(c.writes))
        begun = caller.writes[0]
        s.llm.wake()
        await caller.task
        put_together(events(b"".join(caller.writes).decode()))
        return begun

    begun = events(asyncio.run(scene()).decode())
    assert [event["type"] for event in begun] == ["response.created", "response.in_progress"]


@pytest.mark.parametrize("tokens", [0, 3])
def test_the_engines_death_in_a_stream(tokens: int) -> None:
    async def scene() -> Caller:
        s = site(endless)
        s.llm.hold = not tokens
        caller = Caller(s, RESPONSES, {"input": "x", "stream": True, "request_id": "r"})
        await caller.wait_for(lambda c: s.llm.num_inflight == 1 and len(c.writes) >= tokens)
        s.llm.hold = True
        s.llm.die()
        await caller.task
        return caller

    response = put_together(events(b"".join(asyncio.run(scene()).writes).decode()))
    assert response["status"] == "failed" and response["error"]["code"] == "server_error"
    assert response["error"]["message"] == "the engine process ended" and response["completed_at"] is None
    assert [item["status"] for item in response["output"]] == ["incomplete"] * bool(tokens)


def test_a_request_that_failed() -> None:
    s = site()
    s.llm.fails = lambda index: True
    response = put_together(streamed(s, "x"))
    assert response["status"] == "failed" and "not finite" in response["error"]["message"]
    assert s.post(RESPONSES, {"input": "x"}).status_code == 500


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts(stream: bool) -> None:
    async def scene() -> Site:
        s = site(endless)
        s.llm.hold = True
        caller = Caller(s, RESPONSES, {"input": "x", "stream": stream, "request_id": "mine"})
        await caller.wait_for(lambda _: s.llm.num_inflight == 1)
        caller.hang_up()
        await caller.task
        return s

    s = asyncio.run(scene())
    assert s.llm.released == {"mine#0"} and not metrics_of(s.app.state.serving).inflight


def test_an_aborted_response_keeps_its_output() -> None:
    async def scene() -> Caller:
        s = site(endless)
        caller = Caller(s, RESPONSES, {"input": "x", "stream": True, "request_id": "r"})
        await caller.wait_for(lambda c: len(c.writes) > 3)
        await s.llm.abort(["resp_r"])
        await caller.task
        return caller

    response = put_together(events(b"".join(asyncio.run(scene()).writes).decode()))
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": None})
    assert response["stop_detail"] == {"kind": "abort_user"} and len(text_of(response)) >= 1


def test_last_events_that_repeat_many_logprobs_are_made_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    emit = ResponsesRenderer._emit

    def noted(renderer: ResponsesRenderer, name: str, fields: dict[str, Any]) -> None:
        if name.endswith((".done", "completed", "incomplete")):
            threads.add(threading.current_thread().name)
        emit(renderer, name, fields)

    monkeypatch.setattr(ResponsesRenderer, "_emit", noted)
    expected = streamed(chat_site("Hello"), **LOGPROBS)
    assert threads and not any(name.startswith("tokserve-") for name in threads), "a small reply needs no thread"
    threads.clear()
    monkeypatch.setattr(sse, "REPEATED", 1)
    repeated = streamed(chat_site("Hello"), **LOGPROBS)
    assert all(name.startswith("tokserve-") for name in threads), threads
    assert [event["type"] for event in repeated] == [event["type"] for event in expected]
    assert repeated[-1]["response"]["output"][0]["content"] == expected[-1]["response"]["output"][0]["content"]
