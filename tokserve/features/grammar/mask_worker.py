"""Computes the masks of grammars: quick ones in the loop's thread, those that may be slow in a pool of threads.

A mask costs microseconds, or many milliseconds if a pattern is made for it, and nothing tells beforehand.  Handing a
quick mask to a thread costs more than the mask, so the loop computes those of requests whose last one was quick.  Once
that has held up the loop, the pool computes them for `REST` times as long, as it does every request's first.  The loop
waits for the pool up to its patience; a request whose mask is late sits out steps.  A request whose last mask was slow
is not waited for, and shares one thread of low priority with its like.  Which tokens are sampled does not depend on any
of that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from tokserve.engine.request import Request
from tokserve.features.grammar.grammar import lower_priority

logger = logging.getLogger(__name__)

PATIENCE = 0.005  # seconds that a turn waits for masks; a mask that takes longer is slow
REST = 100  # times as long as masks have held up the loop, the pool computes them
THREADS = 4


class MaskWorker:
    """`submit` and `poll` are called by the loop.  `wake` is called, from any thread, when a late mask is computed."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.patience = PATIENCE
        self.resting_until = 0.0  # `time.monotonic`; the loop computes no masks before
        self._wake = wake
        self._computed: list[Request] = []  # in the loop's thread
        self._futures: dict[Request, Future[None]] = {}
        self._quick = ThreadPoolExecutor(THREADS, "masks")  # its threads start with their first work
        self._slow = ThreadPoolExecutor(1, "slow-masks", lower_priority)

    def __bool__(self) -> bool:
        """Whether masks are being computed, or were not polled."""
        return bool(self._futures or self._computed)

    def submit(self, requests: Iterable[Request]) -> None:
        """Compute the masks of these that are pending, unless that has begun, and wait up to the patience."""
        inline: list[Request] = []
        pooled: list[Request] = []
        is_resting = time.monotonic() < self.resting_until
        for request in requests:
            grammar = request.grammar
            if grammar is None or not grammar.pending or request in self._futures:
                continue
            if grammar.is_slow:
                self._start(self._slow, request).add_done_callback(lambda _: self._wake())
            elif is_resting or not grammar.has_bitmask:
                pooled.append(request)
            else:
                inline.append(request)
        pooled += self._compute_inline(inline)
        if pooled:
            _, late = wait([self._start(self._quick, request) for request in pooled], timeout=max(0.0, self.patience))
            for future in late:
                future.add_done_callback(lambda _: self._wake())

    def _start(self, pool: ThreadPoolExecutor, request: Request) -> Future[None]:
        future = self._futures[request] = pool.submit(_compute, request)
        return future

    def _compute_inline(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Compute masks here until that has taken longer than the patience; returns the rest."""
        start = time.monotonic()
        for index, request in enumerate(requests):
            _compute(request)
            self._computed.append(request)
            now = time.monotonic()
            if now > start + self.patience:
                self.resting_until = now + REST * (now - start)
                return requests[index + 1 :]
        return ()

    def poll(self) -> list[Request]:
        """The requests whose masks were computed, or have failed, since the last call; the masks may be used now."""
        requests, self._computed = self._computed, []
        if self._futures:
            requests += [request for request, future in self._futures.items() if future.done()]
        for request in requests:
            self._futures.pop(request, None)
            assert request.grammar is not None
            request.grammar.commit()
        return requests

    def close(self) -> None:
        """End the threads once they have computed what they have begun."""
        for pool in (self._quick, self._slow):
            pool.shutdown(wait=False, cancel_futures=True)


def _compute(request: Request) -> None:
    """Compute a mask, and note whether that was slow.  An unforeseen error ends this request and no other."""
    grammar = request.grammar
    assert grammar is not None
    start = time.monotonic()
    try:
        grammar.compute_bitmask()
    except Exception:  # `grammar.error` says so already
        logger.exception("the mask of request %s could not be computed", request.request_id)
    grammar.is_slow = time.monotonic() - start > PATIENCE
