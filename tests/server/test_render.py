"""Render, generate, derender against the one-step text routes; what is refused; the tokenizer's description."""

import threading
from typing import Any

import msgspec
import pytest

from tests.replies import good
from tests.server.byte_tokenizer import EOS, TOKENIZER, VOCAB, ids
from tests.server.scripted_llm import says
from tests.server.site import Site, site
from tests.tiers import paired
from tokserve.protocol.params import MAX_CHOICES
from tokserve.server.http import body as bodies

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
MESSAGES = [{"role": "user", "content": "hi"}]
ODD = "odd \u00fc\u20ac\U0001f600 text"
FORMATS = ["objects", "arrays", "base64"]


def steady(reply: Any) -> Any:
    """What must be equal: all but ids and times, and what only the server that generates knows of itself."""
    return {name: value for name, value in reply.items() if name not in ("id", "created", "system_fingerprint")}


def chat_by_hand(s: Site, body: dict[str, Any], form: str = "objects", **changes: Any) -> Any:
    rendered = good(s.post(CHAT + "/render", body)) | {"logprobs_format": form}
    generated = good(s.post(GENERATE, rendered | changes))
    length = len(rendered["token_ids"])
    return good(
        s.post(CHAT + "/derender", {"generate_response": generated, "chat_request": body, "prompt_tokens": length})
    )


def completions_by_hand(s: Site, body: dict[str, Any], form: str = "objects") -> Any:
    generated = []
    for one in good(s.post(COMPLETIONS + "/render", body)):
        generated.append(good(s.post(GENERATE, one | {"logprobs_format": form})))
    return good(s.post(COMPLETIONS + "/derender", {"generate_responses": generated, "completion_request": body}))


CHATS: list[dict[str, Any]] = [
    {},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 3},
    {"stop": ["xt"]},
    {"stop": "zz"},
    {"max_tokens": 3},
    {"stop": [" t", "d"], "logprobs": True, "top_logprobs": 1},
    {"stop": "e", "include_stop_str_in_output": True},
    {"stop": "d", "min_tokens": 3},
    {"n": 2, "seed": 7, "logprobs": True},
    {"n": 2, "seed": 7, "stop": "e"},
    {"include_stop_str_in_output": True, "skip_special_tokens": False},
    {"return_token_ids": True},
    {"prompt_logprobs": 2},
    {"prompt_logprobs": 0},
    {"prompt_logprobs": 1, "prompt_logprobs_start": 5},
    {"logprob_token_ids": [9, 5, 100]},
    {"seed": 1, "ignore_eos": True, "max_tokens": 4},
    {"return_tokens_as_token_ids": True, "logprobs": True, "top_logprobs": 2},
    {"max_completion_tokens": 6},
    {"repetition_detection": {"max_pattern_size": 2, "min_count": 9}},
]


@pytest.mark.parametrize(("fields", "form"), paired(CHATS, FORMATS))
def test_render_generate_and_derender_equal_chat(fields: dict[str, Any], form: str) -> None:
    s = site(says(ODD))
    body = {"messages": MESSAGES} | fields
    assert steady(chat_by_hand(s, body, form)) == steady(good(s.post(CHAT, body)))


TEXTS: list[dict[str, Any]] = [
    {"prompt": "hi"},
    {"prompt": ["a", "bc"], "logprobs": 2, "n": 2, "seed": 3},
    {"prompt": ids("hello")},
    {"prompt": [ids("ab"), ids("c")], "echo": True},
    {"prompt": "hello", "echo": True, "logprobs": 2},
    {"prompt": "hello", "echo": True, "logprobs": 1, "max_tokens": 0},
    {"prompt": ["a", "b"], "stop": "t"},
    {"prompt": "hello", "prompt_logprobs": 1, "return_token_ids": True, "max_tokens": None},
    {"prompt": "hello", "prompt_logprobs": 0, "max_tokens": 0},
    {"prompt": "h", "echo": True, "logprobs": 0},
    {"prompt": "hi", "logprob_token_ids": [9]},
    {"prompt": "hello", "max_completion_tokens": 0, "echo": True},
]


@pytest.mark.parametrize(("body", "form"), paired(TEXTS, FORMATS))
def test_render_generate_and_derender_equal_completions(body: dict[str, Any], form: str) -> None:
    s = site(says(ODD))
    assert steady(completions_by_hand(s, body, form)) == steady(good(s.post(COMPLETIONS, body)))


