"""Rollouts that fill their pool delay no other call (rl-faults F2); and which proxies are used (E6).

The server is a socket of this process that never answers what generates, so the pools are real.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import pytest

from tests.rl.distribution import rl

pools = importlib.import_module(f"{rl.__name__}.pools")
GENERATE = "/inference/v1/generate"
CONNECTIONS, ROLLOUTS = 2, 5
SECONDS = 60.0  # a call that waits for rollouts never ends
GENERATING = {"generate", "score", "score_candidates", "stream"}
VERBS = sorted(
    name
    for name, method in inspect.getmembers(rl.AsyncClient, inspect.isfunction)
    if not name.startswith("_") and name not in GENERATING | {"close"}
)
ARGUMENTS: dict[str, Any] = {  # of a verb's parameters, by name, where they have no default
    "group_id": "g",
    "path": "/resume",
    "method": "m",
    "name": "a",
    "backend": "gloo",
    "address": "127.0.0.1",
    "port": 0,
    "version": "7",
    "directory": "d",
    "session_id": "s",
    "metadata": {"reward": 1.0},
}
REPLY = json.dumps({"weight_version": "1", "epoch": 1, "config": {}, "data": [], "aborted": 1, "results": []})
OPTIONS = {"abort": {"group_id": "g"}, "join": {"timeout": 0.2}}
SILENT = {"leave"}  # without a process group it sends nothing


class Silent:
    """A server that answers whatever does not generate, at once, with the same object."""

    def __init__(self) -> None:
        self.waiting = 0
        self.paths: list[str] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                if "content-length: " in head:
                    await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
                elif "transfer-encoding" in head:
                    await reader.readuntil(b"\r\n0\r\n\r\n")
                path = head.split()[1]
                if path == GENERATE:
                    self.waiting += 1
                    continue
                self.paths.append(path)
                writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(REPLY)}\r\n\r\n{REPLY}".encode())
        writer.close()

    @asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        """The address of it, around the block."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()
        await asyncio.wait(self._tasks)

    @asynccontextmanager
    async def full(self) -> AsyncIterator[rl.AsyncClient]:
        """A client of it with more rollouts than connections."""
        async with self.served() as url, rl.AsyncClient(url, connections=CONNECTIONS) as client:
            rollouts = [asyncio.create_task(client.generate([[1]])) for _ in range(ROLLOUTS)]
            while self.waiting < CONNECTIONS:
                await asyncio.sleep(0.001)
            yield client
            assert not any(task.done() for task in rollouts) and self.waiting == CONNECTIONS
            for task in rollouts:
                task.cancel()
            await asyncio.wait(rollouts)


def weights() -> Any:
    with suppress(ImportError):
        return {"w": importlib.import_module("torch").zeros(1)}
    return {}


async def call(client: rl.AsyncClient, verb: str) -> None:
    method = getattr(client, verb)
    needed = [
        name
        for name, parameter in inspect.signature(method).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    tensors = dict.fromkeys(("weights", "tensors"), weights()) | {"adapter": ({}, weights())}
    arguments = [tensors[name] if name in tensors else ARGUMENTS[name] for name in needed]
    if verb == "paused":
        async with method():
            return
    if verb == "sessions":
        async for _ in method():
            return
    await method(*arguments, **OPTIONS.get(verb, {}))


@pytest.mark.parametrize("verb", VERBS)
def test_a_call_does_not_wait_for_rollouts(verb: str) -> None:
    """Whatever its reply is worth, each call is sent and answered while no rollout ends."""

    async def scene() -> None:
        server = Silent()
        async with server.full() as client:
            try:
                await asyncio.wait_for(call(client, verb), SECONDS)
            except rl.TorchMissing:
                return
            except (rl.WeightsError, KeyError, ValueError) as error:
                assert not isinstance(error, TimeoutError)
            assert server.paths or verb in SILENT, "nothing was sent"

    asyncio.run(scene())


def test_a_lease_is_extended_while_rollouts_fill_the_pool() -> None:
    async def scene() -> list[str]:
        server = Silent()
        async with server.full() as client, asyncio.timeout(SECONDS), client.paused(lease=0.02):
            while server.paths.count("/extend_pause") < 3:
                await asyncio.sleep(0.001)
        return server.paths

    paths = asyncio.run(scene())
    assert paths[0] == "/pause" and paths[-1] == "/resume"


PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the environment's proxies, and no others."""

    def set_to(**variables: str) -> None:
        for name in PROXIES:
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.lower(), raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    set_to()
    return set_to


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "a.localhost",
        "127.0.0.1",
        "127.8.0.1",
        "[::1]",
        "0.0.0.0",
        "[::]",
        "[::ffff:127.0.0.1]",
        "LOCALHOST",
    ],
)
def test_this_machine_is_never_reached_by_a_proxy(host: str, environment: Callable[..., None]) -> None:
    for proxy in ("http://127.0.0.1:9", "socks5://127.0.0.1:9"):  # socksio is not installed
        environment(HTTP_PROXY=proxy, HTTPS_PROXY=proxy, ALL_PROXY=proxy)
        for scheme in ("http", "https"):
            assert pools.proxy_of(f"{scheme}://{host}:8000") is None
        rl.Client(f"http://{host}:8000").close()


def test_other_machines_are_reached_as_the_environment_says(environment: Callable[..., None]) -> None:
    environment(HTTP_PROXY="proxy:3128", ALL_PROXY="socks5://other:1", NO_PROXY="near.example,10.0.0.1")
    assert pools.proxy_of("http://far.example:8000") == "http://proxy:3128"
    assert pools.proxy_of("https://far.example") == "socks5://other:1"
    for near in ("http://near.example:8000", "http://a.near.example", "http://10.0.0.1"):
        assert pools.proxy_of(near) is None
    environment()
    assert pools.proxy_of("http://far.example:8000") is None


def test_a_client_uses_the_proxy_unless_told_not_to(environment: Callable[..., None]) -> None:
    async def scene() -> None:
        proxy = Silent()
        async with proxy.served() as address:
            environment(HTTP_PROXY=address)
            async with rl.AsyncClient("http://server.invalid:8000") as client:
                await client.get("/health")
            assert proxy.paths == ["http://server.invalid:8000/health"]
            async with rl.AsyncClient("http://server.invalid:8000", trust_env=False) as client:
                with pytest.raises(httpx.ConnectError):
                    await client.get("/health")

    asyncio.run(scene())


def test_connections_notice_that_the_other_machine_has_gone() -> None:
    async def scene() -> None:
        server = Silent()
        async with server.served() as url, rl.AsyncClient(url) as client:
            for pool in (client._connection.control, client._connection.rollouts):
                response = await pool.get("/health")
                connected = response.extensions["network_stream"].get_extra_info("socket")
                assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert pool.timeout.connect and pool.timeout.read is None

    asyncio.run(scene())


def test_a_server_with_tls_is_verified() -> None:
    context = pools.certificates("https://far.example", trust_env=True)
    assert context.verify_mode.name == "CERT_REQUIRED" and context.check_hostname and context.get_ca_certs()
