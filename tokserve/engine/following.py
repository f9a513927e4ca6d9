"""Computes what grammars allow next: quick masks within the loop's turn, slow ones beside it.

A mask costs microseconds, or many milliseconds if a pattern is made for it, and nothing tells beforehand.  Handing a
quick mask to another thread costs more than the mask, so the loop itself computes those of requests whose last one was
quick.  Once that has held it up, a thread computes them for `REST` times as long, as it does every request's first.
The loop waits a little for the thread; a request whose mask is not there by then sits out steps until it is, and
another thread takes over the rest.  Which tokens are drawn does not depend on any of that: a row's bits know nothing
of the batch.  Knows no steps.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from tokserve.engine.grammar import NICENESS
from tokserve.engine.request import Request

logger = logging.getLogger(__name__)

PATIENCE = 0.005  # seconds that a turn waits for masks,
SHARE = 0.0005  # and so many more for each request of it
SLOW = 0.005  # seconds; a request whose last mask took longer is not waited for
REST = 100  # times as long as masks have held up the loop, it leaves them to the thread


class Following:
    """`wake` is called, from any thread, when a mask is there that was not waited for."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.patience = PATIENCE
        self.resting_until = 0.0  # `time.monotonic`; the loop computes no masks before
        self._wake = wake
        self._pending: set[Request] = set()
        self._done: deque[Request] = deque()
        self._waiting = False  # the loop waits
        self._emptied: queue.SimpleQueue[None] = queue.SimpleQueue()  # by a quick lane that has nothing left to do
        self._quick: _Lane | None = None
        self._slow: _Lane | None = None

    def __bool__(self) -> bool:
        """Whether anybody's mask is still to come."""
        return bool(self._pending)

    def advance(self, requests: Iterable[Request]) -> None:
        """Begin with the masks of these that are due, unless that has begun, and wait a little."""
        here: list[Request] = []
        quick: list[Request] = []
        slow: list[Request] = []
        resting = time.monotonic() < self.resting_until
        for request in requests:
            follower = request.follower
            if follower is not None and follower.due and request not in self._pending:
                (slow if follower.slow else quick if resting or not follower.begun else here).append(request)
                self._pending.add(request)
        if slow:
            if self._slow is None:
                self._slow = _Lane(self._on_done, lambda: None, NICENESS)
            self._slow.begin(slow)
        quick += self._compute(here)
        if quick:
            if self._quick is None:
                self._quick = _Lane(self._on_done, self._on_emptied)
            self._waiting = True
            self._quick.begin(quick)
            if not self._wait(quick):
                self._quick = self._quick.replaced()
            self._waiting = False

    def _compute(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Compute masks here, until that has taken too long; returns those that are left."""
        began = time.monotonic()
        end = began + self.patience + SHARE * len(requests)
        for place, request in enumerate(requests):
            _look(request)
            self._done.append(request)
            now = time.monotonic()
            if now > end:
                self.resting_until = now + REST * (now - began)
                return requests[place + 1 :]
        return ()

    def _wait(self, requests: Sequence[Request]) -> bool:
        """Whether all these are done in time.  A thread that was replaced may say so too, of its own."""
        end = time.monotonic() + self.patience + SHARE * len(requests)
        with suppress(queue.Empty):
            while True:
                self._emptied.get(timeout=max(0.0, end - time.monotonic()))
                if set(requests).issubset(self._done.copy()):
                    return True
        return False

    def done(self) -> list[Request]:
        """Those whose masks are there, or have failed, since the last call."""
        found = []
        with suppress(IndexError):
            while True:
                found.append(self._done.popleft())
        for request in found:
            if request.follower is not None:
                request.follower.done()
        self._pending.difference_update(found)
        return found

    def close(self) -> None:
        """Let the threads end when they have nothing to do."""
        for lane in (self._quick, self._slow):
            if lane is not None:
                lane.close()
        self._quick = self._slow = None

    # --- the threads' side ---

    def _on_done(self, request: Request) -> None:
        self._done.append(request)
        if not self._waiting:  # else the loop looks after it has waited
            self._wake()

    def _on_emptied(self) -> None:
        self._emptied.put(None)


class _Lane:
    """A thread that computes masks, one after the other."""

    def __init__(self, on_done: Callable[[Request], None], on_emptied: Callable[[], None], niceness: int = 0) -> None:
        self._on_done = on_done
        self._on_emptied = on_emptied
        self._due: deque[Request] = deque()
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False: the end
        self._thread = threading.Thread(target=self._run, args=(niceness,), name="masks", daemon=True)
        self._thread.start()

    def begin(self, requests: Sequence[Request]) -> None:
        """These too."""
        self._due.extend(requests)
        self._calls.put(True)

    def replaced(self) -> _Lane:
        """Another in its place, which takes over all but the mask that is being computed."""
        other = _Lane(self._on_done, self._on_emptied)
        with suppress(IndexError):
            while True:
                other._due.append(self._due.popleft())
        other._calls.put(True)
        self.close()
        thread = self._thread.native_id
        assert thread is not None
        with suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, thread, NICENESS)
        return other

    def close(self) -> None:
        """The thread ends when it has nothing to do."""
        self._calls.put(False)

    def _run(self, niceness: int) -> None:
        if niceness:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
        while self._calls.get():
            with suppress(IndexError):
                while True:
                    request = self._due.popleft()
                    _look(request)
                    self._on_done(request)
            self._on_emptied()


def _look(request: Request) -> None:
    """Compute a mask, and note whether that was slow.  An error that nobody foresaw ends this request and no other."""
    follower = request.follower
    assert follower is not None
    began = time.monotonic()
    try:
        follower.look()
    except Exception:  # `follower.error` says so already
        logger.exception("the mask of request %s could not be computed", request.rid)
    follower.slow = time.monotonic() - began > SLOW
