"""The good client of the soak: seeded requests one after the other, each compared bit by bit with its solo reply."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any, NamedTuple

import httpx

GENERATE, CHAT = "/inference/v1/generate", "/v1/chat/completions"
KINDS = ("generate", "stream", "chat")
EACH = 6  # different requests of each kind
PAUSE = 0.1  # seconds at most between two requests
TIMEOUT = 120.0


class Reply(NamedTuple):
    """A reply: the time of its request, its kind, and the seconds to its first token (if streamed) and to its end."""

    at: float
    kind: str
    first: float
    last: float


def request(kind: str, seed: int) -> dict[str, Any]:
    """A request of a kind; the same for the same seed."""
    rng = random.Random(seed)
    if kind == "chat":
        content = "Tell me about " + " and ".join(rng.sample(["rivers", "numbers", "cities", "birds", "tea"], 2))
        return {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 24,
            "seed": seed,
            "logprobs": True,
            "ignore_eos": True,
        }
    params = {"max_tokens": rng.randrange(16, 33), "seed": seed, "logprobs": 2, "ignore_eos": True}
    return {
        "token_ids": [rng.randrange(3, 250) for _ in range(rng.choice([8, 40, 130]))],
        "sampling_params": params,
        "stream": kind == "stream",
    }


class GoodClient:
    """`run` it as often as needed; `replies` and `faults` collect what came.  Times are those of `time.monotonic`."""

    def __init__(self, url: str, seed: int) -> None:
        self.replies: list[Reply] = []
        self.faults: list[str] = []
        self._url = url
        self._rng = random.Random(seed)
        self._solo: dict[tuple[str, int], Any] = {}

    async def run(self, seconds: float) -> None:
        """Send requests for so long.  The solo replies are taken first, once."""
        async with httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT) as client:
            if not self._solo:
                requests = [(kind, seed) for kind in KINDS for seed in range(EACH)]
                self._solo = {request: (await self._send(client, *request))[0] for request in requests}
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                await self._one(client, self._rng.choice(KINDS), self._rng.randrange(EACH))
                await asyncio.sleep(self._rng.uniform(0, PAUSE))

    async def _one(self, client: httpx.AsyncClient, kind: str, seed: int) -> None:
        begin = time.monotonic()
        try:
            received, first = await self._send(client, kind, seed)
        except httpx.HTTPError as error:
            self.faults.append(f"good client, {kind} {seed}: {error!r} after {time.monotonic() - begin:.1f} s")
            return
        self.replies.append(Reply(begin, kind, first, time.monotonic() - begin))
        if received != self._solo[kind, seed]:
            self.faults.append(f"good client, {kind} {seed}: the reply differs from the solo reply")

    async def _send(self, client: httpx.AsyncClient, kind: str, seed: int) -> tuple[Any, float]:
        """The choices of a reply, joined if they were streamed, and the seconds to the first of them."""
        path, begin, first = CHAT if kind == "chat" else GENERATE, time.monotonic(), 0.0
        if kind != "stream":
            reply = await client.post(path, json=request(kind, seed))
            reply.raise_for_status()
            return reply.json()["choices"], 0.0
        parts: list[Any] = []
        async with client.stream("POST", path, json=request(kind, seed)) as stream:
            stream.raise_for_status()
            async for line in stream.aiter_lines():
                first = first or time.monotonic() - begin
                if line.startswith("data: {"):
                    parts += json.loads(line[6:])["choices"]
        tokens = [token for part in parts for token in part["token_ids"]]
        logprobs = [row for part in parts for row in (part["logprobs"] or {"content": []})["content"]]
        return (tokens, logprobs, parts[-1]["finish_reason"]), first
