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
from contextlib import AsyncExitStack, ExitStack, contextmanager
from typing import Any, NamedTuple, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from tokserve.base.errors import EngineDead, RequestError, invalid
from tokserve.client import sampling_params as python_params
from tokserve.client.async_llm import AsyncLLM, Stream
from tokserve.client.engine_args import options_of
from tokserve.client.generation_config import generation_defaults, log_what_is_not_followed
from tokserve.client.inputs import typed
from tokserve.client.model_view import ModelView
from tokserve.client.outputs import ChoiceOutput, merge
from tokserve.client.results import RequestOutput, ScoringRequestOutput, request_output
from tokserve.client.sampling_params import output_rules, sampling_of
from tokserve.features.beams.beam_methods import BeamSearchOutput, search
from tokserve.features.beams.beam_search import BeamSearchParams
from tokserve.features.chat.prompts import ParsedPrompt, Prompt, Tokenization, tokenization
from tokserve.features.lora.lora_requests import each_adapter
from tokserve.features.offline.blocking import BlockingControl
from tokserve.features.offline.conversations import Conversations, Messages, check_settings
from tokserve.features.pooling.columns import packed_vector
from tokserve.features.pooling.pooled_outputs import pooler_of
from tokserve.features.pooling.pooling_methods import PoolingMethods
from tokserve.protocol.adapter_choice import AdapterChoice, LoRARequest, adapter_name
from tokserve.protocol.messages import Ready, StepStats
from tokserve.protocol.params import PoolingParams, SamplingParams
from tokserve.text.tokenizer import Tokenizer

T = TypeVar("T")
Params = SamplingParams | Sequence[SamplingParams] | None
Adapters = AdapterChoice | Sequence[AdapterChoice]
Priorities = int | Sequence[int] | None
Progress = bool | Callable[..., Any]  # shown or not, or what makes the bar
SIGNAL_SECONDS = 1.0  # a signal that does not end the main thread's wait is seen after so long


class OfflineBatch(NamedTuple):
    """Requests before they start: the prompts that were texts, all prompts, and what each is sent with."""

    texts: list[str | None]
    prompts: list[ParsedPrompt]
    params: list[SamplingParams]
    adapters: list[AdapterChoice]
    priorities: list[int]


class Started(NamedTuple):
    """A request in flight: the prompt, if it was text, and what it was sent with."""

    stream: Stream
    prompt: str | None
    params: SamplingParams
    adapter: AdapterChoice = None


