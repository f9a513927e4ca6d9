"""/v1/chat/completions: OpenAI's shape, the extensions, defaults, what is ignored and what is refused."""

from typing import Any

import msgspec
import pytest

from tests.replies import good
from tests.server.byte_tokenizer import TOKENIZER, ids
from tests.server.scripted_llm import NOWHERE, says
from tests.server.site import Site, site

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def calling(calls: Any) -> dict[str, Any]:
    """A body whose last message has these tool calls."""
    return {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": calls}]}


def called(**function: Any) -> dict[str, Any]:
    """The same with one call of this function."""
    return calling([{"function": function}])


DEEP_CALL = called(name="f", arguments="[" * 100_000)


def ask(s: Site, messages: Any = None, **fields: Any) -> Any:
    return good(s.post(CHAT, {"messages": messages or MESSAGES} | fields))


def params(**fields: Any) -> Any:
    """The sampling parameters that the engine gets for a chat with these fields."""
    s = site(says("a"))
    ask(s, **fields)
    return s.llm.calls[0].params


def refusal(path: str = CHAT, **fields: Any) -> tuple[int, str | None, str]:
    answer = site().post(path, {"messages": MESSAGES} | fields)
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


def prompt(fields: dict[str, Any], messages: Any = None) -> str:
    s = site(says("a"))
    ask(s, messages, **fields)
    return TOKENIZER.decode(s.llm.calls[0].prompt, False)


def test_the_whole_shape() -> None:
    reply = ask(site(says("hello")), request_id="r")
    assert reply["id"] == "chatcmpl-r" and reply["object"] == "chat.completion" and reply["model"] == "tiny"
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello", "refusal": None, "reasoning": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "stop_detail": {"kind": "eos"},
            "token_ids": None,
        }
    ]
    assert reply["prompt_token_ids"] is None and reply["prompt_logprobs"] is None
    count = len(ids("user:hi;assistant:"))
    assert reply["usage"] == {
        "prompt_tokens": count,
        "completion_tokens": 6,
        "total_tokens": count + 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_rendered_by_the_template() -> None:
    assert prompt({}) == "user:hi;assistant:"
    assert prompt({"add_generation_prompt": False}) == "user:hi;"
    assert prompt({"chat_template_kwargs": {"name": "bot"}}) == "user:hi;bot:"
    final = [*MESSAGES, {"role": "assistant", "content": "I am"}]
    assert prompt({"continue_final_message": True}, final) == "user:hi;assistant:I am"


def test_a_template_in_a_request_runs_only_if_the_operator_says_so() -> None:
    s = site(says("a"), trust_request_chat_template=True)
    ask(s, chat_template="X{{ messages[0].content }}")
    assert TOKENIZER.decode(s.llm.calls[-1].prompt, False) == "Xhi"
    answer = site().post(CHAT, {"messages": MESSAGES, "chat_template": "{{ 'x' * 10**10 }}"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "chat_template"
    assert "--trust-request-chat-template" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("template", "param"), [("{% for", "chat_template"), ("{{ raise_exception('n') }}", "messages")]
)
def test_a_trusted_template_that_fails(template: str, param: str) -> None:
    s = site(trust_request_chat_template=True)
    answer = s.post(CHAT, {"messages": MESSAGES, "chat_template": template})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_the_operators_template() -> None:
    s = site(says("a"), chat_template="<{{ messages[0].content }}>")
    ask(s)
    assert TOKENIZER.decode(s.llm.calls[0].prompt) == "<hi>"


def test_content_parts_are_flattened() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompt({}, [{"role": "user", "content": parts}]) == "user:a\nb;assistant:"


def test_all_sampling_fields_arrive() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 7,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "max_tokens": 9,
        "min_tokens": 1,
        "stop": ["z"],
        "stop_token_ids": [9],
        "stop_token_sequences": [[9, 10]],
        "ignore_eos": True,
        "allowed_token_ids": [5, 6],
        "bad_words": ["q"],
        "bad_token_ids": [11],
        "bad_token_sequences": [[12]],
        "logprob_token_ids": [13],
        "prompt_logprobs": 2,
        "prompt_logprobs_start": 3,
        "logprobs_mode": "processed",
        "n": 2,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    s = site()
    ask(s, **fields, logit_bias={"5": 1.5}, vllm_xargs={"a": 1})
    received = s.llm.calls[0].params
    assert {name: getattr(received, name) for name in fields} == fields
    assert (
        received.logit_bias == {5: 1.5} and received.extra_args == {"a": 1} and s.llm.calls[0].options["text"] is True
    )


def test_scheduling_fields_arrive() -> None:
    s = site(says("a"))
    fields = {"cache_salt": "3", "priority": 2, "deadline_ms": 500, "queue_timeout_ms": 100}
    ask(s, **fields)
    assert {name: s.llm.calls[0].options[name] for name in fields} == fields


@pytest.mark.parametrize("requested", [True, False, None])
def test_special_tokens_are_added_on_request_only(requested: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []
    encode = TOKENIZER.encode

    def noted(text: str, add_special_tokens: bool) -> list[int]:
        requests.append(add_special_tokens)
        return encode(text, add_special_tokens)

    monkeypatch.setattr(TOKENIZER, "encode", noted)
    s = site()
    ask(s, add_special_tokens=requested, max_tokens=1)
    assert s.post("/tokenize", {"messages": MESSAGES, "add_special_tokens": requested}).status_code == 200
    assert requests == [bool(requested)] * 2


def test_max_completion_tokens_is_max_tokens() -> None:
    assert params(max_completion_tokens=3).max_tokens == 3
    assert params().max_tokens is None
    assert params(max_tokens=-1).max_tokens is None and params(max_completion_tokens=-1).max_tokens is None
    assert refusal(max_tokens=-2)[:2] == (400, "max_tokens")
    assert refusal(max_completion_tokens=0)[:2] == (400, "max_completion_tokens")
    assert refusal(max_tokens=0)[:2] == (400, "max_tokens")
    assert refusal(max_tokens=1, max_completion_tokens=2)[:2] == (400, "max_tokens")


def test_generation_config_defaults(tmp_path: Any) -> None:
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.5, "top_k": 7, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.2, "max_length": 9}'
    )
    s = site(says("a"), generation_config=str(tmp_path))
    ask(s)
    ask(s, temperature=0.0, top_k=0, top_p=None)
    first, second = (call.params for call in s.llm.calls)
    assert (first.temperature, first.top_k, first.top_p, first.min_p, first.repetition_penalty) == (
        0.5,
        7,
        0.8,
        0.1,
        1.2,
    )
    assert (second.temperature, second.top_k, second.top_p, second.min_p) == (0.0, 0, 0.8, 0.1)


def test_logprobs_carry_text_and_bytes() -> None:
    content = ask(site(says("aé")), logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "\ufffd", "\ufffd", "<eos>"]
    assert [entry["bytes"] for entry in content] == [[97], [0xC3], [0xA9], list(b"<eos>")]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert set(content[0]) == {"token", "logprob", "bytes", "top_logprobs"}
    assert set(content[0]["top_logprobs"][0]) == {"token", "logprob", "bytes"}


def test_logprobs_without_top() -> None:
    entry = ask(site(says("a")), logprobs=True)["choices"][0]["logprobs"]["content"][0]
    assert entry["top_logprobs"] == [] and entry["logprob"] < 0
    assert params(logprobs=False, top_logprobs=0).logprobs is None


def test_logprobs_floor() -> None:
    entry = ask(site(lambda p, i: [NOWHERE, 0]), logprobs=True)["choices"][0]["logprobs"]["content"][0]
    assert entry["logprob"] == -9999.0


def test_top_logprobs_refusals() -> None:
    assert refusal(top_logprobs=2)[:2] == (400, "top_logprobs")
    assert refusal(logprobs=True, top_logprobs=21)[:2] == (400, "top_logprobs")


def test_tokens_as_token_ids() -> None:
    fields = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    entry = ask(site(says("a")), **fields)["choices"][0]["logprobs"]["content"][0]
    assert entry["token"] == f"token_id:{ids('a')[0]}" and entry["top_logprobs"][0]["token"].startswith("token_id:")


def test_return_token_ids() -> None:
    reply = ask(site(says("ab")), return_token_ids=True)
    assert reply["prompt_token_ids"] == ids("user:hi;assistant:")
    assert reply["choices"][0]["token_ids"] == [*ids("ab"), 0]
    assert "weight_versions" not in ask(site(says("ab")))["choices"][0]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_weight_versions_are_returned_without_token_ids_on_request(path: str) -> None:
    sent = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    versions = [{"version": "0", "start": 0, "end": 3}]
    [choice] = site(says("ab")).post(path, sent | {"return_weight_versions": True}).json()["choices"]
    assert choice["weight_versions"] == versions and not choice.get("token_ids")
    events = site(says("ab")).events(path, sent | {"return_weight_versions": True})
    assert [c["weight_versions"] for event in events for c in event["choices"] if "weight_versions" in c] == [versions]
    [plain] = site(says("ab")).post(path, sent | {"return_weight_versions": False}).json()["choices"]
    assert "weight_versions" not in plain


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_token_ids_are_returned_with_their_weight_versions(path: str) -> None:
    sent = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    spans = [{"version": "0", "start": 0, "end": 3}]
    reply = site(says("ab")).post(path, sent | {"return_token_ids": True}).json()
    [choice] = reply["choices"]
    assert len(choice["token_ids"]) == 3 and choice["weight_versions"] == spans
    assert reply["weight_version"] == "0"
    assert "weight_version" not in site(says("ab")).post(path, sent).json()
    events = site(says("ab")).events(path, sent | {"return_token_ids": True})
    versions = [c["weight_versions"] for event in events for c in event["choices"] if "weight_versions" in c]
    assert versions == [spans]


@pytest.mark.parametrize(("body", "width"), [(1, 1), (True, 1), (0, 0)])
def test_prompt_logprobs(body: Any, width: int) -> None:
    scores = ask(site(says("a")), prompt_logprobs=body)["prompt_logprobs"]
    text = ids("user:hi;assistant:")
    assert scores[0] is None and len(scores) == len(text)
    for token, entry in zip(text[1:], scores[1:], strict=True):
        assert next(iter(entry)) == str(token) and entry[str(token)]["decoded_token"] == TOKENIZER.token(token)
        assert all(value["rank"] >= 1 for value in entry.values()) and len(entry) <= width + 1
    assert ask(site(says("a")), prompt_logprobs=False)["prompt_logprobs"] is None


def test_prompt_logprobs_in_a_stream() -> None:
    s = site(says("ab"))
    events = s.events(CHAT, {"messages": MESSAGES, "prompt_logprobs": 1})
    full = ask(s, prompt_logprobs=1)["prompt_logprobs"]
    assert [event["prompt_logprobs"] for event in events if "prompt_logprobs" in event] == [full]


def test_stop_strings_are_cut() -> None:
    choice = ask(site(says("abcd")), stop="bc")["choices"][0]
    assert choice["message"]["content"] == "a" and choice["stop_reason"] == "bc"
    assert (
        ask(site(says("abcd")), stop=["c"], include_stop_str_in_output=True)["choices"][0]["message"]["content"]
        == "abc"
    )


def test_choices() -> None:
    reply = ask(site(), n=3, max_tokens=4)
    assert [c["index"] for c in reply["choices"]] == [0, 1, 2]
    assert len({c["message"]["content"] for c in reply["choices"]}) == 3


def test_model_may_be_absent_or_null() -> None:
    assert ask(site(says("a")))["model"] == ask(site(says("a")), model=None)["model"] == "tiny"


def test_prompt_as_tokens() -> None:
    s = site(says("ab"))
    answer = s.post(
        "/v1/chat/completions/tokens", {"messages": MESSAGES, "tokens": [5, 6, 8], "return_token_ids": True}
    )
    assert answer.json()["prompt_token_ids"] == [5, 6, 8] == s.llm.calls[0].prompt
    assert answer.json()["choices"][0]["message"]["content"] == "ab"
    assert refusal("/v1/chat/completions/tokens")[:2] == (400, "tokens")
    assert refusal("/v1/chat/completions/tokens", tokens=[])[:2] == (400, "tokens")
    assert refusal("/v1/chat/completions/tokens", tokens=[9999])[:2] == (400, "tokens")
    assert refusal(tokens=[5])[:2] == (400, "tokens")


def test_msgpack_both_ways() -> None:
    raw = msgspec.msgpack.encode({"messages": MESSAGES, "max_tokens": 2})
    kind = "application/msgpack"
    answer = site().post(CHAT, content=raw, headers={"Content-Type": kind, "Accept": kind})
    assert msgspec.msgpack.decode(answer.content)["object"] == "chat.completion"


def test_large_conversations_are_rendered_in_a_thread() -> None:
    s = site(says("a"), max_model_len=50_000, block_size=64)
    assert ask(s, [{"role": "user", "content": "x" * 40_000}])["usage"]["prompt_tokens"] > 40_000


# the fingerprint


@pytest.mark.parametrize("route", [CHAT, "/v1/completions"])
def test_the_fingerprint_changes_with_the_weights_and_options(route: str) -> None:
    requested = {"messages": MESSAGES} if route == CHAT else {"prompt": "hi"}
    s = site(says("ab"))
    first = s.post(route, requested).json()["system_fingerprint"]
    assert first.startswith("tokserve-") and s.post(route, requested).json()["system_fingerprint"] == first
    choices = [event for event in s.events(route, requested | {"n": 2}) if event["choices"][0]["finish_reason"]]
    assert [event["system_fingerprint"] for event in choices] == [first] * 2
    s.llm.status = msgspec.structs.replace(s.llm.status, epoch=1)
    second = s.post(route, requested).json()["system_fingerprint"]
    other = site(says("ab"), dtype="float32").post(route, requested).json()["system_fingerprint"]
    pairs = site(says("ab"))
    pairs.llm.ready.facts["arithmetic"] = "pairs"
    third = pairs.post(route, requested).json()["system_fingerprint"]
    assert len({first, second, other, third}) == 4
    versions = s.post("/inference/v1/generate", {"token_ids": [5]}).json()
    assert s.post(CHAT + "/derender", {"generate_response": versions}).json()["system_fingerprint"] is None


# what only some templates read

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CALLED = [
    *MESSAGES,
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c", "content": "5"},
]
THINKER = "{{ enable_thinking }} {{ reasoning_effort }}"


def shown(template: str, messages: Any = None, **fields: Any) -> str:
    s = site(says("a"), chat_template=template, strict=True)
    ask(s, messages, **fields)
    return TOKENIZER.decode(s.llm.calls[0].prompt, False)


def test_tools_are_shown_to_the_model_if_no_calls_are_wanted() -> None:
    show = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ messages|length }}"
    assert shown(show, tools=TOOLS, tool_choice="none") == "f 1"
    assert shown(show, tools=[]) == shown(show, tools=None, tool_choice="auto") == "1"
    s = site(chat_template=show)
    tokenized = s.post("/tokenize", {"messages": MESSAGES, "tools": TOOLS}).json()["tokens"]
    assert TOKENIZER.decode(tokenized, False) == "f 1"


