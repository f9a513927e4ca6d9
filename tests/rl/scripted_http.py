"""A client whose server is a function: for each path a list of answers, and what was sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from tests.rl.distribution import rl

Answer = httpx.Response | Exception
OK = httpx.Response(200, json={"weight_version": "7", "epoch": 7})


def refusal(status: int, **headers: str) -> httpx.Response:
    error = {"message": "no", "type": "t", "param": None, "code": None}
    return httpx.Response(status, json={"error": error}, headers=headers)


def connected(answer: Callable[[httpx.Request], Awaitable[httpx.Response]], **options: Any) -> rl.AsyncClient:
    client = rl.AsyncClient("http://nowhere", **options)
    connect(client, answer)
    return client


def connect(client: rl.AsyncClient, answer: Callable[[httpx.Request], Awaitable[httpx.Response]]) -> None:
    """Replaces the client's connections, of which none has been used."""
    pool = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://nowhere")
    client._connection.rollouts = client._connection.control = pool


def run(script: dict[str, list[Answer]], use: Callable[[rl.AsyncClient], Any]) -> tuple[list[str], Any]:
    """What was sent (paths), and the result or the exception.  Of a path's answers the last one stays."""
    sent: list[str] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        await request.aread()
        sent.append(request.url.path)
        answers = script.get(request.url.path, [OK])
        actual = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(actual, Exception):
            raise actual
        return actual

    async def scene() -> Any:
        async with connected(answer) as client:
            try:
                return await use(client)
            except (rl.ServerError, httpx.TransportError) as error:
                return error

    return sent, asyncio.run(scene())


def bodies(script: dict[str, list[Answer]], use: Callable[[rl.AsyncClient], Any], **options: Any) -> list[Any]:
    """(path, JSON body) of all that was sent."""
    sent: list[Any] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        content = await request.aread()
        is_json = request.headers.get("content-type") == "application/json"
        sent.append((str(request.url.raw_path, "ascii"), json.loads(content) if is_json else None))
        answers = script.get(request.url.path, [OK])
        return answers.pop(0) if len(answers) > 1 else answers[0]  # type: ignore[return-value]

    async def scene() -> None:
        async with connected(answer, **options) as client:
            await use(client)

    asyncio.run(scene())
    return sent
