"""`tokserve serve demo -dp N`: replies of any engine, ranks by hand, control of all, and nothing left behind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.e2e.server import Server
from tests.replies import good

pytestmark = pytest.mark.slow

GENERATE = "/inference/v1/generate"
RANK = "X-data-parallel-rank"


@pytest.fixture(scope="module", params=[2, 3])
def count(request: pytest.FixtureRequest) -> int:
    """The number of engines."""
    number: int = request.param
    return number


@pytest.fixture(scope="module")
def server(count: int) -> Iterator[Server]:
    flags = ("--max-num-seqs", "8", "--kv-cache-memory-bytes", "2M", "--sglang-api")
    with Server("demo", "-dp", str(count), *flags) as running:
        yield running
        children = psutil.Process(running.process.pid).children()
        assert len(children) == count
        assert running.stop() == 0
        assert not any(child.is_running() for child in children)


def body(seed: int, **fields: Any) -> dict[str, Any]:
    params = {"max_tokens": 20, "temperature": 1.0, "seed": seed, "logprobs": 2, "ignore_eos": True}
    return {"token_ids": [5 + seed, 6, 7], "sampling_params": params, "logprobs_format": "arrays"} | fields


def reply(server: Server, seed: int, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    return good(server.post(GENERATE, body(seed, **fields), headers=headers or {}))["choices"]


def test_every_engine_gives_the_same_reply(server: Server, count: int) -> None:
    for seed in range(3):
        chosen = reply(server, seed)
        assert all(reply(server, seed, {RANK: str(rank)}) == chosen for rank in range(count))
        assert all(reply(server, seed, data_parallel_rank=rank) == chosen for rank in range(count))


@pytest.mark.parametrize(
    ("headers", "fields", "field"),
    [
        ({RANK: "3"}, {}, "data_parallel_rank"),
        ({RANK: "-1"}, {}, RANK),
        ({RANK: "one"}, {}, RANK),
        ({RANK: "0"}, {"data_parallel_rank": 1}, "data_parallel_rank"),
        ({}, {"data_parallel_rank": 3}, "data_parallel_rank"),
        ({}, {"data_parallel_rank": -1}, "data_parallel_rank"),
        ({}, {"data_parallel_rank": "a"}, "data_parallel_rank"),
    ],
)
def test_a_rank_that_no_engine_has_is_refused(
    server: Server, headers: dict[str, str], fields: dict[str, Any], field: str
) -> None:
    for stream in (False, True):
        answer = server.post(GENERATE, body(1, stream=stream, **fields), headers=headers)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field, answer.text


def test_ranks_of_other_dialects(server: Server, count: int) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "seed": 1, "temperature": 0.5}
    replies = [server.post("/v1/chat/completions", chat | {"data_parallel_rank": rank}).json() for rank in range(count)]
    assert all(other["choices"] == replies[0]["choices"] for other in replies)
    sglang = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    texts = [server.post("/generate", sglang | {"routed_dp_rank": rank}).json()["output_ids"] for rank in range(count)]
    assert all(text == texts[0] for text in texts)
    answer = server.post("/generate", sglang | {"routed_dp_rank": count})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "routed_dp_rank", answer.text


def generated(server: Server) -> dict[str, float]:
    """The tokens that each engine has generated."""
    sample = r'^tokserve:generation_tokens_total{engine="(\d)",model_name="demo"} (.*)$'
    return {rank: float(count) for rank, count in re.findall(sample, server.get("/metrics").text, re.MULTILINE)}


def test_metrics_of_each_engine(server: Server, count: int) -> None:
    before = generated(server)
    for rank in range(count):
        for seed in range(rank + 1):
            reply(server, seed, {RANK: str(rank)})
    grown = {rank: tokens - before[rank] for rank, tokens in generated(server).items()}
    assert grown == {str(rank): 20 * (rank + 1) for rank in range(count)}


def test_the_requests_of_a_session_go_to_one_engine(server: Server) -> None:
    """vllm-router hashes the same header: https://github.com/vllm-project/router, `x-session-id`."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "ignore_eos": True}
    of_sessions = {}
    for session in ("a", "b", "c", "d", "e", "f"):
        before = generated(server)
        for seed in range(2):
            reply(server, seed, {"x-session-id": session})
        good(server.post("/v1/chat/completions", chat, headers={"X-Session-ID": session}))
        grown = {rank: tokens - before[rank] for rank, tokens in generated(server).items()}
        [of_sessions[session]] = [rank for rank, tokens in grown.items() if tokens]
        assert grown[of_sessions[session]] == 60
    assert len(set(of_sessions.values())) > 1
    before = generated(server)
    for rank in ("0", "1"):
        reply(server, 1, {"x-session-id": "a", RANK: rank})
    assert all(generated(server)[rank] == before[rank] + 20 for rank in ("0", "1")), "a rank by hand counts"


def test_control_and_introspection_cover_all_engines(server: Server, count: int) -> None:
    assert server.post("/pause", {"mode": "keep"}).status_code == 200
    state = server.get("/inference/v1/state").json()
    assert [one["state"] for one in state["engines"]] == ["paused"] * count and state["state"] == "paused"
    assert server.post("/resume", {}).status_code == 200
    assert server.get("/get_world_size").json() == {"world_size": count}
    assert server.get("/get_world_size?include_dp=false").json() == {"world_size": 1}
    assert server.get("/health?deep=1").status_code == 200
    checked = server.post("/weight_checker", {"action": "checksum"})
    assert checked.status_code == 200, checked.text
    shown = server.get("/server_info?config_format=json").json()["vllm_config"]["parallel_config"]
    assert shown["data_parallel_size"] == count
    renamed = server.post("/update_weight_version", {"new_version": "again"})
    assert renamed.status_code == 200
    assert [one["weight_version"] for one in server.get("/inference/v1/state").json()["engines"]] == ["again"] * count
