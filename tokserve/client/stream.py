"""`Stream`: the public handle of one request in flight.

Iterating over it gives `ChoiceOutput` deltas as they come.  Closing it or dropping the last reference to it aborts the
request; the state itself (`RequestState`) is also held by the table of requests in flight, so it cannot do that.
"""

from __future__ import annotations

from asyncio import shield
from collections.abc import AsyncIterator
from typing import Protocol

from tokserve.client.outputs import ChoiceOutput, merge
from tokserve.client.request_state import RequestState
from tokserve.protocol.prompt import unpack_ids


class Sender(Protocol):
    """The client that sent the request to the engine."""

    def release(self, request: RequestState) -> None:
        """Abort what has not ended."""

    def release_soon(self, request: RequestState) -> None:
        """Do what `release` does, from any thread."""

    def stall(self, request: RequestState, stalled: bool) -> None:
        """Let what has not ended make no tokens (`stalled`), or go on."""


class Stream:
    """The outputs of one request: iterate over the deltas of all its choices as they come.

    `take`, `ended` and `listen` (see `RequestState`) are the same without waiting.  Cancelling the wait for the next
    delta loses nothing.
    """

    def __init__(self, sender: Sender, state: RequestState) -> None:
        self._sender = sender
        self._state = state
        self._prompt_ids: list[int] | None = None
        self.request_id = state.request_id
        self.seed = state.seed
        self.num_choices = len(state.choices)
        self.prompt_len = state.prompt_len
        self.arrival = state.arrival  # seconds of the monotonic clock
        self.take = state.take  # bound here: a call less per delta
        self.listen = state.listen

    @property
    def placeholders(self) -> list[tuple[int, int]]:
        """Start and length of the prompt's features."""
        return self._state.placeholders

    @property
    def prompt_ids(self) -> list[int]:
        if self._prompt_ids is None:
            self._prompt_ids = unpack_ids(self._state.prompt.ids)
        return self._prompt_ids

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self._state.ended

    async def accepted(self) -> None:
        """Wait until the engine accepts the request.  Raises Conflict, QueueFull and the other errors of a refusal.
        Without this call, the first delta raises them."""
        error = await shield(self._state.admission)
        if error is not None:
            raise error.again()

    def __aiter__(self) -> AsyncIterator[ChoiceOutput]:
        return self

    async def __anext__(self) -> ChoiceOutput:
        delta = await self._state.next_delta()
        if delta is None:
            raise StopAsyncIteration
        return delta

    def stall(self, stalled: bool) -> None:
        """The consumer cannot take more for now (`stalled`), or can again: meanwhile no tokens are made.  The tokens
        are the same in the end."""
        self._sender.stall(self._state, stalled)

    def close(self) -> None:
        """Abort what has not ended; call it in the event loop's thread."""
        self._sender.release(self._state)
        self._state.listen(None)

    async def aclose(self) -> None:
        self.close()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._state.num_open:  # may be called in any thread
            self._sender.release_soon(self._state)


async def collect(stream: Stream) -> list[ChoiceOutput]:
    """The whole request: one output per choice, by index."""
    async with stream:
        return merge([delta async for delta in stream])
