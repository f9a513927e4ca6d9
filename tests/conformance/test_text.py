"""Chat, completions, tokenize and detokenize: OpenAI's fields, the extensions, and what other servers' fields do."""

from typing import Any

import pytest

from tests.conformance.api import (
    CHAT,
    CHAT_TOKENS,
    COMPLETIONS,
    DETOKENIZE,
    GENERATE,
    MESSAGES,
    PROMPT,
    TOKENIZE,
    Api,
)

ASK: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0}
COMPLETE: dict[str, Any] = {"prompt": "12+34", "max_tokens": 8, "temperature": 0}
BODIES = {CHAT: ASK, COMPLETIONS: COMPLETE, CHAT_TOKENS: {"tokens": PROMPT, "max_tokens": 8, "temperature": 0}}


@pytest.fixture(params=BODIES)
def route(request: Any, text: Api) -> str:
    """Every route that generates text."""
    path: str = request.param
    return path


REFUSED = [
    ("model", 5),
    ("stream", "yes"),
    ("stream", 1),
    ("stream_options", 5),
    ("n", 0),
    ("n", True),
    ("n", 1.0),
    ("n", 10**9),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", -0.1),
    ("temperature", -1),
    ("top_p", 0),
    ("top_p", 2),
    ("top_k", 1.5),
    ("top_k", -2),
    ("min_p", 2),
    ("seed", 2**63),
    ("seed", 1.5),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("max_tokens", -2),
    ("max_tokens", 10**12),
    ("max_tokens", 1.5),
    ("min_tokens", -1),
    ("min_tokens", 9),
    ("stop", 5),
    ("stop", ""),
    ("stop_token_ids", 5),
    ("ignore_eos", 1),
    ("logit_bias", []),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("prompt_logprobs", 1.5),
    ("prompt_logprobs", -2),
    ("allowed_token_ids", []),
    ("bad_words", "x"),
    ("logprob_token_ids", []),
    ("logprobs_mode", "x"),
    ("return_token_ids", "yes"),
    ("cache_salt", ""),
    ("cache_salt", "s" * 1025),
    ("priority", 1.5),
    ("priority", 2**63),
    ("request_id", ""),
    ("request_id", "x" * 257),
    ("deadline_ms", 0),
    ("queue_timeout_ms", -1),
    ("group_id", ""),
    ("group_id", "g" * 257),
    ("vllm_xargs", 5),
    ("vllm_xargs", {"a": 10**30}),
]


@pytest.mark.some(60)
@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda value: str(value)[:30])
def test_a_bad_field_is_refused_by_name_also_before_a_stream(text: Api, route: str, name: str, value: Any) -> None:
    text.refused(text.post(route, BODIES[route] | {name: value}), 400, name)
    if name != "stream":
        text.refused(text.post(route, BODIES[route] | {"stream": True, name: value}), 400, name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("best_of", 2),
        ("suffix", "x"),
        ("guided_json", {}),
        ("guided_regex", "(a+)+$" * 1000),
        ("guided_grammar", "x"),
        ("regex", "a"),
        ("ebnf", "x"),
        ("json_schema", "{}"),
        ("truncate_prompt_tokens", 5),
        ("kv_transfer_params", {}),
        ("prompt_embeds", "x"),
    ],
)
def test_what_would_change_the_answer_is_refused_not_ignored(text: Api, route: str, name: str, value: Any) -> None:
    error = text.refused(text.post(route, BODIES[route] | {name: value}), 400, name)
    assert error["code"] == "unsupported"
    assert text.post(route, BODIES[route] | {name: None}).status_code == 200


@pytest.mark.parametrize("form", [{"choice": ["yes", "no"]}, {"regex": "yes|no"}, {"json": {"enum": ["yes"]}}], ids=str)
def test_structured_outputs_give_the_text_its_form(text: Api, route: str, form: dict[str, Any]) -> None:
    body = BODIES[route] | {"structured_outputs": form}
    [choice] = text.ok(route, body)["choices"]
    assert (choice["message"]["content"] if "message" in choice else choice["text"]) in ("yes", "no", '"yes"')
    assert choice["finish_reason"] == "stop"
    for wrong in ({}, form | {"json_object": True}):
        text.refused(text.post(route, body | {"structured_outputs": wrong}), 400, "structured_outputs")
    text.refused(text.post(route, body | {"structured_outputs": {"regex": "("}}), 400, "structured_outputs.regex")


