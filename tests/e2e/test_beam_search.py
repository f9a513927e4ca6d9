"""`use_beam_search` on completions and chat: `LLM`'s beams; what it refuses; aborts and clients that leave."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.server import Served
from tests.replies import good
from tests.waiting import until
from tokserve import LLM, BeamSearchParams

pytestmark = pytest.mark.usefixtures("engine_threads")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(float32: Served) -> Served:
    return float32


def beams(server: Served, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    return good(server.post(path, {"use_beam_search": True, "n": 3, "max_tokens": 6, "return_token_ids": True} | body))


@pytest.mark.slow
def test_beams_of_the_server_equal_the_offline_api(server: Served) -> None:
    prompts = ["What is 47 + 38?", "Reverse the word hello."]
    with LLM("demo", dtype="float32") as llm:
        params = BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=0.5, include_stop_str_in_output=True)
        expected = llm.beam_search(prompts, params)
    reply = beams(server, prompt=prompts, length_penalty=0.5, logprobs=2)
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    for number, choice in enumerate(reply["choices"]):
        sequence = expected[number // 3].sequences[number % 3]
        assert choice["prompt_token_ids"] + choice["token_ids"] == sequence.tokens
        assert choice["finish_reason"] == sequence.finish_reason
        assert abs(sum(choice["logprobs"]["token_logprobs"]) - sequence.cum_logprob) < 1e-5
        assert all(2 <= len(top) <= 3 for top in choice["logprobs"]["top_logprobs"])
    assert reply["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in reply["choices"])


def test_chat_answers_with_the_best_first(server: Served) -> None:
    body = {"messages": [{"role": "user", "content": "What is 47 + 38?"}]}
    reply = beams(server, CHAT, **body, logprobs=True, top_logprobs=1)
    assert reply["choices"][0]["message"]["content"] == "85" and len(reply["choices"]) == 3
    assert reply["choices"][0]["finish_reason"] == "stop"
    scores = [
        sum(entry["logprob"] for entry in choice["logprobs"]["content"]) / len(choice["token_ids"])
        for choice in reply["choices"]
    ]
    assert scores == sorted(scores, reverse=True)
    greedy = server.post(CHAT, body | {"temperature": 0, "return_token_ids": True, "max_tokens": 6}).json()
    one = beams(server, CHAT, **body, n=1)
    assert one["choices"][0]["token_ids"] == greedy["choices"][0]["token_ids"]


def test_concurrent_searches_equal_single_ones(server: Served) -> None:
    prompts = [f"What is {a} + {a + 1}?" for a in range(12)]
    alone = [beams(server, prompt=prompt)["choices"] for prompt in prompts]
    with ThreadPoolExecutor(12) as threads:
        assert list(threads.map(lambda prompt: beams(server, prompt=prompt)["choices"], prompts)) == alone


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stream": True}, "stream"),
        ({"stop": ["x"]}, "stop"),
        ({"n": 20}, "n"),
        ({"echo": True}, "echo"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"length_penalty": 1e9}, "length_penalty"),
        ({"length_penalty": "x"}, "length_penalty"),
        ({"use_beam_search": 1}, "use_beam_search"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"deadline_ms": 5}, "deadline_ms"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt": ["a"] * 200}, "n"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
        ({"min_tokens": 2}, "min_tokens"),
    ],
)
def test_fields_without_effect_on_a_beam_search_are_refused(server: Served, body: dict[str, Any], param: str) -> None:
    request_body = {"prompt": "a", "use_beam_search": True, "n": 3, "max_tokens": 6} | body
    answer = server.post(COMPLETIONS, request_body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    if param == "stop":
        answer = server.post(COMPLETIONS + "/render", {"prompt": "a", "use_beam_search": True})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "use_beam_search"


def test_an_abort_and_a_client_that_leaves(server: Served) -> None:
    long = {"prompt": "a", "use_beam_search": True, "n": 8, "max_tokens": 1500, "ignore_eos": True}
    with ThreadPoolExecutor(1) as threads:
        pending = threads.submit(server.post, COMPLETIONS, long | {"request_id": "beams"})
        while server.post("/abort_requests", {"request_ids": ["beams"]}).json()["results"]["beams"] != "aborted":
            assert not pending.done()
        choices = pending.result(60).json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"abort"} and len(choices) == 8
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + COMPLETIONS, json=long, timeout=0.5)
    until(lambda: not server.metric("tokserve:num_requests_running"), "requests are left")
    assert beams(server, prompt="a")["choices"]
