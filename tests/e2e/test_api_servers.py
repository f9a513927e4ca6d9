"""Several API processes in front of one engine: commands to one apply to all, and nothing remains after the end."""

from __future__ import annotations

import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.adapters import write_adapter
from tests.e2e.server import Server
from tests.e2e.test_failures import run
from tests.waiting import until
from tokserve.checkpoint import DEMO_DIR

GENERATE = "/inference/v1/generate"
FLAGS = (
    "--api-server-count",
    "2",
    "--tokens-only",
    "--max-num-seqs",
    "4",
    "--max-queued-requests",
    "600",
    "--enable-lora",
)
PATIENCE = 60.0
LOOP = "tokserve:event_loop_"  # lag and stalls are measured all the time: no two scrapes need show the same


@pytest.fixture(scope="module")
def two() -> Iterator[Server]:
    with Server("demo", *(flag for flag in FLAGS if flag != "--tokens-only")) as server:
        yield server


@pytest.mark.slow
def test_every_api_process_has_the_tokenizer(two: Server) -> None:
    params = {"structured_outputs": {"choice": ["yes", "no"]}, "seed": 1}
    for index in (0, 1):
        with via(two, index) as client:
            answer = client.post(GENERATE, json={"token_ids": [5, 6], "sampling_params": params, "output_mode": "text"})
            assert answer.status_code == 200 and answer.json()["choices"][0]["text"] in ("yes", "no"), answer.text


@pytest.mark.slow
def test_an_adapter_loaded_through_one_process_serves_through_all(two: Server, tmp_path: Path) -> None:
    adapter = {"lora_name": "mine", "lora_path": str(write_adapter(tmp_path, DEMO_DIR, rank=4))}
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 8, "temperature": 0.0}}
    with via(two, 0) as one, via(two, 1) as other:
        for _ in range(3):
            assert one.post("/v1/load_lora_adapter", json=adapter).status_code == 200
            answer = other.post(GENERATE, json=body | {"model": "mine"})
            assert answer.status_code == 200 and answer.json()["model"] == "mine"
            assert "mine" in [model["id"] for model in other.get("/v1/models").json()["data"]]
            assert other.post("/v1/unload_lora_adapter", json={"lora_name": "mine"}).status_code == 200
            removed = one.post(GENERATE, json=body | {"model": "mine"})
            assert removed.status_code == 404 and removed.json()["error"]["code"] == "model_not_found"
        assert one.post(GENERATE, json=body).json()["model"] == "demo"


def body(rid: str, n: int = 400, max_tokens: int = 1900, **fields: Any) -> dict[str, Any]:
    """A request whose 400 choices take minutes with four slots and without drafts: it runs until it is aborted."""
    params = {"max_tokens": max_tokens, "ignore_eos": True, "n": n}
    return {"token_ids": [5, 6, 7], "request_id": rid, "sampling_params": params, "speculate": False} | fields


@contextmanager
def via(server: Server, index: int) -> Iterator[httpx.Client]:
    """A client whose connection is with this API process."""
    for _ in range(300):
        with httpx.Client(base_url=server.url, timeout=120, limits=httpx.Limits(max_connections=1)) as client:
            if client.get("/server_info").json()["api_server"] == index:
                yield client
                return
    raise AssertionError(f"no connection reaches API process {index}")


@contextmanager
def in_flight(server: Server, *requests: tuple[int, dict[str, Any]]) -> Iterator[list[Future[httpx.Response]]]:
    """These requests, each sent through the API process of this index, running or queued; aborted at the end."""
    with ThreadPoolExecutor(len(requests)) as pool:
        futures = [pool.submit(send, server, index, requested) for index, requested in requests]
        try:
            until(lambda: server.get("/load").json()["server_load"] >= len(requests))
            until(lambda: server.get("/load").json()["running"] > 0)
            yield futures
        finally:
            if server.process.poll() is None:
                server.post("/abort_requests", {"all": True})


def send(server: Server, index: int, body: dict[str, Any]) -> httpx.Response:
    with via(server, index) as client:
        return client.post(GENERATE, json=body)


