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

from tokserve.features.grammar.followed import FollowedGrammar
from tokserve.features.grammar.grammar import lower_priority

logger = logging.getLogger(__name__)

PATIENCE = 0.005  # seconds that a turn waits for masks; a mask that takes longer is slow (`slow_after`)
REST = 100  # times as long as masks have held up the loop, the pool computes them
THREADS = 4


class MaskWorker:
    """`submit` and `poll` are called by the loop.  `wake` is called, from any thread, when a late mask is computed."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.patience = self.slow_after = PATIENCE
        self.resting_until = 0.0  # `time.monotonic`; the loop computes no masks before
        self._wake = wake
        self._computed: list[FollowedGrammar] = []  # in the loop's thread
        self._futures: dict[FollowedGrammar, Future[None]] = {}
        self._quick = ThreadPoolExecutor(THREADS, "masks")  # its threads start with their first work
        self._slow = ThreadPoolExecutor(1, "slow-masks", lower_priority)

    def __bool__(self) -> bool:
        """Whether masks are being computed, or were not polled."""
        return bool(self._futures or self._computed)

    def submit(self, grammars: Iterable[FollowedGrammar]) -> None:
        """Compute the masks of these that are pending, unless that has begun, and wait up to the patience."""
        inline: list[FollowedGrammar] = []
        pooled: list[FollowedGrammar] = []
        is_resting = time.monotonic() < self.resting_until
        for followed in grammars:
            state = followed.state
            if state is None or not state.pending or followed in self._futures:
                continue
            if state.is_slow:
                self._start(self._slow, followed).add_done_callback(lambda _: self._wake())
            elif is_resting or not state.has_bitmask:
                pooled.append(followed)
            else:
                inline.append(followed)
        pooled += self._compute_inline(inline)
        if pooled:
            _, late = wait([self._start(self._quick, followed) for followed in pooled], timeout=max(0.0, self.patience))
            for future in late:
                future.add_done_callback(lambda _: self._wake())

    def _start(self, pool: ThreadPoolExecutor, followed: FollowedGrammar) -> Future[None]:
        future = self._futures[followed] = pool.submit(self._compute, followed)
        return future

    def _compute_inline(self, grammars: Sequence[FollowedGrammar]) -> Sequence[FollowedGrammar]:
        """Compute masks here until that has taken longer than the patience; returns the rest."""
        start = time.monotonic()
        for index, followed in enumerate(grammars):
            self._compute(followed)
            self._computed.append(followed)
            now = time.monotonic()
            if now > start + self.patience:
                self.resting_until = now + REST * (now - start)
                return grammars[index + 1 :]
        return ()

    def _compute(self, followed: FollowedGrammar) -> None:
        """Compute a mask, and note whether that was slow.  An unforeseen error ends this request and no other."""
        state = followed.state
        assert state is not None
        start = time.monotonic()
        try:
            state.compute_bitmask()
        except Exception:  # `state.error` says so already
            logger.exception("the mask of request %s could not be computed", followed.request.request_id)
        state.is_slow = time.monotonic() - start > self.slow_after

    def poll(self) -> list[FollowedGrammar]:
        """The grammars whose masks were computed, or have failed, since the last call; these may be used now."""
        grammars, self._computed = self._computed, []
        if self._futures:
            grammars += [followed for followed, future in self._futures.items() if future.done()]
        for followed in grammars:
            self._futures.pop(followed, None)
            assert followed.state is not None
            followed.state.commit()
        return grammars

    def close(self) -> None:
        """End the threads once they have computed what they have begun."""
        for pool in (self._quick, self._slow):
            pool.shutdown(wait=False, cancel_futures=True)
