"""The token routes of a real server: recorded traffic, stream against full, scoring, aborts, tokens-only."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.e2e.server import Served, Server
from tests.threads import ServerThread
from tests.waiting import until

PROMPT = [5, 20, 31, 44, 7]


def stream(server: Server, body: dict[str, Any]) -> tuple[list[int], list[Any], list[dict[str, Any]]]:
    tokens: list[int] = []
    logprobs: list[Any] = []
    chunks: list[dict[str, Any]] = []
    with httpx.stream(
        "POST", server.url + "/inference/v1/generate", json=body | {"stream": True}, timeout=600
    ) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        chunks.append(json.loads(line))
        for choice in chunks[-1]["choices"]:
            tokens += choice["token_ids"]
            logprobs += (choice["logprobs"] or {}).get("content", [])
    return tokens, logprobs, chunks


def test_stream_equals_full(demo: Server) -> None:
    params = {"temperature": 1.0, "seed": 11, "max_tokens": 40, "logprobs": 2, "ignore_eos": True}
    full = demo.generate(PROMPT, **params)["choices"][0]
    tokens, logprobs, chunks = stream(demo, {"token_ids": PROMPT, "sampling_params": params})
    assert tokens == full["token_ids"] and logprobs == full["logprobs"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == full["finish_reason"] == "length"


def test_tokens_only_gives_the_same_bits(demo: Server, tokens_only: Served) -> None:
    params = {"temperature": 0.9, "seed": 4, "max_tokens": 30, "logprobs": 1}
    assert demo.generate(PROMPT, **params)["choices"] == tokens_only.generate(PROMPT, **params)["choices"]


def test_text_routes_are_absent_with_tokens_only(tokens_only: Served) -> None:
    for path in ("/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"):
        answer = tokens_only.post(path, {"messages": []})
        assert answer.status_code == 404 and "tokens-only" in answer.json()["error"]["message"]
    answer = tokens_only.post("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"stop": ["a"]}})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "sampling_params.stop"


def test_tokens_only_stops_at_the_checkpoints_eos(tokens_only: Served, demo_dir: Any) -> None:
    eos = json.loads((demo_dir / "generation_config.json").read_text())["eos_token_id"]
    reply = tokens_only.generate(PROMPT, temperature=0, max_tokens=200, logit_bias={str(eos): 100.0})
    assert reply["choices"][0]["token_ids"] == [eos]
    assert reply["choices"][0]["finish_reason"] == "stop" and reply["choices"][0]["stop_reason"] is None


def test_a_seed_is_made_up_and_returned_when_none_is_given(demo: Server) -> None:
    first = demo.generate(PROMPT, temperature=1.0, max_tokens=20, ignore_eos=True)
    again = demo.generate(PROMPT, temperature=1.0, max_tokens=20, ignore_eos=True, seed=first["seed"])
    assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    assert first["exact"] is True


def test_rescoring_equals_decoding(demo: Server) -> None:
    reply = demo.generate(PROMPT, temperature=0, max_tokens=100, logprobs=1, ignore_eos=True)["choices"][0]
    tokens = reply["token_ids"]
    for _ in range(2):
        scored = demo.generate(PROMPT + tokens, max_tokens=1, prompt_logprobs=1)["prompt_logprobs"]
        assert len(scored) == len(PROMPT) + len(tokens) and scored[0] is None
        rescored = [scored[len(PROMPT) + i][str(t)]["logprob"] for i, t in enumerate(tokens)]
        assert rescored == [entry["logprob"] for entry in reply["logprobs"]["content"]]


RENDERERS = {
    "model": "demo",
    "token_ids": [5, 6, 7],
    "cache_salt": "3",
    "priority": 0,
    "sampling_params": {
        "temperature": 1.0,
        "max_tokens": 8,
        "stop_token_ids": [2],
        "logprobs": 1,
        "skip_special_tokens": False,
    },
}
TRL_GENERATE = {
    "request_id": "trl-1",
    "model": "demo",
    "token_ids": [5, 6, 7],
    "features": None,
    "sampling_params": {"n": 1, "max_tokens": 4, "logprobs": 0, "output_kind": 2},
}
TRL_COMPLETIONS = {
    "model": "demo",
    "prompt": [[5, 6, 7], [8, 9]],
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "n": 2,
    "repetition_penalty": 1.0,
    "temperature": 0.7,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "max_tokens": 4,
    "logprobs": 0,
}
TRL_SCORING = {"prompt": [[5, 6, 7, 8, 9]], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 2}
LM_EVAL = {
    "model": "demo",
    "prompt": [[20, 13, 20]],
    "temperature": 0,
    "max_tokens": 1,
    "logprobs": 1,
    "seed": 1234,
    "echo": True,
}
GUIDELLM = {
    "model": "demo",
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "max_completion_tokens": 4,
    "ignore_eos": True,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
}
ROUTER = {
    "messages": [{"role": "user", "content": "12+34"}],
    "temperature": 0,
    "no_stop_trim": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
    "include_reasoning": True,
}


def test_renderers(tokens_only: Served) -> None:
    answer = tokens_only.post("/inference/v1/generate", RENDERERS, headers={"x-session-id": "traj-1"})
    choice = answer.json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == len(choice["token_ids"])
    for token, entry in zip(choice["token_ids"], content, strict=True):
        assert entry["token"] == f"token_id:{token}" and entry["token_id"] == token
        assert -9999.0 < entry["logprob"] <= 0.0


def test_trl(demo: Server) -> None:
    reply = demo.post("/inference/v1/generate", TRL_GENERATE).json()
    assert reply["request_id"] in ("trl-1", "generate-tokens-trl-1") and len(reply["choices"][0]["token_ids"]) <= 4
    reply = demo.post("/v1/completions", TRL_COMPLETIONS).json()
    assert [c["prompt_token_ids"] for c in reply["choices"]] == [[5, 6, 7]] * 2 + [[8, 9]] * 2
    for choice in reply["choices"]:
        assert choice["logprobs"]["tokens"] == [f"token_id:{t}" for t in choice["token_ids"]]
    reply = demo.post("/v1/completions", TRL_SCORING).json()
    scored = reply["choices"][0]["prompt_logprobs"]
    assert scored[0] is None and [next(iter(entry)) for entry in scored[1:]] == ["6", "7", "8", "9"]
    assert all(value["rank"] >= 1 for entry in scored[1:] for value in entry.values())


def test_lm_eval(demo: Server) -> None:
    logprobs = demo.post("/v1/completions", LM_EVAL).json()["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == 4 and logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None and len(logprobs["top_logprobs"]) == 4


def test_guidellm(demo: Server) -> None:
    with httpx.stream("POST", demo.url + "/v1/chat/completions", json=GUIDELLM, timeout=600) as answer:
        lines = [json.loads(x[6:]) for x in answer.iter_lines() if x.startswith("data: {")]
    assert all(line["usage"] for line in lines)
    assert lines[-1]["choices"] == [] and lines[-1]["usage"]["completion_tokens"] == 4


def test_router_fields_are_ignored_and_named(demo: Server) -> None:
    answer = demo.post("/v1/chat/completions", ROUTER)
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"] == "46"
    assert "separate_reasoning" in answer.headers["x-ignored-fields"]


def test_abort_is_acknowledged_and_the_caller_gets_what_there_is(demo: Server) -> None:
    async def scene() -> tuple[dict[str, Any], dict[str, Any]]:
        async with httpx.AsyncClient(base_url=demo.url, timeout=600) as client:
            body = {
                "token_ids": PROMPT,
                "request_id": "long",
                "sampling_params": {"max_tokens": 1800, "ignore_eos": True, "n": 64},
            }
            before = demo.metric("tokserve:generation_tokens_total")
            waiting = asyncio.create_task(client.post("/inference/v1/generate", json=body))
            await asyncio.to_thread(until, lambda: demo.metric("tokserve:generation_tokens_total") > before + 64)
            aborted = await client.post("/abort_requests", json={"request_ids": ["generate-tokens-long", "nobody"]})
            return aborted.json(), (await waiting).json()

    aborted, reply = asyncio.run(scene())
    assert aborted == {
        "status": "aborted",
        "aborted": 1,
        "results": {"generate-tokens-long": "aborted", "nobody": "not_found"},
    }
    assert reply["choices"][0]["finish_reason"] == "abort" and reply["choices"][0]["token_ids"]
    assert reply["choices"][0]["stop_detail"]["kind"] == "abort_user"
    demo.wait_idle()


@pytest.mark.parametrize(
    "path", ["/health", "/health?deep=1", "/ping", "/version", "/v1/models", "/metrics", "/server_info", "/load"]
)
def test_observation_routes_answer(demo: Server, path: str) -> None:
    assert demo.get(path).status_code == 200


def test_api_key_guards_everything_but_health(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with ServerThread("demo", "--api-key", "secret-1", "--api-key", "secret-2") as server:
        for path in ("/health", "/ping", "/version"):
            assert server.get(path).status_code == 200
        for path in ("/v1/models", "/metrics", "/server_info"):
            assert server.get(path).status_code == 401
            assert server.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
            assert server.get(path, headers={"Authorization": "Bearer secret-2"}).status_code == 200
        assert "secret-1" not in server.get("/server_info", headers={"Authorization": "Bearer secret-1"}).text
        assert caplog.text and "secret-1" not in caplog.text
