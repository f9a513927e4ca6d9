"""HTTP requests in the engine.

A `Flight` is one HTTP request: a stream of completions per prompt, seen as one.  Nothing here knows a JSON shape but
usage's.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import msgspec

from tokserve.client.async_llm import Stream
from tokserve.client.inputs import bare_id
from tokserve.client.outputs import Completion


class PromptTokensDetails(msgspec.Struct):
    """The part of the prompt that was not computed again."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Observer(Protocol):
    """Who is told about the ends of choices (the metrics)."""

    def finished(self, completion: Completion, prompt_tokens: int, output_tokens: int) -> None:
        """A choice ended."""

    def aborted(self, cause: str, count: int) -> None:
        """`count` choices were given up without an end of their own."""


class Answered(Protocol):
    """What a reply says of its request besides the choices: a `Flight`, or a generation that took place elsewhere."""

    key: str
    n: int

    def usage(self) -> Usage:
        """Tokens read and written."""

    def prompt_ids(self, index: int = 0) -> list[int]:
        """The prompt of a choice."""


class Flight:
    """One HTTP request: its streams, iterated as one.  Choice index = prompt's place * n + the stream's index."""

    def __init__(self, request_id: str, n: int, observer: Observer, on_close: Callable[[], None]) -> None:
        self.request_id = request_id
        self.key = bare_id(request_id)
        self.n = n
        self.streams: list[Stream] = []
        self.adjust: Callable[[Completion], Completion] | None = None
        self.cause: str | None = "abort_disconnect"  # what it is, for the metrics, if this is closed before its end
        self.completion_tokens = 0
        self._observer = observer
        self._on_close = on_close
        self._lengths: dict[int, int] = {}  # choice -> tokens so far
        self._cached: dict[int, int] = {}
        self._ended = 0
        self._closed = False
        self._merged: _Merged | None = None

    @property
    def num_choices(self) -> int:
        """How many choices there will be."""
        return self.n * len(self.streams)

    @property
    def seed(self) -> int:
        """The seed of the first choice."""
        return self.streams[0].seed

    def prompt_ids(self, index: int = 0) -> list[int]:
        """The prompt of a choice."""
        return self.streams[index // self.n].prompt_ids

    def deltas(self) -> AsyncIterator[Completion]:
        """All choices' deltas, as they come; each is to be passed to `take`."""
        if len(self.streams) == 1:
            return aiter(self.streams[0])
        self._merged = _Merged(self.streams, self.n)
        return self._merged

    def take(self, delta: Completion) -> Completion:
        """The delta as this request wants it, noted for the usage figures and, at a choice's end, for the metrics."""
        if self.adjust is not None:
            delta = self.adjust(delta)
        index, tokens = delta.index, len(delta.token_ids)
        self.completion_tokens += tokens
        self._lengths[index] = length = self._lengths.get(index, 0) + tokens
        if delta.cached_tokens:
            self._cached[index] = delta.cached_tokens
        if delta.finish_reason is not None:
            self._ended += 1
            self._observer.finished(delta, len(self.prompt_ids(index)), length)
        return delta

    def usage(self) -> Usage:
        """Tokens so far.  The choices of a prompt read it once: what the least lucky of them found cached counts."""
        prompt = sum(len(stream.prompt_ids) for stream in self.streams)
        cached = 0
        for place in range(len(self.streams)):
            seen = [i for i in range(place * self.n, (place + 1) * self.n) if i in self._lengths]
            cached += min((self._cached.get(i, 0) for i in seen), default=0)
        output = self.completion_tokens
        return Usage(prompt, output, prompt + output, PromptTokensDetails(cached))

    async def close(self) -> None:
        """Forget the request and abort what has not ended; a second time does nothing."""
        if self._closed:
            return
        self._closed = True
        self._on_close()
        if self._merged is not None:
            self._merged.stop()
        for stream in self.streams:
            await stream.aclose()
        if self._ended < self.num_choices and self.cause is not None:
            self._observer.aborted(self.cause, self.num_choices - self._ended)
        self._ended = self.num_choices


class _Merged:
    """Several streams as they come, with the choices numbered through.  A cancelled wait loses nothing."""

    def __init__(self, streams: list[Stream], n: int) -> None:
        self._queue: asyncio.Queue[Completion | BaseException | None] = asyncio.Queue()
        self._running = len(streams)
        self._pumps = [asyncio.create_task(self._pump(stream, place * n)) for place, stream in enumerate(streams)]
        for pump in self._pumps:
            pump.add_done_callback(self._ended)

    async def _pump(self, stream: Stream, first: int) -> None:
        async for delta in stream:
            self._queue.put_nowait(dataclasses.replace(delta, index=first + delta.index))

    def _ended(self, pump: asyncio.Task[None]) -> None:
        self._queue.put_nowait(None if pump.cancelled() else pump.exception())

    def __aiter__(self) -> _Merged:
        return self

    async def __anext__(self) -> Completion:
        while self._running:
            item = await self._queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is not None:
                return item
            self._running -= 1
        raise StopAsyncIteration

    def stop(self) -> None:
        """Pull no more."""
        for pump in self._pumps:
            pump.cancel()
