"""Streams: what the first event has, what the last, and that the deltas joined are the full reply."""

from typing import Any

import pytest

from tests.conformance.api import CHAT, COMPLETIONS, GENERATE, MESSAGES, PROMPT, Api

PARAMS = {"temperature": 1.0, "seed": 9, "max_tokens": 30, "ignore_eos": True, "logprobs": 2}
BODY = {"token_ids": PROMPT, "sampling_params": PARAMS}


def joined(events: list[Any], n: int = 1) -> list[dict[str, Any]]:
    """The choices of a token stream, put together."""
    choices: list[dict[str, Any]] = [{"index": i, "token_ids": [], "logprobs": {}, "text": ""} for i in range(n)]
    for event in events:
        for delta in event["choices"]:
            choice = choices[delta["index"]]
            choice["token_ids"] += delta["token_ids"]
            choice["text"] += delta.get("text", "")
            for name, values in (delta["logprobs"] or {}).items():
                held = choice["logprobs"].setdefault(name, values if name == "mode" else [])
                if name != "mode":
                    held += values
            if delta["finish_reason"]:
                assert "finish_reason" not in choice, "a choice ends once"
                names = ("finish_reason", "stop_reason", "stop_detail", "weight_versions")
                choice |= {name: delta[name] for name in names}
    return choices


@pytest.mark.parametrize("form", ["objects", "arrays"])
@pytest.mark.parametrize("n", [1, 3])
def test_the_deltas_joined_are_the_full_reply(api: Api, form: str, n: int) -> None:
    body = {"token_ids": PROMPT, "sampling_params": PARAMS | {"n": n}, "logprobs_format": form}
    full = api.ok(GENERATE, body)["choices"]
    for choice in joined(api.events(GENERATE, body), n):
        assert choice.pop("text") == ""
        assert choice == full[choice["index"]]


def test_text_deltas_joined_are_the_full_text(text: Api) -> None:
    body = BODY | {"output_mode": "text"}
    [full], [choice] = text.ok(GENERATE, body)["choices"], joined(text.events(GENERATE, body))
    assert choice == full


def test_a_stop_string_never_shows_in_part(text: Api) -> None:
    word = text.ok("/detokenize", {"tokens": [40, 41]})["prompt"]
    params = {"allowed_token_ids": [40], "max_tokens": 6, "stop": [word]}
    events = text.events(GENERATE, {"token_ids": PROMPT, "sampling_params": params, "output_mode": "text"})
    assert joined(events)[0]["text"] == text.ok("/detokenize", {"tokens": [40] * 6})["prompt"]
    params = {"logit_bias": {"40": 50}, "max_tokens": 6, "stop": [word[0] * 4]}
    events = text.events(GENERATE, {"token_ids": PROMPT, "sampling_params": params, "output_mode": "text"})
    assert joined(events)[0]["text"] == ""


def test_only_the_first_event_has_the_common_fields(api: Api) -> None:
    events = api.events(GENERATE, BODY | {"return_token_ids": True, "request_id": "streamed"})
    assert {event["request_id"] for event in events} == {"generate-tokens-streamed"}
    first = events[0]
    assert first["model"] == api.model and first["seed"] == 9 and first["prompt_token_ids"] == PROMPT
    assert isinstance(first["created"], int) and "usage" not in first
    for event in events[1:]:
        assert not {"model", "created", "seed", "prompt_token_ids"} & set(event)
    assert "prompt_token_ids" not in api.events(GENERATE, BODY)[0]


def test_every_delta_has_its_fields(api: Api) -> None:
    for event in api.events(GENERATE, BODY):
        for delta in event["choices"]:
            assert set(delta) >= {"index", "token_ids", "logprobs", "finish_reason", "stop_reason"}
            assert len(delta["logprobs"]["content"]) == len(delta["token_ids"])


def test_prompt_logprobs_come_once(api: Api) -> None:
    body = {"token_ids": PROMPT, "sampling_params": PARAMS | {"prompt_logprobs": 2, "n": 2}}
    actual = [event["prompt_logprobs"] for event in api.events(GENERATE, body) if "prompt_logprobs" in event]
    assert actual == [api.ok(GENERATE, body)["prompt_logprobs"]]


