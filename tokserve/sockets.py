"""Files of Unix sockets outlive their process: this removes one that nobody listens on any more.

Knows neither the listener nor who cleans up after it.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress


def remove_stale(path: str) -> None:
    """Unlink a socket's file that nobody listens on; a socket in use is left alone, and so is any other file."""
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
