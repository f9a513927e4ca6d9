"""A trainer that is killed: `python killed_trainer.py URL POINT`, for test_killed_trainer.

It prints a line when it has reached the point, and then waits for the SIGKILL.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import httpx
from safetensors.torch import load_file, save

from tokserve.checkpoint import DEMO_DIR
from tokserve.rl import TokserveClient

TENSORS = {"Content-Type": "application/octet-stream"}
POINTS = (
    "connected",
    "generating",
    "paused",
    "in paused()",
    "started",
    "in the body",
    "filled",
    "committing",
    "committed",
    "resumed",
)


class Trainer:
    """One step of training that may end anywhere; its weights are not the server's."""

    def __init__(self, url: str, point: str) -> None:
        self._url, self._point = url, point
        weights = {name: tensor * 1.5 for name, tensor in load_file(DEMO_DIR / "model.safetensors").items()}
        self._content = save(weights)

    async def reach(self, point: str) -> None:
        """Wait to be killed, if this is the given point."""
        if point == self._point:
            print("reached", flush=True)
            await asyncio.sleep(600)

    async def _body(self) -> AsyncIterator[bytes]:
        yield self._content[: len(self._content) // 2]
        await self.reach("in the body")
        yield self._content[len(self._content) // 2 :]

    async def step(self) -> None:
        """Rollouts, a pause, an update within it."""
        async with TokserveClient(self._url) as client, httpx.AsyncClient(base_url=self._url, timeout=None) as http:
            await client.state()
            await self.reach("connected")
            rollouts = asyncio.create_task(client.generate([[4, 5, 6]], n=4, max_tokens=1000, ignore_eos=True))
            await asyncio.sleep(0.05)
            await self.reach("generating")
            if self._point == "paused":
                await client.pause("keep")
                await self.reach("paused")
            async with client.paused("abort"):
                await rollouts
                await self.reach("in paused()")
                await http.post("/start_weight_update", json={"take_over": True})
                await self.reach("started")
                await http.post("/update_weights", content=self._body(), headers=TENSORS)
                await self.reach("filled")
                finish = {"weight_version": f"of the one that is killed when {self._point}"}
                committing = asyncio.create_task(http.post("/finish_weight_update", json=finish))
                await asyncio.sleep(0)
                await self.reach("committing")
                await committing
                await self.reach("committed")
            await self.reach("resumed")


if __name__ == "__main__":
    asyncio.run(Trainer(*sys.argv[1:]).step())
