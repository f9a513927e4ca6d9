"""Clients that send too much or read nothing: they are refused or stalled, and other clients are served."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import psutil
import pytest

from tests import needs
from tests.e2e.server import Server
from tests.e2e.test_soak import more_files, version

pytestmark = pytest.mark.slow

GENERATE = "/inference/v1/generate"
HEAD = b"POST /inference/v1/generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
PROMPT, PARAMS = [5, 20, 31], {"max_tokens": 8, "seed": 3, "logprobs": 1, "ignore_eos": True}
CONNECTIONS = needs.OPEN_FILES - 200


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    with Server("demo", "--tokens-only", "--max-body-mb", "1") as server:
        yield server


def connect(server: Server, **options: int) -> socket.socket:
    url = httpx.URL(server.url)
    sock = socket.socket()
    sock.settimeout(120)
    for name, value in options.items():
        sock.setsockopt(socket.SOL_SOCKET, vars(socket)[name], value)
    sock.connect((url.host, url.port))
    return sock


def reply(sock: socket.socket) -> bytes:
    """A whole reply; the connection stays open."""
    with sock.makefile("rb") as stream:
        head = b"".join(iter(stream.readline, b"\r\n"))
        match = re.search(rb"content-length: (\d+)", head)
        assert match, head
        return head + stream.read(int(match[1]))


def refused(answer: bytes) -> bool:
    return answer.startswith(b"HTTP/1.1 413 ") and b'"code":"body_too_large"' in answer


def test_a_gigabyte_is_refused_by_its_announcement(small: Server) -> None:
    with connect(small) as sock:
        sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (1 << 30))
        assert refused(reply(sock))


def test_a_body_without_a_length_is_refused_as_soon_as_it_is_too_long(small: Server) -> None:
    size, piece = (1 << 20) + 1, 1 << 14
    with connect(small) as sock:
        sock.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for start in range(0, size, piece):
            count = min(piece, size - start)
            sock.sendall(b"%x\r\n" % count + b" " * count + b"\r\n")
        assert refused(reply(sock)), "it did not wait for the end"


def test_clients_that_do_not_read_delay_no_other_client(small: Server) -> None:
    alone = small.generate(PROMPT, **PARAMS)["choices"]
    body = {
        "token_ids": PROMPT,
        "stream": True,
        "sampling_params": {"max_tokens": 1900, "n": 32, "logprobs": 20, "ignore_eos": True},
    }
    raw = json.dumps(body).encode()
    with ExitStack() as stack:
        for _ in range(3):
            sock = stack.enter_context(connect(small, SO_RCVBUF=4096))
            sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
            assert sock.recv(9, socket.MSG_WAITALL) == b"HTTP/1.1 "
        for _ in range(3):
            assert small.generate(PROMPT, **PARAMS)["choices"] == alone
    small.wait_idle()


def test_unfinished_requests_delay_no_client_and_leak_nothing(small: Server) -> None:
    processes = [psutil.Process(small.process.pid)]
    small.get("/version")
    files = [process.num_fds() for process in processes]
    with ExitStack() as stack:
        socks = [stack.enter_context(connect(small)) for _ in range(200)]
        for byte in [b"P", b"OST", b" /inference/v1/generate HTTP/1.1\r\nHo", b"st: a\r\nContent-Length: 9\r\n\r\n{"]:
            for sock in socks:
                sock.sendall(byte)
            assert len(small.generate(PROMPT, **PARAMS)["choices"][0]["token_ids"]) == 8
        assert small.get("/load").json()["server_load"] == 0
    assert not any(more_files(processes, files))


def test_a_prompt_at_the_exact_limit(small: Server) -> None:
    limit = small.get("/v1/models").json()["data"][0]["max_model_len"]
    fits = small.generate([5] * (limit - 1), max_tokens=1)
    assert len(fits["choices"][0]["token_ids"]) == 1
    assert small.generate([5] * (limit - 1), ignore_eos=True)["choices"][0]["finish_reason"] == "length"
    for length in (limit, limit + 1):
        answer = small.post(GENERATE, {"token_ids": [5] * length, "sampling_params": {"max_tokens": 1}})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "token_ids", answer.text


async def idle(url: str) -> None:
    address = httpx.URL(url)
    wires: list[Any] = []
    for _ in range(0, CONNECTIONS, 250):
        wires += await asyncio.gather(*[asyncio.open_connection(address.host, address.port) for _ in range(250)])
    for start in range(0, CONNECTIONS, 500):
        await asyncio.gather(*[version(wire) for wire in wires[start : start + 500]])
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        answer = await client.post(GENERATE, json={"token_ids": PROMPT, "sampling_params": PARAMS})
        assert answer.status_code == 200
    for _, writer in wires:
        writer.close()


@pytest.mark.timeout(900)
def test_ten_thousand_connections() -> None:
    needs.FILES.or_skip()
    with Server("demo", "--tokens-only", "--keep-alive", "900") as server:
        processes = [psutil.Process(server.process.pid), server.engine()]
        files = [process.num_fds() for process in processes]
        asyncio.run(idle(server.url))
        assert not any(more_files(processes, files))
        print(f"RSS of the server {processes[0].memory_info().rss >> 20} MiB")
        server.wait_idle()
