"""Failures: the engine is killed, the server gets a signal, the command line is wrong, the port is in use."""

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.server import Server
from tests.waiting import PATIENCE, until

# many choices: a single one of this model is done in well under a second
LONG: dict[str, Any] = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 1900, "ignore_eos": True, "n": 64}}
SHORT = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 30, "ignore_eos": True, "n": 4}}


def test_kill_9_of_the_engine() -> None:
    with Server("demo") as server:
        url = server.url
        engine = server.engine()
        left = {Path(c.laddr).parent for c in engine.net_connections("unix") if "engine" in str(c.laddr)}

        async def scene() -> tuple[httpx.Response, str, httpx.Response]:
            async with httpx.AsyncClient(base_url=url, timeout=600) as client:
                full = asyncio.create_task(client.post("/inference/v1/generate", json=LONG))
                text = []
                async with client.stream("POST", "/inference/v1/generate", json=LONG | {"stream": True}) as stream:
                    async for line in stream.aiter_lines():
                        if not text:
                            engine.kill()
                        text.append(line)
                return await full, "\n".join(text), await client.get("/health")

        full, stream, health = asyncio.run(scene())
        assert full.status_code == 503 and full.json()["error"]["code"] == "engine_dead"
        assert '"error"' in stream and stream.rstrip().endswith("data: [DONE]")
        assert health.status_code == 503
        assert server.process.wait(120) == 1
        assert left and not [f for f in left if f.exists()]


@pytest.mark.slow
def test_deep_health_does_not_wait_for_a_stopped_engine(demo: Server) -> None:
    engine = demo.engine()
    engine.suspend()
    try:
        answer = demo.get("/health?deep=1")
    finally:
        engine.resume()
    assert answer.status_code == 503 and "has not answered" in answer.json()["error"]["message"]
    assert demo.get("/health?deep=1").status_code == 200


def test_kill_9_of_the_server_takes_the_engine_along(tmp_path: Path) -> None:
    uds = tmp_path / "server.sock"
    with Server("demo", "--uds", str(uds)) as server:
        engine = server.engine()
        files = {Path(c.laddr).parent for c in engine.net_connections("unix") if "engine" in str(c.laddr)}
        assert files and uds.stat().st_mode & 0o777 == 0o600 and {f.stat().st_mode & 0o777 for f in files} == {0o700}
        server.process.kill()
        server.process.wait()
        engine.wait(60)
        assert not [f for f in [uds, *files] if f.exists()], "a socket was left behind"


def test_sigterm_drains_exits_0_and_leaves_nothing_behind() -> None:
    with Server("demo", "--shutdown-timeout", "600") as server:
        url = server.url
        engine = server.engine()
        files = {Path(c.laddr).parent for c in engine.net_connections("unix") if "engine" in str(c.laddr)}
        assert files

        async def scene() -> tuple[httpx.Response, httpx.Response]:
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
                assert (await client.post("/pause?mode=keep")).status_code == 200  # or all might be over too soon
                in_flight = asyncio.create_task(client.post("/inference/v1/generate", json=SHORT))
                await asyncio.to_thread(until, lambda: server.metric("tokserve:num_requests_waiting"))
                server.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(until, lambda: any("stopping" in line for line in server.log))
                refused = await client.post("/inference/v1/generate", json=SHORT)
                assert not in_flight.done() and (await client.post("/resume")).status_code == 200
                return await in_flight, refused

        done, refused = asyncio.run(scene())
        assert done.status_code == 200 and [len(c["token_ids"]) for c in done.json()["choices"]] == [30] * 4
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert server.process.wait(120) == 0
        assert not psutil.pid_exists(engine.pid)
        assert not [f for f in files if f.exists()]


@pytest.mark.slow
def test_sigterm_aborts_what_does_not_finish_in_time() -> None:
    with Server("demo", "--shutdown-timeout", "0.2") as server:
        url = server.url

        async def scene() -> httpx.Response:
            async with httpx.AsyncClient(base_url=url, timeout=600) as client:
                running = asyncio.create_task(client.post("/inference/v1/generate", json=LONG))
                await asyncio.to_thread(until, lambda: server.metric("tokserve:generation_tokens_total"))
                server.process.send_signal(signal.SIGTERM)
                return await running

        answer = asyncio.run(scene())
        choice = answer.json()["choices"][0]
        assert answer.status_code == 200
        assert choice["finish_reason"] == "abort" and choice["stop_detail"]["kind"] == "shutdown"
        assert choice["token_ids"]
        assert server.process.wait(120) == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_while_the_engine_loads(number: signal.Signals) -> None:
    server = Server("demo")
    while not any("loading" in line for line in server.log):
        assert server.process.poll() is None
        time.sleep(0.01)
    engine = server.engine()
    assert server.stop(number, seconds=10) == 0
    engine.wait(60)
    assert not any("serving on" in line or "Traceback" in line for line in server.log), server.log


