"""HTTP requests in the engine, by the ids that clients know.

A `Flight` is one HTTP request: a stream of completions per prompt, seen as one.  `Flights` finds them by id
(with or without a reply's prefix) and by group.  Nothing here knows a JSON shape but usage's.
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
from tokserve.errors import Conflict


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

    def rids(self) -> list[str]:
        """The ids of its requests in the client, one per prompt."""
        return [bare_id(stream.request_id) for stream in self.streams]

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
        """Forget the request and abort what has not ended."""
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


class Flights:
    """The HTTP requests in flight, by id and by group."""

    def __init__(self) -> None:
        self._by_id: dict[str, Flight] = {}
        self._groups: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, flight: Flight, group: str | None) -> None:
        """Register; raises `Conflict` if the id is in use."""
        key = flight.key
        if key in self._by_id:
            raise Conflict(f"request_id {flight.request_id!r} is in use by a request in flight", field="request_id")
        self._by_id[key] = flight
        if group is not None:
            self._groups.setdefault(group, set()).add(key)

    def remove(self, flight: Flight, group: str | None) -> None:
        """Forget; a second time does nothing."""
        if self._by_id.get(flight.key) is not flight:
            return
        del self._by_id[flight.key]
        if group is not None:
            self._groups[group].discard(flight.key)
            if not self._groups[group]:
                del self._groups[group]

    def ids(self, group: str | None = None) -> list[str]:
        """The ids of a group, or all, as their clients gave them."""
        keys = self._by_id if group is None else self._groups.get(group, ())
        return sorted(self._by_id[key].request_id for key in keys)

    def rids(self, given: str) -> list[str]:
        """The ids, in the client, behind an id that was given to /abort_requests; it need not be in flight here."""
        flight = self._by_id.get(bare_id(given))
        return [bare_id(given)] if flight is None else flight.rids()
