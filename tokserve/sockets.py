"""The files of Unix sockets: they outlive their process, so whoever finds one must know whether anybody listens.

Used by who listens and by who survives it; knows neither.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress


def remove_stale(path: str) -> None:
    """Unlink a socket's file that nobody listens on; one in use is left, and so is what is no socket."""
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
