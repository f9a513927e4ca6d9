"""ChatTemplate: the tokens that transformers renders; every error names a field."""

from pathlib import Path
from typing import Any

import pytest

from tests.text.checkpoints import CHATML, oracle, write_chatml
from tokserve.base.errors import RequestError, StartError
from tokserve.features.chat.chat import ChatTemplate
from tokserve.text.tokenizer import Tokenizer

DEMO = Path(__file__).parents[2] / "tokserve" / "demo_model"
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  naïve 漢字?\n\n"},
    {"role": "assistant", "content": "Yes. <b>&'\"</b> "},
    {"role": "user", "content": "<|im_end|> 47 + 38"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a <city> & 'more'",
            "parameters": {"type": "object", "properties": {"zity": {"type": "string"}, "äge": {"type": "number"}}},
        },
    }
]
# what templates in the field use: loops with controls, macros, namespaces, tojson, generation marks, slices, filters
RICH = """
{%- set ns = namespace(seen=false) %}
{%- macro show(m) %}<{{ m.role }}>{% endmacro %}
{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
        {{- tool.function.parameters | tojson(indent=2) }}
    {%- endfor %}
    {{- '</tools>\\n' }}
{%- endif %}
{%- for d in documents or [] %}[doc {{ d.title }}]{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if message.role == 'end' %}{% break %}{% endif %}
    {{- show(message) }}
    {%- if message.role == 'assistant' %}
        {%- if message.reasoning_content is defined %}<think>{{ message.reasoning_content }}</think>{% endif %}
        {%- generation %}
            {{- message.content | default('(none)') }}
            {%- for call in message.tool_calls or [] %}
                {{- call.function.name }}({{ call.function.arguments | tojson }})
            {%- endfor %}
        {%- endgeneration %}
        {%- set ns.seen = true %}
    {%- else %}
        {{- message['content'] }}
    {%- endif %}
    {{- eos_token }}
{%- endfor %}
{{- 'S' if ns.seen else '' }}{{ undefined_name }}
{%- if enable_thinking is defined and not enable_thinking %}<no_think>{% endif %}
{%- if add_generation_prompt %}<assistant>{% endif %}
"""


class Pair:
    """tokserve's template and transformers' tokenizer for the same checkpoint."""

    def __init__(self, directory: Path, **config: Any) -> None:
        self.directory = write_chatml(directory, **config)
        self.tokenizer = Tokenizer.load(self.directory)
        self.template = ChatTemplate(self.tokenizer)
        self.reference = oracle(self.directory)

    def check(self, messages: list[Any], *, kwargs: dict[str, Any] | None = None, **options: Any) -> str:
        """Render with both, demand equal tokens, return the text."""
        actual = self.template.render(messages, kwargs=kwargs, **options)
        generation = options.pop("add_generation_prompt", not options.get("continue_final_message", False))
        template = options.pop("template", None)
        expected = self.reference.apply_chat_template(
            messages,
            chat_template=template,
            add_generation_prompt=generation,
            tokenize=True,
            return_dict=False,
            **options,
            **(kwargs or {}),
        )
        assert actual == expected
        return self.tokenizer.decode(actual, False)


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("chatml"))


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("rich"), chat_template=RICH)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("generation", [True, False])
def test_chatml_equals_transformers(chatml: Pair, count: int, generation: bool) -> None:
    text = chatml.check(TALK[:count], add_generation_prompt=generation)
    assert text.endswith("<|im_start|>assistant\n") == generation


