"""`LLM`: the offline API.  The same engine and the same path as the server, behind calls that block.

An event loop in a thread of its own runs an `AsyncLLM`; every method here hands it a coroutine and waits.
Names of results are vLLM's where they mean the same.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import AsyncExitStack, contextmanager
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from tokserve.client.admin import AdminMethods
from tokserve.client.async_llm import AsyncLLM, Stream
from tokserve.client.beam_methods import BeamSearchOutput, search
from tokserve.client.beam_search import BeamSearchParams
from tokserve.client.images import with_urls
from tokserve.client.inputs import LoRARequest, adapter_name, generation_defaults, typed
from tokserve.client.outputs import ChoiceOutput, merge
from tokserve.client.pooling import pooler_of
from tokserve.client.pooling_methods import PoolingMethods
from tokserve.client.prompts import ParsedPrompt, Prompt
from tokserve.client.results import RequestOutput, ScoringRequestOutput, request_output
from tokserve.errors import EngineDead, RequestError
from tokserve.media.images import image_slots
from tokserve.messages import Ready, StepStats
from tokserve.params import PoolingParams, SamplingParams
from tokserve.text.chat import ChatTemplate
from tokserve.text.tokenizer import Tokenizer

T = TypeVar("T")
P = ParamSpec("P")
Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None
Adapters = LoRARequest | str | None | Sequence[LoRARequest | str | None]
Started = tuple[Stream, str | None, SamplingParams]  # with the prompt, if it was text
SIGNAL_SECONDS = 1.0  # a signal that does not end the main thread's wait is seen after so long


def _blocking(command: Callable[Concatenate[AsyncLLM, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[LLM, P], T]:
    """An admin command as a method of `LLM`."""

    @wraps(command)
    def call(self: LLM, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._wait(command(self._llm, *args, **kwargs))

    return call


class LLM(PoolingMethods):
    """An engine for scripts: `LLM("demo").generate("Hello")`.  Options are those of `Config.make`.

    Raises StartError if it cannot start, RequestError for a request that cannot be served, EngineDead.
    Close it, or use it in a `with`; otherwise it ends with the program.
    """

    def __init__(self, model: str = "demo", **options: Any) -> None:
        self._llm = AsyncLLM(model, **options)
        self._defaults = generation_defaults(self._llm.config.model)
        self._pooler = pooler_of(self._llm.config.model)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name="tokserve-llm", daemon=True)
        self._thread.start()
        self._owner = os.getpid()
        self._queued: list[Started] = []
        self._close = weakref.finalize(self, _close, self._owner, self._llm, self._loop, self._thread)
        started = False
        try:
            self._wait(self._llm.start())
            started = True
        finally:
            if not started:
                self.close()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, use_tqdm: bool = True,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:  # fmt: skip
        """Outputs in the order of the prompts: texts, lists of token ids, or mappings {"prompt": text} and
        {"prompt_token_ids": ids}, optionally with "cache_salt", "draft_token_ids" and "multi_modal_data":
        {"image": one or several}, each a Pillow image, a uint8 array [height, width, 3], the bytes of a file, or a URL,
        for each of which the prompt has one placeholder.  One `sampling_params` for all, or one each; default: what the
        model recommends.  If a request is refused, none is served.

        `lora_request`: the adapter for all prompts, or one (or None) each; a `LoRARequest` with a path is loaded if
        necessary, a name must be that of a loaded adapter.
        """
        return self._generate(self._read(prompts), sampling_params, use_tqdm, lora_request)

    def enqueue(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, lora_request: Adapters = None
    ) -> list[str]:
        """Start requests and return their ids at once; `wait_for_completion` returns their outputs."""
        return self._enqueue(self._read(prompts), sampling_params, lora_request)

    def enqueue_chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], sampling_params: Params = None,
        lora_request: Adapters = None, **options: Any,
    ) -> list[str]:  # fmt: skip
        """Like `enqueue`, for what `chat` takes; `options`: those of `chat` that are about the template."""
        return self._enqueue(self._conversations(messages, **options), sampling_params, lora_request)

    def _enqueue(self, parsed: Sequence[ParsedPrompt], sampling_params: Params, lora_request: Adapters) -> list[str]:
        started = self._start(parsed, sampling_params, lora_request)
        self._queued += started
        return [stream.request_id for stream, _, _ in started]

    def wait_for_completion(self, use_tqdm: bool = True) -> list[RequestOutput]:
        """The outputs of everything enqueued since the last call, in order."""
        queued, self._queued = self._queued, []
        with _progress(len(queued), use_tqdm) as bar:
            return self._wait(_gather(queued, bar, self.tokenizer))

    def score(
        self, data_1: Any, data_2: Any = None, *, lora_request: Adapters = None, **options: Any
    ) -> list[ScoringRequestOutput] | list[NDArray[np.float32]]:
        """Score with whatever the model makes: a model that pools gives vLLM's `score`, of pairs 1:1, 1:N or N:N, the
        cosine of their embeddings, or what a classifier with one label makes of both; `options`: use_activation,
        instruction.

        Of a model that generates, `score_tokens(data_1, data_2)`.  Raises RequestError.
        """
        if self._pooler is not None:
            return self._score_pairs(data_1, data_2, lora_request=lora_request, **options)
        for data in (data_1, data_2):
            if isinstance(data, str) or (isinstance(data, Sequence) and any(isinstance(one, str) for one in data)):
                raise RequestError(
                    'this model generates, and scores token ids: LLM(..., runner="pooling") scores texts',
                    field="runner",
                )
        return self.score_tokens(data_1, data_2, lora_request=lora_request, **options)

    def score_tokens(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int] | None = None, *,
        lora_request: Adapters = None, **sampling: Any,
    ) -> list[NDArray[np.float32]]:  # fmt: skip
        """Logprobs of the ids of each sequence from position `starts[i]` on (default and least: 1), float32.

        `sampling`: what they depend on, as `logprobs_mode` and `temperature`.  A generated token's is the same number
        as when it was generated, to the bit.  A sequence must be shorter than the context.
        """
        firsts = [1] * len(sequences) if starts is None else list(starts)
        if len(firsts) != len(sequences) or any(
            not 1 <= first < len(ids) for first, ids in zip(firsts, sequences, strict=True)
        ):
            raise RequestError("starts needs a position of each sequence, from 1 to its last", field="starts")
        params = [
            SamplingParams(**sampling, max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=first) for first in firsts
        ]
        prompts: list[Prompt] = [list(ids) for ids in sequences]
        outputs = self.generate(prompts, params, use_tqdm=False, lora_request=lora_request)
        scores = [output.prompt_logprobs for output in outputs]
        return [np.empty(0, np.float32) if rows is None else rows.token_logprobs for rows in scores]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Like `generate`, for a conversation or a list of conversations, rendered by the chat template.  Parts of a
        content may be images: {"type": "image", "image": one as in `generate`}, or the forms of HTTP."""
        parsed = self._conversations(
            messages, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
            tools=tools, chat_template=chat_template, chat_template_kwargs=chat_template_kwargs,
        )  # fmt: skip
        return self._generate(parsed, sampling_params, use_tqdm, lora_request)

    def _conversations(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], *, add_generation_prompt: bool | None = None,
        continue_final_message: bool = False, tools: Sequence[dict[str, Any]] | None = None,
        chat_template: str | None = None, chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ParsedPrompt]:  # fmt: skip
        several = isinstance(messages, Sequence) and messages and not isinstance(messages[0], Mapping)
        conversations: list[Any] = list(messages) if several else [messages]
        if not all(isinstance(one, Sequence) and not isinstance(one, str) for one in conversations):
            raise RequestError("messages must be a list of messages, or a list of such lists", field="messages")
        options = {
            "add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message,
            "tools": tools, "template": chat_template, "kwargs": chat_template_kwargs,
        }  # fmt: skip
        return [self._rendered(conversation, options) for conversation in conversations]

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams,
        lora_request: LoRARequest | str | None = None, use_tqdm: bool = False, concurrency_limit: int | None = None,
        priority: int = 0,
    ) -> list[BeamSearchOutput]:  # fmt: skip
        """The `params.beam_width` most probable outputs of each prompt that beam search finds, best first.
        `concurrency_limit`: prompts searched at a time; default: all.  Raises RequestError."""
        parsed = self._read(prompts)
        params = typed(BeamSearchParams, params)
        params.validate(self.ready, self.config.model.max_logprobs)
        if any(prompt.images for prompt in parsed):
            raise RequestError("beam search takes no images", field="prompts", code="unsupported")
        adapters = self._adapters(lora_request, len(parsed))
        limit = len(parsed) or 1 if concurrency_limit is None else concurrency_limit
        if type(limit) is not int or limit < 1:
            raise RequestError("concurrency_limit must be an integer of at least 1", field="concurrency_limit")
        with _progress(len(parsed), use_tqdm) as bar:
            return self._wait(search(self._llm, parsed, params, adapters, self.tokenizer, limit, bar.update, priority))

    def _pool(
        self, parsed: Sequence[ParsedPrompt], task: PoolingParams, lora_request: Adapters, use_tqdm: bool
    ) -> list[tuple[ParsedPrompt, Stream, ChoiceOutput]]:
        adapters = self._adapters(lora_request, len(parsed))
        with _progress(len(parsed), use_tqdm) as bar:
            return self._wait(self._pooled(parsed, task, adapters, bar))

    async def _pooled(
        self, parsed: Sequence[ParsedPrompt], task: PoolingParams, adapters: Sequence[str], bar: Any
    ) -> list[tuple[ParsedPrompt, Stream, ChoiceOutput]]:
        """Each prompt with its stream and its only delta; all of them, or RequestError."""
        ended = []
        streams = await self._open(parsed, [task] * len(parsed), adapters, text=False)
        for prompt, stream in zip(parsed, streams, strict=True):
            delta = await anext(stream)
            if not delta.pooled:
                raise RequestError(delta.message or f"a request ended without a vector ({delta.stop_detail})")
            ended.append((prompt, stream, delta))
            bar.update(1)
        return ended

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._llm.tokenizer

    @property
    def config(self) -> Any:
        return self._llm.config

    @property
    def ready(self) -> Ready:
        """What the engine reported when it was ready: limits, KV capacity, bound ops."""
        return self._llm.ready

    @property
    def stats(self) -> StepStats:
        """The engine's latest gauges and counters."""
        return self._llm.stats

    def call(self, method: str, **args: Any) -> Any:
        """An admin command of the engine by name; `check` raises if the KV accounting is broken."""
        return self._wait(self._llm.call(method, **args))

    # --- control: AsyncLLM's methods of these names, blocking ---

    pause_generation = _blocking(AdminMethods.pause_generation)
    extend_pause = _blocking(AdminMethods.extend_pause)
    resume_generation = _blocking(AdminMethods.resume_generation)
    is_paused = _blocking(AdminMethods.is_paused)
    sleep = _blocking(AdminMethods.sleep)
    wake_up = _blocking(AdminMethods.wake_up)
    is_sleeping = _blocking(AdminMethods.is_sleeping)
    release_kv_cache_memory = _blocking(AdminMethods.release_kv_cache_memory)
    reset_prefix_cache = _blocking(AdminMethods.reset_prefix_cache)
    add_draft_corpus = _blocking(AdminMethods.add_draft_corpus)
    remove_draft_corpus = _blocking(AdminMethods.remove_draft_corpus)
    init_weight_transfer_engine = _blocking(AdminMethods.init_weight_transfer_engine)
    shutdown_weight_transfer_engine = _blocking(AdminMethods.shutdown_weight_transfer_engine)
    start_weight_update = _blocking(AdminMethods.start_weight_update)
    update_weights = _blocking(AdminMethods.update_weights)
    finish_weight_update = _blocking(AdminMethods.finish_weight_update)
    abort_weight_update = _blocking(AdminMethods.abort_weight_update)
    update_weight_version = _blocking(AdminMethods.update_weight_version)
    get_weight_version = _blocking(AdminMethods.get_weight_version)
    load_lora_adapter = _blocking(AdminMethods.load_lora_adapter)
    unload_lora_adapter = _blocking(AdminMethods.unload_lora_adapter)
    list_loras = _blocking(AdminMethods.list_loras)
    start_profile = _blocking(AdminMethods.start_profile)
    stop_profile = _blocking(AdminMethods.stop_profile)
    collective_rpc = _blocking(AdminMethods.collective_rpc)
    apply_model = _blocking(AdminMethods.apply_model)
    load_weights = _blocking(AdminMethods.load_weights)
    served_weights = _blocking(AdminMethods.served_weights)
    push = _blocking(AsyncLLM.push)

    @contextmanager
    def paused(self, mode: str = "keep") -> Iterator[None]:
        """Pause for the length of the block; resumes even if it raises."""
        pause = self._llm.paused(mode)
        self._wait(pause.__aenter__())
        try:
            yield
        finally:
            self._wait(pause.__aexit__(None, None, None))

    def get_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None with tokens_only."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used where none are given: what the model recommends."""
        return self._defaults

    def get_metrics(self) -> dict[str, int | list[int]]:
        """The engine's gauges and counters by name."""
        return msgspec.structs.asdict(self.stats)

    # --- inside ---

    @cached_property
    def _template(self) -> ChatTemplate:
        if self.tokenizer is None:
            raise RequestError("chat needs a tokenizer, and this LLM was made with tokens_only")
        server = self._llm.config.server
        return ChatTemplate(
            self.tokenizer, server.chat_template, server.default_chat_template_kwargs,
            special_tokens=server.special_tokens_in_content,
        )  # fmt: skip

    def _rendered(self, conversation: Sequence[Message], options: Mapping[str, Any]) -> ParsedPrompt:
        template, reader = self._template, self._llm.images
        slots = None
        if reader is not None:
            slots = image_slots(reader.kind, lambda token: template.tokenizer.decode([token], False))
            conversation = with_urls(conversation)
        ids = template.render(conversation, images=slots, **options)
        images = () if slots is None else tuple(slots.images)
        return ParsedPrompt(ids, template.tokenizer.decode(ids, False), images=images)

    def _generate(
        self, parsed: Sequence[ParsedPrompt], params: Params, use_tqdm: bool, lora_request: Adapters
    ) -> list[RequestOutput]:
        started = self._start(parsed, params, lora_request)
        with _progress(len(parsed), use_tqdm) as bar:
            return self._wait(_gather(started, bar, self.tokenizer))

    def _start(self, parsed: Sequence[ParsedPrompt], params: Params, lora_request: Adapters) -> list[Started]:
        chosen, adapters = self._params(params, len(parsed)), self._adapters(lora_request, len(parsed))
        streams = self._wait(self._open(parsed, chosen, adapters))
        return list(zip(streams, [prompt.text for prompt in parsed], chosen, strict=True))

    def _adapters(self, lora_request: Adapters, count: int) -> list[str]:
        """The adapters' names, "" for none; loads those with a path."""
        one = lora_request is None or isinstance(lora_request, LoRARequest | str)
        if not one and not isinstance(lora_request, Sequence):
            raise RequestError("lora_request must be a LoRARequest, a name, or a list of these", field="lora_request")
        requests: list[LoRARequest | str | None] = [lora_request] * count if one else list(lora_request)  # type: ignore
        if len(requests) != count:
            raise RequestError(f"there are {count} prompts and {len(requests)} lora requests", field="lora_request")
        for request in dict.fromkeys(requests):
            if isinstance(request, LoRARequest) and request.lora_path:
                self._wait(self._llm.add_lora(request))
        return [adapter_name(request) for request in requests]

    def _params(self, params: Params, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [typed(SamplingParams, params or self._defaults)] * count
        if not isinstance(params, Sequence):
            raise RequestError(
                f"sampling_params must be SamplingParams, or a list with one for each prompt, got {params!r}",
                field="sampling_params",
            )
        if len(params) != count:
            raise RequestError(f"there are {count} prompts and {len(params)} sampling_params", field="sampling_params")
        return [typed(SamplingParams, value) for value in params]

    async def _open(
        self, parsed: Sequence[ParsedPrompt], params: Sequence[SamplingParams | PoolingParams],
        adapters: Sequence[str], text: bool = True,
    ) -> list[Stream]:  # fmt: skip
        """Start them all, or none."""
        text = text and self.tokenizer is not None
        async with AsyncExitStack() as stack:
            streams = []
            for prompt, sampling, adapter in zip(parsed, params, adapters, strict=True):
                token_prompt = await self._llm.with_images(prompt.ids, prompt.images)
                if prompt.second >= 0:
                    token_prompt = msgspec.structs.replace(token_prompt, second=prompt.second)
                stream = self._llm.stream(
                    token_prompt, sampling, stream=False, text=text,
                    cache_salt=prompt.cache_salt, lora_request=adapter, draft_token_ids=prompt.draft_token_ids,
                )  # fmt: skip
                streams.append(await stack.enter_async_context(stream))
            stack.pop_all()
        return streams

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run in the loop's thread and wait; Ctrl-C cancels it."""
        if not self._close.alive or os.getpid() != self._owner:
            work.close()
            closed = not self._close.alive
            raise EngineDead("this LLM has been closed" if closed else "a forked process must make its own LLM")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while not futures.wait((future,), SIGNAL_SECONDS).done:
                pass
            return future.result()
        except EngineDead as error:  # its owner may know why, unlike a server's clients
            if not error.private:
                raise
            shown = error.again()
            shown.args = (f"{error.message}: {error.private}",)
            raise shown from None
        finally:
            future.cancel()  # does nothing to one that is done

    def close(self) -> None:
        """End the engine; a second time does nothing."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _progress(count: int, shown: bool) -> Any:
    return tqdm(total=count, disable=not shown, desc="requests", unit="req")


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def _close(owner: int, llm: AsyncLLM, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """End the engine and the loop: on `close`, when collected, or at exit."""
    if os.getpid() != owner:  # a fork has no loop thread, and the engine is not its own
        return
    try:
        asyncio.run_coroutine_threadsafe(llm.shutdown(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


async def _gather(started: Sequence[Started], bar: Any, tokenizer: Tokenizer | None) -> list[RequestOutput]:
    """All outputs; if one fails, the others are aborted."""
    async with AsyncExitStack() as stack:
        tasks = []
        for stream, _, _ in started:
            await stack.enter_async_context(stream)
            tasks.append(asyncio.ensure_future(_finish(stream, bar)))
            stack.callback(tasks[-1].cancel)
        results = await asyncio.gather(*tasks)
    return [request_output(*request, done, tokenizer) for request, done in zip(started, results, strict=True)]


async def _finish(stream: Stream, bar: Any) -> list[ChoiceOutput]:
    done = merge([delta async for delta in stream])
    bar.update(1)
    return done
