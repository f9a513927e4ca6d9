"""`tokserve bench serve --check-speculation`: every request twice, without and with speculation, and equal replies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec
import uvloop

from tokserve.base.errors import StartError
from tokserve.bench import datasets
from tokserve.bench.clients import PATHS
from tokserve.bench.datasets import Conversation
from tokserve.bench.serve import Load, connected


@dataclass(frozen=True, slots=True)
class SpeculationCheck:
    """`different`: numbers of the requests whose choices differ.  Seconds of the run without and of the one with."""

    count: int
    different: list[int]
    seconds: tuple[float, float]

    def summary(self) -> str:
        """The outcome in one line."""
        off, on = self.seconds
        verdict = "equal" if not self.different else f"{len(self.different)} differ, the first is {self.different[0]}"
        return f"{self.count} requests without and with speculation: {verdict}; {off:.2f} s and {on:.2f} s"


def check(load: Load) -> SpeculationCheck:
    """Send the first turn of each conversation twice.  Raises StartError if a request is refused."""
    load.check()
    return uvloop.run(_check(load, datasets.make(load.dataset)))


async def _check(load: Load, conversations: Sequence[Conversation]) -> SpeculationCheck:
    shape = replace(load.shape, stream=False, return_token_ids=load.shape.backend == "openai")
    async with connected(replace(load, shape=shape)) as (load, session):
        off, without = await _run(load, session, conversations, speculate=False)
        on, with_drafts = await _run(load, session, conversations, speculate=True)
    different = [index for index, pair in enumerate(zip(without, with_drafts, strict=True)) if pair[0] != pair[1]]
    return SpeculationCheck(len(conversations), different, (off, on))


async def _run(
    load: Load, session: aiohttp.ClientSession, conversations: Sequence[Conversation], *, speculate: bool
) -> tuple[float, list[Any]]:
    """Seconds, and the choices of each reply."""
    gate = asyncio.Semaphore(load.max_concurrency or len(conversations))

    async def one(index: int, conversation: Conversation) -> Any:
        turn, backend = conversation.turns[0], load.shape.backend
        prompt: Any = [{"role": "user", "content": turn.prompt}] if backend == "openai-chat" else turn.prompt
        body = msgspec.json.decode(load.shape.body(prompt, turn.output_len))
        target = body["sampling_params"] if backend == "tokens" else body
        target["seed"], body["speculate"] = index, speculate
        async with gate, session.post(load.root + PATHS[backend], data=msgspec.json.encode(body)) as response:
            raw = await response.read()
            if response.status != 200:
                raise StartError(f"HTTP {response.status}: {raw[:300].decode(errors='replace')}")
            return msgspec.json.decode(raw)["choices"]

    began = time.perf_counter()
    choices = await asyncio.gather(*(one(index, item) for index, item in enumerate(conversations)))
    return time.perf_counter() - began, choices