@pytest.mark.parametrize(
    "messages",
    [
        TALK,
        [*TALK, {"role": "skip", "content": "never"}, {"role": "assistant", "content": None, "tool_calls": None}],
        [{"role": "user", "content": ""}, {"role": "end", "content": "x"}, {"role": "user", "content": "y"}],
        [{"role": "assistant", "content": "a", "reasoning_content": "hm"}],
        [{"role": "assistant", "content": "a", "reasoning": "hm"}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"b": 1, "a": "<ü>"}}}]}],
    ],
)
@pytest.mark.parametrize(
    "options",
    [{}, {"tools": TOOLS}, {"documents": [{"title": "T", "text": "x"}]}, {"kwargs": {"enable_thinking": False}}],
)
def test_rich_template_equals_transformers(rich: Pair, messages: list[Any], options: dict[str, Any]) -> None:
    text = rich.check(messages, **options)
    assert "&lt;" not in text and "\\u00" not in text
    assert ('"zity"' in text) == ("tools" in options) and ("<no_think>" in text) == ("kwargs" in options)


def test_tool_arguments_as_json_text_become_an_object(rich: Pair) -> None:
    def call(arguments: Any) -> list[Any]:
        return [
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        ]

    assert rich.template.text(call('{"b": 1, "a": "<ü>"}')) == rich.template.text(call({"b": 1, "a": "<ü>"}))
    assert rich.template.text(call("")) == rich.template.text(call({}))
    assert rich.template.text(call(None)) == rich.template.text(call({}))
    assert '"not json"' in rich.template.text(call("not json"))
    original = call('{"b": 1}')
    rich.template.text(original)
    assert original == call('{"b": 1}'), "the caller's messages were changed"


PARTS = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content if part.type == 'text' %}<{{ part.text }}>{% endfor %}{% endif %};{% endfor %}"
)


def test_a_template_that_walks_through_parts_gets_them(chatml: Pair) -> None:
    talk = [
        {"role": role, "content": [{"type": "text", "text": f"{role} a"}, {"type": "text", "text": "b"}]}
        for role in ("system", "user", "assistant")
    ]
    for options in ({"template": PARTS}, {"template": PARTS, "continue_final_message": True}):
        text = chatml.check(talk, **options)
        assert text.startswith("system:<system a><b>;user:<user a><b>;assistant:<assistant a><b")
    half = PARTS.replace("m.content is string", "m.content is string or m.role == 'system'")  # one prints a list
    assert chatml.template.text(talk[:2], template=half) == "system:system a\nb;user:<user a><b>;"
    for careless in (
        "{{ messages[0].content }}",
        "{{ messages[0].content | trim }}",
        "{{ 'x' + messages[0].content }}",
    ):
        assert chatml.template.text(talk[1:2], template=careless).endswith("user a\nb")
    assert chatml.template.text([{"role": "user", "content": []}], template=PARTS) == "user:;"


