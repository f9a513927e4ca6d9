"""`Stream`: one request in flight, with its outputs as they come, its acceptance by the engine, and its end.

Must not know how messages are sent: the request's owner sends the abort.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Protocol

from tokserve.client.inputs import Prepared
from tokserve.client.outputs import ChoiceOutput, Delivery, merge
from tokserve.errors import RequestError
from tokserve.messages import unpack_ids


class Owner(Protocol):
    """The client that sent the request to the engine."""

    def release(self, delivery: Delivery) -> None:
        """Abort what has not ended."""

    def stall(self, delivery: Delivery, stalled: bool) -> None:
        """Let what has not ended make no tokens (`stalled`), or go on."""

    def release_soon(self, delivery: Delivery) -> None:
        """As `release`, from any thread."""


class Submission:
    """The streams of one `submit`, which are accepted or refused together, and the engine's verdict."""

    def __init__(self, deliveries: Sequence[Delivery]) -> None:
        self.deliveries = deliveries
        self.verdict: asyncio.Future[RequestError | None] = asyncio.get_running_loop().create_future()

    def settle(self, error: RequestError | None) -> None:
        """Set the verdict: the error of a refusal, or None."""
        if not self.verdict.done():
            self.verdict.set_result(error)


class Stream:
    """The outputs of one request: iterate over `ChoiceOutput` deltas of all its choices as they come.

    `take`, `ended` and `listen` are the same without waiting.  Closing or dropping it early aborts the request.
    Cancelling the wait for the next delta loses nothing.
    """

    def __init__(self, owner: Owner, prepared: Prepared, delivery: Delivery, submission: Submission) -> None:
        self._owner = owner
        self._prepared = prepared
        self._delivery = delivery
        self._submission = submission
        self._prompt_ids: list[int] | None = None
        self.request_id = prepared.request_id
        self.seed = prepared.seed

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt's token ids."""
        if self._prompt_ids is None:
            self._prompt_ids = unpack_ids(self._prepared.prompt)
        return self._prompt_ids

    @property
    def num_choices(self) -> int:
        """How many choices there are."""
        return len(self._delivery.choices)

    async def accepted(self) -> None:
        """Wait until the engine accepts the request.  Raises Conflict, QueueFull and the other errors of a refusal.

        Without this call, the first delta raises them.
        """
        error = await asyncio.shield(self._submission.verdict)
        if error is not None:
            raise error

    def __aiter__(self) -> AsyncIterator[ChoiceOutput]:
        return self

    async def __anext__(self) -> ChoiceOutput:
        delta = await self._delivery.fetch()
        if delta is None:
            raise StopAsyncIteration
        return delta

    def take(self) -> Iterator[ChoiceOutput]:
        """The deltas available now; after them, raises the request's error, if any."""
        return self._delivery.take()

    @property
    def ended(self) -> bool:
        """Nothing more will come."""
        return self._delivery.ended

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` in the event loop's thread whenever there is something new to `take`, an error included.
        It must not raise."""
        self._delivery.listen(listener)

    def stall(self, stalled: bool) -> None:
        """The consumer cannot take more for now (`stalled`), or can again: meanwhile no tokens are made.  The tokens
        are the same in the end."""
        self._owner.stall(self._delivery, stalled)

    def close(self) -> None:
        """Abort what has not ended; call it in the event loop's thread."""
        self._owner.release(self._delivery)
        self._delivery.listen(None)

    async def aclose(self) -> None:
        """As `close`."""
        self.close()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._delivery.num_open:  # may be called in any thread
            self._owner.release_soon(self._delivery)


async def collect(stream: Stream) -> list[ChoiceOutput]:
    """The whole request: one completion per choice, by index."""
    async with stream:
        return merge([delta async for delta in stream])
