"""The engine's connections to its ranks: who has joined, what each sends, and what is still awaited from whom.

A thread per rank receives.  The first rank that is lost ends all waiting with one error, which says how it ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from tokserve.base.errors import DeviceLost, RequestError, StartError
from tokserve.base.structs import UNREADABLE
from tokserve.features.ranks import merge
from tokserve.features.ranks.channel import (
    Broken,
    Channel,
    FromRank,
    Interrupt,
    Invoke,
    Loaded,
    Returned,
    StartRefused,
    Stepped,
    StoreGet,
    StoreSet,
    StoreValue,
    ToRank,
)
from tokserve.protocol.plan import StepResult, encode

logger = logging.getLogger(__name__)

BLAME = 0.5  # seconds in which a rank's end may turn out to be the cause of another's error


class Hub:
    """`channels`: of all ranks, by number.  `describe_end`: how a rank's process has ended; it may wait."""

    def __init__(self, channels: Mapping[int, Channel], describe_end: Callable[[int], str]) -> None:
        self._channels = dict(channels)
        self._describe_end = describe_end
        self._lock = threading.Lock()
        self._store: dict[str, bytes] = {}
        self._waiting_ranks: dict[str, list[int]] = {}  # ranks that wait for a key
        self.loaded = {rank: Future[Loaded]() for rank in channels}
        self._steps: deque[Future[StepResult]] = deque()
        self._calls: dict[int, RankCall] = {}
        self._last_call = 0
        self._num_stepped = 0  # steps whose results have come from the sampling rank
        self._failure: str | None = None
        self.closing = False
        self._wake: Callable[[], object] = lambda: None
        for rank in channels:
            threading.Thread(target=self._receive, args=(rank,), name=f"rank{rank}", daemon=True).start()

    # --- the engine's side ---

    def watch(self, wake: Callable[[], object]) -> None:
        """Call `wake` when a rank is lost."""
        self._wake = wake

    def check(self) -> None:
        if self._failure is not None:
            raise DeviceLost(self._failure)

    def send(self, message: ToRank, ranks: Sequence[int] | None = None) -> None:
        """Send to these ranks, or to all."""
        packed = encode(message)
        for rank in self._channels if ranks is None else ranks:
            with suppress(OSError):  # its thread hears of it
                self._channels[rank].send_encoded(packed)

    def result(self) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        with self._lock:
            self._steps.append(future)
        if self._failure is not None:
            self._fail_all()
        return future

    def invoke(
        self, method: str, args: Sequence[dict[str, Any]], *, background: bool = False, lane: str = ""
    ) -> Future[Any]:
        """Call a method on every rank with its arguments (see `Invoke`); the merged result, or an error of a rank."""
        with self._lock:
            self._last_call += 1
            call = self._calls[self._last_call] = RankCall(method, len(self._channels), background)
            number, after = self._last_call, self._num_stepped
        for rank in sorted(self._channels):
            self.send(Invoke(number, method, args[rank], background, lane, after), [rank])
        if self._failure is not None:
            self._fail_all()
        return call.future

    def close(self) -> None:
        """No more is expected of any rank."""
        self.closing = True
        for channel in self._channels.values():
            channel.close()

    # --- the threads' side ---

    def _receive(self, rank: int) -> None:
        channel = self._channels[rank]
        try:
            while True:
                self._take(rank, channel.from_rank())
        except (OSError, *UNREADABLE) as error:
            if not self.closing:
                why = self._describe_end(rank) if isinstance(error, OSError) else f"sent nonsense: {error}"
                self._on_lost(rank, f"rank {rank} {why}")

    def _take(self, rank: int, message: FromRank) -> None:
        if isinstance(message, Stepped):
            with self._lock:
                self._num_stepped += 1
                future = self._steps.popleft() if self._steps else None
            if future is not None:
                future.set_result(message.result)
        elif isinstance(message, Returned):
            self._on_returned(rank, message)
        elif isinstance(message, StoreSet | StoreGet):
            self._on_store(rank, message)
        elif isinstance(message, Loaded):
            self.loaded[rank].set_result(message)
        elif isinstance(message, StartRefused):
            self._refuse(rank, message.reason)
        elif isinstance(message, Broken):
            time.sleep(BLAME)  # a rank that was killed makes others fail
            self._on_lost(rank, f"rank {rank} died: {message.reason}")

    def _on_store(self, rank: int, message: StoreSet | StoreGet) -> None:
        with self._lock:
            if isinstance(message, StoreSet):
                self._store[message.key] = message.value
                waiting_ranks = self._waiting_ranks.pop(message.key, [])
            elif message.key in self._store:
                waiting_ranks = [rank]
            else:
                self._waiting_ranks.setdefault(message.key, []).append(rank)
                waiting_ranks = []
            value = self._store.get(message.key, b"")
        self.send(StoreValue(message.key, value), waiting_ranks)

    def _on_returned(self, rank: int, message: Returned) -> None:
        with self._lock:
            call = self._calls[message.call_id]
            call.replies[rank] = message
            complete = len(call.replies) == call.size
            if complete:
                del self._calls[message.call_id]
            failed = message.error is not None and call.background and not call.failed
            call.failed = call.failed or message.error is not None
        if failed and not complete:  # others may wait for a trainer who has given up
            self.send(Interrupt(), [other for other in self._channels if other not in call.replies])
        if complete:
            call.finish()

    def _refuse(self, rank: int, reason: str) -> None:
        with self._lock:
            waiting = [future for future in self.loaded.values() if not future.done()]
            self._failure = self._failure or f"rank {rank} cannot start: {reason}"
        for future in waiting:
            future.set_exception(StartError(reason))

    def _on_lost(self, rank: int, reason: str) -> None:
        with self._lock:
            first = self._failure is None
            self._failure = self._failure or reason
        if first:
            logger.error("%s", reason)
        self._fail_all()
        self._wake()

    def _fail_all(self) -> None:
        """End all waiting."""
        with self._lock:
            waiting: list[Future[Any]] = [*self._steps, *(call.future for call in self._calls.values())]
            waiting += [future for future in self.loaded.values() if not future.done()]
            self._steps.clear()
            self._calls.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(DeviceLost(self._failure))


class RankCall:
    """A call of all ranks, and what has come back."""

    def __init__(self, method: str, size: int, background: bool) -> None:
        self.method, self.size, self.background = method, size, background
        self.replies: dict[int, Returned] = {}
        self.failed = False
        self.future: Future[Any] = Future()

    def finish(self) -> None:
        """Resolve the future: all replies are there."""
        replies = [self.replies[rank] for rank in sorted(self.replies)]
        errors = [error for reply in replies if (error := reply.exception()) is not None]
        if errors:  # one that is the request's own fault says more than what followed from it elsewhere
            errors.sort(key=lambda error: not isinstance(error, RequestError) or error.status >= 500)
            self.future.set_exception(errors[0])
            return
        try:
            self.future.set_result(merge.results(self.method, [reply.result for reply in replies]))
        except RequestError as error:
            self.future.set_exception(error)
