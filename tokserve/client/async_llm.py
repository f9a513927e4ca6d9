"""`AsyncLLM`: the engine as an async Python object, and the only way to it for the HTTP server and `LLM`.

`generate` checks and sends a request at once and returns a `Stream` of its outputs.  A request ends early in one
way only: the stream is closed (or dropped), which aborts what has not ended.  When the engine dies, everything
that waits for it raises `EngineDead`; with `restart_engine`, another takes its place.  Nothing here knows HTTP, nor
how tokens come about.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from tokserve import checkpoint
from tokserve.client.inputs import Inputs, Order, Prepared, bare_id
from tokserve.client.launch import EngineProcess, describe_exit, watch
from tokserve.client.link import Link
from tokserve.client.outputs import Choice, Completion, Delivery, Ready, Status, StepStats
from tokserve.client.stream import Stream, Submission, collect
from tokserve.config import Config, resolve
from tokserve.errors import BY_STATUS, Conflict, EngineDead, RequestError, RequestFailed, StartError, refused
from tokserve.messages import Abort, Call, Dead, FromEngine, Reply, Step, Submit, Verdict
from tokserve.params import SamplingParams
from tokserve.text.tokenizer import Tokenizer

__all__ = ["AsyncLLM", "Completion", "StepStats", "Stream", "collect"]

logger = logging.getLogger(__name__)

LAST_WORDS = 0.3  # seconds between the process's end and giving up on a message from it
SHUTDOWN_PATIENCE = 5.0  # seconds the engine may take to end by itself
RESTART_WINDOW = 600.0  # seconds in which an engine is replaced at most `restart_engine` times
LONGEST_PULSE = 15.0  # seconds between two pings
PULSE = -1  # their call


def _part(request: Any, name: str) -> Any:
    """A field of a request that may be a mapping or, as vLLM's are, an object."""
    return request.get(name) if isinstance(request, Mapping) else vars(request).get(name)


