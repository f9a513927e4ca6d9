"""An engine that is killed or hangs is replaced as often as may be; by one API process and by several."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.adapters import write_adapter
from tests.e2e.server import Server
from tests.e2e.test_api_servers import in_flight, via
from tests.e2e.test_rl import variant
from tests.waiting import PATIENCE, until
from tokserve.checkpoint import DEMO_DIR

GENERATE = "/inference/v1/generate"
FLAGS = ("--tokens-only", "--max-num-seqs", "4", "--restart-engine", "2", "--step-timeout", "3")
LONG: dict[str, Any] = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 1900, "ignore_eos": True, "n": 200}}


def directories(engine: psutil.Process) -> set[Path]:
    return {Path(c.laddr).parent for c in engine.net_connections("unix") if "engine" in str(c.laddr)}


def status(server: Server) -> str:
    answer = server.get("/ready")
    state: str = answer.json()["status"]
    assert answer.status_code == (200 if state == "ready" else 503)
    return state


def replaced(server: Server) -> int:
    """How often another engine has taken the place of one."""
    return sum("another engine serves" in line or "another engine is there" in line for line in server.log)


async def lost(url: str, strike: Callable[[], object]) -> tuple[httpx.Response, str]:
    """The replies to a request and a stream whose engine is killed."""
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        request = asyncio.create_task(client.post(GENERATE, json=LONG))
        text = []
        async with client.stream("POST", GENERATE, json=LONG | {"stream": True}) as stream:
            async for line in stream.aiter_lines():
                if not text:
                    strike()
                text.append(line)
        return await request, "\n".join(text)


def check_lost(reply: httpx.Response, stream: str) -> None:
    """Both errors allow the request to be sent again."""
    assert reply.status_code == 503 and reply.json()["error"]["code"] == "engine_restarting"
    assert int(reply.headers["retry-after"]) >= 1
    assert '"code":"engine_restarting"' in stream and stream.rstrip().endswith("data: [DONE]")


@pytest.mark.slow
def test_an_engine_that_is_killed_or_hangs_is_replaced_with_its_last_weights_and_else_noticed(tmp_path: Path) -> None:
    with Server("demo", *FLAGS) as server:
        pushed = {"weight_dir": str(variant(tmp_path, 1)), "weight_version": "pushed"}
        assert server.post("/update_weights", pushed).status_code == 200
        before = server.generate([5, 20, 31], max_tokens=9, seed=3, logprobs=1, ignore_eos=True)
        engine = server.engine()
        left = directories(engine)

        def strike() -> None:
            assert server.post("/pause", {"mode": "keep"}).status_code == 200
            engine.kill()

        check_lost(*asyncio.run(lost(server.url, strike)))
        until(lambda: replaced(server) == 1, server.log)
        assert status(server) == "paused"
        assert server.post("/resume", {}).status_code == 200 and status(server) == "ready"
        second = server.engine()
        left |= directories(second)
        check_lost(*asyncio.run(lost(server.url, second.suspend)))
        until(lambda: status(server) == "ready", server.log)
        third = server.engine()
        assert len({engine.pid, second.pid, third.pid}) == 3 and not second.is_running()
        assert any("had not finished a step" in line for line in server.log)
        assert len(left) == 2 and not [path for path in left if path.exists()]
        after = server.generate([5, 20, 31], max_tokens=9, seed=3, logprobs=1, ignore_eos=True)
        assert after["choices"] == before["choices"]  # with the version that was pushed
        assert server.get("/inference/v1/state").json()["epoch"] == 1
        assert server.get("/health?deep=1").status_code == 200
        third.suspend()  # two restarts were allowed
        try:
            until(lambda: server.get("/health").status_code == 503, server.log)
            assert server.get("/health").json()["error"]["code"] == "engine_hung" and status(server) == "hung"
        finally:
            third.resume()
        until(lambda: server.get("/health").status_code == 200 and status(server) == "ready", server.log)
        left = directories(third)
        server.process.kill()
        server.process.wait()
        third.wait(120)
        assert left and not [path for path in left if path.exists()]


def push(client: httpx.Client, weights: Path, version: str) -> int:
    """A whole update by HTTP; the epoch."""
    assert client.post("/start_weight_update").status_code == 200
    body, kind = (weights / "model.safetensors").read_bytes(), {"Content-Type": "application/octet-stream"}
    assert client.post("/update_weights", content=body, headers=kind).status_code == 200
    done = client.post("/finish_weight_update", json={"weight_version": version})
    assert done.status_code == 200, done.text
    return int(done.json()["epoch"])


@pytest.mark.slow
@pytest.mark.parametrize("apis", [1, 2])
def test_an_engine_that_slept_sleeps_on_and_pushed_weights_are_missed(tmp_path: Path, apis: int) -> None:
    flags = ("--kv-cache-memory-bytes", "256M", "--restart-engine", "2", "--api-server-count", str(apis))
    fixed = {"token_ids": [5, 20, 31], "sampling_params": {"max_tokens": 9, "seed": 3, "logprobs": 1}}
    pushed = variant(tmp_path, 1)
    with Server("demo", "--tokens-only", *flags) as server, httpx.Client(base_url=server.url, timeout=120) as client:

        def kill(state: str) -> None:
            before = replaced(server)
            server.engine().kill()
            until(lambda: replaced(server) > before, server.log)
            until(lambda: status(server) == state, server.log)

        assert client.post("/sleep?level=1").status_code == 200
        kill("sleeping")
        assert client.get("/is_sleeping").json() == {"is_sleeping": True}
        waiting = client.build_request("POST", GENERATE, json=fixed | {"queue_timeout_ms": 50})
        assert client.send(waiting).json()["choices"][0]["finish_reason"] == "deadline"
        assert push(client, pushed, "step-119") == 1
        assert client.post("/wake_up").status_code == 200 and status(server) == "ready"
        assert push(client, pushed, "step-120") == 2
        expected = client.post(GENERATE, json=fixed).json()["choices"]
        assert expected[0]["weight_versions"][0]["version"] == "step-120"
        kill("quarantined")
        refused = client.post(GENERATE, json=fixed)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "quarantined"
        assert "step-120" in refused.json()["error"]["message"]
        state = client.get("/inference/v1/state").json()
        assert (state["state"], state["weight_version"], state["epoch"]) == ("quarantined", "0", 3)
        assert "step-120" in state["reason"] and client.get("/health").status_code == 200
        assert client.get("/server_info").json()["engine"]["epoch"] == 3
        assert push(client, pushed, "step-120") == 4
        assert client.post(GENERATE, json=fixed).json()["choices"] == expected
        assert client.get("/server_info").json()["engine"]["weight_version"] == "step-120"


@pytest.mark.slow
def test_an_adapter_of_the_start_that_is_gone_fails_its_requests_only(tmp_path: Path) -> None:
    paths = {name: write_adapter(tmp_path / name, DEMO_DIR) for name in ("here", "gone")}
    modules = ("--enable-lora", "--lora-modules", *(f"{name}={path}" for name, path in paths.items()))
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3, "seed": 1, "ignore_eos": True}}
    with (
        Server("demo", "--dtype", "float32", *FLAGS, *modules) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
    ):
        expected = [client.post(GENERATE, json=body | {"model": name}).json()["choices"] for name in paths]
        paths["gone"].rename(tmp_path / "elsewhere")
        server.engine().kill()
        until(lambda: replaced(server) == 1, server.log)
        until(lambda: status(server) == "ready", server.log)
        assert any("adapter gone is not there" in line for line in server.log)
        served = client.post(GENERATE, json=body | {"model": "here"})
        assert served.json()["choices"] == expected[0]
        failed = client.post(GENERATE, json=body | {"model": "gone"})
        assert "'gone' could not be loaded again" in failed.text, (failed.status_code, failed.text)
        (tmp_path / "elsewhere").rename(paths["gone"])
        assert client.post(GENERATE, json=body | {"model": "gone"}).json()["choices"] == expected[1]


@pytest.mark.slow
def test_the_number_of_restarts_is_limited() -> None:
    with Server("demo", *FLAGS) as server:
        for count in (1, 2):
            server.engine().kill()
            until(lambda count=count: replaced(server) == count, server.log)  # type: ignore[misc]
        last = server.engine()
        left = directories(last)
        last.kill()
        until(lambda: status(server) == "dead", server.log)
        assert server.get("/health").json()["error"]["code"] == "engine_dead"
        assert server.process.wait(PATIENCE) == 1
        assert left and not [path for path in left if path.exists()]


@pytest.mark.slow
def test_several_api_processes_go_on_with_the_next_engine() -> None:
    with Server("demo", "--api-server-count", "2", *FLAGS, "--max-queued-requests", "600") as server:
        apis, engine = server.api_processes(), server.engine()
        long = LONG | {"request_id": "a"}
        with via(server, 0) as first, via(server, 1) as second, in_flight(server, (0, long)) as (lost,):
            engine.kill()
            answer = lost.result(PATIENCE)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_restarting"
            for client in (first, second):
                until(lambda client=client: client.get("/ready").status_code == 200, server.log)  # type: ignore[misc]
                body = {"token_ids": [5], "sampling_params": {"max_tokens": 3, "ignore_eos": True}}
                assert client.post(GENERATE, json=body).status_code == 200
        assert server.api_processes() == apis and server.engine() != engine
        apis[0].kill()  # the next engine knows of its end as the first would have
        until(lambda: any("API process 0 serves again" in line for line in server.log), server.log)
        server.engine().kill()
        apis[1].kill()  # both at once
        until(lambda: replaced(server) == 2, server.log)
        until(lambda: any("API process 1 serves again" in line for line in server.log), server.log)
        for index in (0, 1):
            with via(server, index) as client:
                until(lambda client=client: client.get("/ready").status_code == 200, server.log)  # type: ignore[misc]
                assert client.post(GENERATE, json={"token_ids": [5]}).status_code == 200
        left = [server.engine(), *server.api_processes()]
        directory = directories(left[0])
        left[0].kill()  # one restart more than allowed
        assert server.process.wait(PATIENCE) == 1
        assert psutil.wait_procs(left, PATIENCE)[1] == [] and not [path for path in directory if path.exists()]


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_a_server_whose_engine_hangs_can_be_stopped(signals: int) -> None:
    with Server("demo", *FLAGS, "--shutdown-timeout", "1") as server:
        engine = server.engine()
        with httpx.stream("POST", server.url + GENERATE, json=LONG | {"stream": True}, timeout=PATIENCE) as stream:
            lines = stream.iter_lines()  # without a name it would be collected, which ends the stream
            assert next(lines).startswith("data:")
            engine.suspend()
            for _ in range(signals):
                server.process.send_signal(signal.SIGTERM)
                until(lambda: any("serve: stopping" in line for line in server.log), server.log)
            assert server.process.wait(PATIENCE) == 0
        assert not engine.is_running()