class LLM(PoolingMethods, BlockingControl):
    """An engine for scripts: `LLM("demo").generate("Hello")`.  Options are those of `Config.make`.

    Raises StartError if it cannot start, RequestError for a request that cannot be served, EngineDead.
    Close it, or use it in a `with`; otherwise it ends with the program.
    """

    def __init__(self, model: str = "demo", **options: Any) -> None:
        self._llm = AsyncLLM(model, **options)
        self._defaults = generation_defaults(self._llm.config.model)
        log_what_is_not_followed(self._llm.config.model)
        self._pooler = pooler_of(self._llm.config.model)
        self._conversations = Conversations(self._llm)
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

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> Self:
        """An engine with the options of an `EngineArgs`, or of a mapping."""
        return cls(**options_of(engine_args))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: Progress = True,
        lora_request: Adapters = None,
        priority: Priorities = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts: texts, lists of token ids, or mappings {"prompt": text} and
        {"prompt_token_ids": ids}, optionally with "cache_salt", "draft_token_ids" and "multi_modal_data":
        {"image": one or several}, each a Pillow image, a uint8 array [height, width, 3], the bytes of a file, or a URL,
        for each of which the prompt has one placeholder.  One `sampling_params` for all, or one each; default: what the
        model recommends.  If a request is refused, none is served.

        `lora_request`: the adapter for all prompts, or one (or None) each; a `LoRARequest` with a path is loaded if
        necessary, a name must be that of a loaded adapter.  `priority`: for all, or one each.  `tokenization_kwargs`:
        see `prompts.tokenization`.  `mm_processor_kwargs` is refused: it is an option of the engine.
        """
        parsed = self._read_for(prompts, tokenization_kwargs, mm_processor_kwargs)
        return self._generate(parsed, sampling_params, use_tqdm, lora_request, priority)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        lora_request: Adapters = None,
        priority: Priorities = None,
        use_tqdm: Progress = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Start requests and return their ids at once; `wait_for_completion` returns their outputs."""
        parsed = self._read_for(prompts, tokenization_kwargs, mm_processor_kwargs)
        return self._enqueue(parsed, sampling_params, lora_request, priority)

    def enqueue_chat(
        self,
        messages: Messages,
        sampling_params: Params = None,
        lora_request: Adapters = None,
        priority: Priorities = None,
        use_tqdm: Progress = True,
        **options: Any,
    ) -> list[str]:
        """Like `enqueue`, for what `chat` takes; `options`: those of `chat` that are about the template."""
        return self._enqueue(self._rendered(messages, **options), sampling_params, lora_request, priority)

    def _enqueue(
        self, parsed: Sequence[ParsedPrompt], sampling_params: Params, lora_request: Adapters, priority: Priorities
    ) -> list[str]:
        return self._wait(self._enqueued(self._batch(parsed, sampling_params, lora_request, priority)))

    async def _enqueued(self, batch: OfflineBatch) -> list[str]:
        started = await self._start(batch)
        self._queued += started
        return [request.stream.request_id for request in started]

    def wait_for_completion(self, output_type: Any = None, *, use_tqdm: Progress = True) -> list[RequestOutput]:
        """The outputs of everything enqueued since the last call, in order; `output_type` (vLLM's) has no effect."""
        with _progress(len(self._queued), use_tqdm) as bar:
            return self._wait(self._completed(bar))

    async def _completed(self, bar: Any) -> list[RequestOutput]:
        queued, self._queued = self._queued, []
        return await _gather(queued, bar, self.tokenizer)

    def score(
        self, data_1: Any, data_2: Any = None, *, lora_request: Adapters = None, **options: Any
    ) -> list[ScoringRequestOutput] | list[NDArray[np.float32]]:
        """Score with whatever the model makes: a model that pools gives vLLM's `score`, of pairs 1:1, 1:N or N:N, the
        cosine of their embeddings, or what a classifier with one label makes of both; `options`: use_activation,
        instruction, pooling_params, tokenization_kwargs, chat_template.

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
        self,
        sequences: Sequence[Sequence[int]],
        starts: Sequence[int] | None = None,
        *,
        lora_request: Adapters = None,
        **sampling: Any,
    ) -> list[NDArray[np.float32]]:
        """Logprobs of the ids of each sequence from position `starts[i]` on (default and least: 1), float32.

        `sampling`: what they depend on, as `logprobs_mode` and `temperature`.  A generated token's is the same number
        as when it was generated, to the bit.  A sequence may fill the context.
        """
        firsts = [1] * len(sequences) if starts is None else list(starts)
        if len(firsts) != len(sequences) or any(
            not 1 <= first <= len(ids) for first, ids in zip(firsts, sequences, strict=True)
        ):
            raise RequestError("starts needs a position of each sequence, from 1 to its length", field="starts")
        params = [
            SamplingParams(**sampling, max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=min(first, len(ids) - 1))
            for first, ids in zip(firsts, sequences, strict=True)
        ]
        prompts: list[Prompt] = [list(ids) for ids in sequences]
        outputs = self.generate(prompts, params, use_tqdm=False, lora_request=lora_request)
        scores = [
            np.empty(0, np.float32) if output.prompt_logprobs is None else output.prompt_logprobs.token_logprobs
            for output in outputs
        ]
        return [rows[: len(ids) - first] for rows, ids, first in zip(scores, sequences, firsts, strict=True)]

    def chat(
        self,
        messages: Messages,
        sampling_params: Params = None,
        use_tqdm: Progress = True,
        lora_request: Adapters = None,
        priority: Priorities = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Like `generate`, for a conversation or a list of conversations, rendered by the chat template.  Parts of a
        content may be images: {"type": "image", "image": one as in `generate`}, or the forms of HTTP.
        `chat_template_content_format` has no effect: how contents are shown follows from the template."""
        parsed = self._rendered(
            messages,
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        return self._generate(parsed, sampling_params, use_tqdm, lora_request, priority)

    def _rendered(
        self,
        messages: Messages,
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ParsedPrompt]:
        how = tokenization(tokenization_kwargs)
        parsed = self._conversations.prompts(
            messages,
            how,
            content_format=chat_template_content_format,
            settings=mm_processor_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template=chat_template,
            kwargs=chat_template_kwargs,
        )
        return self._shortened(parsed, how)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: Adapters = None,
        use_tqdm: Progress = False,
        concurrency_limit: int | None = None,
        priority: Priorities = None,
    ) -> list[BeamSearchOutput]:
        """The `params.beam_width` most probable outputs of each prompt that beam search finds, best first.
        `concurrency_limit`: prompts searched at a time; default: all.  One adapter and one priority for all prompts.
        Raises RequestError."""
        parsed = self._read(prompts)
        params = typed(BeamSearchParams, params)
        params.validate(self.ready, self.config.model.max_logprobs)
        if any(prompt.images for prompt in parsed):
            raise RequestError("beam search takes no images", field="prompts", code="unsupported")
        adapters = [adapter_name(one) for one in self._adapters(lora_request, len(parsed))]
        priorities = set(_priorities(priority, len(parsed)))
        if len(priorities) > 1:
            raise invalid("priority", "must be one for all prompts of a beam search", code="unsupported")
        limit = len(parsed) or 1 if concurrency_limit is None else concurrency_limit
        if type(limit) is not int or limit < 1:
            raise RequestError("concurrency_limit must be an integer of at least 1", field="concurrency_limit")
        first = next(iter(priorities), 0)
        with _progress(len(parsed), use_tqdm) as bar:
            return self._wait(search(self._llm, parsed, params, adapters, self.tokenizer, limit, bar.update, first))

    def _pool(
        self, parsed: Sequence[ParsedPrompt], task: PoolingParams, lora_request: Adapters, use_tqdm: Progress
    ) -> list[tuple[ParsedPrompt, Stream, ChoiceOutput]]:
        adapters = [adapter_name(one) for one in self._adapters(lora_request, len(parsed))]
        with _progress(len(parsed), use_tqdm) as bar:
            return self._wait(self._pooled(parsed, task, adapters, bar))

    async def _pooled(
        self, parsed: Sequence[ParsedPrompt], task: PoolingParams, adapters: Sequence[str], bar: Any
    ) -> list[tuple[ParsedPrompt, Stream, ChoiceOutput]]:
        """Each prompt with its stream and its only delta; all of them, or RequestError."""
        ended = []
        streams = await self._open(parsed, [task] * len(parsed), adapters, [0] * len(parsed), text=False)
        with ExitStack() as stack:
            for stream in streams:
                stack.callback(stream.close)
            for prompt, stream in zip(parsed, streams, strict=True):
                delta = await anext(stream)
                if not packed_vector(delta):
                    raise RequestError(delta.message or f"a request ended without a vector ({delta.stop_detail})")
                ended.append((prompt, stream, delta))
                bar.update(1)
        return ended

    # --- what it serves ---

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that prompts and outputs go through; None with tokens_only."""
        return self._llm.tokenizer

    def get_tokenizer(self) -> Any:
        """The model's tokenizer as a tokenizer of transformers; None with tokens_only."""
        return self._llm.get_tokenizer()

    @property
    def config(self) -> Any:
        return self._llm.config

    @property
    def model_config(self) -> ModelView:
        """The model under vLLM's names."""
        return self._llm.model_config

    @property
    def llm_engine(self) -> Self:
        """This object: what scripts call of vLLM's engine has the same name here."""
        return self

    @property
    def ready(self) -> Ready:
        """What the engine reported when it was ready: limits, KV capacity, bound ops."""
        return self._llm.ready

    @property
    def stats(self) -> StepStats:
        """The engine's latest gauges and counters."""
        return self._llm.stats

    def get_default_sampling_params(self) -> python_params.SamplingParams:
        """What is used where none are given: what the model recommends; a copy, which may be changed."""
        defaults: python_params.SamplingParams = python_params.SamplingParams(**msgspec.structs.asdict(self._defaults))
        return defaults

    def get_metrics(self) -> dict[str, int | list[int]]:
        """The engine's gauges and counters by name."""
        return msgspec.structs.asdict(self.stats)

    # --- inside ---

    def _read_for(
        self, prompts: Prompt | Sequence[Prompt], kwargs: Mapping[str, Any] | None, settings: Mapping[str, Any] | None
    ) -> list[ParsedPrompt]:
        check_settings(settings)
        how = tokenization(kwargs)
        return self._shortened(self._read(prompts, how), how)

    def _shortened(self, parsed: list[ParsedPrompt], how: Tokenization) -> list[ParsedPrompt]:
        return [how.shorten(prompt, self.ready.max_model_len - 1) for prompt in parsed]

    def _generate(
        self,
        parsed: Sequence[ParsedPrompt],
        params: Params,
        use_tqdm: Progress,
        lora_request: Adapters,
        priority: Priorities,
    ) -> list[RequestOutput]:
        batch = self._batch(parsed, params, lora_request, priority)
        with _progress(len(parsed), use_tqdm) as bar:
            return self._wait(self._generated(batch, bar))

    async def _generated(self, batch: OfflineBatch, bar: Any) -> list[RequestOutput]:
        return await _gather(await self._start(batch), bar, self.tokenizer)

    def _batch(
        self, parsed: Sequence[ParsedPrompt], params: Params, lora_request: Adapters, priority: Priorities
    ) -> OfflineBatch:
        given = self._params(params, len(parsed))
        sent = [sampling_of(value) for value in given]
        keeps = [Tokenization(keep=output_rules(value).keep) for value in given]
        context = self.ready.max_model_len - 1
        prompts = [how.shorten(prompt, context) for how, prompt in zip(keeps, parsed, strict=True)]
        priorities = _priorities(priority, len(parsed))
        adapters = self._adapters(lora_request, len(parsed))
        return OfflineBatch([p.text for p in parsed], prompts, sent, adapters, priorities)

    async def _start(self, batch: OfflineBatch) -> list[Started]:
        """Start all requests, or none.  It is awaited by what ends them: Ctrl-C between two calls of `_wait` would
        leave them running."""
        texts, prompts, params, adapters, priorities = batch
        streams = await self._open(prompts, params, [adapter_name(one) for one in adapters], priorities)
        return [Started(*one) for one in zip(streams, texts, params, adapters, strict=True)]

    def _adapters(self, lora_request: Adapters, count: int) -> list[AdapterChoice]:
        """One for each prompt; loads those with a path."""
        requests = each_adapter(lora_request, count)
        for request in dict.fromkeys(requests):
            if isinstance(request, LoRARequest) and request.path:
                self._wait(self._llm.add_lora(request))
        return requests

    def _params(self, params: Params, count: int) -> list[Any]:
        if params is None or isinstance(params, SamplingParams):
            return [self._defaults if params is None else params] * count
        if not isinstance(params, Sequence):
            raise RequestError(
                f"sampling_params must be SamplingParams, or a list with one for each prompt, got {params!r}",
                field="sampling_params",
            )
        if len(params) != count:
            raise RequestError(f"there are {count} prompts and {len(params)} sampling_params", field="sampling_params")
        return list(params)

    async def _open(
        self,
        parsed: Sequence[ParsedPrompt],
        params: Sequence[SamplingParams | PoolingParams],
        adapters: Sequence[str],
        priorities: Sequence[int],
        text: bool = True,
    ) -> list[Stream]:
        """Start them all, or none."""
        text = text and self.tokenizer is not None
        async with AsyncExitStack() as stack:
            streams: list[Stream] = []
            for prompt, sampling, adapter, priority in zip(parsed, params, adapters, priorities, strict=True):
                token_prompt = await self._llm.with_images(prompt.ids, prompt.images)
                if prompt.second >= 0:
                    token_prompt = msgspec.structs.replace(token_prompt, second=prompt.second)
                with _names_prompt(len(streams), len(parsed)):
                    stream = self._llm.stream(
                        token_prompt,
                        sampling,
                        stream=False,
                        text=text,
                        cache_salt=prompt.cache_salt,
                        lora_request=adapter,
                        draft_token_ids=prompt.draft_token_ids,
                        priority=priority,
                    )
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


