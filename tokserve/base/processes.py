"""Processes: how one has ended, in words, how a child ends with its parent, and threads that wake promptly."""

from __future__ import annotations

import ctypes
import os
import platform
import select
import signal
import sys
from contextlib import suppress

from tokserve.base import cgroups
from tokserve.base.memory import gib

_KILLS_BEFORE = cgroups.out_of_memory_kills()
PR_SET_PDEATHSIG = 1
SCHED_SETATTR = {"x86_64": (314, 315), "aarch64": (274, 275)}  # system calls: sched_setattr, sched_getattr
RESET_ON_FORK = 1  # a flag of theirs
SHORT_SLICE = 100_000  # nanoseconds, the least that Linux takes


def describe_exit(code: int) -> str:
    """What to say of a process with this exit code, which is negative for a signal: "was killed by SIGKILL", and
    whether that was probably for lack of memory."""
    if code >= 0:
        return f"ended with exit code {code}"
    if code == -signal.SIGKILL:
        return f"was killed by SIGKILL{_cause_of_kill()}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def see_log(reason: str) -> str:
    """The reason of an end, and where there is more: a process that was killed has logged nothing of it."""
    return reason if "SIGKILL" in reason else f"{reason}; its log says more"


def _cause_of_kill() -> str:
    """Kills of a group for lack of memory are counted; where there is no count, a limit makes one probable."""
    kills, limit = cgroups.out_of_memory_kills(), min(cgroups.memory_limits(), default=None)
    if kills == _KILLS_BEFORE and kills is not None:
        return ""
    within = "" if limit is None else f" (limit {gib(limit.limit)}, cgroup)"
    return f", {'perhaps' if kills is None and limit is None else 'probably'} out of memory{within}"


def end_with_parent(parent: int) -> bool:
    """Let the kernel kill this process when its parent ends, however it does, and even if this one is stopped.  Linux
    only, elsewhere nothing happens.  False: the process `parent` has ended already."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def wait_for_hangup(descriptor: int) -> None:
    """Wait until the other end of a socket or pipe is closed, by its process or with it; what arrives is not read."""
    poll = select.poll()
    poll.register(descriptor, 0)  # hangups and errors only
    poll.poll()


class _SchedAttr(ctypes.Structure):
    """`struct sched_attr`, as sched_setattr(2) has it."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def wake_promptly() -> None:
    """Ask the kernel for short time slices for the calling thread, which waits often and works briefly: when it wakes
    it then replaces a running thread with longer slices.  Its share of the processors stays the same.

    Threads and processes that it starts have the usual slices.  Linux 6.12 and newer, elsewhere nothing happens.
    """
    numbers = SCHED_SETATTR.get(platform.machine()) if sys.platform == "linux" else None
    if numbers is None:
        return
    setattr_number, getattr_number = numbers
    libc, attr = ctypes.CDLL(None), _SchedAttr()
    size = ctypes.sizeof(attr)
    if libc.syscall(getattr_number, 0, ctypes.byref(attr), size, 0) or attr.policy != os.SCHED_OTHER or attr.nice < 0:
        return  # someone has given it another priority, which the flag would not pass on
    attr.size, attr.flags, attr.runtime = size, RESET_ON_FORK, SHORT_SLICE
    libc.syscall(setattr_number, 0, ctypes.byref(attr), 0)
