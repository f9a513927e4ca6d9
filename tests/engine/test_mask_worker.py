"""Quick masks are computed by the loop, others by threads; errors stop neither."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tokserve.features.grammar import mask_worker as module
from tokserve.features.grammar.followed import FollowedGrammar
from tokserve.features.grammar.mask_worker import MaskWorker

LONG = 60.0  # seconds; passes only if the test fails


class GrammarState:
    """Computes its mask by a call.  `has_bitmask`: it has had one before."""

    def __init__(self, work: Callable[[], object], *, is_slow: bool, has_bitmask: bool) -> None:
        self.pending = True
        self.is_slow = is_slow
        self.has_bitmask = has_bitmask
        self._work = work

    def compute_bitmask(self) -> None:
        self._work()

    def commit(self) -> None:
        self.pending = False


class Worker(MaskWorker):
    """A `MaskWorker` whose `patience` no test exhausts, with a `wait` for masks that the loop does not wait for."""

    def __init__(self) -> None:
        self.woken = threading.Semaphore(0)
        super().__init__(self.woken.release)
        self.patience = LONG

    def wait(self, count: int) -> list[FollowedGrammar]:
        computed = self.poll()
        while len(computed) < count:
            assert self.woken.acquire(timeout=LONG)
            computed += self.poll()
        return computed


def pending(
    work: Callable[[], object] = lambda: None, *, is_slow: bool = False, has_bitmask: bool = False
) -> FollowedGrammar:
    followed = FollowedGrammar(cast(Any, SimpleNamespace(request_id="a#0")), Future())
    followed.state = cast(Any, GrammarState(work, is_slow=is_slow, has_bitmask=has_bitmask))
    return followed


@pytest.mark.parametrize(("is_slow", "has_bitmask"), [(False, True), (False, False), (True, True)])
def test_an_unforeseen_error_holds_up_no_other_mask(is_slow: bool, has_bitmask: bool) -> None:
    worker = Worker()

    def fail() -> None:
        raise ZeroDivisionError

    try:
        for _ in range(3):
            requests = [pending(work, is_slow=is_slow, has_bitmask=has_bitmask) for work in (fail, lambda: None)]
            worker.submit(requests)
            assert set(worker.wait(2) if is_slow else worker.poll()) == set(requests)
            assert not worker
    finally:
        worker.close()


def test_the_loop_computes_quick_masks_itself_but_a_request_s_first() -> None:
    worker = Worker()
    threads: list[threading.Thread] = []
    requests = [
        pending(lambda: threads.append(threading.current_thread()), has_bitmask=has_bitmask)
        for has_bitmask in (True, False)
    ]
    try:
        worker.submit(requests)
        assert set(worker.poll()) == set(requests) and not worker
        assert threads[0] is threading.current_thread() is not threads[1]
    finally:
        worker.close()


def test_a_loop_that_was_held_up_leaves_masks_to_the_pool_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REST", 1e9)
    worker = Worker()
    inline: list[bool] = []
    requests = [
        pending(lambda: inline.append(threading.current_thread() is threading.main_thread()), has_bitmask=True)
        for _ in range(3)
    ]
    try:
        worker.patience = -LONG  # the first takes longer
        worker.submit(requests[:2])
        assert set(worker.wait(2)) == set(requests[:2])
        worker.patience = LONG
        worker.submit(requests[2:])
        assert worker.poll() == requests[2:] and inline == [True, False, False]
    finally:
        worker.close()


def test_a_slow_mask_does_not_hold_up_those_of_other_requests() -> None:
    worker = Worker()
    go_on = threading.Event()
    slow = [pending(lambda: go_on.wait(LONG), is_slow=True, has_bitmask=True) for _ in range(3)]
    surprising = pending(lambda: go_on.wait(LONG))
    try:
        worker.patience = 0.0
        worker.submit([*slow, surprising])
        worker.patience = LONG
        for _ in range(3):
            quick = [pending(), pending(has_bitmask=True)]
            worker.submit(quick)
            assert set(worker.poll()) == set(quick)
        assert worker and surprising.state is not None and surprising.state.pending
        go_on.set()
        assert set(worker.wait(4)) == {*slow, surprising} and not worker
    finally:
        go_on.set()
        worker.close()


def test_a_mask_is_used_only_once_the_loop_has_polled_it() -> None:
    worker, computed, go_on = Worker(), threading.Event(), threading.Event()

    def work() -> None:
        computed.set()
        assert go_on.wait(LONG)

    request = pending(work)
    try:
        worker.patience = 0.0  # the loop does not wait
        worker.submit([request])
        assert computed.wait(LONG)
        assert worker.poll() == [] and worker and not request.is_ready
        go_on.set()
        assert worker.woken.acquire(timeout=LONG)
        assert not request.is_ready
        assert worker.poll() == [request] and not worker and request.is_ready
    finally:
        go_on.set()
        worker.close()
