"""Attacks with streams that are not read, and with many requests.

Each runs against a server until a moment of `time.monotonic`, and raises `Fault` for an answer that the server must not
give.  A soak may run any of them beside the others.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.hostile.grammar_attacks import GENERATE, Attack, Client, Fault, body

RECEIVE_BUFFER = 4096  # bytes that the kernel keeps for a socket that is not read, at least


def large(chance: random.Random, n: int = 32, tokens: int = 1900) -> dict[str, Any]:
    """A stream of many tokens with many logprobs."""
    params = {"n": n, "max_tokens": tokens, "logprobs": 20, "ignore_eos": True, "seed": chance.randrange(1 << 30)}
    return body(None, **params) | {"stream": True}


async def connect(url: str, request: dict[str, Any], source: str | None = None) -> socket.socket:
    """Send a request on a socket of its own, from the address `source`, and read nothing."""
    loop = asyncio.get_running_loop()
    address = urlsplit(url)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
    sock.setblocking(False)
    if source is not None:
        sock.bind((source, 0))
    await loop.sock_connect(sock, (address.hostname, address.port))
    content = json.dumps(request).encode()
    head = f"POST {GENERATE} HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"
    await loop.sock_sendall(sock, f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    return sock


async def unread_streams(url: str, chance: random.Random, deadline: float, source: str | None = None) -> None:
    """Twenty large streams that are never read."""
    socks = []
    try:
        for _ in range(20):
            socks.append(await connect(url, large(chance), source))
        while time.monotonic() < deadline:
            await asyncio.sleep(0.05)
    finally:
        for sock in socks:
            sock.close()


async def dribbled_streams(url: str, chance: random.Random, deadline: float, source: str | None = None) -> None:
    """Large streams of which a few bytes are read now and then."""
    loop = asyncio.get_running_loop()
    socks = []
    try:
        for _ in range(5):
            socks.append(await connect(url, large(chance, n=8), source))
        while time.monotonic() < deadline:
            for sock in socks:
                with suppress(TimeoutError):
                    await asyncio.wait_for(loop.sock_recv(sock, 16), 0.01)
            await asyncio.sleep(0.02)
    finally:
        for sock in socks:
            sock.close()


async def crowd(url: str, chance: random.Random, deadline: float, source: str | None = None) -> None:
    """Far more requests at once than there are slots, again and again."""
    transport = httpx.AsyncHTTPTransport(local_address=source, limits=httpx.Limits(max_connections=None))
    async with Client(url, transport=transport) as client:

        async def one() -> None:
            params = {"n": 32, "max_tokens": 400, "ignore_eos": True, "seed": chance.randrange(1 << 30)}
            answer = await client.post(GENERATE, json=body(None, **params))
            if answer.status_code not in (200, 429):
                raise Fault(answer.text[:300])

        waiting = [asyncio.ensure_future(one()) for _ in range(30)]
        await asyncio.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        for task in waiting:
            task.cancel()
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            if isinstance(result, Fault):
                raise result


async def long_prompts(url: str, chance: random.Random, deadline: float, source: str | None = None) -> None:
    """Prompts as long as the context, all different, again and again."""
    transport = httpx.AsyncHTTPTransport(local_address=source)
    async with Client(url, transport=transport) as client:

        async def one() -> None:
            while time.monotonic() < deadline:
                prompt = [chance.randrange(3, 280) for _ in range(1900)]
                answer = await client.post(GENERATE, json=body(None, max_tokens=2) | {"token_ids": prompt})
                if answer.status_code not in (200, 429):
                    raise Fault(answer.text[:300])

        await asyncio.gather(*(one() for _ in range(16)))


ATTACKS: list[Attack] = [unread_streams, dribbled_streams, crowd, long_prompts]