def test_the_history_may_have_calls_and_their_results() -> None:
    assert prompt({}, CALLED) == "user:hi;assistant:;tool:5;assistant:"
    show = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}={% endfor %}{{ m.content }}"
    assert shown(show + "{% endfor %}", CALLED) == "hif=5"


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        (TOOLS, "tools"),  # the template has no place for them
        ([{}], "tools[0].type"),
        ([*TOOLS, {"type": "function"}], "tools[1].function.name"),
        ([5], "tools[0]"),
        ([{"type": "function", "function": {"name": 5}}], "tools[0].function.name"),
        ("f", "tools"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], "tools[0].function.parameters"),
        ([*TOOLS, *TOOLS], "tools[1].function.name"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
            "tools[0].function.parameters.type",
        ),
    ],
)
def test_tools_that_cannot_be_shown(tools: Any, param: str) -> None:
    assert refusal(tools=tools)[:2] == (400, param)
    assert refusal("/tokenize", tools=tools)[:2] == (400, param)


def test_reasoning_effort_is_the_templates() -> None:
    assert shown(THINKER, reasoning_effort="none") == "False none"
    assert shown(THINKER, reasoning_effort="low") == "True low"
    sent = {"enable_thinking": 7, "reasoning_effort": 8}
    assert shown(THINKER, reasoning_effort="low", chat_template_kwargs=sent) == "7 8"
    assert shown(THINKER) == " "


