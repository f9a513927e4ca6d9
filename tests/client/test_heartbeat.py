"""Conditions under which an engine counts as hung, with a simulated clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tokserve.client import heartbeat
from tokserve.client.heartbeat import MAX_INTERVAL, Heartbeat


class Timer:
    """What `call_later` returns."""

    def __init__(self, due: float, call: Callable[[], object]) -> None:
        self.due, self.call, self.cancelled = due, call, False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """A loop that has one timer and no time of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timer = Timer(0.0, lambda: None)

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[[], object]) -> Timer:
        assert self.timer.cancelled or self.timer.due <= self.now
        self.timer = Timer(self.now + seconds, call)
        return self.timer

    def beat(self, late: float = 0.0) -> None:
        """Advance the clock to the timer's time and run its callback."""
        assert not self.timer.cancelled
        self.now = self.timer.due + late
        self.timer.call()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    loop = Clock()
    monkeypatch.setattr(heartbeat.asyncio, "get_running_loop", lambda: loop)
    return loop


def heart(timeout: float) -> tuple[Heartbeat, list[str]]:
    events: list[str] = []
    return Heartbeat(timeout, lambda: events.append("ask"), lambda: events.append("hung")), events


def test_a_responding_engine_is_pinged_repeatedly(clock: Clock) -> None:
    beating, events = heart(8.0)
    assert beating.silence == 0.0 and not beating.hung
    beating.start()
    for _ in range(20):
        beating.answered()
        clock.beat()
    assert events == ["ask"] * 21 and clock.now == 140.0 and not beating.hung


def test_silence_for_the_timeout_is_a_hang_until_the_answer_comes(clock: Clock) -> None:
    beating, events = heart(8.0)
    beating.start()
    for _ in range(4):
        clock.beat()
        assert not beating.hung
    assert beating.silence == 8.0
    clock.beat()
    assert beating.hung and events == ["ask"], "one beat alone may be this process' own fault"
    clock.beat()
    clock.beat()
    assert events == ["ask", "hung", "hung"]
    beating.answered()
    assert not beating.hung and beating.silence == 0.0
    clock.beat()
    assert events[3:] == ["ask"]


def test_a_late_beat_does_not_report_a_hung_engine(clock: Clock) -> None:
    beating, events = heart(8.0)
    beating.start()
    clock.beat(late=1000.0)
    assert beating.hung
    beating.answered()  # the reply was waiting in the socket
    clock.beat()
    clock.beat(late=1000.0)
    beating.answered()
    clock.beat()
    assert "hung" not in events


def test_a_new_engine_has_a_new_heartbeat(clock: Clock) -> None:
    beating, events = heart(8.0)
    beating.start()
    for _ in range(5):
        clock.beat()
    beating.stop()
    assert not beating.hung and clock.timer.cancelled
    beating.start()
    assert not beating.hung and events == ["ask", "ask"]


def test_the_interval_of_heartbeats_is_bounded(clock: Clock) -> None:
    beating, _ = heart(600.0)
    beating.start()
    assert clock.timer.due - clock.now == MAX_INTERVAL