class AsyncLLM:
    """An engine in its own process.  Construct, `await start()`, use, `await shutdown()`, all in one event loop.

    `config` is resolved; `ready`, `status` and `stats` are what the engine says of itself.  `down` is set while there
    is no engine: for good when `dead` is set too, else until another has started in its place.
    """

    def __init__(self, model: str = "demo", **options: Any) -> None:
        """Options are those of `Config.make`.  Raises StartError."""
        self._set_up(resolve(Config.make(model=model, **options)))

    @classmethod
    def from_config(cls, config: Config) -> AsyncLLM:
        """With a configuration, resolved or not."""
        llm = cls.__new__(cls)
        llm._set_up(resolve(config) if config.cache.block_size is None else config)
        return llm

    def _set_up(self, config: Config) -> None:
        self.config = config
        self.stats = StepStats()
        self.status = Status()
        self.dead: EngineDead | None = None
        self.down: EngineDead | None = None
        self.on_replaced: Callable[[], object] = lambda: None  # another engine serves, or none will
        self._tokenizer: Tokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._engine: EngineProcess | None = None
        self._link: Link | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: Ready | None = None
        self._starting: asyncio.Future[Ready] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._inputs: Inputs | None = None
        self._deliveries: dict[str, Delivery] = {}  # by the engine's id of their first choice
        self._owners: dict[str, Choice] = {}  # by engine request
        self._leaving: Counter[str] = Counter()  # engine requests given up whose end is still to come, by rid
        self._submissions: dict[int, Submission] = {}  # that wait for their verdict, by call
        self._news: list[Delivery] = []  # with something to fetch since the last burst of messages
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._last_call = 0
        self._name: str | None = None
        self._restarts: list[float] = []  # when
        self._restarting: asyncio.Task[None] | None = None
        self._start_seconds = 1.0  # the last start took
        self._asked: float | None = None  # when the ping was sent that is not answered
        self._pulse: asyncio.TimerHandle | None = None

    # --- start and end ---

    async def start(self) -> None:
        """Start the engine and wait until it serves; once only.  Raises StartError."""
        if self._engine is not None or self._stopping is not None:
            raise StartError("an AsyncLLM starts once; make another")
        self._engine = self._launch()
        await self.connect(self._engine.address)

    def _launch(self) -> EngineProcess:
        try:
            return EngineProcess(self.config)
        except OSError as error:
            raise StartError(f"the engine process could not be started: {error.strerror}") from error

    @property
    def engine(self) -> tuple[str, int]:
        """Address and process id of the engine that `start` has started, for others to `connect` to."""
        if self._engine is None:
            raise EngineDead("the engine has not started")
        return self._engine.address, self._engine.pid

    async def connect(self, address: str, *, pid: int | None = None, name: str | None = None) -> None:
        """Join a running or starting engine; `start` does this for the engine it has started.

        `pid`: the engine's process, whose end is then noticed.  `name`: what the engine is to know this client by
        (whoever starts clients can then tell it, with the verb `leave`, that one has gone).
        """
        self._loop = asyncio.get_running_loop()
        self._name = name
        joining = asyncio.ensure_future(self._join(address, pid))
        loading = asyncio.ensure_future(asyncio.to_thread(lambda: self.tokenizer))
        started = False
        try:
            both: list[asyncio.Future[Any]] = [joining, loading]
            done, _ = await asyncio.wait(both, return_when="FIRST_EXCEPTION")
            for future in done:
                future.result()
            if self.dead is not None:  # it was ready before the tokenizer was, and then died
                raise StartError(f"the engine failed to start: {self.dead.private}; its log says more")
            self._serve(joining.result())
            self._beat()
            started = True
        finally:
            if not started:
                loading.cancel()
                if not joining.cancel() and not joining.cancelled():
                    joining.exception()  # looked at, lest asyncio complain
                await self.shutdown()

    async def _join(self, address: str, pid: int | None = None) -> Ready:
        """Say hello to an engine and wait until it is ready.  Raises StartError."""
        began = asyncio.get_running_loop().time()
        self._starting = asyncio.get_running_loop().create_future()
        if self._link is not None:
            self._link.close()
        self._link = link = Link(address, self._on_message, self._on_settled, self._name)
        if self._engine is not None:
            self._engine.exited.add_done_callback(lambda exited: self._on_exit(link, exited))
        elif pid is not None:
            try:
                watch(pid, lambda: self._on_end(link, "the engine process ended"))
            except ProcessLookupError:
                raise StartError("the engine process has ended") from None
        link.send(Call(0, "hello"))
        timeout = self.config.runtime.start_timeout
        try:
            ready = await asyncio.wait_for(self._starting, timeout)
        except TimeoutError:
            raise StartError(f"the engine was not ready after {timeout:g} s (start_timeout)") from None
        if link is not self._link:
            reason = self.down.private if self.down else "it ended at once"
            raise StartError(f"the engine failed to start: {reason}; its log says more")
        self._start_seconds = asyncio.get_running_loop().time() - began
        return ready

    def _serve(self, ready: Ready) -> None:
        """Requests can be sent from here on."""
        self._ready = ready
        self._inputs = Inputs(self.config, ready, lambda: self.tokenizer)
        self.down = self._asked = self._restarting = None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, loaded on first use; None with tokens_only."""
        if self._tokenizer is None and not self.config.server.tokens_only:
            with self._tokenizer_lock:
                if self._tokenizer is None:
                    model = self.config.model
                    name = model.tokenizer or model.model
                    self._tokenizer = Tokenizer.load(checkpoint.locate(name, weights=False))
        return self._tokenizer

    @property
    def ready(self) -> Ready:
        """What the engine said when it was ready."""
        if self._ready is None:
            raise EngineDead("the engine has not started")
        return self._ready

    @property
    def started(self) -> bool:
        """The engine has been ready."""
        return self._inputs is not None

    @property
    def silence(self) -> float:
        """Seconds for which the engine has owed the answer to a ping; it answers between two steps."""
        return 0.0 if self._asked is None or self._loop is None else self._loop.time() - self._asked

    @property
    def hung(self) -> bool:
        """The engine has not finished a step for longer than `step_timeout`."""
        return self.down is None and self.silence > self.config.runtime.step_timeout

    @property
    def num_inflight(self) -> int:
        """Requests that have not ended."""
        return len(self._deliveries)

    async def shutdown(self) -> None:
        """End the engine: requests in flight end with what they have, the process and its files go."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        if self._pulse is not None:
            self._pulse.cancel()
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait([self._restarting])
        if self._engine is not None:
            asked = self._ready is not None and self.down is None
            if asked:
                asking = asyncio.ensure_future(self._ask_to_end())
                either: list[asyncio.Future[Any]] = [asking, self._engine.exited]
                await asyncio.wait(either, timeout=SHUTDOWN_PATIENCE, return_when="FIRST_COMPLETED")
                asked = asking.done()
                asking.cancel()
            await self._engine.stop(SHUTDOWN_PATIENCE if asked else 0.0)
        elif self._deliveries:  # somebody else's engine: leave nothing running there
            with suppress(TimeoutError, EngineDead):
                await asyncio.wait_for(self.abort_own("shutdown"), SHUTDOWN_PATIENCE)
        self._abandon(EngineDead("the engine has been shut down"))

    async def _ask_to_end(self) -> None:
        with suppress(EngineDead, RequestFailed):
            await self._call("shutdown", {})

    def _abandon(self, error: EngineDead) -> None:
        """Let go of the engine: all who wait raise the error."""
        if self._link is not None:
            self._link.close()
            self._link = None
        for delivery in self._deliveries.values():
            delivery.fail(error.again())
        for submission in self._submissions.values():
            submission.settle(error.again())
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error.again())
        self._deliveries.clear()
        self._owners.clear()
        self._leaving.clear()
        self._submissions.clear()
        self._calls.clear()

    # --- requests ---

    def generate(
        self, prompt_ids: Sequence[int] | bytes, params: SamplingParams, *, request_id: str | None = None,
        stream: bool = True, text: bool = False, priority: int = 0, cache_salt: str = "",
        deadline_ms: int | None = None, queue_timeout_ms: int | None = None, group_id: str = "",
    ) -> Stream:  # fmt: skip
        """Send a request.  Raises RequestError for what is wrong with it, Conflict for an id in use, Unavailable for
        an engine without usable weights, EngineDead.

        `prompt_ids` may be packed (little-endian int32).  `stream` False: one delta per choice, at its end.
        `text`: deltas carry text.  `cache_salt`, `group_id` "": none.  See `Stream.accepted` for the engine's part.
        """
        order = Order(prompt_ids, params, request_id, stream, text, priority, cache_salt, deadline_ms, queue_timeout_ms)
        return self.submit([self.prepare(order)], group_id)[0]

    def prepare(self, order: Order) -> Prepared:
        """Check a request without sending it.  Raises RequestError, EngineDead."""
        self._line()
        assert self._inputs is not None
        return self._inputs.prepare(order)

    def submit(self, prepared: Sequence[Prepared], group_id: str = "") -> list[Stream]:
        """Send prepared prompts as one request, which is accepted or refused as a whole; a stream for each.

        They have one request_id, and their choices are numbered through (`Order.first_choice`).  Raises Conflict for
        an id in use here, EngineDead.
        """
        link = self._line()
        choices = [choice for each in prepared for choice in each.choices]
        if any(choice.rid in self._owners for choice in choices):
            message = f"request_id {prepared[0].request_id!r} is in use by a request in flight"
            raise Conflict(message, field="request_id", code="duplicate_id")
        deliveries = [Delivery(each.choices[0].rid, each.choices) for each in prepared]
        self._deliveries.update((delivery.request_id, delivery) for delivery in deliveries)
        self._owners.update((choice.rid, choice) for choice in choices)
        self._last_call += 1
        self._submissions[self._last_call] = submission = Submission(deliveries)
        adds = [add for each in prepared for add in each.adds]
        link.send(Submit(self._last_call, prepared[0].key, adds, group_id))
        return [Stream(self, *both, submission) for both in zip(prepared, deliveries, strict=True)]

    def _line(self) -> Link:
        """The way to an engine that serves.  Raises EngineDead."""
        if self.down is not None:
            raise self.down.again()
        if self._link is None or self._ready is None:
            raise EngineDead("the engine has been shut down" if self._stopping else "the engine has not started")
        return self._link

    def release(self, delivery: Delivery) -> None:
        """Forget a request; the engine is told to abort what has not ended."""
        if self._deliveries.get(delivery.request_id) is not delivery:
            return
        rids = self._discard(delivery)
        delivery.abandon()
        if rids and self._link is not None:
            self._leaving.update(rids)
            self._link.send(Abort(rids, "abort_disconnect"))

    def release_soon(self, delivery: Delivery) -> None:
        """`release`, from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            with suppress(RuntimeError):  # the loop has been closed meanwhile
                self._loop.call_soon_threadsafe(self.release, delivery)

    async def abort(self, request_ids: Sequence[str], reason: str = "abort_user") -> dict[str, str]:
        """End requests, whoever sent them, with what they have; returns when the engine has freed them.

        Ids may have a reply's prefix.  The result says "aborted", "finished" or "not_found" for every id as given.
        """
        keys = {given: bare_id(given) for given in request_ids}
        results = await self.call("abort", keys=list(keys.values()), reason=reason) if keys else {}
        return {given: results[key] for given, key in keys.items()}

    async def abort_group(self, group_id: str, reason: str = "abort_user") -> dict[str, str]:
        """The same for all requests of a group; the result is by bare id."""
        return await self._abort("abort_group", group=group_id, reason=reason)

    async def abort_all(self, reason: str = "abort_user") -> dict[str, str]:
        """The same for all requests of this engine."""
        return await self._abort("abort_all", reason=reason)

    async def abort_own(self, reason: str = "abort_user") -> dict[str, str]:
        """The same for all requests that were sent from here."""
        keys = {rid.rpartition("#")[0] for rid in self._owners}
        return await self._abort("abort", keys=sorted(keys), reason=reason)

    async def _abort(self, verb: str, **which: Any) -> dict[str, str]:
        results: dict[str, str] = await self.call(verb, **which)
        return results

    async def refresh(self, seconds: float) -> None:
        """Have `stats` say what the engine does now; gives up after so many seconds, or if it is dead."""
        with suppress(TimeoutError, EngineDead):
            await asyncio.wait_for(self.call("stats"), seconds)

    async def call(self, method: str, **args: Any) -> Any:
        """Call an admin verb of the engine.  Raises what `errors.BY_STATUS` names, with the engine's message, or
        EngineDead."""
        return await self._call(method, args)

    async def _call(self, method: str, args: dict[str, Any]) -> Any:
        link = self._line()
        self._last_call += 1
        call_id = self._last_call
        self._calls[call_id] = answer = asyncio.get_running_loop().create_future()
        try:
            link.send(Call(call_id, method, args))
            return await answer
        finally:
            self._calls.pop(call_id, None)

    def _beat(self) -> None:
        """Ask for a sign of life, now and ever again: an engine that hangs cannot say so itself."""
        assert self._loop is not None
        self._pulse = self._loop.call_later(min(self.config.runtime.step_timeout / 4, LONGEST_PULSE), self._beat)
        if self._asked is None and self.down is None and self._link is not None:
            self._asked = self._loop.time()
            self._link.send(Call(PULSE, "ping"))

    # --- control: names and meanings are vLLM's; docs/rl.md tells the semantics ---

    async def pause_generation(
        self, *, mode: str = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        """Stop generating; returns when that is so.  mode: abort, wait or keep; new requests wait."""
        mode = "wait" if wait_for_inflight_requests else mode
        await self._call("pause", {"mode": mode, "clear_cache": clear_cache})

    async def resume_generation(self) -> None:
        """Go on after a pause."""
        await self._call("resume", {})

    async def is_paused(self) -> bool:
        """Whether generation is paused."""
        return (await self.fresh_status()).paused

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give back memory: level 0 none, 1 the KV cache's, 2 the weights' as well; returns when it is free."""
        await self._call("sleep", {"level": level, "mode": mode})

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Undo `sleep`, or the parts in `tags`: weights, kv_cache, scheduling."""
        await self._call("wake_up", {"tags": None if tags is None else list(tags)})

    async def is_sleeping(self) -> bool:
        """Whether any part is asleep."""
        return (await self.fresh_status()).sleeping

    async def release_kv_cache_memory(self) -> None:
        """Give back the KV cache's memory until `wake_up(["kv_cache"])`."""
        await self._call("release_kv_cache_memory", {})

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Let nothing computed so far be found.  Running requests keep what they have, so both arguments mean nothing;
        after a weight update this is not needed."""
        return bool(await self._call("reset_prefix_cache", {}))

    async def init_weight_transfer_engine(self, request: Any) -> Any:
        """`request`: {"init_info": {...}} or an object with that attribute."""
        return await self._call("init_weight_transfer_engine", {"options": _part(request, "init_info") or {}})

    async def shutdown_weight_transfer_engine(self) -> None:
        """Let go of the backend; an open update is rolled back."""
        await self._call("shutdown_weight_transfer_engine", {})

    async def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        """Open an update.  Raises Conflict if one is open."""
        await self._call("start_weight_update", {"is_checkpoint_format": is_checkpoint_format})

    async def update_weights(self, request: Any) -> None:
        """Stage the tensors of {"update_info": {...}} (or an object with that attribute, or a list with one per rank);
        {"weight_dir": PATH} outside of an update is a whole one, with `weight_version` if that is there."""
        update = _part(request, "update_info")
        if update is None and isinstance(request, Mapping) and "weight_dir" in request:
            await self._call("update_weights_from_dir", dict(request))
            return
        if isinstance(update, list):  # there is one rank
            update = update[0] if update else None
        if not isinstance(update, Mapping):
            raise RequestError("update_info must be an object", field="update_info")
        await self._call("update_weights", {"update": dict(update)})

    async def feed_weights(self, stream: str, chunk: bytes, *, last: bool = False, broken: bool = False) -> None:
        """Stage a piece of a safetensors file; `stream` tells files apart, `broken`: the rest will not come."""
        await self._call("feed_weights", {"stream": stream, "chunk": chunk, "last": last, "broken": broken})

    async def finish_weight_update(self, weight_version: str | None = None) -> dict[str, Any]:
        """Commit: {"weight_version", "epoch", "message"}.  Raises RequestError if tensors are missing."""
        done: dict[str, Any] = await self._call("finish_weight_update", {"weight_version": weight_version})
        return done

    async def abort_weight_update(self) -> None:
        """Roll the open update back."""
        await self._call("abort_weight_update", {})

    async def update_weight_version(self, new_version: str) -> None:
        """Name the weights that serve; a new epoch."""
        await self._call("update_weight_version", {"new_version": new_version})

    async def get_weight_version(self) -> str:
        """The version of the weights that serve."""
        return (await self.fresh_status()).weight_version

    async def weight_checksums(self) -> dict[str, str]:
        """SHA-256 of the weights as they lie in memory, by place."""
        found: dict[str, str] = await self._call("weight_checksums", {})
        return found

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:  # fmt: skip
        """Call a method of the worker extension, between two steps: a result per worker.  Values are plain ones."""
        asked = {"method": method, "args": list(args), "kwargs": dict(kwargs or {})}
        results: list[Any] = await asyncio.wait_for(self._call("collective_rpc", asked), timeout)
        return results

    async def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call an importable function with the model, in the engine's process: a result per worker."""
        if "<" in func.__qualname__ or func.__module__ == "__main__":
            raise RequestError("func must be a function of a module that the engine can import", field="func")
        results: list[Any] = await self._call("apply_model", {"function": f"{func.__module__}:{func.__qualname__}"})
        return results

    async def fresh_status(self) -> Status:
        """The engine's state as of now."""
        await self._call("ping", {})
        return self.status

    # --- what the engine says ---

    def _on_message(self, message: FromEngine) -> None:
        if isinstance(message, Step):
            self._on_step(message)
        elif isinstance(message, Verdict):
            self._on_verdict(message)
        elif isinstance(message, Reply):
            if message.call_id == PULSE:
                self._asked = None
            answer = self._calls.get(message.call_id)
            if answer is not None and not answer.done():
                if message.error is None:
                    answer.set_result(message.result)
                else:
                    kind = BY_STATUS.get(message.status, RequestFailed)
                    answer.set_exception(kind(message.error, field=message.field))
        elif isinstance(message, Status):
            self.status = message
        elif isinstance(message, Dead):
            self._die(self._link, message.reason, message.expected)
        elif self._starting is not None and not self._starting.done():
            self.status = message.status
            self._starting.set_result(message)

    def _on_verdict(self, verdict: Verdict) -> None:
        submission = self._submissions.pop(verdict.call_id)
        if not verdict.refusal:
            return submission.settle(None)
        error = refused(verdict.refusal, verdict.message, verdict.retry_after)
        for delivery in submission.deliveries:
            if self._deliveries.get(delivery.request_id) is delivery:
                self._discard(delivery)
                delivery.fail(error)
            else:  # given up meanwhile
                self._left(choice.rid for choice in delivery.choices)
        submission.settle(error)

    def _discard(self, delivery: Delivery) -> list[str]:
        """Take it from the tables; returns the engine's ids of what has not ended."""
        del self._deliveries[delivery.request_id]
        rids = delivery.open_rids()
        for rid in rids:
            del self._owners[rid]
        return rids

    def _on_step(self, step: Step) -> None:
        self.stats = step.stats
        stopped = []
        for rid, ids, logprobs, extra in step.rows():
            if self._leaving and rid in self._leaving:  # the id may be in use again: none of this is for the new one
                if extra is not None and extra.finish is not None:
                    self._left([rid])
                continue
            choice = self._owners.get(rid)
            if choice is None:
                continue
            if choice.accept(ids, logprobs, extra):
                stopped.append(choice.rid)
            delivery = choice.delivery
            if delivery.offer(choice):
                self._news.append(delivery)
            if choice.finished:
                del self._owners[choice.rid]
                if delivery.num_open == 0:
                    del self._deliveries[delivery.request_id]
        if stopped and self._link is not None:
            self._link.send(Abort(stopped, "abort_stop_string"))

    def _left(self, rids: Iterable[str]) -> None:
        """The engine will say nothing more of requests that were given up."""
        self._leaving.subtract(rids)
        self._leaving = +self._leaving

    def _on_settled(self) -> None:
        """Tell the consumers, once for all the steps that came together."""
        news, self._news = self._news, []
        for delivery in news:
            delivery.tell()

    # --- its end ---

    def _on_exit(self, link: Link, exited: asyncio.Future[int]) -> None:
        if not exited.cancelled():
            self._on_end(link, describe_exit(exited.result()))

    def _on_end(self, link: Link, reason: str) -> None:
        if self._stopping is None and self._loop is not None:
            self._loop.call_later(LAST_WORDS, self._die, link, reason, False)

    def _die(self, link: Link | None, reason: str, expected: bool) -> None:
        """The engine of this link is gone.  During start-up that is a StartError, later EngineDead for all who wait."""
        if link is None or link is not self._link or self._stopping is not None:
            return
        if self._starting is not None and not self._starting.done():
            self._starting.set_exception(
                StartError(reason if expected else f"the engine failed to start: {reason}; its log says more")
            )
        if self.started and self._may_restart():
            seconds = math.ceil(self._start_seconds)
            message = "the engine has crashed and another is being started; send the request again"
            self.down = EngineDead(message, private=reason, code="engine_restarting", retry_after=seconds)
        else:
            self.dead = self.down = EngineDead(private=reason)
        self._abandon(self.down)
        if self.started and self._restarting is None and self._engine is not None:
            self._restarting = asyncio.ensure_future(self._restart(self._engine))

    def _may_restart(self) -> bool:
        assert self._loop is not None
        recent = [when for when in self._restarts if self._loop.time() - when < RESTART_WINDOW]
        return len(recent) < self.config.runtime.restart_engine

    async def _restart(self, engine: EngineProcess) -> None:
        """Put another engine in the place of one that has crashed, and of that again, as often as may be."""
        assert self._loop is not None and self.down is not None
        while self.dead is None:
            logger.error("the engine died: %s; starting another", self.down.private)
            self._restarts.append(self._loop.time())
            await engine.stop(0.0)
            try:
                self._engine = engine = self._launch()
                self._serve(await self._join(engine.address))
                logger.info("another engine serves, with the weights of the start")
                break
            except StartError as error:
                logger.error("the engine cannot be restarted: %s", error)
                if not self._may_restart():
                    self.dead = self.down = EngineDead(private=str(error))
        self.on_replaced()

    def rejoin(self, address: str, pid: int) -> None:
        """Another engine has taken the place of the one that `connect` joined: serve with that, when it is ready."""
        self._die(self._link, "another engine has taken its place", False)
        if self.dead is None:
            if self._restarting is not None:
                self._restarting.cancel()
            self._restarting = asyncio.ensure_future(self._rejoin(address, pid))

    async def _rejoin(self, address: str, pid: int) -> None:
        try:
            self._serve(await self._join(address, pid))
        except StartError as error:  # whoever owns the engine says what comes next
            logger.error("the new engine cannot be joined: %s", error)

    def give_up(self) -> None:
        """No other engine will take the place of the one that `connect` joined."""
        self._die(self._link, "the engine has ended and is not replaced", False)
        self.dead = self.down = EngineDead(private=self.down.private if self.down else "")

    async def restored(self) -> None:
        """Wait while another engine is being started."""
        while self._restarting is not None and self.dead is None:
            await asyncio.wait([self._restarting])
