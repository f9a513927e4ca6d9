"""A well-behaved client beside an attack: its seeded replies are always the same, and it notes how long they take."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import httpx
import psutil

from tests.e2e.server import Server

Attack = Callable[[str, random.Random, float], Awaitable[None]]
GENERATE = "/inference/v1/generate"
PATIENCE = 120.0


class Bystander:
    """Sends its requests one after the other; `seconds` is what each reply took."""

    def __init__(self, url: str, headers: dict[str, str] | None = None) -> None:
        self.url = url
        self.headers = headers or {}
        self.seconds: list[float] = []
        self._expected: list[Any] | None = None

    async def round(self, client: httpx.AsyncClient) -> None:
        """One of each kind of request.  The replies of the first round are the expected ones."""
        received = []
        for request in REQUESTS:
            began = time.monotonic()
            answer = await client.post(GENERATE, json=request, headers=self.headers)
            self.seconds.append(time.monotonic() - began)
            assert answer.status_code == 200, answer.text
            received.append([(c["token_ids"], c["logprobs"], c["text"]) for c in answer.json()["choices"]])
        if self._expected is None:
            self._expected = received
        assert received == self._expected, "a bystander's tokens or logprobs have changed"

    async def run_during(self, attacks: list[Attack], seconds: float, seed: int = 0) -> int:
        """Run rounds while all of the attacks run, each until its deadline; returns how many rounds there were."""
        deadline = time.monotonic() + seconds
        rounds = 0
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE) as client:
            await self.round(client)
            running = [
                asyncio.ensure_future(attack(self.url, random.Random(seed + i), deadline))
                for i, attack in enumerate(attacks)
            ]
            while time.monotonic() < deadline:
                await self.round(client)
                rounds += 1
            await asyncio.gather(*running)
            await self.round(client)
        return rounds


def _request(form: dict[str, Any] | None, seed: int) -> dict[str, Any]:
    params: dict[str, Any] = {"max_tokens": 16, "seed": seed, "logprobs": 2, "ignore_eos": form is None}
    if form is not None:
        params["structured_outputs"] = form
    return {"token_ids": [5, 20, 31, 44, 7, seed], "sampling_params": params, "output_mode": "text"}


REQUESTS = [_request(None, 1), _request({"choice": ["yes", "no", "maybe"]}, 2), _request({"regex": "[a-z]{3,9}"}, 3)]


def process_memory(server: Server) -> list[tuple[psutil.Process, int]]:
    """The processes of a server, and the bytes of memory that each has."""
    root = psutil.Process(server.process.pid)
    sizes = []
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            sizes.append((process, process.memory_info().rss))
    return sizes


def resident(server: Server) -> int:
    """Bytes of memory of the server with all its processes."""
    return sum(size for _, size in process_memory(server))
