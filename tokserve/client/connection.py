"""The way to the engine: its process started or joined, its verbs called, its pulse felt, its successor put in place.

One engine at a time; a `Link` stands for one engine, so news by another link than the present one is old news.  Knows
verbs and their answers; requests and their outputs are passed on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

from tokserve.client.launch import EngineProcess, describe_exit, watch
from tokserve.client.link import Link
from tokserve.client.outputs import Ready, Status
from tokserve.client.pulse import Pulse
from tokserve.config import Config
from tokserve.errors import BY_STATUS, EngineDead, RequestError, RequestFailed, StartError
from tokserve.messages import Call, Dead, FromEngine, Reply, Step, ToEngine, Verdict

logger = logging.getLogger(__name__)

LAST_WORDS = 0.3  # seconds between the process's end and giving up on a message from it
SHUTDOWN_PATIENCE = 5.0  # seconds the engine may take to end by itself
RETRY = (1.0, 30.0)  # seconds between two starts that fail: at first, and at most after doubling
RESTART_WINDOW = 600.0  # seconds in which an engine is replaced at most `restart_engine` times
PULSE = -1  # the call of the pings
UNSENDABLE = (OverflowError, TypeError, UnicodeEncodeError)  # raised for what JSON and Python can say, and no message


class EngineGone(StartError):
    """The engine that was to be joined has ended meanwhile."""


class Listener(Protocol):
    """Whom the engine's messages are for."""

    def on_outputs(self, message: Step | Verdict) -> None:
        """Outputs have come, or the word on a submission."""

    def on_settled(self) -> None:
        """No more messages for now."""

    def on_serving(self, ready: Ready) -> None:
        """An engine, the first or another, takes requests from here on."""

    def on_lost(self, error: EngineDead) -> None:
        """The engine is gone with all its requests."""

    def on_replaced(self) -> object:
        """Another engine serves after one that was lost, or none will."""


