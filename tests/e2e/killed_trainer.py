"""A trainer that dies without a word: `python killed_trainer.py URL POINT`, for test_killed_trainer.

It prints a line when it has reached the point, and then waits for the SIGKILL.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

from safetensors.torch import load_file, save

from tokserve.checkpoint import DEMO_DIR
from tokserve.rl import TokserveClient

TENSORS = {"Content-Type": "application/octet-stream"}


async def reached() -> None:
    print("reached", flush=True)
    await asyncio.sleep(600)


async def train(url: str, point: str) -> None:
    content = save(load_file(DEMO_DIR / "model.safetensors"))

    async def body() -> AsyncIterator[bytes]:
        yield content[: len(content) // 2]
        if point == "in the body":
            await reached()
        yield content[len(content) // 2 :]

    async with TokserveClient(url) as client:
        if point == "paused":
            await client.pause("keep")
            await reached()
        async with client.paused():
            if point == "in paused()":
                await reached()
            await client.control("/start_weight_update")
            if point == "started":
                await reached()
            await client.send_body("/update_weights", body(), TENSORS)
            await reached()


if __name__ == "__main__":
    asyncio.run(train(*sys.argv[1:]))
