"""Messages as older and other clients send them (serving-faults F2, F16a, F16), as templates get them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.byte_tokenizer import byte_tokenizer
from tests.text.tool_templates import HERMES, MISTRAL, THINKER
from tokserve.base.errors import RequestError
from tokserve.features.chat.chat import ChatTemplate

USER = {"role": "user", "content": "q"}
DEEPSEEK_LIKE = (  # tests whether there are calls by whether the field is there
    "{% for m in messages %}{% if m.tool_calls is defined and m.tool_calls is not none %}<calls>"
    "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}</calls>"
    "{% elif m.content is defined %}{{ m.role }}:{{ m.content }};{% endif %}"
    "{% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{% endif %}{% endfor %}"
)
# as Qwen 3.5's
ONE_SYSTEM = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('must be first') }}{% endif %}"
    "{{ m.role }}:{{ m.content }};{% endfor %}"
)
SHOWS_ONE_CALL = (  # as gpt-oss's
    "{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}"
    "{% if m.content or m.thinking %}thought:{{ m.content or m.thinking }};{% endif %}"
    "call:{{ m.tool_calls[0].function.name }}({{ m.tool_calls[0].function.arguments.x }});"
    "{% else %}{{ m.role }}:{{ m.content }};{% endif %}{% endfor %}"
)
TAKES_ONE_CALL = SHOWS_ONE_CALL.replace(  # as Llama's
    "call:", "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}call:"
)
DROPS_SYSTEM = (
    "{% if messages[0].role == 'system' %}S:{{ messages[0].content }};{% endif %}"
    "{% for m in messages if m.role != 'system' %}{{ m.role }}:{{ m.content }};{% endfor %}"
)


def text(template: str, *messages: dict[str, Any], **options: Any) -> str:
    return ChatTemplate(byte_tokenizer(), template).text(list(messages), **{"add_generation_prompt": False} | options)


@pytest.mark.parametrize(
    "empty",
    [
        {"tool_calls": []},
        {"tool_calls": None},
        {"function_call": None},
        {"function_call": {}},
        {"reasoning": ""},
        {"reasoning_content": ""},
        {"thinking": None},
        {"prefix": False},
    ],
    ids=str,
)
def test_an_empty_field_is_as_if_it_were_absent(empty: dict[str, Any]) -> None:
    """F2: a template that looks for the field took an answer for calls, and its text was lost."""
    answer = {"role": "assistant", "content": "IMPORTANT"}
    for template in (DEEPSEEK_LIKE, HERMES, THINKER, MISTRAL):
        assert text(template, USER, answer | empty, USER) == text(template, USER, answer, USER)
        assert "IMPORTANT" in text(template, USER, answer | empty, USER)


def test_content_without_parts_is_no_content() -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}
    for template in (DEEPSEEK_LIKE, HERMES):
        answer = {"role": "assistant", "tool_calls": [call]}
        assert text(template, USER, answer | {"content": []}) == text(template, USER, answer)
    assert text(DEEPSEEK_LIKE, {"role": "user", "content": []}) == "user:;"


@pytest.mark.parametrize("template", [ONE_SYSTEM, DROPS_SYSTEM])
def test_system_messages_that_the_template_does_not_take_are_merged_at_the_start(template: str) -> None:
    """F16a."""
    a, b = {"role": "system", "content": "a"}, {"role": "system", "content": [{"type": "text", "text": "b"}]}
    merged = text(template, {"role": "system", "content": "a\n\nb"}, USER)
    for messages in ([a, b, USER], [a, USER, b], [USER, a, b]):
        assert text(template, *messages) == merged
    assert text(template, a, USER) == text(template, {"role": "system", "content": "a"}, USER)


def test_system_messages_stay_where_the_template_takes_them() -> None:
    a, b = {"role": "system", "content": "a"}, {"role": "system", "content": "b"}
    rendered = text(HERMES, a, USER, b)
    assert rendered.index("system\na") < rendered.index("user\nq") < rendered.index("system\nb")


def test_a_call_in_the_form_before_tools_is_a_tool_call() -> None:
    """F16: legacy `function_call` was ignored."""
    function = {"name": "f", "arguments": '{"a": 1}'}
    result = {"role": "function", "name": "f", "content": "sunny"}
    old = text(HERMES, USER, {"role": "assistant", "content": None, "function_call": function}, result)
    call = {"id": "call00001", "type": "function", "function": function}
    new_result = {"role": "tool", "tool_call_id": "call00001", "name": "f", "content": "sunny"}
    assert old == text(HERMES, USER, {"role": "assistant", "tool_calls": [call]}, new_result)
    assert '{"name": "f", "arguments": {"a": 1}}' in old
    assert '"id": "call00001"' in text(MISTRAL, USER, {"role": "assistant", "function_call": function}, result)


def call(name: str, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": '{"x": 1}'}}


def result(content: str, **fields: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, **fields}


@pytest.mark.parametrize("template", [SHOWS_ONE_CALL, TAKES_ONE_CALL], ids=["shows one", "takes one"])
@pytest.mark.parametrize(
    ("results", "shown"),
    [
        ([result("A", tool_call_id="a"), result("B", tool_call_id="b")], "call:f(1);tool:A;call:g(1);tool:B;"),
        ([result("B", tool_call_id="b"), result("A", tool_call_id="a")], "call:f(1);tool:A;call:g(1);tool:B;"),
        ([result("A"), result("B")], "call:f(1);tool:A;call:g(1);tool:B;"),
        ([result("B", tool_call_id="b")], "call:f(1);call:g(1);tool:B;"),
        (
            [result("A", tool_call_id="a"), result("B", tool_call_id="b"), result("C")],
            "call:f(1);tool:A;call:g(1);tool:B;tool:C;",
        ),
        ([], "call:f(1);call:g(1);"),
    ],
    ids=["in order", "by id", "without ids", "one is missing", "one too many", "none"],
)
def test_several_calls_of_a_message_where_the_template_shows_one(
    template: str, results: list[dict[str, Any]], shown: str
) -> None:
    calls = {"role": "assistant", "content": "Look.", "tool_calls": [call("f", "a"), call("g", "b")]}
    assert text(template, USER, calls, *results, USER) == f"user:q;thought:Look.;{shown}user:q;"


def test_a_text_beside_the_reasoning_of_a_call_where_the_template_takes_one() -> None:
    turn = {"role": "assistant", "content": "Look.", "reasoning_content": "Hm.", "tool_calls": [call("f", "a")]}
    assert text(SHOWS_ONE_CALL, USER, turn) == "user:q;thought:Hm.\n\nLook.;call:f(1);"
    parts = turn | {"content": [{"type": "text", "text": "Look."}]}
    assert text(SHOWS_ONE_CALL, USER, parts) == text(SHOWS_ONE_CALL, USER, turn)
    assert text(SHOWS_ONE_CALL, USER, turn | {"content": ""}) == "user:q;thought:Hm.;call:f(1);"
    assert text(THINKER, USER, turn).count("Look.") == 1 and "<think>\nHm.\n</think>" in text(THINKER, USER, turn)


def test_a_final_message_with_prefix_is_continued() -> None:
    """F16: Mistral's and DeepSeek's form of prefill began a new turn."""
    begun = {"role": "assistant", "content": "The answer is"}
    expected = text(HERMES, USER, begun, continue_final_message=True)
    for generation in (None, False):
        rendered = text(HERMES, USER, begun | {"prefix": True}, add_generation_prompt=generation)
        assert rendered == expected and rendered.endswith("assistant\nThe answer is")
    assert text(HERMES, USER, begun | {"prefix": False}) == text(HERMES, USER, begun)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([USER, {"role": "assistant", "content": "a", "prefix": 1}], "messages[1].prefix"),
        ([{"role": "assistant", "content": "a", "prefix": True}, USER], "messages[0].prefix"),
        ([USER | {"prefix": True}], "messages[0].prefix"),
        ([USER, {"role": "assistant", "function_call": 5}], "messages[1].function_call"),
        ([USER, {"role": "assistant", "function_call": {"name": 5}}], "messages[1].function_call.name"),
        (
            [USER, {"role": "assistant", "function_call": {"name": "f", "arguments": []}}],
            "messages[1].function_call.arguments",
        ),
        ([USER, 5], "messages[1]"),
    ],
    ids=str,
)
def test_refusals_name_the_field(messages: list[Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        text(HERMES, *messages)
    assert caught.value.field == field
