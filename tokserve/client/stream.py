"""The outputs of one request as they come, and what the client says of it: accepted, refused, given up.

Knows nothing of how messages travel; whoever owns the request releases it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Protocol

from tokserve.client.inputs import Prepared
from tokserve.client.outputs import Completion, Delivery, merge
from tokserve.errors import RequestError
from tokserve.messages import unpack_ids


class Owner(Protocol):
    """Who has sent the request to the engine."""

    def release(self, delivery: Delivery) -> None:
        """Abort what has not ended."""

    def release_soon(self, delivery: Delivery) -> None:
        """As `release`, from any thread."""


class Submission:
    """The streams of one `submit`, which are accepted or refused together, and the engine's word on it."""

    def __init__(self, deliveries: Sequence[Delivery]) -> None:
        self.deliveries = deliveries
        self.verdict: asyncio.Future[RequestError | None] = asyncio.get_running_loop().create_future()

    def settle(self, error: RequestError | None) -> None:
        """The word is here."""
        if not self.verdict.done():
            self.verdict.set_result(error)


class Stream:
    """The outputs of one request: iterate over `Completion` deltas of all its choices as they come.

    Who must not wait uses `take`, `ended` and `listen` instead.  Closing or dropping it before its end aborts what
    has not ended.  A cancelled wait for the next delta loses nothing.
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
        """Wait for the engine's word on the request.  Raises Conflict, QueueFull and the other errors of a refusal.

        Those who go straight to the deltas meet a refusal there.
        """
        error = await asyncio.shield(self._submission.verdict)
        if error is not None:
            raise error

    def __aiter__(self) -> AsyncIterator[Completion]:
        return self

    async def __anext__(self) -> Completion:
        delta = await self._delivery.fetch()
        if delta is None:
            raise StopAsyncIteration
        return delta

    def take(self) -> Iterator[Completion]:
        """The deltas that there are now.  Raises EngineDead, after them."""
        return self._delivery.take()

    @property
    def ended(self) -> bool:
        """Nothing more will come."""
        return self._delivery.ended

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` in the event loop's thread whenever there is something new to `take`, or the engine is
        gone.  It must not raise."""
        self._delivery.listen(listener)

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
        if self._delivery.num_open:  # collection may happen anywhere, in any thread
            self._owner.release_soon(self._delivery)


async def collect(stream: Stream) -> list[Completion]:
    """The whole request: one completion per choice, by index."""
    async with stream:
        return merge([delta async for delta in stream])
