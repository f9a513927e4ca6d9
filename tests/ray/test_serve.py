"""The Ray Serve application on a real cluster of three nodes: streams, aborts, and replicas that come and go."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests import needs
from tests.ports import free_port
from tests.ray.cluster import RayCluster
from tests.ray.serving import Application

pytestmark = [needs.RAY.skips(), pytest.mark.slow, pytest.mark.timeout(600)]
GENERATE = "/inference/v1/generate"
ARGS: dict[str, Any] = {"model": "demo", "cpu_threads": 1, "max_num_seqs": 8, "kv_cache_memory_bytes": 4 << 20}
SCALING = {
    "min_replicas": 1,
    "max_replicas": 3,
    "target_ongoing_requests": 2,
    "upscale_delay_s": 1.0,
    "downscale_delay_s": 3.0,
    "look_back_period_s": 2.0,
    "metrics_interval_s": 1.0,
}
CLIENTS, PATIENCE = 9, 240.0


@pytest.fixture(scope="module")
def app() -> Iterator[Application]:
    port = free_port()
    args = ARGS | {"deployment": {"autoscaling_config": SCALING}}
    with RayCluster(1, 1, 1) as cluster, Application(cluster, port, args) as running:
        yield running


def body(seed: int, count: int, **fields: Any) -> dict[str, Any]:
    params = {"max_tokens": count, "temperature": 1.0, "seed": seed, "logprobs": 0, "ignore_eos": True}
    return {"token_ids": [5 + seed, 6, 7], "sampling_params": params} | fields


def test_routes_pass_through(app: Application) -> None:
    assert httpx.get(app.url + "/v1/models").json()["data"][0]["id"] == "demo"
    chat = app.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4})
    assert chat.status_code == 200 and chat.json()["usage"]["completion_tokens"] <= 4
    refused = app.post(GENERATE, body(1, 3, surprise=1))
    assert refused.status_code == 400 and "surprise" in refused.text
    for path in ("/pause", "/update_weights"):
        control = app.post(path, {})
        assert control.status_code == 400 and control.json()["error"]["code"] == "several_replicas"


def test_a_stream_comes_in_parts_and_ends_with_its_client(app: Application) -> None:
    expected = app.post(GENERATE, body(3, 800)).json()["choices"][0]["token_ids"]
    parts = []
    with httpx.stream("POST", app.url + GENERATE, json=body(3, 800, stream=True), timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                parts.append([token for choice in json.loads(line[6:])["choices"] for token in choice["token_ids"]])
    assert len([part for part in parts if part]) > 3 and list(itertools.chain(*parts)) == expected
    with httpx.stream("POST", app.url + GENERATE, json=body(3, 2000, stream=True), timeout=60) as answer:
        next(answer.iter_lines())
    end = time.monotonic() + 20
    while httpx.get(app.url + "/inference/v1/state").json()["running"]:
        assert time.monotonic() < end, "the request of a client that has left still runs"
        time.sleep(0.2)


async def _load(app: Application, over: asyncio.Event, replies: list[tuple[int, httpx.Response]]) -> None:
    """Clients that send one request after the other."""

    async def work(client: httpx.AsyncClient, number: int) -> None:
        while not over.is_set():
            replies.append((number, await client.post(GENERATE, json=body(number, 60))))

    async with httpx.AsyncClient(base_url=app.url, timeout=120) as client:
        await asyncio.gather(*(work(client, number) for number in range(CLIENTS)))


def test_replicas_follow_the_load_and_no_request_is_lost(app: Application) -> None:
    expected = [app.post(GENERATE, body(number, 60)).json()["choices"] for number in range(CLIENTS)]
    replies: list[tuple[int, httpx.Response]] = []

    async def scene() -> None:
        over = asyncio.Event()
        loading = asyncio.create_task(_load(app, over, replies))
        try:
            await asyncio.to_thread(app.until, 3, PATIENCE)
            await _aborts_reach_every_replica(app)
        finally:
            over.set()
        await loading

    assert app.replicas() == 1
    asyncio.run(scene())
    assert len(replies) > CLIENTS
    for number, reply in replies:
        assert reply.status_code == 200 and reply.json()["choices"] == expected[number], reply.text
    app.until(1, PATIENCE)
    assert app.post(GENERATE, body(0, 60)).json()["choices"] == expected[0]


async def _aborts_reach_every_replica(app: Application) -> None:
    """Requests that the proxy spreads over the replicas are all aborted by one call."""
    ids = [f"long-{number}" for number in range(6)]
    async with httpx.AsyncClient(base_url=app.url, timeout=120) as client:
        asking = [asyncio.create_task(client.post(GENERATE, json=body(1, 1900, request_id=name))) for name in ids]
        left = set(ids)
        while left:
            answer = await client.post("/abort_requests", json={"request_ids": sorted(left)})
            assert answer.status_code == 200, answer.text
            assert not any(task.done() and task.result().status_code != 200 for task in asking)
            left -= {name for name, result in answer.json()["results"].items() if result == "aborted"}
        for reply in await asyncio.gather(*asking):
            assert reply.json()["choices"][0]["finish_reason"] == "abort", reply.text
