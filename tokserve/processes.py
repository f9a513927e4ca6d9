"""How a process has ended, in words, and how a child ends with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress

PR_SET_PDEATHSIG = 1


def describe_exit(code: int) -> str:
    """What to say of a process with this exit code, which is negative for a signal: "was killed by SIGKILL"."""
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def end_with_parent(parent: int) -> bool:
    """Let the kernel kill this process when its parent ends, however it does, and even if this one is stopped.

    Linux only, elsewhere nothing happens.  False: the process `parent` has ended already.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent
