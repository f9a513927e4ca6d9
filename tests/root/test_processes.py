"""Threads that wake promptly: their scheduling policy in the kernel."""

from __future__ import annotations

import os
import threading

import pytest

from tests.needs import TIME_SLICES, time_slice
from tokserve import processes
from tokserve.processes import SHORT_SLICE, wake_promptly


@TIME_SLICES.skips()
def test_a_thread_wakes_promptly_and_those_that_it_starts_do_not() -> None:
    seen: list[int] = []

    def outer() -> None:
        wake_promptly()
        inner = threading.Thread(target=lambda: seen.append(time_slice()))
        seen.append(time_slice())
        inner.start()
        inner.join()

    before = time_slice()
    thread = threading.Thread(target=outer)
    thread.start()
    thread.join()
    assert seen == [SHORT_SLICE, before] and time_slice() == before


@TIME_SLICES.skips()
def test_a_policy_that_someone_chose_is_left_alone() -> None:
    policies: list[int] = []

    def idle() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        wake_promptly()
        policies.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=idle)
    thread.start()
    thread.join()
    assert policies == [os.SCHED_IDLE]


def test_an_unknown_machine_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SCHED_SETATTR", {})
    before = os.sched_getscheduler(0)
    wake_promptly()
    assert os.sched_getscheduler(0) == before
