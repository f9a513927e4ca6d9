"""`Replicas`: several engines behind the interface of one `EngineClient`.

A request goes to the engine that `PrefixRouter` chooses, or to the one that it names; results do not depend on which.
An admin command goes to all engines (`Coordinator`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec

from tokserve.base.errors import EngineDead, StartError
from tokserve.client.announcement import RequestAnnouncement
from tokserve.client.engine_client import EngineClient
from tokserve.client.launch import EngineHandle
from tokserve.client.outputs import EngineReport, Ready, Status, StepStats, total
from tokserve.client.request_state import RequestState
from tokserve.config import Config
from tokserve.config.engine_config import replica_config, replica_environment
from tokserve.features.fleet.coordinator import Coordinator
from tokserve.features.fleet.router import PrefixRouter

logger = logging.getLogger(__name__)

EQUAL = ("max_model_len", "vocab_size", "block_size", "eos_token_ids")  # of `Ready`: requests depend on them
SLACK_STEPS = 2  # full steps of work that a group's engine may have more than another,
MIN_SLACK = 4096  # and tokens, where steps are short


class Replicas:
    """`engines`: their clients, by rank.  State that all engines share is that of the first one that serves."""

    def __init__(self, config: Config) -> None:
        size = config.parallel.data_parallel_size
        self.engines = [
            EngineClient(replica_config(config, rank), rank, replica_environment(config, rank)) for rank in range(size)
        ]
        self.ready: Ready | None = None
        self._coordinator = Coordinator(self.engines, config.parallel.num_ranks)
        for engine in self.engines:
            engine.successor_status = partial(self._successor_status, engine)
        self._config = config
        assert config.cache.block_size is not None  # it is resolved
        slack = max(MIN_SLACK, SLACK_STEPS * config.scheduler.token_budget)
        self._router = PrefixRouter(size, config.cache.block_size, slack)
        self._epoch: tuple[int, str] | None = None  # of the weights that cached blocks are of

    # --- start and end ---

    def launch(self) -> None:
        """Start all engine processes.  Raises StartError."""
        for engine in self.engines:
            engine.launch()

    async def joined(self) -> Ready:
        """Join the engines that `launch` has started, and wait until all are ready.  Raises StartError."""
        ready = await _all(engine.joined() for engine in self.engines)
        arithmetic = ready[0].facts.get("arithmetic")
        for rank, engine in enumerate(self.engines):
            if ready[rank].facts.get("arithmetic") != arithmetic:  # each has measured which is the fastest
                logger.info("engine %d is started again with the arithmetic %s of engine 0", rank, arithmetic)
                config = replica_config(self._config, rank)
                runtime = msgspec.structs.replace(config.runtime, cpu_arithmetic=arithmetic, cpu_kernels=None)
                ready[rank] = await engine.relaunch(msgspec.structs.replace(config, runtime=runtime))
        return _common(ready)

    async def join(self, address: str, pid: int | None = None, name: str | None = None) -> Ready:
        """Not possible with several engines: they are started here."""
        raise StartError("several engines are started by the process that sends them requests")

    def serve(self, ready: Ready) -> None:
        """Requests can be sent from here on.  Raises StartError if an engine has died since it was ready."""
        for engine in self.engines:
            engine.serve(ready)
        self.ready = ready

    async def close(self) -> None:
        """End all engines."""
        await asyncio.gather(*(engine.close() for engine in self.engines))

    @property
    def engine(self) -> EngineHandle:
        """There is more than one."""
        raise StartError("there are several engines")

    # --- state ---

    @property
    def serving(self) -> EngineClient:
        """The first engine that serves; else one that is there; else the first."""
        up = [engine for engine in self.engines if engine.down is None]
        return next((engine for engine in up if engine.status.quarantine is None), (up or self.engines)[0])

    @property
    def status(self) -> Status:
        """The state of the engines, as last reported."""
        return self.serving.status

    @property
    def stats(self) -> StepStats:
        """Gauges and counters of all engines together."""
        return total([engine.stats for engine in self.engines])

    @property
    def reports(self) -> list[EngineReport]:
        """What each engine reported last, by rank."""
        return [report for engine in self.engines for report in engine.reports]

    @property
    def dead(self) -> EngineDead | None:
        """Why there is no engine and will be none."""
        return next((engine.dead for engine in self.engines), None) if all(e.dead for e in self.engines) else None

    @property
    def down(self) -> EngineDead | None:
        """Why there is no engine now."""
        downs = [engine.down for engine in self.engines]
        if not all(downs):
            return None
        return next((down for engine, down in zip(self.engines, downs, strict=True) if not engine.dead), downs[0])

    @property
    def silence(self) -> float:
        """Seconds for which the most silent engine has owed the answer to a ping."""
        return max(engine.silence for engine in self.engines)

    @property
    def hung(self) -> bool:
        """Whether no engine that is there finishes its steps."""
        up = [engine for engine in self.engines if engine.down is None]
        return bool(up) and all(engine.hung for engine in up)

    @property
    def num_inflight(self) -> int:
        return sum(engine.num_inflight for engine in self.engines)

    def request_ids(self) -> list[str]:
        return sorted({request_id for engine in self.engines for request_id in engine.request_ids()})

    def in_use(self, choice_ids: Sequence[str]) -> bool:
        return any(engine.in_use(choice_ids) for engine in self.engines)

    def check(self) -> None:
        self.serving.check()

    # --- requests ---

    def announce(self, request_id: str, group_id: str | None) -> RequestAnnouncement:
        """Let aborts find a request that is to come, whichever engine it goes to."""
        return RequestAnnouncement(self.engines, request_id, group_id)

    def submit(
        self, requests: Sequence[RequestState], client: str, announcement: RequestAnnouncement | None = None
    ) -> EngineClient:
        """Send requests to one engine; returns its client.  Raises Conflict, RequestError, EngineDead."""
        for engine in self.engines:
            engine.requests.check_unused(requests)
        return self._choose(requests).submit(requests, client, announcement)

    def _choose(self, requests: Sequence[RequestState]) -> EngineClient:
        options = requests[0].engine_requests[0].options
        if options.data_parallel_rank is not None:
            engine = self.engines[options.data_parallel_rank]
            engine.check()
            return engine
        status = self.status
        if (status.epoch, status.weight_version) != self._epoch:
            self._epoch = status.epoch, status.weight_version
            self._router.forget()
        loads = {engine.rank: engine.requests.tokens for engine in self._eligible(options.adapter)}
        return self.engines[self._router.choose(requests, loads)] if loads else self.serving

    def _eligible(self, adapter: str) -> list[EngineClient]:
        """The engines that can serve a request for this adapter; if there is none, those that can say why."""
        up = [engine for engine in self.engines if engine.down is None]
        able = [engine for engine in up if not engine.hung and engine.status.quarantine is None]
        if adapter:
            able = [engine for engine in able if any(one.name == adapter for one in engine.status.adapters)]
        return able or up

    # --- commands ---

    async def call(self, method: str, args: dict[str, Any]) -> Any:
        """Call a command of all engines.  Raises what `EngineClient.call` raises; then no engine has changed, where
        the command can be taken back."""
        self.check()
        result = await self._coordinator.call(method, args)
        if method == "reset_prefix_cache":
            self._router.forget()
        return result

    # --- engines that are replaced ---

    @asynccontextmanager
    async def _successor_status(self, engine: EngineClient, last: Status) -> AsyncIterator[Status]:
        """The state of the engines that serve: it may have changed since `engine` sent its last status.  If there is
        none, that of the engine that was lost last.  Within, it does not change."""
        self._router.forget(engine.rank)  # its cache is empty
        async with self._coordinator.settled():
            serving = [
                other.status
                for other in self.engines
                if other is not engine and other.down is None and other.status.quarantine is None
            ]
            lost = [other.lost for other in self.engines if other.lost is not None]
            newest = max(lost, key=lambda one: (one.status.quarantine is None, one.at), default=None)
            yield serving[0] if serving else last if newest is None else newest.status

    def rejoin(self, address: str, pid: int) -> None:
        """Not possible with several engines."""
        raise StartError("there are several engines")

    def give_up(self) -> None:
        """Not possible with several engines."""
        raise StartError("there are several engines")

    async def restored(self) -> None:
        """Wait while other engines are being started."""
        await asyncio.gather(*(engine.restored() for engine in self.engines))

    def on_replaced(self, callback: Callable[[], object]) -> None:
        for engine in self.engines:
            engine.on_replaced(callback)


async def _all(joining: Iterable[Any]) -> list[Ready]:
    """All of them, or the first error, with none left running."""
    tasks = [asyncio.ensure_future(join) for join in joining]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _common(ready: Sequence[Ready]) -> Ready:
    """What holds for a request on any engine.  Raises StartError where a result would depend on the engine."""
    first = ready[0]
    for rank, other in enumerate(ready):
        for name in EQUAL:
            first_value, other_value = getattr(first, name), getattr(other, name)
            if first_value != other_value:
                hint = "; give --kv-cache-memory-bytes" if name == "max_model_len" else ""
                raise StartError(f"engine {rank} has {name} {other_value}, and engine 0 {first_value}{hint}")
        if other.facts.get("ops") != first.facts.get("ops"):
            raise StartError(f"engine {rank} uses other implementations of ops than engine 0; choose them with --ops")
    return msgspec.structs.replace(first, num_blocks=min(one.num_blocks for one in ready))
