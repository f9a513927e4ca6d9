"""What befalls the server of a scene: its processes are killed, stopped and hung, generation is paused and resumed, and
the server sleeps and gets weights, which are those that it has."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

import tokserve
from tests.chaos.pool import Fault
from tests.e2e.server import Server
from tokserve.protocol.commands import MODES

KILLED, STOPPED, HUNG = (10.0, 30.0), (2.0, 6.0), (20.0, 50.0)  # seconds between two of a kind, of the engine
API_KILLED = (20.0, 40.0)  # of an API process, if there are several
CONTROLLED = (1.0, 5.0)
WEIGHTS = str(Path(tokserve.__file__).parent / "demo_model")
LONGEST_STOP = LONGEST_PAUSE = 1.0
AGAIN = 0.2  # seconds until a command is sent again
LOST = 1.0  # seconds after an API process' end in which a client may still meet its connections


class Trouble:
    """`actors` are to run until `until`; then `counts` says how often what happened."""

    def __init__(self, server: Server, client: httpx.AsyncClient, rng: random.Random, until: float) -> None:
        self.counts: Counter[str] = Counter()
        self._server = server
        self._client = client
        self._rng = rng
        self._until = until
        self._fate = asyncio.Lock()  # held by the actor that kills an engine, until another is started
        self._stopped = asyncio.Lock()  # held by the actor that stops an engine
        self._api_killed = 0.0  # time of the last
        self._num_engines = len(server.engines())
        self._epoch = 0  # of the weights, as last heard

    def actors(self) -> list[Coroutine[Any, Any, None]]:
        """The actors that disturb this server."""
        apis = [self._kill_api()] if self._server.api_processes() else []
        return [self._kill(), self._stop(), self._hang(), self._command(), *apis]

    async def wait(self, between: tuple[float, float]) -> bool:
        """Sleep; False when the time is up."""
        left = self._until - time.monotonic()
        await asyncio.sleep(max(0.0, min(left, self._rng.uniform(*between))))
        return time.monotonic() < self._until

    def engines(self) -> list[psutil.Process]:
        """The engines that run or start."""
        try:
            return self._server.engines()
        except psutil.Error:
            return []

    def _victim(self) -> tuple[str, psutil.Process] | None:
        """An engine that runs or starts, or a rank of one, with what it is; None if there is none."""
        try:
            ranks = self._server.ranks()
        except psutil.Error:
            ranks = []
        kind, processes = ("rank ", ranks) if ranks and self._rng.random() < 0.6 else ("", self.engines())
        return (kind, self._rng.choice(processes)) if processes else None

    @property
    def kills(self) -> int:
        """How many engines and ranks were killed."""
        return self.counts["kill"] + self.counts["rank kill"]

    @property
    def hangs(self) -> int:
        """How many engines and ranks were left hanging."""
        return self.counts["hang"] + self.counts["rank hang"]

    @property
    def engines_lost(self) -> int:
        """How many engines were lost by either."""
        return self.kills + self.hangs

    def may_lose(self, since: float) -> bool:
        """Whether a connection used since then may have been lost with its process."""
        return self._api_killed > since - LOST

    # --- the engines ---

    async def _kill(self) -> None:
        while await self.wait(KILLED):
            async with self._fate:
                if (victim := self._victim()) is not None:
                    kind, process = victim
                    with suppress(psutil.NoSuchProcess):  # a rank whose engine has just started anew
                        process.kill()
                        self.counts[kind + "kill"] += 1
                    await self._another()

    async def _hang(self) -> None:
        """Stop an engine that serves, or a rank of it, and leave it so: the server has to notice."""
        while await self.wait(HUNG):
            async with self._stopped, self._fate:
                while not await self._all_serve():
                    await asyncio.sleep(0.1)
                victim = self._victim()
                assert victim is not None
                kind, process = victim
                process.suspend()
                self.counts[kind + "hang"] += 1
                await self._another()

    async def _another(self) -> None:
        while starts(self._server) < self.engines_lost:
            await asyncio.sleep(0.1)

    async def _all_serve(self) -> bool:
        """Whether every engine is there; one that starts is in no state."""
        try:
            metrics = (await self._client.get("/metrics")).text
        except httpx.HTTPError:
            return False
        return len(re.findall(r"^tokserve:engine_state{.*} 1.0$", metrics, re.MULTILINE)) == self._num_engines

    async def _stop(self) -> None:
        while await self.wait(STOPPED):
            async with self._stopped:
                if (victim := self._victim()) is not None:
                    with suppress(psutil.NoSuchProcess):  # it was killed meanwhile
                        victim[1].suspend()
                        self.counts["stop"] += 1
                        await asyncio.sleep(self._rng.random() * LONGEST_STOP)
                        victim[1].resume()

    # --- the front ---

    async def _kill_api(self) -> None:
        while await self.wait(API_KILLED):
            processes = self._server.api_processes()
            if processes:
                with suppress(psutil.NoSuchProcess):
                    self._rng.choice(processes).kill()
                    self._api_killed = time.monotonic()
                    self.counts["API process kill"] += 1

    async def _command(self) -> None:
        """Pauses in all modes, a sleep and an update of the weights, in turn."""
        commands = itertools.cycle([*(partial(self._pause, mode) for mode in MODES), self._sleep, self._update])
        try:
            while await self.wait(CONTROLLED):
                await next(commands)()
        finally:
            await self._insist("/wake_up")
            await self._insist("/resume")

    async def _pause(self, mode: str) -> None:
        """Pause, check that no token comes, and resume, sometimes before the pause takes effect."""
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

    async def _sleep(self) -> None:
        """Sleep at any level; weights that were dropped are read again."""
        level, mode = self._rng.randrange(3), self._rng.choice(MODES)
        status = await self._control(f"/sleep?level={level}&mode={mode}", {})
        await asyncio.sleep(self._rng.random() * LONGEST_PAUSE)
        if level == 2:
            await self._insist("/wake_up?tags=weights")
            await self._update()
        await self._insist("/wake_up")
        self.counts[f"sleep {level}: {status}"] += 1

    async def _update(self) -> None:
        """Read the same weights again: the replies stay the same, and the epoch grows."""
        status, reply = await self._insist("/update_weights", {"weight_dir": WEIGHTS})
        if reply["epoch"] <= self._epoch:
            raise Fault(f"the epoch went back from {self._epoch}: {reply}")
        self._epoch = reply["epoch"]
        self.counts[f"update: {status}"] += 1

    async def _check_paused(self, mode: str, lost: int) -> None:
        answer = await self._ask("GET", "/inference/v1/state")
        if answer is None or answer.status_code != 200 or self.engines_lost != lost:
            return  # another engine is not paused
        state = answer.json()
        if state["state"] != "paused" or (mode != "keep" and state["running"]):
            raise Fault(f"paused ({mode}), and the engine says {answer.text}")

    async def _control(self, route: str, fields: dict[str, Any]) -> int:
        """The status, which is one of those that the route may have; of a lost connection, the next try's."""
        return (await self._answer(route, fields))[0]

    async def _insist(self, route: str, fields: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Repeat a command until it succeeds: a starting engine refuses it."""
        while (answer := await self._answer(route, fields or {}))[0] == 503:
            await asyncio.sleep(AGAIN)
        if answer[0] != 200:
            raise Fault(f"{route} {fields}: {answer}")
        return answer

    async def _answer(self, route: str, fields: dict[str, Any]) -> tuple[int, Any]:
        while True:
            answer = await self._ask("POST", route, json=fields)
            if answer is None:
                continue
            reply = answer.json()
            code = reply["error"]["code"] if answer.status_code >= 400 else None
            if (answer.status_code, code) not in ((200, None), (503, "engine_restarting"), (409, None)):
                raise Fault(f"{route} {fields}: {answer.status_code} {answer.text}")
            return answer.status_code, reply

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