def reasons(answer: httpx.Response) -> set[str]:
    assert answer.status_code == 200, answer.text
    return {choice["finish_reason"] for choice in answer.json()["choices"]}


def abort(server: Server, index: int, request: dict[str, Any]) -> Any:
    with via(server, index) as client:
        return client.post("/abort_requests", json=request).json()


def test_an_abort_reaches_the_process_that_owns_the_request(two: Server) -> None:
    with in_flight(two, (0, body("mine", group_id="g")), (1, body("other", n=100, group_id="g"))) as (aborted, other):
        assert abort(two, 1, {"request_ids": ["generate-tokens-mine", "nobody"]}) == {
            "status": "aborted",
            "aborted": 1,
            "results": {"generate-tokens-mine": "aborted", "nobody": "not_found"},
        }
        assert reasons(aborted.result(PATIENCE)) == {"abort"} and len(aborted.result().json()["choices"]) == 400
        assert abort(two, 1, {"request_ids": ["mine"]})["results"] == {"mine": "finished"}
        assert not other.done()
        assert abort(two, 0, {"group_id": "g"}) == {"status": "aborted", "aborted": 1, "results": {"other": "aborted"}}
        assert reasons(other.result(PATIENCE)) == {"abort"}
    with in_flight(two, (0, body("a")), (1, body("b", n=100))) as both:
        assert abort(two, 1, {"all": True}) == {
            "status": "aborted",
            "aborted": 2,
            "results": {"a": "aborted", "b": "aborted"},
        }
        assert [reasons(future.result(PATIENCE)) for future in both] == [{"abort"}] * 2
    two.wait_idle()


@pytest.mark.slow
def test_an_id_in_flight_is_a_conflict_everywhere_and_so_is_a_full_queue(two: Server) -> None:
    with in_flight(two, (0, body("twin"))):
        for index in (0, 1):
            for stream in (False, True):
                with via(two, index) as client:
                    same = client.post(GENERATE, json=body("twin", n=1, stream=stream))
                    more = client.post(GENERATE, json=body("more", n=300, stream=stream))
                assert same.status_code == 409 and same.json()["error"]["param"] == "request_id"
                assert more.status_code == 429 and more.json()["error"]["code"] == "queue_full"
                assert int(more.headers["retry-after"]) >= 1
        with in_flight(two, (1, body("more", n=204))) as (more_of_it,):
            until(lambda: two.get("/load").json()["server_load"] == 2)  # the first alone is enough for `in_flight`
            assert send(two, 0, body("last", n=300)).status_code == 429
            assert abort(two, 0, {"request_ids": ["last", "more"]})["results"] == {
                "last": "not_found",
                "more": "aborted",
            }
            assert reasons(more_of_it.result(PATIENCE)) == {"abort"}
    two.wait_idle()


@pytest.mark.slow
def test_a_client_that_leaves_one_process_frees_the_engine(two: Server) -> None:
    with via(two, 1) as client, client.stream("POST", GENERATE, json=body("left", stream=True)) as stream:
        assert next(stream.iter_lines()).startswith("data:")
    two.wait_idle()
    assert abort(two, 0, {"request_ids": ["left"]})["results"] == {"left": "finished"}


def shown(server: Server, index: int) -> dict[str, float]:
    with via(server, index) as client:
        lines = [line for line in client.get("/metrics").text.splitlines() if not line.startswith(("#", LOOP))]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@pytest.mark.slow