def test_parts_reach_a_template_that_wants_the_user_first(chatml: Pair) -> None:
    """What a template makes of parts is found out with a chat in which each role stands where it may."""
    strict = (
        "{% if (messages | rejectattr('role', 'equalto', 'system') | first).role != 'user' %}"
        "{{ raise_exception('the user speaks first') }}{% endif %}" + PARTS
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for index in range(3):
        talk: list[dict[str, Any]] = [dict(message) for message in TALK[:3]]
        talk[index]["content"] = parts
        assert chatml.template.text(talk, template=strict) == chatml.template.text(talk, template=PARTS)


def test_parts_are_joined_for_a_template_without_parts(chatml: Pair) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "refusal", "refusal": "two"}, "three"]
    flat = chatml.template.render([{"role": "user", "content": parts}])
    assert flat == chatml.template.render([{"role": "user", "content": "one\ntwo\nthree"}])
    assert chatml.template.render([{"role": "user", "content": []}]) == chatml.template.render(
        [{"role": "user", "content": ""}]
    )


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}], "messages[1].content[1].type"),
        ([{"type": "text"}], "messages[1].content[0].text"),
        ([{"type": "refusal", "text": "a"}], "messages[1].content[0].refusal"),
        ([{"type": ["text"], "text": "a"}], "messages[1].content[0].type"),
        ([7], "messages[1].content[0]"),
        (7, "messages[1].content"),
        ({"a": 1}, "messages[1].content"),
        ("\ud800", "messages"),
    ],
)
def test_bad_content_is_named(chatml: Pair, content: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        chatml.template.render([TALK[0], {"role": "user", "content": content}])
    assert caught.value.field == field


CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("messages", "options", "field"),
    [
        ([], {}, "messages"),
        (["hi"], {}, "messages[0]"),
        ([{"content": "x"}], {}, "messages[0].role"),
        ([*TALK, {"role": "user", "content": "x", "name": 5}], {}, f"messages[{len(TALK)}].name"),
        ([{"role": "tool", "content": "x", "tool_call_id": []}], {}, "messages[0].tool_call_id"),
        ([{"role": "assistant", "content": "x", "refusal": True}], {}, "messages[0].refusal"),
        ([{"role": "assistant", "content": "x", "reasoning": {}}], {}, "messages[0].reasoning"),
        ([{"role": "assistant", "content": "x", "reasoning_content": 1}], {}, "messages[0].reasoning_content"),
        ([{"role": "assistant", "tool_calls": [CALL | {"id": 7}]}], {}, "messages[0].tool_calls[0].id"),
        (TALK, {"tools": ["f"]}, "tools[0]"),
        (TALK, {"tools": TOOLS}, "tools"),  # ChatML prints none
        (TALK, {"tools": TOOLS, "template": "{% for %}"}, "chat_template"),
        (TALK, {"documents": [1]}, "documents[0]"),
        (TALK, {"kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        (TALK, {"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ([{"role": "assistant"}], {"continue_final_message": True}, "messages[0].content"),
        (TALK, {"template": "{% for %}"}, "chat_template"),
        (TALK, {"template": "{{ nothing.at.all }}"}, "chat_template"),
        (TALK, {"template": "{{ 1 // 0 }}"}, "chat_template"),
        (TALK, {"template": "{{ 'a' + 1 }}"}, "chat_template"),
        (TALK, {"template": "{{ messages[99].role.x }}"}, "chat_template"),
        (TALK, {"template": "{{ messages.append(1) }}"}, "chat_template"),
        (TALK, {"template": "{{ ''.__class__.__mro__[1].__subclasses__() }}"}, "chat_template"),
        (TALK, {"template": "{{ range(10**9) | list }}"}, "chat_template"),
        (TALK, {"template": "{% include 'x' %}"}, "chat_template"),
        (TALK, {"template": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"}, "chat_template"),
        (TALK, {"template": "{{ messages | tojson(indent='x', sort_keys=[]) | nosuchfilter }}"}, "chat_template"),
        (TALK, {"template": "{{ raise_exception('roles must alternate') }}"}, "messages"),
    ],
)
def test_template_errors_are_errors_of_the_request(
    chatml: Pair, messages: list[Any], options: dict[str, Any], field: str
) -> None:
    with pytest.raises(RequestError) as caught:
        chatml.template.render(messages, **options)
    assert caught.value.field == field and caught.value.status == 400


def test_other_fields_of_a_message_are_the_templates(chatml: Pair) -> None:
    message = {"role": "user", "content": "x", "name": None, "audio": None, "feeling": [1]}
    assert chatml.template.text([message], template="{{ messages[0].feeling }}{{ messages[0].name }}") == "[1]"


def test_raise_exception_returns_the_templates_message(chatml: Pair) -> None:
    with pytest.raises(RequestError, match=r"^messages: roles must alternate \(raised by the model's chat template\)$"):
        chatml.template.render(TALK, template="{{ raise_exception('roles must alternate') }}")


def test_a_request_may_bring_its_template(chatml: Pair) -> None:
    assert chatml.check(TALK, template="{% for m in messages %}[{{ m.content }}]{% endfor %}{{ eos_token }}")


def test_strftime_now(chatml: Pair) -> None:
    assert chatml.check(TALK, template="{{ strftime_now('%Y') }}{{ bos_token }}").startswith("20")


CONTINUED = [
    CHATML,
    RICH,
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}",
    "{% for m in messages %}{{ '[' + m.content.strip() + ']' }}{% if not loop.last %}\n{% endif %}{% endfor %} tail",
]


@pytest.mark.parametrize("template", CONTINUED)
@pytest.mark.parametrize("content", ["Sure, it is", "Sure, it is ", "  a\n", "x", "END CONTINUE_FINAL_MESSAGE_TAG"])
def test_continue_final_message_ends_at_the_content(chatml: Pair, template: str, content: str) -> None:
    messages = [*TALK, {"role": "assistant", "content": content}]
    text = chatml.template.text(messages, continue_final_message=True, template=template)
    assert text.endswith(content.strip() if "strip" in template or "trim" in template else content)
    if "TAG" not in content:
        chatml.check(messages, continue_final_message=True, template=template)


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ messages[-1].content | upper }}", "nothing"])
def test_continue_final_message_needs_a_template_that_prints_it(chatml: Pair, template: str) -> None:
    messages = [*TALK, {"role": "assistant", "content": "abc"}]
    with pytest.raises(RequestError) as caught:
        chatml.template.text(messages, continue_final_message=True, template=template)
    assert caught.value.field == "continue_final_message"


def test_what_a_template_reads(chatml: Pair, rich: Pair) -> None:
    assert [pair.template.reads("enable_thinking") for pair in (chatml, rich)] == [False, True]
    perhaps = "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}"
    assert chatml.template.reads("tools", perhaps) and not chatml.template.reads(
        "tools", "{% set tools = 1 %}{{ tools }}"
    )


def test_named_templates(tmp_path: Path) -> None:
    shows = {"name": "tool_use", "template": "T{{ tools|length }}"}
    named = [{"name": "default", "template": "D{{ messages|length }}"}, shows]
    pair = Pair(tmp_path, chat_template=[*named, {"name": "rag", "template": "R{{ eos_token }}"}])
    assert pair.check(TALK) == "D4" and pair.check(TALK, tools=TOOLS) == "T1"
    assert pair.check(TALK, template="rag") == "R<|im_end|>"
    only = ChatTemplate(Tokenizer.load(write_chatml(tmp_path / "only", chat_template=[named[1]])))
    assert only.text(TALK, tools=TOOLS) == "T1"
    with pytest.raises(RequestError, match="tool_use"):
        only.text(TALK)


def test_a_developer_is_the_system_where_the_template_has_no_such_role(chatml: Pair) -> None:
    developer, user = {"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}
    system = developer | {"role": "system"}
    assert chatml.template.text([developer, user]) == chatml.template.text([system, user])
    merged = system | {"content": "Be brief.\n\nBe kind."}
    assert chatml.template.text([system, user, developer | {"content": "Be kind."}]) == chatml.template.text(
        [merged, user]
    )
    knows = "{% for m in messages if m.role == 'developer' %}{{ m.content }}{% endfor %}"
    assert chatml.template.text([user, developer], template=knows) == "Be brief."


def test_no_template(tmp_path: Path) -> None:
    template = ChatTemplate(Tokenizer.load(write_chatml(tmp_path, chat_template=None)))
    with pytest.raises(RequestError, match="--chat-template") as caught:
        template.render(TALK)
    assert caught.value.field == "messages"
    assert template.text(TALK, template="{{ messages|length }}") == "4"


def test_default_variables(chatml: Pair) -> None:
    template = ChatTemplate(chatml.tokenizer, "{{ a }} {{ b }}", {"a": 1, "b": 2})
    assert template.text(TALK) == "1 2"
    assert template.text(TALK, kwargs={"b": 3}) == "1 3"
    with pytest.raises(StartError, match="option default_chat_template_kwargs must not hold 'messages'"):
        ChatTemplate(chatml.tokenizer, None, {"messages": []})


def test_override_is_a_file_or_a_template(chatml: Pair, tmp_path: Path) -> None:
    path = tmp_path / "other.jinja"
    path.write_text("from file {{ messages|length }}")
    assert ChatTemplate(chatml.tokenizer, str(path)).text(TALK) == "from file 4"
    assert ChatTemplate(chatml.tokenizer, "inline {{ messages|length }}").text(TALK) == "inline 4"
    for bad in ("/no/such/file.jinja", "{% for %}", "{{ x | nosuchfilter }}"):
        with pytest.raises(StartError, match="template"):
            ChatTemplate(chatml.tokenizer, bad)


CALLED: dict[str, Any] = {
    "role": "assistant",
    "tool_calls": [{"id": "sample001", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
}
NO_CONTENT = (  # template, what it makes of a call without content
    ("{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}", "<assistant>"),
    ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "<assistant>"),
    ("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}", "<assistant>"),
    (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is none %}calls{% else %}{{ m['content'] + '.' }}"
        "{% endif %}{% endfor %}",
        "<assistant>calls",
    ),
    (
        "{% for m in messages %}<{{ m.role }}>{% if 'content' in m %}{{ m['content'] + '.' }}{% else %}calls{% endif %}"
        "{% endfor %}",
        "<assistant>calls",
    ),
    (
        "{% for m in messages %}<{{ m.role }}>{% if not m.content %}{{ m.tool_calls[0].function.name }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}",
        "<assistant>f",
    ),
    (
        "{% for m in messages %}<{{ m.role }}>"
        "{{ m.content if m.content is string else m.content | tojson }}{% endfor %}",
        "<assistant>",
    ),
)


@pytest.mark.parametrize("content", [{}, {"content": None}], ids=["absent", "null"])
@pytest.mark.parametrize(("source", "shown"), NO_CONTENT)
def test_calls_without_content_are_rendered_by_every_template(
    chatml: Pair, source: str, shown: str, content: dict[str, Any]
) -> None:
    text = chatml.template.text([TALK[1], CALLED | content], template=source)
    assert text.endswith(shown) and "None" not in text


PARTS_WITH_THOUGHTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for b in m.content %}"
    "{% if b.type == 'text' %}{{ b.text }}{% elif b.type == 'thinking' %}[THINK]{{ b.thinking }}[/THINK]{% endif %}"
    "{% endfor %}{% endif %}{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}{% endfor %}"
)
REASONING = (
    "{% for m in messages %}{% if m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}{{ m.content }}"
    "{% endfor %}"
)
THOUGHT = {"type": "thinking", "thinking": "hm"}


