"""Where masks are computed: quick ones by the loop, others by threads; no error stops either."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from tokserve.engine import following as module
from tokserve.engine.following import Following
from tokserve.engine.request import Request

LONG = 60.0  # seconds, of which none passes unless something is wrong


class Follower:
    """Computes its mask by a call.  `begun`: it has had one before."""

    def __init__(self, work: Callable[[], object], *, slow: bool, begun: bool) -> None:
        self.due = True
        self.slow = slow
        self.begun = begun
        self._work = work

    def look(self) -> None:
        self._work()

    def done(self) -> None:
        self.due = False


class Masks(Following):
    """With a `patience` that no test runs out of, and a `wait` for the masks that the loop does not wait for."""

    def __init__(self) -> None:
        self.woken = threading.Semaphore(0)
        super().__init__(self.woken.release)
        self.patience = LONG

    def wait(self, count: int) -> list[Request]:
        done = self.done()
        while len(done) < count:
            assert self.woken.acquire(timeout=LONG)
            done += self.done()
        return done


def following(work: Callable[[], object] = lambda: None, *, slow: bool = False, begun: bool = False) -> Request:
    request = cast(Any, object.__new__(Request))
    request.rid = "a#0"
    request.follower = Follower(work, slow=slow, begun=begun)
    return cast(Request, request)


@pytest.mark.parametrize(("slow", "begun"), [(False, True), (False, False), (True, True)])
def test_an_error_that_nobody_foresaw_holds_up_no_other_mask(slow: bool, begun: bool) -> None:
    masks = Masks()

    def fail() -> None:
        raise ZeroDivisionError

    try:
        for _ in range(3):
            broken, whole = following(fail, slow=slow, begun=begun), following(slow=slow, begun=begun)
            masks.advance([broken, whole])
            assert (masks.wait(2) if slow else masks.done()) == [broken, whole]
            assert not masks
    finally:
        masks.close()


def test_the_loop_computes_quick_masks_itself_but_a_request_s_first() -> None:
    masks = Masks()
    threads: list[threading.Thread] = []
    requests = [following(lambda: threads.append(threading.current_thread()), begun=begun) for begun in (True, False)]
    try:
        masks.advance(requests)
        assert set(masks.done()) == set(requests) and not masks
        assert threads[0] is threading.current_thread() is not threads[1]
    finally:
        masks.close()


def test_a_loop_that_was_held_up_leaves_masks_to_the_thread_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REST", 1e9)
    masks = Masks()
    here: list[bool] = []
    made = [
        following(lambda: here.append(threading.current_thread() is threading.main_thread()), begun=True)
        for _ in range(3)
    ]
    try:
        masks.patience = -LONG  # the first takes longer
        masks.advance(made[:2])
        assert set(masks.wait(2)) == set(made[:2])
        masks.patience = LONG
        masks.advance(made[2:])
        assert masks.done() == made[2:] and here == [True, False, False]
    finally:
        masks.close()


def test_no_mask_may_be_used_before_the_loop_has_heard_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    masks, computed, go_on = Masks(), threading.Event(), threading.Event()
    tell = masks._on_done

    def hold_up(request: Request) -> None:
        computed.set()
        assert go_on.wait(LONG)
        tell(request)

    monkeypatch.setattr(masks, "_on_done", hold_up)
    request = following()
    try:
        masks.patience = -LONG  # the loop does not wait
        masks.advance([request])
        assert computed.wait(LONG)
        assert masks.done() == [] and masks and not request.may_draw
        go_on.set()
        assert masks.wait(1) == [request] and not masks and request.may_draw
    finally:
        go_on.set()
        masks.close()
