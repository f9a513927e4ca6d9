"""Random commands of a trainer to engines that are killed: real processes and sockets, a scripted executor behind them.

One client owns the engine, others have joined it, as under a supervisor.  Everybody asks at once; whenever, in whatever
state, the engine is killed.  Every call and every request must come to an end, tokens must be those of the weights that
they are said to be of, and what an engine is after a restart is what the one before was, or it says what is missing.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.client.fake_engine import config
from tests.client.test_restart import until
from tests.engine.solo import solo
from tokserve.base.errors import Conflict, EngineDead, RequestError, Unavailable
from tokserve.client.async_llm import AsyncLLM, collect
from tokserve.protocol.messages import Status
from tokserve.protocol.params import SamplingParams

PATIENCE = 120.0


class Lives:
    """`live` it; `kills` says how often an engine ended, `lost` how often weights went with it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.owner = self.make(10_000)
        self.others = [self.make(10_000), self.make(10_000)]
        self.owner.on_replaced(self.tell)
        self.weights_of = {"v1": ""}
        self.num = self.kills = self.lost = self.complete = 0
        self.training = asyncio.Lock()  # else two trainers' tensors would mix
        self.tasks: list[asyncio.Task[None]] = []

    def make(self, restarts: int) -> AsyncLLM:
        return AsyncLLM.from_config(config(tokens_only=True, start_timeout=60.0, runtime={"restart_engine": restarts}))

    def tell(self) -> None:
        for other in self.others:
            other.rejoin(*self.owner.engine)

    async def live(self, acts: int) -> None:
        await self.owner.start()
        address, pid = self.owner.engine
        for number, other in enumerate(self.others):
            await other.connect(address, pid=pid, name=f"api-{number}")
        for _ in range(acts):
            rng = self.rng
            act = rng.choice([self.request, self.request, self.pause, self.resume, self.sleep, self.wake, self.train])
            self.tasks.append(asyncio.create_task(act()))
            for _ in range(rng.choice([0, 0, 1, 5])):
                await asyncio.sleep(rng.choice([0, 0.001, 0.01]))
            if rng.random() < 0.15:
                await self.kill()
        await self.end()

    async def kill(self) -> None:
        """The engine ends; when another is there, all clients agree with it about what it is."""
        os.kill(self.owner.engine[1], signal.SIGKILL)
        await until(lambda: self.owner.down is not None)
        was = self.owner.status
        for task in self.tasks:  # nothing is in flight any more
            await asyncio.wait_for(task, PATIENCE)
        self.tasks.clear()
        await asyncio.wait_for(self.owner.restored(), PATIENCE)
        await until(lambda: all(other.down is None for other in self.others))
        now = self.owner.status
        assert now == await self.owner.fresh_status()
        for other in self.others:
            assert now == other.status == await other.fresh_status()
        self.check(was, now)
        self.kills += 1

    def check(self, was: Status, now: Status) -> None:
        assert (now.paused, now.asleep, now.dropped) == (was.paused, was.asleep, was.dropped)
        assert now.lost is (was.lost or (was.pushed and not was.dropped))
        assert now.epoch == was.epoch + (now.lost and not was.lost)
        assert now.weight_version == (was.weight_version if now.lost is was.lost else "v1")
        assert (now.quarantine is not None) is now.lost
        self.lost += now.lost and not was.lost

    async def end(self) -> None:
        """Restore an engine that serves, from any state."""
        for task in self.tasks:
            if task.get_coro().__name__ != "request":  # type: ignore[union-attr]
                await asyncio.wait_for(task, PATIENCE)
        llm = self.rng.choice([self.owner, *self.others])
        await llm.wake_up(["weights"])
        await self.train(keep_on=True)
        await llm.wake_up()
        await llm.resume_generation()
        for task in self.tasks:
            await asyncio.wait_for(task, PATIENCE)
        assert (await llm.fresh_status()).state == "running"
        complete = self.complete
        await self.request()
        assert self.complete == complete + 1
        for front_end in (*self.others, self.owner):
            assert front_end.num_inflight == 0
            await front_end.shutdown()

    # --- what they do ---

    def anyone(self) -> AsyncLLM:
        return self.rng.choice([self.owner, *self.others])

    async def try_to(self, doing: Coroutine[Any, Any, Any]) -> bool:
        """Whether the command succeeded; a conflict and a lost engine are allowed."""
        try:
            await asyncio.wait_for(doing, PATIENCE)
        except (Conflict, EngineDead):
            return False
        return True

    async def request(self) -> None:
        self.num += 1
        seed, prompt = self.num, [self.num % 20, 3, 4]
        params = SamplingParams(max_tokens=self.rng.choice([1, 5, 40]), ignore_eos=True, seed=seed)
        try:
            ends = await asyncio.wait_for(collect(self.anyone().stream(prompt, params)), 2 * PATIENCE)
        except (EngineDead, Unavailable):
            return
        end = ends[0]
        weights = [
            self.weights_of[version] for version, start, stop in end.weight_versions or () for _ in range(start, stop)
        ]
        assert len(weights) == len(end.token_ids)
        alone = solo(prompt, params, seed, 64, (), lambda index: weights[index] if index < len(weights) else "")
        assert end.token_ids == alone.tokens[: len(end.token_ids)]
        if end.finish_reason == "length":
            assert len(end.token_ids) == params.max_tokens
            self.complete += 1
        else:
            assert end.finish_reason == "abort"

    async def pause(self) -> None:
        mode = self.rng.choice(["abort", "wait", "keep"])
        await self.try_to(self.anyone().pause_generation(mode=mode))

    async def resume(self) -> None:
        await self.try_to(self.anyone().resume_generation())

    async def sleep(self) -> None:
        await self.try_to(self.anyone().sleep(self.rng.randrange(3), self.rng.choice(["abort", "keep"])))

    async def wake(self) -> None:
        await self.try_to(self.anyone().wake_up(self.rng.choice([None, ["weights"], ["kv_cache"]])))

    async def train(self, keep_on: bool = False) -> None:
        """A whole update, or one that is left open, or one that another has left open."""
        async with self.training:
            await self.push(self.owner if keep_on else self.anyone(), keep_on)

    async def push(self, llm: AsyncLLM, keep_on: bool) -> None:
        self.num += 1
        version, weights = f"step-{self.num}", f"w{self.num}"
        self.weights_of[version] = weights
        if keep_on:
            await self.try_to(llm.abort_weight_update())
        done = await self.try_to(llm.start_weight_update()) or self.rng.random() < 0.3
        if done and (keep_on or self.rng.random() < 0.8):
            try:
                await llm.update_weights({"update_info": {"weights": weights}})
                await llm.finish_weight_update(version)
            except RequestError as error:
                assert not keep_on, error


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_engines_that_are_killed_in_any_state(scripted: None, seed: int) -> None:
    lives = Lives(seed)
    asyncio.run(lives.live(100))
    assert lives.kills > 0