@pytest.mark.parametrize("fields", [{"stop": "xt"}, {"stop": ["e", "ex"]}, {"stop": "\u20ac"}], ids=str)
def test_stop_strings_that_the_generator_did_not_know_are_cut_here(fields: dict[str, Any]) -> None:
    s = site(says(ODD))
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1} | fields
    sampling = good(s.post(CHAT + "/render", body))["sampling_params"]
    del sampling["stop"]
    assert steady(chat_by_hand(s, body, sampling_params=sampling)) == steady(good(s.post(CHAT, body)))


def test_render_generate_and_derender_in_msgpack() -> None:
    s, kind = site(says(ODD)), "application/msgpack"
    request = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}

    def post(path: str, body: Any) -> Any:
        answer = s.post(path, content=msgspec.msgpack.encode(body), headers={"Content-Type": kind, "Accept": kind})
        assert answer.status_code == 200, answer.content
        return msgspec.msgpack.decode(answer.content)

    generated = post(GENERATE, post(CHAT + "/render", request))
    assert isinstance(generated["choices"][0]["token_ids"], bytes)
    reply = post(CHAT + "/derender", {"generate_response": generated, "chat_request": request})
    assert steady(reply) == steady(good(s.post(CHAT, request)))


def test_what_a_rendered_chat_looks_like() -> None:
    s = site(says("a"))
    assert good(s.post(CHAT + "/render", {"messages": MESSAGES, "request_id": "r"})) == {
        "request_id": "r",
        "token_ids": ids("user:hi;assistant:"),
        "sampling_params": {},
        "model": "tiny",
    }
    body: dict[str, Any] = {
        "messages": MESSAGES,
        "temperature": 0.5,
        "stop": ["x"],
        "bad_words": ["no"],
        "request_id": "chatcmpl-7",
        "cache_salt": "s",
        "deadline_ms": 5,
        "queue_timeout_ms": 6,
        "group_id": "g",
        "stream": True,
        "max_tokens": 9,
        "stream_options": {"include_usage": True},
        "logit_bias": {"5": 1},
        "logprobs": True,
    }
    answer = s.post(CHAT + "/render", body)
    assert answer.headers["x-request-id"] == "chatcmpl-7"
    generated = answer.json()
    sampling = generated.pop("sampling_params")
    assert generated == {
        "token_ids": ids("user:hi;assistant:"),
        "model": "tiny",
        "request_id": "chatcmpl-7",
        "cache_salt": "s",
        "deadline_ms": 5,
        "queue_timeout_ms": 6,
        "group_id": "g",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": False},
    }
    assert sampling == {
        "temperature": 0.5,
        "stop": ["x"],
        "bad_token_sequences": [ids("no"), ids(" no")],
        "logit_bias": {"5": 1.0},
        "logprobs": 0,
        "max_tokens": 9,
    }
    assert s.llm.calls == []


def test_rendered_completions_are_a_list_with_ids_of_their_own() -> None:
    s = site(says("a"))
    generated = good(s.post(COMPLETIONS + "/render", {"prompt": ["a", "b"], "request_id": "r"}))
    assert [one["request_id"] for one in generated] == ["r-0", "r-1"] and [one["token_ids"] for one in generated] == [
        ids("a"),
        ids("b"),
    ]
    assert generated[0]["sampling_params"]["max_tokens"] == 16
    one = good(s.post(COMPLETIONS + "/render", {"prompt": "a"}, headers={"X-Request-Id": "h"}))
    assert [rendered["request_id"] for rendered in one] == ["h"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"tokens": [5]}, "tokens"),
        ({"temperature": -1}, "temperature"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        ({"priority": 2**63}, "priority"),
        ({"logprobs": True, "top_logprobs": 50}, "top_logprobs"),
        ({"n": 5000}, "n"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"stream_options": {}}, "stream_options"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"9999": 1}}, "logit_bias.9999"),
        ({"model": "other"}, "model"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"vllm_xargs": {"a": 10**30}}, "vllm_xargs"),
    ],
)
def test_render_refuses_what_chat_refuses(fields: dict[str, Any], param: str) -> None:
    s = site()
    body = {"messages": MESSAGES} | fields
    answer, other = s.post(CHAT + "/render", body), s.post(CHAT, body)
    assert answer.json() == other.json() and answer.status_code == other.status_code
    assert answer.json()["error"]["param"] == param


