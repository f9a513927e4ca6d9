"""Threads that wake promptly: what the kernel knows of them."""

from __future__ import annotations

import ctypes
import os
import platform
import threading

import pytest

from tokserve import processes
from tokserve.processes import SCHED_SETATTR, SHORT_SLICE, wake_promptly


def time_slice(thread: int = 0) -> int:
    """Nanoseconds of a thread's time slice."""
    attr = processes._SchedAttr()
    number = SCHED_SETATTR[platform.machine()][1]
    assert not ctypes.CDLL(None).syscall(number, thread, ctypes.byref(attr), ctypes.sizeof(attr), 0)
    return int(attr.runtime)


def has_slices() -> bool:
    return platform.machine() in SCHED_SETATTR and time_slice() > 0


@pytest.mark.skipif(not has_slices(), reason="Linux 6.12 and newer have time slices of threads")
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


@pytest.mark.skipif(not has_slices(), reason="Linux 6.12 and newer have time slices of threads")
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