def test_any_process_shows_the_figures_of_all(two: Server) -> None:
    before = shown(two, 0)
    for index, count in ((0, 1), (1, 2)):
        for number in range(count):
            assert send(two, index, body(f"m{index}{number}", n=2, max_tokens=5)).status_code == 200
    after = shown(two, 0)
    assert after == shown(two, 1)
    grown = {name: after[name] - before[name] for name in after}
    label = '{engine="0",model_name="demo"}'
    assert grown[f"tokserve:generation_tokens_total{label}"] == 30
    assert grown[f"tokserve:request_generation_tokens_sum{label}"] == 30
    assert grown[f"tokserve:e2e_request_latency_seconds_count{label}"] == 6
    assert grown[f"tokserve:request_params_n_count{label}"] == 3
    assert grown['tokserve:request_success_total{engine="0",finished_reason="length",model_name="demo"}'] == 6
    with via(two, 0) as first, via(two, 1) as second:
        for path in ("/v1/models", "/health", "/load", "/version"):
            assert first.get(path).content == second.get(path).content
        assert first.get("/load").json() == {"server_load": 0, "running": 0, "waiting": 0}


@pytest.mark.slow
def test_kill_9_of_an_api_process_ends_its_requests_and_no_others(two: Server) -> None:
    doomed, other = two.api_processes()
    finished = shown(two, 1)['tokserve:request_success_total{engine="0",finished_reason="length",model_name="demo"}']
    with in_flight(two, (0, body("lost")), (1, body("kept", n=8, max_tokens=1000))) as (lost, kept):
        doomed.kill()
        with pytest.raises(httpx.HTTPError):
            lost.result(PATIENCE)
        answer = kept.result(PATIENCE)
        assert reasons(answer) == {"length"} and len(answer.json()["choices"]) == 8
        until(lambda: any("API process 0 serves again" in line for line in two.log))
    assert any("API process 0 was killed by SIGKILL" in line for line in two.log)
    assert other in two.api_processes() and len(two.api_processes()) == 2
    two.wait_idle()
    assert reasons(send(two, 0, body("lost", n=1, max_tokens=3))) == {"length"}
    now = shown(two, 0)
    assert now == shown(two, 1)
    assert now['tokserve:request_success_total{engine="0",finished_reason="length",model_name="demo"}'] == finished + 9


@pytest.mark.slow
def test_kill_9_of_the_supervisor_leaves_nothing() -> None:
    with Server("demo", *FLAGS) as server:
        left = [server.engine(), *server.api_processes()]
        assert len(left) == 3
        directories = {Path(c.laddr).parent for c in left[0].net_connections("unix") if "engine" in str(c.laddr)}
        address = re.sub("http://", "", server.url).split(":")
        with ThreadPoolExecutor(1) as pool:
            lost = pool.submit(send, server, 0, body("lost"))
            until(lambda: server.get("/load").json()["running"] > 0)
            server.process.kill()
            with pytest.raises(httpx.HTTPError):
                lost.result(PATIENCE)
        assert psutil.wait_procs(left, PATIENCE)[1] == []
        assert directories and not [directory for directory in directories if directory.exists()]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address[0], int(address[1])))


@pytest.mark.slow
def test_sigterm_drains_all_processes() -> None:
    with Server("demo", *FLAGS, "--shutdown-timeout", "60") as server:
        left = [server.engine(), *server.api_processes()]
        requests = [(index, body(f"r{index}", n=16, max_tokens=1000)) for index in (0, 1)]
        with via(server, 0) as first, via(server, 1) as second, in_flight(server, *requests) as running:
            server.process.send_signal(signal.SIGTERM)
            until(lambda: sum("may still run for 60 s" in line for line in server.log) == 2)
            refused = [client.post(GENERATE, json=body("late")) for client in (first, second)]
            assert [answer.status_code for answer in refused] == [503, 503]
            assert all(int(answer.headers["retry-after"]) > 0 for answer in refused)
            for future in running:
                answer = future.result(PATIENCE)
                assert [len(c["token_ids"]) for c in answer.json()["choices"]] == [1000] * 16
            assert server.process.wait(PATIENCE) == 0
        assert psutil.wait_procs(left, PATIENCE)[1] == []
        assert not any("ERROR" in line or "Traceback" in line for line in server.log), server.log


