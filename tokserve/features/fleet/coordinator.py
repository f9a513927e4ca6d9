"""`Coordinator`: sends an admin command to several engines, so that all of them do it or none.

A command goes to all engines in one turn of the event loop, so all engines receive all commands in the same order.
Commands that can fail on one engine alone and change something (`PHASES`) are prepared on all engines, and take effect
when all have prepared them (`engine/admin/command`).  Others are taken back where they can be (`fan_out.UNDONE_BY`).
An engine that replaces one that was lost joins the others between two commands, with their state (`settled`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from tokserve.base.errors import Conflict, EngineDead, RequestError
from tokserve.client.engine_client import EngineClient
from tokserve.features.fleet import fan_out
from tokserve.features.fleet.fan_out import Answer

logger = logging.getLogger(__name__)

# the commands in phases, and in which phase they begin an epoch of the weights; 0: in none
PHASES = {
    "start_weight_update": 0,
    "finish_weight_update": 1,
    "update_weights_from_dir": 2,
    "update_weight_version": 1,
    "load_lora_adapter": 0,
    "wake_up": 0,
}
# the commands that change what an engine takes over from another
STATE_COMMANDS = frozenset(
    {
        "pause",
        "resume",
        "sleep",
        "release_memory",
        "wake_up",
        "release_kv_cache_memory",
        "update_weights_from_dir",
        "finish_weight_update",
        "update_weight_version",
        "load_lora_adapter",
        "unload_lora_adapter",
    }
)
WORKER_CALLS = ("collective_rpc", "apply_model")  # they may change weights
ONE_AT_A_TIME = "wake_up"  # memory is there once
TAKEN_BACK = object()  # the result of a command that another engine refused


class Coordinator:
    """The commands of these engines.  `num_ranks`: of each."""

    def __init__(self, engines: Sequence[EngineClient], num_ranks: int = 1) -> None:
        self._engines, self._num_ranks = engines, num_ranks
        self._changing_weights = asyncio.Lock()  # a new epoch, or a worker call: never both at once
        self._waking = asyncio.Lock()
        self._num_changing = 0  # commands of STATE_COMMANDS that are under way
        self._unchanged = asyncio.Event()  # set while there are none
        self._unchanged.set()
        self._joining = asyncio.Lock()  # held while an engine takes the state of the others over
        self._tasks: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def settled(self) -> AsyncIterator[None]:
        """Waits until no command that changes the state of engines is under way; within, those that come wait."""
        while True:
            await self._unchanged.wait()
            async with self._joining:
                if self._unchanged.is_set():  # none has begun meanwhile
                    yield
                    return

    @asynccontextmanager
    async def _change(self) -> AsyncIterator[None]:
        """Within, a command changes the state of engines."""
        async with self._joining:
            self._num_changing += 1
            self._unchanged.clear()
        try:
            yield
        finally:
            self._num_changing -= 1
            if not self._num_changing:
                self._unchanged.set()

    async def call(self, method: str, args: Mapping[str, Any]) -> Any:
        """Call a command of all engines that are there; what their answers amount to."""
        # a task of its own: a caller that gives up must not leave the engines in different states
        task = asyncio.ensure_future(self._call(method, args))
        self._keep(task)
        return await asyncio.shield(task)

    def _keep(self, task: asyncio.Task[Any]) -> None:
        """Hold a task until it is done, and its error if its caller is not there any more."""
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    async def _call(self, method: str, args: Mapping[str, Any]) -> Any:
        async with AsyncExitStack() as stack:
            if method in STATE_COMMANDS:
                await stack.enter_async_context(self._change())
            if method == ONE_AT_A_TIME:
                await stack.enter_async_context(self._waking)
            if method in WORKER_CALLS:
                await stack.enter_async_context(self._changing_weights)
            size = len(self._engines)
            ranks = [engine.rank for engine in self._engines if engine.down is None]
            if method == "update_weight_version" and len({self._engines[rank].status.lost for rank in ranks}) > 1:
                raise Conflict("a replaced engine does not have the weights of the others: push weights")
            sent = {rank: fan_out.args_for(method, args, rank, size, self._num_ranks) for rank in ranks}
            answers = await (self._in_phases(method, sent) if method in PHASES else self._send(method, sent))
        if fan_out.is_mixed(answers) and (undo := fan_out.UNDONE_BY.get(method)) is not None:
            await self._send(undo[0], {answer.rank: undo[1] for answer in answers if answer.error is None})
        return fan_out.outcome(method, args, answers, size)

    async def _send(self, method: str, sent: Mapping[int, Mapping[str, Any]]) -> list[Answer]:
        calls = (_answer(self._engines[rank], method, dict(args)) for rank, args in sent.items())
        return list(await asyncio.gather(*calls))

    async def _in_phases(self, method: str, sent: Mapping[int, Mapping[str, Any]]) -> list[Answer]:
        token, phase = secrets.token_hex(8), 1
        prepare = {rank: {"method": method, "args": args, "token": token} for rank, args in sent.items()}
        answers = await self._send("prepare", prepare)
        while waiting := [answer.rank for answer in answers if answer.error is None and "prepared" in answer.result]:
            refused = [answer for answer in answers if answer.error and not isinstance(answer.error, EngineDead)]
            if refused:
                reason = f"engine {refused[0].rank} refused: {refused[0].error}"
                await self._decide(waiting, token, go=False, reason=reason)
                return [*refused, *(Answer(rank, TAKEN_BACK) for rank in waiting)]
            answers = await self._commit(waiting, token, begins_epoch=PHASES[method] == phase)
            phase += 1
        return [answer if answer.error else Answer(answer.rank, answer.result["result"]) for answer in answers]

    async def _commit(self, ranks: Sequence[int], token: str, *, begins_epoch: bool) -> list[Answer]:
        if not begins_epoch:
            return await self._decide(ranks, token, go=True)
        async with self._changing_weights:
            epoch = 1 + max(engine.status.epoch for engine in self._engines)
            return await self._decide(ranks, token, go=True, values={"epoch": epoch})

    async def _decide(self, ranks: Sequence[int], token: str, **decision: Any) -> list[Answer]:
        return await self._send("decide", {rank: {"token": token, **decision} for rank in ranks})


async def _answer(engine: EngineClient, method: str, args: dict[str, Any]) -> Answer:
    try:
        return Answer(engine.rank, await engine.call(method, args))
    except RequestError as error:
        return Answer(engine.rank, error=error)
