"""Thousands of connections at once: no request is lost, tokens equal those of single requests, resources are freed."""

import asyncio
import json
import random
import re
import time
from typing import Any

import httpx
import psutil
import pytest

from tests import needs
from tests.e2e.server import Server
from tests.waiting import PATIENCE

IDLE, STREAMS = 2000, 500
GROWTH = 48 << 20  # bytes that a process may keep after a second round: arenas, not requests
ASK = b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n"
Answer = tuple[list[int], list[float]]
Wire = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def request(i: int) -> dict[str, Any]:
    rng = random.Random(i)
    prompt = [rng.randrange(3, 250) for _ in range(rng.choice([1, 9, 40, 120]))]
    params = {"max_tokens": 24, "temperature": rng.choice([0.0, 1.0]), "seed": i, "logprobs": 0, "ignore_eos": True}
    return {"token_ids": prompt, "sampling_params": params, "logprobs_format": "arrays"}


def answer(choices: list[Any]) -> Answer:
    return (
        [token for choice in choices for token in choice["token_ids"]],
        [value for choice in choices for value in choice["logprobs"]["token_logprobs"]],
    )


async def streamed(host: str, port: int, i: int) -> Answer:
    """The tokens of a stream on a connection of its own."""
    body = json.dumps(request(i) | {"stream": True}).encode()
    head = (
        f"POST /inference/v1/generate HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(head.encode() + body)
    raw = await reader.read(-1)
    writer.close()
    events = re.findall(rb"data: (.*)\n\n", raw)
    assert raw.startswith(b"HTTP/1.1 200") and events[-1] == b"[DONE]", raw[:500]
    return answer([json.loads(event)["choices"][0] for event in events[:-1]])


async def version(wire: Wire) -> None:
    """A request on a connection that stays open."""
    reader, writer = wire
    writer.write(ASK)
    head = await reader.readuntil(b"\r\n\r\n")
    match = re.search(rb"content-length: (\d+)", head)
    assert head.startswith(b"HTTP/1.1 200") and match, head
    await reader.readexactly(int(match[1]))


async def crowd(url: str) -> list[Answer]:
    """The answers of all streams while the other connections stay open; those work before and after."""
    address = httpx.URL(url)
    host, port = address.host, address.port or 80
    idle: list[Wire] = []
    for _ in range(0, IDLE, 200):
        idle += await asyncio.gather(*[asyncio.open_connection(host, port) for _ in range(200)])
    await asyncio.gather(*[version(wire) for wire in idle])
    answers = await asyncio.gather(*[streamed(host, port, i) for i in range(STREAMS)])
    await asyncio.gather(*[version(wire) for wire in idle])
    for _, writer in idle:
        writer.close()
    return answers


def alone(url: str) -> list[Answer]:
    with httpx.Client(base_url=url, timeout=60) as client:
        replies = [client.post("/inference/v1/generate", json=request(i)).json() for i in range(STREAMS)]
    return [answer(reply["choices"]) for reply in replies]


def more_files(processes: list[psutil.Process], before: list[int]) -> list[int]:
    """How many more files are open than before; it waits until there are no more, but not for ever."""
    end = time.monotonic() + PATIENCE
    while True:
        more = [max(0, process.num_fds() - old) for process, old in zip(processes, before, strict=True)]
        if not any(more) or time.monotonic() > end:
            return more
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_thousand_idle_connections_and_five_hundred_streams() -> None:
    needs.FILES.or_skip()
    with Server("demo", "--keep-alive", "600") as server:
        processes = [psutil.Process(server.process.pid), server.engine()]
        server.get("/version")  # the event loop opens a file with the first connection, and keeps it
        files = [process.num_fds() for process in processes]
        solo = alone(server.url)
        assert asyncio.run(crowd(server.url)) == solo  # also brings memory to what such a crowd takes
        server.wait_idle()
        before = [process.memory_info().rss for process in processes]
        began = time.monotonic()
        for _ in range(2):
            assert asyncio.run(crowd(server.url)) == solo
        seconds = (time.monotonic() - began) / 2
        server.wait_idle()
        assert not any(more_files(processes, files))
        after = [process.memory_info().rss for process in processes]
        for name, old, new in zip(("server", "engine"), before, after, strict=True):
            print(f"{name}: {old >> 20} MiB before, {new >> 20} MiB after, {files} open files, {seconds:.1f} s a round")
            assert new - old < GROWTH, name
        assert server.get("/health?deep=1").status_code == 200 and server.process.poll() is None