@pytest.mark.parametrize(
    "message",
    [
        {"content": "Yes", "reasoning": "hm"},
        {"content": [THOUGHT, {"type": "text", "text": "Yes"}]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, "Yes"]},
        {"content": [{"type": "text", "text": "Yes"}], "reasoning_content": "hm"},
    ],
)
def test_reasoning_reaches_a_template_as_a_part_or_a_field(chatml: Pair, message: dict[str, Any]) -> None:
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", **message}]
    assert chatml.template.text(chat, template=PARTS_WITH_THOUGHTS) == "?[THINK]hm[/THINK]Yes"
    assert chatml.template.text(chat, template=REASONING) == "?<hm>Yes"
    continued = chatml.template.text(chat, template=PARTS_WITH_THOUGHTS, continue_final_message=True)
    assert continued == "?[THINK]hm[/THINK]Yes"


def test_reasoning_before_calls_is_a_part_of_an_answer_without_text(chatml: Pair) -> None:
    message = CALLED | {"content": None, "reasoning": "hm"}
    assert chatml.template.text([message], template=PARTS_WITH_THOUGHTS) == "[THINK]hm[/THINK](f)"
    assert (
        chatml.template.text([CALLED | {"content": [THOUGHT]}], template=PARTS_WITH_THOUGHTS) == "[THINK]hm[/THINK](f)"
    )
    with pytest.raises(RequestError) as caught:
        chatml.template.text([{"role": "assistant", "content": [{"type": "thinking", "thinking": 5}]}])
    assert caught.value.field == "messages[0].content[0].thinking"
    with pytest.raises(RequestError, match="must be one of text"):
        chatml.template.text([{"role": "user", "content": [THOUGHT]}])