def test_response_format_gives_the_text_its_form(text: Api, route: str) -> None:
    body = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes"]}}}
    [choice] = text.ok(route, BODIES[route] | {"response_format": body})["choices"]
    assert (choice["message"]["content"] if "message" in choice else choice["text"]) == '"yes"'
    text.refused(text.post(route, BODIES[route] | {"response_format": {"type": "xml"}}), 400, "response_format.type")


def test_unknown_fields_are_ignored_and_named(text: Api, route: str) -> None:
    extra = {"extra_key": False, "zzz": {"a": [1]}, "bad\nname": 1, "": 2, "\u00e9": 3}
    answer = text.post(route, BODIES[route] | extra)
    if text.config["server"]["strict"]:
        text.refused(answer, 400, "extra_key")
    else:
        assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == "extra_key, zzz"
        assert "x-ignored-fields" not in text.post(route, BODIES[route]).headers


def test_null_is_the_same_as_absent(text: Api, route: str) -> None:
    names = [name for name, _ in REFUSED if name not in ("max_tokens", "temperature")]
    expected = text.ok(route, BODIES[route])["choices"]
    assert text.ok(route, BODIES[route] | dict.fromkeys(names))["choices"] == expected


def test_the_request_id_is_the_clients(text: Api, route: str) -> None:
    prefix = "cmpl-" if route == COMPLETIONS else "chatcmpl-"
    answer = text.post(route, BODIES[route], headers={"X-Request-Id": "t-1"})
    assert answer.headers["x-request-id"] == "t-1" and answer.json()["id"] == prefix + "t-1"
    answer = text.post(route, BODIES[route] | {"request_id": "a"}, headers={"X-Request-Id": "b"})
    text.refused(answer, 400, "request_id")
    assert answer.headers["x-request-id"] == "b"


def test_an_unknown_model_is_404(text: Api) -> None:
    for route, body in (*BODIES.items(), (TOKENIZE, {"prompt": "x"}), (DETOKENIZE, {"tokens": [5]})):
        text.refused(text.post(route, body | {"model": "gpt-9"}), 404, "model", "gpt-9")


# chat


def test_the_shape_of_a_chat(text: Api) -> None:
    reply = text.ok(CHAT, ASK)
    assert set(reply) >= {"id", "object", "created", "model", "choices", "usage", "system_fingerprint"}
    assert reply["prompt_token_ids"] is None and reply["prompt_logprobs"] is None  # vLLM's clients read them by name
    assert reply["object"] == "chat.completion" and reply["model"] == text.model
    [choice] = reply["choices"]
    assert {"index", "message", "logprobs", "finish_reason", "stop_reason"} <= set(choice)
    assert choice["token_ids"] is None and choice["message"]["reasoning"] is None
    assert choice["message"]["role"] == "assistant" and isinstance(choice["message"]["content"], str)


def test_a_chat_is_template_generate_decode(text: Api) -> None:
    prompt = text.ok(TOKENIZE, {"messages": MESSAGES})["tokens"]
    params = {"temperature": 0, "max_tokens": 8}
    chat = text.ok(CHAT, ASK | {"return_token_ids": True})
    [choice] = text.generate(params, token_ids=prompt, output_mode="text")["choices"]
    assert chat["prompt_token_ids"] == prompt and chat["choices"][0]["token_ids"] == choice["token_ids"]
    assert chat["choices"][0]["message"]["content"] == choice["text"]


def test_chat_with_tokens_replaces_the_rendered_prompt(text: Api) -> None:
    prompt = text.ok(TOKENIZE, {"messages": MESSAGES})["tokens"]
    body = {"tokens": prompt, "messages": [{"role": "user", "content": "other"}], "max_tokens": 8, "temperature": 0}
    expected = text.ok(CHAT, ASK)["choices"]
    assert text.ok(CHAT_TOKENS, body)["choices"] == expected
    text.refused(text.post(CHAT_TOKENS, ASK), 400, "tokens")
    text.refused(text.post(CHAT, ASK | {"tokens": prompt}), 400, "tokens")


