"""The states that probes of a real server report, from before its start to its drain."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server
from tests.e2e.test_restart import until

GENERATE = "/inference/v1/generate"
SHORT: dict[str, Any] = {"token_ids": [5], "sampling_params": {"max_tokens": 2, "ignore_eos": True}}
LONG: dict[str, Any] = {"token_ids": [5], "sampling_params": {"max_tokens": 1900, "ignore_eos": True, "n": 200}}


def gate(directory: Path) -> tuple[Path, dict[str, str]]:
    """A pipe, and an environment in which every engine, before anything else, reads it to its end."""
    path = directory / "gate"
    os.mkfifo(path)
    (directory / "sitecustomize.py").write_text(
        f"import sys\nif 'tokserve.engine.process' in sys.orig_argv:\n    open({str(path)!r}).read()\n"
    )
    return path, {"PYTHONPATH": str(directory)}


def listens(uds: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe, suppress(ConnectionRefusedError, FileNotFoundError):
        probe.connect(str(uds))
        return True
    return False


def check(client: httpx.Client, state: str, health: int = 200) -> None:
    """What the probes and the metrics say."""
    answer = client.get("/ready")
    assert (answer.json(), answer.status_code) == ({"status": state}, 200 if state in ("ready", "updating") else 503)
    assert client.get("/health").status_code == health
    metrics = client.get("/metrics")
    assert metrics.status_code == 200 and "tokserve:num_requests_running" in metrics.text
    assert client.get("/version").status_code == 200


@pytest.mark.slow
def test_the_probes_report_every_state(tmp_path: Path) -> None:
    path, env = gate(tmp_path)
    uds = tmp_path / "s"
    flags = ("--tokens-only", "--restart-engine", "1", "--weight-staging", "in_place", "--uds", str(uds))
    server = Server("demo", *flags, env=env)
    client = httpx.Client(transport=httpx.HTTPTransport(uds=str(uds)), base_url="http://tokserve", timeout=120)

    def post(url: str, body: Any = None) -> httpx.Response:
        answer = client.post(url, json=body)
        assert answer.status_code == 200, answer.text
        return answer

    def reads(status: str) -> Callable[[], bool]:
        return lambda: client.get("/ready").json() == {"status": status}

    pool = ThreadPoolExecutor(2)
    try:
        with path.open("w"):  # the engine reads: it has started, and waits
            assert uds.exists() and not listens(uds)
        _ = server.url
        check(client, "ready")
        for begin, state, end in (
            ("/pause", "paused", "/resume"),
            ("/sleep?level=1", "sleeping", "/wake_up"),
        ):
            post(begin)
            check(client, state)
            post(end)
            check(client, "ready")
        running = pool.submit(client.post, GENERATE, json=LONG)
        until(lambda: client.get("/load").json()["running"] > 0, server.log)
        pausing = pool.submit(client.post, "/pause?mode=wait")
        until(reads("pausing"), server.log)
        check(client, "pausing")
        post("/abort_requests", {"all": True})
        assert running.result().status_code == pausing.result().status_code == 200
        check(client, "paused")
        post("/resume")
        post("/start_weight_update", {})
        check(client, "updating")
        failed = client.post("/finish_weight_update", json={})
        assert failed.status_code == 400, failed.text
        check(client, "quarantined")
        refused = client.post(GENERATE, json=SHORT)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "quarantined"
        server.engine().kill()
        until(reads("restarting"), server.log)
        check(client, "restarting", health=503)
        refused = client.post(GENERATE, json=SHORT)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_restarting"
        with path.open("w"):
            check(client, "restarting", health=503)
        until(reads("ready"), server.log)
        assert post(GENERATE, SHORT).json()["choices"]
        running = pool.submit(client.post, GENERATE, json=LONG)
        until(lambda: client.get("/load").json()["running"] > 0, server.log)
        server.process.send_signal(signal.SIGHUP)
        until(reads("draining"), server.log)
        check(client, "draining")
        server.process.send_signal(signal.SIGTERM)
        assert running.result().json()["choices"][0]["stop_detail"]["kind"] == "shutdown"
        assert server.process.wait(60) == 0
    finally:
        server.process.kill()
        server.stop()
        pool.shutdown()
        client.close()


@pytest.mark.slow
def test_a_full_disk_of_the_log_stops_no_request(tmp_path: Path) -> None:
    uds = tmp_path / "s"
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "tokserve", "serve", "demo", "--tokens-only", "--uds", str(uds)]
        process = subprocess.Popen(command, stdout=full, stderr=full)
    try:
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(uds)), base_url="http://tokserve", timeout=120
        ) as client:
            until(lambda: listens(uds), [])
            assert client.post(GENERATE, json=SHORT).status_code == 200
            assert client.post(GENERATE, json={}).status_code == 400
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