BODIES = {
    GENERATE: BODY,
    CHAT: {"messages": MESSAGES, "max_tokens": 9, "ignore_eos": True},
    COMPLETIONS: {"prompt": PROMPT, "max_tokens": 9, "ignore_eos": True},
}


@pytest.mark.parametrize("route", BODIES)
def test_usage_comes_last_with_no_choices_if_asked_for(api: Api, route: str) -> None:
    if route != GENERATE and api.tokens_only:
        pytest.skip("a tokens-only server")
    assert not [event for event in api.events(route, BODIES[route]) if event.get("usage")]
    *deltas, last = api.events(route, BODIES[route] | {"stream_options": {"include_usage": True}})
    assert last["choices"] == [] and all(event["usage"] is None for event in deltas)
    full = api.ok(route, BODIES[route])["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == full[name]


@pytest.mark.parametrize("route", BODIES)
def test_continuous_usage_is_in_every_event_and_grows(api: Api, route: str) -> None:
    if route != GENERATE and api.tokens_only:
        pytest.skip("a tokens-only server")
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [e["usage"]["completion_tokens"] for e in api.events(route, BODIES[route] | {"stream_options": options})]
    assert counts == sorted(counts) and counts[-1] == (30 if route == GENERATE else 9)


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("stream", [None, False])
def test_stream_options_need_a_stream(api: Api, route: str, stream: bool | None) -> None:
    if route != GENERATE and api.tokens_only:
        pytest.skip("a tokens-only server")
    body = BODIES[route] | {"stream": stream, "stream_options": {"include_usage": True}}
    api.refused(api.post(route, body), 400, "stream_options", "stream: true")
    assert api.post(route, body | {"stream_options": None}).status_code == 200


def test_a_stream_in_msgpack_is_refused(api: Api) -> None:
    answer = api.post(GENERATE, BODY | {"stream": True}, headers={"Accept": "application/msgpack"})
    api.refused(answer, 400, "stream", "msgpack")


def test_the_request_id_is_in_a_streams_headers(api: Api) -> None:
    with api.http.stream("POST", GENERATE, json=BODY | {"stream": True}, headers={"X-Request-Id": "s-1"}) as answer:
        assert answer.headers["x-request-id"] == "s-1" and answer.headers["cache-control"] == "no-cache"
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        answer.read()


def test_text_streams_join_to_the_full_reply(text: Api) -> None:
    body = {"messages": MESSAGES, "max_tokens": 12, "seed": 2, "n": 2, "ignore_eos": True, "logprobs": True}
    full = text.ok(CHAT, body)["choices"]
    content, entries = ["", ""], [[], []]
    for event in text.events(CHAT, body):
        for delta in event["choices"]:
            content[delta["index"]] += delta["delta"].get("content", "")
            entries[delta["index"]] += (delta["logprobs"] or {}).get("content", [])
    assert content == [choice["message"]["content"] for choice in full]
    assert entries == [choice["logprobs"]["content"] for choice in full]


def test_echo_streams_the_prompt_first(text: Api) -> None:
    body = {"prompt": ["12+", "3-"], "max_tokens": 5, "seed": 1, "echo": True, "logprobs": 1, "ignore_eos": True}
    full = text.ok(COMPLETIONS, body)["choices"]
    texts, tokens = ["", ""], [[], []]
    for event in text.events(COMPLETIONS, body):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            tokens[choice["index"]] += choice["logprobs"]["tokens"] if choice["logprobs"] else []
    assert texts == [choice["text"] for choice in full] and texts[0].startswith("12+")
    assert tokens == [choice["logprobs"]["tokens"] for choice in full]


def test_a_client_that_leaves_aborts_its_request(api: Api) -> None:
    before = api.metric("num_requests_running")
    params = {"max_tokens": None, "ignore_eos": True, "n": 8}
    body = {"token_ids": PROMPT, "sampling_params": params, "stream": True}
    with api.http.stream("POST", GENERATE, json=body) as answer:
        next(answer.iter_lines())
    api.wait_for(requests=0)
    assert api.metric("num_requests_running") == before == 0