def test_content_as_a_list_of_parts_is_flattened(text: Api) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
    assert text.ok(TOKENIZE, {"messages": parts}) == text.ok(TOKENIZE, {"messages": MESSAGES})


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("x", "messages"),
        ({}, "messages"),
        ([5], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([*MESSAGES, {"role": "user", "content": [5]}], "messages[1].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        (MESSAGES * 2000, "messages"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}], "messages"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_message_is_refused_with_its_place(text: Api, messages: Any, param: str) -> None:
    text.refused(text.post(CHAT, {"messages": messages, "max_tokens": 1}), 400, param)


def test_max_completion_tokens_is_max_tokens(text: Api) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "ignore_eos": True}
    for limit in ({"max_completion_tokens": 3}, {"max_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}):
        assert text.ok(CHAT, body | limit)["usage"]["completion_tokens"] == 3
    text.refused(text.post(CHAT, body | {"max_tokens": 3, "max_completion_tokens": 4}), 400, "max_tokens")
    text.refused(text.post(CHAT, body | {"max_completion_tokens": 0}), 400, "max_completion_tokens")


def test_chat_logprobs(text: Api) -> None:
    body = ASK | {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    [choice] = text.ok(CHAT, body)["choices"]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    for entry in choice["logprobs"]["content"]:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"} and len(entry["top_logprobs"]) == 2
    too_many = text.vocab_size + 1  # above --max-logprobs, whatever it is
    for fields in ({}, {"logprobs": False}, {"logprobs": True, "top_logprobs": too_many}):
        text.refused(text.post(CHAT, ASK | {"top_logprobs": 2} | fields), 400, "top_logprobs")
    text.refused(text.post(CHAT, ASK | {"logprobs": True, "top_logprobs": -2}), 400, "top_logprobs")
    text.refused(text.post(CHAT, ASK | {"logprobs": 1}), 400, "logprobs")


def test_continue_final_message_and_add_generation_prompt(text: Api) -> None:
    final = [*MESSAGES, {"role": "assistant", "content": "8"}]
    rendered = text.ok(TOKENIZE, {"messages": final, "add_generation_prompt": False})["tokens"]
    part = text.ok(TOKENIZE, {"messages": final, "continue_final_message": True})["tokens"]
    assert part == rendered[: len(part)] and len(part) < len(rendered)
    body = ASK | {"messages": final, "continue_final_message": True, "add_generation_prompt": True}
    text.refused(text.post(CHAT, body), 400, "continue_final_message")


def test_ids_of_a_streamed_chat_are_in_its_first_chunk_and_its_choices(text: Api) -> None:
    full = text.ok(CHAT, ASK | {"return_token_ids": True})
    first, *rest = text.events(CHAT, ASK | {"return_token_ids": True})
    assert first["prompt_token_ids"] == full["prompt_token_ids"]
    assert not [event for event in rest if "prompt_token_ids" in event]
    ids = [token for event in rest for delta in event["choices"] for token in delta.get("token_ids", [])]
    assert ids == full["choices"][0]["token_ids"]


# completions


@pytest.mark.parametrize("prompt", ["12+34", ["12+34"], [5, 6, 7], [[5, 6, 7]]], ids=str)
def test_a_prompt_in_each_of_its_forms(text: Api, prompt: Any) -> None:
    reply = text.ok(COMPLETIONS, COMPLETE | {"prompt": prompt})
    assert reply["object"] == "text_completion" and len(reply["choices"]) == 1
    assert {"index", "text", "logprobs", "finish_reason"} <= set(reply["choices"][0])


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt[0]"),
        (["x", 5], "prompt[1]"),
        (5, "prompt"),
        ([5, "x"], "prompt[1]"),
        ([[]], "prompt[0]"),
        ([[5], [True]], "prompt[1][0]"),
        ([5.0], "prompt[0]"),
        ({}, "prompt"),
        ([[5], [10**7]], "prompt[1]"),
        ([-1], "prompt"),
        (["x"] * 5000, "prompt"),
        ([5] * 10**6, "prompt"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_prompt_is_refused_with_its_place(text: Api, prompt: Any, param: str) -> None:
    text.refused(text.post(COMPLETIONS, COMPLETE | {"prompt": prompt}), 400, param)


def test_choices_of_several_prompts_are_prompt_major(text: Api) -> None:
    body = {"prompt": [[5, 6], [7, 8, 9]], "n": 2, "max_tokens": 2, "seed": 1, "return_token_ids": True}
    choices = text.ok(COMPLETIONS, body)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in choices] == [[5, 6]] * 2 + [[7, 8, 9]] * 2
    alone = text.ok(COMPLETIONS, body | {"prompt": [7, 8, 9]})["choices"]
    assert [choice["token_ids"] for choice in choices[2:]] == [choice["token_ids"] for choice in alone]


def test_logprobs_of_completions_may_be_bool_or_int(text: Api) -> None:
    one = text.ok(COMPLETIONS, COMPLETE | {"logprobs": 1})["choices"][0]["logprobs"]
    assert set(one) == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
    assert text.ok(COMPLETIONS, COMPLETE | {"logprobs": True})["choices"][0]["logprobs"] == one
    assert text.ok(COMPLETIONS, COMPLETE | {"logprobs": False})["choices"][0]["logprobs"] is None


def test_echo_puts_the_prompt_first_and_scores_it(text: Api) -> None:
    body = COMPLETE | {"echo": True, "logprobs": 1, "max_tokens": 1}
    ids = text.ok(TOKENIZE, {"prompt": COMPLETE["prompt"]})["tokens"]
    [choice] = text.ok(COMPLETIONS, body)["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith(COMPLETE["prompt"]) and logprobs["token_logprobs"][0] is None
    assert len(logprobs["tokens"]) == len(ids) + 1 and "".join(logprobs["tokens"][: len(ids)]) == COMPLETE["prompt"]
    scored = text.generate({"prompt_logprobs": 0}, token_ids=ids)["prompt_logprobs"]
    expected = [scored[i][str(token)]["logprob"] for i, token in enumerate(ids) if i]
    assert logprobs["token_logprobs"][1 : len(ids)] == expected
    [only] = text.ok(COMPLETIONS, body | {"max_tokens": 0})["choices"]
    assert only["text"] == COMPLETE["prompt"] and len(only["logprobs"]["tokens"]) == len(ids)


def test_tokens_as_ids(text: Api) -> None:
    body = COMPLETE | {"logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True}
    [choice] = text.ok(COMPLETIONS, body)["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]


def test_extensions_mean_what_they_mean_on_the_token_route(text: Api) -> None:
    params = {
        "temperature": 1.0,
        "top_k": 20,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "min_tokens": 3,
        "seed": 4,
        "max_tokens": 12,
        "stop_token_ids": [44],
        "allowed_token_ids": list(range(20, 60)),
        "ignore_eos": True,
        "logit_bias": {"30": 1.5},
    }
    [tokens] = text.ok(GENERATE, {"token_ids": PROMPT, "sampling_params": params | {"top_p": 1.0}})["choices"]
    body = {"prompt": PROMPT, "return_token_ids": True, "cache_salt": "x", "top_p": 1.0} | params
    [choice] = text.ok(COMPLETIONS, body)["choices"]
    assert choice["token_ids"] == tokens["token_ids"]
    for name in ("finish_reason", "stop_reason", "stop_detail"):
        assert choice[name] == tokens[name]


# tokenize


@pytest.mark.parametrize("string", ["What is 47 + 38?", "\u00e9\u4e16\U0001f600\u0000", "", " \n\t ", "<|im_end|>"])
def test_detokenize_undoes_tokenize(text: Api, string: str) -> None:
    reply = text.ok(TOKENIZE, {"prompt": string, "add_special_tokens": False})
    assert reply["count"] == len(reply["tokens"]) and reply["max_model_len"] == text.max_model_len
    assert text.ok(DETOKENIZE, {"tokens": reply["tokens"]}) == {"prompt": string}


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (TOKENIZE, {}, "prompt"),
        (TOKENIZE, {"prompt": 5}, "prompt"),
        (TOKENIZE, {"messages": []}, "messages"),
        (TOKENIZE, {"prompt": "x", "messages": MESSAGES}, "prompt"),
        (DETOKENIZE, {}, "tokens"),
        (DETOKENIZE, {"tokens": [-1]}, "tokens[0]"),
        (DETOKENIZE, {"tokens": [5, 10**30]}, "tokens[1]"),
        (DETOKENIZE, {"tokens": [1.0]}, "tokens[0]"),
        (DETOKENIZE, {"tokens": [True]}, "tokens[0]"),
        (DETOKENIZE, {"tokens": "x"}, "tokens"),
    ],
    ids=str,
)
def test_tokenizing_refuses_by_name(text: Api, route: str, body: Any, param: str) -> None:
    text.refused(text.post(route, body), 400, param)
