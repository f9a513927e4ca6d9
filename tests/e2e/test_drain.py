"""Sequences of calls with which trainers drain a server and renew its weights from disk, on a real server."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server
from tests.waiting import until
from tokserve.checkpoint import DEMO_DIR

pytestmark = pytest.mark.slow

PROMPT = {
    "token_ids": [5, 6, 7],
    "sampling_params": {"temperature": 0, "max_tokens": 6, "logprobs": 0, "ignore_eos": True},
}
LONG = {"token_ids": [5, 6, 7], "sampling_params": {"temperature": 1, "max_tokens": 1900, "ignore_eos": True, "n": 2}}


@pytest.fixture(scope="module")
def allowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def server(allowed: Path) -> Iterator[Server]:
    with Server("demo", "--tokens-only", "--allowed-weight-dirs", str(allowed)) as running:
        yield running


def choices(server: Server) -> Any:
    reply = server.post("/inference/v1/generate", PROMPT).json()
    return [{key: choice[key] for key in ("token_ids", "logprobs")} for choice in reply["choices"]]


def test_a_server_under_load_is_drained(server: Server) -> None:
    """vime: abort everything, then poll until nothing is in flight."""

    def call() -> None:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            replies.append(client.post("/inference/v1/generate", json=LONG).json())

    replies: list[dict[str, Any]] = []
    assert server.post("/pause?mode=keep", {}).status_code == 200  # else a fast engine ends requests before the abort
    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    until(lambda: server.get("/load").json()["server_load"] == len(threads) or replies, replies)
    until(lambda: server.get("/load").json()["waiting"] == 2 * len(threads) or replies, replies)

    def in_flight() -> int:
        (engine,) = server.get("/load?include_inflight=true&inflight_limit=5").json()["inflight"]
        assert all(len(queue["requests"]) <= 5 for queue in engine["queues"])
        return sum(queue["num_requests"] for queue in engine["queues"])

    assert in_flight() == 2 * len(threads)
    aborted = server.post("/abort_requests", {}).json()
    assert aborted["status"] == "aborted" and aborted["aborted"] == 6
    assert in_flight() == 0, "acknowledged when all have ended"
    for thread in threads:
        thread.join()
    assert server.post("/resume", {}).status_code == 200
    assert all(one["finish_reason"] == "abort" for reply in replies for one in reply["choices"])


def test_nemo_rls_sequence_reloads_weights_and_survives_a_failure(server: Server, allowed: Path) -> None:
    before = choices(server)
    version = server.get("/inference/v1/state").json()["weight_version"]
    copy = allowed / "export"
    shutil.copytree(DEMO_DIR, copy)

    def reload(**kwargs: str) -> httpx.Response:
        assert server.post("/pause?mode=keep&clear_cache=true", {}).status_code == 200
        done = server.post("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
        assert server.post("/reset_prefix_cache", {}).status_code == 200
        assert server.post("/resume", {}).status_code == 200
        return done

    assert reload(weights_path=str(copy)).json() == {"results": [None]}
    assert choices(server) == before
    assert server.get("/inference/v1/state").json()["weight_version"] != version
    (weights,) = copy.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    failed = reload(weights_path=str(copy))
    assert failed.status_code == 400 and "error" in failed.json()
    assert choices(server) == before, "the weights that served still serve"
    assert reload(weights_path="/usr").status_code in (400, 403)
    assert reload().json() == {"results": [None]}, "the served directory may be read"
    assert choices(server) == before


def test_after_sleep_at_level_2_the_served_directory_is_reloaded(server: Server) -> None:
    before = choices(server)
    assert server.post("/sleep?level=2", {}).status_code == 200
    assert server.post("/wake_up?tags=weights", {}).status_code == 200
    assert server.post("/collective_rpc", {"method": "reload_weights"}).json() == {"results": [None]}
    assert server.post("/wake_up?tags=kv_cache", {}).status_code == 200
    assert server.post("/reset_prefix_cache", {}).status_code == 200
    assert server.post("/wake_up", {}).status_code == 200
    assert choices(server) == before
