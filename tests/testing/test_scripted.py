"""A scripted server sends its replies as a model would, and its faults where the script has them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tokserve.testing import ScriptedReply, ScriptedServer, scripted_server

EOS = 287  # of the demo model
NEXT: list[ScriptedReply] = []  # what the shared server replies


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server(lambda prompt, index: NEXT.pop(0)) as running:
        yield running


def generate(server: ScriptedServer, reply: ScriptedReply, **fields: Any) -> httpx.Response:
    NEXT.append(reply)
    params = {"max_tokens": 10, "logprobs": 0, **fields.pop("params", {})}
    body = {"token_ids": [10, 11, 12], "sampling_params": params, "logprobs_format": "arrays", **fields}
    return httpx.post(server.url + "/inference/v1/generate", json=body, timeout=120)


def choice(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    actual: dict[str, Any] = response.json()["choices"][0]
    return actual


@pytest.mark.slow
def test_tokens_and_logprobs(server: ScriptedServer) -> None:
    reply = generate(server, ScriptedReply([5, 6, 7], [-0.5, -0.25, -2.0]), request_id="of the client")
    actual = choice(reply)
    assert actual["token_ids"] == [5, 6, 7, EOS]
    assert actual["finish_reason"] == "stop"
    assert actual["logprobs"]["token_logprobs"] == [-0.5, -0.25, -2.0, -1.0]
    received = server.choices[-1]
    assert (received.request_id, received.prompt_ids, received.index) == ("of the client", [10, 11, 12], 0)


def test_parameters_end_an_output(server: ScriptedServer) -> None:
    actual = choice(generate(server, ScriptedReply([5, 6, 7]), params={"max_tokens": 2}))
    assert (actual["token_ids"], actual["finish_reason"]) == ([5, 6], "length")
    actual = choice(generate(server, ScriptedReply([5, 6, 7]), params={"stop_token_ids": [6]}))
    assert (actual["token_ids"], actual["stop_reason"]) == ([5, 6], 6)


def test_alternatives_and_ids_that_the_request_names(server: ScriptedServer) -> None:
    params = {"max_tokens": 1, "logprobs": 2, "logprob_token_ids": [9, 4]}
    logprobs = choice(generate(server, ScriptedReply([5], [-0.5]), params=params))["logprobs"]
    assert logprobs["top_token_ids"] == [[5, 6, 9, 4]]
    assert logprobs["top_logprobs"][0][:3] == [-0.5, -1.5, -4.5] and logprobs["top_logprobs"][0][3] < -100


def test_logits_that_are_not_finite(server: ScriptedServer) -> None:
    NEXT.append(ScriptedReply([5, 6, 7], fail_at=2))
    actual = choice(generate(server, ScriptedReply([5, 6, 7]), params={"n": 2}))
    assert (actual["token_ids"], actual["finish_reason"], actual["stop_detail"]["kind"]) == ([5, 6], "error", "nan")


@pytest.mark.slow
def test_a_reply_follows_the_form_of_its_request(server: ScriptedServer) -> None:
    ids = {
        letter: httpx.post(server.url + "/tokenize", json={"prompt": letter}).json()["tokens"][0] for letter in "yesa"
    }
    params = {"structured_outputs": {"choice": ["yes", "no"]}}
    actual = choice(generate(server, ScriptedReply([ids[letter] for letter in "yes"]), params=params))
    assert actual["token_ids"] == [*(ids[letter] for letter in "yes"), EOS] and actual["finish_reason"] == "stop"
    for text, num_tokens in (("ye", 2), ("yas", 1), ("", 0)):
        refused = generate(server, ScriptedReply([ids[letter] for letter in text]), params=params)
        message = f"after {num_tokens} output tokens: all are excluded by structured_outputs"
        assert refused.status_code == 400 and message in refused.text, refused.text


@pytest.mark.parametrize("status", [503, 429])
def test_refusal(server: ScriptedServer, status: int) -> None:
    response = generate(server, ScriptedReply(refuse=status))
    assert response.status_code == status
    assert response.headers["retry-after"] == "1"


def test_delay(server: ScriptedServer) -> None:
    began = time.monotonic()
    assert choice(generate(server, ScriptedReply([5, 6], delays={1: 0.2})))["token_ids"] == [5, 6, EOS]
    assert time.monotonic() - began >= 0.2


def test_abort(server: ScriptedServer) -> None:
    actual = choice(generate(server, ScriptedReply([5, 6, 7], abort_at=2)))
    assert (actual["token_ids"], actual["finish_reason"]) == ([5, 6], "abort")


def test_new_weights(server: ScriptedServer) -> None:
    before = httpx.get(server.url + "/weight_info").json()["weight_version"]
    actual = choice(generate(server, ScriptedReply([5, 6, 7], versions={2: "seven"})))
    spans = [{"version": before, "start": 0, "end": 2}, {"version": "seven", "start": 2, "end": 4}]
    assert actual["weight_versions"] == spans


def test_disconnect_before_a_whole_reply(server: ScriptedServer) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        generate(server, ScriptedReply([5, 6, 7], disconnect_at=1))


def test_disconnect_within_a_stream(server: ScriptedServer) -> None:
    NEXT.append(ScriptedReply([5, 6, 7], disconnect_at=2))
    body = {"token_ids": [10], "sampling_params": {"max_tokens": 9}, "stream": True}
    tokens: list[int] = []

    def read() -> None:
        with httpx.stream("POST", server.url + "/inference/v1/generate", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    tokens.extend(json.loads(line[6:])["choices"][0]["token_ids"])

    with pytest.raises(httpx.RemoteProtocolError):
        read()
    assert tokens == [5, 6]


def test_choices_and_chat(server: ScriptedServer) -> None:
    NEXT.extend([ScriptedReply([33, 34]), ScriptedReply([35])])
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    actual = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "hi"}], n=2)
    texts = {choice.index: choice.message.content for choice in actual.choices}
    assert len(texts[0] or "") == 2 and len(texts[1] or "") == 1


def test_an_error_of_the_script_reaches_the_client(server: ScriptedServer) -> None:
    response = httpx.post(server.url + "/inference/v1/generate", json={"token_ids": [1]}, timeout=120)
    assert response.status_code == 500
    assert "the script raised IndexError" in response.text


def test_weight_updates_are_accepted(server: ScriptedServer) -> None:
    assert httpx.post(server.url + "/start_weight_update").status_code == 200
    body = {"update_info": {"names": [], "dtype_names": [], "shapes": []}}
    assert httpx.post(server.url + "/update_weights", json=body).status_code == 200
    done = httpx.post(server.url + "/finish_weight_update", json={"weight_version": "eight"})
    assert done.json()["weight_version"] == "eight"


def test_prompt_logprobs(server: ScriptedServer) -> None:
    reply = generate(server, ScriptedReply([5]), params={"prompt_logprobs": 1}).json()
    assert reply["prompt_logprobs"]["token_logprobs"] == [-1.0, -1.0]


@pytest.mark.slow
def test_a_list_is_used_in_order() -> None:
    with scripted_server([ScriptedReply([5]), ScriptedReply([6])], tokens_only=True) as running:
        body = {"token_ids": [10], "sampling_params": {"max_tokens": 1}}
        actual = [httpx.post(running.url + "/inference/v1/generate", json=body).json() for _ in range(2)]
        assert [reply["choices"][0]["token_ids"] for reply in actual] == [[5], [6]]
        assert running.unused == 0
        response = httpx.post(running.url + "/inference/v1/generate", json=body)
        assert response.status_code == 500
        assert "the script has 2 replies" in response.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"token_ids": [1], "logprobs": []}, "1 token_ids and 0 logprobs"), ({"refuse": 404}, "503 or 429")],
)
def test_a_wrong_reply_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScriptedReply(**fields)
