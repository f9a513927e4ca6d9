"""`EngineClient`: one engine process, started or joined, its messages both ways, its heartbeat and its replacement.

There is one engine at a time and a `ClientSocket` per engine: messages from any but the current socket are ignored.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import msgspec

from tokserve.base.errors import BY_STATUS, EngineDead, RequestError, RequestFailed, StartError
from tokserve.base.processes import see_log
from tokserve.client.announcement import RequestAnnouncement
from tokserve.client.client_socket import ClientSocket
from tokserve.client.heartbeat import Heartbeat
from tokserve.client.launch import EngineHandle, start_engine, watch
from tokserve.client.outputs import EngineReport, Ready, Status, StepStats
from tokserve.client.request_state import RequestState
from tokserve.client.requests import Requests
from tokserve.client.resubmissions import Resubmissions
from tokserve.config import Config
from tokserve.protocol.messages import (
    Abort,
    Announce,
    Call,
    Dead,
    EndAnnouncement,
    FromEngine,
    Reply,
    Stall,
    StepOutput,
    Submit,
    SubmitReply,
    ToEngine,
)

logger = logging.getLogger(__name__)

LAST_MESSAGES = 0.3  # seconds between the process's end and giving up on a message from it
SHUTDOWN_PATIENCE = 5.0  # seconds the engine may take to end by itself
RETRY = (1.0, 30.0)  # seconds between two starts that fail: at first, and at most after doubling
RESTART_WINDOW = 600.0  # seconds in which an engine is replaced at most `restart_engine` times
PING = -1  # the call id of the pings
UNSENDABLE = (OverflowError, TypeError, UnicodeEncodeError)  # raised for values that no message can hold


class EngineGone(StartError):
    """The engine that was to be joined has ended meanwhile."""


class LostEngine(NamedTuple):
    """When an engine was lost (a time of the event loop), and its last status."""

    at: float
    status: Status


class EngineClient:
    """`down` is set while there is no engine: for good when `dead` is set too, else until another serves.

    `stats` and `status` are what the engine last reported; `requests` are those in flight.  `rank`: of the engine among
    several (`Replicas`), which the log names.  `successor_status`: a context within which an engine that replaces one
    takes over the state that it yields, given the last status of the one that was lost, and begins to serve.
    """

    def __init__(self, config: Config, rank: int = 0, environment: Mapping[str, str] | None = None) -> None:
        self.rank = rank
        self.requests = Requests()
        self.stats = StepStats()
        self.status = Status()
        self.ready: Ready | None = None
        self.dead: EngineDead | None = None
        self.down: EngineDead | None = None
        self._config = config
        self._environment = environment
        self._process_name = "engine" if config.parallel.data_parallel_size == 1 else f"engine-{rank}"
        self.successor_status: Callable[[Status], AbstractAsyncContextManager[Status]] = nullcontext
        self.lost: LostEngine | None = None  # until another serves
        self._on_replaced: Callable[[], object] = lambda: None
        self._engine: EngineHandle | None = None
        self._socket: ClientSocket | None = None
        self._forget_process: Callable[[], None] = lambda: None  # of an engine that was joined
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Future[Ready] | None = None
        self._closing = False
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._last_call = 0
        self._announced: dict[int, Announce] = {}
        self._resubmissions = Resubmissions(
            send=self.send,
            announce=self.tell,
            end_announcement=self.end_announcement,
            waits=self.requests.waits,
            resolve=self.requests.resolve,
        )
        self._released: list[str] = []  # engine requests that were given up in this turn of the event loop
        self._name: str | None = None
        self._restarts: list[float] = []  # when
        self._restarting: asyncio.Task[None] | None = None
        self._start_seconds = 1.0  # the last start took
        self._heartbeat = Heartbeat(config.runtime.step_timeout, lambda: self.send(Call(PING, "ping")), self._on_hung)

    # --- start ---

    def launch(self) -> None:
        """Start an engine process.  Raises StartError."""
        if self._engine is not None or self._closing:
            raise StartError("an AsyncLLM can be started only once; create another")
        self._engine = self._process()

    async def joined(self) -> Ready:
        """Join the engine that `launch` has started, and wait until it is ready.  Raises StartError."""
        return await self._join(await self._located(self.engine))

    async def relaunch(self, config: Config) -> Ready:
        """Start another engine, with this configuration, in the place of one that does not serve yet."""
        self._config = config
        await self.engine.stop(0.0)
        self._engine = self._process()
        return await self.joined()

    def _process(self) -> EngineHandle:
        config = self._config
        if self.lost is not None:  # `take_over` names the adapters; one that cannot be read must not end the start
            config = msgspec.structs.replace(config, lora=msgspec.structs.replace(config.lora, lora_modules=None))
        try:
            return start_engine(config, self._process_name, self._environment)
        except OSError as error:
            raise StartError(f"the engine process could not be started: {error.strerror}") from error

    async def _located(self, engine: EngineHandle) -> str:
        timeout = self._config.runtime.start_timeout
        try:
            async with asyncio.timeout(timeout):
                return await engine.located()
        except TimeoutError:
            raise StartError(f"no machine had resources for the engine within {timeout:g} s (start_timeout)") from None

    @property
    def engine(self) -> EngineHandle:
        """What `launch` or a restart has started."""
        if self._engine is None:
            raise EngineDead("the engine has not started: await start() first")
        return self._engine

    async def join(self, address: str, pid: int | None = None, name: str | None = None) -> Ready:
        """Greet an engine under this name, and wait until it is ready.  Raises StartError."""
        self._name = name
        return await self._join(address, pid)

    async def _join(self, address: str, pid: int | None = None) -> Ready:
        self._loop = asyncio.get_running_loop()
        began = self._loop.time()
        self._starting = self._loop.create_future()
        if self._socket is not None:
            self._socket.close()
        self._forget_process()
        keys = None if self._engine is None else self._engine.keys
        self._socket = socket = ClientSocket(address, self._on_message, self.requests.notify, self._name, keys)
        if self._engine is not None:
            engine = self._engine

            def on_exit(exited: asyncio.Future[int]) -> None:
                if not exited.cancelled():
                    self._on_end(socket, engine.describe_end())

            engine.exited.add_done_callback(on_exit)
        elif pid is not None:
            try:
                self._forget_process = watch(pid, lambda: self._on_end(socket, "the engine process ended"))
            except ProcessLookupError:
                raise EngineGone("the engine process has ended") from None
            except OSError as error:  # no descriptor left, say
                raise StartError(f"the engine process cannot be watched: {error.strerror}") from None
        socket.send(Call(0, "hello"))
        timeout = self._config.runtime.start_timeout
        try:
            async with asyncio.timeout(timeout):
                ready = await self._starting
        except TimeoutError:
            raise StartError(f"the engine was not ready within {timeout:g} s (start_timeout)") from None
        if socket is not self._socket:
            reason = self.down.private if self.down else "it ended at once"
            raise EngineGone(see_log(f"the engine failed to start: {reason}"))
        self._start_seconds = self._loop.time() - began
        return ready

    def serve(self, ready: Ready) -> None:
        """Requests can be sent from here on.  Raises StartError if the engine has died since it was ready."""
        if self.dead is not None:
            raise StartError(see_log(f"the engine failed to start: {self.dead.private}"))
        self._serve(ready)

    def _serve(self, ready: Ready) -> None:
        self.ready = ready
        self.down = self._restarting = self.lost = None
        for announce in self._announced.values():  # to an engine that was lost
            self.send(announce)
        self._heartbeat.start()

    @property
    def reports(self) -> list[EngineReport]:
        return [EngineReport(self.rank, self.stats, self.status, self.ready, self.down is not None)]

    @property
    def num_inflight(self) -> int:
        """Requests that have not ended."""
        return len(self.requests)

    def request_ids(self) -> list[str]:
        """The ids of all requests in flight or announced, without prefixes."""
        return sorted({*self.requests.ids(), *(announce.request_id for announce in self._announced.values())})

    def in_use(self, choice_ids: Sequence[str]) -> bool:
        """Whether one of these is an engine request in flight."""
        return self.requests.in_use(choice_ids)

    # --- messages ---

    def check(self) -> None:
        """Raises EngineDead unless there is an engine that serves."""
        if self.down is not None:
            raise self.down.again()
        if self._socket is None or self.ready is None:
            raise EngineDead(
                "the engine has been shut down" if self._closing else "the engine has not started: await start() first"
            )

    def send(self, message: ToEngine) -> None:
        """Queue a message for the engine, if there is one.  Raises what `UNSENDABLE` names."""
        self._send_released()
        if self._socket is not None:
            self._socket.send(message)

    def announce(self, request_id: str, group_id: str | None) -> RequestAnnouncement:
        """Let aborts find a request that is to come.  Raises what `UNSENDABLE` names."""
        return RequestAnnouncement([self], request_id, group_id)

    def tell(self, request_id: str, group_id: str | None) -> int:
        """Tell the engine of a request that is to come, and the one that replaces it."""
        number = self._next_call()
        announce = Announce(number, request_id, group_id)
        self.send(announce)
        self._announced[number] = announce
        return number

    def end_announcement(self, number: int) -> None:
        if self._announced.pop(number, None) is not None:
            self.send(EndAnnouncement(number))

    def submit(
        self, requests: Sequence[RequestState], client: str, announcement: RequestAnnouncement | None = None
    ) -> EngineClient:
        """Send requests as one submission; returns the client that has sent them.  Raises Conflict, RequestError for
        values that no message can hold."""
        call_id = self._next_call()
        self.requests.add(call_id, requests)
        engine_requests = [choice for request in requests for choice in request.engine_requests]
        request_id = engine_requests[0].request_id.rpartition("#")[0]
        try:
            number = 0 if announcement is None else announcement.number(self)
            submit = Submit(call_id, request_id, engine_requests, client, number)
            self.send(submit)
        except UNSENDABLE as error:
            self.requests.resolve(SubmitReply(call_id, "invalid", f"the request cannot be sent: {error}"))
            raise RequestError(f"the request cannot be sent: {error}") from None
        if self._name is not None:  # the engine has other front ends
            self._resubmissions.sent(submit)
        for request in requests:
            request.engine_requests = ()
        return self

    def release(self, request: RequestState) -> None:
        """Give a request up; the engine aborts what has not ended.  All that are given up in one turn of the event
        loop, such as the thousands of one large request, are aborted by one message."""
        request_ids = self.requests.abandon(request)
        if request_ids and not self._released and self._loop is not None:
            self._loop.call_soon(self._send_released)
        self._released += request_ids

    def _send_released(self) -> None:
        request_ids, self._released = self._released, []
        if request_ids and self._socket is not None:
            self._socket.send(Abort(request_ids, "abort_disconnect"))

    def release_soon(self, request: RequestState) -> None:
        if self._loop is not None and not self._loop.is_closed():
            with suppress(RuntimeError):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(self.release, request)

    def stall(self, request: RequestState, stalled: bool) -> None:
        """The consumer cannot take more for now, or can again."""
        request_ids = request.open_ids()
        if request_ids and self.down is None:
            self.send(Stall(request_ids, stalled))

    def _next_call(self) -> int:
        """An id for a call or a submission."""
        self._last_call += 1
        return self._last_call

    async def call(self, method: str, args: dict[str, Any]) -> Any:
        """Call a command.  Raises what `errors.BY_STATUS` names, with the engine's message, or EngineDead."""
        self.check()
        return await self._call(method, args)

    async def _call(self, method: str, args: dict[str, Any]) -> Any:
        call_id = self._next_call()
        self._calls[call_id] = reply = asyncio.get_running_loop().create_future()
        try:
            self.send(Call(call_id, method, args))
            return await reply
        except UNSENDABLE as error:
            raise RequestError(f"{method}: {error}") from None
        finally:
            self._calls.pop(call_id, None)
            del reply  # its exception refers to this frame

    @property
    def silence(self) -> float:
        """Seconds for which the engine has owed the answer to a ping; it answers between two steps."""
        return self._heartbeat.silence

    @property
    def hung(self) -> bool:
        return self._heartbeat.hung

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, StepOutput):
            self.stats = message.stats
            if stopped := self.requests.receive(message):
                self.send(Abort(stopped, "abort_stop_string"))
        elif isinstance(message, SubmitReply):
            if not self._resubmissions.repeats(message):
                self.requests.resolve(message)
        elif isinstance(message, Reply):
            self._on_reply(message)
        elif isinstance(message, Status):
            self.status = message
        elif isinstance(message, Dead):
            self._die(self._socket, message.reason, message.expected)
        elif self._starting is not None and not self._starting.done():
            self.status = message.status
            self._starting.set_result(message)

    def _on_reply(self, reply: Reply) -> None:
        if reply.call_id == PING:
            self._heartbeat.answered()
        waiting = self._calls.get(reply.call_id)
        if waiting is None or waiting.done():
            return
        if reply.error is None:
            waiting.set_result(reply.result)
        else:
            kind = BY_STATUS.get(reply.status, RequestFailed)
            waiting.set_exception(kind(reply.error, field=reply.field, code=reply.code))

    # --- its end and its replacement ---

    async def close(self) -> None:
        """End an engine that was launched here: the process and its files go.  One that was joined stays, without the
        requests that were sent from here."""
        self._closing = True
        self._heartbeat.stop()
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait([self._restarting])
        if self._engine is not None:
            acknowledged = False
            if self.ready is not None and self.down is None:
                shutdown = asyncio.ensure_future(self._shut_down())
                either: list[asyncio.Future[Any]] = [shutdown, self._engine.exited]
                await asyncio.wait(either, timeout=SHUTDOWN_PATIENCE, return_when="FIRST_COMPLETED")
                acknowledged = shutdown.done()
                shutdown.cancel()
            await self._engine.stop(SHUTDOWN_PATIENCE if acknowledged else 0.0)
        elif self.requests:
            with suppress(TimeoutError, EngineDead):
                async with asyncio.timeout(SHUTDOWN_PATIENCE):
                    await self.call("abort", {"keys": self.requests.ids(), "reason": "shutdown"})
        self._disconnect(EngineDead("the engine has been shut down"))

    async def _shut_down(self) -> None:
        with suppress(EngineDead, RequestFailed):
            await self.call("shutdown", {})

    def _disconnect(self, error: EngineDead) -> None:
        """Close the socket: all requests and calls end with the error."""
        self._heartbeat.stop()
        self._forget_process()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._resubmissions.clear()
        self.requests.fail(error)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error.again())
        self._calls.clear()

    def _on_end(self, socket: ClientSocket, reason: str) -> None:
        if not self._closing and self._loop is not None:
            self._loop.call_later(LAST_MESSAGES, self._die, socket, reason, False)

    def _die(self, socket: ClientSocket | None, reason: str, expected: bool) -> None:
        """The engine of this socket is gone.  A StartError during start-up, later EngineDead for all that wait."""
        if socket is None or socket is not self._socket or self._closing:
            return
        if self._starting is not None and not self._starting.done():
            self._starting.set_exception(
                EngineGone(reason if expected else see_log(f"the engine failed to start: {reason}"))
            )
        self.stats = StepStats()
        serving = self.ready is not None
        if serving and self._may_restart():
            seconds = math.ceil(self._start_seconds)
            message = "the engine was lost and another is being started; send the request again"
            self.down = EngineDead(message, private=reason, code="engine_restarting", retry_after=seconds)
        else:
            self.dead = self.down = EngineDead(private=reason)
        self._disconnect(self.down)
        if serving and self._restarting is None and self._engine is not None:
            self._restarting = asyncio.ensure_future(self._restart(self._engine))

    def _on_hung(self) -> None:
        """Its process lives, so it must be killed to be replaced.  If it may not be replaced, it may still recover."""
        if self._engine is not None and self._may_restart():
            self._engine.signal(signal.SIGKILL)  # a process that is stopped, or stuck in a kernel, hears no other
            self._die(self._socket, f"it had not finished a step for {self.silence:.0f} s, and was killed", False)

    def _may_restart(self) -> bool:
        assert self._loop is not None
        recent = [when for when in self._restarts if self._loop.time() - when < RESTART_WINDOW]
        return len(recent) < self._config.runtime.restart_engine

    async def _restart(self, engine: EngineHandle) -> None:
        """Replace an engine that is gone, and its replacement, as often as `restart_engine` allows."""
        assert self._loop is not None and self.down is not None
        last = self.status
        self.lost = LostEngine(self._loop.time(), last)
        pause, longest = RETRY
        while self.dead is None and not self._closing:
            logger.error("the %s died: %s; starting another", self._process_name, self.down.private)
            self._restarts.append(self._loop.time())
            try:
                await engine.stop(0.0)
                self._engine = engine = self._process()
                ready = await self._join(await self._located(engine))
                async with self.successor_status(last) as state:
                    await self._transfer_state(state)
                    self._serve(ready)
                if self.status.quarantine is None:
                    logger.info("another engine serves, with weights of version %s", self.status.weight_version)
                else:
                    logger.error("another engine is there, and serves nothing: %s", self.status.quarantine)
                break
            except (StartError, RequestError) as error:
                logger.error("the %s cannot be restarted: %s", self._process_name, error)
                if not self._may_restart():
                    self.dead = self.down = EngineDead(private=str(error))
                    break
                await asyncio.sleep(pause)  # what it lacked (memory, a descriptor) may become free
                pause = min(2 * pause, longest)
            except Exception as error:  # whatever it is, those who wait for the engine must hear of it
                logger.exception("the %s cannot be restarted", self._process_name)
                self.dead = self.down = EngineDead(private=f"{type(error).__name__}: {error}")
        if not self._closing:
            self._on_replaced()

    def on_replaced(self, callback: Callable[[], object]) -> None:
        """Call `callback` when another engine serves after one that was lost, or when none will."""
        self._on_replaced = callback

    async def _transfer_state(self, last: Status) -> None:
        """Give a new engine the state of the old one, before it serves.  Raises RequestError, StartError."""
        timeout = self._config.runtime.start_timeout
        try:
            async with asyncio.timeout(timeout):
                await self._call("take_over", {"last": last})
        except TimeoutError:
            raise StartError(f"the new engine has no state after {timeout:g} s (start_timeout)") from None

    def rejoin(self, address: str, pid: int) -> None:
        """Another engine has replaced the one that was joined: use it when it is ready."""
        self._die(self._socket, "another engine has taken its place", False)
        if self.dead is None:
            if self._restarting is not None:
                self._restarting.cancel()
            self._restarting = asyncio.ensure_future(self._rejoin(address, pid))

    async def _rejoin(self, address: str, pid: int) -> None:
        try:
            self._serve(await self._join(address, pid))
        except EngineGone as error:  # its owner decides what comes next
            logger.error("the new engine cannot be joined: %s", error)
        except StartError as error:  # no descriptor left, say
            self._cannot_join(str(error))
        except Exception as error:  # whatever it is, those who wait for the engine must hear of it
            logger.exception("the new engine cannot be joined")
            self._cannot_join(f"{type(error).__name__}: {error}")

    def _cannot_join(self, reason: str) -> None:
        self.dead = self.down = EngineDead(private=f"the new engine cannot be joined: {reason}")
        self._disconnect(self.dead)

    def give_up(self) -> None:
        """No other engine will replace the one that was joined."""
        self._die(self._socket, "the engine has ended and is not replaced", False)
        self.dead = self.down = EngineDead(private=self.down.private if self.down else "")

    async def restored(self) -> None:
        """Wait while another engine is being started."""
        while self._restarting is not None and self.dead is None:
            await asyncio.wait([self._restarting])
