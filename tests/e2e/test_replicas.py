"""`tokserve serve demo -dp 2`: replies of either engine, ranks by hand, control of both, and nothing left behind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.e2e.server import Server

GENERATE = "/inference/v1/generate"
RANK = "X-data-parallel-rank"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("demo", "-dp", "2", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "2M", "--sglang-api") as running:
        yield running
        children = psutil.Process(running.process.pid).children()
        assert len(children) == 2
        assert running.stop() == 0
        assert not any(child.is_running() for child in children)


def body(seed: int, **fields: Any) -> dict[str, Any]:
    params = {"max_tokens": 20, "temperature": 1.0, "seed": seed, "logprobs": 2, "ignore_eos": True}
    return {"token_ids": [5 + seed, 6, 7], "sampling_params": params, "logprobs_format": "arrays"} | fields


def reply(server: Server, seed: int, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    answer = server.post(GENERATE, body(seed, **fields), headers=headers or {})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def test_every_engine_gives_the_same_reply(server: Server) -> None:
    for seed in range(3):
        chosen = reply(server, seed)
        assert all(reply(server, seed, {RANK: str(rank)}) == chosen for rank in range(2))
        assert all(reply(server, seed, data_parallel_rank=rank) == chosen for rank in range(2))


@pytest.mark.parametrize(
    ("headers", "fields", "field"),
    [
        ({RANK: "2"}, {}, "data_parallel_rank"),
        ({RANK: "-1"}, {}, RANK),
        ({RANK: "one"}, {}, RANK),
        ({RANK: "0"}, {"data_parallel_rank": 1}, "data_parallel_rank"),
        ({}, {"data_parallel_rank": 2}, "data_parallel_rank"),
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


def test_ranks_of_other_dialects(server: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "seed": 1, "temperature": 0.5}
    replies = [server.post("/v1/chat/completions", chat | {"data_parallel_rank": rank}).json() for rank in range(2)]
    assert replies[0]["choices"] == replies[1]["choices"]
    sglang = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    texts = [server.post("/generate", sglang | {"routed_dp_rank": rank}).json()["output_ids"] for rank in range(2)]
    assert texts[0] == texts[1]
    answer = server.post("/generate", sglang | {"routed_dp_rank": 2})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "routed_dp_rank", answer.text


def test_metrics_of_each_engine(server: Server) -> None:
    def generated() -> dict[str, float]:
        sample = r'^tokserve:generation_tokens_total{engine="(\d)",model_name="demo"} (.*)$'
        return {rank: float(count) for rank, count in re.findall(sample, server.get("/metrics").text, re.MULTILINE)}

    before = generated()
    for rank, times in enumerate((1, 3)):
        for seed in range(times):
            reply(server, seed, {RANK: str(rank)})
    assert {rank: count - before[rank] for rank, count in generated().items()} == {"0": 20, "1": 60}


def test_control_and_introspection_speak_for_both(server: Server) -> None:
    assert server.post("/pause", {"mode": "keep"}).status_code == 200
    state = server.get("/inference/v1/state").json()
    assert [one["state"] for one in state["engines"]] == ["paused", "paused"] and state["state"] == "paused"
    assert server.post("/resume", {}).status_code == 200
    assert server.get("/get_world_size").json() == {"world_size": 2}
    assert server.get("/get_world_size?include_dp=false").json() == {"world_size": 1}
    assert server.get("/health?deep=1").status_code == 200
    checked = server.post("/weight_checker", {"action": "checksum"})
    assert checked.status_code == 200, checked.text
    shown = server.get("/server_info?config_format=json").json()["vllm_config"]["parallel_config"]
    assert shown["data_parallel_size"] == 2
    renamed = server.post("/update_weight_version", {"new_version": "again"})
    assert renamed.status_code == 200
    assert [one["weight_version"] for one in server.get("/inference/v1/state").json()["engines"]] == ["again"] * 2
