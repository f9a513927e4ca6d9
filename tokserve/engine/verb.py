"""What a verb of the control plane is: a generator that the core resumes between steps.

It yields what it waits for (`STEP_BOUNDARY`, a future, or a condition) and returns its reply.  So a verb reads from top
to bottom, holds up nobody else, and its caller is answered when the state it asked for is there.  Knows no verb.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from typing import Any, Protocol

from tokserve.engine.request import Request

STEP_BOUNDARY = None  # no step is in flight, and none is planned before the verb goes on
Wait = Future[Any] | Callable[[], bool] | None
Verb = Generator[Wait, None, Any]


class Requests(Protocol):
    """The core's side: the requests that have not ended."""

    @property
    def live(self) -> Iterable[Request]:
        """All of them."""

    @property
    def num_received(self) -> int:
        """The number the next request will get."""

    def end_all(self, reason: str) -> None:
        """End them now, with what they have."""