def test_reasoning_effort_that_nothing_reads() -> None:
    for path, prompt_ids in ((CHAT, {}), (CHAT + "/tokens", {"tokens": [5]})):
        body = {"messages": MESSAGES, "reasoning_effort": "low"} | prompt_ids
        assert site(says("a")).post(path, body).headers["x-ignored-fields"] == "reasoning_effort"
        refused = site(strict=True).post(path, body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "reasoning_effort"
    assert refusal(reasoning_effort="a bit")[:2] == (400, "reasoning_effort")


def test_documents_that_the_template_does_not_read() -> None:
    documents = [{"title": "a", "text": "b"}]
    body = {"messages": MESSAGES, "documents": documents}
    assert site(says("a")).post(CHAT, body).headers["x-ignored-fields"] == "documents"
    refused = site(strict=True).post(CHAT, body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "documents"
    assert shown("{% for d in documents or [] %}{{ d.title }}{% endfor %}", documents=documents) == "a"
    assert "x-ignored-fields" not in site(says("a")).post(CHAT, body | {"documents": []}).headers


# what is ignored


def test_unknown_fields_are_ignored_and_named() -> None:
    s = site(says("a"))
    answer = s.post(CHAT, {"messages": MESSAGES, "separate_reasoning": True, "x y": 1, "user": "me", "store": False})
    assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == "separate_reasoning, user"
    assert "x-ignored-fields" not in s.post(CHAT, {"messages": MESSAGES}).headers
    streamed = s.post(CHAT, {"messages": MESSAGES, "separate_reasoning": True, "stream": True})
    assert streamed.headers["x-ignored-fields"] == "separate_reasoning"
    options = {"include_usage": True, "include_obfuscation": False, "usage": True, "x y": 1}
    streamed = s.post(CHAT, {"messages": MESSAGES, "stream": True, "stream_options": options})
    assert streamed.headers["x-ignored-fields"] == "stream_options.usage"


def test_strict_refuses_unknown_fields() -> None:
    answer = site(strict=True).post(CHAT, {"messages": MESSAGES, "top_pp": 1})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "top_pp"
    assert "did you mean 'top_p'" in answer.json()["error"]["message"]
    body = {"messages": MESSAGES, "stream": True, "stream_options": {"usage": True}}
    assert site(strict=True).post(CHAT, body).json()["error"]["param"] == "stream_options.usage"


@pytest.mark.parametrize(
    "field",
    [
        {"functions": [{}]},
        {"audio": {}},
        {"modalities": ["audio"]},
        {"web_search_options": {}},
        {"guided_decoding": {"regex": "a"}},
        {"guided_json": {}},
        {"best_of": 3, "n": 2},
        {"suffix": "x"},
        {"echo": True},
        {"truncate_prompt_tokens": 4},
        {"logits_processors": ["x"]},
        {"kv_transfer_params": {}},
    ],
)
def test_fields_that_would_change_the_answer_are_refused(field: dict[str, Any]) -> None:
    status, param, message = refusal(**field)
    assert (status, param) == (400, next(iter(field))) and "not supported" in message


@pytest.mark.parametrize(
    "field",
    [
        {"tools": []},
        {"tools": None},
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
        {"tool_choice": None},
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"modalities": ["text"]},
        {"best_of": 1},
        {"best_of": 2, "n": 2},
        {"echo": False},
        {"use_beam_search": False},
        {"length_penalty": 1.0},
        {"parallel_tool_calls": False},
        {"stop": None, "logit_bias": None, "n": None, "stream": None, "stream_options": None, "seed": None},
        {"metadata": {}},
        {"service_tier": "auto"},
        {"store": False},
        {"verbosity": "medium"},
        {"reasoning_effort": None},
        {"reasoning_effort": "none"},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"truncate_prompt_tokens": -1},
    ],
)
def test_fields_that_ask_for_nothing_are_taken(field: dict[str, Any]) -> None:
    answer = site(says("a"), strict=True).post(CHAT, {"messages": MESSAGES} | field)
    assert answer.status_code == 200 and "x-ignored-fields" not in answer.headers, answer.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [*MESSAGES, {"role": "user", "content": [{"type": "text"}]}]}, "messages[1].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        ({"messages": MESSAGES, "temperature": "hot"}, "temperature"),
        ({"messages": MESSAGES, "temperature": True}, "temperature"),
        ({"messages": MESSAGES, "temperature": -1}, "temperature"),
        ({"messages": MESSAGES, "stop": ["a", 5]}, "stop[1]"),
        ({"messages": MESSAGES, "stop": 5}, "stop"),
        ({"messages": MESSAGES, "stop_token_sequences": [[5], [6, "x"]]}, "stop_token_sequences[1][1]"),
        ({"messages": MESSAGES, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"messages": MESSAGES, "logit_bias": {"x": 1}}, "logit_bias"),
        ({"messages": MESSAGES, "logit_bias": {"5": "x"}}, "logit_bias.5"),
        ({"messages": MESSAGES, "logit_bias": {"9999": 1}}, "logit_bias.9999"),
        ({"messages": MESSAGES, "prompt_logprobs": 1.5}, "prompt_logprobs"),
        ({"messages": MESSAGES, "cache_salt": ""}, "cache_salt"),
        ({"messages": MESSAGES, "priority": 2**63}, "priority"),
        ({"messages": MESSAGES, "deadline_ms": 10**20}, "deadline_ms"),
        ({"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": MESSAGES, "chat_template": "no_such_name"}, "chat_template"),
        ({"messages": MESSAGES, "group_id": ""}, "group_id"),
        ({"messages": MESSAGES, "group_id": "g" * 257}, "group_id"),
        ({"messages": MESSAGES, "vllm_xargs": {"a": 10**30}}, "vllm_xargs"),
        (DEEP_CALL, "messages"),
        (calling({}), "messages[1].tool_calls"),
        (calling(5), "messages[1].tool_calls"),
        (calling([None]), "messages[1].tool_calls[0]"),
        (calling([{}]), "messages[1].tool_calls[0].function"),
        (calling([{"type": "custom", "custom": {}}]), "messages[1].tool_calls[0].type"),
        (called(), "messages[1].tool_calls[0].function.name"),
        (called(name=5), "messages[1].tool_calls[0].function.name"),
        (called(name="f", arguments=5), "messages[1].tool_calls[0].function.arguments"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_name_the_field(body: dict[str, Any], param: str, stream: bool) -> None:
    answer = site().post(CHAT, body | {"stream": stream})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text
