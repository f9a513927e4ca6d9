"""What is told of requests and of the event loop: metrics, the request log and tracing implement these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from starlette.requests import Request

from tokserve.base.errors import RequestError
from tokserve.client.outputs import ChoiceOutput
from tokserve.protocol.params import SamplingParams

if TYPE_CHECKING:
    from tokserve.server.generation import Generation

Render = Callable[[ChoiceOutput], bytes]  # writes a delta


class Observer:
    """Observes one request for tokens.  Each method does nothing unless a subclass needs it."""

    def started(self) -> None:
        """Its body has been read; `closed` follows."""

    def accepted(self, generation: Generation, params: SamplingParams | None) -> None:
        """The engine has accepted it."""

    def refused(self, error: RequestError) -> None:
        """It was not accepted."""

    def timed(self, render: Render) -> Render:
        """The function that renders its events, or one in its place."""
        return render

    def finished(self, completion: ChoiceOutput, prompt_tokens: int, output_tokens: int) -> None:
        """A choice ended; `completion` is its last delta."""

    def aborted(self, cause: str, count: int) -> None:
        """`count` choices were given up before they finished."""

    def closed(self) -> None:
        """The request is over; nothing is called after this."""


class Measure(NamedTuple):
    """What a room exports as a metric: `values` by the value of `label`, or one value by ""; a gauge, or a counter."""

    name: str
    text: str
    values: Mapping[str, float]
    label: str = ""
    is_counter: bool = False


class ServerObserver:
    """Observes a server.  Each method does nothing unless a subclass needs it."""

    def observe(self, request: Request) -> list[Observer]:
        """The observers of a request that begins."""
        return []

    def unread(self, error: RequestError) -> None:
        """A request was refused before it began, such as one whose body cannot be read."""

    def lag(self, late: float) -> None:
        """The event loop woke a sleeper `late` seconds after its time."""

    async def measures(self) -> list[Measure]:
        """What is exported besides the metrics of requests and engines."""
        return []
