"""`AsyncLLM`: the engine as an async Python object, and the only way to it for the HTTP server and `LLM`.

`stream` checks and sends a request at once and returns a `Stream` of its new outputs; `generate` is the same with
vLLM's signature and outputs.  A request is aborted in one way only: by closing (or dropping) its stream.  When the
engine dies, everything that waits for it raises `EngineDead`; with `restart_engine`, another takes its place.  Must
not know HTTP, nor how tokens are made.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from tokserve import checkpoint
from tokserve.client import control
from tokserve.client.connection import UNSENDABLE, Connection
from tokserve.client.inputs import Inputs, LoRARequest, Order, Prepared, adapter_name, bare_id, typed
from tokserve.client.outputs import ChoiceOutput, Delivery, Ready, Status, StepStats
from tokserve.client.prompts import Prompt, read
from tokserve.client.requests import Requests
from tokserve.client.results import RequestOutput, follow
from tokserve.client.stream import Stream, collect
from tokserve.config import Config
from tokserve.errors import EngineDead, RequestError
from tokserve.messages import Abort, Stall, Step, Submit, Verdict
from tokserve.params import SamplingParams
from tokserve.resolve import resolve
from tokserve.text.tokenizer import Tokenizer

__all__ = ["AsyncLLM", "ChoiceOutput", "StepStats", "Stream", "collect"]


class AsyncLLM:
    """An engine in its own process.  Construct, `await start()`, use, `await shutdown()`, all in one event loop; or
    `async with AsyncLLM("demo") as llm`.

    `config` is resolved; `ready`, `status` and `stats` are what the engine last reported.  `down` is set while there
    is no engine: for good if `dead` is set too, else until another has started in its place.
    """

    def __init__(self, model: str = "demo", **options: Any) -> None:
        """Options are those of `Config.make`.  Raises StartError."""
        self._set_up(resolve(Config.make(model=model, **options)))

    @classmethod
    def from_config(cls, config: Config, *, text: bool = True) -> AsyncLLM:
        """From a configuration, resolved or not.  `text` False: no tokenizer is loaded in this process."""
        llm = cls.__new__(cls)
        llm._set_up(resolve(config) if config.cache.block_size is None else config, text)
        return llm

    def _set_up(self, config: Config, text: bool = True) -> None:
        self.config = config
        self._text = text and not config.server.tokens_only
        self.stats = StepStats()
        self.on_replaced: Callable[[], object] = lambda: None  # another engine serves, or none will
        self._connection = Connection(config, self)
        self._requests = Requests()
        self._rest_is_due = False  # consumers that have not been told of something new will be
        self._inputs: Inputs | None = None
        self._tokenizer: Tokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Task[None] | None = None

    # --- start and end ---

    async def start(self) -> None:
        """Start the engine and wait until it serves; once only.  Raises StartError."""
        await self.connect(self._connection.launch())

    @property
    def engine(self) -> tuple[str, int]:
        """Address and process id of the engine that `start` has started, for others to `connect` to."""
        return self._connection.engine.address, self._connection.engine.pid

    async def connect(self, address: str, *, pid: int | None = None, name: str | None = None) -> None:
        """Join a running or starting engine; `start` does this for the engine it has started.

        `pid`: the engine's process, to notice its end.  `name`: under which the engine knows this client (so that
        whoever started the client can tell the engine, with the verb `leave`, that it has gone).
        """
        self._loop = asyncio.get_running_loop()
        joining = asyncio.ensure_future(self._connection.join(address, pid, name))
        loading = asyncio.ensure_future(asyncio.to_thread(lambda: self.tokenizer))
        started = False
        try:
            both: list[asyncio.Future[Any]] = [joining, loading]
            done, _ = await asyncio.wait(both, return_when="FIRST_EXCEPTION")
            for future in done:
                future.result()
            self._connection.serve(joining.result())
            started = True
        finally:
            if not started:
                loading.cancel()
                if not joining.cancel() and not joining.cancelled():
                    joining.exception()  # retrieved, or asyncio logs it
                await self.shutdown()

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    async def shutdown(self) -> None:
        """End the engine: requests in flight end with what they have, its process and files are removed."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._connection.close(self._leave))
        await asyncio.shield(self._stopping)

    async def _leave(self) -> None:
        if self._requests:
            await self.abort_own("shutdown")

    # --- state ---

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, loaded on first use; None with tokens_only, or without `text`."""
        if self._tokenizer is None and self._text:
            with self._tokenizer_lock:
                if self._tokenizer is None:
                    model = self.config.model
                    name = model.tokenizer or model.model
                    self._tokenizer = Tokenizer.load(checkpoint.locate(name, weights=False))
        return self._tokenizer

    @property
    def ready(self) -> Ready:
        """What the engine said when it was ready."""
        if self._connection.ready is None:
            raise EngineDead("the engine has not started: await start() first")
        return self._connection.ready

    @property
    def status(self) -> Status:
        """The engine's state, as last reported."""
        return self._connection.status

    @property
    def dead(self) -> EngineDead | None:
        """Why there is no engine and will be none; None unless that is so."""
        return self._connection.dead

    @property
    def down(self) -> EngineDead | None:
        """Why there is no engine now; None while there is one."""
        return self._connection.down

    @property
    def silence(self) -> float:
        """Seconds since a ping that the engine has not answered yet; it answers between two steps."""
        return self._connection.silence

    @property
    def hung(self) -> bool:
        """The engine has not finished a step for longer than `step_timeout`."""
        return self._connection.hung

    @property
    def num_inflight(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    # --- requests ---

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams, request_id: str | None = None, *,
        lora_request: LoRARequest | str | None = None, priority: int = 0, cache_salt: str = "",
        deadline_ms: int | None = None, queue_timeout_ms: int | None = None, group_id: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:  # fmt: skip
        """A request's outputs as they grow, like vLLM's `generate`: each has all tokens so far, the last is `finished`.

        The request is sent when iteration begins, and aborted when it is left early.  Prompts are as in
        `LLM.generate`, everything else as in `stream`.
        """
        asked, params = read(prompt, self.tokenizer), typed(sampling_params)
        sent = self.stream(
            asked.ids, params, request_id=request_id, text=self.tokenizer is not None, priority=priority,
            cache_salt=cache_salt or asked.cache_salt, deadline_ms=deadline_ms, queue_timeout_ms=queue_timeout_ms,
            group_id=group_id, lora_request=lora_request,
        )  # fmt: skip
        async with sent:
            async for output in follow(sent, asked.text, params):
                yield output

    def stream(
        self, prompt_ids: Sequence[int] | bytes, params: SamplingParams, *, request_id: str | None = None,
        stream: bool = True, text: bool = False, priority: int = 0, cache_salt: str = "",
        deadline_ms: int | None = None, queue_timeout_ms: int | None = None, group_id: str = "",
        lora_request: LoRARequest | str | None = None,
    ) -> Stream:  # fmt: skip
        """Send a request.  Raises RequestError for what is wrong with it, Conflict for an id in use, EngineDead.

        `prompt_ids` may be packed (little-endian int32).  `stream` False: one delta per choice, at its end.
        `text`: deltas carry text.  `cache_salt`, `group_id` "": none.  `lora_request`: a loaded adapter or its name.
        The engine may still refuse the request: see `Stream.accepted`.
        """
        order = Order(
            prompt_ids, params, request_id, stream, text, priority, cache_salt, deadline_ms, queue_timeout_ms,
            adapter=adapter_name(lora_request),
        )  # fmt: skip
        return self.submit([self.prepare(order)], group_id)[0]

    def prepare(self, order: Order) -> Prepared:
        """Check a request without sending it.  Raises RequestError, EngineDead."""
        self._connection.check()
        assert self._inputs is not None
        return self._inputs.prepare(order)

    def submit(self, prepared: Sequence[Prepared], group_id: str = "", client: str = "") -> list[Stream]:
        """Send prepared prompts as one request, which is accepted or refused as a whole; a stream for each.  `client`:
        who is served in turns with other clients.

        They share one request_id, and their choices are numbered consecutively (`Order.first_choice`).  Raises
        Conflict for an id in use here, RequestError for values that no message can hold, EngineDead.
        """
        self._connection.check()
        call_id = self._connection.next_call()
        submission = self._requests.enter(call_id, prepared)
        adds = [add for each in prepared for add in each.adds]
        try:
            self._connection.send(Submit(call_id, prepared[0].key, adds, group_id, client))
        except UNSENDABLE as error:
            self._requests.judge(Verdict(call_id, "invalid", f"the request cannot be sent: {error}"))
            raise RequestError(f"the request cannot be sent: {error}") from None
        pairs = zip(prepared, submission.deliveries, strict=True)
        return [Stream(self, each, delivery, submission) for each, delivery in pairs]

    def release(self, delivery: Delivery) -> None:
        """Forget a request; the engine aborts what has not ended."""
        self._send_abort(self._requests.give_up(delivery), "abort_disconnect")

    def stall(self, delivery: Delivery, stalled: bool) -> None:
        """The consumer cannot take more for now, or can again."""
        rids = delivery.open_rids()
        if rids and self._connection.down is None:
            self._connection.send(Stall(rids, stalled))

    def _send_abort(self, rids: list[str], reason: str) -> None:
        if rids:
            self._connection.send(Abort(rids, reason))

    def release_soon(self, delivery: Delivery) -> None:
        """`release`, from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            with suppress(RuntimeError):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(self.release, delivery)

    async def abort(self, request_ids: str | Iterable[str], reason: str = "abort_user") -> dict[str, str]:
        """Abort a request, or several, whichever client sent them; returns when the engine has freed them.

        Ids may have a reply's prefix.  The result is "aborted", "finished" or "not_found" for every id as given.
        """
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        keys = {given: bare_id(given) for given in ids}
        results = await self.call("abort", keys=list(keys.values()), reason=reason) if keys else {}
        return {given: results[key] for given, key in keys.items()}

    async def abort_group(self, group_id: str, reason: str = "abort_user") -> dict[str, str]:
        """The same for all requests of a group; the result is by bare id."""
        return await self._abort("abort_group", group=group_id, reason=reason)

    async def abort_all(self, reason: str = "abort_user") -> dict[str, str]:
        """The same for all requests of this engine."""
        return await self._abort("abort_all", reason=reason)

    async def abort_own(self, reason: str = "abort_user") -> dict[str, str]:
        """The same for all requests sent from here."""
        return await self._abort("abort", keys=self._requests.keys(), reason=reason)

    async def _abort(self, verb: str, **which: Any) -> dict[str, str]:
        results: dict[str, str] = await self.call(verb, **which)
        return results

    # --- the engine's verbs ---

    async def call(self, method: str, /, **args: Any) -> Any:
        """Call an admin verb of the engine.  Raises the errors in `errors.BY_STATUS`, with the engine's message,
        RequestError for arguments that no message can hold, EngineDead."""
        return await self._connection.call(method, args)

    async def refresh(self, seconds: float) -> None:
        """Bring `stats` and `status` up to date; gives up after so many seconds, or if the engine is dead."""
        with suppress(TimeoutError, EngineDead):
            await asyncio.wait_for(self.call("stats"), seconds)

    pause_generation = control.pause_generation
    resume_generation = control.resume_generation
    is_paused = control.is_paused
    sleep = control.sleep
    wake_up = control.wake_up
    is_sleeping = control.is_sleeping
    release_kv_cache_memory = control.release_kv_cache_memory
    reset_prefix_cache = control.reset_prefix_cache
    init_weight_transfer_engine = control.init_weight_transfer_engine
    shutdown_weight_transfer_engine = control.shutdown_weight_transfer_engine
    start_weight_update = control.start_weight_update
    update_weights = control.update_weights
    begin_weight_stream = control.begin_weight_stream
    feed_weights = control.feed_weights
    finish_weight_update = control.finish_weight_update
    abort_weight_update = control.abort_weight_update
    update_weight_version = control.update_weight_version
    get_weight_version = control.get_weight_version
    load_lora_adapter = control.load_lora_adapter
    unload_lora_adapter = control.unload_lora_adapter
    add_lora = control.add_lora
    list_loras = control.list_loras
    weight_checksums = control.weight_checksums
    checkpoint_checksums = control.checkpoint_checksums
    collective_rpc = control.collective_rpc
    apply_model = control.apply_model
    fresh_status = control.fresh_status

    # --- an engine that somebody else replaces ---

    def rejoin(self, address: str, pid: int) -> None:
        """Another engine has taken the place of the one that `connect` joined: use it when it is ready."""
        self._connection.rejoin(address, pid)

    def give_up(self) -> None:
        """No other engine will take the place of the one that `connect` joined."""
        self._connection.give_up()

    async def restored(self) -> None:
        """Wait while another engine is being started."""
        await self._connection.restored()

    # --- messages from the engine (`connection.Listener`) ---

    def on_outputs(self, message: Step | Verdict) -> None:
        """Pass outputs on to their requests."""
        if isinstance(message, Verdict):
            self._requests.judge(message)
        else:
            self.stats = message.stats
            self._send_abort(self._requests.take(message), "abort_stop_string")

    def on_settled(self) -> None:
        """Tell the consumers, once for all messages that came together; if they take long, the rest a little later."""
        if not self._rest_is_due and self._requests.tell():
            self._rest_is_due = True
            asyncio.get_running_loop().call_soon(self._tell_the_rest)

    def _tell_the_rest(self) -> None:
        self._rest_is_due = False
        self.on_settled()

    def on_serving(self, ready: Ready) -> None:
        """Check requests against this engine's limits from here on."""
        self._inputs = Inputs(self.config, ready, lambda: self.tokenizer)

    def on_lost(self, error: EngineDead) -> None:
        """End all requests with the error."""
        self._requests.fail(error)
