"""Render, generate, derender on a real server: the same replies as the text routes, whichever server generates."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.server import Served, Server
from tests.replies import good

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
MESSAGES = [{"role": "user", "content": "Reverse the word planet."}]
COMMON: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 3, "n": 3, "max_tokens": 20},
    {"temperature": 0, "stop": ["nal"]},
    {"temperature": 0, "stop": ["e", "al"], "min_tokens": 4},
    {"temperature": 0, "include_stop_str_in_output": True},
    {"seed": 5, "ignore_eos": True, "max_tokens": 30, "skip_special_tokens": False},
    {"temperature": 0, "skip_special_tokens": False},
    {"temperature": 0, "stop_token_ids": [64]},
    {"temperature": 0, "stop_token_sequences": [[77, 64]]},
    {"temperature": 0, "bad_words": ["n"], "max_tokens": 9},
    {"seed": 1, "logprob_token_ids": [77, 3, 287], "max_tokens": 8},
    {"temperature": 0, "prompt_logprobs": 2},
    {"seed": 9, "n": 2, "stop": "a", "ignore_eos": True, "max_tokens": 25, "temperature": 1.5},
]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=120) as client:
        yield client


def ask(http: httpx.Client, server: Server, path: str, body: Any) -> Any:
    return good(http.post(server.url + path, json=body))


def steady(reply: Any) -> Any:
    """What must be equal: not ids, times and what the cache knew, nor who generated."""
    del reply["id"], reply["created"], reply["usage"]["prompt_tokens_details"], reply["system_fingerprint"]
    return reply


FULL = {"logprobs": True, "top_logprobs": 4, "return_token_ids": True}


@pytest.mark.some(5)
@pytest.mark.parametrize("fields", COMMON, ids=str)
def test_chat(http: httpx.Client, demo: Server, fields: dict[str, Any]) -> None:
    for form, logprobs in (("objects", {}), ("objects", FULL), ("base64", FULL), ("arrays", {"logprobs": True})):
        request = {"messages": MESSAGES} | fields | logprobs
        generated = ask(http, demo, GENERATE, ask(http, demo, CHAT + "/render", request) | {"logprobs_format": form})
        body = {"generate_response": generated, "chat_request": request}
        assert steady(ask(http, demo, CHAT + "/derender", body)) == steady(ask(http, demo, CHAT, request))


@pytest.mark.some(7)
@pytest.mark.parametrize("fields", [*COMMON, {"echo": True}, {"echo": True, "max_tokens": 0}], ids=str)
def test_completions(http: httpx.Client, demo: Server, fields: dict[str, Any]) -> None:
    for form, logprobs in (("objects", {"logprobs": 2}), ("arrays", {"logprobs": 0})):
        request = {"prompt": ["47+38<|im_end|>", "hello"], "seed": 1} | fields | logprobs
        generated = [
            ask(http, demo, GENERATE, r | {"logprobs_format": form})
            for r in ask(http, demo, COMPLETIONS + "/render", request)
        ]
        body = {"generate_responses": generated, "completion_request": request}
        assert steady(ask(http, demo, COMPLETIONS + "/derender", body)) == steady(ask(http, demo, COMPLETIONS, request))


@pytest.mark.parametrize("fields", COMMON, ids=str)
def test_generated_by_a_tokens_only_server(
    http: httpx.Client, demo: Server, tokens_only: Served, fields: dict[str, Any]
) -> None:
    """Which knows no stop strings: it generates on, and the way back cuts."""
    request = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2} | fields
    rendered = ask(http, demo, CHAT + "/render", request)
    rendered["sampling_params"].pop("stop", None)
    generated = ask(http, tokens_only, GENERATE, rendered)
    body = {"generate_response": generated, "chat_request": request}
    assert steady(ask(http, demo, CHAT + "/derender", body)) == steady(ask(http, demo, CHAT, request))


PLAIN = [
    f for f in COMMON if not {"skip_special_tokens", "include_stop_str_in_output"} & f.keys()
]  # the request says so


@pytest.mark.parametrize("fields", PLAIN, ids=str)
def test_without_the_request_the_text_of_a_cut_reply_is_the_same(
    http: httpx.Client, demo: Server, fields: dict[str, Any]
) -> None:
    body = {"messages": MESSAGES} | fields
    generated = ask(http, demo, GENERATE, ask(http, demo, CHAT + "/render", body))
    shown = ask(http, demo, CHAT + "/derender", {"generate_response": generated})
    expected = ask(http, demo, CHAT, body)
    assert [c["message"] for c in shown["choices"]] == [c["message"] for c in expected["choices"]]
    assert steady(shown)["usage"] == steady(expected)["usage"]


def test_tokenizer_description(demo: Server, tokens_only: Served) -> None:
    shown = demo.get("/tokenizer_info").json()
    assert shown["tokenizer_class"] == "PreTrainedTokenizerFast" and shown["eos_token_ids"] == [287]
    assert tokens_only.get("/tokenizer_info").status_code == 404