def test_render_refuses_a_prompt_by_its_place() -> None:
    refused: list[dict[str, Any]] = [{"prompt": ["a", [9999]]}, {"prompt": []}, {"prompt": "a", "max_tokens": 0}]
    for requested in refused:
        answer, other = (site().post(path, requested) for path in (COMPLETIONS + "/render", COMPLETIONS))
        assert answer.status_code == 400 and answer.json() == other.json()


def reply(tokens: list[int], **fields: Any) -> dict[str, Any]:
    """A generate reply as another server would send it."""
    return {"request_id": "q", "choices": [{"index": 0, "token_ids": tokens} | fields]}


def derendered(generated: Any, **fields: Any) -> Any:
    return good(site().post(CHAT + "/derender", {"generate_response": generated} | fields))


def test_a_reply_without_optional_fields_is_derendered() -> None:
    shown = derendered(reply([*ids("ab"), EOS], finish_reason="stop"), prompt_tokens=4, model="tiny")
    assert shown["id"] == "chatcmpl-q" and shown["choices"][0]["message"]["content"] == "ab"
    assert shown["choices"][0]["stop_detail"] == {"kind": "eos"} and shown["choices"][0]["logprobs"] is None
    assert shown["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert derendered(reply(ids("abc"), finish_reason="length"))["usage"]["prompt_tokens"] == 0
    ended = derendered(reply(ids("abc"), finish_reason="stop", stop_reason=ids("c")[0]))
    assert ended["choices"][0]["message"]["content"] == "ab"
    cut = derendered(reply(ids("abcab"), finish_reason="stop", stop_reason="ab"))
    assert cut["choices"][0]["message"]["content"] == "abc"
    for reason in ("abort", "stop"):
        assert derendered(reply([], finish_reason=reason))["choices"][0]["message"]["content"] == ""
    used = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
    for details, cached in (({"prompt_tokens_details": {"cached_tokens": 2}}, 2), ({}, 0)):
        usage = derendered(reply(ids("abc"), finish_reason="length") | {"usage": used | details})["usage"]
        assert usage["prompt_tokens"] == 4 and usage["prompt_tokens_details"] == {"cached_tokens": cached}


def test_what_derender_has_no_use_for_is_passed_on() -> None:
    passed = {"kv_transfer_params": {"remote": 3}, "metrics": {"time_to_first_token_ms": 0.5}}
    shown = derendered(reply(ids("ab"), finish_reason="length") | passed)
    assert {name: shown[name] for name in passed} == passed


def test_echo_takes_the_prompt_from_the_reply() -> None:
    generated = reply(ids("ab"), finish_reason="length") | {"prompt_token_ids": ids("xy")}
    body = {"generate_responses": [generated], "completion_request": {"echo": True}}
    assert good(site().post(COMPLETIONS + "/derender", body))["choices"][0]["text"] == "xyab"


def test_logprobs_without_the_request_are_what_the_reply_has() -> None:
    a, b = ids("a")[0], ids("b")[0]
    entry = {
        "token": f"token_id:{a}",
        "logprob": -1.0,
        "rank": 2,
        "top_logprobs": [{"token": f"token_id:{a}", "logprob": -1.0}, {"token": f"token_id:{b}", "logprob": -0.5}],
    }
    content = derendered(reply([a], logprobs={"content": [entry]}))["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] == "a" and content[0]["bytes"] == [97]
    assert content[0]["top_logprobs"] == [], "these do not say how many were asked for"
    table = {"token_logprobs": [-1.0], "ranks": [2], "top_token_ids": [[b, a]], "top_logprobs": [[-0.5, -1.0]]}
    content = derendered(reply([a], logprobs=table))["choices"][0]["logprobs"]["content"]
    assert [(top["token"], top["logprob"]) for top in content[0]["top_logprobs"]] == [("b", -0.5), ("a", -1.0)]


@pytest.mark.parametrize(("rank", "order"), [(1, "abc"), (3, "acb")])
def test_a_token_is_among_equal_alternatives_by_its_id_or_its_rank(rank: int, order: str) -> None:
    a, b, c = ids("abc")
    entry = {
        "token_id": b,
        "logprob": -1.0,
        "rank": rank,
        "top_logprobs": [{"token_id": other, "logprob": -1.0, "rank": 1} for other in (a, c)],
    }
    body = {"logprobs": True, "top_logprobs": 3}
    shown = derendered(reply([b], logprobs={"content": [entry]}), chat_request=body)["choices"][0]["logprobs"]
    assert "".join(top["token"] for top in shown["content"][0]["top_logprobs"]) == order


WHOLE = {"token_id": 5, "logprob": -1.0, "rank": 1}
WANTED = {"logprobs": True}
SCORE = {"logprob": -1.0}
NARROW = {"token_logprobs": [-1.0], "ranks": [1], "top_token_ids": [[]], "top_logprobs": [[]]}
WIDE = {"token_logprobs": [-1.0] * 2, "ranks": [1] * 2, "top_token_ids": [[1]] * 2, "top_logprobs": [[-1.0]] * 2}
EMPTY = {"shape": [1, 0], "token_logprobs": "", "ranks": "", "top_token_ids": "", "top_logprobs": ""}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "generate_response"),
        ({"generate_response": 5}, "generate_response"),
        ({"generate_response": {"choices": []}}, "generate_response.choices"),
        ({"generate_response": {}}, "generate_response.choices"),
        ({"generate_response": reply([5]), "stream": True}, "generate_response"),
        ({"generate_response": reply([5]), "model": "other"}, "model"),
        ({"generate_response": reply([VOCAB])}, "generate_response.choices[0].token_ids[0]"),
        ({"generate_response": reply([5, -1])}, "generate_response.choices[0].token_ids[1]"),
        ({"generate_response": reply([5], index=1)}, "generate_response.choices"),
        ({"generate_response": reply([5]), "chat_request": {"n": 2}}, "generate_response.choices"),
        ({"generate_response": reply([5]), "chat_request": 5}, "chat_request"),
        ({"generate_response": reply([5]), "chat_request": {"top_p": "x"}}, "chat_request.top_p"),
        ({"generate_response": reply([5]), "chat_request": {"stop": [""]}}, "chat_request.stop"),
        ({"generate_response": reply([5]), "chat_request": {"tools": [{}]}}, "chat_request.tools[0].type"),
        ({"generate_response": reply([5]), "chat_request": WANTED}, "generate_response.choices[0].logprobs"),
        ({"generate_response": reply([5]), "chat_request": {"prompt_logprobs": 1}}, "prompt_token_ids"),
        ({"generate_response": reply([5]), "chat_request": {"return_token_ids": True}}, "prompt_token_ids"),
        ({"generate_response": reply([5]), "prompt_tokens": 3, "prompt_token_ids": [5]}, "prompt_tokens"),
        ({"generate_response": reply([5]), "prompt_tokens": -1}, "prompt_tokens"),
        ({"generate_response": reply([5]), "prompt_token_ids": [9999]}, "prompt_token_ids[0]"),
        (
            {"generate_response": reply([5, 6], logprobs={"content": [WHOLE]}), "chat_request": WANTED},
            "generate_response.choices[0].logprobs.content",
        ),
        (
            {
                "generate_response": reply([5], logprobs={"content": [WHOLE]}),
                "chat_request": {"logprobs": True, "top_logprobs": 3},
            },
            "generate_response.choices[0].logprobs.content[0]",
        ),
        (
            {"generate_response": reply([5], logprobs={"content": [{"logprob": -1.0}]}), "chat_request": WANTED},
            "generate_response.choices[0].logprobs.content[0].token_id",
        ),
        (
            {"generate_response": reply([5], logprobs=EMPTY), "chat_request": WANTED},
            "generate_response.choices[0].logprobs",
        ),
        (
            {"generate_response": reply([5], logprobs=7), "chat_request": WANTED},
            "generate_response.choices[0].logprobs",
        ),
        (
            {"generate_response": reply([5], logprobs=NARROW | {"top_token_ids": [[1]]}), "chat_request": WANTED},
            "generate_response.choices[0].logprobs",
        ),
        (
            {"generate_response": reply([5, 6], logprobs=NARROW), "chat_request": WANTED},
            "generate_response.choices[0].logprobs",
        ),
        (
            {"generate_response": reply([5], logprobs=NARROW), "chat_request": {"logprobs": True, "top_logprobs": 3}},
            "generate_response.choices[0].logprobs",
        ),
        (
            {
                "generate_response": reply([5], logprobs={"content": [WHOLE]}),
                "chat_request": WANTED | {"logprob_token_ids": [9]},
            },
            "generate_response.choices[0].logprobs.content[0]",
        ),
        (
            {"generate_response": {"choices": [{"index": i, "token_ids": []} for i in range(MAX_CHOICES + 1)]}},
            "generate_response.choices",
        ),
        ({"generate_response": reply([5]) | {"prompt_token_ids": [6]}, "prompt_token_ids": [7]}, "prompt_token_ids"),
        *(
            (
                {
                    "generate_response": reply([5]) | {"prompt_logprobs": scores},
                    "prompt_token_ids": [6, 7, 8],
                    "chat_request": {"prompt_logprobs": 0},
                },
                f"generate_response.prompt_logprobs{place}",
            )
            for scores, place in (
                (None, ""),
                ([None, {"7": SCORE}], ""),
                ([None, None, {"8": SCORE}], ""),
                (NARROW, ""),
                (WIDE, ""),
                ([None, {"7": SCORE}, {"9": SCORE}], "[2]"),
                ([None, {"7": SCORE}, {"8": 5}], "[2][...]"),
            )
        ),
    ],
)
def test_derender_refusals_name_the_field(body: dict[str, Any], param: str) -> None:
    answer = site().post(CHAT + "/derender", body)
    error = answer.json()["error"]
    assert answer.status_code == (404 if param == "model" else 400) and error["param"] == param, answer.text


