"""The lanes that masks are computed in: an error ends one request's, and the others' are computed all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from tokserve.engine.following import Following
from tokserve.engine.request import Request

LONG = 60.0  # seconds, of which none passes unless something is wrong


class Follower:
    """Computes its mask by a call."""

    def __init__(self, work: Callable[[], object], *, slow: bool) -> None:
        self.due = True
        self.slow = slow
        self._work = work

    def look(self) -> None:
        try:
            self._work()
        finally:
            self.due = False


class Masks(Following):
    """With a `patience` that no test runs out of, and a `wait` for the masks that the loop does not wait for."""

    def __init__(self) -> None:
        self.woken = threading.Semaphore(0)
        super().__init__(self.woken.release)
        self.patience = LONG

    def wait(self, count: int) -> list[Request]:
        done: list[Request] = []
        while len(done) < count:
            assert self.woken.acquire(timeout=LONG)
            done += self.done()
        return done


def following(work: Callable[[], object] = lambda: None, *, slow: bool) -> Request:
    request = cast(Any, object.__new__(Request))
    request.follower = Follower(work, slow=slow)
    return cast(Request, request)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("slow", [False, True])
def test_an_error_that_nobody_foresaw_holds_up_no_other_mask(slow: bool) -> None:
    masks = Masks()
    died: list[threading.Thread] = []

    def fail() -> None:
        died.append(threading.current_thread())
        raise ZeroDivisionError

    try:
        for _ in range(3):
            broken, whole = following(fail, slow=slow), following(slow=slow)
            masks.advance([broken, whole])
            assert (masks.wait(2) if slow else masks.done()) == [broken, whole]
            assert not masks
    finally:
        masks.close()
        for thread in died:
            thread.join(LONG)
