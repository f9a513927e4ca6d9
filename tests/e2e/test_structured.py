"""Structured outputs of a real server: in a batch, streamed, refused before a stream, and on all routes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.server import Served, Server
from tests.replies import good

GENERATE = "/inference/v1/generate"
PROMPT = [5, 20, 31, 44, 7]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
BOMB = "start: T\nT: " + " & ".join(f"/[ab]*a[ab]{{{i}}}/" for i in range(600))


def body(form: dict[str, Any] | None, **params: Any) -> dict[str, Any]:
    request = {"max_tokens": 40, **params} | ({} if form is None else {"structured_outputs": form})
    return {"token_ids": PROMPT, "sampling_params": request, "output_mode": "text"}


def choices(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    return good(server.post(GENERATE, body))["choices"]


def test_beside_others_every_row_is_what_it_is_alone(demo: Server) -> None:
    tight = {"json": SCHEMA, "disable_any_whitespace": True}
    requests = [
        body(form, seed=seed, logprobs=2, logprobs_mode=mode, **more)
        for seed in range(3)
        for mode in ("raw", "processed")
        for form, more in (
            (None, {"ignore_eos": True}),
            (tight, {"temperature": 0.7}),
            ({"regex": "[a-z]{3,9}"}, {"min_tokens": 5}),
            ({"choice": ["yes", "no"]}, {"ignore_eos": True}),
            ({"json_object": True}, {"repetition_penalty": 1.2}),
        )
    ]
    alone = [choices(demo, request) for request in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        assert list(pool.map(lambda request: choices(demo, request), requests)) == alone
    for (choice,), request in zip(alone, requests, strict=True):
        form = request["sampling_params"].get("structured_outputs")
        if form == tight:
            assert json.loads(choice["text"]).keys() == {"a", "b"} and choice["stop_detail"]["kind"] == "eos"
        if form == {"choice": ["yes", "no"]}:
            assert choice["text"] in ("yes", "no") and choice["stop_detail"]["kind"] == "grammar"


def test_requests_withheld_for_a_slow_mask_sample_the_same_tokens(demo: Server) -> None:
    slow = body({"regex": r"(\w+\s*\d*){0,2000}", "unicode_classes": True}, max_tokens=12, ignore_eos=True, logprobs=2)
    requests = [slow | {"sampling_params": slow["sampling_params"] | {"seed": seed}} for seed in range(3)]
    alone = [choices(demo, request) for request in requests]
    requests += [body({"regex": "[a-z]{9}"}), body(None, ignore_eos=True)]
    with ThreadPoolExecutor(len(requests)) as pool:
        assert list(pool.map(lambda request: choices(demo, request), requests))[:3] == alone


def test_greedy_is_the_most_probable_of_what_is_allowed(demo: Server) -> None:
    params = {"temperature": 0, "logprobs": 0, "logprob_token_ids": list(range(15, 25))}  # the digits are among these
    (choice,) = choices(demo, body({"regex": "[0-9]{6}"}, **params))
    assert len(choice["text"]) == 6 and choice["text"].isdigit()
    for token, entry in zip(choice["token_ids"][:6], choice["logprobs"]["content"], strict=False):
        digits = {top["token_id"]: top["logprob"] for top in entry["top_logprobs"] if top["token"].isdigit()}
        assert len(digits) == 10 and max(digits, key=lambda digit: digits[digit]) == token


def test_choices_of_one_request_follow_the_grammar_each_by_itself(demo: Server) -> None:
    actual = choices(demo, body({"regex": "[a-z]{2,12}"}, n=8, seed=3))
    assert len({choice["text"] for choice in actual}) > 1
    assert all(choice["text"].islower() and 2 <= len(choice["text"]) <= 12 for choice in actual)


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_compiled_is_refused_before_a_stream(demo: Server, stream: bool) -> None:
    for form, field in (({"regex": "("}, "regex"), ({"json": {"type": "foo"}}, "json"), ({"grammar": "x"}, "grammar")):
        answer = demo.post(GENERATE, body(form) | {"stream": stream})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == f"sampling_params.structured_outputs.{field}"


@pytest.mark.slow
def test_a_costly_grammar_delays_no_other_request(demo: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        bomb = pool.submit(httpx.post, demo.url + GENERATE, json=body({"grammar": BOMB}), timeout=120)
        served = 0
        while not bomb.done():
            assert len(choices(demo, body(None, ignore_eos=True))[0]["token_ids"]) == 40
            served += 1
    error = bomb.result().json()["error"]
    assert served > 10 and bomb.result().status_code == 400
    assert error["param"] == "sampling_params.structured_outputs.grammar"
    assert choices(demo, body({"regex": "again"}))[0]["text"] == "again"


def test_openais_client(demo: Server) -> None:
    with openai.OpenAI(base_url=demo.url + "/v1", api_key="x", max_retries=0) as client:
        schema: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
        messages: Any = [{"role": "user", "content": "1+1"}]
        options: dict[str, Any] = {"model": "demo", "messages": messages, "max_tokens": 400, "response_format": schema}
        choice = client.chat.completions.create(**options, seed=2, temperature=0.5).choices[0]
        assert choice.finish_reason == "stop"
        assert json.loads(choice.message.content or "").keys() == {"a", "b"}
        events = client.chat.completions.create(**options, seed=2, temperature=0.5, stream=True)
        streamed = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
        assert streamed == choice.message.content
        options["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "foo"}}}
        with pytest.raises(openai.BadRequestError, match="type must be one of") as caught:
            client.chat.completions.create(**options)
        assert caught.value.param == "response_format"


def test_completions(demo: Server) -> None:
    answer = demo.post("/v1/completions", {"prompt": ["1+1", "2+2"], "structured_outputs": {"regex": "[0-9]{4}"}})
    assert answer.status_code == 200, answer.text
    assert all(len(c["text"]) == 4 and c["text"].isdigit() for c in answer.json()["choices"])


def test_tokens_only_needs_a_tokenizer(tokens_only: Served) -> None:
    answer = tokens_only.post(GENERATE, {"token_ids": [5], "sampling_params": {"structured_outputs": {"regex": "a"}}})
    assert answer.status_code == 400 and "tokenizer" in answer.json()["error"]["message"]