CALL_WRITERS = (  # how a template writes the call of a message, and what comes of it
    ("{{ '<' + c.arguments + '>' }}", '<{"a": 1}>'),
    ("{% if m.content is none %}{{ c.name + c.arguments }}{% else %}{{ m.content }}{% endif %}", 'f{"a": 1}'),
    ("{{ c.arguments }}", '{"a": 1}'),
    ("{{ c.arguments | tojson }}", '{"a": 1}'),
    ("{{ c.arguments.a }}", "1"),
    ("{% for k, v in c.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "a=1"),
    ("{{ c.arguments if c.arguments is string else 'object' }}", "object"),
)


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'], ids=["object", "text"])
@pytest.mark.parametrize(("writer", "shown"), CALL_WRITERS)
def test_a_template_gets_the_arguments_of_calls_as_it_can_render_them(
    chatml: Pair, writer: str, shown: str, arguments: Any
) -> None:
    source = "{% for m in messages %}{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}"
    source += writer + "{% endif %}{% endfor %}"
    call = {"id": "sample001", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert chatml.template.text([TALK[1], message], template=source) == shown


def test_a_role_is_known_or_the_templates(chatml: Pair) -> None:
    """newcomer-3 D20: a template that shows any role would show a model one that it has never seen."""
    named = "{% if m.role == 'ipython' or m.role == \"critic\" %}!{% endif %}"
    source = f"{{% for m in messages %}}{{{{ m.role }}}}{named};{{% endfor %}}"
    for role in ("system", "user", "assistant", "tool", "function", "ipython", "critic"):
        assert chatml.template.text([{"role": role, "content": "a"}], template=source).startswith(role)
    for role in ("x", "", "User", "ipytho", "' or m.role == '"):
        with pytest.raises(RequestError, match="must be one of system, developer, user") as refusal:
            chatml.template.text([TALK[1], {"role": role, "content": "a"}], template=source)
        assert refusal.value.field == "messages[1].role"


def test_a_message_without_content_or_calls_has_an_empty_one(chatml: Pair) -> None:
    source = NO_CONTENT[0][0]
    for role in ("assistant", "user", "tool"):
        assert chatml.template.text([{"role": role, "content": None}], template=source) == f"<{role}>"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_demo_model_equals_transformers(count: int) -> None:
    reference = oracle(DEMO)
    talk = [
        {"role": "user", "content": "12+34"},
        {"role": "assistant", "content": "46"},
        {"role": "user", "content": "a"},
    ]
    actual = ChatTemplate(Tokenizer.load(DEMO)).render(talk[:count])
    assert actual == reference.apply_chat_template(
        talk[:count], add_generation_prompt=True, tokenize=True, return_dict=False
    )


def test_a_broken_template_names_its_checkpoint_and_the_remedy(tmp_path: Path) -> None:
    """serving-faults F10: the start stops with the file and --chat-template in the text."""
    tokenizer = Tokenizer.load(write_chatml(tmp_path / "broken", chat_template="{% if %}"))
    with pytest.raises(StartError, match=r"the chat template of .*/broken is not a valid Jinja .*--chat-template FILE"):
        ChatTemplate(tokenizer)
    with pytest.raises(StartError, match=r"^option chat_template: it is not a valid Jinja template"):
        ChatTemplate(tokenizer, "{% if %}")
    assert ChatTemplate(tokenizer, "{{ 1 }}").text([{"role": "user", "content": "a"}]) == "1"
    named = [{"name": "default", "template": "a"}, {"name": "rag", "template": "{{"}]
    with pytest.raises(StartError, match=r"the chat template 'rag' of .*/named"):
        ChatTemplate(Tokenizer.load(write_chatml(tmp_path / "named", chat_template=named)))
