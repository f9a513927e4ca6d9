"""What befalls the server of a scene: its processes are killed, stopped and hung, generation is paused and resumed."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import httpx
import psutil

from tests.chaos.pool import Fault
from tests.e2e.server import Server

KILLED, STOPPED, HUNG = (10.0, 30.0), (2.0, 6.0), (20.0, 50.0)  # seconds between two of a kind, of the engine
API_KILLED = (20.0, 40.0)  # of an API process, if there are several
PAUSED = (1.0, 5.0)
MODES = ("abort", "wait", "keep")
LONGEST_STOP = LONGEST_PAUSE = 1.0
LOST = 1.0  # seconds after an API process' end in which a client may still meet its connections


class Trouble:
    """`actors` are to run until `until`; then `counts` says how often what happened."""

    def __init__(self, server: Server, client: httpx.AsyncClient, rng: random.Random, until: float) -> None:
        self.counts: Counter[str] = Counter()
        self._server = server
        self._client = client
        self._rng = rng
        self._until = until
        self._fate = asyncio.Lock()  # held by who ends an engine, until another is started
        self._stopped = asyncio.Lock()  # held by who stops it
        self._api_killed = 0.0  # when last

    def actors(self) -> list[Coroutine[Any, Any, None]]:
        """All that may befall this server."""
        apis = [self._kill_api()] if self._server.api_processes() else []
        return [self._kill(), self._stop(), self._hang(), self._pause(), *apis]

    async def wait(self, between: tuple[float, float]) -> bool:
        """Sleep; False when the time is up."""
        left = self._until - time.monotonic()
        await asyncio.sleep(max(0.0, min(left, self._rng.uniform(*between))))
        return time.monotonic() < self._until

    def engine(self) -> psutil.Process | None:
        """The engine that runs or starts; None in between."""
        try:
            return self._server.engine()
        except (StopIteration, psutil.Error):
            return None

    @property
    def engines_lost(self) -> int:
        """How many engines were killed or left hanging."""
        return self.counts["kill"] + self.counts["hang"]

    def may_lose(self, since: float) -> bool:
        """Whether a connection used since then may have been lost with its process."""
        return self._api_killed > since - LOST

    # --- the engine ---

    async def _kill(self) -> None:
        while await self.wait(KILLED):
            async with self._fate:
                engine = self.engine()
                if engine is not None:
                    engine.kill()
                    self.counts["kill"] += 1
                    await self._another()

    async def _hang(self) -> None:
        """Stop an engine that serves and leave it so: the server has to notice."""
        while await self.wait(HUNG):
            async with self._stopped, self._fate:
                while not await self._serves():
                    await asyncio.sleep(0.1)
                engine = self.engine()
                assert engine is not None
                engine.suspend()
                self.counts["hang"] += 1
                await self._another()

    async def _another(self) -> None:
        while starts(self._server) < self.engines_lost:
            await asyncio.sleep(0.1)

    async def _serves(self) -> bool:
        try:
            return (await self._client.get("/health")).status_code == 200
        except httpx.HTTPError:
            return False

    async def _stop(self) -> None:
        while await self.wait(STOPPED):
            async with self._stopped:
                engine = self.engine()
                if engine is not None:
                    with suppress(psutil.NoSuchProcess):  # it was killed meanwhile
                        engine.suspend()
                        self.counts["stop"] += 1
                        await asyncio.sleep(self._rng.random() * LONGEST_STOP)
                        engine.resume()

    # --- the front ---

    async def _kill_api(self) -> None:
        while await self.wait(API_KILLED):
            processes = self._server.api_processes()
            if processes:
                with suppress(psutil.NoSuchProcess):
                    self._rng.choice(processes).kill()
                    self._api_killed = time.monotonic()
                    self.counts["API process kill"] += 1

    async def _pause(self) -> None:
        """Pause in any mode, look whether nothing moves, and resume, sometimes before the pause is there."""
        modes = itertools.cycle(MODES)
        try:
            while await self.wait(PAUSED):
                mode = next(modes)
                how = {"mode": mode, "clear_cache": self._rng.random() < 0.5}
                lost = self.engines_lost
                pausing = asyncio.create_task(self._control("/pause", how))
                if self._rng.random() < 0.7:
                    await pausing
                await asyncio.sleep(self._rng.random() * LONGEST_PAUSE)
                if pausing.done() and pausing.result() == 200:
                    await self._check_paused(mode, lost)
                await self._control("/resume", {})
                self.counts[f"pause {mode}: {await pausing}"] += 1
        finally:
            await self._control("/resume", {})

    async def _check_paused(self, mode: str, lost: int) -> None:
        answer = await self._ask("GET", "/inference/v1/state")
        if answer is None or answer.status_code != 200 or self.engines_lost != lost:
            return  # another engine is not paused
        state = answer.json()
        if state["state"] != "paused" or (mode != "keep" and state["running"]):
            raise Fault(f"paused ({mode}), and the engine says {answer.text}")

    async def _control(self, route: str, fields: dict[str, Any]) -> int:
        """The status, which is one of those that the route may have; of a lost connection, the next try's."""
        while True:
            answer = await self._ask("POST", route, json=fields)
            if answer is None:
                continue
            code = answer.json()["error"]["code"] if answer.status_code >= 400 else None
            if (answer.status_code, code) not in ((200, None), (503, "engine_restarting"), (409, None)):
                raise Fault(f"{route} {fields}: {answer.status_code} {answer.text}")
            return answer.status_code

    async def _ask(self, method: str, route: str, **body: Any) -> httpx.Response | None:
        """None: the connection was lost with the process."""
        began = time.monotonic()
        try:
            return await self._client.request(method, route, **body)
        except httpx.HTTPError as error:
            if not self.may_lose(began):
                raise Fault(f"{route}: {type(error).__name__} {error}") from error
            return None


def starts(server: Server) -> int:
    """How often another engine was started."""
    return sum("starting another" in line for line in server.log)