@pytest.mark.parametrize("module", ["tokserve.cli.main", "msgspec", "zmq"])
def test_ctrl_c_while_it_imports_prints_nothing(tmp_path: Path, module: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    done = run("serve", "demo", "--port", "0", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == -signal.SIGINT and not done.stdout and not done.stderr


@pytest.mark.slow
def test_a_second_sigint_hangs_up_on_a_client_that_does_not_read() -> None:
    body = json.dumps({**LONG, "stream": True, "sampling_params": {**LONG["sampling_params"], "logprobs": 20}}).encode()
    with Server("demo") as server, socket.socket() as client:
        url = httpx.URL(server.url)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((url.host, url.port))
        client.sendall(
            b"POST /inference/v1/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        until(lambda: server.metric("tokserve:generation_tokens_total") >= 2000)
        server.process.send_signal(signal.SIGINT)
        until(lambda: any("stopping" in line for line in server.log))
        assert server.stop(signal.SIGINT) == 0
        assert not any("ERROR" in line or "Traceback" in line for line in server.log), server.log


@pytest.mark.slow
def test_without_the_compiled_extension_it_serves_on_torch_and_warns_once(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['tokserve._C'] = None\n")
    with Server("demo", env={"PYTHONPATH": str(tmp_path)}) as server:
        assert sum("torch references" in line for line in server.log) == 1, server.log
        assert server.get("/server_info").json()["facts"]["kernels"] == "none"
        prompt, params = list(range(5, 40)), {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        replies = [server.generate(prompt, **params) for _ in range(2)]  # the second from the prefix cache
        assert len(replies[0]["choices"][0]["token_ids"]) == 8
        assert replies[0]["choices"] == replies[1]["choices"]


@pytest.mark.slow
def test_invalid_tls_files_are_refused(tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    done = run("serve", "demo", "--port", "0", "--ssl-keyfile", str(junk), "--ssl-certfile", str(junk))
    assert done.returncode == 1 and "tokserve: error: ssl_certfile" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_without_file_descriptors_it_hangs_up_and_serves_again_when_there_are_some() -> None:
    with Server("demo", "--tokens-only") as server, ExitStack() as clients:
        limit = psutil.Process(server.process.pid).num_fds() + 30
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (limit, limit))
        url = httpx.URL(server.url)
        for _ in range(90):
            last = clients.enter_context(socket.create_connection((url.host, url.port), timeout=600))
        with suppress(ConnectionResetError):
            assert last.recv(1) == b"", "it should hang up on those that it has no descriptor for"
        clients.close()
        until(lambda: is_healthy(server))  # it has seen the others go
        assert len(server.generate([5, 6], max_tokens=4, ignore_eos=True)["choices"][0]["token_ids"]) == 4
        assert not any("Traceback" in line for line in server.log), server.log


@pytest.mark.slow
@pytest.mark.second_try(
    "it measures processor time of two seconds, into which a metrics scrape or a late garbage collection may fall"
)
def test_an_idle_server_uses_no_cpu(demo: Server) -> None:
    demo.generate([5, 6, 7], max_tokens=4)
    time.sleep(1.0)
    processes = [demo.engine(), psutil.Process(demo.process.pid)]
    before = [sum(p.cpu_times()[:2]) for p in processes]
    time.sleep(2.0)
    spent = [sum(p.cpu_times()[:2]) - b for p, b in zip(processes, before, strict=True)]
    assert max(spent) < 0.2, spent


def is_healthy(server: Server) -> bool:
    try:
        return server.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def run(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokserve", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, **(env or {})})


def test_a_port_in_use_is_an_error_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("serve", "demo", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert "tokserve: error: cannot listen on 127.0.0.1:" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["serve", "/no/such/model"], "neither a directory"),
        (["serve", "demo", "--max-model-len", "0"], "max_model_len"),
        pytest.param(
            ["serve", "demo", "--max-model-len", "1000000"], "max_position_embeddings", marks=pytest.mark.slow
        ),
        pytest.param(["serve", "demo", "--ops", '{"no_such_op": "torch"}'], "no_such_op", marks=pytest.mark.slow),
        pytest.param(
            ["serve", "demo", "--kv-cache-memory-bytes", "1K"], "--kv-cache-memory-bytes", marks=pytest.mark.slow
        ),
        pytest.param(
            ["serve", "demo", "--hf-overrides", '{"architectures": ["MambaForCausalLM"]}'],
            "Lfm2ForCausalLM",
            marks=pytest.mark.slow,
        ),
        pytest.param(["serve", "demo", "--hf-overrides", '{"hidden_size": 64}'], "shape", marks=pytest.mark.slow),
    ],
)
def test_a_failed_start_has_a_reason_of_one_line(args: list[str], message: str) -> None:
    done = run(*args, "--port", "0")
    errors = [line for line in done.stderr.splitlines() if line.startswith("tokserve: error:")]
    assert done.returncode == 1, done.stderr
    assert errors and message in errors[0], done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_bad_flags_and_help() -> None:
    assert run("serve", "demo", "--no-such-flag").returncode == 2
    assert run().returncode == 2
    shown = run("serve", "--help=all")
    assert shown.returncode == 0
    for flag in ("--max-model-len", "--tokens-only", "--enable-prefix-caching", "--no-enable-prefix-caching", "--uds"):
        assert flag in shown.stdout