@pytest.mark.slow
def test_a_second_signal_aborts_what_runs() -> None:
    with Server("demo", *FLAGS, "--shutdown-timeout", "600") as server:
        with in_flight(server, (0, body("a")), (1, body("b", n=100))) as running:
            server.process.send_signal(signal.SIGINT)
            until(lambda: sum("may still run for 600 s" in line for line in server.log) == 2)
            server.process.send_signal(signal.SIGINT)
            assert [reasons(future.result(PATIENCE)) for future in running] == [{"abort"}] * 2
            assert server.process.wait(PATIENCE) == 0
        assert not any("ERROR" in line or "Traceback" in line for line in server.log), server.log


@pytest.mark.slow
def test_terminating_one_api_process_ends_only_its_requests() -> None:
    with Server("demo", *FLAGS, "--shutdown-timeout", "0") as server:
        with in_flight(server, (0, body("a")), (1, body("b", n=8, max_tokens=500))) as (aborted, other):
            server.api_processes()[0].terminate()
            assert reasons(aborted.result(PATIENCE)) == {"abort"}
            assert reasons(other.result(PATIENCE)) == {"length"}
            until(lambda: any("API process 0 serves again" in line for line in server.log))
        assert server.stop() == 0


def others(server: Server, known: set[int]) -> list[psutil.Process]:
    try:
        return [process for process in server.api_processes() if process.pid not in known]
    except psutil.Error:  # one went while it was looked at
        return []


@pytest.mark.slow
def test_an_api_process_that_is_killed_while_it_starts_is_replaced_too() -> None:
    with Server("demo", *FLAGS) as server:
        first, second = server.api_processes()
        first.kill()
        until(lambda: bool(others(server, {first.pid, second.pid})))
        (third,) = others(server, {first.pid, second.pid})
        third.kill()
        until(lambda: bool(others(server, {first.pid, second.pid, third.pid})))
        for index in (0, 1):
            assert reasons(send(server, index, body("r", n=1, max_tokens=3))) == {"length"}
        assert server.stop() == 0


@pytest.mark.slow
def test_kill_9_of_the_engine_is_reported_by_all_and_ends_the_server() -> None:
    with Server("demo", *FLAGS) as server:
        left = server.api_processes()
        with via(server, 0) as first, via(server, 1) as second, in_flight(server, (0, body("a"))) as (lost,):
            server.engine().kill()
            assert lost.result(PATIENCE).json()["error"]["code"] == "engine_dead"
            for client in (first, second):
                until(lambda client=client: client.get("/health").status_code == 503)  # type: ignore[misc]
            assert server.process.wait(PATIENCE) == 1
        assert psutil.wait_procs(left, PATIENCE)[1] == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_unix_socket_is_shared_and_its_file_goes(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "s.sock"
    with Server("demo", *FLAGS, "--uds", str(path)) as server:
        assert server.url == f"unix:{path}"
        left = [server.engine(), *server.api_processes()]
        seen = set()
        end = time.monotonic() + PATIENCE
        while seen != {0, 1} and time.monotonic() < end:
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x") as client:
                seen.add(client.get("/server_info").json()["api_server"])
                assert client.post(GENERATE, json=body("x", n=1, max_tokens=3)).status_code == 200
        server.process.send_signal(number)
        server.process.wait(PATIENCE)
        assert psutil.wait_procs(left, PATIENCE)[1] == []
        assert not path.exists()


@pytest.mark.slow
def test_failed_starts_of_several_processes_have_a_reason_of_one_line() -> None:
    with Server("demo", "--tokens-only", *FLAGS[:2]) as server:
        taken = run("serve", "demo", *FLAGS[:2], "--port", server.url.rpartition(":")[2])
    broken = run("serve", "demo", *FLAGS[:2], "--port", "0", "--chat-template", "{{")
    unfit = run("serve", "demo", *FLAGS[:2], "--port", "0", "--kv-cache-memory-bytes", "1K")
    for done, message in ((taken, "cannot listen on"), (broken, "template"), (unfit, "--kv-cache-memory-bytes")):
        errors = [line for line in done.stderr.splitlines() if line.startswith("tokserve: error:")]
        assert done.returncode == 1 and len(errors) == 1 and message in errors[0], done.stderr
        assert "Traceback" not in done.stderr
