"""Threads that wake promptly: their scheduling policy in the kernel.  Ends of other processes, as hangups."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import pytest

from tests.needs import TIME_SLICES, time_slice
from tokserve.base import processes
from tokserve.base.processes import SHORT_SLICE, wait_for_hangup, wake_promptly

END = "import socket, sys\ns = socket.socket(fileno=int(sys.argv[1]))\ns.sendall(b'x')\nsys.stdin.read()\n"


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


def waiting(channel: socket.socket) -> threading.Thread:
    thread = threading.Thread(target=wait_for_hangup, args=[channel.fileno()], daemon=True)
    thread.start()
    return thread


def test_the_end_of_a_process_is_a_hangup_and_what_it_sends_is_not() -> None:
    """serving-faults F17."""
    near, far = socket.socketpair()
    with near, far:
        command = [sys.executable, "-S", "-c", END, str(far.fileno())]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[far.fileno()])
        far.close()
        thread = waiting(near)
        assert near.recv(1) == b"x" and thread.is_alive()
        process.kill()
        process.communicate()
        thread.join(60)
        assert not thread.is_alive()


def test_a_closed_end_is_a_hangup_even_where_something_was_not_read() -> None:
    near, far = socket.socketpair()
    with near:
        far.sendall(b"unread")
        thread = waiting(near)
        far.close()
        thread.join(60)
        assert not thread.is_alive()