def test_packed_ids_are_whole_ids() -> None:
    body = {"generate_response": {"choices": [{"index": 0, "token_ids": b"\5\0\0"}]}}
    kind = "application/msgpack"
    answer = site().post(CHAT + "/derender", content=msgspec.msgpack.encode(body), headers={"Content-Type": kind})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "generate_response.choices[0].token_ids")
    assert "4 bytes each" in error["message"]


def test_completions_derender_refusals() -> None:
    generated = reply([5])
    for body, param in (
        ({}, "generate_responses"),
        ({"generate_responses": []}, "generate_responses"),
        ({"generate_responses": [generated], "prompt_tokens": [1, 2]}, "prompt_tokens"),
        ({"generate_responses": [generated, {}]}, "generate_responses[1].choices"),
        ({"generate_responses": [generated], "completion_request": {"prompt": ["a", "b"]}}, "generate_responses"),
        (
            {"generate_responses": [generated], "completion_request": {"prompt": [5, "x"]}},
            "completion_request.prompt[1]",
        ),
        ({"generate_responses": [generated], "completion_request": {"echo": True}}, "prompt_token_ids[0]"),
    ):
        answer = site().post(COMPLETIONS + "/derender", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_unknown_fields_are_ignored_and_named_or_refused() -> None:
    body = {"generate_response": reply([5]) | {"new": 1}, "other": 1, "chat_request": {"extra_key": False}}
    answer = site().post(CHAT + "/derender", body)
    assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == "other, extra_key"
    assert site(strict=True).post(CHAT + "/derender", body).json()["error"]["param"] == "other"
    del body["other"]
    assert site(strict=True).post(CHAT + "/derender", body).json()["error"]["param"] == "chat_request.extra_key"
    request = {"messages": MESSAGES, "extra_key": False}
    assert site().post(CHAT + "/render", request).headers["x-ignored-fields"] == "extra_key"


def test_tokenizer_description() -> None:
    shown = good(site().get("/tokenizer_info"))
    assert shown["vocab_size"] == VOCAB and shown["special_token_ids"] == [0, 1, 2]
    assert (shown["eos_token"], shown["eos_token_id"], shown["eos_token_ids"]) == ("<eos>", 0, [0])
    assert shown["bos_token"] is shown["bos_token_id"] is None and shown["chat_template"] == TOKENIZER.chat_template
    assert shown["tokenizer_class"] is None and "/" not in str(shown["special_tokens"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_tokens_only_server_has_no_render_routes(path: str) -> None:
    s = site(tokens_only=True)
    for answer in (s.post(path + "/render", {}), s.post(path + "/derender", {}), s.get("/tokenizer_info")):
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "tokens_only"


def test_a_large_derendered_reply_is_encoded_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    encode = bodies.encode_json

    def noted(value: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return encode(value)

    monkeypatch.setattr(bodies, "encode_json", noted)
    generated = reply(ids("a" * 20000), finish_reason="length")
    answer = site().post(CHAT + "/derender", {"generate_response": generated})
    assert answer.json()["choices"][0]["message"]["content"] == "a" * 20000
    assert len(threads) == 1 and threads[0].startswith("tokserve-")