def _priorities(priority: Priorities, count: int) -> list[int]:
    """One for all, or one each.  Raises RequestError."""
    if priority is None or not isinstance(priority, Sequence):
        listed: list[Any] = [0 if priority is None else priority] * count
    else:
        listed = list(priority)
    if len(listed) != count:
        raise invalid("priority", f"must have one for each of {count} prompts, got {len(listed)}")
    if not all(type(one) is int for one in listed):
        raise invalid("priority", f"must be an integer, or a list of them, got {priority!r}")
    return listed


def _progress(count: int, shown: Progress) -> Any:
    if callable(shown):
        return shown(total=count, desc="requests", unit="req")
    return tqdm(total=count, disable=not shown, desc="requests", unit="req")


@contextmanager
def _names_prompt(number: int, count: int) -> Iterator[None]:
    """Let an error about one of several prompts say which."""
    try:
        yield
    except RequestError as error:
        if count > 1 and error.field == "token_ids":
            error.field = f"prompts[{number}]"
            error.message = f"{error.field}: {error.message}"
            error.args = (error.message,)
        raise


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
        asyncio.run_coroutine_threadsafe(llm.close(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


async def _gather(started: Sequence[Started], bar: Any, tokenizer: Tokenizer | None) -> list[RequestOutput]:
    """All outputs; if one fails, the others are aborted."""
    async with AsyncExitStack() as stack:
        tasks = []
        for stream, *_ in started:
            await stack.enter_async_context(stream)
            tasks.append(asyncio.ensure_future(_finish(stream, bar)))
            stack.callback(tasks[-1].cancel)
        results = await asyncio.gather(*tasks)
    return [
        request_output(request.stream, request.prompt, request.params, done, tokenizer, request.adapter)
        for request, done in zip(started, results, strict=True)
    ]


async def _finish(stream: Stream, bar: Any) -> list[ChoiceOutput]:
    done = merge([delta async for delta in stream])
    bar.update(1)
    return done