class Connection:
    """`down` is set while there is no engine: for good when `dead` is set too, else until another serves."""

    def __init__(self, config: Config, listener: Listener) -> None:
        self.status = Status()
        self.ready: Ready | None = None
        self.dead: EngineDead | None = None
        self.down: EngineDead | None = None
        self._config = config
        self._listener = listener
        self._engine: EngineProcess | None = None
        self._link: Link | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Future[Ready] | None = None
        self._closing = False
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._last_call = 0
        self._name: str | None = None
        self._restarts: list[float] = []  # when
        self._restarting: asyncio.Task[None] | None = None
        self._start_seconds = 1.0  # the last start took
        self._pulse = Pulse(config.runtime.step_timeout, lambda: self.send(Call(PULSE, "ping")), self._on_hung)

    # --- start ---

    def launch(self) -> str:
        """Start an engine process; returns its address.  Raises StartError."""
        if self._engine is not None or self._closing:
            raise StartError("an AsyncLLM starts once; make another")
        self._engine = self._process()
        return self._engine.address

    def _process(self) -> EngineProcess:
        try:
            return EngineProcess(self._config)
        except OSError as error:
            raise StartError(f"the engine process could not be started: {error.strerror}") from error

    @property
    def engine(self) -> EngineProcess:
        """The process that `launch` or a restart has started."""
        if self._engine is None:
            raise EngineDead("the engine has not started: await start() first")
        return self._engine

    async def join(self, address: str, pid: int | None = None, name: str | None = None) -> Ready:
        """Say hello to an engine, under this name, and wait until it is ready.  Raises StartError."""
        self._name = name
        return await self._join(address, pid)

    async def _join(self, address: str, pid: int | None = None) -> Ready:
        self._loop = asyncio.get_running_loop()
        began = self._loop.time()
        self._starting = self._loop.create_future()
        if self._link is not None:
            self._link.close()
        self._link = link = Link(address, self._on_message, self._listener.on_settled, self._name)
        if self._engine is not None:
            self._engine.exited.add_done_callback(lambda exited: self._on_exit(link, exited))
        elif pid is not None:
            try:
                watch(pid, lambda: self._on_end(link, "the engine process ended"))
            except ProcessLookupError:
                raise EngineGone("the engine process has ended") from None
            except OSError as error:  # no descriptor left, say
                raise StartError(f"the engine process cannot be watched: {error.strerror}") from None
        link.send(Call(0, "hello"))
        timeout = self._config.runtime.start_timeout
        try:
            ready = await asyncio.wait_for(self._starting, timeout)
        except TimeoutError:
            raise StartError(f"the engine was not ready after {timeout:g} s (start_timeout)") from None
        if link is not self._link:
            reason = self.down.private if self.down else "it ended at once"
            raise EngineGone(f"the engine failed to start: {reason}; its log says more")
        self._start_seconds = self._loop.time() - began
        return ready

    def serve(self, ready: Ready) -> None:
        """Requests can be sent from here on.  Raises StartError if the engine has died since it was ready."""
        if self.dead is not None:
            raise StartError(f"the engine failed to start: {self.dead.private}; its log says more")
        self._serve(ready)

    def _serve(self, ready: Ready) -> None:
        self.ready = ready
        self.down = self._restarting = None
        self._pulse.start()
        self._listener.on_serving(ready)

    # --- what is said ---

    def check(self) -> None:
        """Raises EngineDead unless there is an engine that serves."""
        if self.down is not None:
            raise self.down.again()
        if self._link is None or self.ready is None:
            raise EngineDead(
                "the engine has been shut down" if self._closing else "the engine has not started: await start() first"
            )

    def send(self, message: ToEngine) -> None:
        """Queue a message for the engine, if there is one.  Raises what `UNSENDABLE` names."""
        if self._link is not None:
            self._link.send(message)

    def next_call(self) -> int:
        """A number for a call or a submission."""
        self._last_call += 1
        return self._last_call

    async def call(self, method: str, args: dict[str, Any]) -> Any:
        """Call a verb.  Raises what `errors.BY_STATUS` names, with the engine's message, or EngineDead."""
        self.check()
        return await self._ask(method, args)

    async def _ask(self, method: str, args: dict[str, Any]) -> Any:
        call_id = self.next_call()
        self._calls[call_id] = answer = asyncio.get_running_loop().create_future()
        try:
            self.send(Call(call_id, method, args))
            return await answer
        except UNSENDABLE as error:
            raise RequestError(f"{method}: {error}") from None
        finally:
            self._calls.pop(call_id, None)

    @property
    def silence(self) -> float:
        """Seconds for which the engine has owed the answer to a ping; it answers between two steps."""
        return self._pulse.silence

    @property
    def hung(self) -> bool:
        """The engine has not finished a step for longer than `step_timeout`."""
        return self._pulse.hung

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, Step | Verdict):
            self._listener.on_outputs(message)
        elif isinstance(message, Reply):
            self._on_reply(message)
        elif isinstance(message, Status):
            self.status = message
        elif isinstance(message, Dead):
            self._die(self._link, message.reason, message.expected)
        elif self._starting is not None and not self._starting.done():
            self.status = message.status
            self._starting.set_result(message)

    def _on_reply(self, reply: Reply) -> None:
        if reply.call_id == PULSE:
            self._pulse.answered()
        answer = self._calls.get(reply.call_id)
        if answer is None or answer.done():
            return
        if reply.error is None:
            answer.set_result(reply.result)
        else:
            kind = BY_STATUS.get(reply.status, RequestFailed)
            answer.set_exception(kind(reply.error, field=reply.field))

    # --- its end, and another in its place ---

    async def close(self, leave: Callable[[], Awaitable[object]]) -> None:
        """End an engine that was launched here: the process and its files go.  One that was joined stays, and `leave`
        is awaited for a while, to leave nothing running there."""
        self._closing = True
        self._pulse.stop()
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait([self._restarting])
        if self._engine is not None:
            asked = self.ready is not None and self.down is None
            if asked:
                asking = asyncio.ensure_future(self._ask_to_end())
                either: list[asyncio.Future[Any]] = [asking, self._engine.exited]
                await asyncio.wait(either, timeout=SHUTDOWN_PATIENCE, return_when="FIRST_COMPLETED")
                asked = asking.done()
                asking.cancel()
            await self._engine.stop(SHUTDOWN_PATIENCE if asked else 0.0)
        else:
            with suppress(TimeoutError, EngineDead):
                await asyncio.wait_for(leave(), SHUTDOWN_PATIENCE)
        self._abandon(EngineDead("the engine has been shut down"))

    async def _ask_to_end(self) -> None:
        with suppress(EngineDead, RequestFailed):
            await self.call("shutdown", {})

    def _abandon(self, error: EngineDead) -> None:
        """Let go of the engine: all who wait raise the error."""
        self._pulse.stop()
        if self._link is not None:
            self._link.close()
            self._link = None
        self._listener.on_lost(error)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error.again())
        self._calls.clear()

    def _on_exit(self, link: Link, exited: asyncio.Future[int]) -> None:
        if not exited.cancelled():
            self._on_end(link, describe_exit(exited.result()))

    def _on_end(self, link: Link, reason: str) -> None:
        if not self._closing and self._loop is not None:
            self._loop.call_later(LAST_WORDS, self._die, link, reason, False)

    def _die(self, link: Link | None, reason: str, expected: bool) -> None:
        """The engine of this link is gone.  During start-up that is a StartError, later EngineDead for all who wait."""
        if link is None or link is not self._link or self._closing:
            return
        if self._starting is not None and not self._starting.done():
            self._starting.set_exception(
                EngineGone(reason if expected else f"the engine failed to start: {reason}; its log says more")
            )
        serving = self.ready is not None
        if serving and self._may_restart():
            seconds = math.ceil(self._start_seconds)
            message = "the engine was lost and another is being started; send the request again"
            self.down = EngineDead(message, private=reason, code="engine_restarting", retry_after=seconds)
        else:
            self.dead = self.down = EngineDead(private=reason)
        self._abandon(self.down)
        if serving and self._restarting is None and self._engine is not None:
            self._restarting = asyncio.ensure_future(self._restart(self._engine))

    def _on_hung(self) -> None:
        """Its process lives, so nobody else will end it.  If none may take its place, it may yet come back."""
        if self._engine is not None and self._may_restart():
            self._engine.signal(signal.SIGKILL)  # a process that is stopped, or stuck in a kernel, hears no other
            self._die(self._link, f"it had not finished a step for {self.silence:.0f} s, and was killed", False)

    def _may_restart(self) -> bool:
        assert self._loop is not None
        recent = [when for when in self._restarts if self._loop.time() - when < RESTART_WINDOW]
        return len(recent) < self._config.runtime.restart_engine

    async def _restart(self, engine: EngineProcess) -> None:
        """Put another engine in the place of one that is gone, and of that again, as often as may be."""
        assert self._loop is not None and self.down is not None
        last = self.status
        pause, longest = RETRY
        while self.dead is None:
            logger.error("the engine died: %s; starting another", self.down.private)
            self._restarts.append(self._loop.time())
            await engine.stop(0.0)
            try:
                self._engine = engine = self._process()
                ready = await self._join(engine.address)
                await self._hand_over(last)
                self._serve(ready)
                self._log_successor()
                break
            except (StartError, RequestError) as error:
                logger.error("the engine cannot be restarted: %s", error)
                if not self._may_restart():
                    self.dead = self.down = EngineDead(private=str(error))
                    break
                await asyncio.sleep(pause)  # what it lacked (memory, a descriptor) somebody may give back
                pause = min(2 * pause, longest)
        self._listener.on_replaced()

    def _log_successor(self) -> None:
        status = self.status
        if status.quarantine is None:
            logger.info("another engine serves, with weights of version %s", status.weight_version)
        else:
            logger.error("another engine is there, and serves nothing: %s", status.quarantine)

    async def _hand_over(self, last: Status) -> None:
        """Have a new engine be what the old one was, before anybody is served.  Raises RequestError, StartError."""
        timeout = self._config.runtime.start_timeout
        try:
            await asyncio.wait_for(self._ask("take_over", {"last": last}), timeout)
        except TimeoutError:
            raise StartError(f"the engine was not what the last one was after {timeout:g} s (start_timeout)") from None

    def rejoin(self, address: str, pid: int) -> None:
        """Another engine has taken the place of the one that was joined: serve with that, when it is ready."""
        self._die(self._link, "another engine has taken its place", False)
        if self.dead is None:
            if self._restarting is not None:
                self._restarting.cancel()
            self._restarting = asyncio.ensure_future(self._rejoin(address, pid))

    async def _rejoin(self, address: str, pid: int) -> None:
        try:
            self._serve(await self._join(address, pid))
        except EngineGone as error:  # whoever owns it says what comes next
            logger.error("the new engine cannot be joined: %s", error)
        except StartError as error:  # for want of descriptors, say: another process in this one's place can
            self.dead = self.down = EngineDead(private=f"the new engine cannot be joined: {error}")
            self._abandon(self.dead)

    def give_up(self) -> None:
        """No other engine will take the place of the one that was joined."""
        self._die(self._link, "the engine has ended and is not replaced", False)
        self.dead = self.down = EngineDead(private=self.down.private if self.down else "")

    async def restored(self) -> None:
        """Wait while another engine is being started."""
        while self._restarting is not None and self.dead is None:
            await asyncio.wait([self._restarting])
