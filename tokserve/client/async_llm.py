"""`AsyncLLM`: the engine as an async Python object, and the only way to it for the HTTP server and `LLM`.

`stream` checks and sends a request at once and returns a `Stream` of its new outputs; `generate` is the same with
vLLM's signature and outputs.  A request is aborted in one way only: by closing (or dropping) its stream.  When the
engine dies, everything that waits for it raises `EngineDead`; with `restart_engine`, another replaces it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Self

from tokserve import checkpoint
from tokserve.base.errors import EngineDead
from tokserve.base.rooms import part, request_part, rooms
from tokserve.base.structs import prepare_structs
from tokserve.client.admin import AdminMethods
from tokserve.client.announcement import RequestAnnouncement
from tokserve.client.engine_args import options_of
from tokserve.client.engine_client import EngineClient
from tokserve.client.generation_config import generation_defaults
from tokserve.client.inputs import GenerateRequest, Inputs, bare_id, token_prompt, typed
from tokserve.client.model_view import ModelView, transformers_tokenizer
from tokserve.client.outputs import ChoiceOutput, EngineReport, Ready, Status, StepStats
from tokserve.client.request_state import RequestState
from tokserve.client.resubmissions import LEAVING_SECONDS
from tokserve.client.results import RequestOutput, follow
from tokserve.client.sampling_params import RequestOutputKind, output_rules, sampling_of
from tokserve.client.stream import Stream, collect
from tokserve.config import Config
from tokserve.config.resolve import resolve
from tokserve.protocol.adapter_choice import AdapterChoice, LoRARequest, adapter_name
from tokserve.protocol.images import ImageUrl
from tokserve.protocol.params import PoolingParams, RequestOptions, SamplingParams
from tokserve.protocol.prompt import TokenPrompt
from tokserve.text.tokenizer import Tokenizer

__all__ = ["AsyncLLM", "ChoiceOutput", "GenerateRequest", "StepStats", "Stream", "collect"]

logger = logging.getLogger(__name__)
# arguments of vLLM's `generate` that change no output
WITHOUT_EFFECT = ("kv_hints", "reasoning_ended", "reasoning_parser_kwargs", "session_id", "trace_headers")


class AsyncLLM(AdminMethods):
    """An engine in its own process, or several (`data_parallel_size`).  Construct, `await start()`, use, `await
    shutdown()`, all in one event loop; or `async with AsyncLLM("demo") as llm`.  The first `generate` starts an engine
    that has not been started.

    `config` is resolved; `ready`, `status` and `stats` are what the engine last reported.  `down` is set while there
    is no engine: for good if `dead` is set too, else until another has started in its place.
    """

    def __init__(self, model: str = "demo", **options: Any) -> None:
        """Options are those of `Config.make`.  Raises StartError."""
        self._set_up(resolve(Config.make(model=model, **options)))

    @classmethod
    def from_engine_args(cls, engine_args: Any, **_: Any) -> Self:
        """An engine with the options of an `EngineArgs`, or of a mapping; further arguments (vLLM's) have no effect."""
        return cls(**options_of(engine_args))

    @classmethod
    def from_config(cls, config: Config, *, text: bool = True) -> Self:
        """Make a client from a configuration, resolved or not.  `text` False: no tokenizer is loaded in this
        process."""
        llm = cls.__new__(cls)
        llm._set_up(resolve(config) if config.cache.block_size is None else config, text)
        return llm

    def _set_up(self, config: Config, text: bool = True) -> None:
        prepare_structs()
        self.config = config
        self._text = text and not config.server.tokens_only
        several = config.parallel.data_parallel_size > 1
        self._engine: EngineClient = part("fleet", "replicas")(config) if several else EngineClient(config)
        self._inputs: Inputs | None = None
        self._tokenizer: Tokenizer | None = None
        self._transformers_tokenizer: Any = None
        self._tokenizer_lock = threading.Lock()
        self._images: Any = None
        self._joined = False  # `start` or `connect` was called
        self._starting: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None

    # --- start and end ---

    async def start(self) -> None:
        """Start the engine and wait until it serves; once only.  Raises StartError."""
        self._joined = True
        self._engine.launch()
        await self._connect(self._engine.joined())

    @property
    def engine(self) -> tuple[str, int]:
        """Address and process id of the engine that `start` has started, for others to `connect` to."""
        return self._engine.engine.address, self._engine.engine.pid

    async def connect(self, address: str, *, pid: int | None = None, name: str | None = None) -> None:
        """Join a running or starting engine; `start` does this for the engine it has started.

        `pid`: the engine's process, to notice its end.  `name`: under which the engine knows this client (so that
        the client's parent can tell the engine, with the command `leave`, that it has gone).
        """
        self._joined = True
        await self._connect(self._engine.join(address, pid, name))

    async def ensure_started(self) -> None:
        """Start the engine if nothing has, and wait until it serves.  Raises StartError."""
        if not self._joined:
            self._joined = True
            self._starting = asyncio.ensure_future(self.start())
        if self._starting is not None:
            await asyncio.shield(self._starting)

    async def _connect(self, join: Coroutine[Any, Any, Ready]) -> None:
        joining = asyncio.ensure_future(join)
        loading = asyncio.ensure_future(asyncio.to_thread(lambda: self.tokenizer))
        started = False
        try:
            both: list[asyncio.Future[Any]] = [joining, loading]
            done, _ = await asyncio.wait(both, return_when="FIRST_EXCEPTION")
            for future in done:
                future.result()
            self._engine.serve(joining.result())
            self._compare_vocabularies()
            started = True
        finally:
            if not started:
                loading.cancel()
                if not joining.cancel() and not joining.cancelled():
                    joining.exception()  # retrieved, or asyncio logs it
                await self.close()

    def _compare_vocabularies(self) -> None:
        if self.tokenizer is not None and (excess := self.tokenizer.vocab_size - self.ready.vocab_size) > 0:
            logger.warning(
                "the tokenizer has %d tokens and the model %d: text with one of the last %d is refused; "
                "--tokenizer names another tokenizer",
                self.tokenizer.vocab_size,
                self.ready.vocab_size,
                excess,
            )

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def shutdown(self, timeout: float | None = None) -> Awaitable[None]:
        """End the engine: requests in flight end with what they have, its process and files are removed.  It is ended
        even if the result is not awaited, as vLLM's, where that is done.  `timeout` (vLLM's) has no effect."""
        closing = self.close()
        return closing if asyncio._get_running_loop() is None else asyncio.ensure_future(closing)

    async def close(self) -> None:
        """End the engine, and return when it has ended."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._close())
        await asyncio.shield(self._stopping)

    async def _close(self) -> None:
        if self._images is not None:
            await asyncio.to_thread(self._images.close)
        await self._engine.close()

    # --- state ---

    @cached_property
    def images(self) -> Any:
        """Reads the images of prompts, an `ImageReader` of `features.images.media.images`; None: the model takes none.
        Raises StartError for a checkpoint or options that no image can be read with."""
        self._images = part("images", "make_reader")(self.config) if "images" in rooms() else None
        return self._images

    @cached_property
    def _pushes(self) -> Any:
        """Pushes of tensors, `features.weights.weight_pushes.WeightPushes`.  Raises StartError without it."""
        return part("weights", "pushes")(self)

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

    def get_tokenizer(self) -> Any:
        """The model's tokenizer as a tokenizer of transformers; None with tokens_only.  Raises StartError."""
        if self.tokenizer is None:
            return None
        if self._transformers_tokenizer is None:
            override = self.config.server.chat_template
            template = None if override is None else part("chat", "template")(self.tokenizer, override).sources
            self._transformers_tokenizer = transformers_tokenizer(self.config, template)
        return self._transformers_tokenizer

    @cached_property
    def model_config(self) -> ModelView:
        """The model under vLLM's names."""
        return ModelView(self.config, self.ready, generation_defaults(self.config.model))

    @property
    def num_engines(self) -> int:
        return self.config.parallel.data_parallel_size

    @property
    def ready(self) -> Ready:
        """What the engine said when it was ready."""
        if self._engine.ready is None:
            raise EngineDead("the engine has not started: await start() first")
        return self._engine.ready

    @property
    def reports(self) -> list[EngineReport]:
        return self._engine.reports

    @property
    def stats(self) -> StepStats:
        """The gauges and counters of all engines together, as last reported."""
        return self._engine.stats

    @property
    def status(self) -> Status:
        return self._engine.status

    @property
    def dead(self) -> EngineDead | None:
        """Why there is no engine and will be none; None unless that is so."""
        return self._engine.dead

    @property
    def down(self) -> EngineDead | None:
        """Why there is no engine now; None while there is one."""
        return self._engine.down

    @property
    def silence(self) -> float:
        """Seconds since a ping that the engine has not answered yet; it answers between two steps."""
        return self._engine.silence

    @property
    def hung(self) -> bool:
        return self._engine.hung

    @property
    def num_inflight(self) -> int:
        return self._engine.num_inflight

    # --- requests ---

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        prompt_text: str | None = None,
        lora_request: AdapterChoice = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """A request's outputs as they grow, like vLLM's `generate`: each has what `sampling_params.output_kind` says,
        by default all tokens so far, and the last is `finished`.

        The request is sent when iteration begins, and aborted when it is left early.  Prompts are as in
        `LLM.generate`, everything else as in `stream`, but a `LoRARequest` with a path is loaded if necessary.
        """
        await self.ensure_started()
        given = generation_defaults(self.config.model) if sampling_params is None else sampling_params
        rules, params, context = output_rules(given), sampling_of(given), self.ready.max_model_len - 1
        parsed = part("chat", "read_prompt")(prompt, self.tokenizer, tokenization_kwargs, rules.keep, context)
        if isinstance(lora_request, LoRARequest) and lora_request.path:
            await self.add_lora(lora_request)
        options = {name: value for name, value in options.items() if name not in WITHOUT_EFFECT}
        options["cache_salt"] = options.get("cache_salt") or parsed.cache_salt
        options.setdefault("draft_token_ids", parsed.draft_token_ids)
        options.setdefault("stream", rules.kind is not RequestOutputKind.FINAL_ONLY)
        if request_id is not None:
            await self.until_unused(request_id, params.n)
        stream = self.stream(
            await self.with_images(parsed.ids, parsed.images),
            params,
            request_id=request_id,
            text=self.tokenizer is not None,
            lora_request=adapter_name(lora_request),
            **options,
        )
        text = parsed.text if prompt_text is None else prompt_text
        async with stream:
            async for output in follow(stream, text, params, self.tokenizer, rules, lora_request):
                yield output

    def stream(
        self,
        prompt_ids: Sequence[int] | bytes | TokenPrompt,
        params: SamplingParams | PoolingParams,
        *,
        request_id: str | None = None,
        text: bool = False,
        lora_request: AdapterChoice = None,
        **options: Any,
    ) -> Stream:
        """Send a request.  Raises RequestError for what is wrong with it, Conflict for an id in use, EngineDead.

        `prompt_ids` may be packed (little-endian int32), or what `with_images` returns.  `text`: deltas carry text.
        `lora_request`: a loaded adapter or its name.  `options`: the fields of `RequestOptions`, where "" is None as
        well; `stream` is true by default, false gives one delta per choice, at its end.  The engine may still refuse
        the request: see `Stream.accepted`.
        """
        values: dict[str, Any] = {"stream": True, "adapter": adapter_name(lora_request)}
        values |= {name: value for name, value in options.items() if value not in ("", None)}
        if unknown := values.keys() - set(RequestOptions.__struct_fields__):
            raise TypeError(f"a request has no option {min(unknown)!r}")
        request = GenerateRequest(
            request_id=secrets.token_hex(16) if request_id is None else request_id,
            prompt=token_prompt(prompt_ids, self.ready.vocab_size),
            task=sampling_of(params) if isinstance(params, SamplingParams) else params,
            options=typed(RequestOptions, values),
            text=text,
        )
        return self.submit([self.prepare(request)])[0]

    async def with_images(self, prompt_ids: Sequence[int] | bytes, images: Sequence[ImageUrl]) -> TokenPrompt:
        """A prompt whose ids have one placeholder for each image.  Raises RequestError for what is wrong with them."""
        prompt = token_prompt(prompt_ids, self.ready.vocab_size)
        if not images:
            return prompt
        prompt = await request_part("images", "read_images", images[0].field)(self.images, prompt, images)
        return prompt

    def prepare(self, request: GenerateRequest) -> RequestState:
        """Check a request without sending it; in any thread.  Raises RequestError, EngineDead."""
        self._engine.check()
        ready = self.ready
        if self._inputs is None or self._inputs.ready is not ready:
            self._inputs = Inputs(self.config, ready, lambda: self.tokenizer)
        return self._inputs.prepare(request)

    def announce(self, request_id: str, group_id: str | None = None) -> RequestAnnouncement:
        """Let aborts find a request before it is submitted, or between its submissions, until the announcement ends:
        what is submitted with it after an abort ends at once.  Raises OverflowError, TypeError or UnicodeEncodeError
        for an id that no message can hold."""
        return self._engine.announce(bare_id(request_id), group_id)

    def submit(
        self, requests: Sequence[RequestState], client: str = "", announcement: RequestAnnouncement | None = None
    ) -> list[Stream]:
        """Send prepared requests as one, accepted or refused as a whole; a stream for each.  `client`: who is served
        in turns with other clients.  `announcement`: of these requests, if they were announced.

        They share one request_id and one group_id, and their choices are numbered consecutively
        (`GenerateRequest.first_choice`).  Raises Conflict for an id in use here, RequestError for values that no
        message can hold, EngineDead.
        """
        self._engine.check()
        sender = self._engine.submit(requests, client, announcement)
        return [Stream(sender, request) for request in requests]

    async def until_unused(self, request_id: str, num_choices: int) -> None:
        """Wait until an id is free, for a moment: a caller that sends it again may have left its first request, and
        that is not known yet."""
        choice_ids = [f"{bare_id(request_id)}#{index}" for index in range(num_choices)]
        end = time.monotonic() + LEAVING_SECONDS
        while self._engine.in_use(choice_ids) and time.monotonic() < end:
            await asyncio.sleep(LEAVING_SECONDS / 50)

    async def abort(self, request_ids: str | Iterable[str], reason: str = "abort_user") -> dict[str, str]:
        """Abort a request, or several, of any client; returns when the engine has freed them.  Ids may have a reply's
        prefix.  The result is "aborted", "finished" or "not_found" for every id as given."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        bare_ids = {request_id: bare_id(request_id) for request_id in ids}
        keys = list(bare_ids.values())
        results = await self.call("abort", reason=reason, keys=keys) if bare_ids else {}
        return {request_id: results[bare] for request_id, bare in bare_ids.items()}

    async def abort_group(self, group_id: str, reason: str = "abort_user") -> dict[str, str]:
        """The same for all requests of a group; the result is by bare id."""
        return await self.call("abort_group", reason=reason, group=group_id)

    async def abort_prefix(self, prefix: str, reason: str = "abort_user") -> dict[str, str]:
        """The same for all requests whose bare id begins with `prefix`."""
        return await self.call("abort_prefix", reason=reason, prefix=prefix)

    async def abort_all(self, reason: str = "abort_user") -> dict[str, str]:
        """The same for all requests of this engine."""
        return await self.call("abort_all", reason=reason)

    async def abort_own(self, reason: str = "abort_user") -> dict[str, str]:
        """The same for all requests sent from here."""
        return await self.call("abort", reason=reason, keys=self._engine.request_ids())

    # --- the engine's commands ---

    async def call(self, method: str, /, **args: Any) -> Any:
        """Call an admin command of the engine.  Raises the errors in `errors.BY_STATUS`, with the engine's message,
        RequestError for arguments that no message can hold, EngineDead."""
        return await self._engine.call(method, args)

    async def refresh(self, seconds: float) -> None:
        """Bring `stats` and `status` up to date; gives up after so many seconds, or if the engine is dead."""
        with suppress(TimeoutError, EngineDead):
            async with asyncio.timeout(seconds):
                await self.call("stats")

    async def push(
        self,
        weights: Any,
        version: str | None = None,
        *,
        delta: bool = False,
        directory: str | None = None,
        anchor_every: int = 10,
        recompute_kv: bool = False,
    ) -> Any:
        """Replace all weights, rounded as the engine keeps them: a `tokserve.rl.PushResult`.  The arguments are those
        of `tokserve.rl.AsyncClient.push`.  With `delta` less is copied and checked."""
        return await self._pushes.push(
            weights, version, delta=delta, directory=directory, anchor_every=anchor_every, recompute_kv=recompute_kv
        )

    async def push_adapter(
        self,
        adapter: Any,
        name: str | None = None,
        version: str | None = None,
        *,
        delta: bool = False,
        dtype: Any = None,
        recompute_kv: bool = False,
    ) -> Any:
        """Replace an adapter by tensors of this process: a `tokserve.rl.AdapterPushResult`.  The arguments are those of
        `tokserve.rl.AsyncClient.push_adapter`."""
        return await self._pushes.push_adapter(
            adapter, name, version, delta=delta, dtype=dtype, recompute_kv=recompute_kv
        )

    # --- an engine that is replaced ---

    def rejoin(self, address: str, pid: int) -> None:
        """Another engine has replaced the one that `connect` joined: use it when it is ready."""
        self._engine.rejoin(address, pid)

    def give_up(self) -> None:
        """No other engine will replace the one that `connect` joined."""
        self._engine.give_up()

    async def restored(self) -> None:
        await self._engine.restored()

    def on_replaced(self, callback: Callable[[], object]) -> None:
        self._engine.on_replaced(callback)
